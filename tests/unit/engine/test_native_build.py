"""How native operators are found or compiled, and what happens where they can't be had."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from unittest.mock import ANY, Mock

import pytest
import torch

from engine.native import build, files
from engine.native.instruction_sets import COMPILED, INSTRUCTION_SETS

BUILT = build.load_library(torch.bfloat16)
NATIVE = pytest.mark.skipif(BUILT is None, reason="needs AVX2, and a C++ compiler or a wheel")


def test_no_compiler_means_no_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    if BUILT is None:
        pytest.skip("the processor has no use for one")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert build.load_library.__wrapped__(torch.bfloat16) is None
    assert "no C++ compiler" in caplog.text


@NATIVE
def test_a_compiler_that_fails_is_told_and_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\ncase $1 in --version) echo mine;; *) echo 'no space left' >&2; exit 1;; esac\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        assert build.load_library.__wrapped__(torch.bfloat16) is None
    assert "no space left" in caplog.text
    assert list((tmp_path / "cache" / "native").glob("*.so")) == []


@pytest.fixture
def copying_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> build.Built:
    """What is built here. $CXX is a compiler with an option, which makes a copy of it, and the cache is empty."""
    assert BUILT is not None
    compiler = tmp_path / "c++"
    copy = f'while [ "$1" != -o ]; do shift; done; cp {BUILT.functions._name} "$2"'
    compiler.write_text(f'#!/bin/sh\n[ "$1" = -m64 ] || exit 1\ncase $2 in --version) echo mine;; *) {copy};; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} -m64")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return BUILT


@NATIVE
def test_a_compiler_may_be_several_words(copying_compiler: build.Built, tmp_path: Path) -> None:
    built = build.load_library.__wrapped__(torch.bfloat16)
    assert built is not None
    assert Path(built.functions._name).parent == tmp_path / "cache" / "native"


@NATIVE
@pytest.mark.parametrize("part", [0, 0.3, 0.9, 1])
def test_a_damaged_library_is_made_anew(
    part: float,
    copying_compiler: build.Built,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One that is cut off, or has its length but nothing in it. One of a wheel is left where it is, and not used."""
    whole, chosen = Path(copying_compiler.functions._name).read_bytes(), copying_compiler.instruction_set
    damaged = whole[: int(part * len(whole))] if part < 1 else bytes(len(whole))
    path = files.library_path(chosen)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(damaged)
    assert not files.is_at_hand(chosen)
    assert build.load_library.__wrapped__(torch.bfloat16) == build.Built(chosen, ANY)
    assert path.read_bytes() == whole
    assert f"{path.name} is damaged" in caplog.text
    monkeypatch.setattr(files, "HERE", tmp_path)
    carried = tmp_path / COMPILED / chosen.file_name
    carried.parent.mkdir()
    carried.write_bytes(damaged)
    assert files.library_path(chosen) == path
    carried.write_bytes(whole)
    assert files.library_path(chosen) == carried


@NATIVE
@pytest.mark.usefixtures("copying_compiler")
def test_operators_that_can_not_be_loaded_can_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a process has loaded them."""
    assert files.can_be_had()
    with monkeypatch.context() as noexec:
        noexec.setattr("ctypes.CDLL", Mock(side_effect=OSError("failed to map segment from shared object")))
        assert build.load_library.__wrapped__(torch.bfloat16) is None
    assert not files.can_be_had()
    assert build.load_library.__wrapped__(torch.bfloat16) is not None
    assert files.can_be_had()


@NATIVE
def test_operators_of_a_wheel_can_be_had_without_a_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert BUILT is not None
    monkeypatch.setattr(files, "HERE", tmp_path)
    (tmp_path / COMPILED).mkdir()
    shutil.copyfile(BUILT.functions._name, tmp_path / COMPILED / INSTRUCTION_SETS[-1].file_name)
    monkeypatch.setenv("TANDEM_CACHE", "~nobody-has-this-name/cache")
    files.note_loading(succeeded=False)
    assert files.can_be_had()


@NATIVE
def test_a_compiler_that_makes_nothing_has_no_operators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/bin/true")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    assert build.load_library.__wrapped__(torch.bfloat16) is None
    assert not files.can_be_had()


@pytest.mark.slow
@NATIVE
def test_the_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    assert build.load_library.__wrapped__(torch.bfloat16) is not None
    (built,) = (tmp_path / "native").glob("*.so")
    written = built.stat().st_mtime_ns
    assert build.load_library.__wrapped__(torch.bfloat16) is not None
    assert built.stat().st_mtime_ns == written
