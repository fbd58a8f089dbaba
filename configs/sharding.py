"""How a model is shared out to the ranks of a tensor-parallel worker: pure arithmetic, the same wherever it is asked.

Every rank has its share of the attention heads, of the feed-forward network's inner width and of the vocabulary, and
computes all layers (Shoeybi et al., "Megatron-LM", 2019). Shares are neighbours and go by rank.
"""

from __future__ import annotations

from dataclasses import replace

from configs.facts import ModelFacts, WeightFormat
from protocol.errors import ConfigError, IncompatiblePeerError

_GROUP = 32
"""Inputs that share a scale in quantized weights; a group is never cut."""
_VOCABULARY_UNIT = 64
"""Tokens that the processor's kernels multiply at once."""


def heads_of(rank: int, num_ranks: int, num_kv_heads: int) -> range:
    """Return the KV heads that a rank holds. Raises IncompatiblePeerError if they can't be shared out evenly.

    With more ranks than heads, neighbouring ranks hold the same head.
    """
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise IncompatiblePeerError(f"{num_kv_heads} KV heads can't be shared out evenly to {num_ranks} ranks")
    if num_ranks >= num_kv_heads:
        head = rank * num_kv_heads // num_ranks
        return range(head, head + 1)
    return even_share(rank, num_ranks, num_kv_heads)


def even_share(rank: int, num_ranks: int, length: int) -> range:
    """Return the rank's part of `length` when it is cut into `num_ranks` equal parts. `length` divides by their number."""
    share = length // num_ranks
    return range(rank * share, (rank + 1) * share)


def vocabulary_of(rank: int, num_ranks: int, vocab_size: int) -> range:
    """Return the tokens whose embedding and logits a rank computes: nearly equal parts, cut where kernels like it."""
    unit = _VOCABULARY_UNIT if vocab_size >= num_ranks * _VOCABULARY_UNIT else 1
    first, end = (cut * vocab_size // num_ranks // unit * unit for cut in (rank, rank + 1))
    return range(first, vocab_size if rank == num_ranks - 1 else end)


def rank_facts(facts: ModelFacts, num_ranks: int) -> ModelFacts:
    """Return the facts of the model that each rank computes: its share, which is the same on all.

    The vocabulary stays whole.
    """
    return replace(
        facts,
        num_heads=facts.num_heads // num_ranks,
        num_kv_heads=len(heads_of(0, num_ranks, facts.num_kv_heads)),
        intermediate_size=facts.intermediate_size // num_ranks,
    )


def possible_sizes(facts: ModelFacts, quantization: str) -> list[int]:
    """Return the numbers of ranks that this model can be shared out to, rising. `quantization` is that of the configuration.

    Heads and inner width divide evenly, KV heads evenly or into copies, and every rank has tokens. Where weights are used
    in few bits, the inputs of a rank are whole groups, so that all sizes have the same weights.
    """
    grouped = quantization in ("int8", "int4") or (quantization == "auto" and facts.weight_format is WeightFormat.GGUF)
    input_widths = (facts.num_heads * facts.head_dim, facts.intermediate_size)

    def works(size: int) -> bool:
        even = facts.num_heads % size == 0 and facts.intermediate_size % size == 0
        shared = facts.num_kv_heads % size == 0 or size % facts.num_kv_heads == 0
        cuts = grouped and any(width % _GROUP == 0 and width // size % _GROUP for width in input_widths)
        return even and shared and not cuts and size <= facts.vocab_size

    return [size for size in range(1, facts.num_heads + 1) if works(size)]


def check_tensor_parallel_size(facts: ModelFacts, size: int, quantization: str, *, param: str) -> None:
    """Raise ConfigError, which names what would work, if the model can't be shared out to so many ranks."""
    sizes = possible_sizes(facts, quantization)
    if size not in sizes:
        raise ConfigError(
            f"{param}: {facts.name} can't be shared out to {size} ranks: {facts.num_heads} heads, {facts.num_kv_heads} KV "
            f"heads and an intermediate size of {facts.intermediate_size} allow {', '.join(map(str, sizes))}",
            param=param,
        )
