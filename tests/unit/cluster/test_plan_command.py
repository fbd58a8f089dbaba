"""`tandem plan` from its flags to its table; flags that make no sense are one line and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.commands import cli
from configs import models
from simulator.profile import LAPTOP
from tests.tiny_models import tiny_facts


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing was measured on this machine."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def tandem(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tandem", "plan", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_a_plan_for_a_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, picture = tmp_path / "t.csv", tmp_path / "plan.png"
    rows = "".join(f"2023-11-16 18:00:{second:02}.0,256,8\n" for second in range(40))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    flags = ("--trace", str(trace), "--num-prompts", "40", "--max-workers", "2", "--slo", "ttft:2000,tpot:200")
    assert tandem(monkeypatch, *flags, "--plot", str(picture)) == 0
    out = capsys.readouterr().out
    assert "1P1D" in out
    assert "enough for 1.03 requests/s" in out
    assert "step times: smollm2 on a laptop" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("said", "flags", "cluster"),
    [
        ("disaggregation: never", (), "2D"),
        ("disaggregation: auto", (), "1P1D"),
        ("speculative_config: {method: ngram, num_speculative_tokens: 4}", ("--acceptance", "0.6"), "1P1D"),
    ],
)
def test_a_plan_for_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    said: str,
    flags: tuple[str, ...],
    cluster: str,
) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(f"{said}\n")
    lengths = ("--random-input-len", "100", "--random-output-len", "4", "--num-prompts", "20", "--max-workers", "2")
    slo = ("--slo", "ttft:2000,tpot:200")
    assert tandem(monkeypatch, "--dataset", "random", *lengths, *slo, "--config", str(config), *flags) == 0
    assert cluster in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prompt", "slo", "why"),
    [
        ("8189", "ttft:1e12", "a request is refused: prompt (8189) and answer (4) exceed the model's context (8192)"),
        ("100", "ttft:1", "a request alone is too slow for it"),
    ],
)
def test_why_no_cluster_meets_the_targets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt: str, slo: str, why: str
) -> None:
    lengths = ("--random-input-len", prompt, "--random-output-len", "4", "--num-prompts", "2", "--max-workers", "2")
    assert tandem(monkeypatch, "--dataset", "random", *lengths, "--slo", slo) == 0
    out = capsys.readouterr().out
    assert f"no cluster meets {slo} at any rate: {why}\n" in out
    assert "best ratio" not in out


@pytest.mark.parametrize("said", ["max_model_len: 103", "engine: paced\nmax_model_len: 103"])
def test_requests_beyond_the_configured_context_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(f"{said}\n")
    lengths = ("--random-input-len", "100", "--random-output-len", "4", "--num-prompts", "2", "--max-workers", "2")
    assert tandem(monkeypatch, "--dataset", "random", *lengths, "--config", str(config)) == 0
    assert "prompt (100) and answer (4) exceed the model's context (103)" in capsys.readouterr().out


def test_the_context_is_the_models_where_the_model_is_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "is_here", lambda name: True)
    monkeypatch.setattr(models, "resolve_for", lambda config: SimpleNamespace(facts=tiny_facts("small", max_model_len=103)))
    lengths = ("--random-input-len", "100", "--random-output-len", "4", "--num-prompts", "2", "--max-workers", "2")
    assert tandem(monkeypatch, "--dataset", "random", *lengths, "--profile", str(LAPTOP)) == 0
    assert "prompt (100) and answer (4) exceed the model's context (103)" in capsys.readouterr().out


def test_a_context_that_nobody_knows_yet_is_said_to_be_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then a pool alone is too small for a request."""
    config = tmp_path / "cluster.yaml"
    config.write_text("model: nobody/has-it\n")
    lengths = ("--random-input-len", "70000", "--random-output-len", "4", "--num-prompts", "2", "--max-workers", "2")
    assert tandem(monkeypatch, "--dataset", "random", *lengths, "--config", str(config)) == 0
    out = capsys.readouterr().out
    assert "prompt (70000) and answer (4) exceed decode.kv_cache_tokens (65536)" in out
    assert "\ncontext: unknown until nobody/has-it is fetched; without max_model_len no request is too long for it\n" in out


def test_a_profile_that_is_nested_too_deeply_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert tandem(monkeypatch, "--dataset", "random", "--profile", str(tmp_path / "deep.json")) == 2
    assert "deep.json: this is no profile: maximum recursion depth exceeded" in capsys.readouterr().err


def test_too_few_requests_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ("--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "30", "--max-workers", "2")
    assert tandem(monkeypatch, "--dataset", "random", *lengths, "--slo", "ttft:5000", "--rate", "1000") == 0
    out = capsys.readouterr().out
    assert "at least" in out
    assert "30 requests are too few for 1e+03 requests/s: raise --num-prompts" in out
    assert "enough" not in out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "--trace FILE or --dataset random"),
        (("--dataset", "random", "--rate", "0"), "rate must be over 0"),
        (
            ("--dataset", "random", "--slo", "ttst:5"),
            "slo takes METRIC:MILLISECONDS, such as ttft:500, each of ttft, tpot, e2el",
        ),
        (("--dataset", "random", "--slo", "ttft:nan"), "got 'ttft:nan'"),
        (("--dataset", "random", "--slo", ""), "slo takes METRIC:MILLISECONDS"),
        (("--dataset", "random", "--max-workers", "1"), "at least 2 workers"),
        (("--dataset", "random", "--max-workers", "257"), "max-workers must be at most 256"),
        (("--dataset", "random", "--num-prompts", "0"), "num-prompts"),
        (("--dataset", "random", "--seed", "-1"), "seed must be at least 0"),
        (("--dataset", "random", "--length-scale", "8"), "--length-scale is for a --trace"),
        (("--trace", "t.csv", "--random-input-len", "5"), "--random-input-len is for --dataset random"),
        (("--dataset", "random", "--max-workers", "1", "--plot", "/nonexistent/x.png"), "x.png: can't be written"),
        (("--dataset", "random", "--profile", "nowhere.json"), "can't be read"),
        (("--dataset", "random", "--acceptance", "1.5"), "acceptance must be from 0 to 1"),
        (("--dataset", "random", "--acceptance", "0.5"), "acceptance needs a --config with speculative_config"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], complaint: str
) -> None:
    assert tandem(monkeypatch, *words) == 2
    err = capsys.readouterr().err.strip()
    assert complaint in err
    assert "\n" not in err


def test_a_profile_beside_a_paced_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("engine: paced\n")
    assert tandem(monkeypatch, "--dataset", "random", "--config", str(config), "--profile", "nowhere.json") == 2
    assert "--profile is not for engine: paced" in capsys.readouterr().err
