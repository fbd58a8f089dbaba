"""Where the flags of `tandem` come from, and what it imports before it runs a command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from cluster.commands.lib.config_flags import FLAGS, ConfigFlag, ConfigFlags
from cluster.commands.lib.flag_groups import expand_flags
from configs.loader import load_config
from loadtest.options import BenchOptions
from protocol.errors import ConfigError, InvalidRequestError


@dataclass(frozen=True)
class MoreOptions(BenchOptions):
    think_time: Annotated[float, typer.Option(help="Seconds between two turns.")] = 1.5


MORE_FLAGS = ConfigFlags((*FLAGS, ConfigFlag("--queue-seconds", "limits.queue_s", help="Longest wait for room.")))

seen: list[Any] = []


@expand_flags
def bench(options: MoreOptions, repeat: int = 1) -> None:
    seen.append((options.think_time, options.seed, repeat))


@expand_flags
def serve(overrides: Annotated[dict[str, Any], MORE_FLAGS]) -> None:
    seen.append(overrides)


def run(command: Callable[..., None], *words: str) -> str:
    app = typer.Typer(add_completion=False)
    app.command()(command)
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen.clear()
    monkeypatch.delenv("TANDEM_ADMIN_KEY", raising=False)


def test_a_new_flag_of_the_load_test_is_one_line() -> None:
    assert "--think-time" in run(bench, "--help")
    run(bench, "--think-time", "3", "--seed", "7", "--repeat", "2")
    run(bench)
    assert seen == [(3.0, 7, 2), (1.5, 0, 1)]


def test_a_new_flag_of_the_configuration_is_one_line() -> None:
    help_text = run(serve, "--help")
    assert "--queue-seconds" in help_text
    assert "<float>" in help_text, "the type is that of the key's field"
    run(serve, "--queue-seconds", "5", "--port", "8001")
    run(serve)
    assert seen == [{"limits.queue_s": 5.0, "http.port": 8001}, {}]
    assert load_config(None, {"limits.queue_s": 5.0}).limits.queue_s == 5.0


def test_a_record_that_refuses_its_values_refuses_the_command() -> None:
    with pytest.raises(InvalidRequestError, match="seed must be at least 0"):
        run(bench, "--seed", "-1")


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        ("--tensor-parallel-size 2", {"prefill.tensor_parallel_size": 2, "decode.tensor_parallel_size": 2}),
        (
            "--decode-tensor-parallel-size 1 --tensor-parallel-size 2",
            {"prefill.tensor_parallel_size": 2, "decode.tensor_parallel_size": 1},
        ),
        ("--colocated", {"disaggregation": "never"}),
        ("--colocated --disaggregation never", {"disaggregation": "never"}),
        ("--allow-anonymous --dtype float32", {"http.allow_anonymous": True, "dtype": "float32"}),
        ("""--hf-overrides {"rope_theta":5e5}""", {"hf_overrides": '{"rope_theta":5e5}'}),
        ("--keys-file keys.json", {"http.keys_file": "keys.json"}),
    ],
)
def test_flags_set_keys_of_the_configuration(words: str, overrides: dict[str, Any]) -> None:
    run(serve, *words.split())
    assert seen == [overrides]


def test_a_switch_beside_a_flag_that_says_otherwise_is_refused() -> None:
    with pytest.raises(ConfigError, match="--colocated means never, not auto"):
        run(serve, "--colocated", "--disaggregation", "auto")


@pytest.mark.parametrize("words", [("--help",), ("serve", "--help"), ("status", "--url", "http://127.0.0.1:1")])
def test_nothing_waits_for_ray_or_torch_before_its_command_runs(words: tuple[str, ...]) -> None:
    program = (
        "import sys; from cluster.commands import cli; from typer.testing import CliRunner;"
        " CliRunner().invoke(cli.app, sys.argv[1:]);"
        "sys.exit(', '.join({'ray', 'torch', 'matplotlib'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert ended.stderr.strip() == ""
