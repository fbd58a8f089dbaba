from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from configs.cache import cache_dir, file_sha256
from protocol.errors import ConfigError


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def entry(own_cache: Path) -> Path:
    (path,) = (own_cache / "sha256").iterdir()
    return path


def test_where_the_cache_is(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == own_cache
    monkeypatch.delenv("TANDEM_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "tandem"


@pytest.mark.parametrize(("variable", "value"), [("TANDEM_CACHE", "~nobody-has-this-name/x"), ("HOME", None)])
def test_a_cache_in_no_home(monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None) -> None:
    """As in a container that runs as a user without an entry in /etc/passwd."""
    monkeypatch.delenv("TANDEM_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    if value is not None:
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="set TANDEM_CACHE to a folder that can be written"):
        cache_dir()


def test_a_checksum_is_remembered(weights: Path, own_cache: Path) -> None:
    assert file_sha256(weights) == sha256(b"one")
    path = entry(own_cache)
    path.write_text(path.read_text().replace(sha256(b"one"), "remembered"))
    assert file_sha256(weights) == "remembered"


def test_a_changed_file_is_read_again(weights: Path) -> None:
    status = weights.stat()
    assert file_sha256(weights) == sha256(b"one")
    weights.write_bytes(b"two")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file_sha256(weights) == sha256(b"two")


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b'{"identity": 3}', b"\xff\xfe"])
def test_a_damaged_entry_is_replaced(weights: Path, own_cache: Path, junk: bytes) -> None:
    file_sha256(weights)
    path = entry(own_cache)
    whole = path.read_bytes()
    path.write_bytes(junk)
    assert file_sha256(weights) == sha256(b"one")
    assert path.read_bytes() == whole


def test_a_cache_that_cant_be_written_does_no_harm(weights: Path, own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    assert file_sha256(weights) == sha256(b"one")


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        file_sha256(tmp_path / "absent")
