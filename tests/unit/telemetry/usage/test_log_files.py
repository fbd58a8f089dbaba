"""The files of the usage log: whole lines or nothing, whatever happens to their writer."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from telemetry.usage import log_files
from telemetry.usage.log_files import Place, UsageLog, check_usage_log, open_all, rotated_files, whole_lines
from tests.unit.telemetry.usage.events import event, ids_of

LINES = [event(number).line() for number in range(1, 6)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.jsonl"


@given(cut=st.integers(0, sum(map(len, LINES))))
def test_what_a_crash_has_cut_is_removed_and_never_read(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "usage.jsonl"
    path.write_bytes(b"".join(LINES)[:cut])
    whole = [number for number in range(1, 6) if sum(map(len, LINES[:number])) <= cut]
    assert ids_of(path) == [f"a1-{number}" for number in whole], "a reader leaves it out"
    usage_log = UsageLog(path)
    usage_log.append(event(9).line())
    usage_log.close()
    assert ids_of(path) == [f"a1-{number}" for number in (*whole, 9)]


def test_a_long_tail_without_an_end_is_removed(path: Path) -> None:
    path.write_bytes(LINES[0] + b"\0" * 300_000)
    usage_log = UsageLog(path)
    assert usage_log.end == Place(1, len(LINES[0]))
    usage_log.close()
    assert path.read_bytes() == LINES[0]


def test_zeros_around_what_a_crash_has_cut_are_removed_too(path: Path) -> None:
    path.write_bytes(LINES[0] + b"\0" * 100_000 + LINES[1][:20] + b"\0" * 100_000)
    check_usage_log(path)
    assert path.read_bytes() == LINES[0]


@pytest.mark.parametrize(
    "content",
    [
        b"no end of a line at all, but precious",
        b"a: 1\nb: 2",
        LINES[0] + b"x",
        b"GGUF" + bytes(range(256)) * 1000,
        LINES[0] + LINES[1][:-1] * 1000,
    ],
)
def test_another_file_is_refused_and_stays_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="it may be another file; nothing is cut off") as refused:
        check_usage_log(path)
    assert refused.value.param == "telemetry.usage_log"
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (content, 0o644)


def test_what_is_no_file_is_refused_and_stays_as_it_is(path: Path) -> None:
    """/dev/null, as root, would be closed to all others."""
    os.mkfifo(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="the usage log can't be written: it is no file"):
        check_usage_log(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_files_are_rotated_and_places_stay(path: Path) -> None:
    usage_log = UsageLog(path)
    places = []
    for line in LINES:
        places.append(usage_log.end)
        usage_log.append(line)
        usage_log.rotate()
    assert [number for number, _ in usage_log.rotated()] == [1, 2, 3, 4, 5]
    assert usage_log.numbers() == [1, 2, 3, 4, 5, 6]
    for place, line in zip(places, LINES, strict=True):
        file = usage_log.read_from(place)
        assert file is not None
        with file:
            assert list(whole_lines(file)) == [line]
    assert usage_log.read_from(Place(17, 0)) is None
    usage_log.close()
    again = UsageLog(path)
    assert again.end == Place(6, 0)
    again.close()
    assert UsageLog(path, least_number=9).end.number == 9
    assert ids_of(path) == [f"a1-{number}" for number in range(1, 6)]


def test_they_are_for_their_owner_alone(path: Path) -> None:
    path.write_bytes(b"")
    path.chmod(0o644)
    before = os.umask(0)
    try:
        usage_log = UsageLog(path)
        usage_log.append(LINES[0])
        usage_log.rotate()
        usage_log.close()
    finally:
        os.umask(before)
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()} == {0o600}
    assert {each.name for each in path.parent.iterdir()} == {"usage.jsonl", "usage.jsonl.1", "usage.jsonl.lock"}


def test_one_writer_at_a_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage_log = UsageLog(path)
    with pytest.raises(ConfigError, match="another cluster writes this usage log"):
        UsageLog(path)
    monkeypatch.setattr(log_files, "_ENDING_S", 0.2)
    with pytest.raises(ConfigError, match="another cluster"):
        check_usage_log(path)
    usage_log.close()
    check_usage_log(path)


def test_who_has_just_been_killed_is_waited_for(path: Path) -> None:
    usage_log = UsageLog(path)
    ending = threading.Timer(0.3, usage_log.close)
    ending.start()
    check_usage_log(path)
    ending.join()


def test_what_can_not_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "link", tmp_path / "no" / "folder", tmp_path):
        with pytest.raises(ConfigError, match="the usage log can't be written") as refused:
            check_usage_log(path)
        assert refused.value.param == "telemetry.usage_log"
    with pytest.raises(ConfigError, match="the usage log can't be read"):
        open_all(tmp_path / "nothing")


_FULL = """
import json, resource, sys
from pathlib import Path
from telemetry.usage.log_files import UsageLog
from tests.unit.telemetry.usage.events import event

log = UsageLog(Path(sys.argv[1]))
log.append(event(1).line())
size = log.end.offset
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 300, resource.RLIM_INFINITY))
try:
    log.append(event(2).line() + event(3).line())
    raise SystemExit("it has room")
except OSError:
    assert log.end.offset == size
assert Path(sys.argv[1]).stat().st_size == size, "what was begun is cut off again"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.append(event(2).line() + event(3).line())
print(json.dumps("done"))
"""


def test_a_full_disk_adds_nothing_and_room_again_adds_all(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _FULL, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == "done"
    assert ids_of(path) == ["a1-1", "a1-2", "a1-3"]


def test_a_reader_misses_nothing_while_files_are_rotated(path: Path) -> None:
    """Whatever was there when it began is read, once and in order."""
    usage_log = UsageLog(path)
    written: list[int] = [0]
    ending = threading.Event()

    def write() -> None:
        number = 0
        while not ending.is_set() and number < 20_000:
            number += 1
            usage_log.append(event(number).line())
            written[0] = number
            if number % 7 == 0:
                usage_log.rotate()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(30):
            there = written[0]
            found = [int(each.partition("-")[2]) for each in ids_of(path)]
            assert found == list(range(1, len(found) + 1))
            assert len(found) >= there
    finally:
        ending.set()
        writer.join()
        usage_log.close()


def test_a_file_that_was_moved_away_does_not_keep_it_from_going_on(path: Path) -> None:
    usage_log = UsageLog(path)
    usage_log.append(LINES[0])
    path.rename(path.with_name("mine"))
    usage_log.append(LINES[1])
    usage_log.rotate()
    usage_log.append(LINES[2])
    usage_log.close()
    assert ids_of(path.with_name("mine")) == ["a1-1", "a1-2"]
    assert ids_of(path) == ["a1-3"]


def test_other_files_beside_it_are_none_of_it(path: Path) -> None:
    for name in ("usage.jsonl.state", "usage.jsonl.kafka", "usage.jsonl.1.gz", "usage.jsonl.x", "other.1"):
        path.with_name(name).write_text("{}")
    path.with_name("usage.jsonl.10").write_text("")
    path.with_name("usage.jsonl.9").write_text("")
    assert [number for number, _ in rotated_files(path)] == [9, 10]


def test_a_line_that_is_too_long_is_no_line(path: Path) -> None:
    path.write_bytes(LINES[0] + b"x" * 200_000 + b"\n" + LINES[1])
    with path.open("rb") as file:
        assert list(whole_lines(file)) == [LINES[0], b"\n", LINES[1]]
