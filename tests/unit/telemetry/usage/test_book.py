"""The owner of a usage log: each event once, and all sums those of the lines, though owners are killed and disks fill up."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from telemetry.usage.book import LogBounds, UsageBook
from telemetry.usage.event import UsageEvent
from telemetry.usage.log_files import rotated_files
from telemetry.usage.reading import Wanted, sum_usage
from telemetry.usage.totals import UsageTotals
from tests.unit.telemetry.usage.events import NOVEMBER, event, ids_of, lines_of

BOUNDS = LogBounds(file_bytes=2000, kept_files=1000)


def opened(path: Path, bounds: LogBounds = BOUNDS) -> UsageBook:
    return UsageBook(path, bounds, path.with_name("counts") / "usage.json")


def shown(path: Path) -> dict[tuple[str, ...], float]:
    """What /metrics tells, by name and labels."""
    collector = UsageTotals(path.with_name("counts") / "usage.json")
    return {
        (sample.name.removeprefix("tandem:usage_"), *(sample.labels.values())): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def sums_are_those_of_the_lines(path: Path) -> None:
    """What /metrics tells is what the files say."""
    sums: Counter[tuple[str, ...]] = Counter()
    for line in lines_of(path):
        whose = (line["model"], line["tenant"])
        sums["events_total", *whose, line["outcome"]] += 1
        sums["prompt_tokens_total", *whose] += line["prompt_tokens"]
        sums["cached_tokens_total", *whose] += line["cached_tokens"]
        sums["generation_tokens_total", *whose] += line["answer_tokens"]
    assert shown(path) == dict(sums)


class Router:
    """Sends its events in batches, and sends a batch again until it is acknowledged."""

    def __init__(self, life: str) -> None:
        self.life = life
        self.num_ended = 0
        self.waiting: list[UsageEvent] = []
        self.acknowledged: list[str] = []

    def ends(self, number: int) -> None:
        for _ in range(number):
            self.num_ended += 1
            self.waiting.append(event(self.num_ended, self.life, tenant=random.choice(["acme", "zoo"])))

    def batch(self) -> Sequence[UsageEvent]:
        return self.waiting[:8]

    def hears(self, batch: Sequence[UsageEvent]) -> None:
        self.acknowledged += [f"{each.life}-{each.number}" for each in batch]
        del self.waiting[: len(batch)]


STEPS = st.lists(
    st.sampled_from(["ends", "written", "written and not heard", "fails", "half a line", "owner dies", "router dies"]),
    max_size=60,
)


@settings(deadline=None)
@given(STEPS)
def test_each_acknowledged_event_is_there_once(tmp_path_factory: pytest.TempPathFactory, steps: list[str]) -> None:
    path = tmp_path_factory.mktemp("book") / "usage.jsonl"
    book = opened(path)
    lives = iter(range(1000))
    routers = [Router(f"a{next(lives)}"), Router(f"a{next(lives)}")]
    all_routers = list(routers)
    for step in steps:
        if step == "ends":
            for router in routers:
                router.ends(3)
        elif step == "router dies":
            routers[0] = Router(f"a{next(lives)}")
            all_routers.append(routers[0])
        elif step == "owner dies":
            book.close()
            book = opened(path)
        elif step == "half a line":
            book.close()
            with path.open("ab") as file:
                file.write(event(99, "dead").line()[:-20])
            book = opened(path)
        elif step == "fails":
            before = lines_of(path)
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(OSError):
                patch.setattr(os, "fsync", _fails)
                book.append([each for router in routers for each in router.batch()])
            assert lines_of(path) == before
        else:
            batches = [router.batch() for router in routers]
            book.append([each for batch in batches for each in batch])
            for router, batch in zip(routers, batches, strict=True):
                if step == "written":
                    router.hears(batch)
    found = ids_of(path)
    assert len(set(found)) == len(found), "none is there twice"
    assert set(found) >= {each for router in all_routers for each in router.acknowledged}
    assert set(found) <= {f"{router.life}-{number}" for router in all_routers for number in range(1, router.num_ended + 1)}
    sums_are_those_of_the_lines(path)
    book.close()
    book = opened(path)
    sums_are_those_of_the_lines(path)
    book.close()


def _fails(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


_APPENDS = """
import sys
from pathlib import Path
from telemetry.usage.book import LogBounds, UsageBook
from tests.unit.telemetry.usage.events import event

path, life = Path(sys.argv[1]), sys.argv[2]
book = UsageBook(path, LogBounds(5000, 1000), path.with_name("counts") / "usage.json")
number = 0
while True:
    batch = [event(number + each, life) for each in range(1, 4)]
    book.append(batch)
    number += 3
    print(number, flush=True)
"""


def test_what_was_acknowledged_outlives_kill_9(tmp_path: Path) -> None:
    """A process appends and is killed at any moment, again and again; the next one has all that the last one said it had."""
    path, rng = tmp_path / "usage.jsonl", random.Random(1)
    said: dict[str, int] = {}
    for life in ("a", "b", "c", "d"):
        command = [sys.executable, "-c", _APPENDS, str(path), life]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(rng.randint(5, 60)):
                said[life] = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            for line in process.stdout.read().splitlines():
                said[life] = max(said[life], int(line)) if line.isdigit() else said[life]
    found = ids_of(path)
    assert len(set(found)) == len(found)
    for life, number in said.items():
        assert {f"{life}-{each}" for each in range(1, number + 1)} <= set(found)
        assert sum(each.startswith(f"{life}-") for each in found) <= number + 6
    book = opened(path)
    sums_are_those_of_the_lines(path)
    assert book.append([event(1, "a"), event(2, "b")]) == 0, "it knows those of before"
    book.close()


def test_sums_outlive_the_lines_that_the_bound_removes(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    bounds = LogBounds(file_bytes=1000, kept_files=2)
    book = opened(path, bounds)
    removed: list[int] = []
    book.on_removal = lambda number, path: removed.append(number)
    for number in range(1, 101):
        book.append([event(number)])
    month = book.month_use(None, NOVEMBER).used
    for wanted in (Wanted(month="2026-11"), Wanted(tenant="acme", month="2026-11"), Wanted(key="k1", month="2026-11")):
        assert sum_usage(path, wanted).budgets == month, "a reader has them, too"
    assert sum_usage(path, Wanted()).budgets == sum_usage(path, Wanted(month="2026-10")).budgets == {}
    book.close()
    assert removed == list(range(1, len(removed) + 1))
    assert removed
    files = [each for each in tmp_path.iterdir() if each.is_file() and each.suffix not in (".state", ".lock")]
    assert len(files) == 3
    assert all(each.stat().st_size <= 1000 for each in files)
    assert len(ids_of(path)) < 100
    for _ in range(2):
        assert shown(path)["events_total", "m", "acme", "done"] == 100
        assert shown(path)["generation_tokens_total", "m", "acme"] == 5050
        book = opened(path, bounds)
        assert book.month_use(None, NOVEMBER).used == month
        assert month["k1"] == sum(event(number).used.tokens for number in range(1, 101))
        assert book.append([event(100), event(3)]) == 0
        book.close()


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"version": 1}', b'{"version": 2, "place": [1, 0]}', b"\xff"])
def test_a_state_that_can_not_be_read_is_made_of_the_lines_again(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "usage.jsonl"
    book = opened(path)
    for number in range(1, 30):
        book.append([event(number)])
    book.close()
    (tmp_path / "usage.jsonl.state").write_bytes(content)
    opened(path).close()
    sums_are_those_of_the_lines(path)
    assert "can't be read" in caplog.text


def test_who_dies_within_a_rotation_leaves_sums_that_are_right(tmp_path: Path) -> None:
    """After the file was renamed, before the state was written."""
    path = tmp_path / "usage.jsonl"
    book = opened(path, LogBounds(1000, 100))
    for number in range(1, 8):
        book.append([event(number)])
    book.log.rotate()
    book.close()
    opened(path).close()
    sums_are_those_of_the_lines(path)


@pytest.mark.parametrize("in_the_way", ["usage.jsonl.1", "usage.jsonl.state.new"])
def test_a_rotation_that_fails_does_not_stop_the_log(tmp_path: Path, in_the_way: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "usage.jsonl"
    book = opened(path, LogBounds(file_bytes=1000, kept_files=1))
    (tmp_path / in_the_way).mkdir()
    for number in range(1, 31):
        assert book.append([event(number)]) == 1
    assert caplog.text.count("Is a directory") == 1, "it is not tried each time, nor said"
    assert ids_of_files(path) == [f"a1-{number}" for number in range(1, 31)], "nothing is removed that is in no state"
    sums_are_those_of(path, 30)
    (tmp_path / in_the_way).rmdir()
    book._rotate_at = book._keep_at = 0.0  # the pause is over
    for number in range(31, 41):
        book.append([event(number)])
    assert path.stat().st_size <= 1000
    assert len(book.log.rotated()) == 1
    sums_are_those_of(path, 40)
    book.close()
    opened(path).close()
    sums_are_those_of(path, 40)


def ids_of_files(path: Path) -> list[str]:
    """The ids of all lines, but what is no file."""
    files = [each for _, each in rotated_files(path) if each.is_file()] + [path]
    return [json.loads(line)["id"] for each in files for line in each.read_bytes().splitlines()]


def sums_are_those_of(path: Path, number: int) -> None:
    """What /metrics tells is what so many events amount to, removed ones among them."""
    assert shown(path)["events_total", "m", "acme", "done"] == number
    assert shown(path)["generation_tokens_total", "m", "acme"] == sum(range(1, number + 1))


def test_a_log_that_was_cut_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    book = opened(path, LogBounds(10_000, 100))
    book.append([event(1), event(2)])
    book.close()
    path.write_bytes(b"")
    for number in (3, 4, 5):
        book = opened(path, LogBounds(10_000, 100))
        assert book.append([event(number)]) == 1
        assert shown(path)["events_total", "m", "acme", "done"] == number
        book.close()


def test_a_reader_has_months_that_the_state_has_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    book = opened(path, LogBounds(1000, 1000))
    for number in range(1, 41):
        book.append([event(number, ended=NOVEMBER - (40 - number) // 8 * 31 * 86_400)])
    for month, numbers in (("2026-07", range(1, 9)), ("2026-11", range(33, 41))):
        sums = sum_usage(path, Wanted(month=month))
        assert sums.budgets["k1"] == sums.total().tokens == sum(event(number).used.tokens for number in numbers)
    book.close()


def test_lines_that_can_not_be_read_count_for_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_bytes(event(1).line() + b"\0\0\0\n{}\n" + event(2).line())
    opened(path).close()
    assert shown(path)["events_total", "m", "acme", "done"] == 2
    assert "2 lines of the usage log can't be read" in caplog.text


@settings(deadline=None)
@given(tenant=st.text(max_size=300), model=st.text(max_size=300), request=st.text(max_size=300))
def test_any_names_are_labels_and_one_line(tmp_path_factory: pytest.TempPathFactory, **names: str) -> None:
    path = tmp_path_factory.mktemp("names") / "usage.jsonl"
    book = opened(path)
    book.append([event(1, **names)])
    book.close()
    [line] = lines_of(path)
    assert [line["tenant"], line["model"]] == [names["tenant"], names["model"]]
    registry = CollectorRegistry()
    registry.register(UsageTotals(path.with_name("counts") / "usage.json"))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    [sample] = [each for family in families for each in family.samples if each.name == "tandem:usage_events_total"]
    assert sample.labels == {"model_name": names["model"], "tenant": names["tenant"], "outcome": "done"}


def test_metrics_that_can_not_be_left_hold_up_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "usage.jsonl"
    (tmp_path / "counts").write_text("no folder")
    book = opened(path)
    assert book.append([event(1)]) == 1
    book.close()
    assert ids_of(path) == ["a1-1"]
    assert "not in the metrics" in caplog.text
    assert shown(path) == {}


@given(
    wanted=st.builds(
        Wanted, *[st.sampled_from(each) for each in ([None, "acme", 'z"oo'], [None, "k1", "k\\2"], [None, "2026-11"])]
    )
)
@settings(deadline=None)
def test_sums_of_some_lines(tmp_path_factory: pytest.TempPathFactory, wanted: Wanted) -> None:
    path = tmp_path_factory.mktemp("sums") / "usage.jsonl"
    book, rng = opened(path), random.Random(7)
    events = [
        event(
            number,
            tenant=rng.choice(["acme", 'z"oo']),
            key=rng.choice([None, "k1", "k\\2"]),
            model=rng.choice("mn"),
            ended=NOVEMBER + rng.randint(-40, 40) * 86_400,
        )
        for number in range(1, 41)
    ]
    book.append(events)
    with path.open("ab") as file:
        file.write(b'{"half')
    expected: dict[Any, list[int]] = {}
    for each in (each.used for each in events):
        if all(
            want in (None, own)
            for want, own in ((wanted.tenant, each.tenant), (wanted.key, each.key), (wanted.month, each.month))
        ):
            row = expected.setdefault((each.tenant, each.key, each.model), [0, 0, 0])
            row[0] += 1
            row[1] += each.prompt_tokens
            row[2] += each.answer_tokens
    sums = sum_usage(path, wanted)
    assert {whose: [row.requests, row.prompt_tokens, row.answer_tokens] for whose, row in sums.rows.items()} == expected
    assert sums.total().requests == sum(row[0] for row in expected.values())
    assert sums.num_bad == 0
    assert sums.since == json.loads(events[0].line())["time"]
    book.close()
