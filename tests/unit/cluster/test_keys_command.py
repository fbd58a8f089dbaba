"""`tandem keys`, and `tandem serve`'s refusal to serve strangers."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from cluster.commands import cli
from telemetry.audit_file import AuditFile


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


def test_add_list_and_revoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    monkeypatch.setenv("TANDEM_KEYS_FILE", str(path))
    monkeypatch.setenv("COLUMNS", "200")
    limits = ["--requests-per-minute", "60", "--tokens-per-minute", "9000", "--max-context", "2048", "--expires", "2999-01-31"]
    code, out, err = run(monkeypatch, capsys, "keys", "add", "--tenant", "acme", *limits, "--model", "m", "--model", "n")
    assert (code, err) == (0, "")
    key = out.strip()
    _, key_id, secret = key.split("-", 2)
    code, out, _ = run(monkeypatch, capsys, "keys", "list")
    assert code == 0
    assert secret not in out
    row = out.splitlines()[1]
    for shown in (key_id, "acme", "standard", "60", "9000", "2048", "m, n", "good until 2999-01-31 00:00"):
        assert shown in row
    assert run(monkeypatch, capsys, "keys", "revoke", key_id)[0] == 0
    assert "revoked" in run(monkeypatch, capsys, "keys", "list")[1]
    code, _, err = run(monkeypatch, capsys, "keys", "revoke", key_id)
    assert (code, err) == (2, f"tandem: the key {key_id} was revoked before\n")


def test_changes_are_noted_in_the_audit_log_without_the_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TANDEM_KEYS_FILE", str(tmp_path / "keys.json"))
    path = tmp_path / "audit.jsonl"
    log = ["--audit-log", str(path)]
    _, out, _ = run(monkeypatch, capsys, "keys", "add", "--tenant", "acme", *log)
    _, key_id, secret = out.strip().split("-", 2)
    assert run(monkeypatch, capsys, "keys", "revoke", key_id, *log)[0] == 0
    added, revoked = [json.loads(line) for line in path.read_text().splitlines()]
    assert (added["event"], added["key"], added["tenant"], added["tier"]) == ("key_added", key_id, "acme", "standard")
    assert (revoked["event"], revoked["key"], revoked["who"]) == ("key_revoked", key_id, "operator")
    assert added["user"] == revoked["user"] != ""
    assert secret not in path.read_text()
    assert run(monkeypatch, capsys, "keys", "revoke", key_id, *log)[0] == 2, "and what changed nothing is not noted"
    assert len(path.read_text().splitlines()) == 2
    code, _, err = run(monkeypatch, capsys, "keys", "add", "--tenant", "zoo", "--audit-log", str(tmp_path / "no" / "log"))
    assert (code, "the audit log can't be written" in err) == (2, True)
    assert "zoo" not in (tmp_path / "keys.json").read_text(), "nothing changes that would not be noted"


def test_nothing_changes_that_the_audit_log_can_not_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is looked at beforehand, and may be full or gone by the time of the change."""
    path = tmp_path / "keys.json"
    monkeypatch.setenv("TANDEM_KEYS_FILE", str(path))
    key = run(monkeypatch, capsys, "keys", "add", "--tenant", "acme")[1].split("-")[1]
    before = path.read_bytes()
    monkeypatch.setattr(AuditFile, "check", lambda file: None)
    log = ["--audit-log", str(tmp_path / "no" / "log")]
    for arguments in (["add", "--tenant", "zoo"], ["revoke", key]):
        code, out, err = run(monkeypatch, capsys, "keys", *arguments, *log)
        assert (code, out, "the audit log can't be written" in err) == (2, "", True)
        assert path.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} == {"keys.json", "keys.json.lock"}


def test_what_the_key_file_can_not_take_is_not_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = tmp_path / "audit.jsonl"
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    arguments = ["--tenant", "zoo", "--keys-file", str(tmp_path / "keys.json"), "--audit-log", str(log)]
    code, _, err = run(monkeypatch, capsys, "keys", "add", *arguments)
    assert (code, "can't be written: No space left" in err) == (2, True)
    assert log.read_bytes() == b""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["add", "--tenant", "a/b"], "tenant: "),
        (["add", "--tenant", "a", "--tier", "gold"], "there is no tier 'gold'"),
        (["add", "--tenant", "a", "--requests-per-minute", "0"], "requests_per_minute: "),
        (["add", "--tenant", "a", "--expires", "tomorrow"], "--expires"),
        (["add", "--tenant", "a", "--expires", "2020-01-01"], "expires: 2020-01-01 00:00:00 UTC is over"),
        (["add", "--tenant", "a", "--model", ""], "model: name one, or leave --model out"),
        (["add"], "--tenant"),
        (["list"], "No such file"),
        (["revoke", "x"], "No such file"),
    ],
)
def test_what_is_wrong_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str
) -> None:
    monkeypatch.setenv("TANDEM_KEYS_FILE", str(tmp_path / "keys.json"))
    code, out, err = run(monkeypatch, capsys, "keys", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert not list(tmp_path.iterdir())


def test_a_key_is_revoked_through_a_link(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    path, link = tmp_path / "there" / "keys.json", tmp_path / "link.json"
    link.symlink_to(path)
    _, out, _ = run(monkeypatch, capsys, "keys", "add", "--tenant", "a", "--keys-file", str(link))
    key_id = out.split("-")[1]
    assert run(monkeypatch, capsys, "keys", "revoke", key_id, "--keys-file", str(link))[0] == 0
    assert link.is_symlink()
    assert "revoked" in json.loads(path.read_text())["keys"][key_id]
    assert [each.name for each in tmp_path.iterdir() if each.is_file() and not each.is_symlink()] == [], (
        "one lock for all names"
    )


def test_ids_stay_whole_and_brackets_are_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    monkeypatch.setenv("TANDEM_KEYS_FILE", str(path))
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(monkeypatch, capsys, "keys", "add", "--tenant", "acme", "--model", "[/x]", "--tokens-per-month", "9" * 12)
    entries = json.loads(path.read_text())
    entries["keys"]["[b]odd"] = 3
    path.write_text(json.dumps(entries))
    code, listed, _ = run(monkeypatch, capsys, "keys", "list")
    assert code == 0
    for whole in (out.split("-")[1], "standard", "[/x]", "[b]odd"):
        assert whole in listed


def test_an_entry_that_is_wrong_is_not_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"version": 1, "keys": {"odd": 3}}')
    code, _, err = run(monkeypatch, capsys, "keys", "revoke", "odd", "--keys-file", str(path))
    assert (code, err) == (2, f"tandem: the entry odd is wrong, and refused as it is: take it out of {path} by hand\n")


def test_the_file_and_the_tiers_of_a_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("TANDEM_KEYS_FILE", raising=False)
    config = tmp_path / "c.yaml"
    config.write_text(f"http: {{keys_file: {tmp_path}/k.json}}\ntiers: {{standard: {{}}, gold: {{weight: 4.0}}}}\n")
    assert run(monkeypatch, capsys, "keys", "add", "--tenant", "a", "--tier", "gold", "--config", str(config))[0] == 0
    [key] = json.loads((tmp_path / "k.json").read_text())["keys"].values()
    assert key["tier"] == "gold"
    code, _, err = run(monkeypatch, capsys, "keys", "list")
    assert code == 2
    assert "--keys-file" in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host", "0.0.0.0"], "others reach 0.0.0.0: name http.keys_file"),
        (["--host", "some-name"], "http.host"),
        (["--keys-file", "nowhere.json"], "nowhere.json: can't be read"),
        (["--keys-file", "nowhere.json", "--allow-anonymous"], "http.allow_anonymous"),
    ],
)
def test_serve_refuses_to_serve_strangers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code, out, err = run(monkeypatch, capsys, "serve", *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_a_key_that_nobody_reads_is_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Standard output is a full disk, or a pipe whose reader has gone."""
    path = tmp_path / "audit.jsonl"
    monkeypatch.setattr("typer.echo", Mock(side_effect=BrokenPipeError))
    files = ["--keys-file", str(tmp_path / "keys.json"), "--audit-log", str(path)]
    monkeypatch.setattr("sys.argv", ["tandem", "keys", "add", "--tenant", "acme", *files])
    with pytest.raises((SystemExit, BrokenPipeError)):
        cli.main()
    [line] = path.read_text().splitlines()
    assert json.loads(line)["event"] == "key_added"
    assert json.loads(line)["key"] in (tmp_path / "keys.json").read_text()
