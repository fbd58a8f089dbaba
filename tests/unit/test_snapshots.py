"""What others depend on, compared with files in `tests/unit/snapshots`: a change here is a decision, never an accident.

After an intended change, write the files anew and review every line that differs, for each is a line that somebody may notice:

    TANDEM_RENEW_SNAPSHOTS=1 .venv/bin/pytest tests/unit/test_snapshots.py && git diff tests/unit/snapshots

Messages and records are known by the names of their classes, wherever these are defined.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import os
import pkgutil
import types
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer.main
from starlette.testclient import TestClient
from typer import rich_utils
from typer.testing import CliRunner

import protocol
from cluster.commands import cli
from configs.schema import ClusterConfig, HttpConfig
from protocol.cluster_view import AutoscalerState, RolloutPhase, RolloutState
from protocol.codec import _CLASSES
from protocol.wire import WIRE_VERSION
from router.app import create_app
from telemetry.api_keys import ApiKeyFile
from telemetry.cluster_metrics import ClusterCollector, ClusterSample
from telemetry.metrics import Metrics
from telemetry.usage.ledger import UsageLedger
from telemetry.usage.totals import TOTALS, KafkaState, UsageTotals, write_totals

FOLDER = Path(__file__).with_name("snapshots")
RENEW = "TANDEM_RENEW_SNAPSHOTS"
SAMPLE = ClusterSample(autoscaler=AutoscalerState(None, ()), rollout=RolloutState(2, RolloutPhase.CANARY, 0.1, (), {}, ""))
"""Of a cluster that has everything of which there are metrics."""
HELP_COLUMNS = 100


def openapi(tmp_path: Path) -> str:
    """The document of a cluster that asks for both kinds of keys, as `/openapi.json` answers it."""
    keys_file = tmp_path / "keys.json"
    keys_file.write_text('{"keys": {}}')
    config = ClusterConfig(http=HttpConfig(keys_file=str(keys_file), admin_key="secret", metrics_key="secret"))
    router: Any = types.SimpleNamespace(config=config, facts=types.SimpleNamespace(name="smollm2"), shutdown=None)
    unused: Any = None
    answer = TestClient(create_app(router, unused, unused), base_url="http://localhost").get("/openapi.json")
    assert answer.status_code == 200, answer.text
    return json.dumps(answer.json(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def commands(tmp_path: Path) -> str:
    """`tandem --version`, and the help of every command, without colours and at a fixed width."""
    root = typer.main.get_command(cli.app)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rich_utils, "MAX_WIDTH", HELP_COLUMNS)
        patch.setattr(rich_utils, "FORCE_TERMINAL", False)
        shown = [_output("--version"), *(_output(*path, "--help") for path in _command_paths(root))]
    return "\n".join(shown)


def _command_paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, below in sorted(getattr(command, "commands", {}).items()):
        yield from _command_paths(below, (*path, name))


def _output(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, arguments, prog_name="tandem")
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.output.strip("\n").splitlines()]
    return "\n".join(["$ tandem " + " ".join(arguments), *(line for line in lines if line), ""])


def metrics(tmp_path: Path) -> str:
    """Every family that `/metrics` can show: the name of its samples, type, labels, help and buckets."""
    write_totals(tmp_path / TOTALS, UsageLedger(), KafkaState(0, 0, 0, 0))
    shown = []
    for collector in (
        *Metrics("smollm2", ClusterSample).registry._collector_to_names,
        ClusterCollector("smollm2", SAMPLE),
        ApiKeyFile("smollm2"),
        UsageTotals(tmp_path / TOTALS),
    ):
        for family in collector.collect():
            # The families of workers come from a collector of their own, and have the labels; the others are the collector.
            labels = vars(collector).get("_labelnames") or vars(family)["_labelnames"]
            name = f"{family.name}_total" if family.type == "counter" else family.name
            lines = [f"{name} {family.type} ({', '.join(labels)})", f"    {family.documentation}"]
            if bounds := vars(collector).get("_upper_bounds"):
                lines.append("    buckets: " + " ".join(f"{bound:g}" for bound in bounds))
            shown.append("\n".join(lines))
    return "\n".join(sorted(shown)) + "\n"


def configuration(tmp_path: Path) -> str:
    """Every key of the configuration: its path, then its type, default and bounds in JSON Schema's words."""
    schema = ClusterConfig.model_json_schema()
    return "".join(f"{line}\n" for line in sorted(_keys(schema, schema["$defs"], {}, "")))


def _keys(section: dict[str, Any], sections: dict[str, Any], defaults: dict[str, Any], path: str) -> Iterator[str]:
    """`defaults` are those that the section is made with where it is not given; they go before its class's own."""
    for name, described in section["properties"].items():
        key = f"{path}{name}"
        default = defaults.get(name, described.get("default"))
        if "$ref" in described:
            yield from _keys(sections[_last_part(described["$ref"])], sections, default, f"{key}.")
            continue
        kind = {word: value for word, value in described.items() if word not in ("title", "default")}
        entries = kind.get("additionalProperties", {})
        of_entries = entries.get("$ref") if isinstance(entries, dict) else None
        if of_entries is not None:
            kind["additionalProperties"] = "below"
        yield f"{key}: {json.dumps(kind, sort_keys=True)} default {json.dumps(default)}"
        if of_entries is not None:
            yield from _keys(sections[_last_part(of_entries)], sections, {}, f"{key}.NAME.")


def _last_part(reference: str) -> str:
    return reference.rpartition("/")[2]


def messages(tmp_path: Path) -> str:
    """Every message that the codec carries, by tag; then the records and enums within them, by name."""
    for module in pkgutil.walk_packages(protocol.__path__, "protocol."):
        importlib.import_module(module.name)
    below: dict[str, type[Any]] = {}
    shown = [f"wire version {WIRE_VERSION.decode()}\n"]
    shown += [f"message {tag} {_record(cls, below)}" for tag, cls in sorted(_CLASSES.items())]
    records: dict[str, str] = {}
    while left := sorted(below.keys() - records.keys()):
        cls = below[left[0]]
        records[left[0]] = _values(cls) if issubclass(cls, Enum) else f"record {_record(cls, below)}"
    return "\n".join([*shown, *(records[name] for name in sorted(records))])


def _record(cls: type[Any], below: dict[str, type[Any]]) -> str:
    """Name and fields, in the order in which they are sent. Puts the classes that these name into `below`."""
    hints = typing.get_type_hints(cls)
    fields = [f"    {field.name}: {_type(hints[field.name], below)}\n" for field in dataclasses.fields(cls)]
    return "".join([f"{cls.__name__}\n", *fields])


def _type(hint: Any, below: dict[str, type[Any]]) -> str:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type(option, below) for option in options)
    if origin is tuple:
        return f"tuple[{_type(options[0], below)}, ...]"
    if hint is type(None):
        return "None"
    if hint not in _CLASSES.values() and (dataclasses.is_dataclass(hint) or issubclass(hint, Enum)):
        assert below.setdefault(hint.__name__, hint) is hint, f"two classes are called {hint.__name__}"
    name: str = hint.__name__
    return name


def _values(cls: type[Enum]) -> str:
    return f"enum {cls.__name__}\n" + "".join(f"    {member.value}\n" for member in cls)


SNAPSHOTS: dict[str, Callable[[Path], str]] = {
    "openapi.json": openapi,
    "commands.txt": commands,
    "metrics.txt": metrics,
    "configuration.txt": configuration,
    "messages.txt": messages,
}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_the_outside_is_as_it_was_reviewed(name: str, tmp_path: Path) -> None:
    path = FOLDER / name
    now = SNAPSHOTS[name](tmp_path)
    if os.environ.get(RENEW):
        path.write_text(now, encoding="utf-8")
    reviewed = path.read_text(encoding="utf-8") if path.exists() else ""
    if now != reviewed:
        difference = difflib.unified_diff(
            reviewed.splitlines(), now.splitlines(), f"{name}, reviewed", f"{name}, now", lineterm=""
        )
        renewal = f"If every line of this is meant: {RENEW}=1 pytest tests/unit/test_snapshots.py, and commit the file."
        pytest.fail("\n".join([*difference, renewal]), pytrace=False)


def test_every_snapshot_is_compared() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(SNAPSHOTS)
