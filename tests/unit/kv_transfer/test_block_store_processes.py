"""Processes and threads that share a folder, some of them killed."""

from __future__ import annotations

import fcntl
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer.tiers import current_index, store_index
from kv_transfer.tiers.store import BlockStore
from tests.unit.kv_transfer.stored_blocks import check_integrity, database, get, key, opened, put

ROOT = Path(__file__).parents[3]


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


def test_temporary_files_of_the_dead_are_removed(folder: Path, store: BlockStore) -> None:
    (folder / "tmp" / "1-dead").write_bytes(b"half")
    with (folder / "tmp" / "1-alive").open("wb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        opened(folder).close()
        assert [path.name for path in (folder / "tmp").iterdir()] == ["1-alive"]
    opened(folder).close()
    check_integrity(store, folder)


def test_another_process_holds_the_index(folder: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads does not wait. Who writes gives up."""
    monkeypatch.setattr(store_index, "_BUSY_S", 0.05)
    put(store, key(0))
    store.close()
    store = opened(folder)
    connection = sqlite3.connect(database(folder), isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    assert store.match([key(0)]) == 1
    assert get(store, key(0))
    assert not put(store, key(1))
    store.note_uses()
    connection.execute("ROLLBACK")
    connection.close()
    assert store.stats.failed_writes == 1
    assert put(store, key(1))
    check_integrity(store, folder)
    store.close()


WRITER = """
import random, sys
from pathlib import Path
from hashlib import blake2b, shake_128
from kv_transfer.tiers.store import BlockStore
folder, seed, max_blocks, count = Path(sys.argv[1]), *map(int, sys.argv[2:])
store = BlockStore(folder, b"model", 3000, max_blocks * 4096)
chance = random.Random(seed)
found = bytearray(3000)
print("open", flush=True)
for turn in range(count):
    key = blake2b(chance.randrange(60).to_bytes(4, "little"), digest_size=32).digest()
    data = shake_128(key).digest(3000)
    if chance.random() < 0.5:
        store.put([(key, "ab"[key[0] % 2], [memoryview(data)])])
    elif store.get(key, [memoryview(found)]):
        assert found == data, "wrong bytes"
    if turn % 7 == 0:
        assert store.num_bytes <= max_blocks * 4096
    if turn % 200 == 100:
        store.reset("a")
stats = store.stats
assert stats.damaged == stats.foreign == stats.rebuilt == 0, stats
store.close()
print(stats.stored, stats.evicted, stats.failed_writes, flush=True)
"""


def writer(folder: Path, seed: int, max_blocks: int, count: int) -> subprocess.Popen[str]:
    arguments = [str(folder), str(seed), str(max_blocks), str(count)]
    process = subprocess.Popen([sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def test_killed_at_any_moment(folder: Path) -> None:
    chance = random.Random(3)
    for seed in range(6):
        processes = [writer(folder, 2 * seed + n, max_blocks=30, count=10**9) for n in range(2)]
        for process in processes:
            time.sleep(chance.uniform(0, 0.06))
            process.send_signal(signal.SIGKILL)
            process.communicate()
            assert process.returncode == -signal.SIGKILL, "it had not failed by itself"
        store = opened(folder, max_blocks=30)
        check_integrity(store, folder)
        assert store.num_blocks <= 30
        assert (store.stats.damaged, store.stats.rebuilt) == (0, 0), "a rename is all or nothing, and so is a transaction"
        store.close()


def test_processes_store_and_evict_at_once(folder: Path) -> None:
    store = opened(folder, max_blocks=20)
    processes = [writer(folder, seed, max_blocks=20, count=1500) for seed in range(2)]
    while any(process.poll() is None for process in processes):
        assert store.num_blocks <= 20
        get(store, key(random.randrange(60)))
        time.sleep(0.001)
    for process in processes:
        told, _ = process.communicate()
        assert process.returncode == 0
        stored, evicted, failed = map(int, told.split())
        assert stored > 100
        assert evicted > 0
        assert failed == 0
    check_integrity(store, folder)
    store.close()


def test_threads_of_two_stores(folder: Path) -> None:
    stores = [opened(folder, max_blocks=20), opened(folder, max_blocks=20)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        store = stores[seed % 2]
        try:
            for turn in range(150):
                of = key(chance.randrange(40))
                if not get(store, of):
                    put(store, of)
                store.match([of])
                if turn == 70 and seed == 0:
                    database(folder).unlink()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures
    assert stores[0].reset("nobody") == 0
    for store in stores:
        assert 0 < store.num_blocks <= 20
        check_integrity(store, folder)
        store.close()
