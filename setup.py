"""What pyproject.toml can't say: a wheel carries the native operators, compiled for every instruction set.

An editable installation gets none, since its sources may change. Without a C++ compiler, or on another kind of processor, the
wheel is a pure one. An older compiler makes those sets that it knows. What is left out is said while the wheel is built.

    TANDEM_ALL_OPERATORS=1    # fail where a set is left out on x86-64, as a build for other machines should
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

sys.path.insert(0, str(Path(__file__).parent))

from engine.native.instruction_sets import COMPILED, INSTRUCTION_SETS, InstructionSet, find_compiler, what_failed

WANTED = INSTRUCTION_SETS if platform.machine() in ("x86_64", "AMD64") else ()
COMPILER = find_compiler() if WANTED else None
STRICT = "TANDEM_ALL_OPERATORS"


class BuildWithOperators(build_py):
    """Copies the packages, and compiles the operators beside their sources."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        if COMPILER is None:
            print("the native operators are not compiled: this needs an x86-64 processor and a C++ compiler")  # noqa: T201
        folder = Path(self.build_lib) / "engine" / "native" / COMPILED
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            made = list(threads.map(lambda each: is_compiled(each, folder / each.file_name), WANTED))
        missing = [each.name for each, is_made in zip(WANTED, made, strict=True) if not is_made]
        if missing and os.environ.get(STRICT):
            raise CompileError(f"{STRICT} is set, and these could not be compiled: {', '.join(missing)}")


def is_compiled(instruction_set: InstructionSet, target: Path) -> bool:
    """Compile a set, and return whether that succeeded."""
    if COMPILER is None:
        return False
    try:
        instruction_set.compile(COMPILER, target)
    except (OSError, subprocess.SubprocessError) as error:
        target.unlink(missing_ok=True)
        print(f"the native operators for {instruction_set.name} are left out: {what_failed(error)}")  # noqa: T201
        return False
    return True


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
