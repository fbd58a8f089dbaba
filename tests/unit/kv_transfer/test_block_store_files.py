"""Files of blocks that are flipped, cut short, swapped, foreign or gone: a block is whole or a miss."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.tiers import current_index
from kv_transfer.tiers.store import BlockStore
from kv_transfer.tiers.store_index import Rows
from protocol.errors import UnavailableError
from tests.unit.kv_transfer.stored_blocks import (
    BLOCK_BYTES,
    FILE_BYTES,
    HEADER_BYTES,
    assert_is_removed,
    check_integrity,
    files_in,
    flip,
    forget_rows,
    get,
    key,
    opened,
    path_of,
    put,
    put_together,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def store(folder: Path) -> Iterator[BlockStore]:
    made = opened(folder)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_index, "PAUSE_S", 0.0)


def test_no_bit_of_a_file_may_flip(folder: Path, store: BlockStore) -> None:
    put(store, key(0))
    assert path_of(folder, key(0)).stat().st_size == HEADER_BYTES + BLOCK_BYTES
    chance = random.Random(5)
    places = [*range(HEADER_BYTES), *chance.sample(range(HEADER_BYTES, HEADER_BYTES + BLOCK_BYTES - 1), 30), -1]
    for place in places:
        flip(path_of(folder, key(0)), place, chance.randrange(8))
        assert_is_removed(store, folder, key(0))
    assert store.stats.damaged == len(places), "none of them looks like a block of another model"
    check_integrity(store, folder)


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + BLOCK_BYTES - 1, 5000])
def test_a_file_of_another_length_is_damaged(folder: Path, store: BlockStore, size: int) -> None:
    put(store, key(0))
    os.truncate(path_of(folder, key(0)), size)
    assert_is_removed(store, folder, key(0))
    assert store.stats.damaged == 1


def test_what_is_no_file_is_a_miss(folder: Path, store: BlockStore) -> None:
    put(store, key(0))
    path_of(folder, key(0)).rename(folder / "elsewhere")
    path_of(folder, key(0)).symlink_to(folder / "elsewhere")
    assert_is_removed(store, folder, key(0))
    path_of(folder, key(0)).unlink()
    os.mkfifo(path_of(folder, key(0)))
    assert_is_removed(store, folder, key(0))
    path_of(folder, key(0)).unlink()
    path_of(folder, key(0)).mkdir()
    assert not get(store, key(0))
    assert not put(store, key(0))
    assert store.stats.failed_writes == 1
    path_of(folder, key(0)).rmdir()
    assert put(store, key(0))


def test_files_under_each_others_names(folder: Path, store: BlockStore) -> None:
    first, second = (path_of(folder, key(number)) for number in (0, 1))
    put(store, key(0))
    put(store, key(1))
    first.rename(folder / "first")
    second.rename(first)
    (folder / "first").rename(second)
    assert_is_removed(store, folder, key(0))
    assert_is_removed(store, folder, key(1))
    check_integrity(store, folder)


def test_a_file_that_is_gone_is_a_miss_and_its_row_goes(folder: Path, store: BlockStore) -> None:
    put(store, key(0))
    path_of(folder, key(0)).unlink()
    assert store.match([key(0)]) == 1
    assert not get(store, key(0))
    assert store.match([key(0)]) == store.num_bytes == 0
    put(store, key(0))
    path_of(folder, key(0)).unlink()
    assert put(store, key(0)), "it is not there, whatever the index says"
    check_integrity(store, folder)


def test_blocks_of_another_description_are_removed(folder: Path, store: BlockStore) -> None:
    for number in range(20):
        put(store, key(number))
    other = opened(folder, described=b"another model")
    assert (other.num_blocks, other.stats.foreign, files_in(folder)) == (0, 20, set())
    put(other, key(3))
    assert (store.match([key(3)]), get(store, key(3)), put(store, key(4))) == (0, False, False), "the last to open decides"
    with pytest.raises(UnavailableError):
        store.reset()
    check_integrity(other, folder)
    other.close()
    larger = BlockStore(folder, b"another model", BLOCK_BYTES + 1, 2 * FILE_BYTES)
    assert (larger.num_blocks, larger.stats.foreign) == (0, 1)
    larger.close()


def test_a_foreign_file_under_a_live_index(folder: Path, store: BlockStore, tmp_path: Path) -> None:
    put(store, key(0))
    other = opened(tmp_path / "other", described=b"another model")
    put(other, key(0))
    shutil.copy(path_of(tmp_path / "other", key(0)), path_of(folder, key(0)))
    other.close()
    assert_is_removed(store, folder, key(0))
    assert store.stats.foreign == 1


def test_files_without_a_row_are_found(folder: Path, store: BlockStore) -> None:
    for number in range(20):
        put(store, key(number))
    forget_rows(folder, *(key(number) for number in range(10)))
    flip(path_of(folder, key(3)), 50)
    path_of(folder, key(5)).write_bytes(path_of(folder, key(6)).read_bytes())
    (folder / "00").mkdir(exist_ok=True)
    (folder / "00" / "a note of somebody's").touch()
    again = opened(folder)
    assert again.match([key(number) for number in range(20)]) == 3
    assert (again.num_blocks, again.stats.damaged) == (18, 2)
    assert (folder / "00" / "a note of somebody's").exists()
    again.close()


def test_a_reset_fails_while_a_file_without_a_row_cannot_be_opened(
    folder: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose block it is, only the file can tell. A process that was killed leaves such a file."""
    put(store, key(0), "acme")
    forget_rows(folder, key(0))
    real = os.open

    def none_left(path: Any, *how: Any) -> int:
        if os.fspath(path) == str(path_of(folder, key(0))):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *how)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", none_left)
        with pytest.raises(UnavailableError):
            store.reset("acme")
    assert store.reset("acme") == 1
    assert not files_in(folder)


def test_all_of_the_folder_is_removed(folder: Path, store: BlockStore) -> None:
    put(store, key(0))
    shutil.rmtree(folder)
    assert not get(store, key(0))
    assert put(store, key(0))
    check_integrity(store, folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("call", ["open", "rename"])
def test_a_folder_that_goes_while_a_block_is_written_is_made_anew_for_its_owner_alone(
    folder: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """By who looks for the index next, and not with the rights that parents of a folder get."""
    real, there = getattr(os, call), [folder]

    def removed_before(path: Any, *what: Any, **how: Any) -> Any:
        if os.path.dirname(path) == str(folder / "tmp") and there:
            shutil.rmtree(there.pop())
        return real(path, *what, **how)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, removed_before)
        assert not put(store, key(0))
    assert not there
    assert not folder.exists()
    assert put(store, key(0))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    check_integrity(store, folder)


@pytest.mark.parametrize(("fails", "num_stored"), [("insert", 0), ("rename", 4), ("close", 5), ("unlink", 5)])
def test_one_of_several_blocks_that_are_stored_together_fails(
    folder: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch, fails: str, num_stored: int
) -> None:
    """What can't be moved to its place costs one block, what the index can't be told all of them, and cleaning up none."""
    put(store, key(0))
    calls, place = itertools.count(1), Rows if fails == "insert" else os
    real = getattr(place, fails)

    def third_fails(*what: Any) -> Any:
        if next(calls) == 3:
            if fails == "close":
                real(*what)  # as the system does
            raise sqlite3.OperationalError("no") if fails == "insert" else OSError(errno.EROFS, "Read-only file system")
        return real(*what)

    with monkeypatch.context() as patched:
        patched.setattr(place, fails, third_fails)
        assert put_together(store, *(key(number) for number in range(6))) == num_stored
    assert store.stats.failed_writes == 5 - num_stored
    assert len(files_in(folder)) == 1 + num_stored
    check_integrity(store, folder)
    assert put_together(store, *(key(number) for number in range(6))) == 5 - num_stored
    check_integrity(store, folder)


def test_nothing_is_written_where_no_index_can_be_had(folder: Path) -> None:
    store = opened(folder)
    store.close()
    shutil.rmtree(folder)
    assert put_together(store, key(0), key(1)) == 0
    assert store.stats.failed_writes == 2
    assert not folder.exists(), "the next worker makes it anew, for its owner alone"


def test_a_full_disk_is_told_once(
    folder: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, key(0))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, fake in (("writev", full), ("rename", full), ("writev", lambda fd, parts: len(parts[0])), ("open", full)):
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            patched.setattr(os, name, fake)
            assert not put(store, key(1)), name
    assert store.stats.failed_writes == 4
    assert [record.message for record in caplog.records] == [f"{folder}: blocks can't be written: No space left on device"]
    assert get(store, key(0))
    assert put(store, key(1))
    check_integrity(store, folder)


def test_no_room_for_the_index(folder: Path, store: BlockStore) -> None:
    """A block that can't have a row is not left there either."""
    number = 0
    index = store._current.get()
    assert index is not None
    index._writer.execute("PRAGMA max_page_count = 20")
    while put(store, key(number)):
        number += 1
    assert number > 0
    assert store.stats.rebuilt == 0, "full is not damaged"
    check_integrity(store, folder)
