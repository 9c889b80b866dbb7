"""A Grafana dashboard and Prometheus' rules, made of :mod:`ostinato.panels`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from .panels import ALERTS, ROWS, Panel
from .series import ALL, PREFIX, Series

_DASHBOARD_ID: Final = "ostinato"
_COLUMNS: Final = 24
_HEIGHT: Final = 8


def panels() -> tuple[Panel, ...]:
    return tuple(panel for row in ROWS for panel in row.panels)


def dashboard() -> str:
    """Grafana's JSON, to be imported: it asks for the data source, and for the price of the machine."""
    found: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        found.append(_grafana_row(row.title, len(found) + 1, top))
        top += 1
        left = 0
        for panel in row.panels:
            if left + panel.width > _COLUMNS:
                top, left = top + _HEIGHT, 0
            found.append(_grafana_panel(panel, len(found) + 1, left, top))
            left += panel.width
        top += _HEIGHT
    board = {
        "uid": _DASHBOARD_ID,
        "title": "Ostinato",
        "tags": ["ostinato", "llm"],
        "timezone": "browser",
        "refresh": "30s",
        "schemaVersion": 39,
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": "dollars_per_hour",
                    "type": "textbox",
                    "label": "Price of the machine, $/h",
                    "query": "1",
                    "current": {"text": "1", "value": "1"},
                },
            ]
        },
        "panels": found,
    }
    return json.dumps(board, indent=1) + "\n"


def _grafana_row(title: str, number: int, top: int) -> dict[str, Any]:
    place = {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _grafana_panel(panel: Panel, number: int, left: int, top: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": {"h": _HEIGHT, "w": panel.width, "x": left, "y": top},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(65 + place),
                "datasource": source,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for place, query in enumerate(panel.queries)
        ],
    }


def rules() -> str:
    """Prometheus' rule file. JSON strings are YAML, so nothing has to be escaped in another way."""
    lines = ["# Made by `ostinato metrics rules`.", "groups:", "- name: ostinato", "  rules:"]
    for alert in ALERTS:
        lines += [
            f"  - alert: {alert.name}",
            f"    expr: {json.dumps(alert.expression)}",
            f"    for: {alert.lasting}",
            "    labels:",
            f"      severity: {alert.severity}",
            "    annotations:",
            f"      summary: {json.dumps(alert.summary)}",
            f"      description: {json.dumps(alert.text)}",
        ]
    return "\n".join(lines) + "\n"


def unused(series: Sequence[Series] = ALL) -> list[Series]:
    """The series that no panel draws."""
    text = " ".join(query.expression for panel in panels() for query in panel.queries)
    return [each for each in series if PREFIX + each.name not in text]
