"""A renewed certificate: read when its files may be, and given to HAProxy until it has it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster.ray import certificate
from cluster.ray.certificate import CertificateError, CertificateFiles, watch_certificate


class OverError(Exception):
    """The test has seen enough."""


def test_files_that_get_another_mode_are_read_and_haproxy_is_told_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "pair.pem"
    files = CertificateFiles(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    for name in (files.certfile, files.keyfile, target):
        Path(name).write_text("PEM")
    looks, read, told = iter(range(8)), list[str](), list[str]()

    def look(_: float) -> None:
        number = next(looks, None)
        if number is None:
            raise OverError
        if number == 3:
            Path(files.keyfile).chmod(0o640)

    def tell(_: Path, command: str) -> str:
        told.append(command.split()[0])
        if 2 < len(told) <= 4:
            raise TimeoutError("timed out")
        return "Success!"

    monkeypatch.setattr(time, "sleep", look)
    monkeypatch.setattr(certificate, "write_pair", lambda files, target: read.append(str(target)))
    monkeypatch.setattr(certificate, "_tell", tell)
    with pytest.raises(OverError):
        watch_certificate(files, target, tmp_path / "admin.sock")
    assert read == [str(target)] * 2, "at the start, for HAProxy may have found files of before the last change, and then"
    assert told == ["set", "commit", "set", "set", "set", "commit"], "no more once it has the certificate"
    assert capsys.readouterr().err.count("stays as it was: timed out") == 1


def test_a_disk_that_is_full_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files don't change again for weeks."""
    target = tmp_path / "pair.pem"
    files = CertificateFiles(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    for name in (files.certfile, files.keyfile, target):
        Path(name).write_text("PEM")
    looks, told, tries = iter(range(8)), list[str](), list[str]()

    def look(_: float) -> None:
        if next(looks, None) is None:
            raise OverError

    def write(files: CertificateFiles, target: Path) -> None:
        tries.append(str(target))
        if len(tries) < 4:
            raise CertificateError(f"{target}: No space left on device")

    def tell(_: Path, command: str) -> str:
        told.append(command.split()[0])
        return "Success!"

    monkeypatch.setattr(time, "sleep", look)
    monkeypatch.setattr(certificate, "write_pair", write)
    monkeypatch.setattr(certificate, "_tell", tell)
    with pytest.raises(OverError):
        watch_certificate(files, target, tmp_path / "admin.sock")
    assert (len(tries), told) == (4, ["set", "commit"])
    assert capsys.readouterr().err.count("No space left on device") == 1
