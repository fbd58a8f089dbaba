"""What the engine's benchmark reports as work done, against counts made another way."""

from __future__ import annotations

import pytest

from benchmarks.lib import arithmetic
from benchmarks.lib.engine_report import share_of_limit
from configs.models import resolve
from engine.models.parameters import layer_parameters

FACTS = resolve("smollm2").facts


def test_weights_are_those_of_the_parameter_table() -> None:
    matrices = [p.shape for layer in range(FACTS.num_layers) for p in layer_parameters(FACTS, layer) if len(p.shape) == 2]
    assert arithmetic.layer_weights(FACTS) == sum(outputs * inputs for outputs, inputs in matrices)


def test_prefill_counts_every_query_and_key() -> None:
    tokens = 64
    meetings = sum(position + 0.5 for position in range(tokens))  # half of the diagonal, as an integral counts it
    attention = FACTS.num_layers * FACTS.num_heads * meetings * FACTS.head_dim * 2 * 2
    linear = tokens * 2 * arithmetic.layer_weights(FACTS)
    head = 2 * FACTS.vocab_size * FACTS.hidden_size
    assert arithmetic.prefill_flop(FACTS, tokens) == pytest.approx(attention + linear + head)


def test_decode_reads_each_weight_once() -> None:
    weights, head, kv_token = arithmetic.layer_weights(FACTS), 49_152 * 576, 30 * 2 * 3 * 64 * 2
    for rows in (1, 64):
        expected = weights * 0.625 + head * 1.125 + rows * 256 * kv_token
        assert arithmetic.decode_bytes(FACTS, rows, 256) == pytest.approx(expected)


def test_a_step_at_the_limit_is_a_share_of_one() -> None:
    limits = {"bfloat16 GFLOP/s": 500.0, "float32 GFLOP/s": 250.0, "read GB/s": 40.0}
    prompt_s = arithmetic.prefill_flop(FACTS, 512) / 500e9
    step_s = arithmetic.decode_bytes(FACTS, 16, 1024) / 40e9
    assert share_of_limit(FACTS, "prefill 512", 512 / prompt_s, limits) == pytest.approx(1)
    del limits["bfloat16 GFLOP/s"]
    assert share_of_limit(FACTS, "prefill 512", 512 / prompt_s, limits) == pytest.approx(2)
    assert share_of_limit(FACTS, "decode 16 x 1024", 16 / step_s, limits) == pytest.approx(1)
