"""`tandem bench` from its flags to its exit code; what it does in between is tested in tests/unit/loadtest."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.commands import cli
from loadtest import bench
from loadtest.options import BenchOptions
from loadtest.records import RequestRecord
from loadtest.runner import ClientHealth, RunResult
from loadtest.server import Target
from protocol.errors import UnavailableError


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    for name in ("TANDEM_URL", "TANDEM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["tandem", "bench", *flags])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(str(ended.value.code))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BenchOptions]:
    """What the load generator is asked to do; it does nothing."""
    seen: list[BenchOptions] = []

    async def run_bench(options: BenchOptions, *callbacks: object) -> None:
        seen.append(options)
        raise UnavailableError("nothing runs here")

    monkeypatch.setattr(bench, "run_bench", run_bench)
    return seen


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of one request is over at once."""

    async def run_bench(options: BenchOptions, *callbacks: object) -> bench.Finished:
        target = Target("completions", "/v1/completions", "small", ignore_eos=False, include_times=False, timeout_s=1.0)
        record = RequestRecord(0, 8, 4, 0.0, ttft=0.1, e2el=0.1, completion_tokens=1)
        return bench.Finished(options, target, "tokens", RunResult([record], 1.0, ClientHealth(0.0, 0.0, 0.1)))

    monkeypatch.setattr(bench, "run_bench", run_bench)


@pytest.mark.usefixtures("finished")
def test_results_are_kept_where_nobody_reads_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with suppress(OSError), Path("/dev/full").open("w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert run(monkeypatch, "--save-result", "--result-dir", str(tmp_path / "new")) == 2
    [saved] = (tmp_path / "new").iterdir()
    assert json.loads(saved.read_text())["completed"] == 1


def test_what_can_not_be_written_is_found_before_the_run(
    monkeypatch: pytest.MonkeyPatch, asked: list[BenchOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, new = tmp_path / "file", tmp_path / "new"
    file.write_text("precious")
    for flags in (
        ("--save-result", "--result-dir", str(file)),
        ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "."),
        ("--plot", str(tmp_path / "none" / "x.png")),
        ("--plot", str(tmp_path / f"{'x' * 300}.png")),
        ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "x" * 300),
    ):
        assert run(monkeypatch, *flags) == 2
        assert "can't be written" in capsys.readouterr().err
    assert not asked
    run(monkeypatch, "--save-result", "--result-dir", str(new), "--plot", str(tmp_path / "x.png"))
    run(monkeypatch, "--save-result", "--result-dir", str(tmp_path), "--result-filename", "file")
    assert len(asked) == 2
    assert file.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "new"], "trying leaves no file behind"


def test_flags_of_vllm(monkeypatch: pytest.MonkeyPatch, asked: list[BenchOptions]) -> None:
    flags = "--goodput ttft:500 tpot:50 --request-rate inf --max-concurrency 4 --percentile-metrics ttft,itl"
    assert (
        run(
            monkeypatch,
            *flags.split(),
            "--metric-percentiles",
            "99",
            "--backend",
            "chat",
            "--host",
            "::1",
            "--port",
            "9000",
            "--ignore-eos",
        )
        == 2
    )
    [options] = asked
    assert options.limits_ms == {"ttft": 500.0, "tpot": 50.0}
    assert (options.url, options.path) == ("http://[::1]:9000", "/v1/chat/completions")
    assert (options.max_concurrency, options.ignore_eos, options.request_rate) == (4, True, float("inf"))
    assert (options.wanted_metrics, options.percentiles) == (("ttft", "itl"), (99.0,))


def test_flags_of_conversations(monkeypatch: pytest.MonkeyPatch, asked: list[BenchOptions]) -> None:
    flags = "--multi-turn --backend chat --multi-turn-num-turns 4 --multi-turn-concurrency 3 --multi-turn-delay-ms 1500"
    more = "--multi-turn-delay-kind exponential --per-turn-input-len 20 --num-system-prompts 2 --system-prompt-len 50"
    run(monkeypatch, *flags.split(), *more.split())
    [options] = asked
    shape = options.conversation_shape
    assert (shape.num_turns, shape.think_s, shape.distribution) == (4, 1.5, "exponential")
    assert (shape.first.input_len, shape.later.input_len) == (1024, 20)
    assert (options.multi_turn_concurrency, options.num_system_prompts, options.system_prompt_len) == (3, 2, 50)


def test_urls_and_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch, asked: list[BenchOptions]) -> None:
    run(monkeypatch, "--base-url", "http://there/v", "--api-key", "k", "--endpoint", "/x")
    assert (asked[0].url, asked[0].api_key, asked[0].path) == ("http://there/v", "k", "/x")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("tpot:50", "--goodput"),
        ("--goodput ttft", "METRIC:MILLISECONDS"),
        ("--dataset-name azure", "--dataset-path"),
        ("--plot x.pdf", ".png"),
        ("--result-filename x.json", "--result-filename needs --save-result"),
        ("--result-dir x", "--result-dir needs --save-result"),
        ("--percentile-metrics tt", "ttft"),
        ("--multi-turn", "--backend chat"),
        ("--system-prompt-len 5", "--multi-turn"),
    ],
)
def test_what_can_be_mended_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    assert run(monkeypatch, *flags.split()) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
