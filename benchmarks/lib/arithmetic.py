"""What a step has to compute and to read at least, from a model's facts: the measure for "close to the machine's limit"."""

from __future__ import annotations

from configs.facts import ModelFacts

QUANTIZED_BYTES = {bits: bits / 8 + 4 / 32 for bits in (4, 8)}
"""Bytes of one weight, by its number of bits: these, and a scale and a minimum in float16 for every 32."""
BFLOAT16_BYTES = 2.0


def layer_weights(facts: ModelFacts) -> int:
    """Return the number of weights in the matrices of all layers: q, k, v, output, gate, up and down."""
    heads = 2 * facts.num_heads + 2 * facts.num_kv_heads
    return facts.num_layers * facts.hidden_size * (heads * facts.head_dim + 3 * facts.intermediate_size)


def prefill_flop(facts: ModelFacts, tokens: int) -> float:
    """Return the floating-point operations of a prompt: its products with weights, causal attention, one row of logits."""
    # Each query meets half of the prompt on average, once as keys and once as values; a multiply-add is two operations.
    attention = 2 * 2 * facts.num_layers * facts.num_heads * facts.head_dim * tokens * tokens / 2
    return 2 * layer_weights(facts) * tokens + attention + 2 * facts.hidden_size * facts.vocab_size


def decode_bytes(facts: ModelFacts, sequences: int, context: int) -> float:
    """Return the bytes that one decode step of the engine reads: each weight once, as it is stored, and the KV.

    The layers' weights have four bits in the file, the head's eight; of the embedding only a row per sequence is read.
    """
    kv_token = BFLOAT16_BYTES * 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim
    weights = QUANTIZED_BYTES[4] * layer_weights(facts) + QUANTIZED_BYTES[8] * facts.hidden_size * facts.vocab_size
    return weights + sequences * context * kv_token
