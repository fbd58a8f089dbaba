"""Under which key a worker's measurements are kept. Needs no torch, so that whoever starts a cluster can look for them."""

from __future__ import annotations

import os

from configs.facts import KvCacheDtype, ModelFacts
from configs.machine import cpu_quota, processor_features, processor_maker, processor_name
from configs.profiles import ProfileKey
from engine.native.files import FORCED, can_be_had
from engine.native.instruction_sets import INSTRUCTION_SETS

_FAMILIES = ("avx", "fma", "f16c", "amx")
"""Beginnings of the names of features that the native operators use."""


def profile_key(
    facts: ModelFacts, *, dtype: str, quantization: str, kv_cache_dtype: KvCacheDtype = "auto", ranks: int, threads: int
) -> ProfileKey:
    """Return the key on this machine. Types and `quantization` are as configured; `threads` are those of one rank.

    Which libraries have been compiled does not matter: what was measured holds until somebody measures anew. Where there can be
    none, the key names none, so that a compiler that comes later has everything measured.
    """
    forced = os.environ.get(FORCED) or None
    return ProfileKey(
        processor=processor_name(),
        maker=processor_maker(),
        features=tuple(sorted(name for name in processor_features() if name.startswith(_FAMILIES))),
        quota=cpu_quota(),
        threads=threads,
        model_hash=facts.model_hash,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        ranks=ranks,
        libraries=tuple(each.file_name for each in INSTRUCTION_SETS if forced in (None, each.name)) if can_be_had() else (),
    )
