"""The commands of `tandem` in units, images and manifests exist with their flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
import typer.main

from cluster.commands import cli
from tests.unit.deploy.manifests import ROOT, main_container, pods
from tests.unit.test_docs import parse

DEPLOY = ROOT / "deploy"
LEAVE = "leave"


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every call of `tandem`: where it stands, and its arguments."""
    for unit in sorted((DEPLOY / "systemd").glob("*.service")):
        for line in re.findall(r"^Exec\w+=-?/opt/tandem/bin/tandem (.+)$", unit.read_text(), re.MULTILINE):
            yield unit.name, shlex.split(line)
    for name, template in pods():
        container = main_container(template)
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        if hook:
            yield f"{name} preStop", hook[1:]
        for text in container.get("args", ()):
            for line in re.findall(r"tini -- tandem (.+)$", text, re.MULTILINE):
                yield name, shlex.split(line)
    for name in ("Dockerfile", "Dockerfile.cuda"):
        [line] = re.findall(r"^CMD (\[.+\])$", (DEPLOY / name).read_text(), re.MULTILINE)
        yield name, [each.strip(' "') for each in line.strip("[]").split(",")]
    for page in sorted(DEPLOY.rglob("*.y*ml")):
        for line in re.findall(r"^# +(?:- )?(?:\. \S+; )?tandem ([^#\n]+)", page.read_text(), re.MULTILINE):
            yield page.name, shlex.split(line)


COMMANDS = list(commands())


@pytest.mark.parametrize("where", COMMANDS, ids=lambda where: f"{where[0]}: {where[1][0]}")
def test_a_command_exists_with_its_flags(where: tuple[str, list[str]]) -> None:
    group = typer.main.get_command(cli.app)
    parse(group, "tandem", where[1])


def test_commands_are_found_everywhere() -> None:
    used = {(where, arguments[0]) for where, arguments in COMMANDS}
    assert {
        ("tandem.service", "serve"),
        ("tandem-node.service", LEAVE),
        ("RayCluster head", "serve"),
        ("RayCluster decode preStop", LEAVE),
        ("RayService head preStop", "stop"),
        ("RayService prefill preStop", LEAVE),
        ("Dockerfile", "serve"),
        ("secrets.example.yaml", "keys"),
    } <= used
