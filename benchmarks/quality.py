"""What each number format costs in quality: `python -m benchmarks.quality`.

The default model reads `benchmarks/texts/public_domain.txt` (Carroll, Austen, Lincoln, Melville) once per way of computing;
every token's distribution is compared with that of float32. Rows per step decide which weights are used (docs/engine.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.lib.environment import write_result
from benchmarks.lib.load import PROSE
from configs.arithmetic import ceil_div
from configs.facts import KvCacheDtype, Model
from configs.models import resolve
from engine.batch import Chunk, ForwardBatch
from engine.memory.kv_pool import KVPool
from engine.models.decoder import Decoder
from engine.models.packing import Quantization, WeightFormat
from engine.models.weights import load_weights
from engine.native.library import NativeLibrary
from engine.operators import step_factory
from engine.ranks.tensor_parallel import ALONE
from router.text.tokenizer import Tokenizer

BLOCK_SIZE = 16
WAYS: dict[str, tuple[torch.dtype, Quantization, int]] = {
    "float32": (torch.float32, "none", 512),
    "bfloat16, 512 rows a step": (torch.bfloat16, "none", 512),
    "bfloat16, 8 rows a step": (torch.bfloat16, "none", 8),
    "four bits as stored, 8 rows a step": (torch.bfloat16, "auto", 8),
    "four bits as stored, 1 row a step": (torch.bfloat16, "auto", 1),
    "int8, 8 rows a step": (torch.bfloat16, "int8", 8),
    "int4, 8 rows a step": (torch.bfloat16, "int4", 8),
}
"""Numbers, weights and tokens of a step."""


def main() -> None:
    model = resolve("smollm2")
    token_ids = Tokenizer.build(model.tokenizer).encode(PROSE.read_text())
    with torch.inference_mode():
        rows = {name: logprobs(model, token_ids, *way) for name, way in WAYS.items()}
    reference = rows["float32"]
    figures = {name: compare(logprobs_TV, reference, token_ids) for name, logprobs_TV in rows.items()}
    write_result("quality", {"tokens": len(token_ids), "figures": figures}, table(model.facts.name, len(token_ids), figures))


def logprobs(model: Model, token_ids: list[int], dtype: torch.dtype, quantization: Quantization, step_rows: int) -> Tensor:
    """The distribution after every token of the text, [T, V] in float32, computed `step_rows` tokens at a time."""
    library = NativeLibrary.load(torch.get_num_threads(), dtype) if dtype == torch.bfloat16 else None
    return torch.cat(list(logprob_steps(model, token_ids, dtype, quantization, step_rows, library)))


def logprob_steps(
    model: Model,
    token_ids: list[int],
    dtype: torch.dtype,
    quantization: Quantization,
    step_rows: int,
    library: NativeLibrary | None,
    *,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> Iterator[Tensor]:
    """The same step by step."""
    weights = load_weights(model.facts, WeightFormat(dtype, quantization, library=library))
    decoder = Decoder(model.facts, weights, step_factory(model.facts, library), ALONE)
    num_blocks = ceil_div(len(token_ids), BLOCK_SIZE)
    pool = KVPool.for_model(model.facts, num_blocks * BLOCK_SIZE, BLOCK_SIZE, dtype, kv_cache_dtype=kv_cache_dtype)
    for start in range(0, len(token_ids), step_rows):
        chunk = Chunk(
            token_ids=token_ids[start : start + step_rows],
            start=start,
            block_table=range(num_blocks),
            sampling=None,
            num_generated=0,
        )
        batch = ForwardBatch.build([chunk], BLOCK_SIZE)
        last_first = torch.arange(len(chunk.token_ids)).flip(0)
        batch = replace(batch, sample_rows_S=last_first, sampled_chunks=(0,) * len(last_first))
        logits_SV = decoder.forward(batch, pool, None)
        assert logits_SV is not None
        yield torch.log_softmax(logits_SV.flip(0), dim=-1)


def compare(logprobs_TV: Tensor, reference_TV: Tensor, token_ids: list[int]) -> dict[str, float]:
    """Perplexity; the mean divergence from the reference in nats; how far the text's own tokens moved; greedy agreement."""
    targets_T = torch.tensor(token_ids[1:])[:, None]
    own, reference_own = (rows[:-1].gather(1, targets_T) for rows in (logprobs_TV, reference_TV))
    divergence = (reference_TV.exp() * (reference_TV - logprobs_TV)).sum(dim=-1).mean()
    return {
        "perplexity": round(math.exp(-own.mean().item()), 4),
        "divergence": round(divergence.item(), 6),
        "mean_logprob_distance": round((own - reference_own).abs().mean().item(), 5),
        "same_best_token": round((logprobs_TV.argmax(-1) == reference_TV.argmax(-1)).float().mean().item(), 4),
    }


def table(name: str, num_tokens: int, figures: dict[str, dict[str, float]]) -> str:
    lines = [
        "# What each format costs in quality",
        "",
        f"{name} reading {num_tokens} tokens of public-domain text; distances are from float32.",
        "",
        "| | perplexity | divergence (nats) | mean distance of a token's logprob | same best token |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {way} | {row['perplexity']:.3f} | {row['divergence']:.5f} | {row['mean_logprob_distance']:.4f} "
        f"| {row['same_best_token']:.1%} |"
        for way, row in figures.items()
    ]
    return "\n".join([*lines, "", "Command: `python -m benchmarks.quality`"])


if __name__ == "__main__":
    main()
