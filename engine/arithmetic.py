"""The name of the arithmetic by which a worker computes.

Two workers of one name give a token the same KV and logits, bit for bit, from the same tokens before it. That is a promise
only as long as a row's bits do not depend on the rows beside it. A name that ends with `VARIES` says that they do.
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.facts import KvCacheDtype
from protocol.messages.workers import VARIES


def arithmetic_name(
    operators: str,
    dtype: str,
    weights: str,
    num_ranks: int,
    *,
    kv_cache_dtype: KvCacheDtype = "auto",
    positions: str = "",
    varies: bool,
) -> str:
    """Return the name of an arithmetic, such as `fma bfloat16 auto` or `avx512_bf16-amd bfloat16 int8 kv-int8 tp2`.

    `operators` is the arithmetic of the native operators (`engine.native.build.Built`), `torch`, or `triton-9.0`, with a
    GPU's compute capability. `weights` is the option `quantization`: auto is as the file stores them. `kv_cache_dtype` is
    named where it is not auto. `num_ranks` is the tensor-parallel size, which decides how sums are cut. `positions` is
    `ModelFacts.positions`. `varies`: a token's bits were found to depend on the rows beside it, or on whether it is part of a
    prompt.
    """
    kv = "" if kv_cache_dtype == "auto" else f" kv-{kv_cache_dtype}"
    ranks = f" tp{num_ranks}" if num_ranks > 1 else ""
    return f"{operators} {dtype} {weights}{kv}{ranks}{f' {positions}' if positions else ''}{VARIES if varies else ''}"


def whole_arithmetic(names: Sequence[str]) -> str:
    """Return the name of a worker's arithmetic from those of its ranks, in order: theirs, if all have the same.

    It varies if one rank's does. Ranks on different processors compute by several, and all are named.
    """
    different = dict.fromkeys(name.removesuffix(VARIES) for name in names)
    return " + ".join(different) + (VARIES if any(name.endswith(VARIES) for name in names) else "")
