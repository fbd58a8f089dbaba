"""What README and the API page tell readers to type does what they say, on a real cluster.

Shell and Python blocks run as they stand, but for the cluster's address. What installs or starts something, or would restart
every worker, is only checked: `make` by a dry run, `tandem serve` and its like by parsing their flags. A comment above a
block, `<!-- prints: Paris -->`, names a part of what it must print.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.local_processes import TANDEM

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"
PAGES = ("README.md", "docs/api.md")
LANGUAGES = {"sh", "python", "json"}
BLOCK_S = 120.0

_BLOCK = re.compile(
    r"^(?:<!-- prints: (?P<prints>.+?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)

_CURL = """#!/bin/sh
exec {curl} --fail-with-body --silent --show-error "$@"
"""
_MAKE = """#!/bin/sh
exec {make} --dry-run --directory {root} "$@" >/dev/null
"""
_TANDEM = """#!{python}
import os, sys
import typer.main
from cluster.commands.cli import app

ONLY_PARSED = {{"serve", "rollout", "stop", "keep-gcs", "keys"}}
if sys.argv[1] not in ONLY_PARSED:
    os.execv({tandem!r}, ["tandem", *sys.argv[1:]])
group = typer.main.get_command(app)
with group.make_context("tandem", sys.argv[1:]) as context:
    name, command, rest = group.resolve_command(context, sys.argv[1:])
    command.make_context(name, rest, parent=context)
"""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    prints: str | None
    """Part of what it must print, if the page says so."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> list[Block]:
    return [
        Block(page, text.count("\n", 0, match.start("code")), match["language"], match["code"], match["prints"])
        for match in _BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page, (ROOT / page).read_text())]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that goes before all others in PATH: `curl` that fails on errors, `make` and `tandem` that start nothing."""
    folder = tmp_path_factory.mktemp("commands")
    found = {name: shutil.which(name) for name in ("curl", "make")}
    assert None not in found.values(), f"needed for the blocks of README: {found}"
    scripts = {
        "curl": _CURL.format(curl=found["curl"]),
        "make": _MAKE.format(make=found["make"], root=ROOT),
        "tandem": _TANDEM.format(python=sys.executable, tandem=TANDEM),
    }
    for name, script in scripts.items():
        (folder / name).write_text(script)
        (folder / name).chmod(stat.S_IRWXU)
    return folder


def runnable(block: Block) -> Any:
    """A test's parameter. Blocks that change the cluster's size start workers and drain them, which is slow."""
    return pytest.param(block, id=str(block), marks=[pytest.mark.slow] if "tandem scale" in block.code else [])


def run_block(block: Block, url: str, commands: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell or Python block against this cluster. Shell blocks end at the first command that fails."""
    code = block.code.replace(ADDRESS, url)
    argv = ["bash", "-euo", "pipefail", "-c", code] if block.language == "sh" else [sys.executable, "-c", code]
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"PATH": path, "TANDEM_URL": url, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        argv, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BLOCK_S, check=False
    )


def failure(block: Block, url: str, commands: Path) -> str | None:
    """What is wrong with a block: it failed, a stream had an error, or it did not print what it should. None if all is well."""
    ended = run_block(block, url, commands)
    printed = f"{ended.stdout}\n{ended.stderr}"
    if ended.returncode or '"error":' in ended.stdout:
        return f"{block} ended with {ended.returncode}:\n{printed}"
    if block.prints is not None and block.prints not in ended.stdout:
        return f"{block} did not print {block.prints!r}:\n{printed}"
    return None


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {block.page for block in BLOCKS} == set(PAGES)
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("block", [runnable(block) for block in BLOCKS if block.language in ("sh", "python")])
def test_a_block_runs(cluster: Any, commands: Path, block: Block) -> None:
    assert failure(block, cluster.url, commands) is None


def test_json_blocks_are_json_and_the_error_is_the_one_that_comes(cluster: Any) -> None:
    (block,) = (block for block in BLOCKS if block.language == "json")
    body = {"model": "smollm2", "prompt": "Hello", "temperature": 3}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400
    assert answer.json() == json.loads(block.code)


@pytest.mark.parametrize(
    ("language", "code", "prints"),
    [
        ("sh", "make no-such-target\n", None),
        ("sh", "tandem serve --no-such-flag\n", None),
        ("sh", "tandem serve --prefill many\n", None),
        ("sh", "tandem no-such-command\n", None),
        ("sh", "no-such-command; true\n", None),
        ("sh", f"curl {ADDRESS}/v1/no-such-path\n", None),
        ("sh", f"curl {ADDRESS}/health\n", "another answer"),
        ("python", "import no_such_module\n", None),
    ],
)
def test_a_wrong_block_fails(cluster: Any, commands: Path, language: str, code: str, prints: str | None) -> None:
    assert failure(Block("wrong.md", 1, language, code, prints), cluster.url, commands) is not None
