"""What the benchmarks share: pairs in turn, medians with spread, and a last line that is JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def pairs(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int, label: str
) -> tuple[list[float], list[float]]:
    """Measure both in turn, ``rounds`` times after one warm-up each; the order alternates."""
    ours(), theirs()
    a: list[float] = []
    b: list[float] = []
    for i in range(rounds):
        if i % 2:
            b.append(theirs())
            a.append(ours())
        else:
            a.append(ours())
            b.append(theirs())
        print(f"  {label} {i + 1}/{rounds}: {a[-1]:.4f} s against {b[-1]:.4f} s", flush=True)
    return a, b


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Ratio pair by pair: its median, lowest and highest."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "median": round(statistics.median(ratios), 4),
        "low": round(min(ratios), 4),
        "high": round(max(ratios), 4),
    }


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "low": round(min(values), digits),
        "high": round(max(values), digits),
    }


def machine() -> dict[str, Any]:
    """What it ran on: hardware and versions, nothing that names the machine."""
    import importlib.metadata

    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ("torch", "transformers", "numpy", "ostinato")
    return {
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def finish(name: str, headline: dict[str, Any], details: dict[str, Any]) -> None:
    """Write ``results/NAME.json`` and print the headline as the last line."""
    RESULTS.mkdir(exist_ok=True)
    record = {
        "benchmark": name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "headline": headline,
        "details": details,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"details in {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    print(json.dumps(headline))
    sys.stdout.flush()
