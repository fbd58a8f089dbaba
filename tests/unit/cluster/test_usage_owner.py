"""The owner of the usage log as routers meet it: one fsync for all that wait, and no answer before it."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.ray.usage.keeper import UsageOwner
from cluster.ray.usage.settings import UsageSettings, usage_settings
from configs.loader import load_config
from protocol.errors import ConfigError, UnavailableError
from telemetry.usage.book import LogBounds, UsageBook
from telemetry.usage.kafka_feed import KafkaTarget
from telemetry.usage.ledger import UsageLedger
from telemetry.usage.log_files import UsageLog
from tests.unit.telemetry.usage.events import event, ids_of


@pytest.fixture
def owner(tmp_path: Path) -> Callable[[], UsageOwner]:
    settings = UsageSettings(tmp_path / "usage.jsonl", LogBounds(10**6, 3), None)
    return lambda: UsageOwner(settings, tmp_path / "counts" / "usage.json")


def test_batches_that_wait_share_one_write(
    owner: Callable[[], UsageOwner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_syncs = 0
    sync = os.fsync

    def counted(descriptor: int) -> None:
        nonlocal num_syncs
        num_syncs += 1
        sync(descriptor)

    async def main() -> None:
        keeper = owner()
        told = await keeper.append([], None)
        assert told.whole
        await keeper.append([event(1, "first", ended=1e9)], None)
        monkeypatch.setattr(os, "fsync", counted)
        answers = await asyncio.gather(*(keeper.append([event(1, life, ended=time.time())], None) for life in "abcdefgh"))
        # The first one is under way when the others come.
        assert num_syncs <= 2
        assert answers[-1].used["k1"] == 8 * 12
        await keeper.close()

    asyncio.run(main())
    assert sorted(ids_of(tmp_path / "usage.jsonl")) == sorted([f"{life}-1" for life in ("first", *"abcdefgh")])


def test_one_that_is_started_anew_knows_what_is_there(owner: Callable[[], UsageOwner], tmp_path: Path) -> None:
    async def main() -> None:
        now = time.time()
        keeper = owner()
        await keeper.append([event(number, ended=now) for number in (1, 2, 3)], None)
        await keeper.close()
        keeper = owner()
        told = await keeper.append([event(number, ended=now) for number in (2, 3, 4)], ("former", 7))
        assert told.whole
        assert told.used["k1"] == sum(10 + 2 * number for number in (1, 2, 3, 4))
        again = await keeper.append([event(5, ended=now)], (told.epoch, told.version))
        assert (again.whole, set(again.used)) == (False, {"k1", "tier/acme/standard"})
        await keeper.close()

    asyncio.run(main())
    assert ids_of(tmp_path / "usage.jsonl") == [f"a1-{number}" for number in range(1, 6)]


def test_who_can_not_write_says_so_to_everybody_and_goes_on_later(owner: Callable[[], UsageOwner], tmp_path: Path) -> None:
    async def main() -> None:
        other = UsageLog(tmp_path / "usage.jsonl")
        keeper = owner()
        refused = await asyncio.gather(*(keeper.append([event(1, life)], None) for life in "ab"), return_exceptions=True)
        assert [type(each) for each in refused] == [ConfigError, ConfigError]
        other.close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", _full)
            with pytest.raises(UnavailableError, match="No space left on device"):
                await keeper.append([event(1, "a")], None)
        await keeper.append([event(1, "a")], None)
        await keeper.close()

    asyncio.run(main())
    assert ids_of(tmp_path / "usage.jsonl") == ["a-1"]


def _full(descriptor: int, data: bytes, offset: int) -> int:
    raise OSError(28, os.strerror(28))


def test_who_does_not_wait_any_more_keeps_nobody_from_an_answer(owner: Callable[[], UsageOwner], tmp_path: Path) -> None:
    async def main() -> None:
        keeper = owner()
        impatient = asyncio.create_task(keeper.append([event(1, "a")], None))
        patient = asyncio.create_task(keeper.append([event(1, "b")], None))
        await asyncio.sleep(0)
        impatient.cancel()
        await patient
        await keeper.append([event(1, "a")], None)
        await keeper.close()

    asyncio.run(main())
    assert sorted(ids_of(tmp_path / "usage.jsonl")) == ["a-1", "b-1"]


def test_answers_are_made_between_two_writes(owner: Callable[[], UsageOwner], monkeypatch: pytest.MonkeyPatch) -> None:
    """So a version and the changes up to it belong together, though the next batch is written while they are on their way."""
    book_is_free = threading.Lock()

    def alone(name: str) -> None:
        real = getattr(UsageBook, name)

        def call(*arguments: Any) -> Any:
            assert threading.current_thread() is not threading.main_thread(), "which has routers to listen to"
            assert book_is_free.acquire(blocking=False), "another thread has it"
            try:
                return real(*arguments)
            finally:
                book_is_free.release()

        monkeypatch.setattr(UsageBook, name, call)

    alone("append")
    alone("month_use")

    async def router(keeper: UsageOwner, life: str) -> dict[str, int]:
        known: tuple[str, int] | None = None
        used: dict[str, int] = {}
        for number in range(1, 21):
            told = await keeper.append([event(number, life, key=life, ended=time.time())], known)
            assert told.whole is (known is None)
            known = (told.epoch, told.version)
            used |= told.used
            assert used[life] == sum(event(each).used.tokens for each in range(1, number + 1))
        return used

    async def main() -> None:
        keeper = owner()
        await asyncio.gather(*(router(keeper, life) for life in "abcd"))
        await keeper.close()

    asyncio.run(main())


def test_a_feed_that_can_not_begin_leaves_the_log_to_the_next_try(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    state = {"version": 1, "place": [2, 0], "ledger": UsageLedger().as_json()}
    (tmp_path / "usage.jsonl.state").write_text(json.dumps(state))
    (tmp_path / "usage.jsonl.1").mkdir()  # a file that Kafka has not got yet, and that can't be read
    settings = UsageSettings(path, LogBounds(10**6, 3), KafkaTarget("127.0.0.1:9", "t", {}))

    async def main() -> None:
        keeper = UsageOwner(settings, tmp_path / "counts" / "usage.json")
        for _ in range(2):
            with pytest.raises(UnavailableError, match="Is a directory"):
                await keeper.append([event(1)], None)
        (tmp_path / "usage.jsonl.1").rmdir()
        await keeper.append([event(1)], None)
        await keeper.close()

    asyncio.run(main())
    assert ids_of(path) == ["a1-1"]


def test_settings_are_those_of_the_configuration(tmp_path: Path) -> None:
    assert usage_settings(load_config(None, {}).telemetry) is None
    given = {"usage_log": str(tmp_path / "u"), "usage_log_file_mib": 0.5, "usage_kafka": "a:1,b:2/t"}
    settings = usage_settings(load_config(None, {f"telemetry.{key}": value for key, value in given.items()}).telemetry)
    assert settings is not None
    assert (settings.path, settings.bounds) == (tmp_path / "u", LogBounds(524_288, 15))
    assert settings.kafka is not None
    assert (settings.kafka.servers, settings.kafka.topic) == ("a:1,b:2", "t")
