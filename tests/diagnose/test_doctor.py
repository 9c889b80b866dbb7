"""Faults that were planted are found and named; where there are none, none is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diagnose.conftest import DAY
from diagnose.planted import Log, healthy, planted
from diagnose.planted_vendors import healthy_vendors, in_the_head, planted_vendors
from ostinato.diagnose.doctor import examine
from ostinato.diagnose.findings import Report
from ostinato.diagnose.material import read_requests
from ostinato.diagnose.repair import MENDED
from ostinato.diagnose.writing import Writer

PLANTED = [*planted(), *planted_vendors()]
HEALTHY = [*healthy(), *healthy_vendors()]


def looked_at(log: Log, writer: Writer, folder: Path) -> Report:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in log))
    return examine(read_requests(path), writer, on=DAY)


@pytest.mark.model
@pytest.mark.parametrize(("kind", "log"), [pytest.param(k, log, id=name) for name, k, log in PLANTED])
def test_a_planted_fault_is_found_and_named(kind: str, log: Log, writer: Writer, tmp_path: Path) -> None:
    report = looked_at(log, writer, tmp_path)
    assert report.findings, "nothing found"
    assert report.findings[0].kind == kind, [
        (f.kind, f.where, f.lost_tokens, f.examples) for f in report.findings
    ]
    first = report.findings[0]
    assert first.fix
    assert first.requests
    assert first.lost_tokens > 0
    if kind in MENDED and kind not in ("parameter",):
        assert first.gain_tokens, f"mending it gains nothing: {first}"
        assert report.possible_tokens > report.hit_tokens
    if kind not in MENDED:
        assert first.gain_tokens is None or first.gain_tokens > 0


def test_there_are_enough_of_them() -> None:
    assert len(PLANTED) >= 40
    assert len(HEALTHY) >= 20


@pytest.mark.model
@pytest.mark.parametrize("log", [pytest.param(log, id=name) for name, log in HEALTHY])
def test_no_false_alarm(log: Log, writer: Writer, tmp_path: Path) -> None:
    report = looked_at(log, writer, tmp_path)
    assert not report.findings, [(f.kind, f.where, f.lost_tokens, f.examples) for f in report.findings]


@pytest.mark.model
def test_three_faults_in_one_head_are_told_apart_and_shown_in_words(writer: Writer, tmp_path: Path) -> None:
    report = looked_at(in_the_head(), writer, tmp_path)
    assert {item.kind for item in report.findings} == {"timestamp", "id", "user_data"}
    shown = {item.kind: item.examples[0] for item in report.findings}
    assert "2026-09-11T08:0" in shown["timestamp"]
    assert "req_" in shown["id"]
    assert "@example.com" in shown["user_data"]
    assert report.hit_rate < 0.15
    assert report.possible_rate > 0.6
    assert report.possible_tokens - report.hit_tokens == sum(
        item.gain_tokens or 0 for item in report.findings
    )
