"""The part `peer`: the steps of vLLM on the same shape, its weights made up by vLLM itself, where it is installed.

A prefill is a request for one token. A decode step is one step of the engine once all sequences have their first token; vLLM's
own scheduling, sampling and output processing are part of it, as they are when it runs.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from certify.findings import Device, Findings, PartSkipped, Row

DECODE_STEPS, WARM_STEPS = 20, 3
MOST_ANSWERED = 256
"""Tokens that a sequence may answer: while many prompts are computed, the first ones go on."""
_MEMORY_SHARE = 0.85


def run(findings: Findings, device: Device) -> None:
    """Measure the same steps as the part `steps`. Raises PartSkipped where there is no vLLM."""
    if find_spec("vllm") is None:
        raise PartSkipped("vLLM is not installed")
    if device == "cpu":
        raise PartSkipped("vLLM is measured on GPUs alone")
    from certify.model_folder import config_of
    from certify.shapes import LLAMA_8B
    from certify.step_times import SIZES, measured_steps

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    import torch
    import vllm  # type: ignore[import-not-found, unused-ignore]

    sizes = SIZES[device]
    longest = max(*sizes.prefill_tokens, sizes.context + MOST_ANSWERED)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(LLAMA_8B)))
        llm = vllm.LLM(
            folder,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=longest + 1,
            max_num_seqs=max(sizes.decode_rows),
            max_num_batched_tokens=max(sizes.prefill_tokens),
            gpu_memory_utilization=_MEMORY_SHARE,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
    engine = Engine(llm.llm_engine, vllm.SamplingParams)
    for step in measured_steps(LLAMA_8B, sizes, torch.bfloat16, block_size=16):
        seconds = engine.decode_s(step.tokens, sizes.context) if step.is_decode else engine.prefill_s(step.tokens)
        row: Row = {"step": step.name, "ms": seconds * 1e3, "tokens/s": step.tokens / seconds}
        findings.row(f"Steps of vLLM {vllm.__version__}", row)


class Engine:
    """vLLM's engine, driven step by step."""

    def __init__(self, engine: Any, sampling: Any) -> None:
        self._engine = engine
        self._sampling = sampling
        self._names = itertools.count()

    def prefill_s(self, length: int) -> float:
        """Return the median time in seconds of a prompt of this length."""
        from certify.step_times import median_s

        def prefill() -> None:
            self._add(length, 1)
            self._drain()

        return median_s(prefill)

    def decode_s(self, rows: int, context: int) -> float:
        """Return the mean time in seconds of a step of so many sequences."""
        lengths = {self._add(context, MOST_ANSWERED): 0 for _ in range(rows)}
        while not all(lengths.values()):
            self._step(lengths)
        for _ in range(WARM_STEPS):
            self._step(lengths)
        before, began = sum(lengths.values()), time.perf_counter()
        for _ in range(DECODE_STEPS):
            self._step(lengths)
        seconds = time.perf_counter() - began
        made = sum(lengths.values()) - before
        self._engine.abort_request(list(lengths))
        self._drain()
        return seconds * rows / made

    def _add(self, length: int, max_tokens: int) -> str:
        from certify.step_times import token_ids

        name = str(next(self._names))
        sampling = self._sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": token_ids(length)}, sampling)
        return name

    def _step(self, lengths: dict[str, int]) -> None:
        """One step; the answers' lengths are kept up to date."""
        for output in self._engine.step():
            lengths[output.request_id] = len(output.outputs[0].token_ids)

    def _drain(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()
