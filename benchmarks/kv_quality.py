"""What KV in eight bits costs in quality: `python -m benchmarks.kv_quality`, in about fifteen minutes of two cores.

The default model with its stored weights, each format of KV beside float32 in everything else alike:

    distributions  after every token of 8,192 tokens of this project's own pages, against those of float32
    answers        greedy ones of 96 tokens after passages of public-domain text: how long those of int8 stay those of
                   bfloat16, and, to compare with, those of bfloat16 those of float32
    needles        a sentence with a number somewhere in up to 7,500 tokens, and a question for the number

The pages are those of the commit that the result names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.environment import ROOT, write_result
from benchmarks.lib.load import PROSE
from benchmarks.quality import logprob_steps
from configs.arithmetic import ceil_div
from configs.facts import KvCacheDtype, Model
from configs.models import resolve
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from engine.native.library import NativeLibrary
from protocol.sampling import SamplingParams
from router.text.tokenizer import Tokenizer

PAGES = sorted(page for page in (ROOT / "docs" / "contracts").glob("*.md") if page.name != "kv_formats.md")
"""All but the one that tells of the results, which would change what it is measured with."""
TOKENS, STEP_ROWS = 8192, 512
RANGES = {"1 to 1,024": slice(0, 1024), "7,169 to 8,192": slice(7168, 8192)}
"""Positions that are reported by themselves: so many tokens of context they have at most."""
WAYS: dict[str, tuple[torch.dtype, KvCacheDtype]] = {
    "float32": (torch.float32, "auto"),
    "float32, KV in int8": (torch.float32, "int8"),
    "bfloat16": (torch.bfloat16, "auto"),
    "bfloat16, KV in int8": (torch.bfloat16, "int8"),
}
"""The type that is computed in, and the format of KV. The first one is what the others are compared with."""
FORMATS: tuple[KvCacheDtype, ...] = ("auto", "int8")
PARTING = (("bfloat16", "float32"), ("bfloat16, KV in int8", "bfloat16"))
"""Ways whose greedy answers are compared with those of another way."""
PASSAGES, PASSAGE_TOKENS, ANSWER_TOKENS = 24, 128, 96
NEEDLES = {1000: 10, 4000: 5, 7500: 5}
"""Trials by the length of the haystack in tokens; their depths are spread over it."""
BLOCK_SIZE = 16
GREEDY = SamplingParams(seed=0, max_tokens=1000, temperature=0.0)


@dataclass
class _Distance:
    """Sums over some positions."""

    count: int = 0
    surprise: float = 0.0
    divergence: float = 0.0
    same_best: int = 0

    def add(self, own_TV: Tensor, reference_TV: Tensor, targets_T: Tensor) -> None:
        self.count += len(targets_T)
        self.surprise -= own_TV.gather(1, targets_T[:, None]).sum().item()
        self.divergence += (reference_TV.exp() * (reference_TV - own_TV)).sum().item()
        self.same_best += int((own_TV.argmax(-1) == reference_TV.argmax(-1)).sum())

    def figures(self) -> dict[str, float]:
        return {
            "perplexity": round(math.exp(self.surprise / self.count), 4),
            "divergence": round(self.divergence / self.count, 6),
            "same_best_token": round(self.same_best / self.count, 4),
        }


@dataclass
class _Distances:
    ranges: dict[str, _Distance] = field(default_factory=lambda: {name: _Distance() for name in RANGES})


def main() -> None:
    """Measure, and write the tables."""
    model = resolve("smollm2")
    tokenizer = Tokenizer.build(model.tokenizer)
    with torch.inference_mode():
        distances = distributions(model, tokenizer.encode("\n\n".join(page.read_text() for page in PAGES))[: TOKENS + 1])
    found = {"answers": answers(model, tokenizer.encode(PROSE.read_text())), "needles": needles(model, tokenizer)}
    result = {"distributions": distances, **found}
    write_result("kv_quality", result, table(model.facts.name, result))


def distributions(model: Model, token_ids: list[int]) -> dict[str, dict[str, dict[str, float]]]:
    """How far every way's distributions are from the first one's, by way and range of positions."""
    assert len(token_ids) > TOKENS, "the pages are too short"
    found = {name: _Distances() for name in WAYS}
    targets_T = torch.tensor(token_ids[1 : TOKENS + 1])
    ways = [
        logprob_steps(
            model,
            token_ids[:TOKENS],
            dtype,
            "auto",
            STEP_ROWS,
            NativeLibrary.load(torch.get_num_threads(), dtype),
            kv_cache_dtype=kv,
        )
        for dtype, kv in WAYS.values()
    ]
    for number, steps in enumerate(zip(*ways, strict=True)):
        for name, own_TV in zip(WAYS, steps, strict=True):
            for range_, positions in RANGES.items():
                rows = range(number * STEP_ROWS, (number + 1) * STEP_ROWS)
                if positions.start <= rows.start and rows.stop <= positions.stop:
                    found[name].ranges[range_].add(own_TV, steps[0], targets_T[rows.start : rows.stop])
    return {name: {range_: each.figures() for range_, each in of.ranges.items()} for name, of in found.items()}


def answers(model: Model, token_ids: list[int]) -> dict[str, Any]:
    """After how many tokens greedy answers of each way part from those of the one that it is compared with."""
    step = (len(token_ids) - PASSAGE_TOKENS) // (PASSAGES - 1)
    passages = [token_ids[number * step :][:PASSAGE_TOKENS] for number in range(PASSAGES)]
    said = {}
    for name in {name: None for pair in PARTING for name in pair}:
        runner = _runner(model, *WAYS[name])
        said[name] = [_greedy(runner, passage, ANSWER_TOKENS) for passage in passages]
    return {
        "tokens": ANSWER_TOKENS,
        "same_until": {one: [same_until(*pair) for pair in zip(said[one], said[other], strict=True)] for one, other in PARTING},
    }


def same_until(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers of one length begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def needles(model: Model, tokenizer: Tokenizer) -> dict[str, dict[str, int]]:
    """Found needles by length and format, and the number of trials."""
    runners = {each: _runner(model, torch.bfloat16, each) for each in FORMATS}
    found: dict[str, dict[str, int]] = {}
    for length, trials in NEEDLES.items():
        counts = {"trials": trials} | dict.fromkeys(FORMATS, 0)
        for number, prompt in _haystacks(tokenizer, length, trials):
            for each, runner in runners.items():
                counts[each] += number in tokenizer.decode(_greedy(runner, prompt, 8))
        found[str(length)] = counts
    return found


def _haystacks(tokenizer: Tokenizer, length: int, trials: int) -> Iterator[tuple[str, list[int]]]:
    """The number that is hidden, and a prompt that asks for it."""
    prose = tokenizer.encode(PROSE.read_text())
    hay = (prose * ceil_div(length, len(prose)))[:length]
    for trial in range(trials):
        number, at = str(1009 + 977 * trial % 8990), int(length * (trial + 0.5) / trials)
        needle = tokenizer.encode(f"\n\nThe secret number of the lighthouse is {number}.\n\n")
        question = tokenizer.encode("\n\nWhat is the secret number of the lighthouse? The secret number of the lighthouse is")
        yield number, hay[:at] + needle + hay[at:] + question


def _runner(model: Model, dtype: torch.dtype, kv_cache_dtype: KvCacheDtype) -> ModelRunner:
    return ModelRunner.load(
        model.facts,
        dtype="float32" if dtype == torch.float32 else "bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        block_size=BLOCK_SIZE,
        num_kv_tokens=TOKENS,
        shared_weights=True,
    )


def _greedy(runner: ModelRunner, prompt: Sequence[int], count: int) -> list[int]:
    """The answer's first tokens."""
    table, said = range(ceil_div(len(prompt) + count, BLOCK_SIZE)), list[int]()
    for start in range(0, len(prompt), STEP_ROWS):
        part = prompt[start : start + STEP_ROWS]
        sampling = GREEDY if start + len(part) == len(prompt) else None
        (token,) = runner.execute([Chunk(part, start, table, sampling=sampling, num_generated=0)])
    while token is not None and len(said) < count:
        said.append(token.token_id)
        at = len(prompt) + len(said) - 1
        (token,) = runner.execute([Chunk([said[-1]], at, table, sampling=GREEDY, num_generated=len(said))])
    return said


def table(name: str, result: dict[str, Any]) -> str:
    """The three parts as Markdown."""
    lines = ["# What KV in eight bits costs in quality", "", f"{name}, weights as stored. Distances are from float32.", ""]
    lines += ["| computed in | positions | perplexity | divergence (nats) | same best token |", "|---|---|---|---|---|"]
    for way, of in result["distributions"].items():
        for range_, row in of.items():
            lines.append(
                f"| {way} | {range_} | {row['perplexity']:.3f} | {row['divergence']:.6f} | {row['same_best_token']:.1%} |"
            )
    lines += ["", f"| {PASSAGES} greedy answers of {ANSWER_TOKENS} tokens | like | to the end | the median one, tokens |"]
    lines += ["|---|---|---|---|"]
    for one, other in PARTING:
        until = result["answers"]["same_until"][one]
        lines.append(f"| {one} | {other} | {sum(each == ANSWER_TOKENS for each in until)} | {sorted(until)[len(until) // 2]} |")
    lines += [
        "",
        "| tokens around the needle | trials | found with bfloat16 KV | found with int8 KV |",
        "|---|---|---|---|",
    ]
    lines += [f"| {length} | {of['trials']} | {of['auto']} | {of['int8']} |" for length, of in result["needles"].items()]
    few = min(of["trials"] for of in result["needles"].values())
    lines += ["", f"Where all of {few} are found, up to {1 - 0.05 ** (1 / few):.0%} might still be missed, at 95 %."]
    return "\n".join([*lines, "", "Command: `python -m benchmarks.kv_quality`"])


if __name__ == "__main__":
    main()
