"""Under which key a worker's measurements are kept. Needs no torch, so that whoever starts a cluster can look for them."""

from __future__ import annotations

from configs.facts import ModelFacts
from configs.machine import cpu_quota, processor_features, processor_maker, processor_name
from configs.profiles import ProfileKey
from engine.native.files import libraries_at_hand

_FAMILIES = ("avx", "fma", "f16c", "amx")
"""Beginnings of the names of features that the native operators use."""


def profile_key(facts: ModelFacts, *, dtype: str, quantization: str, ranks: int, threads: int) -> ProfileKey:
    """Return the key on this machine. `dtype` and `quantization` are as configured; `threads` are those of one rank.

    It changes when further native operators are compiled, since there is more to choose from.
    """
    return ProfileKey(
        processor=processor_name(),
        maker=processor_maker(),
        features=tuple(sorted(name for name in processor_features() if name.startswith(_FAMILIES))),
        quota=cpu_quota(),
        threads=threads,
        model_hash=facts.model_hash,
        dtype=dtype,
        quantization=quantization,
        ranks=ranks,
        libraries=libraries_at_hand(),
    )
