"""The file of the audit log: added to, never written over, for its owner's eyes."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from telemetry.audit_file import AuditFile, audit_line


def test_lines_are_added_for_the_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"event":"older"}\n')
    path.chmod(0o644)
    before = os.umask(0)
    try:
        AuditFile(path).append([audit_line("scale", decode=3), audit_line("refused", path="/v1\n/x", key=None)])
        AuditFile(tmp_path / "new").check()
    finally:
        os.umask(before)
    older, scaled, refused = [json.loads(line) for line in path.read_text().splitlines()]
    assert older == {"event": "older"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", scaled.pop("time"))
    assert scaled == {"event": "scale", "decode": 3}
    assert refused["path"] == "/v1\n/x", "a line break of a client's is no line break of the log"
    assert "key" not in refused
    for name in ("audit.jsonl", "new"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_renamed_file_is_followed_by_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    file = AuditFile(path)
    file.append([audit_line("first")])
    path.rename(tmp_path / "old")
    file.append([audit_line("second")])
    assert json.loads(path.read_text())["event"] == "second"


def test_what_can_not_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "link", tmp_path / "no" / "folder", tmp_path):
        with pytest.raises(ConfigError, match="the audit log can't be written") as refused:
            AuditFile(path).check()
        assert refused.value.param == "telemetry.audit_log"
    assert not (tmp_path / "elsewhere").exists()


def test_what_is_no_file_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    """/dev/null, as root, would be closed to all others."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="the audit log can't be written"):
        AuditFile(path).check()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(ConfigError, match="the audit log can't be written: it is no file"):
            AuditFile(path).check()
    finally:
        os.close(reader)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_long_values_are_cut() -> None:
    assert len(str(audit_line("refused", path="x" * 10_000)["path"])) == 200


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, room = tmp_path / "audit.jsonl", 100
    file = AuditFile(path)
    file.append([audit_line("first")])
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        left = room - os.fstat(descriptor).st_size
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:left])

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(os, "write", full)
        for _ in range(3):
            with pytest.raises(ConfigError, match="No space left"):
                file.append([audit_line("second"), audit_line("third")])
    file.append([audit_line("second"), audit_line("third")])
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["first", "second", "third"]
