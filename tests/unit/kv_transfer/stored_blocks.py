"""Blocks whose bytes follow from their keys, so that whoever reads one can tell whether it is right."""

from __future__ import annotations

import sqlite3
from hashlib import blake2b, shake_128
from pathlib import Path

from kv_transfer.tiers.store import BlockStore

BLOCK_BYTES = 3000
FILE_BYTES = 4096
HEADER_BYTES = 120


def key(number: int) -> bytes:
    return blake2b(number.to_bytes(4, "little"), digest_size=32).digest()


def content(of: bytes) -> bytes:
    return shake_128(of).digest(BLOCK_BYTES)


def slices(data: bytes | bytearray, width: int = 1000) -> list[memoryview]:
    return [memoryview(data)[start : start + width] for start in range(0, len(data), width)]


def opened(folder: Path, max_blocks: int = 1000, described: bytes = b"model") -> BlockStore:
    return BlockStore(folder, described, BLOCK_BYTES, max_blocks * FILE_BYTES)


def put(store: BlockStore, of: bytes, tenant: str = "a") -> bool:
    return store.put([(of, tenant, slices(content(of)))]) == 1


def put_together(store: BlockStore, *keys: bytes) -> int:
    return store.put((each, "a", slices(content(each))) for each in keys)


def get(store: BlockStore, of: bytes) -> bool:
    """Read a block, and see that it is right if it is said to be."""
    found = bytearray(BLOCK_BYTES)
    if not store.get(of, slices(found, 700)):
        return False
    assert found == content(of), "wrong bytes"
    return True


def held(store: BlockStore) -> set[bytes]:
    """The blocks of which the index knows; none if it can't be asked."""
    nothing: set[bytes] = set()
    return store._ask(lambda index: nothing.union(*map(index.keys_with, range(256))), nothing)


def path_of(folder: Path, of: bytes) -> Path:
    return folder / of.hex()[:2] / of.hex()


def files_in(folder: Path) -> set[bytes]:
    return {bytes.fromhex(path.name) for path in folder.glob("??/*")}


def database(folder: Path) -> Path:
    (path,) = folder.glob("index-*.db")
    return path


def check_integrity(store: BlockStore, folder: Path) -> None:
    """Files, rows and counts agree, and each block that is held is right."""
    there = held(store)
    assert there == files_in(folder)
    assert (store.num_blocks, store.num_bytes) == (len(there), len(there) * FILE_BYTES)
    assert not list((folder / "tmp").iterdir())
    assert all(get(store, each) for each in there)


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def forget_rows(folder: Path, *keys: bytes) -> None:
    with sqlite3.connect(database(folder)) as connection:
        connection.executemany("DELETE FROM blocks WHERE key = ?", [(each,) for each in keys])
    connection.close()


def assert_is_removed(store: BlockStore, folder: Path, of: bytes) -> None:
    before = store.stats
    assert not get(store, of)
    after = store.stats
    assert after.damaged + after.foreign == before.damaged + before.foreign + 1
    assert not path_of(folder, of).exists()
    assert store.match([of]) == 0
    assert put(store, of), "there is room for it again"
    assert get(store, of)
