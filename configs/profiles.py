"""What was measured on one kind of processor for one model, and the file that keeps it in the cache folder.

    profiles/<digest of the key>.json    written whole, under a lock; the key is inside and compared

A profile decides how fast a worker computes, never what: it chooses among libraries of one arithmetic, and how many tokens a
step has. So a file that is damaged, of another machine or of another version is as good as none.

Who measures is `engine.profiling.measure`. One process does so at a time (`read_or_measure`), and those that waited read what
it wrote. Whatever a process finds, a later one finds too.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.cache import cache_dir, exclusive, write_whole
from configs.facts import KvCacheDtype
from protocol.errors import first_line

log = logging.getLogger(__name__)

_MOST_FILES = 64
"""Profiles that are kept. The oldest goes first: keys change with every model, thread count and version of the libraries."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ProfileKey(_Record):
    """All that the measured times depend on. Profiles of different keys have nothing to do with each other."""

    version: int = 1
    """Grows when the profile's fields, or the way of measuring, change their meaning."""
    processor: str
    maker: str
    features: tuple[str, ...]
    """Features of the processor that native operators may use, as Linux names them."""
    quota: float | None
    """Processors' time that the control group may use; None is no limit."""
    threads: int = Field(ge=1)
    """Cores that one rank computes with."""
    model_hash: str
    """That of `ModelFacts`: with it shapes, and the bits in which weights are stored, are the same."""
    dtype: str
    quantization: str
    kv_cache_dtype: KvCacheDtype = "auto"
    ranks: int = Field(ge=1)
    """Number of tensor-parallel ranks that the times were measured with."""
    libraries: tuple[str, ...]
    """File names of the native operators that may be used, the best by rule first; none where none can be had.

    The digests of their sources are in the names.
    """


class RowsChoice(_Record):
    """Which library multiplies a number of rows, and more of them up to the next measured number."""

    rows: int = Field(ge=1)
    library: str
    """Name of an instruction set."""
    seconds: dict[str, float]
    """Median time of one product by instruction set."""
    noisy: bool
    """The times varied too much to choose by, so that the rule has chosen."""


class MeasuredProduct(_Record):
    """A matrix product of the model: rows [T, inputs] times a weight of `bits` bits, to [T, outputs]."""

    name: str
    """Where the model has it, such as `qkv`."""
    bits: int
    """4 or 8 where the weight is quantized, else those of the dtype."""
    inputs: int = Field(ge=1)
    outputs: int = Field(ge=1)
    choices: tuple[RowsChoice, ...] = Field(min_length=1)
    """The fastest choice for each number of rows, by rising number."""


class PrefillTime(_Record):
    """Measured time of a step of one chunk."""

    tokens: int = Field(ge=1)
    start: int = Field(ge=0)
    """Tokens of the prompt before the chunk."""
    seconds: float = Field(gt=0)


class DecodeTime(_Record):
    """Measured time of a step of `batch` streams with `context` tokens each."""

    batch: int = Field(ge=1)
    context: int = Field(ge=1)
    seconds: float = Field(gt=0)


class StepSizes(_Record):
    """Numbers of tokens that a step may have, as the keys of the configuration of these names say."""

    max_batch_tokens: int = Field(ge=1)
    saturation_tokens: int = Field(ge=1)
    max_chunk_tokens: int = Field(ge=1)


class MachineProfile(_Record):
    """What was measured under one key. Without native operators there is nothing to choose, and nothing is measured."""

    key: ProfileKey
    model: str
    """The model's name, for people."""
    measured_at: str
    """Date and time, for people."""
    products: tuple[MeasuredProduct, ...] = ()
    prefill: tuple[PrefillTime, ...] = ()
    decode: tuple[DecodeTime, ...] = ()
    sizes: StepSizes | None = None
    """None where the step times varied too much: then what Tandem ships holds."""


def profile_path(key: ProfileKey) -> Path:
    """Return the path of the file for this key, which need not exist."""
    return profiles_folder() / f"{hashlib.sha256(key.model_dump_json().encode()).hexdigest()[:32]}.json"


def read_profile(key: ProfileKey) -> MachineProfile | None:
    """Return what was measured under this key; None if nothing was, or if the file can't be used."""
    path = profile_path(key)
    try:
        profile = MachineProfile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        log.warning("%s can't be used, as if nothing had been measured: %s", path, first_line(error))
        return None
    if profile.key != key:
        log.warning("%s is of another machine or model, as if nothing had been measured", path)
        return None
    return profile


def read_or_measure(
    key: ProfileKey, measure: Callable[[], MachineProfile], *, anew: bool = False
) -> tuple[MachineProfile, bool]:
    """Return the profile of this key, and whether this process has measured it.

    It is read if there is one, unless it is wanted `anew`. Otherwise one process at a time measures and writes it, while the
    others wait and then read. Raises ConfigError if the cache folder can't be written, and what `measure` raises.
    """
    if not anew and (known := read_profile(key)) is not None:
        return known, False
    with exclusive(profiles_folder()):
        if not anew and (known := read_profile(key)) is not None:
            return known, False
        profile = measure()
        write_whole(profile_path(key), profile.model_dump_json(indent=1).encode())
        _remove_oldest()
    return profile, True


def can_be_kept() -> bool:
    """Return whether this process may write profiles."""
    try:
        profiles_folder().mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(profiles_folder(), os.W_OK)


def _remove_oldest() -> None:
    by_age = sorted(profiles_folder().glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in by_age[_MOST_FILES:]:
        with suppress(OSError):
            path.unlink()


def profiles_folder() -> Path:
    """Return the folder of all profiles, which need not exist."""
    return cache_dir() / "profiles"
