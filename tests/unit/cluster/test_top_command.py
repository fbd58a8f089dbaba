"""`tandem top`: its arithmetic, what it draws, and how it begins and ends."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cluster.commands import cli
from cluster.commands.top import figures
from cluster.commands.top.command import watch
from cluster.commands.top.figures import Poll, Polls
from cluster.commands.top.screen import draw
from protocol.errors import AuthenticationError, UnavailableError
from tests.unit.http_servers import serving, url_of
from tests.unit.polled_clusters import Counts, status, unheard, worker

DEADLINE_S = 30.0


def poll(at_s: float, *workers: dict[str, Any], counts: Counts | None = None, **wanted: int) -> Poll:
    return Poll.of(at_s, status(*workers, **wanted), (counts or Counts()).text())


@given(st.lists(st.floats(0.0001, 1000), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(observed: list[float], share: float) -> None:
    counts = Counts()
    counts.metrics.time_to_first_token.observe(3.0)  # before the first poll, so it does not count
    before = poll(0.0, counts=counts)
    for value in observed:
        counts.metrics.time_to_first_token.observe(value)
    after = poll(1.0, counts=counts)
    found = figures.quantile(before, after, figures.FIRST_TOKEN, share)
    assert found is not None
    bounds = [0.0, *sorted(map(float, after.totals[f"{figures.FIRST_TOKEN}_bucket"]))]
    rank = max(0, math.ceil(share * len(observed)) - 1)
    true = sorted(observed)[rank]
    lower = max(bound for bound in bounds if bound < true)
    upper = min(bound for bound in bounds if bound >= true)
    assert share == 0 or lower <= found <= upper * 1.0001


def test_figures_without_any_request_are_unknown() -> None:
    before, after = poll(0.0, worker("prefill-0")), poll(1.0, worker("prefill-0"))
    assert figures.stage_means(before, after) is None
    assert figures.quantile(before, after, figures.FIRST_TOKEN, 0.5) is None
    assert figures.cache_hits(before, after) is None
    assert figures.token_rates(before, after) == (0.0, 0.0)
    assert after.model == "smollm2"


def test_stages_and_rates_are_of_what_came_between() -> None:
    counts = Counts()
    counts.request(9.0, 9.0, 9.0)
    before = poll(10.0, counts=counts)
    counts.request(0.1, 0.4, 2.0, prompt_tokens=100, tokens=50)
    counts.request(0.3, 0.6, 4.0, prompt_tokens=300, tokens=150)
    after = poll(12.0, counts=counts)
    assert figures.stage_means(before, after) == pytest.approx({"queue": 0.2, "prefill": 0.5, "decode": 3.0})
    assert figures.token_rates(before, after) == (200.0, 100.0)


def test_busy_fractions_are_of_one_life() -> None:
    rows = [worker("decode-0", busy_s=5.0), worker("decode-1", busy_s=9.0), worker("decode-2", busy_s=1.0), unheard("decode-3")]
    later = [
        worker("decode-0", busy_s=5.5),
        worker("decode-1", busy_s=0.5, epoch=2),
        worker("decode-2", busy_s=9.0),
        worker("decode-3", busy_s=1.0),
        worker("decode-4", busy_s=1.0),
    ]
    before, after = poll(0.0, *rows), poll(2.0, *later)
    assert figures.busy_fractions(before, after) == {
        "decode-0": 0.25,
        "decode-1": None,
        "decode-2": 1.0,
        "decode-3": None,
        "decode-4": None,
    }
    assert figures.role_busy(before, after, "decode") == 0.625
    assert figures.role_busy(before, after, "prefill") is None


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [((50.0, 5.0), (50.0, 8.0), 1.0), ((50.0, 12.0), (62.1, 0.0), 0.1 / 3)],
    ids=["during", "after"],
)
def test_a_long_step_counts_while_it_lasts(before: tuple[float, float], after: tuple[float, float], share: float) -> None:
    polls = [
        poll(at_s, worker("prefill-0", busy_s=busy_s, step_age_s=age_s))
        for at_s, (busy_s, age_s) in ((0.0, before), (3.0, after))
    ]
    assert figures.busy_fractions(*polls) == {"prefill-0": pytest.approx(share)}


def test_a_request_counts_once() -> None:
    counts = Counts()
    counts.metrics.waiting_requests.set(3)
    rows = worker("prefill-0", running=1, waiting=2), worker("decode-0", running=4, waiting=3)
    assert figures.request_counts(poll(0.0, *rows, counts=counts)) == (5, 5)
    assert figures.request_counts(poll(0.0, rows[1], counts=counts)) == (4, 6), "a colocated worker's prompts wait there"


def test_polls_are_kept_as_long_as_figures_need_them() -> None:
    polls = Polls()
    assert (polls.latest, polls.before(3)) == (None, None)
    for at_s in range(40):
        polls.add(poll(float(at_s)))
    found = [polls.before(seconds) for seconds in (3, 30, 99)]
    assert [None if each is None else each.at_s for each in found] == [36.0, 9.0, 9.0]
    polls.add(poll(50.0))
    assert polls.before(3) is None, "after a silence figures begin anew"
    slow = Polls(interval_s=20)
    slow.add(poll(0.0))
    slow.add(poll(20.0))
    assert slow.before(3) is not None


def drawn(polls: Polls, size: tuple[int, int] | None, problem: str | None = None) -> str:
    console = Console(file=io.StringIO(), width=size[0] if size else 200, height=size[1] if size else 50)
    console.print(draw(polls, size, problem))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def two_polls(workers: int) -> Polls:
    counts, polls = Counts(), Polls()
    for at_s in (0.0, 2.0):
        rows = [worker(f"{role}-{i}", busy_s=at_s / 4, running=i) for role in ("prefill", "decode") for i in range(workers)]
        polls.add(poll(at_s, *rows, counts=counts, prefill=workers + 1))
        counts.request(0.1, 0.4, 1.5, prompt_tokens=2_500, tokens=40)
    return polls


def test_the_screen_shows_every_worker_and_the_whole() -> None:
    text = drawn(two_polls(11), None)
    first = text.splitlines()[0]
    assert first.split("   ") == [
        "smollm2",
        "prefill 11/12",
        "decode 11/11",
        "110 running, 0 waiting",
    ]
    assert "tokens/s: 1.2k in, 20 out   prompt cached: -" in text
    assert "time: queue 100 ms (5%), prefill 400 ms (20%), decode 1.50 s (75%)" in text
    assert "prefill, 25% busy" in text
    order = [line.split()[0] for line in text.splitlines() if line.startswith("decode-")]
    assert order == [f"decode-{index}" for index in range(11)]


def test_the_screen_fits_into_the_terminal() -> None:
    for size, side_by_side in (((80, 24), False), ((200, 24), True), ((80, 60), False)):
        lines = drawn(two_polls(16), size, "figures are 4 s old: no cluster answers").splitlines()
        assert len(lines) <= size[1]
        assert max(map(len, lines)) <= size[0]
        assert any("prefill-0" in line and "decode-0" in line for line in lines) is side_by_side
        assert any(line.startswith("figures are 4 s old") for line in lines)
        assert any(" more" in line for line in lines) is (size[1] == 24 and not side_by_side)


def test_the_screen_tells_what_is_wrong_with_a_worker() -> None:
    polls = Polls()
    dead = unheard("decode-0", epoch=3, restarts=2, last_error="killed by [signal] 9")
    polls.add(poll(0.0, worker("prefill-0", linked=False), dead))
    text = drawn(polls, None)
    assert "decode-0: killed by [signal] 9" in text
    assert "out of reach" in text
    (row,) = (line.split() for line in text.splitlines() if line.startswith("decode-0 "))
    assert row == ["decode-0", "starting", "-", "-", "-", "-", "-", "-", "2"]


@pytest.mark.parametrize(
    ("paused", "problem", "said"),
    [
        (None, None, "autoscaler: running   latest: decode 1 -> 2: more"),
        ("scaled by hand", None, "autoscaler: paused, scaled by hand   latest: decode 1 -> 2: more"),
        (None, "no measurements", "autoscaler: running   autoscaler: no measurements   latest: decode 1 -> 2: more"),
    ],
)
def test_the_screen_tells_of_the_autoscaler(paused: str | None, problem: str | None, said: str) -> None:
    state = {"paused": paused, "problem": problem, "decisions": [{"reason": "decode 1 -> 2: more"}, {"reason": "older"}]}
    polls = Polls()
    polls.add(replace(poll(0.0, worker("prefill-0")), autoscaler=state))
    assert said in drawn(polls, None).splitlines()


def test_the_screen_tells_of_a_rollout() -> None:
    state = {
        "revision": 2,
        "phase": "rolling_back",
        "share": 0.0,
        "changes": ["dtype: a -> b"],
        "verdict": "slower",
        "figures": {},
    }
    polls = Polls()
    polls.add(replace(poll(0.0, worker("prefill-0")), rollout=state | {"verdict": "slower", "reason": "too slow"}))
    assert "rollout of revision 2 (dtype: a -> b): rolling back; too slow" in drawn(polls, None).splitlines()


class _Cluster(BaseHTTPRequestHandler):
    """A cluster of two workers: one is idle, and the other says that it computes more than all the time."""

    def do_GET(self) -> None:
        rows = worker("prefill-0"), worker("decode-0", busy_s=time.monotonic() * 1000)
        answers = {
            "/admin/status": json.dumps(status(*rows)),
            "/metrics": Counts().text(),
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answers[self.path].encode())

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(_Cluster) as server:
        yield url_of(server)


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["tandem", "top", *arguments])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    return int(exited.value.code or 0)


def test_once_prints_one_frame_and_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert ended(monkeypatch, "--once", "--interval", "0.2", "--url", url) == 0
    text = capsys.readouterr().out
    assert text.startswith("smollm2   prefill 1/1   decode 1/1   0 running, 0 waiting")
    for name, busy in (("prefill-0", "0%"), ("decode-0", "100%")):
        (row,) = (line.split() for line in text.splitlines() if line.startswith(f"{name} "))
        assert (row[1], row[3]) == ("ready", busy)


class _Guarded(_Cluster):
    """A cluster on loopback whose metrics alone have a key."""

    def do_GET(self) -> None:
        if self.path == "/metrics" and self.headers["Authorization"] != "Bearer of-metrics":
            self.send_error(401)
        else:
            super().do_GET()


def test_the_key_of_the_metrics_is_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(_Guarded) as server:
        arguments = ("--once", "--interval", "0.1", "--url", url_of(server))
        assert ended(monkeypatch, *arguments) == 2
        monkeypatch.setenv("TANDEM_METRICS_KEY", "of-metrics")
        assert ended(monkeypatch, *arguments) == 0
    assert capsys.readouterr().out.startswith("smollm2   prefill 1/1")


def test_a_live_view_needs_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert ended(monkeypatch, "--url", url) == 2
    assert "tandem top --once" in capsys.readouterr().err


def test_ctrl_c_ends_it_cleanly(url: str) -> None:
    """In a terminal of its own: it draws, draws again, and gives the terminal back."""
    ours, its = pty.openpty()
    command = [sys.executable, "-c", "from cluster.commands.cli import main; main()", "top", "--interval", "0.1", "--url", url]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment)
    os.close(its)
    deadline, text = time.monotonic() + DEADLINE_S, ""

    def read_until(*parts: str) -> None:
        nonlocal text
        while not all(part in text for part in parts):
            assert time.monotonic() < deadline, text
            if select.select([ours], [], [], 0.2)[0]:
                text += os.read(ours, 65536).decode(errors="replace")

    read_until("decode-0", "100%")
    process.send_signal(signal.SIGINT)
    read_until("\x1b[?1049l")
    os.close(ours)
    assert process.wait(DEADLINE_S) == 0
    assert "Traceback" not in text


class _Forgetful:
    """Answers once; then nobody is there, and at last a key is wanted."""

    def __init__(self) -> None:
        self.looks = 0

    def get(self, path: str) -> Any:
        self.looks += 1
        if self.looks == 2:
            raise UnavailableError("no cluster answers")
        if self.looks == 4:
            raise AuthenticationError("this needs the operator's key")
        return status(worker("decode-0"))

    def get_text(self, path: str) -> str:
        return Counts().text()


def test_it_goes_on_while_nobody_answers_and_ends_when_it_is_refused() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
    cluster: Any = _Forgetful()
    with pytest.raises(AuthenticationError):
        watch(cluster, console, 0.01)
    assert cluster.looks == 4
    assert isinstance(console.file, io.StringIO)
    assert "figures are 0 s old: no cluster answers" in console.file.getvalue()
