"""The file of a machine's measurements: what is read back, and what is as good as none."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs import profiles
from configs.profiles import MachineProfile, ProfileKey, StepSizes, profile_path, read_or_measure, read_profile

KEY = ProfileKey(
    processor="Some Processor 6 1 2",
    maker="intel",
    features=("avx2", "fma"),
    quota=None,
    threads=2,
    model_hash="m",
    dtype="auto",
    quantization="auto",
    ranks=1,
    libraries=("avx2-1.so",),
)


def measured(key: ProfileKey = KEY, tokens: int = 128) -> MachineProfile:
    sizes = StepSizes(max_batch_tokens=tokens, saturation_tokens=64, max_chunk_tokens=32)
    return MachineProfile(key=key, model="model", measured_at="today", sizes=sizes)


def never() -> MachineProfile:
    raise AssertionError("nothing is to be measured")


def test_what_was_measured_is_read_by_the_next() -> None:
    assert read_profile(KEY) is None
    assert read_or_measure(KEY, measured) == (measured(), True)
    assert read_or_measure(KEY, never) == (measured(), False)
    assert read_profile(KEY) == measured()


def test_anew_replaces_it() -> None:
    read_or_measure(KEY, measured)
    assert read_or_measure(KEY, lambda: measured(tokens=512), anew=True) == (measured(tokens=512), True)
    assert read_profile(KEY) == measured(tokens=512)


@pytest.mark.parametrize(
    "difference",
    [
        {"processor": "Another Processor"},
        {"quota": 1.5},
        {"threads": 4},
        {"model_hash": "n"},
        {"libraries": ("avx2-2.so",)},
        {"features": ("avx2",)},
        {"version": KEY.version + 1},
    ],
)
def test_of_another_processor_it_is_not_used(difference: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Neither under its own name nor where somebody has put it in the place of ours."""
    read_or_measure(KEY, measured)
    other = KEY.model_copy(update=difference)
    assert read_profile(other) is None
    profile_path(other).write_bytes(profile_path(KEY).read_bytes())
    with caplog.at_level(logging.WARNING):
        assert read_profile(other) is None
    assert "another machine or model" in caplog.text
    assert read_or_measure(other, lambda: measured(other)) == (measured(other), True)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"key": 1}', "\0", '{"sizes": {"max_batch_tokens": 0}}'])
def test_a_damaged_file_is_as_good_as_none(text: str, caplog: pytest.LogCaptureFixture) -> None:
    read_or_measure(KEY, measured)
    profile_path(KEY).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert read_profile(KEY) is None
    assert "can't be used" in caplog.text
    assert read_or_measure(KEY, measured) == (measured(), True)
    assert read_profile(KEY) == measured()


def test_every_truncation_is_noticed() -> None:
    read_or_measure(KEY, measured)
    whole = profile_path(KEY).read_bytes()
    for length in range(0, len(whole) - 1, 7):
        profile_path(KEY).write_bytes(whole[:length])
        assert read_profile(KEY) is None


def test_a_failure_leaves_nothing(own_cache: Path) -> None:
    with pytest.raises(AssertionError):
        read_or_measure(KEY, never)
    assert list((own_cache / "profiles").glob("*.json")) == []
    assert read_or_measure(KEY, measured)[1], "the lock is free again"


def test_the_oldest_files_go(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setattr(profiles, "_MOST_FILES", 3)
    keys = [KEY.model_copy(update={"threads": threads}) for threads in range(1, 7)]
    for key in keys:
        read_or_measure(key, lambda key=key: measured(key))  # type: ignore[misc]
    assert [read_profile(key) is not None for key in keys] == [False] * 3 + [True] * 3


def test_processes_that_start_together_measure_once_and_agree(own_cache: Path) -> None:
    code = """
import os, sys, time
from configs.profiles import read_or_measure
from tests.unit.configs.test_profiles import KEY, measured

def measure():
    time.sleep(0.5)
    return measured(tokens=1000 + os.getpid() % 1000)

profile, mine = read_or_measure(KEY, measure)
print(profile.sizes.max_batch_tokens, mine)
"""
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=60)[0].split() for process in processes]
    assert sorted(mine for _, mine in said) == ["False", "False", "True"]
    assert len({tokens for tokens, _ in said}) == 1
