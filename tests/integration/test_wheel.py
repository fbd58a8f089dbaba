"""The wheel has everything; unpacked into a folder it works and serves, with the checkout out of its sight."""

from __future__ import annotations

import platform
import signal
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import __version__
from engine.native.build import is_here
from engine.native.instruction_sets import COMPILED, INSTRUCTION_SETS, find_compiler
from tests.built_wheel import TOP_PACKAGES, build_wheel, environment, product_files, run, unpack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # the build takes a minute of two cores
CAN_COMPILE = find_compiler() is not None and platform.machine() == "x86_64"
COMPILED_FILES = {f"engine/native/{COMPILED}/{each.file_name}" for each in INSTRUCTION_SETS} if CAN_COMPILE else set[str]()
ACTORS = ("ray::Controller", "ray::WorkerProcess", "ray::ServeReplica:tandem:router")
"""The processes that import Tandem. Ray's own agents don't, and their titles overwrite the environment that /proc shows."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    unpack(wheel, folder)
    return folder


def test_it_has_the_packages_with_their_data_and_nothing_else(wheel: Path) -> None:
    system = sysconfig.get_platform().replace("-", "_").replace(".", "_") if COMPILED_FILES else "any"
    assert wheel.name == f"tandem-{__version__}-py3-none-{system}.whl"
    own = f"tandem-{__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if not name.startswith(own)} == product_files() | COMPILED_FILES
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


@pytest.mark.skipif(not COMPILED_FILES, reason="needs a C++ compiler for x86-64")
def test_its_operators_need_no_compiler(unpacked: Path, tmp_path: Path) -> None:
    """Every set that this processor has is loaded from the wheel, for every type that it computes in."""
    code = """
import os, torch
from engine.native import build
from engine.native.files import FORCED
from engine.native.library import NativeLibrary
for each in filter(build.is_here, build.INSTRUCTION_SETS):
    os.environ[FORCED] = each.name
    build.load_library.cache_clear()
    for name in each.dtypes:
        assert NativeLibrary.load(1, getattr(torch, name)) is not None, (each, name)
        print(build._compiled(each))
"""
    loaded = run(unpacked, tmp_path, sys.executable, "-c", code, PATH=str(tmp_path), CXX="", TANDEM_CACHE=str(tmp_path))
    here = {unpacked / "engine" / "native" / COMPILED / each.file_name for each in filter(is_here, INSTRUCTION_SETS)}
    assert set(map(Path, loaded.splitlines())) == here
    assert not (tmp_path / "native").exists(), "nothing was compiled"


def test_it_serves(unpacked: Path, tmp_path: Path, serve: Callable[..., Any]) -> None:
    served = serve(command=str(unpacked / "bin" / "tandem"), folder=tmp_path, environment=environment(unpacked))
    served.wait_ready()

    messages = [{"role": "user", "content": "Name the capital of France."}]
    body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 12}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    assert "<title>Tandem</title>" in httpx.get(served.url, timeout=30).text
    wanted = {f"PYTHONPATH={unpacked}", f"RAY_SERVE_HAPROXY_BINARY_PATH={unpacked / 'bin' / 'tandem-haproxy'}"}
    running = served.processes()
    for actor in ACTORS:
        own = [pid for pid, shown in running.items() if shown.startswith(actor)]
        assert own, f"no {actor} among {sorted(running.values())}"
        for pid in own:
            assert wanted <= variables_of(pid), f"{running[pid]} might use the checkout, or an older installation"

    assert served.leaks() == []
    served.end(signal.SIGTERM)
    assert served.process.returncode == 0, served.said()
    served.until(lambda: not served.processes(), 30.0)


def variables_of(pid: int) -> set[str]:
    """The environment that a process was started with."""
    return set((Path("/proc") / str(pid) / "environ").read_bytes().decode().split("\0"))
