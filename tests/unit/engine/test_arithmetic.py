"""The names of arithmetics: equal where the bits are, and telling where they vary."""

from __future__ import annotations

import pytest

from engine.arithmetic import arithmetic_name, whole_arithmetic
from protocol.messages.workers import VARIES


def test_a_name_says_all_that_decides_about_bits() -> None:
    assert arithmetic_name("fma", "bfloat16", "auto", 1, varies=False) == "fma bfloat16 auto"
    assert arithmetic_name("avx512_bf16-amd", "bfloat16", "int8", 2, varies=False) == "avx512_bf16-amd bfloat16 int8 tp2"
    quantized = arithmetic_name("fma", "float32", "auto", 2, kv_cache_dtype="int8", varies=False)
    assert quantized == "fma float32 auto kv-int8 tp2"
    assert arithmetic_name("fma", "float32", "none", 2, positions="rope=yarn-4-1f", varies=False).endswith("tp2 rope=yarn-4-1f")
    assert arithmetic_name("torch", "float32", "none", 1, varies=True) == "torch float32 none (varies)"
    assert arithmetic_name("triton", "bfloat16", "auto", 4, varies=True).endswith(VARIES)


@pytest.mark.parametrize(
    ("ranks", "whole"),
    [
        (["fma bfloat16 auto"], "fma bfloat16 auto"),
        (["fma bfloat16 auto tp2"] * 2, "fma bfloat16 auto tp2"),
        (["fma bfloat16 auto tp2", "fma bfloat16 auto tp2 (varies)"], "fma bfloat16 auto tp2 (varies)"),
        (["fma bfloat16 auto tp2", "torch bfloat16 auto tp2"], "fma bfloat16 auto tp2 + torch bfloat16 auto tp2"),
        (
            ["avx512_bf16-amd bfloat16 auto tp2 (varies)", "fma bfloat16 auto tp2"],
            "avx512_bf16-amd bfloat16 auto tp2 + fma bfloat16 auto tp2 (varies)",
        ),
    ],
)
def test_the_whole_is_named_by_its_ranks(ranks: list[str], whole: str) -> None:
    assert whole_arithmetic(ranks) == whole
