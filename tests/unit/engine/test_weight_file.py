"""Packed weights that processes share: written once, mapped by all, and what happens where that can't be."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from benchmarks.lib.processes import pss_bytes
from configs.cache import exclusive
from engine.models.weight_file import mapped_tensors
from protocol.errors import ConfigError

IDENTITY = ("hash", "torch.bfloat16", "auto", 0, 1)
LARGE_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    return tmp_path


def packer(made: list[int], values: int = 3) -> Callable[[], Iterator[tuple[str, Tensor]]]:
    def pack() -> Iterator[tuple[str, Tensor]]:
        made.append(1)
        yield "norm", torch.arange(values).bfloat16()
        yield "0.qkv", torch.arange(7, dtype=torch.uint8)

    return pack


def load(made: list[int], identity: tuple[object, ...] = IDENTITY) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in mapped_tensors("tiny", identity, packer(made), lambda: True).items()}


def only_file(cache: Path) -> Path:
    (file,) = (cache / "weights").glob("*/packed.gguf")
    return file


EXPECTED = {"norm": [0, 1, 2], "0.qkv": [0, 1, 2, 3, 4, 5, 6]}


def test_a_file_is_written_once_for_each_identity(cache: Path) -> None:
    made: list[int] = []
    assert load(made) == load(made) == EXPECTED
    assert len(made) == 1
    load(made, (*IDENTITY[:-1], 2))
    assert len(made) == 2
    assert len(list((cache / "weights").glob("*/packed.gguf"))) == 2


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: b"", lambda data: b"x" * len(data)])
def test_a_damaged_file_is_written_anew(
    damage: Callable[[bytes], bytes], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[int] = []
    load(made)
    file = only_file(cache)
    file.write_bytes(damage(file.read_bytes()))
    assert load(made) == load(made) == EXPECTED
    assert len(made) == 2
    assert "will be written anew" in caplog.text


def test_what_a_dead_writer_left_and_what_nobody_used_goes(cache: Path) -> None:
    made: list[int] = []
    load(made, ("unused",))
    unused = only_file(cache)
    month = time.time() - 31 * 86_400
    os.utime(unused, (month, month))
    load(made)
    (file,) = {only_file(cache)} - {unused}
    file.rename(file.with_name(".new-packed.gguf"))
    assert load(made) == EXPECTED
    assert sorted(each.name for each in file.parent.iterdir()) == [".lock", "packed.gguf"]


def test_what_a_dead_writer_left_takes_no_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    load(made)
    file = only_file(cache)
    left = file.rename(file.with_name(".new-packed.gguf"))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: _Usage() if left.exists() else _usage_now(folder))
    assert load(made) == EXPECTED
    assert only_file(cache) == file


def test_what_dead_writers_of_other_files_left_goes(cache: Path) -> None:
    young, old = (cache / "weights" / name / ".new-packed.gguf" for name in ("young", "old"))
    for each in (young, old):
        each.parent.mkdir(parents=True)
        each.write_bytes(b"half of it")
    two_days = time.time() - 2 * 86_400
    os.utime(old, (two_days, two_days))
    load([])
    assert young.exists(), "its writer may live"
    assert not old.exists()


def test_an_old_file_that_cannot_be_removed_stays(cache: Path) -> None:
    held = cache / "weights" / "other" / "packed.gguf"
    held.mkdir(parents=True)  # so it can't be unlinked
    month = time.time() - 31 * 86_400
    os.utime(held, (month, month))
    made: list[int] = []
    assert load(made) == load(made) == EXPECTED
    assert len(made) == 1


def test_mapping_keeps_a_file(cache: Path) -> None:
    made: list[int] = []
    load(made, ("used",))
    used = only_file(cache)
    month = time.time() - 31 * 86_400
    os.utime(used, (month, month))
    load(made, ("used",))
    load(made)
    assert used.exists()


class _Usage:
    free = 10


_usage_now = shutil.disk_usage


def test_without_room_each_process_holds_its_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: _Usage())
    made: list[int] = []
    assert load(made) == load(made) == EXPECTED
    assert len(made) == 2
    assert not list((cache / "weights").glob("*/packed.gguf"))
    assert "are not shared: they take 0.0 GB" in caplog.text


def test_a_cache_that_cannot_be_made(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("TANDEM_CACHE", str(cache / "file" / "below"))
    made: list[int] = []
    with caplog.at_level(logging.WARNING):
        assert load(made) == EXPECTED
    assert "the weights of tiny are not shared" in caplog.text


def test_a_cache_without_locks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cache: Path) -> None:
    """Lustre and NFS may be mounted without them."""
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(ConfigError, match="No locks available; set TANDEM_CACHE"), exclusive(cache):
        pass
    made: list[int] = []
    with caplog.at_level(logging.WARNING):
        assert load(made) == EXPECTED
    assert "the weights of tiny are not shared" in caplog.text


def large() -> Iterator[tuple[str, Tensor]]:
    yield "large", torch.ones(LARGE_BYTES, dtype=torch.uint8)


def hold_large(ready: Any, end: Any) -> None:
    before = pss_bytes(os.getpid())
    tensors = mapped_tensors("large", ("large",), large, lambda: True)
    assert int(tensors["large"].sum(dtype=torch.int64)) == LARGE_BYTES
    ready.put(before)
    end.wait(60)


@pytest.mark.slow
def test_processes_that_start_together_have_one_copy() -> None:
    """Packed by one of them, and each has its share of the memory."""
    context = multiprocessing.get_context("spawn")
    ready, end = context.Queue(), context.Event()
    processes = [context.Process(target=hold_large, args=(ready, end)) for _ in range(3)]
    for process in processes:
        process.start()
    try:
        before = [ready.get(timeout=60) for _ in processes]
        more = sum(pss_bytes(process.pid) for process in processes if process.pid) - sum(before)
    finally:
        end.set()
        for process in processes:
            process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert more + (8 << 20) >= LARGE_BYTES
    assert more < 2 * LARGE_BYTES
