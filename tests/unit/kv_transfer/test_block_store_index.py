"""An index that is damaged, lost or replaced is made anew from the files."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kv_transfer.tiers import current_index
from kv_transfer.tiers.store import BlockStore
from tests.unit.kv_transfer.stored_blocks import check_integrity, database, files_in, get, held, key, opened, put


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


def damage_nothing(path: Path) -> None:
    path.write_bytes(b"")


def damage_text(path: Path) -> None:
    path.write_bytes(b"this is no database\n" * 1000)


def damage_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage_pages(path: Path) -> None:
    """All but the first page, which says that it is a database."""
    data = path.read_bytes()
    path.write_bytes(data[:4096] + bytes(byte ^ 0x55 for byte in data[4096:]))


def damage_schema(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE state")
    connection.close()


def damage_names(path: Path) -> None:
    """SQLite quotes the name of a table in its error, and it is no text any more."""
    data = path.read_bytes()
    assert data.count(b"tablestatestate") == data.count(b"CREATE TABLE state") == 1
    path.write_bytes(
        data.replace(b"tablestatestate", b"table\xe3tatestate").replace(b"CREATE TABLE state", b"CREATE_TABLE state")
    )


def damage_counts(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE state SET blocks = -7, bytes = 1000000000000")
    connection.close()


def damage_a_row(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("UPDATE blocks SET last_use = 'yesterday' WHERE key = ?", (key(50),))
    connection.close()


DAMAGES = [damage_nothing, damage_text, damage_half, damage_pages, damage_schema, damage_names, Path.unlink]


@pytest.mark.parametrize("damage", [*DAMAGES, damage_counts, damage_a_row])
def test_a_damaged_index_is_made_anew_at_opening(folder: Path, store: BlockStore, damage: Callable[[Path], None]) -> None:
    for number in range(100):
        put(store, key(number), "ab"[number % 2])
    store.close()
    damage(database(folder))
    again = opened(folder)
    assert again.num_blocks == 100
    assert again.stats.rebuilt == (damage not in (Path.unlink, damage_counts))
    check_integrity(again, folder)
    assert again.reset("a") == 50
    again.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_made_anew_while_it_is_used(folder: Path, damage: Callable[[Path], None]) -> None:
    """Two stores use it. Until they have found the files again, blocks are misses."""
    stores = [opened(folder), opened(folder)]
    for number in range(100):
        put(stores[0], key(number))
    for each in stores:  # nothing of the database is in the log beside it, or remembered
        held(each)
    with sqlite3.connect(database(folder)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    damage(database(folder))
    for number in range(100, 110):
        for each in stores:
            each.match([key(number)])
            each.note_uses()
            put(each, key(number))
            get(each, key(number))
            held(each)
    assert all(each.wait_until_found(10) for each in stores)
    stores[0].reset("nobody")
    for each in stores:
        check_integrity(each, folder)
        assert each.num_blocks >= 100
        each.close()


def test_flipped_bits_in_the_index(folder: Path) -> None:
    """Whatever they say, no call fails, no wrong bytes come out, and the next opening mends what it can see."""
    store = opened(folder, max_blocks=60)
    for number in range(60):
        put(store, key(number))
    store.close()
    whole = database(folder).read_bytes()
    chance = random.Random(8)
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 3, 30])):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        for path in folder.glob("index-*"):
            path.unlink()
        (folder / "index-0.db").write_bytes(data)
        store = opened(folder, max_blocks=60)
        store.match([key(number) for number in range(70)])
        for number in chance.sample(range(70), 8):
            get(store, key(number))
            put(store, key(number))
        store.note_uses()
        assert store.wait_until_found(10)
        store.close()
        assert len(files_in(folder)) <= 61, "one more if the index was lost between a file and its row"


def test_nothing_is_changed_in_an_index_that_was_replaced(folder: Path, store: BlockStore) -> None:
    """Though it was there a moment ago: a block moved to its place would have its row in a file that is gone."""
    index = store._current.get()
    assert index is not None
    database(folder).unlink()
    with pytest.raises(sqlite3.OperationalError), index.transaction():
        pytest.fail("the index is gone")
