"""The dashboards are what their description says, Grafana can import them, and every query names series that there are."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deploy.grafana.boards import BOARDS
from deploy.grafana.build import COLUMNS, FOLDER, dashboard, files
from tests.unit.deploy.promql import known_series, problems, recorded_names

_DATASOURCE = {"const": {"type": "prometheus", "uid": "${datasource}"}}
_PLACE = {"type": "integer", "minimum": 0}
_GRID = {
    "type": "object",
    "required": ["x", "y", "w", "h"],
    "additionalProperties": False,
    "properties": {"x": _PLACE, "y": _PLACE, "w": {"type": "integer", "minimum": 1}, "h": {"type": "integer", "minimum": 1}},
}
_TARGET = {
    "type": "object",
    "required": ["refId", "datasource", "expr", "legendFormat", "range", "instant"],
    "properties": {"refId": {"pattern": "^[A-Z]$"}, "datasource": _DATASOURCE, "expr": {"type": "string", "minLength": 1}},
}
_ROW = {"properties": {"type": {"const": "row"}, "panels": {"const": []}}, "required": ["type", "panels", "collapsed", "title"]}
_PICTURE = {
    "required": ["type", "title", "description", "datasource", "fieldConfig", "options", "targets"],
    "properties": {
        "type": {"enum": ["timeseries", "stat", "bargauge"]},
        "datasource": _DATASOURCE,
        "fieldConfig": {
            "required": ["defaults", "overrides"],
            "properties": {"defaults": {"required": ["unit", "custom"]}, "overrides": {"type": "array"}},
        },
        "options": {"type": "object", "minProperties": 1},
        "targets": {"type": "array", "minItems": 1, "items": _TARGET},
    },
}
_VARIABLE = {
    "required": ["name", "type", "query", "refresh", "hide", "multi", "includeAll", "options", "current"],
    "properties": {"type": {"enum": ["datasource", "query"]}},
}
SCHEMA = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "id", "templating", "time", "annotations", "panels", "version"],
    "properties": {
        "id": {"type": "null"},
        "uid": {"pattern": "^[a-z0-9-]{1,40}$"},
        "schemaVersion": {"const": 39},
        "time": {"required": ["from", "to"]},
        "templating": {"required": ["list"], "properties": {"list": {"items": _VARIABLE}}},
        "panels": {
            "type": "array",
            "items": {
                "required": ["id", "gridPos"],
                "properties": {"id": {"type": "integer", "minimum": 1}, "gridPos": _GRID},
                "oneOf": [_ROW, _PICTURE],
            },
        },
    },
}
"""What Grafana 11 reads of a dashboard, by its documentation ("JSON model"), as far as these use it."""

_VARIABLES = re.compile(r"\$\{?(\w+)")
_ALWAYS_THERE = {"__rate_interval", "__range"}
IDS = [board.uid for board in BOARDS]


@pytest.fixture(params=BOARDS, ids=IDS)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dashboard(request.param)


def pictures(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_the_files_are_what_the_description_says() -> None:
    made = files()
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
    assert stale == [], "write them anew: python -m deploy.grafana.build"
    assert set(FOLDER.glob("*.json")) == set(made)


def test_every_dashboard_has_a_uid_of_its_own() -> None:
    assert len(set(IDS)) == len(BOARDS) == 6


def test_grafana_can_read_it(board: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(json.dumps(board)), SCHEMA)


def test_the_choices_are_there(board: dict[str, Any]) -> None:
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables[:3] == ["datasource", "instance", "model_name"]
    known = _ALWAYS_THERE | set(variables)
    texts = [target["expr"] for panel in pictures(board) for target in panel["targets"]]
    texts += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert {name for text in texts for name in _VARIABLES.findall(text)} <= known


def test_no_panel_lies_upon_another(board: dict[str, Any]) -> None:
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= COLUMNS, panel["title"]
    for one, other in combinations(board["panels"], 2):
        assert not _overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
    above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    return not (beside or above)


def test_lines_are_filled(board: dict[str, Any]) -> None:
    """No hole is left where somebody would look for a panel, but at the end of a row."""
    for panel in pictures(board):
        before = [other["gridPos"] for other in pictures(board) if other["gridPos"]["y"] == panel["gridPos"]["y"]]
        left = sum(place["w"] for place in before if place["x"] < panel["gridPos"]["x"])
        assert left == panel["gridPos"]["x"], panel["title"]


def test_every_query_names_series_and_labels_that_there_are(board: dict[str, Any], tmp_path: Path) -> None:
    known, recorded = known_series(tmp_path), recorded_names()
    wrong = [
        f"{panel['title']}: {problem}"
        for panel in pictures(board)
        for target in panel["targets"]
        for problem in problems(target["expr"], known, recorded)
    ]
    assert not wrong, "\n".join(wrong)


def test_legends_name_labels_that_the_query_keeps(board: dict[str, Any]) -> None:
    for panel in pictures(board):
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                kept = re.findall(r"\bby \(([^)]*)\)", target["expr"])
                assert any(label in labels.split(", ") for labels in kept), (panel["title"], label)
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(set(legends)) == len(legends), panel["title"]
