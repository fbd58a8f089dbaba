"""Write the dashboards: `python -m deploy.grafana.build`.

The files are for Grafana 11 (dashboard schema 39) and can be imported, or provisioned from a folder. A test makes them anew and
compares, so change what is in `boards/`, never a file.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.grafana.boards import BOARDS
from deploy.grafana.panels import Board, Panel, Query, Row

FOLDER = Path(__file__).parent
COLUMNS = 24
_SCHEMA_VERSION = 39
_TAG = "tandem"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SIGNS = {"$of": 'instance=~"$instance", model_name=~"$model_name"', "$rate": "$__rate_interval"}
"""What the signs in queries stand for."""

Json = dict[str, Any]


def files() -> dict[Path, str]:
    """The text of every dashboard's file."""
    return {FOLDER / f"{board.uid}.json": json.dumps(dashboard(board), indent=1) + "\n" for board in BOARDS}


def dashboard(board: Board) -> Json:
    """A dashboard as Grafana reads it."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.about,
        "tags": [_TAG],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "id": None,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "annotations": {"list": []},
        "links": [_link_to_the_others()],
        "templating": {"list": _variables(board)},
        "panels": list(_laid_out(board.rows)),
    }


def _link_to_the_others() -> Json:
    return {
        "title": "Tandem",
        "type": "dashboards",
        "tags": [_TAG],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _variables(board: Board) -> list[Json]:
    of_instance = 'instance=~"$instance"'
    found = [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "regex": "",
            "refresh": 1,
            "hide": 0,
            "includeAll": False,
            "multi": False,
            "options": [],
            "current": {},
        },
        _labels("instance", "Cluster", "label_values(tandem:workers_wanted, instance)"),
        _labels("model_name", "Model", f"label_values(tandem:workers_wanted{{{of_instance}}}, model_name)"),
    ]
    if board.by_tenant:
        counted = f'tandem:tenant_prompt_tokens_total{{{of_instance}, model_name=~"$model_name"}}'
        found.append(_labels("tenant", "Tenant", f"label_values({counted}, tenant)"))
    return found


def _labels(name: str, label: str, query: str) -> Json:
    """A choice among the values of a label, all of them at first."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "regex": "",
        "refresh": 2,
        "sort": 1,
        "hide": 0,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "options": [],
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _laid_out(rows: tuple[Row, ...]) -> Iterator[Json]:
    """The headings and panels, each with its place."""
    panel_id, top = 1, 0
    for row in rows:
        yield _heading(panel_id, row.title, top)
        panel_id, top = panel_id + 1, top + 1
        left = line_height = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top, line_height = 0, top + line_height, 0
            yield _panel(panel_id, panel, left, top)
            panel_id, left, line_height = panel_id + 1, left + panel.width, max(line_height, panel.height)
        top += line_height


def _heading(panel_id: int, title: str, top: int) -> Json:
    place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
    return {"id": panel_id, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel_id: int, panel: Panel, left: int, top: int) -> Json:
    look = {"timeseries": _lines_look, "stat": _number_look, "bargauge": _bars_look}[panel.kind]
    custom, options = look(panel)
    defaults: Json = {"unit": panel.unit, "min": 0, "custom": custom, "color": {"mode": "palette-classic"}, "noValue": "0"}
    return {
        "id": panel_id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "gridPos": {"x": left, "y": top, "w": panel.width, "h": panel.height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            _target(letter, query, panel) for letter, query in zip(string.ascii_uppercase, panel.queries, strict=False)
        ],
    }


def _lines_look(panel: Panel) -> tuple[Json, Json]:
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    custom = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 30 if panel.stacked else 8, "showPoints": "never"}
    legend = {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []}
    return custom | {"stacking": stacking}, {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


_LATEST = {"calcs": ["lastNotNull"], "fields": "", "values": False}


def _number_look(panel: Panel) -> tuple[Json, Json]:
    options = {"colorMode": "none", "graphMode": "area", "justifyMode": "auto", "orientation": "auto", "textMode": "auto"}
    return {}, options | {"reduceOptions": _LATEST}


def _bars_look(panel: Panel) -> tuple[Json, Json]:
    options = {"displayMode": "basic", "orientation": "horizontal", "showUnfilled": True, "valueMode": "color"}
    return {}, options | {"reduceOptions": _LATEST}


def _target(letter: str, query: Query, panel: Panel) -> Json:
    expr = query.expr
    for sign, meaning in _SIGNS.items():
        expr = expr.replace(sign, meaning)
    return {
        "refId": letter,
        "datasource": _DATASOURCE,
        "editorMode": "code",
        "expr": expr,
        "legendFormat": query.legend,
        "range": panel.kind != "bargauge",
        "instant": panel.kind == "bargauge",
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
