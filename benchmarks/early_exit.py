"""Whether early exit of the model itself can pay as a draft model: `python -m benchmarks.early_exit`, on an idle machine.

The default model in its default format. Early exit would draft with the model's first layers, followed by its last norm and its
head. Two things decide: how often the best token after so many layers is the whole model's, and what the layers take.

Agreement is counted at every token of `benchmarks/texts/public_domain.txt`, and at every token of greedy answers of the model's
own, which begin with pieces of that text. Steps of one row are timed for each depth, and steps of all layers for the rows that
verify up to four drafts, by one thread and by two, in turns; the fastest of each counts. The gain that is predicted is that of
the best number of drafts, if each draft's chance were the agreement: tokens of a step over what its drafts and it take, in
steps without drafts. Nothing is counted for keeping account, and nothing for KV, which early exit would share.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.environment import operators, write_result
from benchmarks.lib.load import PROSE
from configs.arithmetic import ceil_div
from configs.facts import ModelFacts
from configs.models import resolve
from engine.batch import Chunk, ForwardBatch
from engine.memory.kv_pool import KVPool
from engine.models.decoder import Decoder, DecoderWeights
from engine.models.packing import WeightFormat
from engine.models.weights import load_weights
from engine.native.library import NativeLibrary
from engine.operators import step_factory
from engine.ranks.tensor_parallel import ALONE
from protocol.sampling import SamplingParams
from router.text.tokenizer import Tokenizer

DEPTHS = (3, 6, 10, 15, 20, 24, 27, 29)
"""Layers after which a draft would be taken, of 30."""
DRAFTS = (1, 2, 3, 4)
THREADS = (1, 2)
_ANSWERS, _PROMPT, _ANSWER = 8, 100, 96
_CONTEXT = 350
_REPEATS = 40
_BLOCK_SIZE = 16
_GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class Depth:
    """The first layers of the model, with its last norm and head, and a pool of their own."""

    decoder: Decoder
    pool: KVPool

    @classmethod
    def of(cls, facts: ModelFacts, weights: DecoderWeights, library: NativeLibrary | None, num_layers: int) -> Depth:
        """As many layers as that."""
        own = replace(facts, num_layers=num_layers)
        decoder = Decoder(own, replace(weights, layers=weights.layers[:num_layers]), step_factory(own, library), ALONE)
        return cls(decoder, KVPool.for_model(own, 4096, _BLOCK_SIZE, torch.bfloat16))

    def best_tokens(self, token_ids: Sequence[int]) -> Tensor:
        """The likeliest token after each of these."""
        found = []
        table = range(ceil_div(len(token_ids), _BLOCK_SIZE))
        for start in range(0, len(token_ids), 128):
            batch = ForwardBatch.build([Chunk(token_ids[start : start + 128], start, table, None, 0)], _BLOCK_SIZE)
            rows = torch.arange(len(batch.token_ids_T)).flip(0)
            logits_SV = self.decoder.forward(
                replace(batch, sample_rows_S=rows, sampled_chunks=(0,) * len(rows)), self.pool, None
            )
            assert logits_SV is not None
            found.append(logits_SV.argmax(-1).flip(0))
        return torch.cat(found)

    def seconds(self, num_rows: int) -> float:
        """Time of a step of so many rows of one sequence."""
        table = range(ceil_div(_CONTEXT + num_rows, _BLOCK_SIZE))
        chunks = [Chunk([50 + i], _CONTEXT + i, table, _GREEDY, 1, continues=i > 0) for i in range(num_rows)]
        began = time.perf_counter()
        self.decoder.forward(ForwardBatch.build(chunks, _BLOCK_SIZE), self.pool, None)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=list(THREADS))
    options = parser.parse_args()
    model = resolve("smollm2")
    text = Tokenizer.build(model.tokenizer).encode(PROSE.read_text())
    with torch.inference_mode():
        found = agreements(model.facts, text)
        timed = {threads: times(model.facts, threads) for threads in options.threads}
    gains = {
        f"{threads} threads": {depth: best_gain(own, depth, step_ms) for depth, (_, own) in found.items()}
        for threads, step_ms in timed.items()
    }
    result: dict[str, Any] = {
        "text_tokens": len(text),
        "agreement": {depth: {"text": on_text, "own answers": own} for depth, (on_text, own) in found.items()},
        "step_ms": timed,
        "predicted_gain": gains,
    }
    write_result(f"early_exit_{operators()}", result, table(model.facts, len(text), found, timed))


def loaded(facts: ModelFacts) -> tuple[DecoderWeights, NativeLibrary | None]:
    """The weights in their default format, for as many threads as torch has."""
    library = NativeLibrary.load(torch.get_num_threads(), torch.bfloat16)
    return load_weights(facts, WeightFormat(torch.bfloat16, "auto", library=library)), library


def agreements(facts: ModelFacts, text: list[int]) -> dict[int, tuple[float, float]]:
    """By depth: how often its best token is the whole model's, in the text and in the model's own answers."""
    weights, library = loaded(facts)
    whole = Depth.of(facts, weights, library, facts.num_layers)
    step = (len(text) - _PROMPT) // (_ANSWERS - 1)
    answers = [_continued(whole, text[begin : begin + _PROMPT]) for begin in range(0, _ANSWERS * step, step)]
    sequences = [text, *answers]
    expected = [whole.best_tokens(each) for each in sequences]
    found = {}
    for depth in DEPTHS:
        part = Depth.of(facts, weights, library, depth)
        same = [part.best_tokens(each) == best for each, best in zip(sequences, expected, strict=True)]
        own = torch.cat([each[_PROMPT - 1 :] for each in same[1:]])
        found[depth] = same[0].float().mean().item(), own.float().mean().item()
    return found


def _continued(whole: Depth, prompt: list[int]) -> list[int]:
    """The prompt and what the model says after it."""
    tokens, table = list(prompt), range(ceil_div(_PROMPT + _ANSWER, _BLOCK_SIZE))
    chunk = Chunk(tokens, 0, table, _GREEDY, 0)
    for _ in range(_ANSWER):
        logits_SV = whole.decoder.forward(ForwardBatch.build([chunk], _BLOCK_SIZE), whole.pool, None)
        assert logits_SV is not None
        tokens.append(int(logits_SV[0].argmax()))
        chunk = Chunk(tokens[-1:], len(tokens) - 1, table, _GREEDY, 1)
    return tokens


def times(facts: ModelFacts, threads: int) -> dict[str, float]:
    """Milliseconds of one row by depth, and of the rows of a step that verifies."""
    torch.set_num_threads(threads)
    weights, library = loaded(facts)
    whole = Depth.of(facts, weights, library, facts.num_layers)
    cases = {f"{depth} layers": (Depth.of(facts, weights, library, depth), 1) for depth in DEPTHS}
    cases |= {f"{rows} rows": (whole, rows) for rows in range(1, 2 + DRAFTS[-1])}
    rounds = [{name: part.seconds(rows) for name, (part, rows) in cases.items()} for _ in range(1 + _REPEATS)]
    return {name: min(each[name] for each in rounds[1:]) * 1e3 for name in cases}


def best_gain(agreement: float, depth: int, step_ms: dict[str, float]) -> float:
    """How many times as fast as without, with the best number of drafts."""
    plain, draft = step_ms["1 rows"], step_ms[f"{depth} layers"]
    return max(
        sum(agreement**i for i in range(drafts + 1)) * plain / (drafts * draft + step_ms[f"{1 + drafts} rows"])
        for drafts in DRAFTS
    )


def table(facts: ModelFacts, num_tokens: int, found: dict[int, tuple[float, float]], timed: dict[int, dict[str, float]]) -> str:
    """Markdown."""
    columns = " | ".join(f"a draft's share of a step, {threads} threads | predicted gain" for threads in timed)
    lines = [
        "# Early exit",
        "",
        f"{facts.name}, {facts.num_layers} layers, drafting with its first layers, last norm and head. How often their best "
        f"token is that of all layers: of {num_tokens} tokens of public-domain text, and of {_ANSWERS * _ANSWER} tokens of its "
        "own greedy answers. The predicted gain is that of up to four drafts in a step, by the second column.",
        "",
        f"| layers | same token, text | same token, own answers | {columns} |",
        f"|---|---|---|{'---|---|' * len(timed)}",
    ]
    for depth, (on_text, own) in found.items():
        cells = " | ".join(
            f"{ms[f'{depth} layers'] / ms['1 rows']:.2f} | {best_gain(own, depth, ms):.2f}" for ms in timed.values()
        )
        lines.append(f"| {depth} | {on_text:.1%} | {own:.1%} | {cells} |")
    threads = " ".join(map(str, timed))
    return "\n".join([*lines, "", f"Command: `python -m benchmarks.early_exit --threads {threads}`"])


if __name__ == "__main__":
    main()
