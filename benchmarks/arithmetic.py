"""What a step has to compute and to read at least, from a model's facts: the measure for "close to the machine's limit"."""

from __future__ import annotations

from configs.facts import ModelFacts

FEW_ROWS = 8
"""Up to here the engine multiplies a Q4_1 model's layers by four-bit weights, from there on by bfloat16: docs/engine.md."""
FOUR_BIT_BYTES = 0.5 + 4 / 32
"""Of one weight: half a byte, and a scale and a zero in bfloat16 for every 32."""
BFLOAT16_BYTES = 2.0


def layer_weights(facts: ModelFacts) -> int:
    """Weights in the matrices of all layers: q, k, v, output, gate, up and down."""
    heads = 2 * facts.num_heads + 2 * facts.num_kv_heads
    return facts.num_layers * facts.hidden_size * (heads * facts.head_dim + 3 * facts.intermediate_size)


def prefill_flop(facts: ModelFacts, tokens: int) -> float:
    """Floating-point operations of a prompt: its products with weights, causal attention, one row of logits."""
    # Each query meets half of the prompt on average, once as keys and once as values; a multiply-add is two operations.
    attention = 2 * 2 * facts.num_layers * facts.num_heads * facts.head_dim * tokens * tokens / 2
    return 2 * layer_weights(facts) * tokens + attention + 2 * facts.hidden_size * facts.vocab_size


def decode_bytes(facts: ModelFacts, sequences: int, context: int) -> float:
    """Bytes that one decode step of the engine reads: each weight once, in the format used for that many rows, and the KV.

    The head, bfloat16 always, is read whole; of the embedding only a row per sequence, which does not count.
    """
    per_weight = FOUR_BIT_BYTES if sequences <= FEW_ROWS else BFLOAT16_BYTES
    head = BFLOAT16_BYTES * facts.hidden_size * facts.vocab_size
    kv_token = BFLOAT16_BYTES * 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim
    return per_weight * layer_weights(facts) + head + sequences * context * kv_token
