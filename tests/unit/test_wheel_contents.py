"""The wheel has everything, and works without the checkout. That it serves is `tests/integration/test_wheel.py`'s."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from cluster import __version__
from tests.built_wheel import TOP_PACKAGES, build_wheel, product_files, run, unpack


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    unpack(wheel, folder)
    return folder


def test_it_has_the_packages_with_their_data_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"tandem-{__version__}-py3-none-any.whl"
    own = f"tandem-{__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if not name.startswith(own)} == product_files()
    assert f"{own}licenses/LICENSE" in names


def test_its_command_prints_its_version(unpacked: Path, tmp_path: Path) -> None:
    assert run(unpacked, tmp_path, str(unpacked / "bin" / "tandem"), "--version") == f"tandem {__version__}\n"


def test_its_packages_are_imported_and_not_those_of_the_checkout(unpacked: Path, tmp_path: Path) -> None:
    code = "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
    imported = run(unpacked, tmp_path, sys.executable, "-c", code, *TOP_PACKAGES).splitlines()
    assert imported == [str(unpacked / name / "__init__.py") for name in TOP_PACKAGES]


def test_the_checkout_is_out_of_sight(unpacked: Path, tmp_path: Path) -> None:
    code = "import sys, importlib.util\nsys.path.remove(sys.argv[1])\nprint(*filter(importlib.util.find_spec, sys.argv[2:]))"
    assert run(unpacked, tmp_path, sys.executable, "-c", code, str(unpacked), *TOP_PACKAGES).split() == []
