"""A renewed certificate: read when its files may be, and given to HAProxy until it has it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster.ray import certificate
from cluster.ray.certificate import CertificateFiles, watch_certificate


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
    assert capsys.readouterr().err.count("stays as it was: timed out") == 2
