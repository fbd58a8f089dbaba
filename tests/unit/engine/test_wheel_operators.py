"""What setup.py does where a compiler makes some of the sets of native operators, or none."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from engine.native.instruction_sets import COMPILED, INSTRUCTION_SETS

ROOT = Path(__file__).parents[3]
REFUSED = "g++: error: unrecognized command line option '-mamx-tile'"
OLD = f"""\
#!/bin/sh
for word in "$@"; do [ "$word" = -mamx-tile ] && {{ echo "{REFUSED}" >&2; echo more >&2; exit 1; }}; done
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="native operators are for x86-64")


def built(tmp_path: Path, compiler: str, *, strict: bool = False) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """What the build of a wheel says with a stand-in for the compiler, and the sets that it leaves in the wheel's folder."""
    program = tmp_path / "c++"
    program.write_text(compiler)
    program.chmod(0o755)
    environment = os.environ | {"CXX": str(program), "TANDEM_ALL_OPERATORS": "1" if strict else ""}
    command = [sys.executable, "setup.py", "egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    made = {file.name for file in (tmp_path / "engine" / "native" / COMPILED).iterdir()}
    return done, {each.name for each in INSTRUCTION_SETS if each.file_name in made}


def test_sets_that_an_old_compiler_does_not_know_are_left_out(tmp_path: Path) -> None:
    done, made = built(tmp_path, OLD)
    assert done.returncode == 0, done.stderr
    assert made == {each.name for each in INSTRUCTION_SETS} - {"amx"}
    assert [line for line in done.stdout.splitlines() if "operators" in line and "amx" in line] == [
        f"the native operators for amx are left out: {REFUSED}"
    ]


def test_a_release_insists_on_all_sets(tmp_path: Path) -> None:
    done, _ = built(tmp_path, OLD, strict=True)
    assert done.returncode != 0
    assert "TANDEM_ALL_OPERATORS is set, and these could not be compiled: amx" in done.stderr


def test_a_compiler_that_makes_nothing_fails_no_installation(tmp_path: Path) -> None:
    done, made = built(tmp_path, "#!/bin/sh\n")
    assert (done.returncode, made) == (0, set())
    assert "the native operators for avx2 are left out: " in done.stdout
