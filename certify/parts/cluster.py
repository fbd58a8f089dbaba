"""The part `cluster`: a real `tandem serve` with one prefill and two decode workers on the GPUs that there are.

Streams are computed alone and together. Then a decode worker is killed in the middle of them, and the prefill worker. Every
answer has to be whole, and the audit empty. At the end there is a short load.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from certify.findings import Device, Findings, PartSkipped
from certify.model_folder import END_ID, write_model
from certify.random_model import random_matrices
from certify.served import Answer, Served, ServeError, serving, stream
from certify.shapes import dtype_for, matrix_parameters, shape_for
from configs.facts import ModelFacts
from loadtest.bench import Finished, run_bench
from loadtest.options import BenchOptions
from protocol.messages.workers import VARIES

WORKERS = 3
START_S, RESTART_S = 120.0, 60.0
SHARE = 0.3
"""Part of one GPU or processor that each of three workers gets."""
VOCABULARY = 49_152
"""Smaller than Llama's: the files are written and read, and of random weights a larger one proves no more."""
FREE_FACTOR = 1.2
"""Free space that the temporary folder must have, as a multiple of the files' size."""


@dataclass(frozen=True)
class Scale:
    """Size of the model, the pools and the load that the cluster gets."""

    layers: int
    kv_cache_tokens: int
    streams: int
    tokens: int
    """Tokens of each answer."""
    kill_after: int
    """Tokens of the first answer after which a worker is killed."""
    load: BenchOptions


SCALES: dict[Device, Scale] = {
    "cuda": Scale(
        layers=4,
        kv_cache_tokens=65_536,
        streams=6,
        tokens=400,
        kill_after=60,
        load=BenchOptions(num_prompts=64, max_concurrency=16, random_input_len=512, random_output_len=128, ignore_eos=True),
    ),
    "cpu": Scale(
        layers=2,
        kv_cache_tokens=8192,
        streams=4,
        tokens=120,
        kill_after=30,
        load=BenchOptions(num_prompts=16, max_concurrency=4, random_input_len=64, random_output_len=32, ignore_eos=True),
    ),
}


def run(findings: Findings, device: Device) -> None:
    """Write a model, serve it, and see what happens to streams when workers die."""
    scale = SCALES[device]
    full = shape_for(device)
    facts = replace(full, num_layers=scale.layers, vocab_size=min(full.vocab_size, VOCABULARY), eos_token_ids=(END_ID,))
    with tempfile.TemporaryDirectory(prefix="tandem-certify-") as name:
        folder = Path(name)
        _check_room(folder, facts)
        matrices = random_matrices(torch.bfloat16, torch.device("cpu"), drawn_on=torch.device(device), seed=0)
        write_model(folder / "model", facts, matrices)
        with serving(configuration(folder / "model", device, scale, torch.cuda.device_count()), folder) as served:
            seconds = served.until(lambda: served.settled(WORKERS), START_S, "three workers are ready")
            findings.row("Cluster", {"what": "ready after, s", "value": seconds})
            for worker in served.workers():
                findings.row("Cluster", {"what": f"{worker['worker_id']}, {worker['role']}", "value": worker["arithmetic"]})
            asyncio.run(_streams(findings, served, scale))
            _audit(findings, served, "after the deaths")
            _load(findings, served, scale)
            _audit(findings, served, "after the load")
        code = served.process.returncode
        findings.check("the cluster stops when it is asked to", code == 0, f"exit code {code}")


def _check_room(folder: Path, facts: ModelFacts) -> None:
    """Raise PartSkipped if the model's files have no room."""
    num_bytes = torch.bfloat16.itemsize * (2 * facts.vocab_size * facts.hidden_size + matrix_parameters(facts))
    free = shutil.disk_usage(folder).free
    if free < FREE_FACTOR * num_bytes:
        raise PartSkipped(f"the model takes {num_bytes / 1e9:.1f} GB, and {folder.parent} has {free / 1e9:.1f}; set TMPDIR")


def configuration(model: Path, device: Device, scale: Scale, num_gpus: int) -> dict[str, Any]:
    """Return the cluster's configuration: workers share one GPU, or have those that there are."""
    shares = {"prefill": SHARE, "decode": SHARE}
    if num_gpus > 1:
        shares = {"prefill": 1.0, "decode": 1.0 if num_gpus >= WORKERS else 0.5}
    pools = {
        role: {
            "workers": count,
            "kv_cache_tokens": scale.kv_cache_tokens,
            "resources": {"GPU" if device == "cuda" else "CPU": shares[role]},
        }
        for role, count in (("prefill", 1), ("decode", WORKERS - 1))
    }
    return {
        "model": str(model),
        "device": device,
        "dtype": dtype_for(device)[1],
        "disaggregation": "always",
        "limits": {"shutdown_s": 2.0},
        **pools,
    }


async def _streams(findings: Findings, served: Served, scale: Scale) -> None:
    model = served.get("/v1/models")["data"][0]["id"]
    varies = any(worker["arithmetic"].endswith(VARIES) for worker in served.workers())
    async with httpx.AsyncClient(base_url=served.url, trust_env=False) as client:

        async def together(what: str, first: Callable[[int], None] = _ignore) -> list[Answer]:
            asked = [
                stream(client, model, prompt, scale.tokens, first if index == 0 else _ignore)
                for index, prompt in enumerate(prompts(what, scale.streams))
            ]
            return list(await asyncio.gather(*asked))

        await together("warm up ")
        alone = [await stream(client, model, prompt, scale.tokens) for prompt in prompts("", scale.streams)]
        _note(findings, "one after the other", scale, alone, alone)
        _note(findings, "together", scale, await together(""), alone)
        for role in ("decode", "prefill"):
            # Prompts that are cached need no prefill worker, and those that are computed need it before their first token.
            is_decode = role == "decode"
            killer = _Killer(served, role, scale.kill_after if is_decode else 1)
            answers = await together("" if is_decode else "other ", killer.on_tokens)
            findings.check(f"a {role} worker was killed", True, await killer.killed())
            await asyncio.to_thread(served.until, lambda: served.settled(WORKERS), RESTART_S, f"the {role} worker is back")
            _note(findings, f"a {role} worker killed", scale, answers, alone if is_decode else None)
            if is_decode and not varies:
                same = [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
                findings.check("the answers are those of an undisturbed cluster", same)


def _ignore(count: int) -> None:
    """Where nothing is to happen while an answer comes."""


def prompts(salt: str, count: int) -> list[str]:
    """Return so many prompts of different lengths, which begin differently for each salt."""
    return [f"{salt}Story {index}: once upon a time there was a fox who ran. " * (10 + 8 * index) for index in range(count)]


class _Killer:
    """Kills the busiest worker of a role once an answer has so many tokens."""

    def __init__(self, served: Served, role: str, after: int) -> None:
        self._served = served
        self._role = role
        self._after = after
        self._killing: asyncio.Task[str] | None = None

    def on_tokens(self, count: int) -> None:
        """Take note of an answer's length. The streams go on while the worker is looked up."""
        if self._killing is None and count >= self._after:
            self._killing = asyncio.create_task(asyncio.to_thread(self._kill))

    async def killed(self) -> str:
        """Say which worker was killed. Raises ServeError if the answer was too short."""
        if self._killing is None:
            raise ServeError(f"no {self._role} worker was killed: no answer had {self._after} tokens")
        return await self._killing

    def _kill(self) -> str:
        workers = [worker for worker in self._served.workers() if worker["role"] == self._role]
        busiest = max(workers, key=lambda worker: worker["running"] or 0)
        os.kill(busiest["pid"], signal.SIGKILL)
        return f"{busiest['worker_id']}, with {busiest['running']} streams"


def _note(findings: Findings, what: str, scale: Scale, answers: Sequence[Answer], alone: Sequence[Answer] | None) -> None:
    """Check that answers are whole. How far they equal those computed alone is a figure: a GPU's bits may vary."""
    errors = [answer.error for answer in answers if answer.error is not None]
    whole = not errors and all(len(answer.token_ids) == scale.tokens for answer in answers)
    lengths = ", ".join(str(len(answer.token_ids)) for answer in answers)
    findings.check(f"{what}: all answers are whole", whole, "; ".join(errors[:2]) or f"{lengths} tokens")
    row: dict[str, str | float | None] = {
        "streams": what,
        "first token, ms, mean": 1e3 * _mean([answer.times[0] for answer in answers if answer.times]),
        "between tokens, ms, mean": 1e3 * _mean([_pace(answer) for answer in answers if len(answer.times) > 1]),
        "longest gap, ms": 1e3 * max(answer.longest_gap for answer in answers),
        "equal to those alone up to token": None,
    }
    if alone is not None:
        row["equal to those alone up to token"] = ", ".join(
            str(_common(one.token_ids, other.token_ids)) for one, other in zip(answers, alone, strict=True)
        )
    findings.row("Streams", row)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _pace(answer: Answer) -> float:
    return (answer.times[-1] - answer.times[0]) / (len(answer.times) - 1)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens at the beginning are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _audit(findings: Findings, served: Served, when: str) -> None:
    leaks = served.get("/admin/audit")["leaks"]
    findings.check(f"{when} no KV block is held for nobody", not leaks, "; ".join(leak["message"] for leak in leaks[:3]))


def _load(findings: Findings, served: Served, scale: Scale) -> None:
    options = replace(scale.load, base_url=served.url)
    finished: Finished = asyncio.run(run_bench(options, lambda step: None, lambda count: None, lambda record: None))
    figures = finished.figures
    findings.check("under load every request is answered", figures["failed"] == 0, f"{figures['completed']} answers")
    row: dict[str, Any] = {
        "requests": options.num_prompts,
        "streams at a time": options.max_concurrency,
        "prompt": options.random_input_len,
        "answer": options.random_output_len,
    }
    for metric in ("ttft", "tpot"):
        row |= {f"{metric.upper()}, ms, {name}": figures[f"{name}_{metric}_ms"] for name in ("median", "p99")}
    findings.row("Load", row | {"output tokens/s": figures["output_throughput"], "client": finished.client.warning})
    for stage, values in finished.stages.items():
        findings.row(
            "Where the time of the load went",
            {"stage": stage, "mean, ms": values["mean_ms"], "share": f"{values['share']:.1%}"},
        )
