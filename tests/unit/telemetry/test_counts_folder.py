"""Counts of several routers in one folder: all of them are read, killed ones' among them, and a successor goes on counting."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import mark_process_dead
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from telemetry import counts_folder
from telemetry.counts_folder import CountsReader, num_places
from telemetry.elsewhere import Merged

_ROUTER = """
import json, sys
from pathlib import Path
from telemetry.cluster_metrics import ClusterSample
from telemetry.counts_folder import CountsFolder
from telemetry.metrics import Metrics

folder = CountsFolder(*map(Path, sys.argv[1:2]), *sys.argv[2:])
metrics = Metrics("m", ClusterSample, folder)
print(json.dumps(folder.place), flush=True)
for line in sys.stdin:
    exec(line)
    print(json.dumps(metrics.render(metrics.sample()).decode()), flush=True)
"""


class Router:
    """A process that counts in the folder."""

    def __init__(self, folder: Path, *node: str) -> None:
        command = [sys.executable, "-c", _ROUTER, str(folder), *node]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.place = json.loads(_pipe(self.process.stdout).readline())

    def does(self, line: str) -> dict[tuple[str, ...], float]:
        """What it reads after this line of Python, by name and labels."""
        pipe = _pipe(self.process.stdin)
        pipe.write(f"{line}\n")
        pipe.flush()
        text = json.loads(_pipe(self.process.stdout).readline())
        return {
            (sample.name, *(value for key, value in sorted(sample.labels.items()) if key != "model_name")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def ready(self) -> int:
        """How many it finds ready."""
        return int(self.does("metrics.waiting_requests.set(folder.num_ready())")["tandem:router_requests_waiting", self.place])

    def kill(self) -> None:
        """Without a chance to write anything."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


Start = Callable[..., Router]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    routers: list[Router] = []

    def started(*node: str, folder: str = "counts") -> Router:
        routers.append(Router(tmp_path / folder, *node))
        return routers[-1]

    yield started
    for router in routers:
        router.kill()


def test_any_router_tells_of_all(start: Start) -> None:
    one, two, three = start(), start(), start()
    assert [router.place for router in (one, two, three)] == ["router-0", "router-1", "router-2"]
    one.does("metrics.generation_tokens.inc(5); metrics.succeeded('stop'); metrics.waiting_requests.set(4)")
    two.does("metrics.generation_tokens.inc(7); metrics.time_to_first_token.observe(0.3)")
    read = three.does("metrics.waiting_requests.set(2)")
    assert (read["tandem:generation_tokens_total", "router-0"], read["tandem:generation_tokens_total", "router-1"]) == (5, 7)
    assert read["tandem:request_success_total", "stop", "router-0"] == 1
    assert read["tandem:time_to_first_token_seconds_count", "router-1"] == 1
    assert read["tandem:time_to_first_token_seconds_bucket", "0.5", "router-1"] == 1
    assert read["tandem:time_to_first_token_seconds_bucket", "0.25", "router-1"] == 0
    assert (read["tandem:router_requests_waiting", "router-0"], read["tandem:router_requests_waiting", "router-2"]) == (4, 2)


def test_what_a_killed_router_has_counted_stays(start: Start) -> None:
    one, two = start(), start()
    one.does("metrics.generation_tokens.inc(5); metrics.waiting_requests.set(4); metrics.tenant('a').prompt_tokens.inc(9)")
    one.kill()
    read = two.does("")
    assert read["tandem:generation_tokens_total", "router-0"] == 5
    assert ("tandem:router_requests_waiting", "router-0") not in read, "nobody waits at a router that has ended"
    again = start()
    assert again.place == "router-0"
    read = again.does("metrics.generation_tokens.inc(1); metrics.tenant('a').prompt_tokens.inc(1)")
    assert read["tandem:generation_tokens_total", "router-0"] == 6
    assert read["tandem:tenant_prompt_tokens_total", "router-0", "a"] == 10
    assert read["tandem:router_requests_waiting", "router-0"] == 0


def test_who_is_asked_tells_of_the_file_of_api_keys_and_nobody_else(start: Start) -> None:
    """All read the same file: what another one has read at an earlier scrape says nothing."""
    one, two = start(), start()
    read = one.does("metrics.api_keys.note(2, outdated=True)")
    assert (read["tandem:api_keys_skipped",], read["tandem:api_keys_outdated",]) == (2, 1)
    read = two.does("metrics.api_keys.note(0, outdated=False)")
    assert {key: value for key, value in read.items() if key[0].startswith("tandem:api_keys_")} == {
        ("tandem:api_keys_skipped",): 0,
        ("tandem:api_keys_outdated",): 0,
    }


def test_the_disk_has_given_its_room_before_anything_is_counted(start: Start, tmp_path: Path) -> None:
    """The files are mapped: a page that a full disk can't give would end the router."""
    router = start()
    router.does("[metrics.tenant(f't{n}').prompt_tokens.inc() for n in range(100)]")
    files = [path.stat() for path in (tmp_path / "counts").glob("*.db")]
    assert len(files) == 3
    assert all(file.st_blocks * 512 >= file.st_size == 1 << 20 for file in files)


def test_places_tell_how_many_routers_there_are(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "counts"
    assert num_places(folder) == 0
    one, two = start(), start()
    assert num_places(folder) == 2
    assert one.ready() == 0, "both start"
    one.does("folder.note_ready()")
    assert (one.ready(), two.ready()) == (1, 1)
    two.does("folder.note_ready()")
    assert (one.ready(), num_places(folder)) == (2, 2)
    two.kill()
    assert (one.ready(), num_places(folder)) == (1, 1)
    again = start()
    assert again.place == two.place
    assert (one.ready(), num_places(folder)) == (1, 2), "it starts where a ready one was"


def test_routers_of_two_nodes_are_told_apart_and_together(start: Start, tmp_path: Path) -> None:
    """As it is where routers of several nodes count: each folder is read on its node, by who has no place in it."""
    here, there, other = start(), start("10.0.0.7", folder="there"), start("10.0.0.7", folder="there")
    assert (here.place, there.place, other.place) == ("router-0", "router-10.0.0.7-0", "router-10.0.0.7-1")
    there.does("folder.note_ready()")
    for router in (here, there, other, other):
        router.does(
            "(metrics.resumed_streams.inc(), metrics.time_to_first_token.observe(0.01), metrics.waiting_requests.set(3))"
        )
    other.kill()
    reader = CountsReader(tmp_path / "there")
    assert reader.num_ready() == 1
    told = pickle.loads(pickle.dumps([*reader.collect()]))
    text = generate_latest(registered(Merged([*CountsReader(tmp_path / "counts").collect(), *told]))).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    counted = {sample.labels["router"]: sample.value for sample in families["tandem:resumed_streams"].samples}
    assert counted == {"router-0": 1, "router-10.0.0.7-0": 1, "router-10.0.0.7-1": 2}
    waiting = {sample.labels["router"] for sample in families["tandem:router_requests_waiting"].samples}
    assert waiting == {"router-0", "router-10.0.0.7-0"}, "what has ended waits for nothing"
    assert text.count("# TYPE tandem:time_to_first_token_seconds ") == 1
    assert text.count('time_to_first_token_seconds_bucket{le="+Inf"') == 3


def test_a_router_that_has_ended_is_none_while_somebody_reads(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start()
    one.does("folder.note_ready()")
    one.kill()
    reader, found = CountsReader(tmp_path / "counts"), []

    def removed_by_another(place: str, folder: str) -> None:
        found.append((reader.num_ready(), num_places(Path(folder))))
        mark_process_dead(place, folder)
        raise FileNotFoundError(place)

    monkeypatch.setattr(counts_folder, "mark_process_dead", removed_by_another)
    families = {family.name for family in reader.collect()}
    assert found == [(0, 0)]
    assert "tandem:generation_tokens" in families


def registered(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def test_a_successor_has_no_more_tenants_than_anybody(start: Start) -> None:
    one = start()
    one.does("[metrics.tenant(f't{n}').prompt_tokens.inc() for n in range(100)]")
    one.kill()
    read = start().does("[metrics.tenant(f'u{n}').prompt_tokens.inc() for n in range(5)]")
    tenants = {key[2]: value for key, value in read.items() if key[0] == "tandem:tenant_prompt_tokens_total"}
    assert len(tenants) == 101
    assert tenants["(others)"] == 5


def test_a_folder_of_no_use_says_so(tmp_path: Path) -> None:
    (tmp_path / "counts").write_text("no folder")
    ended = subprocess.run(
        [sys.executable, "-c", _ROUTER, str(tmp_path / "counts")], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert "FileExistsError" in ended.stderr
