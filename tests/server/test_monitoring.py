"""The dashboard and the rules: made of the series there are, and evaluated by a real Prometheus."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from ostinato.cli import main
from ostinato.events import (
    AnswerFiled,
    AnswerLookedUp,
    AnswerMissed,
    BlocksEvicted,
    BlocksStored,
    Event,
    MoveVerified,
    Preempted,
    PrefixLookedUp,
    RequestFinished,
    RequestServed,
    SemanticChecked,
    SemanticLookedUp,
    StepFinished,
    TierLoaded,
)
from ostinato.kv.transfer import LoadCounters, TierReport, WriteBackCounters
from ostinato.monitoring import dashboard, panels, rules, unused
from ostinato.observe import (
    AnswerGauges,
    HttpMetrics,
    LoadGauges,
    PrometheusObserver,
    counter_of,
    exposition,
    gauge_of,
    new_registry,
)
from ostinato.panels import ALERTS
from ostinato.responses.stores.base import Use
from ostinato.runtime import Health
from ostinato.series import (
    ALL,
    PREFIX,
    ROUTED,
    ROUTED_AGAIN,
    ROUTED_HIT,
    UPSTREAM_DOLLARS,
    UPSTREAM_MISSES,
    UPSTREAM_TOKENS,
    UPSTREAM_UNCACHED_DOLLARS,
    WORKER_OPEN,
)
from ostinato.types import Conversation, GenerationRequest, Message, Served, Trim, Usage

_NO_TOOL = "needs Prometheus: install the package prometheus (it brings promtool)"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason=_NO_TOOL)
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason=_NO_TOOL)
CHAT = GenerationRequest(
    Conversation((Message("user", "a"), Message("assistant", "b"), Message("user", "c")))
)


class Source:
    """A registry with all there can be in it, which has seen some of everything."""

    def __init__(self) -> None:
        self.registry: CollectorRegistry = new_registry()
        self.stored = {"stored": 8}
        self.tier = TierReport(
            1000, 500, 10, 0,
            LoadCounters(900, 400, 10, 380, 4000, 0), WriteBackCounters(9, 8, 0, 1, 0, 900, 50),
            {"corrupt": 0, "absent": 3}, self.stored, {"capacity": 2},
        )  # fmt: skip
        self.registry.register(LoadGauges(lambda: Health(True, "", 2, 1, 100, 60, 30, 10, 5, self.tier)))
        self.registry.register(AnswerGauges(lambda: [Use("t", "m", "exact", 3, 900)]))
        self.observer = PrometheusObserver(self.registry)
        self.http = HttpMetrics(self.registry)
        self.tokens = counter_of(UPSTREAM_TOKENS, self.registry)
        self.dollars = counter_of(UPSTREAM_DOLLARS, self.registry)
        self.uncached = counter_of(UPSTREAM_UNCACHED_DOLLARS, self.registry)
        self.missed = counter_of(UPSTREAM_MISSES, self.registry)
        self.routed = counter_of(ROUTED, self.registry)
        self.expected = counter_of(ROUTED_HIT, self.registry)
        self.again = counter_of(ROUTED_AGAIN, self.registry)
        self.open = gauge_of(WORKER_OPEN, self.registry)

    def live(self) -> None:
        """A moment of it."""
        usage = Usage(100, 60, 40, 5, ttft_s=0.2, queue_s=0.01, total_s=0.6, loaded_tokens=20, load_s=0.01,
                      prompt_name="guide", approximate_tokens=4, retention="summary", dropped_tokens=3,
                      trimmed=Trim("sticky", 100, 400, (1,), ()))  # fmt: skip
        events: list[Event] = [
            StepFinished(64, 2, 0.02), PrefixLookedUp(100, 60), BlocksStored(40, 3), Preempted(7),
            BlocksEvicted(32, 2), TierLoaded(20, 3000, 0, 0.01), RequestFinished("stop", usage, CHAT),
            RequestFinished("length", Usage(50, 0, 50, 3, ttft_s=0.4, total_s=0.7), CHAT),
            AnswerLookedUp("miss", num_prompt_tokens=100, layers=("exact",)), AnswerMissed("absent"),
            AnswerFiled("stored"), AnswerLookedUp("exact", 2.0, 9, 50, ("exact",)),
            MoveVerified(0.002, True, False), SemanticLookedUp("served", 0.01, 0.97),
            SemanticChecked("check", True), SemanticChecked("check", False),
            RequestServed("stop", Usage(50, 50, 0, 9, served=Served("exact", 2.0)), CHAT),
        ]  # fmt: skip
        for event in events:
            self.observer(event)
        self.http.observe("/v1/chat/completions", 200, 0.6)
        self.tokens.labels("openai", "read").inc(50)
        self.uncached.labels("openai").inc(0.02)
        self.missed.labels("openai", "unclear").inc()
        self.routed.labels("one:8000", "prefix").inc()
        self.expected.labels("one:8000").inc(40)
        self.again.labels("one:8000", "broke off").inc()
        self.open.labels("one:8000").set(1)
        self.dollars.labels("openai").inc(0.01)
        self.stored["stored"] += 8
        for name in ("looked_up_tokens", "hit_tokens", "loaded_tokens", "loaded_bytes"):
            setattr(self.tier.loads, name, getattr(self.tier.loads, name) + 50)


def test_every_series_is_named_once_and_drawn() -> None:
    source = Source()
    source.live()
    exposed = {family.name for family in source.registry.collect()}
    assert exposed == {PREFIX + series.name for series in ALL}
    assert not unused()
    assert len({series.name for series in ALL}) == len(ALL)


def test_labels_have_the_values_that_are_known() -> None:
    source = Source()
    source.live()
    known = {PREFIX + series.name: series for series in ALL if series.values}
    for family in source.registry.collect():
        series = known.get(family.name)
        for sample in family.samples if series is not None else ():
            assert sample.labels[series.label] in series.values, sample


@needs_promtool
def test_promtool_finds_nothing_to_say_of_the_metrics() -> None:
    source = Source()
    source.live()
    text, _ = exposition(source.registry)
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@needs_promtool
def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "rules.yml"
    assert CliRunner().invoke(main, ["metrics", "rules", "-o", str(path)]).exit_code == 0
    done = subprocess.run(
        ["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_the_dashboard_has_every_panel_in_a_place_of_its_own() -> None:
    board = json.loads(CliRunner().invoke(main, ["metrics", "dashboard"]).output)
    drawn = [panel for panel in board["panels"] if panel["type"] == "timeseries"]
    assert [panel["title"] for panel in drawn] == [panel.title for panel in panels()]
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken
        taken |= cells
        assert place["x"] + place["w"] <= 24
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    names = {series.full_name for series in ALL}
    assert all(f"{name}" in dashboard() for name in names)


# ---------------------------------------------------------------- a real Prometheus


class Prometheus:
    """One that scrapes every second and evaluates the rules as often."""

    def __init__(self, target: int, folder: Path) -> None:
        (folder / "rules.yml").write_text(rules())
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "rules.yml")],
            "scrape_configs": [{"job_name": "o", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        arguments = [
            f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=error",
        ]  # fmt: skip
        self.process = subprocess.Popen(["prometheus", *arguments], env={**os.environ, "GOMAXPROCS": "1"})

    def get(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)["data"]

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = self.get("/api/v1/query", query=expression)["result"]
        return found

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)


@pytest.fixture
def exposed() -> Iterator[tuple[Source, int]]:
    """A source and the port it is scraped at."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    source = Source()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            source.live()
            text, content_type = exposition(source.registry)
            self.send_response(200)
            self.send_header("content-type", content_type)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield source, server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@needs_prometheus
@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_prometheus_evaluates_every_rule_and_every_panel(
    seconds: int, exposed: tuple[Source, int], tmp_path: Path
) -> None:
    if seconds > 10 and not os.environ.get("OSTINATO_SLOW_TESTS"):
        pytest.skip("takes a minute: set OSTINATO_SLOW_TESTS=1")
    prometheus = Prometheus(exposed[1], tmp_path)
    try:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s or not _is_up(prometheus):
            assert prometheus.process.poll() is None, "Prometheus has stopped"
            assert time.monotonic() < end_s + 60, "Prometheus scrapes nothing"
            time.sleep(0.2)
        empty = []
        for panel in panels():
            for query in panel.queries:
                expression = query.at("30s").replace("$dollars_per_hour", "2")
                found = prometheus.query(expression)
                if not found:
                    empty.append((panel.title, expression))
        assert not empty
        groups = prometheus.get("/api/v1/rules")["groups"]
        states = [(rule["name"], rule["health"], rule.get("lastError")) for rule in groups[0]["rules"]]
        assert [(name, health) for name, health, _ in states] == [(alert.name, "ok") for alert in ALERTS], (
            states
        )
        for alert in ALERTS:  # both sides of each comparison have a value of their own
            for side in alert.sides:
                assert prometheus.query(side), (alert.name, side)
    finally:
        prometheus.close()


def _is_up(prometheus: Prometheus) -> bool:
    try:
        found = prometheus.query("count_over_time(up[1m]) >= 4")
    except OSError:
        return False
    return bool(found)
