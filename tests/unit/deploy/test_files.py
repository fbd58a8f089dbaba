"""Every file of `deploy/` is used by a test, which is named here, or says in its first lines what was not tried."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NOT_TRIED = re.compile(r"^# NOT TRIED\b.{20,}", re.MULTILINE)
FIRST_LINES = 3
UNIT = "tests/unit/deploy"
MANIFESTS = f"{UNIT}/test_kubernetes.py"
USED = {
    "Dockerfile": "tests/integration/test_container_image.py",
    "needed.py": f"{UNIT}/test_dockerfiles.py",
    "grafana/*.json": f"{UNIT}/test_dashboards.py",
    "grafana/*.py": f"{UNIT}/test_dashboards.py",
    "grafana/boards/*.py": f"{UNIT}/test_dashboards.py",
    "kubernetes/base/*.yaml": MANIFESTS,
    "kubernetes/*/kustomization.yaml": MANIFESTS,
    "kubernetes/build.py": MANIFESTS,
    "kubernetes/secrets.example.yaml": f"{UNIT}/test_kubernetes_references.py",
    "serve.yaml": "tests/integration/test_serve_deploy.py",
    "prometheus/*.yml": "tests/integration/test_prometheus.py",
    "systemd/*": f"{UNIT}/test_systemd.py",
    "**/__init__.py": f"{UNIT}/test_files.py",
}
"""Files, as patterns below `deploy/`, and a test that uses them."""


def files() -> list[str]:
    """The files of `deploy/`, but for what Python leaves there."""
    found = (ROOT / "deploy").rglob("*")
    return sorted(str(path.relative_to(ROOT / "deploy")) for path in found if path.is_file() and path.suffix != ".pyc")


def users_of(name: str) -> list[str]:
    return [test for pattern, test in USED.items() if name in {str(path) for path in matching(pattern)}]


def matching(pattern: str) -> list[Path]:
    return [path.relative_to(ROOT / "deploy") for path in (ROOT / "deploy").glob(pattern)]


def says_what_was_not_tried(text: str) -> bool:
    return NOT_TRIED.search("\n".join(text.splitlines()[:FIRST_LINES])) is not None


def test_every_file_is_used_or_says_that_it_was_not_tried() -> None:
    """One that is used may say so as well: what a test sees of it is not always all of it."""
    unaccounted = [
        name for name in files() if not users_of(name) and not says_what_was_not_tried((ROOT / "deploy" / name).read_text())
    ]
    assert unaccounted == []


@pytest.mark.parametrize("pattern", USED)
def test_the_table_names_files_and_tests_that_there_are(pattern: str) -> None:
    assert matching(pattern)
    assert (ROOT / USED[pattern]).exists()


def test_a_file_that_says_nothing_is_found() -> None:
    assert not says_what_was_not_tried("# A file\n")
    assert not says_what_was_not_tried("# NOT TRIED\n")
    assert not says_what_was_not_tried("\n" * FIRST_LINES + "# NOT TRIED on machines of any kind\n")
    assert says_what_was_not_tried("# A file\n# NOT TRIED on machines of any kind\n")
