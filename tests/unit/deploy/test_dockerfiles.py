"""The files that images are built from. That one is built and serves is tests/integration/test_container_image.py's."""

from __future__ import annotations

import difflib
import fnmatch
import re
import tomllib
from pathlib import Path

import pytest

from cluster import __version__
from deploy.needed import needed
from tests.built_wheel import product_files

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
FILES = ("Dockerfile", "Dockerfile.cuda")
PYPROJECT = (ROOT / "pyproject.toml").read_text()
INSTRUCTION = re.compile(r"^([A-Z]+) ((?:.*\\\n)*.*)$", re.MULTILINE)


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a file with their arguments, on one line each."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / name).read_text(), flags=re.MULTILINE)
    return [(name, re.sub(r"\s*\\\n\s*", " ", rest)) for name, rest in INSTRUCTION.findall(text)]


def last(name: str, instruction: str) -> str:
    return [rest for found, rest in instructions(name) if found == instruction][-1]


@pytest.mark.parametrize("name", FILES)
def test_it_runs_as_another_user_and_ends_on_sigterm(name: str) -> None:
    assert re.fullmatch(r"[1-9]\d*:0", last(name, "USER")), "a number, which Kubernetes can see is not root's"
    assert last(name, "STOPSIGNAL") == "SIGTERM"
    assert last(name, "ENTRYPOINT").startswith('["'), "or a shell gets the signal"
    assert last(name, "CMD").startswith('["')
    assert "/ready" in last(name, "HEALTHCHECK")


@pytest.mark.parametrize("name", FILES)
def test_its_extras_are_in_pyproject(name: str) -> None:
    [extras] = [rest.partition("=")[2].strip('"').split() for found, rest in instructions(name) if rest.startswith("EXTRAS=")]
    project = tomllib.loads(PYPROJECT)["project"]
    assert needed(PYPROJECT, extras)[: len(project["dependencies"])] == project["dependencies"]
    for extra in extras:
        assert set(project["optional-dependencies"][extra]) <= set(needed(PYPROJECT, extras))


def test_an_extra_that_there_is_not_is_an_error() -> None:
    with pytest.raises(KeyError):
        needed(PYPROJECT, ["none"])


@pytest.mark.parametrize("name", FILES)
def test_what_it_says_to_type_has_this_version(name: str) -> None:
    tags = re.findall(r"--tag tandem:(\S+)", (DEPLOY / name).read_text())
    assert tags == [__version__ if name == "Dockerfile" else f"{__version__}-cuda"]


@pytest.mark.parametrize("name", FILES)
def test_no_set_of_native_operators_may_be_left_out(name: str) -> None:
    (install,) = [rest for _, rest in instructions(name) if rest.endswith(" ./tandem")]
    assert install.startswith("TANDEM_ALL_OPERATORS=1 ")


def test_the_cuda_image_is_built_like_the_other_one() -> None:
    """Nobody has tried it, so it may differ in nothing but what GPUs need."""
    cpu, cuda = ([" ".join(each).split() for each in instructions(name)] for name in FILES)
    words = [[word for each in lines for word in each] for lines in (cpu, cuda)]
    differing = {
        word
        for tag, a, b, c, d in difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes()
        if tag != "equal"
        for word in (*words[0][a:b], *words[1][c:d])
    }
    assert differing == {
        "TORCH_INDEX=https://download.pytorch.org/whl/cpu",
        "TORCH_INDEX=",
        'otlp"',
        "otlp",
        'nvml"',
        "|",
        "grep",
        "-v",
        "'^triton'",
        "gcc",
        "libc6-dev",
        "python3-dev",
        "TRITON_CACHE_DIR=/var/cache/tandem/triton",
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    }


def ignored(path: str) -> bool:
    """Whether .dockerignore leaves a file out: by its own path, or with a folder that it is in."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    above = ["/".join(path.split("/")[: depth + 1]) for depth in range(path.count("/") + 1)]
    return any(fnmatch.fnmatch(each, pattern) for each in above for pattern in short(patterns))


def short(patterns: list[str]) -> list[str]:
    """`**/x` is x at the top, too."""
    return [*patterns, *(pattern.removeprefix("**/") for pattern in patterns)]


def test_the_build_sees_every_file_of_the_product_and_no_secret() -> None:
    wanted = product_files() | {"pyproject.toml", "setup.py", "README.md", "LICENSE", "requirements.lock", "deploy/needed.py"}
    assert [path for path in sorted(wanted) if ignored(path)] == []
    for path in (
        ".git/config",
        ".venv/bin/python",
        "tandem-keys.json",
        "keys.json",
        "cluster/__pycache__/x.pyc",
        "tests/tiers.py",
    ):
        assert ignored(path), path
