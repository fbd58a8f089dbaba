"""Blocks in files that processes share: what is stored, found, evicted and erased, beside a plain model of it."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.tiers import current_index
from kv_transfer.tiers.store import BlockStore
from protocol.errors import ConfigError, UnavailableError
from tests.unit.kv_transfer.stored_blocks import (
    BLOCK_BYTES,
    FILE_BYTES,
    HEADER_BYTES,
    check_integrity,
    content,
    database,
    files_in,
    flip,
    forget_rows,
    get,
    held,
    key,
    opened,
    path_of,
    put,
    put_together,
    slices,
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


NUMBERS, WHICH = st.integers(0, 8), st.integers(0, 1)


@pytest.mark.parametrize("width", [1, 700, BLOCK_BYTES])
def test_a_block_comes_back_whatever_its_parts(folder: Path, store: BlockStore, width: int) -> None:
    """Parts of one byte are more than one call of the system takes."""
    assert store.put([(key(0), "a", slices(content(key(0)), width))]) == 1
    found = bytearray(BLOCK_BYTES)
    assert store.get(key(0), slices(found, width))
    assert found == content(key(0))
    assert not store.get(key(1), slices(found, width))
    assert store.match([key(0), key(1), key(0)]) == 1
    check_integrity(store, folder)
    stats = store.stats
    assert stats.stored == 1
    assert (stats.bytes_written, stats.bytes_read) == (BLOCK_BYTES, 2 * BLOCK_BYTES)


def test_match_counts_leading_keys(store: BlockStore) -> None:
    keys = [key(number) for number in range(700)]
    for each in keys[:600]:
        put(store, each)
    for count in (0, 1, 255, 256, 257, 512, 600, 700):
        assert store.match(keys[:count]) == min(count, 600)
    assert store.match([key(1000), *keys]) == 0
    get(store, keys[300])
    store.reset()
    assert store.match(keys) == 0


def test_only_the_owner_can_enter(folder: Path) -> None:
    before = os.umask(0)
    try:
        store = opened(folder)
        put(store, key(0))
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    store.close()


def test_folders_that_will_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o750)
    with pytest.raises(ConfigError, match="other users may enter it"):
        opened(public)
    assert not list(public.iterdir())
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(private)
    with pytest.raises(ConfigError, match="is a link"):
        opened(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="or a file, not a folder"):
        opened(tmp_path / "file")
    with pytest.raises(ConfigError, match="can't be made"):
        opened(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match="one block takes 4096 bytes, and only 4095"):
        BlockStore(private, b"model", BLOCK_BYTES, FILE_BYTES - 1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        opened(private)


def test_a_tenant_is_erased(folder: Path, store: BlockStore) -> None:
    """Its blocks alone, also those that another store has put, and after a fresh opening."""
    other = opened(folder)
    for number in range(30):
        put((store, other)[number % 2], key(number), f"tenant-{number % 3}")
    assert not any(b"tenant-1" in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert store.reset("tenant-1") == 10
    for each in (store, other):
        assert [number for number in range(30) if get(each, key(number))] == [n for n in range(30) if n % 3 != 1]
    other.close()
    other = opened(folder)
    assert other.num_blocks == 20
    check_integrity(other, folder)
    assert other.reset("tenant-1") == 0
    assert other.reset() == 20
    assert files_in(folder) == set()
    check_integrity(store, folder)
    other.close()


def test_a_tenant_is_erased_whose_index_is_lost(folder: Path, store: BlockStore) -> None:
    for number in range(10):
        put(store, key(number), "ab"[number % 2])
    forget_rows(folder, key(0), key(1))
    assert store.reset("a") == 5, "also a file that has no row"
    check_integrity(store, folder)
    store.close()
    database(folder).unlink()
    again = opened(folder)
    assert again.reset("b") == 5
    assert files_in(folder) == set()
    again.close()


def test_erasing_says_when_it_cannot(folder: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, key(0))

    def refuse(path: str) -> None:
        raise PermissionError(errno.EPERM, "no", path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        with pytest.raises(UnavailableError, match="could not be erased"):
            store.reset()
    assert store.reset() == 1


def test_erasing_says_when_it_cannot_look(folder: Path, store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose row is lost is found by looking; without a descriptor nobody can."""
    for number in range(3):
        put(store, key(number))
    with sqlite3.connect(database(folder)) as rows:
        rows.execute("DELETE FROM blocks")
    listdir = os.listdir

    def refuse(path: str) -> list[str]:
        if Path(path).parent == folder and len(Path(path).name) == 2:
            raise OSError(errno.EMFILE, "too many open files", path)
        return listdir(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", refuse)
        with pytest.raises(UnavailableError, match="could not be erased"):
            store.reset()
    assert len(files_in(folder)) == 3
    assert store.reset() == 3
    assert not files_in(folder)


def test_the_least_recently_used_goes(folder: Path) -> None:
    store = opened(folder, max_blocks=4)
    for number in (0, 1, 2, 3):
        put(store, key(number))
    assert get(store, key(0))
    assert not put(store, key(1)), "there already, so only used"
    put(store, key(4))
    assert held(store) == {key(0), key(1), key(3), key(4)}
    assert get(store, key(3))
    store.close()
    store = opened(folder, max_blocks=3)
    assert held(store) == {key(1), key(4), key(3)}, "less room, and what was read is remembered"
    other = opened(folder, max_blocks=3)
    assert get(other, key(1))
    other.note_uses()
    put(store, key(5))
    assert held(store) == {key(1), key(3), key(5)}
    assert (store.stats.evicted, other.stats.evicted) == (2, 0)
    check_integrity(store, folder)
    store.close()
    other.close()


def test_the_last_use_grows_though_the_clock_is_set_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(folder, max_blocks=2)
    put(store, key(0))
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    put(store, key(1))
    put(store, key(2))
    assert held(store) == {key(1), key(2)}
    store.close()


def test_reads_are_noted_without_a_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.tiers.store._NOTED", 3)
    store = opened(folder, max_blocks=4)
    for number in range(4):
        put(store, key(number))
    other = opened(folder, max_blocks=4)
    for number in (2, 0, 0, 1):
        get(store, key(number))
    put(other, key(4))
    assert held(other) == {key(0), key(1), key(2), key(4)}, "after three, the index has heard of it"
    store.close()
    other.close()


def test_a_use_that_is_told_late_is_as_old_as_it_is(folder: Path) -> None:
    """What another process has stored meanwhile was used later."""
    store, other = opened(folder, max_blocks=3), opened(folder, max_blocks=3)
    put(store, key(0))
    put(store, key(1))
    assert get(store, key(0))
    put(other, key(2))
    store.note_uses()
    put(other, key(3))
    assert held(other) == {key(0), key(2), key(3)}, "it was used after the one beside it"
    put(other, key(4))
    assert held(other) == {key(2), key(3), key(4)}
    store.close()
    other.close()


def test_a_closed_store_has_only_misses(folder: Path, store: BlockStore) -> None:
    put(store, key(0))
    store.close()
    store.close()
    assert (store.match([key(0)]), get(store, key(0)), put(store, key(1))) == (0, False, False)
    assert (held(store), store.num_blocks) == (set(), 0)
    assert files_in(folder) == {key(0)}


class StoreMachine(RuleBasedStateMachine):
    """Two stores of one folder, in turns, beside a dict whose order is that of the last use."""

    max_blocks = 5

    def __init__(self) -> None:
        super().__init__()
        self.temporary = TemporaryDirectory()
        self.folder = Path(self.temporary.name) / "tier"
        self.stores = [opened(self.folder, self.max_blocks) for _ in range(2)]
        self.model: dict[bytes, str] = {}

    def use(self, of: bytes) -> None:
        self.model[of] = self.model.pop(of)

    @rule(number=NUMBERS, which=WHICH, tenant=st.sampled_from("ab"))
    def put(self, number: int, which: int, tenant: str) -> None:
        of = key(number)
        assert put(self.stores[which], of, tenant) == (of not in self.model)
        self.stores[which].note_uses()  # tells the other store what this one has used
        self.model.setdefault(of, tenant)
        self.use(of)
        while len(self.model) > self.max_blocks:
            del self.model[next(iter(self.model))]

    @rule(numbers=st.lists(NUMBERS, unique=True, max_size=8), which=WHICH)
    def put_together(self, numbers: list[int], which: int) -> None:
        """All are there, or new, before any has to give way."""
        keys = [key(number) for number in numbers]
        assert put_together(self.stores[which], *keys) == len(set(keys) - set(self.model))
        self.stores[which].note_uses()
        for of in keys:
            self.model.setdefault(of, "a")
            self.use(of)
        while len(self.model) > self.max_blocks:
            del self.model[next(iter(self.model))]

    @rule(number=NUMBERS, which=WHICH)
    def get(self, number: int, which: int) -> None:
        of = key(number)
        assert get(self.stores[which], of) == (of in self.model)
        self.stores[which].note_uses()
        if of in self.model:
            self.use(of)

    @rule(numbers=st.lists(NUMBERS), which=WHICH)
    def match(self, numbers: list[int], which: int) -> None:
        keys = [key(number) for number in numbers]
        there = [of in self.model for of in keys]
        assert self.stores[which].match(keys) == (there.index(False) if False in there else len(keys))

    @rule(which=WHICH, tenant=st.sampled_from(["a", "b", None]))
    def reset(self, which: int, tenant: str | None) -> None:
        erased = [of for of, whose in self.model.items() if tenant in (None, whose)]
        assert self.stores[which].reset(tenant) == len(erased)
        for of in erased:
            del self.model[of]

    @precondition(lambda self: self.model)
    @rule(which=WHICH, chosen=st.integers(0, 4), place=st.integers(0, HEADER_BYTES + BLOCK_BYTES - 1), bit=st.integers(0, 7))
    def damage(self, which: int, chosen: int, place: int, bit: int) -> None:
        of = list(self.model)[chosen % len(self.model)]
        flip(path_of(self.folder, of), place, bit)
        assert not get(self.stores[which], of)
        del self.model[of]

    @rule(which=WHICH)
    def reopen(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = opened(self.folder, self.max_blocks)

    @rule(which=WHICH)
    def lose_the_index(self, which: int) -> None:
        database(self.folder).unlink()
        self.stores[which].num_blocks  # noqa: B018  (it notices)
        assert self.stores[which].wait_until_found(10)
        self.use_all()

    @rule()
    def lose_a_row(self) -> None:
        """As if a process was killed between a file and its row. Found by whoever opens next."""
        for of in list(self.model)[:1]:
            forget_rows(self.folder, of)
            self.reopen(0)
            self.use_all()

    def use_all(self) -> None:
        """Use is known no longer: a file says when it was written, as exactly as the kernel's clock ticks."""
        for of in self.model:
            assert get(self.stores[0], of)
        self.stores[0].note_uses()

    @invariant()
    def agree(self) -> None:
        for each in self.stores:
            assert held(each) == set(self.model)
            assert (each.num_blocks, each.num_bytes) == (len(self.model), len(self.model) * FILE_BYTES)
        assert files_in(self.folder) == set(self.model)

    def teardown(self) -> None:
        for each in self.stores:
            each.close()
        self.temporary.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestStoreMachine = StoreMachine.TestCase
