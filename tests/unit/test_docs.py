"""The pages for readers: links lead somewhere, commands exist with their flags, pages are short, and the API page is whole."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from cluster import __version__
from cluster.commands import cli
from configs.loader import checked_config
from configs.schema import ClusterConfig
from protocol.errors import _BY_CODE, ConfigError
from router.api.chat.body import ChatBody
from router.api.completions.body import CompletionBody
from router.api.responses.body import ResponsesBody

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
MAX_LINES = 250
LIMITS = {"README.md": 150, "CHANGELOG.md": 1000}
"""Other limits: README is a front door, and a changelog only grows."""

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<(?:img|a)\b[^>]*?(?:src|href)=\"([^\"]+)\"")
_SHELL = re.compile(r"^ *```sh\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_YAML = re.compile(r"^```ya?ml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_COMMAND = re.compile(r"(?:^|[\s'(/])tandem ([^'\n|>&)]+)", re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings: lower case, no punctuation, dashes for spaces, numbers for repetitions."""
    found: set[str] = set()
    for heading in _HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        numbered = (f"{slug}-{number}" if number else slug for number in range(1000))
        found.add(next(anchor for anchor in numbered if anchor not in found))
    return found


def dead_links(page: Path) -> list[str]:
    dead = []
    for markdown, html in _LINK.findall(prose(page)):
        link = markdown or html
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


@pytest.mark.parametrize("page", [page for page in PAGES if "benchmarks" not in page.parts], ids=name_of)
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= LIMITS.get(name_of(page), MAX_LINES)


def test_a_dead_link_and_a_dead_anchor_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('# A page, of `mine`\n\n[a](gone.md) [b](page.md#a-page-of-mine) [c](#nowhere)\n<img src="gone.svg">\n')
    assert dead_links(page) == ["gone.md", "#nowhere", "gone.svg"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Names in code spans that begin with a folder of this repository; results may be those of a run to come."""
    named = re.findall(r"`((?:[a-z_]+/)+[\w.-]+\.(?:py|md|yaml|json|cpp))`", prose(page))
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()}
    named = [name for name in named if name.split("/")[0] in ours and not name.startswith("benchmarks/results/")]
    assert [name for name in named if not (ROOT / name).exists()] == []


def commands_of(text: str) -> list[list[str]]:
    """The arguments of each call of `tandem` in the shell blocks of a page."""
    code = _COMMENT.sub("", "\n".join(_SHELL.findall(text)).replace("\\\n", " "))
    return [shlex.split(found) for found in _COMMAND.findall(code)]


def parse(command: Any, name: str, arguments: list[str], parent: Any = None) -> None:
    """Parse the arguments as the command line does, and run nothing. Raises what is wrong with them."""
    with command.make_context(name, list(arguments), parent=parent) as context:
        if hasattr(command, "resolve_command"):
            found, below, rest = command.resolve_command(context, list(arguments))
            parse(below, found, rest, context)


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page.read_text())], ids=name_of)
def test_commands_that_a_page_shows_exist_with_their_flags(page: Path) -> None:
    group = typer.main.get_command(cli.app)
    for arguments in commands_of(page.read_text()):
        if arguments != ["--version"]:  # which would be done at once
            parse(group, "tandem", arguments)


def test_a_command_and_a_flag_that_are_gone_are_found() -> None:
    text = "```sh\nls | x/tandem serve --prefill 2 \\\n    --gone 3   # tandem more\nray exec 'tandem gone now'\n```\n"
    assert commands_of(text) == [["serve", "--prefill", "2", "--gone", "3"], ["gone", "now"]]
    for arguments in commands_of(text):
        with pytest.raises(typer.TyperException):
            parse(typer.main.get_command(cli.app), "tandem", arguments)


def configurations_of(text: str) -> list[dict[str, Any]]:
    """The blocks of YAML of a page that are configurations of Tandem, as their top keys tell."""
    blocks = [yaml.safe_load(block) for block in _YAML.findall(text)]
    return [block for block in blocks if isinstance(block, dict) and block.keys() & ClusterConfig.model_fields.keys()]


@pytest.mark.parametrize("page", [page for page in PAGES if configurations_of(page.read_text())], ids=name_of)
def test_configurations_that_a_page_shows_are_taken(page: Path) -> None:
    for values in configurations_of(page.read_text()):
        checked_config(values)


def test_a_configuration_that_would_be_refused_is_found() -> None:
    text = "```yaml\nkind: Pod\n```\n```yaml\nhttp: {host: 0.0.0.0}\n```\n"
    (values,) = configurations_of(text)
    with pytest.raises(ConfigError, match="keys_file"):
        checked_config(values)


def test_the_security_policy_names_this_version() -> None:
    version = __version__.rpartition(".")[0]
    assert f"| the latest commit of the main branch ({version}) | yes |" in (ROOT / "SECURITY.md").read_text()


def test_pictures_are_what_their_scripts_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    badges, chart, path, sequences = map(importlib.import_module, ("badges", "throughput_chart", "data_path", "sequences"))
    drawn = {path.TARGET: path.draw(), chart.TARGET: chart.draw(chart.read_groups())}
    drawn |= {**badges.pictures(), **sequences.pictures()}
    stale = [name_of(target) for target, picture in drawn.items() if target.read_text() != picture]
    assert stale == [], "draw them anew with `make docs`"


def test_the_module_map_says_what_the_docstrings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    pages = importlib.import_module("module_map").pages()
    for name, text in pages.items():
        assert (DOCS / "modules" / name).read_text() == text, f"docs/modules/{name} is out of date; run `make docs`"
    assert {path.name for path in (DOCS / "modules").iterdir()} == set(pages)


def test_readme_says_the_figures_of_its_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    groups = importlib.import_module("throughput_chart").read_groups()
    readme = (ROOT / "README.md").read_text()
    alt_text = re.search(r'<img src="docs/throughput.svg"[^>]*alt="([^"]+)"', readme)
    assert alt_text is not None
    for bar in (bar for group in groups for bar in group.bars):
        assert f" {bar.tokens_per_s:.0f}" in alt_text[1], bar
        if bar.name == "Tandem" or bar.name.startswith("vLLM"):
            assert f"{bar.tokens_per_s:.0f} tokens/s" in readme, bar


def test_the_api_page_names_every_error_that_a_client_can_see() -> None:
    """The others stay between workers and routers, or end a command."""
    errors = (DOCS / "api.md").read_text().partition("## Errors")[2]
    told = {code for row in re.findall(r"^\| \d.*$", errors, re.MULTILINE) for code in re.findall(r"`(\w+)`", row)}
    assert set(_BY_CODE) - told == {"tenant_full", "transport_unavailable", "config_error"}


def test_the_api_page_names_every_field_and_every_path() -> None:
    page = (DOCS / "api.md").read_text()
    whole, _, responses = page.partition("## Use `/v1/responses`")
    for name in {**ChatBody.model_fields, **CompletionBody.model_fields}:
        assert f"`{name}`" in whole, name
    for name in ResponsesBody.model_fields:
        assert f"`{name}`" in responses, name
    document = json.loads((ROOT / "tests" / "unit" / "snapshots" / "openapi.json").read_text())
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"`{method.upper()} {path}`" in page, f"{method} {path}"
