"""From the answers of ``benchmarks/retention.py`` to tables, a headline and a chart."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from common import spread

OURS = "summary"
LEAST_SHARE = 0.2
"""Of a task that full KV answers less often, no method is asked: what it kept could not be told."""

Line = dict[str, Any]
_WIDTH, _ROW, _TOP, _NAMES = 760, 22, 44, 150
_STYLE = "text{font:12px system-ui,sans-serif;fill:#222}.title{font-weight:600;font-size:14px}"


def wilson(mean: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    if not count:
        return 0.0, 1.0
    z, share = 1.96, min(1.0, max(0.0, mean))
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return round(max(0.0, middle - half), 3), round(min(1.0, middle + half), 3)


def solved_share(scores: Sequence[float]) -> float:
    """How many of the cases full KV answers in full."""
    return sum(score == 1 for score in scores) / len(scores)


class Scores:
    """The answers by task, method and budget, and by case; perplexities and recall are not among them."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._by: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
        for line in lines:
            if line["task"] not in ("recall", "perplexity"):
                self._by[line["task"], line["method"], line["budget"]][line["index"]] = line["score"]
        tasks = dict.fromkeys(task for task, _, _ in self._by)
        full = {task: self._by[task, "full", "100%"] for task in tasks}
        self.shares = {task: solved_share(list(scores.values())) for task, scores in full.items() if scores}
        self.tasks = [task for task, share in self.shares.items() if share >= LEAST_SHARE]
        self._solved = {task: {i for i, score in full[task].items() if score == 1} for task in self.shares}
        self.num_full = {task: len(scores) for task, scores in full.items()}

    def cells(self) -> list[tuple[str, str]]:
        """Methods and budgets of which there are answers."""
        return sorted({(method, budget) for _, method, budget in self._by if method != "full"})

    def of(self, task: str, method: str, budget: str) -> dict[int, float]:
        """By case, of those that full KV answers in full."""
        found = self._by.get((task, method, budget), {})
        return {index: score for index, score in found.items() if index in self._solved[task]}

    def pooled(self, method: str, budget: str) -> dict[tuple[str, int], float]:
        return {(task, i): score for task in self.tasks for i, score in self.of(task, method, budget).items()}


def tables(scores: Scores) -> dict[str, Any]:
    """Per task, method and budget.

    Methods are asked only what full KV answers in full: ``relative`` is their share of that. ``accuracy`` is
    of all cases, where those that full KV does not answer count as not answered.
    """
    result: dict[str, Any] = {}
    for task, share in scores.shares.items():
        count = scores.num_full[task]
        result[task] = {
            "full 100%": {
                "accuracy": round(share, 3), "accuracy_interval": wilson(share, count), "cases": count,
            }
        }  # fmt: skip
        for method, budget in scores.cells():
            if found := scores.of(task, method, budget):
                relative = statistics.mean(found.values())
                low, high = wilson(relative, len(found))
                result[task][f"{method} {budget}"] = {
                    "accuracy": round(relative * share, 3),
                    "accuracy_interval": (round(low * share, 3), round(high * share, 3)),
                    "relative": round(relative, 3),
                    "relative_interval": (low, high),
                    "cases": len(found),
                }
    return result


def averages(scores: Scores) -> dict[str, dict[str, Any]]:
    """``relative``, its mean over the tasks, by ``method budget``; the interval is of all cases together."""
    result = {}
    for method, budget in scores.cells():
        by_task = [found for task in scores.tasks if (found := scores.of(task, method, budget))]
        pooled = scores.pooled(method, budget)
        if len(by_task) == len(scores.tasks) and pooled:
            mean = statistics.mean(statistics.mean(found.values()) for found in by_task)
            result[f"{method} {budget}"] = {
                "relative": round(mean, 4), "interval": wilson(mean, len(pooled)), "cases": len(pooled),
            }  # fmt: skip
    return result


def duels(scores: Scores) -> dict[str, dict[str, Any]]:
    """Ours against each other method on the same cases: how often either answers better."""
    result = {}
    for method, budget in scores.cells():
        ours, theirs = scores.pooled(OURS, budget), scores.pooled(method, budget)
        both = ours.keys() & theirs.keys()
        if method != OURS and both:
            better = sum(ours[case] > theirs[case] for case in both)
            worse = sum(ours[case] < theirs[case] for case in both)
            result[f"{method} {budget}"] = {
                "ours_better": better, "ours_worse": worse, "cases": len(both),
                "p": round(_sign_test(better, worse), 4),
            }  # fmt: skip
    return result


def _sign_test(better: int, worse: int) -> float:
    """How likely so uneven a result would be if neither were better."""
    count, most = better + worse, max(better, worse)
    tail = sum(math.comb(count, k) for k in range(most, count + 1))
    return min(1.0, float(2 * tail / 2**count))


def headline(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ours and the best of the others."""
    result: dict[str, Any] = {}
    for budget in ("50", "25"):
        ours = found.get(f"{OURS} {budget}%")
        others = {
            name: cell["relative"] for name, cell in found.items()
            if name.endswith(f" {budget}%") and not name.startswith(OURS)
        }  # fmt: skip
        if ours is not None and others:
            best = max(others, key=lambda name: others[name])
            result |= {
                f"ours_relative_{budget}": ours["relative"],
                f"best_other_{budget}": others[best],
                f"best_other_{budget}_is": best.split()[0],
            }
    return result


def perplexities(lines: Sequence[Line]) -> dict[str, Any]:
    """Of the same texts, against all of the KV."""
    by: dict[str, dict[int, float]] = defaultdict(dict)
    for line in lines:
        if line["task"] == "perplexity":
            by[f"{line['method']} {line['budget']}"][line["index"]] = line["score"]
    full = by.pop("full 100%", {})
    result = {}
    for name, losses in sorted(by.items()):
        more = [loss - full[index] for index, loss in losses.items() if index in full]
        if more:
            result[name] = {
                "perplexity_ratio": spread([math.exp(value) for value in more]), "texts": len(more),
            }  # fmt: skip
    return result


def recall_table(lines: Sequence[Line]) -> dict[str, Any]:
    by: dict[str, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line["task"] == "recall":
            by[line["budget"]][line["method"]].append(line)
    table: dict[str, Any] = {}
    for budget, found in by.items():
        for name, ones in found.items():
            mean = statistics.mean(one["score"] for one in ones)
            table.setdefault(budget, {})[name] = {
                "accuracy": round(mean, 3),
                "accuracy_interval": wilson(mean, len(ones)),
                "cases": len(ones),
                "ttft_s": spread([one["ttft_s"] for one in ones], 2),
                "recalled_tokens": round(statistics.mean(one["recalled_tokens"] for one in ones)),
            }
    return table


# ---------------------------------------------------------------- the chart


def chart(found: dict[str, dict[str, Any]]) -> str:
    """Bars with intervals: how much of what full KV answers each method keeps, at half and a quarter."""
    budgets = ("50%", "25%")
    methods = list(dict.fromkeys(name.split()[0] for name in found))
    methods.sort(
        key=lambda method: -sum(found.get(f"{method} {b}", {"relative": 0})["relative"] for b in budgets)
    )
    height = _TOP + _ROW * len(methods) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}">',
        f'<style>{_STYLE}</style><rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    parts += [
        f'<text x="{_NAMES - 10}" y="{_TOP + _ROW * row + 15}" text-anchor="end">{escape(method)}</text>'
        for row, method in enumerate(methods)
    ]
    width = (_WIDTH - _NAMES) // len(budgets) - 24
    for place, budget in enumerate(budgets):
        parts += _panel(found, methods, budget, _NAMES + place * (width + 24), width)
    parts.append("</svg>\n")
    return "\n".join(parts)


def _panel(
    found: dict[str, dict[str, Any]], methods: Sequence[str], budget: str, left: int, width: int
) -> Iterator[str]:
    bottom = _TOP + _ROW * len(methods)
    yield f'<text class="title" x="{left}" y="24">{budget} of the KV: answers kept</text>'
    for share in (0, 25, 50, 75, 100):
        x = left + width * share / 100
        yield f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}" stroke="#e5e5e5"/>'
        yield f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{share} %</text>'
    for row, method in enumerate(methods):
        cell = found.get(f"{method} {budget}")
        if cell is None:
            continue
        y, color = _TOP + _ROW * row + 4, "#009e73" if method.startswith(OURS) else "#56b4e9"
        low, high = (left + width * end for end in cell["interval"])
        yield f'<rect x="{left}" y="{y}" width="{width * cell["relative"]:.1f}" height="14" fill="{color}"/>'
        yield f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 7}" y2="{y + 7}" stroke="#222"/>'
        for end in (low, high):
            yield f'<line x1="{end:.1f}" x2="{end:.1f}" y1="{y + 3}" y2="{y + 11}" stroke="#222"/>'
