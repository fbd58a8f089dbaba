"""`tandem usage`, and what `tandem serve` says of a usage log that can't work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.commands import cli
from cluster.commands.lib.key_file import add_key
from telemetry.usage.book import LogBounds, UsageBook
from telemetry.usage.log_files import UsageLog
from tests.unit.telemetry.usage.events import event


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Events of two tenants, in several files."""
    path = tmp_path / "usage.jsonl"
    book = UsageBook(path, LogBounds(1000, 100), tmp_path / "counts" / "usage.json")
    for number in range(1, 11):
        book.append([event(number, tenant="acme" if number % 2 else "zoo", key="k1" if number % 2 else None)])
    book.close()
    return path


def test_a_table_of_sums(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log: Path) -> None:
    code, out, err = run(monkeypatch, capsys, "usage", str(log))
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["tenant", "key", "model", "requests", "prompt", "cached", "answer", "tokens"]
    assert rows[1:4] == [
        ["acme", "k1", "m", "5", "75", "4", "25", "100"],
        ["zoo", "-", "m", "5", "80", "6", "30", "110"],
        ["all", "10", "155", "10", "55", "210"],
    ]
    assert out.splitlines()[4].startswith("the log begins at 2026-11-2")


def test_names_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_bytes(event(1, tenant="[red]a", key="[/]", model="[bold]m[/x]").line())
    code, out, err = run(monkeypatch, capsys, "usage", str(path))
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split()[:3] == ["[red]a", "[/]", "[bold]m[/x]"]


def test_for_programs_and_for_some(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log: Path) -> None:
    _, out, _ = run(monkeypatch, capsys, "usage", str(log), "--tenant", "acme", "--month", "2026-11", "--json")
    found = json.loads(out)
    row = {"requests": 5, "prompt_tokens": 75, "cached_tokens": 4, "answer_tokens": 25}
    assert found["rows"] == [{"tenant": "acme", "key": "k1", "model": "m"} | row]
    assert found["total"] == row
    assert json.loads(run(monkeypatch, capsys, "usage", str(log), "--month", "2026-10", "--json")[1])["rows"] == []
    assert json.loads(run(monkeypatch, capsys, "usage", str(log), "--key", "k2", "--json")[1])["rows"] == []


def test_budgets_of_a_month(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log: Path, tmp_path: Path
) -> None:
    keys, config = tmp_path / "keys.json", tmp_path / "c.yaml"
    add_key(keys, {"tenant": "acme", "tokens_per_month": 400})
    entries = json.loads(keys.read_text())
    entries["keys"] = {"k1": next(iter(entries["keys"].values()))}
    keys.write_text(json.dumps(entries))
    config.write_text(
        f"http: {{keys_file: {keys}}}\ntelemetry: {{usage_log: {log}}}\ntiers: {{standard: {{tokens_per_month: 200}}}}\n"
    )
    _, out, _ = run(monkeypatch, capsys, "usage", "--config", str(config), "--month", "2026-11")
    assert out.splitlines()[-3:] == [
        "key k1: 100 of 400 tokens (25%)",
        "acme in tier standard: 100 of 200 tokens (50%)",
        "zoo in tier standard: 110 of 200 tokens (55%)",
    ]
    _, out, _ = run(monkeypatch, capsys, "usage", "--config", str(config), "--month", "2026-11", "--key", "k1")
    assert [line for line in out.splitlines() if "%" in line] == ["key k1: 100 of 400 tokens (25%)"], "others share the tier's"
    _, out, _ = run(monkeypatch, capsys, "usage", "--config", str(config), "--month", "2026-11", "--tenant", "zoo")
    assert [line for line in out.splitlines() if "%" in line] == ["zoo in tier standard: 110 of 200 tokens (55%)"]
    for number in (1, 2, 3):
        log.with_name(f"{log.name}.{number}").unlink()
    for which in ([], ["--tenant", "acme"]):
        found = json.loads(
            run(monkeypatch, capsys, "usage", "--config", str(config), "--month", "2026-11", "--json", *which)[1]
        )
        assert found["total"]["requests"] < 10
        assert {each["of"]: each["used"] for each in found["budgets"]} == {
            "key k1": 100,
            "acme in tier standard": 100,
        } | ({} if which else {"zoo in tier standard": 110}), "which routers count, too, though the lines were removed"
    monkeypatch.setenv("COLUMNS", "200")
    assert " 400 " in run(monkeypatch, capsys, "keys", "list", "--config", str(config))[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["usage"], "name the usage log"),
        (["usage", "nothing.jsonl"], "the usage log can't be read: No such file or directory"),
        (["usage", "x", "--month", "2026-13"], "--month is a year and a month"),
        (["usage", "x", "--month", "26-1"], "--month is a year and a month"),
        (["keys", "add", "--tenant", "a", "--tokens-per-month", "0", "--keys-file", "k.json"], "tokens_per_month: "),
        (["serve", "--usage-log", "no/folder/usage.jsonl"], "the usage log can't be written: No such file or directory"),
        (["serve", "--usage-kafka", "localhost:9092/usage"], "telemetry.usage_kafka: it gets the lines of a usage log"),
        (["serve", "--usage-log", "u.jsonl", "--usage-kafka", "localhost:9092"], "telemetry.usage_kafka: "),
        (["serve", "--config", "budget.yaml"], "tiers.standard.tokens_per_month: a budget needs a usage log"),
        (["serve", "--config", "options.yaml"], 'No such configuration property: "no.such.thing"'),
        (["serve", "--keys-file", "keys.json"], "tokens_per_month, which needs a usage log"),
    ],
)
def test_what_is_wrong_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    add_key(tmp_path / "keys.json", {"tenant": "a", "tokens_per_month": 5})
    (tmp_path / "budget.yaml").write_text("tiers: {standard: {tokens_per_month: 5}}\n")
    (tmp_path / "options.yaml").write_text(
        "telemetry: {usage_log: u.jsonl, usage_kafka: 'localhost:1/u', usage_kafka_options: {no.such.thing: '1'}}\n"
    )
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert says in err


def test_the_log_of_another_cluster_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("telemetry.usage.log_files._ENDING_S", 0.1)
    writer = UsageLog(tmp_path / "usage.jsonl")
    code, out, err = run(monkeypatch, capsys, "serve", "--usage-log", str(tmp_path / "usage.jsonl"))
    writer.close()
    assert (code, out) == (2, "")
    assert "another cluster writes this usage log" in err
