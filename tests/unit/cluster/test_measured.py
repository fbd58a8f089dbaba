"""What a cluster takes from the measurements of its machine, and what `tandem profile` and `tandem plan` do with them."""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.commands import cli
from cluster.commands.lib.profile_tables import print_profile
from cluster.commands.plan import _step_times
from cluster.measured import (
    Profiles,
    key_here,
    known_profiles,
    measured_profiles,
    threads_here,
    threads_on_node,
    with_measured_sizes,
)
from cluster.memory import with_fitting_pools
from configs.cache import cache_dir
from configs.facts import ModelFacts
from configs.loader import load_config, served_context
from configs.machine import usable_cores
from configs.model_files.packaged import SMOLLM2
from configs.models import resolve
from configs.profiles import DecodeTime, MachineProfile, PrefillTime, StepSizes, read_or_measure
from configs.schema import ClusterConfig
from protocol.messages.workers import Role
from simulator.profile import LAPTOP, Profile
from tests.tiny_models import tiny_facts

FACTS = tiny_facts("measured")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder in which nothing was measured, with the models and libraries of the real one."""
    real = cache_dir()
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    for name in ("models", "native"):
        if (real / name).exists():
            (tmp_path / "cache" / name).symlink_to(real / name)
    return tmp_path / "cache"


def keep(config: ClusterConfig, facts: ModelFacts, role: Role, sizes: StepSizes | None) -> MachineProfile:
    """A profile as if it had been measured: steps of 1 ms a prompt token, and of 10 ms for answers."""
    key = key_here(config, facts, role)
    profile = MachineProfile(
        key=key,
        model=facts.name,
        measured_at="today",
        prefill=(PrefillTime(tokens=100, start=0, seconds=0.1),),
        decode=(DecodeTime(batch=1, context=128, seconds=0.01),),
        sizes=sizes,
    )
    return read_or_measure(key, lambda: profile, anew=True)[0]


def sizes(batch: int, chunk: int) -> StepSizes:
    return StepSizes(max_batch_tokens=batch, saturation_tokens=32, max_chunk_tokens=chunk)


def kept(config: ClusterConfig) -> Profiles:
    return known_profiles(config, FACTS)


def test_each_role_has_the_sizes_of_its_own_threads() -> None:
    config = load_config(None, {"prefill.threads": 1, "decode.threads": 2})
    keep(config, FACTS, Role.PREFILL, sizes(512, 16))
    keep(config, FACTS, Role.DECODE, sizes(1024, 128))
    found = with_measured_sizes(config, kept(config))
    assert (found.prefill.batch_tokens, found.prefill.shared_tokens, found.chunk_tokens) == (512, 32, 128)


def test_numbers_that_somebody_chose_win() -> None:
    chosen = {"prefill.max_batch_tokens": 100, "prefill.saturation_tokens": 90, "decode.max_chunk_tokens": 80}
    config = load_config(None, chosen)
    for role in Role:
        keep(config, FACTS, role, sizes(512, 16))
    found = with_measured_sizes(config, kept(config))
    assert (found.prefill.batch_tokens, found.prefill.shared_tokens, found.chunk_tokens) == (100, 90, 80)


def test_pools_that_fit_hold_a_request_of_measured_steps() -> None:
    """What is seen of a prompt at a time is more with longer steps, and a start does not choose pools that it then refuses."""
    facts = replace(FACTS, sliding_windows=(4096,) * FACTS.num_layers, max_model_len=32_768)
    config = load_config(None, {})
    for role in Role:
        keep(config, facts, role, sizes(2048, 512))
    sized = with_measured_sizes(config, known_profiles(config, facts))
    fitting = with_fitting_pools(sized, facts, 10**9)
    assert fitting.prefill.kv_cache_tokens == 4096 + 192 + 2048
    assert fitting.decode.kv_cache_tokens == 4096 + 192 + 512
    assert served_context(fitting, facts) == 32_768


@pytest.mark.parametrize(("mode", "chunk"), [("always", 64), ("auto", 64), ("never", 128)])
@pytest.mark.parametrize("noisy", [False, True])
def test_without_measurements_the_shipped_sizes_hold(mode: str, chunk: int, noisy: bool) -> None:
    config = load_config(None, {"disaggregation": mode})
    if noisy:
        for role in Role:
            keep(config, FACTS, role, None)
    found = with_measured_sizes(config, kept(config))
    assert (found.prefill.batch_tokens, found.prefill.shared_tokens, found.chunk_tokens) == (256, 64, chunk)


def test_nothing_is_measured_for_gpus() -> None:
    on_gpus = {"resources": {"GPU": 1.0}}
    config = load_config(None, {"prefill": on_gpus, "decode": on_gpus})
    assert measured_profiles(config, FACTS) == {}
    assert measured_profiles(load_config(None, {"device": "cuda"}), FACTS) == {}


def test_a_model_that_can_not_be_measured_costs_a_line(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(None, {"model": "no-such-model", "disaggregation": "never"})
    assert measured_profiles(config, FACTS) == {}
    assert "measuring failed" in caplog.text
    assert "no-such-model" in caplog.text
    caplog.clear()
    (again,) = measured_profiles(config, FACTS).values()
    assert (again.sizes, again.products, caplog.text) == (None, (), ""), "it is not tried again"


def test_a_full_disk_costs_a_line_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("configs.profiles.write_whole", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    config = load_config(None, {"model": "no-such-model", "disaggregation": "never"})
    assert measured_profiles(config, FACTS) == {}
    assert "measuring failed" in caplog.text


def test_a_cache_without_locks_costs_a_line_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    config = load_config(None, {"model": "no-such-model", "disaggregation": "never"})
    assert measured_profiles(config, FACTS) == {}
    assert "measuring failed" in caplog.text


def test_what_was_measured_counts_though_operators_can_be_had_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring may be what compiles them, or finds that a compiler makes none: that is another key."""
    config = load_config(None, {})
    to_be_had: list[bool] = []
    monkeypatch.setattr("engine.profiling.key.can_be_had", lambda: bool(to_be_had))

    def measuring(*_: object, **__: object) -> bool:
        to_be_had.append(True)
        for role in Role:
            keep(config, FACTS, role, sizes(512, 16))
        return True

    monkeypatch.setattr("cluster.measured.measure", measuring)
    assert set(measured_profiles(config, FACTS)) == set(Role)


def test_workers_share_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.measured.usable_cores", lambda: 8)
    assert threads_here(load_config(None, {}), Role.DECODE) == 4
    assert threads_here(load_config(None, {"disaggregation": "never"}), Role.DECODE) == 8
    assert threads_here(load_config(None, {"decode.threads": 3}), Role.DECODE) == 3
    assert usable_cores() >= 1


@pytest.mark.parametrize(
    ("chosen", "share", "threads"),
    [
        ({}, 16, 8),
        ({}, 8, 4),
        ({}, 1, 1),
        ({"decode.tensor_parallel_size": 2}, 16, 4),
        ({"decode.tensor_parallel_size": 16}, 1, 1),
        ({"decode.threads": 16}, 16, 16),
    ],
)
def test_a_worker_takes_no_more_than_its_node_has(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, int], share: int, threads: int
) -> None:
    """Of 16 processors that Ray counts, and that are 8 cores."""
    monkeypatch.setattr("cluster.measured.usable_cores", lambda: 8)
    assert threads_on_node(load_config(None, chosen), Role.DECODE, share, cpus=16.0) == threads


def tandem(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tandem", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


PLAN = ("plan", "--dataset", "random", "--random-input-len", "100", "--random-output-len", "4", "--num-prompts", "10")


def test_the_context_of_a_packaged_model_is_known_before_it_is_fetched() -> None:
    assert SMOLLM2.context_tokens == resolve("smollm2").facts.max_model_len


def test_a_plan_takes_the_step_times_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Those of its own model alone."""
    config, facts = load_config(None, {}), resolve("smollm2").facts
    for role in Role:
        keep(config, facts, role, sizes(128, 16))
    plan = (*PLAN, "--max-workers", "2", "--slo", "ttft:5000,tpot:500")
    assert tandem(monkeypatch, *plan) == 0
    assert "step times: smollm2 on this machine" in capsys.readouterr().out
    other = tmp_path / "other.yaml"
    other.write_text("model: Qwen/Qwen3-0.6B\n")
    assert tandem(monkeypatch, *plan, "--config", str(other)) == 0
    assert "step times: smollm2 on a laptop" in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "kv_cache_dtype", "share"), [("bfloat16", "auto", 1.0), ("bfloat16", "int8", 66 / 128)])
def test_a_plan_hands_over_the_bytes_of_the_format(dtype: str, kv_cache_dtype: str, share: float) -> None:
    config = load_config(None, {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype})
    for role in Role:
        keep(config, resolve("smollm2").facts, role, sizes(128, 16))
    handoff_token_s = _step_times(config, None)[0].overheads.handoff_token_s
    assert handoff_token_s == pytest.approx(share * Profile.load(LAPTOP).overheads.handoff_token_s)


def test_a_profile_is_shown_with_its_format(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(None, {"kv_cache_dtype": "int8"})
    print_profile(keep(config, FACTS, Role.DECODE, sizes(128, 16)))
    assert "measured, auto auto, KV in int8: " in capsys.readouterr().out


def test_the_command_measures_and_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the real operators, for the default model."""
    flags = ("profile", "--threads", "1", "--colocated")
    assert tandem(monkeypatch, *flags, "--show") == 2
    assert "nothing was measured yet" in capsys.readouterr().err
    assert tandem(monkeypatch, *flags) == 0
    shown = capsys.readouterr().out
    assert "smollm2, auto auto: 1 thread on" in shown
    assert tandem(monkeypatch, *flags, "--show") == 0
    assert capsys.readouterr().out == shown
    assert tandem(monkeypatch, *flags, "--show", "--json") == 0
    (profile,) = json.loads(capsys.readouterr().out)
    assert profile["key"]["threads"] == 1
    assert all(f" {row['seconds'] * 1e3:.1f} " in shown for row in steps(profile))


def test_the_command_says_why_it_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_cache: Path
) -> None:
    (own_cache / "profiles").write_text("a file where the folder should be")
    assert tandem(monkeypatch, "profile", "--threads", "1", "--colocated") == 2
    assert f"{own_cache / 'profiles'} can't be written; set TANDEM_CACHE" in capsys.readouterr().err


def steps(profile: dict[str, Any]) -> list[dict[str, Any]]:
    return [*profile["prefill"], *profile["decode"]]


def test_what_ray_may_use_of_a_node_is_shared_out_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray start --num-cpus 4`, where there are eight cores."""
    monkeypatch.setattr("cluster.measured.usable_cores", lambda: 8)
    assert threads_on_node(load_config(None, {}), Role.DECODE, 2, cpus=4.0) == 2
