"""What pyproject.toml can't say: a wheel carries the native operators, compiled for every instruction set.

An editable installation gets none, since its sources may change. Without a C++ compiler, or on another kind of processor, the
wheel is a pure one, and says so while it is built.
"""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from engine.native.instruction_sets import COMPILED, INSTRUCTION_SETS, find_compiler

COMPILER = find_compiler() if platform.machine() in ("x86_64", "AMD64") else None


class BuildWithOperators(build_py):
    """Copies the packages, and compiles the operators beside their sources."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        if COMPILER is None:
            print("the native operators are not compiled: this needs an x86-64 processor and a C++ compiler")  # noqa: T201
            return
        folder = Path(self.build_lib) / "engine" / "native" / COMPILED
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for done in [threads.submit(each.compile, COMPILER, folder / each.file_name) for each in INSTRUCTION_SETS]:
                done.result()


class WheelWithOperators(bdist_wheel):
    """Names the platform, but no version of Python: the operators do not use Python's interface."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, system = super().get_tag()
        return "py3", "none", system


class TandemDistribution(Distribution):
    """Says that there is something compiled, though no extension of Python."""

    def has_ext_modules(self) -> bool:
        return COMPILER is not None


setup(distclass=TandemDistribution, cmdclass={"build_py": BuildWithOperators, "bdist_wheel": WheelWithOperators})
