"""The command line without a cluster: what it refuses, and the pure parts of its commands."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.commands import cli
from cluster.commands.chat import Conversation, Timing, answer_pieces, converse
from cluster.commands.lib.exits import MENDABLE, UNAVAILABLE
from cluster.commands.lib.foreground import changes, greeting
from cluster.commands.lib.http_client import ApiClient
from cluster.commands.lib.tables import print_status
from cluster.commands.workers.scale import parse_sizes, pending, what_a_scale_lacks
from cluster.ray.session import check_port_free, local_environment
from configs.schema import ClusterConfig, HttpConfig
from protocol.cluster_view import ClusterView, WorkerInfo, WorkerState
from protocol.errors import ConfigError, InvalidRequestError, OverloadedError, UnavailableError
from protocol.messages.workers import Role
from tests.unit.http_servers import serving, url_of


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = MENDABLE) -> str:
    """The one line that `tandem` says before it exits with this code."""
    monkeypatch.setattr("sys.argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    output = capsys.readouterr()
    assert ended.value.code == code, output
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("tandem: ")
    return line


def test_the_version_is_printed_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["tandem", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert capsys.readouterr() == ("tandem 0.3.0\n", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "--port", "eight"], "--port"),
        (["serve", "--port", "70000"], "http.port"),
        (["serve", "--prefill", "0"], "prefill.workers"),
        (["serve", "--decode", "2000"], "decode.workers"),
        (["serve", "--colocated", "--disaggregation", "auto"], "colocated"),
        (["serve", "--colocated", "--prefill", "2"], "prefill.workers"),
        (["serve", "--dtype", "float8"], "dtype"),
        (["serve", "--quantization", "int2"], "quantization"),
        (["serve", "--block-size", "17"], "block_size"),
        (["serve", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["serve", "--model", "nowhere.gguf"], "nowhere.gguf"),
        (["serve", "--what"], "--what"),
        (["sing"], "sing"),
        (["stop"], "--address"),
        (["stop", "--address", "127.0.0.1:1"], "127.0.0.1:1"),
        (["stop", "--address", "ray://127.0.0.1:10001"], "ray://127.0.0.1:10001"),
        (["stop", "--address", "127.0.0.1:99999"], "99999"),
        (["rollout", "--canary", "20%"], "--canary: name the configuration that is tried with --config"),
        (["rollout", "--watch", "60", "--min-requests", "20"], "--watch, --min-requests: name the configuration"),
        (["rollout", "--abort", "--watch", "60"], "--watch: name the configuration"),
        (["rollout", "--abort", "--config", "c.yaml"], "leave out --config"),
        (["rollout", "--config", "c.yaml", "--watch", "nan"], "--watch"),
        (["rollout", "--config", "c.yaml", "--watch", "0"], "--watch"),
        (["rollout", "--config", "c.yaml", "--min-requests", "9"], "--min-requests"),
        (["rollout", "--config", "c.yaml", "--wait", "60"], "--wait: only for a rollout without --config"),
        (["rollout", "--abort", "--room", "0", "--wait", "60"], "--room, --wait: only for a rollout without --config"),
        (["rollout", "--wait", "nan"], "--wait"),
        (["rollout", "--room", "nan"], "--room"),
        (["scale", "decode=1", "--wait", "nan"], "--wait"),
        (["drain", "decode-0", "--wait", "inf"], "--wait"),
        (["status", "--admin-key", "ä"], "the key has to be one line of ASCII"),
        (["status", "--admin-key", "a\nb"], "the key has to be one line of ASCII"),
        (["scale", "prefill"], "prefill"),
        (["scale", "prefill=two"], "prefill=two"),
        (["scale", "router=2"], "router=2"),
        (["scale", "routers=many"], "routers=many"),
        (["scale", "routers=1", "routers=2"], "routers"),
        (["scale", "decode=1", "decode=2"], "decode"),
        (["scale", f"prefill={'9' * 5000}"], "prefill=N"),
        (["top", "--once", "--interval", "inf"], "--interval"),
        (["top", "--once", "--interval", "nan"], "--interval"),
        (["top", "--once", "--interval", "1e10"], "--interval"),
        (["chat", "--temperature", "nan"], "--temperature"),
        (["chat", "--temperature", "inf"], "--temperature"),
        (["chat", "--max-tokens", "-3"], "--max-tokens"),
        (["plan", "--dataset", "random", "--random-input-len", "99999999999999999999"], "at most 100000000 tokens"),
        (["plan", "--dataset", "random", "--random-output-len", "99999999999999999999"], "at most 100000000 tokens"),
        (["bench", "--sharegpt-output-len", "-5"], "sharegpt-output-len"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert named in refused(monkeypatch, capsys, *arguments)


def test_an_unknown_key_in_the_configuration_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("decode: {worker: 2}\n")
    assert "decode.worker" in refused(monkeypatch, capsys, "serve", "--config", str(path))


def test_a_port_in_use_is_found_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use"):
            check_port_free("127.0.0.1", port)
    check_port_free("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"can't listen on 192\.0\.2\.77"):
        check_port_free("192.0.2.77", 8000)
    with pytest.raises(ConfigError, match=r"can't listen on ünï\.\.x"):
        check_port_free("ünï..x", 8000)


@pytest.mark.parametrize(
    "command", [["status"], ["top", "--once"], ["audit"], ["scale", "decode=2"], ["drain", "decode-0"], ["rollout"], ["chat"]]
)
def test_no_cluster_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert f"no cluster answers at {url}" in refused(monkeypatch, capsys, *command, "--url", url)


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("redis://127.0.0.1:{port}", UNAVAILABLE, "http.redis_url: no Redis answers there: "),
        ("nothing://127.0.0.1:{port}", MENDABLE, "http.redis_url: "),
    ],
)
def test_a_redis_that_is_away_may_come_and_a_wrong_url_may_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, url: str, code: int, said: str
) -> None:
    keys, config = tmp_path / "keys.json", tmp_path / "cluster.yaml"
    keys.write_text('{"version": 1, "keys": {}}')
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        config.write_text(f"http: {{keys_file: {keys}, redis_url: '{url.format(port=closed.getsockname()[1])}'}}")
        assert said in refused(monkeypatch, capsys, "serve", "--config", str(config), code=code)


def test_a_ray_cluster_that_is_away_may_come(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        line = refused(monkeypatch, capsys, "serve", "--address", address, code=UNAVAILABLE)
    assert f"no Ray cluster to join at {address}" in line
    assert "is no address" in refused(monkeypatch, capsys, "serve", "--address", "127.0.0.1:99999")


def test_sizes() -> None:
    assert parse_sizes(["prefill=2", "decode=3", "routers=2"]) == {"prefill": 2, "decode": 3, "routers": 2}
    assert parse_sizes(["decode=-1"]) == {"decode": -1}, "the cluster says which sizes it takes"
    with pytest.raises(InvalidRequestError):
        parse_sizes(["decode="])


def test_what_is_pending_after_a_scale() -> None:
    workers = [
        {"role": "prefill", "state": "ready"},
        {"role": "decode", "state": "ready"},
        {"role": "decode", "state": "starting"},
    ]
    status = {"workers": workers, "routers": {"wanted": 3, "ready": 2}}
    assert pending(status, {"prefill": 1, "routers": 2}) is None
    assert pending(status, {"prefill": 1, "decode": 2}) == "decode 1 ready, 1 starting of 2 wanted"
    assert pending(status, {"decode": 1}) == "decode 1 ready, 1 starting of 1 wanted"
    assert pending(status, {"prefill": 1, "routers": 3}) == "2 routers of 3 wanted"
    assert pending(status, {"routers": 1}) == "2 routers of 1 wanted", "one still has streams"


def test_a_scale_waits_for_no_size_that_is_no_longer_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lacking = what_a_scale_lacks({"decode": 3, "routers": 2})

    def look(decode: int, routers: int = 2) -> str | None:
        nonlocal now
        now += 2.0
        workers = [{"role": "decode", "state": "ready"}]
        return lacking({"workers": workers, "wanted": {"decode": decode}, "routers": {"wanted": routers, "ready": 2}})

    for decode in (1, 1, 3, 1, 3, 1):
        assert look(decode) == "decode 1 ready of 3 wanted", "a router may hear late of what is wanted"
    with pytest.raises(UnavailableError, match="others have changed what is wanted: decode=1 and no longer decode=3"):
        look(1)
    assert look(3)
    assert look(3, routers=1)
    with pytest.raises(UnavailableError, match="routers=1 and no longer routers=2"):
        look(3, routers=1)


def info(worker_id: str, epoch: int, state: WorkerState, error: str | None = None) -> WorkerInfo:
    role = Role(worker_id.partition("-")[0])
    return WorkerInfo(worker_id, role, epoch, state, None, (17,), "10.0.0.1", epoch - 1, error)


def test_changes_of_workers_are_told_once_each() -> None:
    before = ClusterView(
        1,
        (
            info("prefill-0", 1, WorkerState.READY),
            info("decode-0", 1, WorkerState.READY),
            info("decode-1", 1, WorkerState.READY),
            info("decode-2", 1, WorkerState.DRAINING),
        ),
    )
    after = ClusterView(
        2,
        (
            info("prefill-0", 1, WorkerState.READY),
            info("prefill-1", 1, WorkerState.STARTING),
            info("decode-0", 2, WorkerState.STARTING, "killed"),
            info("decode-1", 1, WorkerState.DRAINING),
        ),
    )
    assert changes(before, before) == []
    assert changes(before, after) == [
        "prefill-1 starts",
        "decode-0 ended (killed); starting it again as epoch 2",
        "decode-1 drains",
        "decode-2 is gone",
    ]
    assert changes(after, before)[0] == "decode-0 is ready to decode, process 17 on 10.0.0.1"
    assert changes(before, replace(before, routers=3)) == ["3 routers are wanted"]
    told = replace(before.workers[1], leaves_at=100.0, last_error="its node leaves at 1970-01-01 00:01:40 UTC")
    leaving = replace(before, workers=(before.workers[0], told, *before.workers[2:]))
    assert changes(before, leaving) == ["decode-0: its node leaves at 1970-01-01 00:01:40 UTC"]
    assert changes(leaving, leaving) == []
    stopping = replace(before, stopping=True)
    assert changes(before, stopping) == ["stopping: another command asked for it; no new requests are let in"]
    assert changes(stopping, stopping) == []


def test_the_greeting_is_a_request_that_can_be_pasted() -> None:
    view = ClusterView(1, (info("prefill-0", 1, WorkerState.READY), info("decode-0", 1, WorkerState.READY)))
    first, command = greeting(view, ClusterConfig(http=HttpConfig(port=9000)), "it's mine")
    assert first == "ready: 1 prefill + 1 decode, http://127.0.0.1:9000"
    import shlex

    words = shlex.split(command)
    assert words[:2] == ["curl", "http://127.0.0.1:9000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's mine"


def test_the_greeting_counts_workers_that_take_requests() -> None:
    waiting = replace(info("decode-1", 1, WorkerState.STANDBY), standby=True)
    starting = info("decode-2", 1, WorkerState.STARTING)
    view = ClusterView(1, (info("prefill-0", 1, WorkerState.READY), info("decode-0", 1, WorkerState.READY), waiting, starting))
    assert greeting(view, ClusterConfig(), "m")[0].startswith("ready: 1 prefill + 1 decode, ")


def test_a_conversation_keeps_answered_turns() -> None:
    talk = Conversation("m", system="Be brief.", temperature=0.0)
    assert talk.request("Hi")["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    talk.keep("Hi", "Hello.")
    body = talk.request("Who are you?")
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert (body["temperature"], "max_tokens" in body) == (0.0, False)


def test_pieces_of_an_answer_and_its_timing() -> None:
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Par"}}]},
        {"choices": [{"delta": {"content": "is."}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 4}},
    ]
    timing = Timing(begun=0.0)
    assert "".join(answer_pieces(iter(events), timing)) == "Paris."
    assert timing.first is not None
    assert timing.summary(timing.first + 1.5).startswith("4 tokens, first after ")
    assert timing.summary(timing.first + 1.5).endswith(" ms, 2.0 tokens/s")
    assert Timing(begun=0.0).summary(1.0) == "no answer"


def test_an_answer_that_was_stopped_has_no_count_of_tokens() -> None:
    timing = Timing(begun=0.0)
    list(answer_pieces(iter([{"choices": [{"delta": {"content": text}}]} for text in ("Par", "is")]), timing))
    assert timing.first is not None
    assert timing.summary(timing.first + 1.5) == f"first token after {timing.first * 1000:.0f} ms"


def test_a_local_cluster_is_closed_to_others(tmp_path: Path) -> None:
    first, second = local_environment(tmp_path), local_environment(tmp_path)
    assert first["RAY_AUTH_MODE"] == "token"
    assert len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert first["RAY_USAGE_STATS_ENABLED"] == "0"


LEAKY = {"leaks": [{"kind": "blocks", "message": "decode-0: 1 lost"}, {"kind": "claim", "message": "decode-1: ticket 4"}]}


class _Server(BaseHTTPRequestHandler):
    """Answers of a cluster, and of something that is none."""

    def do_POST(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        return

    def _answer(self) -> None:
        status, body = {
            "/full": (429, json.dumps({"error": {"message": "all full", "type": "x", "param": None, "code": "overloaded"}})),
            "/brackets/v1/chat/completions": (404, json.dumps({"error": {"message": "no [/INST] here", "code": "x"}})),
            "/page": (200, "<html>"),
            "/broken": (502, "Bad Gateway"),
            "/stream": (200, 'data: {"choices": []}\n\ndata: {"error": {"message": "lost", "code": "worker_lost"}}\n\n'),
            "/leaky/admin/audit": (200, json.dumps(LEAKY)),
            "/clean/admin/audit": (200, '{"leaks": []}'),
            "/finished": (200, 'data: {"choices": [{"finish_reason": "stop"}]}\n\n'),
            "/cut": (200, 'data: {"choices": [{"finish_reason": null}, 3]}\n\ndata: {"choices": 3}\n\n'),
            "/done": (200, 'data: {"choices": []}\n\n: a comment\n\ndata: [DONE]\n\n'),
        }[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())


@pytest.fixture(scope="module")
def api_url() -> Iterator[str]:
    with serving(_Server) as server:
        yield url_of(server)


@pytest.fixture
def api(api_url: str) -> ApiClient:
    return ApiClient(f"{api_url}/", None)


def test_errors_of_the_api_become_ours(api: ApiClient) -> None:
    with pytest.raises(OverloadedError, match="all full"):
        api.post("/full", {})
    with pytest.raises(OverloadedError, match="all full"):
        list(api.stream("/full", {}))
    with pytest.raises(UnavailableError, match="no Tandem cluster"):
        api.get("/page")
    with pytest.raises(UnavailableError, match="answered 502: Bad Gateway"):
        api.get("/broken")


def test_streams_end_with_done_or_with_their_error(api: ApiClient) -> None:
    assert list(api.stream("/done", {})) == [{"choices": []}]
    events = api.stream("/stream", {})
    assert next(events) == {"choices": []}
    with pytest.raises(UnavailableError, match="lost"):
        next(events)


def test_a_stream_that_breaks_off_is_no_whole_answer(api: ApiClient) -> None:
    assert len(list(api.stream("/finished", {}))) == 1
    events = api.stream("/cut", {})
    assert [next(events), next(events)] == [{"choices": [{"finish_reason": None}, 3]}, {"choices": 3}]
    with pytest.raises(UnavailableError, match="the answer broke off"):
        next(events)


def test_a_conversation_prints_what_others_say_as_it_is(api_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/exit\n"))
    console = Console(record=True, width=120, file=io.StringIO())
    converse(ApiClient(f"{api_url}/brackets", None), Conversation("mine[/x]"), console)
    text = console.export_text()
    assert "mine[/x]. /exit leaves" in text
    assert "no [/INST] here" in text


@pytest.mark.parametrize(
    ("cluster", "flags", "code", "output"),
    [
        ("clean", [], 0, ""),
        ("leaky", [], 1, "decode-0: 1 lost\ndecode-1: ticket 4\n"),
        ("clean", ["--json"], 0, json.dumps({"leaks": []}, indent=2) + "\n"),
        ("leaky", ["--json"], 1, json.dumps(LEAKY, indent=2) + "\n"),
    ],
)
def test_an_audit_prints_a_line_for_each_leak(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    api_url: str,
    cluster: str,
    flags: list[str],
    code: int,
    output: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["tandem", "audit", "--url", f"{api_url}/{cluster}", *flags])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code or 0, capsys.readouterr().out) == (code, output)


def test_status_tells_of_each_tier_once(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = {"memory": {"tokens": 1600, "bytes": 2_500_000_000}, "disk": {"tokens": 0, "bytes": 0}}
    rows = [{"worker_id": name, "arithmetic": None, "node": "10.0.0.1", "tiers": tiers} for name in ("prefill-0", "decode-0")]
    print_status({"workers": [*rows, {"worker_id": "decode-1", "arithmetic": None, "node": "10.0.0.2", "tiers": None}]})
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "memory tier of 10.0.0.1: 1600 tokens, 2.50 GB",
        "disk tier of 10.0.0.1: 0 tokens, 0.00 GB",
    ]


@pytest.mark.parametrize(
    ("wanted", "ready", "line"), [(2, 2, "routers: 2"), (3, 2, "routers: 2 of 3 wanted"), (None, 4, "routers: 4")]
)
def test_status_tells_of_routers(capsys: pytest.CaptureFixture[str], wanted: int | None, ready: int, line: str) -> None:
    print_status({"workers": [], "routers": {"wanted": wanted, "ready": ready}})
    assert capsys.readouterr().out.splitlines()[-1] == line


def test_status_lists_the_workers_of_each_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    names = {"prefill-0": "fma bfloat16 auto", "decode-0": "fma bfloat16 auto (varies)", "decode-1": "fma bfloat16 auto"}
    rows = [{"worker_id": worker_id, "arithmetic": name} for worker_id, name in names.items()]
    print_status({"workers": [*rows, {"worker_id": "decode-2", "arithmetic": None}]})
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "fma bfloat16 auto: prefill-0, decode-1",
        "fma bfloat16 auto (varies): decode-0",
    ]
