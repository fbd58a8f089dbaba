"""What the configuration says about pools that size themselves, and what is refused."""

from __future__ import annotations

from datetime import time
from pathlib import Path
from typing import Any

import pytest

from configs.autoscale import SizeRange
from configs.loader import load_config
from protocol.errors import ConfigError

SIZES = "prefill=1..3,decode=0..4"
ON_GPUS = {
    "autoscale.sizes": SIZES,
    "prefill.resources": {"GPU": 2},
    "prefill.tensor_parallel_size": 2,
    "decode.resources": {"GPU": 1},
}
"""A prefill worker takes four GPUs, and a decode worker one. At least one of each is needed, for a request wakes decode."""
TWO_RANKS = {"decode.tensor_parallel_size": 2}


def test_flags_and_yaml_say_the_same(tmp_path: Path) -> None:
    flags = load_config(None, {"autoscale.sizes": SIZES, "autoscale.slo": "ttft:500,tpot:50"})
    path = tmp_path / "cluster.yaml"
    path.write_text("autoscale:\n  sizes: {prefill: 1..3, decode: 0..4}\n  slo: {ttft: 500, tpot: 50.0}\n")
    assert load_config(path, {}) == flags
    assert flags.autoscale.sizes == {"prefill": SizeRange(least=1, most=3), "decode": SizeRange(least=0, most=4)}
    assert (flags.autoscale.ttft_s, flags.autoscale.tpot_s) == (0.5, 0.05)


def test_a_limit_that_is_not_named_is_none() -> None:
    config = load_config(None, {"autoscale.sizes": "decode=2", "autoscale.slo": "ttft:900.5"})
    assert config.autoscale.ttft_s == 0.9005
    assert config.autoscale.tpot_s == float("inf")
    assert config.autoscale.sizes == {"decode": SizeRange(least=2, most=2)}


def test_pools_begin_within_their_ranges() -> None:
    config = load_config(None, {"autoscale.sizes": "prefill=2..3,decode=0..4", "decode.workers": 0})
    assert (config.prefill.workers, config.decode.workers) == (2, 0)
    assert config.has_workers("decode")


def test_a_schedule_may_say_when(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "autoscale:\n  sizes: decode=1..4\n  schedule:\n"
        "  - {days: [mon, fri], begin: 08:30, end: '18:00', sizes: {decode: 3..4}}\n"
        "  - {begin: '22:00', end: 06:00, sizes: decode=0..1}\n"
    )
    auto = load_config(path, {}).autoscale
    assert [(entry.begin, entry.end) for entry in auto.schedule] == [(time(8, 30), time(18)), (time(22), time(6))]
    assert auto.least("decode") == 0
    assert auto.least("prefill") == 1


@pytest.mark.parametrize(
    ("values", "key", "said"),
    [
        ({"autoscale.sizes": "decode=4..1"}, "autoscale.sizes.decode", "4..1 has its ends the wrong way round"),
        ({"autoscale.sizes": "decode=one"}, "autoscale.sizes.decode", "one"),
        ({"autoscale.sizes": "decode"}, "autoscale.sizes", "should read NAME=VALUE"),
        ({"autoscale.sizes": "decode=1,decode=2"}, "autoscale.sizes", "each name once"),
        ({"autoscale.sizes": "router=1..2"}, "autoscale.sizes.router", "router"),
        ({"autoscale.sizes": "decode=0"}, "autoscale.sizes.decode", "0"),
        ({"autoscale.sizes": "decode=1..65"}, "autoscale.sizes", r"more than decode.max_workers \(64\)"),
        ({"autoscale.sizes": SIZES, "prefill.workers": 4}, "prefill.workers", "not within the range"),
        ({"autoscale.sizes": SIZES, "disaggregation": "never"}, "autoscale.sizes", "prefill has no workers"),
        ({"autoscale.sizes": SIZES, "autoscale.slo": "ttft:0"}, "autoscale.slo.ttft", "greater than 0"),
        ({"autoscale.sizes": SIZES, "autoscale.slo": "speed:1"}, "autoscale.slo.speed", "speed"),
        ({"autoscale.standby": 1}, "autoscale.sizes", "missing"),
        (
            {"autoscale.sizes": SIZES, "autoscale.standby": 1, "decode.threads": 2},
            "autoscale.standby",
            "prefill.threads and decode.threads differ",
        ),
        ({"autoscale.sizes": "prefill=2..3,decode=2..3", "autoscale.max_workers": 3}, "autoscale.max_workers", "fewer than"),
        (
            {
                "autoscale.sizes": "prefill=0..1,decode=2..2",
                "autoscale.max_workers": 2,
                "disaggregation": "always",
                "decode.workers": 2,
            },
            "autoscale.max_workers",
            "fewer than the least of all roles together .* 3",
        ),
        (
            {"autoscale.sizes": "prefill=1..2", "autoscale.max_workers": 4, "decode.workers": 4},
            "autoscale.max_workers",
            "fewer than the least of all roles together .* 5",
        ),
        (
            {"autoscale.sizes": SIZES, "autoscale.max_gpus": 4},
            "autoscale.max_gpus",
            "none does: name GPU in prefill.resources and decode.resources",
        ),
        (
            {"autoscale.sizes": SIZES, "autoscale.max_gpus": 4, "engine": "paced", "decode.resources": {"GPU": 1}},
            "autoscale.max_gpus",
            "none does",
        ),
        ({**ON_GPUS, "autoscale.max_gpus": 4.5}, "autoscale.max_gpus", "fewer than the least of all roles together .*: 5"),
        (
            {**ON_GPUS, "autoscale.max_gpus": 8, "autoscale.standby": 1, "decode.resources": {"GPU": 2}, **TWO_RANKS},
            "autoscale.max_gpus",
            "with those on standby: 12",
        ),
        ({"autoscale.sizes": "decode=1.."}, "autoscale.sizes.decode", "1.."),
        ({"decode.workers": 0}, "decode.workers", "nobody would answer"),
        ({"prefill.workers": 0}, "prefill.workers", "let decode do it all"),
    ],
)
def test_what_can_not_be_is_refused(values: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        load_config(None, values)
    assert (refused.value.param or "").startswith(key)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("begin: '08:00+02:00', end: '09:00', sizes: {decode: 1..2}", "leave the offset out"),
        ("days: mon, begin: '08:00', end: '09:00', sizes: {}", r"schedule\.0\.days: should be a valid list, not 'mon'"),
        ("begun: 8, begin: '08:00', end: '09:00', sizes: {}", r"schedule\.0\.begun: unknown key; did you mean .*\.0\.begin\?"),
        (
            "begin: '08:00', end: '09:00', sizes: {decode: {least: 1, most: 2, leest: 1}}",
            r"did you mean autoscale\.schedule\.0\.sizes\.decode\.least\?",
        ),
        ("begin: 9, end: '10:00', sizes: {decode: 1..2}", "should be a time of day"),
        ("begin: '10:00', end: '10:00', sizes: {decode: 1..2}", "begins and ends at 10:00"),
        ("begin: '10:00', end: '11:00', sizes: {decode: 1..100}", r"more than decode.max_workers \(64\)"),
        ("begin: '10:00', end: '11:00', sizes: {decode: 6..8}", "fewer than the least of all roles"),
    ],
)
def test_a_schedule_that_can_not_be_is_refused(tmp_path: Path, entry: str, said: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"autoscale:\n  sizes: decode=1..4\n  max_workers: 5\n  schedule:\n  - {{{entry}}}\n")
    with pytest.raises(ConfigError, match=said):
        load_config(path, {})


OVERLAPPING = """
engine: paced
autoscale:
  sizes: prefill=1..4,decode=1..6
  max_workers: 8
  schedule:
  - {begin: '08:00', end: '18:00', sizes: {decode: 6}}
  - {begin: '22:00', end: '01:00', days: [sun], sizes: {decode: 5}}
"""


@pytest.mark.parametrize(
    ("entry", "entries"),
    [
        ("begin: '12:00', end: '14:00', sizes: {prefill: 4}", "schedule.0.sizes and autoscale.schedule.2.sizes"),
        ("begin: '07:00', end: '08:01', sizes: {prefill: 4}", "schedule.0.sizes and autoscale.schedule.2.sizes"),
        ("begin: '00:00', end: '01:00', days: [mon], sizes: {prefill: 4}", "schedule.1.sizes and autoscale.schedule.2.sizes"),
        ("begin: '17:00', end: '22:00', sizes: {prefill: 4, decode: 1}", None),
        ("begin: '18:00', end: '22:00', sizes: {prefill: 4}", None),
        ("begin: '00:00', end: '01:00', days: [tue], sizes: {prefill: 4}", None),
    ],
)
def test_entries_of_a_schedule_that_overlap_keep_the_budget_together(tmp_path: Path, entry: str, entries: str | None) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{OVERLAPPING}  - {{{entry}}}\n")
    if entries is None:
        load_config(path, {})
        return
    with pytest.raises(ConfigError, match=f"by autoscale.{entries}, while all that are needed") as refused:
        load_config(path, {})
    assert refused.value.param == "autoscale.max_workers"


def test_a_schedule_names_roles_that_have_a_range(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "autoscale:\n  sizes: decode=1..4\n  schedule:\n  - {begin: '01:00', end: '02:00', sizes: {prefill: 1..2}}\n"
    )
    with pytest.raises(ConfigError, match="prefill has no range in"):
        load_config(path, {})
