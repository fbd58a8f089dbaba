"""Profiles of paced workers (`engine.paced`): how long steps and transfers take on a machine that need not be there.

A profile is a JSON file. `h200-8b` comes with Tandem: one NVIDIA H200 with a model of eight billion parameters, an estimate by
public figures. Each of these stands in it with its source, and `estimated` makes the step times of them. `tandem profile
--save FILE` writes one of the machine at hand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from configs.profiles import DecodeTime, PrefillTime, StepSizes
from configs.step_times import StepTimes
from protocol.errors import ConfigError

_PARAM = "paced_profile"
"""The key of the configuration, for errors."""
DEFAULT_PROFILE = "h200-8b"
BUILT_IN = (DEFAULT_PROFILE,)
_FOLDER = Path(__file__).parent

PACED_LAYERS = 2
"""Layers that the KV pool of a paced worker has."""
TOKEN_BYTES = PACED_LAYERS * 2 * 8
"""Bytes of a token's KV in the pool of a paced worker: a fingerprint for K and one for V in each layer."""

_PREFILL_TOKENS = (1, 16, 64, 128, 160, 256, 1024, 2048, 8192)
_DECODE_BATCHES = (1, 8, 16, 32, 64, 128, 160, 256)
_CONTEXTS = (1024, 8192)
_LATER = 8192
"""Where the later chunks of a prompt begin: they show what a pair of tokens costs."""

_Positive = Annotated[float, Field(gt=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Figure(_Record):
    """A number, and where it is from."""

    value: _Positive
    unit: str
    source: str


class PacedProfile(StepTimes):
    """What a paced worker of either role takes its time from."""

    name: str
    """Name for people: the processor and the model, and whether this is measured or an estimate."""
    context_tokens: Annotated[int, Field(ge=64)]
    """Most tokens of prompt and answer together."""
    layers: Annotated[int, Field(ge=1)]
    """Layers of the model, for people. A paced worker's pool has `PACED_LAYERS` layers."""
    kv_token_bytes: Annotated[int, Field(ge=1)]
    """Bytes of one token's KV in all layers of the model: what a transfer's time is reckoned by."""
    link_bytes_per_s: _Positive
    """What the workers' links carry, each in its turn."""
    host_bytes_per_s: _Positive = 1e12
    """What a worker reads of its node's memory tier. Without it, reading takes what it takes here."""
    disk_bytes_per_s: _Positive = 1e12
    """Bytes per second that a worker reads from its node's disk tier. Without it, reading takes what it takes here."""
    kv_cache_tokens: Annotated[int, Field(ge=64)]
    """Tokens that one worker's KV pool holds."""
    sizes: StepSizes
    """Sizes of steps, where the configuration names none."""
    max_batch_size: Annotated[int, Field(ge=1)]
    """Most streams in a step, where the configuration names no number."""
    figures: Mapping[str, Figure] = Field(default_factory=dict)
    """Name to figure, for profiles that are estimates: what they were made of."""

    def num_blocks(self, gib: float, block_size: int) -> int:
        """Return how many whole blocks of `block_size` tokens of the model's KV there are in so many GiB."""
        return int(gib * 2**30 / (self.kv_token_bytes * block_size))

    def step_s(self, chunks: list[tuple[int, int]], contexts: list[int]) -> float:
        """Seconds of a step of parts of prompts (start, number of tokens), and of streams that have so many tokens each.

        What a step of a single token takes of either kind is paid once where both are there: the weights are read once.
        """
        if not chunks:
            return self.decode_s(len(contexts), sum(contexts) / len(contexts))
        if not contexts:
            return self.prefill_s(chunks)
        once_s = min(self.prefill_s([(0, 1)]), self.decode_s(1, 1))
        return self.decode_s(len(contexts), sum(contexts) / len(contexts)) + self.prefill_s(chunks) - once_s


def profile_name(name: str) -> str:
    """Return a profile's name as it is the same for all processes: that of a built-in one, or an absolute path."""
    return name if name in BUILT_IN else str(Path(os.path.expanduser(name)).absolute())


def load_paced_profile(name: str) -> PacedProfile:
    """Return a profile: one that comes with Tandem, by its name, or a file. Raises ConfigError if it can't be used."""
    path = _FOLDER / f"{name.replace('-', '_')}.json" if name in BUILT_IN else Path(profile_name(name))
    try:
        profile = PacedProfile.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        known = ", ".join(BUILT_IN)
        raise ConfigError(f"{name}: can't be read: {error.strerror}; give {known}, or a file", param=_PARAM) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: this is no profile: {' '.join(str(error).split())}", param=_PARAM) from None
    if (problem := profile.what_lacks()) is not None:
        raise ConfigError(f"{name}: {problem}", param=_PARAM)
    return profile


def default_sizes(profile: PacedProfile) -> dict[str, dict[str, Any]]:
    """Return values for keys of the configuration that nobody has given, by section: pools and steps as the profile has
    them.
    """
    tokens = profile.kv_cache_tokens
    pool = {"kv_cache_tokens": tokens, "prefix_cache_tokens": tokens}
    steps = {"max_batch_tokens": profile.sizes.max_batch_tokens, "saturation_tokens": profile.sizes.saturation_tokens}
    batch = {"max_chunk_tokens": profile.sizes.max_chunk_tokens, "max_batch_size": profile.max_batch_size}
    return {"prefill": pool | steps, "decode": pool | batch}


def estimated(figures: Mapping[str, Figure]) -> StepTimes:
    """Return the step times that follow from figures of a GPU and of a model.

    A step takes the longer of two times: that of its arithmetic (two operations for each parameter and token, and `pair_flop`
    for each pair of tokens that attention looks at in prompts) and that of reading the weights once. On top come the time of
    reading the KV of the streams' contexts, and `step_s`.
    """
    of = {name: figure.value for name, figure in figures.items()}
    flops = of["peak_flop_per_s"] * of["compute_share"]
    read = of["memory_bytes_per_s"] * of["memory_share"]
    weights_s = of["parameters"] * of["parameter_bytes"] / read

    def step_s(tokens: int, pairs: float, context: int) -> float:
        arithmetic_s = (2 * of["parameters"] * tokens + of["pair_flop"] * pairs) / flops
        return of["step_s"] + max(arithmetic_s, weights_s) + of["kv_token_bytes"] * context / read

    prefill = [
        PrefillTime(tokens=n, start=start, seconds=step_s(n, n * (start + n / 2), 0))
        for n in _PREFILL_TOKENS
        for start in ((0, _LATER) if n == max(_PREFILL_TOKENS) else (0,))
    ]
    decode = [
        DecodeTime(batch=batch, context=context, seconds=step_s(batch, 0, batch * context))
        for batch in _DECODE_BATCHES
        for context in _CONTEXTS
    ]
    return StepTimes(prefill=tuple(prefill), decode=tuple(decode))
