"""The profile by which paced workers take the time of this machine's own (`tandem profile --save`)."""

from __future__ import annotations

from pathlib import Path

from cluster.measured import Profiles, measured_step_times, with_measured_sizes
from cluster.memory import kv_token_bytes
from configs.cache import write_whole
from configs.facts import ModelFacts
from configs.paced.profile import Figure, PacedProfile
from configs.profiles import StepSizes
from configs.schema import ClusterConfig
from protocol.errors import ConfigError, UnavailableError
from protocol.messages.workers import Role
from simulator.profile import LAPTOP, LAPTOP_TOKEN_BYTES, Profile


def machine_profile(config: ClusterConfig, facts: ModelFacts, profiles: Profiles) -> PacedProfile:
    """Return a profile of the step times that were measured here for both roles. Raises UnavailableError if they were not."""
    step_times = measured_step_times(config, profiles)
    if step_times is None:
        raise UnavailableError(f"there are no step times of {facts.name} for both roles on this machine")
    sized = with_measured_sizes(config, profiles)
    link = LAPTOP_TOKEN_BYTES / Profile.load(LAPTOP).overheads.handoff_token_s
    return PacedProfile(
        name=f"{facts.name} on {step_times.machine['processor']}, measured {profiles[Role.DECODE].measured_at}",
        context_tokens=facts.max_model_len,
        layers=facts.num_layers,
        kv_token_bytes=kv_token_bytes(config, facts),
        link_bytes_per_s=link,
        kv_cache_tokens=config.decode.kv_cache_tokens,
        sizes=StepSizes(
            max_batch_tokens=sized.prefill.batch_tokens,
            saturation_tokens=sized.prefill.shared_tokens,
            max_chunk_tokens=sized.chunk_tokens,
        ),
        max_batch_size=config.decode.max_batch_size,
        figures={"link_bytes_per_s": Figure(value=link, unit="bytes/s", source="simulator/laptop.json: handoffs on 2 cores")},
        prefill=step_times.prefill,
        decode=step_times.decode,
    )


def save_profile(profile: PacedProfile, path: Path) -> None:
    """Write a profile as a file, whole. Raises ConfigError if that can't be done."""
    try:
        write_whole(path, profile.model_dump_json(indent=1).encode())
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror}", param="save") from None
