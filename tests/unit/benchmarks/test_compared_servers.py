"""Systems by name, their turns, and what is taken from a run for interference; no server is started here."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.interference import LEAD_S, gaps
from benchmarks.lib.environment import ROOT
from benchmarks.lib.servers import HOST, SYSTEMS, ServerDidNotStart, System, healthy, serving, system, turns
from benchmarks.peers.setup import PeerEnv
from loadtest.records import RequestRecord

FAKE = """
import http.server
import sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
PEERS = PeerEnv(Path("/peers"))


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_tokens_of_a_step_are_part_of_the_command(name: str) -> None:
    kind, _, _ = name.partition(":")
    assert "96" not in system(kind, PEERS).command
    assert "96" in system(f"{kind}:96", PEERS).command
    assert "96 tokens a step" in system(f"{kind}:96", PEERS).settings


@pytest.mark.parametrize("name", ["vllm", "llama.cpp:128"])
def test_peers_need_their_folder(name: str) -> None:
    with pytest.raises(ValueError, match="--peer-env"):
        system(name, None)


@pytest.mark.parametrize("name", ["tandem:0", "tandem:", "tandem:many", "vllm:-1", "sglang"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name.partition(":")[0]):
        system(name, PEERS)


@given(st.integers(1, 5), st.integers(0, 6))
def test_each_round_has_every_system_once_and_begins_with_another(systems: int, rounds: int) -> None:
    named = [System(str(number), "", []) for number in range(systems)]
    taken = [(number, each.name) for number, each in turns(named, range(rounds))]
    order = [[name for number, name in taken if number == wanted] for wanted in range(rounds)]
    assert all(sorted(names) == sorted(each.name for each in named) for names in order)
    assert [names[0] for names in order] == [str(number % systems) for number in range(rounds)]


def fake_server() -> tuple[System, int]:
    """And a port for it."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        return System("fake", "", [sys.executable, "-c", FAKE]), int(free.getsockname()[1])


def test_a_server_lives_as_long_as_it_is_needed() -> None:
    fake, port = fake_server()
    with serving(fake, port) as url:
        assert url == f"http://{HOST}:{port}"
        assert healthy(port)
    assert not healthy(port)


@pytest.mark.slow
def test_no_server_is_left_when_the_driver_is_told_to_end() -> None:
    fake, port = fake_server()
    code = f"""
import time
from benchmarks.lib.servers import System, serving
with serving(System("fake", "", {fake.command!r}), {port}):
    print("serving", flush=True)
    time.sleep(60)
"""
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "serving\n"
    assert healthy(port)
    driver.terminate()
    driver.communicate(timeout=30)
    assert driver.returncode == 128 + signal.SIGTERM
    assert not healthy(port)


def test_a_server_that_ends_shows_what_it_said(capfd: pytest.CaptureFixture[str]) -> None:
    broken = System("broken", "", [sys.executable, "-c", "raise SystemExit('no such model')"])
    with pytest.raises(ServerDidNotStart, match="exit code 1"), serving(broken, 1):
        pytest.fail("it is not there")
    assert "no such model" in capfd.readouterr().err


def test_a_server_that_was_left_on_the_port_is_not_taken_for_ours() -> None:
    fake, port = fake_server()
    with serving(fake, port), pytest.raises(ServerDidNotStart, match=str(port)), serving(fake, port):
        pytest.fail("it would be the other one that is measured")


@given(st.floats(0.01, 4.9), st.lists(st.floats(0.001, 3.0), max_size=20), st.floats(0.0, 3.0))
def test_only_gaps_that_end_after_the_lead_count(ttft: float, itl: list[float], cut: float) -> None:
    stream = RequestRecord(0, 64, 4000, 0.0, ttft=ttft, itl=itl, e2el=ttft + sum(itl) + cut)
    found = gaps([stream, stream])
    assert len(found) % 2 == 0
    last, all_gaps = found[: len(found) // 2], [*itl, cut]
    assert last == pytest.approx(all_gaps[len(all_gaps) - len(last) :], abs=1e-9)
    end_of_others = ttft + sum(all_gaps[: len(all_gaps) - len(last)])
    assert end_of_others <= LEAD_S + 1e-9
    if last:
        assert end_of_others + last[0] > LEAD_S - 1e-9
