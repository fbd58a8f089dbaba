"""Lines of the usage log in Kafka, at least once: on librdkafka's own mock brokers, over real TCP."""

from __future__ import annotations

import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from protocol.errors import ConfigError
from telemetry.usage import kafka_feed
from telemetry.usage.book import LogBounds, UsageBook
from telemetry.usage.kafka_feed import KafkaFeed, KafkaTarget, check_kafka
from telemetry.usage.totals import KafkaState
from tests.unit.telemetry.usage.events import event, ids_of

DEADLINE_S = 60.0


@contextmanager
def mock_brokers() -> Iterator[str]:
    """Addresses of librdkafka's own brokers, which run inside this producer."""
    holder = Producer({"test.mock.num.brokers": 2})
    brokers = holder.list_topics(timeout=30).brokers.values()
    yield ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
    holder.flush(1)


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    with mock_brokers() as addresses:
        yield addresses


def read_back(servers: str, topic: str, enough: Callable[[Counter[str]], bool]) -> tuple[Counter[str], set[str]]:
    """How often each key is in a topic, once there are enough; and all values."""
    group = {"group.id": uuid.uuid4().hex, "auto.offset.reset": "earliest"}
    consumer = Consumer({"bootstrap.servers": servers, **group})
    consumer.subscribe([topic])
    found: Counter[str] = Counter()
    values: set[str] = set()
    deadline = time.monotonic() + DEADLINE_S
    while not enough(found):
        assert time.monotonic() < deadline, f"only {len(found)} keys came"
        message = consumer.poll(0.5)
        if message is not None and message.error() is None:
            key, value = message.key(), message.value()
            assert key is not None
            assert value is not None
            found[key.decode()] += 1
            values.add(value.decode())
    consumer.close()
    return found, values


class Feeding:
    """A book and its feed, as their owner has them."""

    def __init__(self, path: Path, servers: str, topic: str, bounds: LogBounds | None = None) -> None:
        self.states: list[KafkaState] = []
        self.book = UsageBook(path, bounds or LogBounds(3000, 1000), path.with_name("counts") / "usage.json")
        self.feed = KafkaFeed(self.book.log, KafkaTarget(servers, topic, {}), self.states.append)
        self.book.on_removal = self.feed.removing

    def append(self, *numbers: int) -> None:
        self.feed.added(self.book.append([event(number) for number in numbers]))

    def until(self, condition: Callable[[KafkaState], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition(self.feed.state):
            assert time.monotonic() < deadline, self.feed.state
            time.sleep(0.02)

    def close(self) -> None:
        self.feed.close()
        self.book.close()


@pytest.fixture
def topic() -> str:
    return f"usage-{uuid.uuid4().hex[:8]}"


def test_every_line_gets_there_over_rotations_and_restarts(tmp_path: Path, servers: str, topic: str) -> None:
    path = tmp_path / "usage.jsonl"
    first = Feeding(path, servers, topic)
    first.append(*range(1, 20))
    first.feed.start()
    for number in range(20, 101):
        first.append(number)
    first.until(lambda state: state.delivered >= 50)
    first.close()
    second = Feeding(path, servers, topic)
    second.feed.start()
    for number in range(101, 151):
        second.append(number)
    second.until(lambda state: state.lag == 0)
    second.close()
    wanted = {f"a1-{number}" for number in range(1, 151)}
    found, values = read_back(servers, topic, lambda found: set(found) >= wanted)
    assert set(found) == wanted == set(ids_of(path))
    assert values == {event(number).line().decode().rstrip("\n") for number in range(1, 151)}
    assert sum(found.values()) == 150, "nobody was killed, so none came twice"
    third = Feeding(path, servers, topic)
    assert third.feed.state == KafkaState(lag=0, delivered=0, lost=0, failures=0)
    third.close()


def test_who_dies_before_the_place_is_kept_sends_again(tmp_path: Path, servers: str, topic: str) -> None:
    path = tmp_path / "usage.jsonl"
    for _ in range(2):
        feeding = Feeding(path, servers, topic)
        feeding.append(*range(1, 11))
        feeding.feed.start()
        feeding.until(lambda state: state.delivered == 10)
        feeding.close()
        (tmp_path / "usage.jsonl.kafka").unlink()
    found, _ = read_back(servers, topic, lambda found: sum(found.values()) >= 20)
    assert found == {f"a1-{number}": 2 for number in range(1, 11)}, "with the same keys"


@pytest.mark.slow
def test_brokers_that_are_away_hold_up_nothing(
    tmp_path: Path, servers: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are written at once, and get there when there are brokers again."""
    monkeypatch.setattr(kafka_feed, "_DELIVERY_S", 1.0)
    monkeypatch.setitem(kafka_feed._OURS, "message.timeout.ms", 1000)
    path = tmp_path / "usage.jsonl"
    away = Feeding(path, "127.0.0.1:9", topic)
    away.feed.start()
    away.append(*range(1, 6))
    away.until(lambda state: state.failures >= 2)
    away.append(*range(6, 9))
    assert away.feed.state.lag == 8
    assert away.feed.state.delivered == 0
    away.close()
    assert away.states[-1].failures >= 2
    back = Feeding(path, servers, topic)
    assert back.feed.state.lag == 8
    back.feed.start()
    back.until(lambda state: state.lag == 0)
    back.close()
    wanted = {f"a1-{number}" for number in range(1, 9)}
    read_back(servers, topic, lambda found: set(found) == wanted)


def test_what_the_bound_removes_first_is_counted(
    tmp_path: Path, servers: str, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "usage.jsonl"
    feeding = Feeding(path, servers, topic, LogBounds(file_bytes=1000, kept_files=1))
    for number in range(1, 21):
        feeding.append(number)
    kept = ids_of(path)
    assert feeding.feed.state == KafkaState(lag=len(kept), delivered=0, lost=20 - len(kept), failures=0)
    assert "were removed before Kafka had them" in caplog.text
    feeding.feed.start()
    feeding.until(lambda state: state.lag == 0)
    feeding.close()
    found, _ = read_back(servers, topic, lambda found: len(found) >= len(kept))
    assert set(found) == set(kept)
    again = Feeding(path, servers, topic)
    assert again.feed.state.lost == 20 - len(kept), "and it is remembered"
    again.close()


@pytest.mark.parametrize("removed", [1, 2], ids=["the next", "a later one"])
def test_a_file_that_somebody_has_removed_is_passed_over(
    tmp_path: Path, servers: str, topic: str, caplog: pytest.LogCaptureFixture, removed: int
) -> None:
    path = tmp_path / "usage.jsonl"
    feeding = Feeding(path, servers, topic, LogBounds(file_bytes=1000, kept_files=100))
    for number in range(1, 11):
        feeding.append(number)
    (tmp_path / f"usage.jsonl.{removed}").unlink()
    left = ids_of(path)
    feeding.feed.start()
    feeding.append(11)
    feeding.until(lambda state: state.delivered == len(left) + 1)
    feeding.close()
    assert feeding.feed.state == KafkaState(lag=0, delivered=len(left) + 1, lost=10 - len(left), failures=0)
    found, _ = read_back(servers, topic, lambda found: len(found) > len(left))
    assert set(found) == {*left, "a1-11"}
    assert f"has lost the file that Kafka gets next, with {10 - len(left)} lines" in caplog.text
    again = Feeding(path, servers, topic)
    assert again.feed.state == KafkaState(lag=0, delivered=0, lost=10 - len(left), failures=0), "and it is remembered"
    again.close()


def test_a_line_is_no_loss_while_it_is_written_but_not_yet_told_of(tmp_path: Path, servers: str, topic: str) -> None:
    path = tmp_path / "usage.jsonl"
    feeding = Feeding(path, servers, topic, LogBounds(file_bytes=1000, kept_files=100))
    for number in range(1, 11):
        feeding.append(number)
    (tmp_path / "usage.jsonl.1").unlink()
    num_left = len(ids_of(path))
    num_added = feeding.book.append([event(11)])
    feeding.feed.start()
    feeding.until(lambda state: state.delivered == num_left + num_added)
    feeding.feed.added(num_added)
    feeding.close()
    assert feeding.feed.state == KafkaState(lag=0, delivered=num_left + num_added, lost=10 - num_left, failures=0)


def test_whatever_happens_the_feed_goes_on_after_a_pause(
    tmp_path: Path, servers: str, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kafka_feed, "_FIRST_PAUSE_S", 0.01)
    feeding = Feeding(tmp_path / "usage.jsonl", servers, topic)
    left = [TypeError("none of ours"), MemoryError(), KeyError("place")]

    def note(state: KafkaState) -> None:
        if left:
            raise left.pop()

    feeding.feed._note = note
    feeding.append(1, 2, 3)
    feeding.feed.start()
    feeding.until(lambda state: not left)
    feeding.append(4)
    feeding.until(lambda state: state.lag == 0)
    feeding.close()
    assert set(read_back(servers, topic, lambda found: len(found) >= 4)[0]) == {f"a1-{number}" for number in range(1, 5)}
    assert caplog.text.count("a bug in what sends the usage log to Kafka") == 3
    assert "none of ours" in caplog.text


def test_another_topic_gets_the_whole_log(tmp_path: Path, servers: str, topic: str) -> None:
    path = tmp_path / "usage.jsonl"
    for name in (topic, f"{topic}-2"):
        feeding = Feeding(path, servers, name)
        feeding.append(1, 2, 3)
        feeding.feed.start()
        feeding.until(lambda state: state.delivered == 3)
        feeding.close()


@pytest.mark.parametrize("content", ["", "[]", '{"topic": "t", "place": ["x"], "lost": 0}', '{"topic": 3}'])
def test_a_place_that_can_not_be_read_is_the_beginning(tmp_path: Path, content: str) -> None:
    (tmp_path / "usage.jsonl.kafka").write_text(content)
    feeding = Feeding(tmp_path / "usage.jsonl", "127.0.0.1:9", "t")
    feeding.append(1, 2)
    assert feeding.feed.state.lag == 2
    feeding.close()


@pytest.mark.parametrize("numbers", [[9], range(10**6, 10**6 + 9)], ids=["shorter", "longer"])
def test_a_log_that_was_begun_anew_is_sent_whole_though_its_place_is_left(
    tmp_path: Path, servers: str, topic: str, caplog: pytest.LogCaptureFixture, numbers: Sequence[int]
) -> None:
    """The place is behind the end of the new log, or in the middle of a line."""
    path = tmp_path / "usage.jsonl"
    first = Feeding(path, servers, topic)
    first.append(*range(1, 6))
    first.feed.start()
    first.until(lambda state: state.delivered == 5)
    first.close()
    path.unlink()
    again = Feeding(path, servers, topic)
    again.append(*numbers)
    again.close()
    anew = Feeding(path, servers, topic)
    assert anew.feed.state.lag == len(numbers)
    anew.append(*range(numbers[-1] + 1, numbers[-1] + 11))
    anew.feed.start()
    anew.until(lambda state: state.lag == 0)
    anew.close()
    assert anew.feed.state == KafkaState(lag=0, delivered=len(numbers) + 10, lost=0, failures=0)
    assert "is sent from its beginning" in caplog.text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"no.such.option": "1"}, "no.such.option"),
        ({"acks": "1"}, "acks can't be changed"),
        ({"enable.idempotence": "false", "bootstrap.servers": "x:1"}, "bootstrap.servers, enable.idempotence can't be changed"),
    ],
)
def test_options_that_can_not_work_are_one_sentence(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        check_kafka(KafkaTarget.of("localhost:9092/usage", options))
    assert refused.value.param == "telemetry.usage_kafka_options"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(ConfigError, match=r"pip install --editable '.\[kafka\]'"):
        check_kafka(KafkaTarget.of("localhost:9092/usage", {}))


def test_servers_and_topic_are_named_together() -> None:
    assert KafkaTarget.of("a:1,b:2/usage", {}) == KafkaTarget("a:1,b:2", "usage", {})
