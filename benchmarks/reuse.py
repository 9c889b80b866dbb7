"""Reuse that is no prefix: what it saves and what it does to answers, method by method.

How. Every case is a conversation that was computed and another one that has much of it at other places
(``reuse_cases.py``). The second is computed in full, and then by every method: ``naive`` moves KV without
turning keys; ``none`` turns them; ``first:n`` computes the first n tokens of each run again; ``p%`` those
that deviate most after the first layer; ``adaptive`` as many as it takes. Against full: KL of the next token
and its mean over the answer, the share of the tokens of full's own greedy answer of 64 that are still the
likeliest (forced, so that one difference is one), perplexity of the true continuation. Of shuffled
documents: whether the answer has the number that was asked for, of the cases that full has right.

Quality is taken in parts: each line of ``--records`` is one case by one method, what stands there is not
computed again, ``--minutes`` ends a part. ``--report`` writes down what is there.

Speed. ``ttft``: the engine as users have it, 4k tokens; in turn a prompt with the prefix alone and with moved
KV, each new so that nothing of it was there before, matching, moving, probing and repairing included.
``no_reuse_cost``: prompts of which nothing is stored, in mode ``moved`` against ``exact``. ``account``: a
chat service whose head changes every turn (``reuse_account.py``). ``agents``:
recorded sessions; tokens only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

from common import finish
from ostinato.config import DEFAULT_MODEL, tame_waiting_threads
from reuse_chart import draw

METHODS = ("naive", "none", "first:16", "5%", "10%", "15%", "20%", "30%", "adaptive")
RECORDS = Path(__file__).parents[1] / "build" / "reuse.jsonl"
CHART = Path(__file__).parents[1] / "docs" / "img" / "reuse.svg"
DOCUMENT_ANSWER_TOKENS = 24
DEFAULT_CASES = {"changed_date": 50, "changed_role": 50, "different_head": 50, "shuffled_docs": 200}


class Records:
    """One JSON line for each case and method; a part that was cut off goes on where it ended."""

    def __init__(self, path: Path, stamp: str) -> None:
        self._path, self._stamp = path, stamp
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            lines = (json.loads(line) for line in path.read_text().splitlines())
            self.lines = [line for line in lines if line["stamp"] == stamp]
        self._known = {(line["family"], line["index"], line["method"]) for line in self.lines}

    def has(self, family: str, index: int, method: str) -> bool:
        return (family, index, method) in self._known

    def add(self, family: str, index: int, method: str, values: dict[str, Any]) -> None:
        line = {"family": family, "index": index, "method": method, **values, "stamp": self._stamp}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)
        self._known.add((family, index, method))


# ---------------------------------------------------------------- quality


def quality(records: Records, options: argparse.Namespace) -> None:
    """Cases of all families in turn, until the time is up."""
    from retention_tasks import Prose
    from reuse_cases import cases
    from reuse_lab import FORCED, Lab, compared

    lab = Lab(options.model)
    prose = Prose.load(lab.count)
    stop = time.monotonic() + 60 * options.minutes
    streams = {family: islice(cases(family, prose), DEFAULT_CASES[family]) for family in options.families}
    while streams and time.monotonic() < stop:
        for family in list(streams):
            for _ in range(options.weights.get(family, 1)):
                case = next(streams[family], None)
                if case is None:
                    del streams[family]
                    break
                if time.monotonic() < stop:
                    one_case(lab, case, records, options.methods, FORCED, compared)


def one_case(lab: Any, case: Any, records: Records, methods: list[str], forced: int, compared: Any) -> None:
    todo = [method for method in methods if not records.has(case.family, case.index, method)]
    if not todo:
        return
    before, after = lab.tokens(case.before), lab.tokens(case.after)
    is_answered = bool(case.wanted)
    count = DOCUMENT_ANSWER_TOKENS if is_answered else forced
    last = lab.full(1, after)
    answer = lab.greedy(1, len(after), last, count)
    is_right = case.wanted in lab.tokenizer.decode(answer.tolist()) if is_answered else None
    if is_answered and not is_right:
        for method in todo:
            records.add(case.family, case.index, method, {"full_is_right": False})
        return
    follows = None if is_answered else lab.tokenizer.encode(case.follows)[:forced]
    exact = lab.told(after, last, answer, follows)
    lab.full(0, before)
    for method in todo:
        last, values = lab.moved(before, after, method)
        told = lab.told(after, last, answer, follows)
        values |= compared(exact, told, answer, follows)
        if is_answered:
            own = lab.greedy(1, len(after), last, count)
            values |= {"full_is_right": True, "is_right": case.wanted in lab.tokenizer.decode(own.tolist())}
        records.add(case.family, case.index, method, values)
        shown = {name: round(value, 5) for name, value in values.items() if isinstance(value, float)}
        print(f"  {case.family} {case.index} {method}: {shown}", flush=True)


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    if not count:
        return 0.0, 1.0
    z, p = 1.96, right / count
    mid = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, mid - half), min(1.0, mid + half)


def mean_of(values: list[float]) -> dict[str, float]:
    """Mean with its standard error, median and worst."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else float("nan")
    return {
        "mean": round(statistics.fmean(values), 6),
        "standard_error": round(error, 6),
        "median": round(statistics.median(values), 6),
        "worst": round(max(values), 6),
    }


def quality_table(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By family and method."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["family"], line["method"]].append(line)
    table: dict[str, dict[str, Any]] = {}
    for (family, method), group in groups.items():
        told = [line for line in group if "kl" in line]
        if not told:
            continue
        row: dict[str, Any] = {"cases": len(told)}
        for name in ("kl", "kl_mean", "agreement", "perplexity_ratio"):
            values = [line[name] for line in told if name in line]
            if values:
                row[name] = mean_of(values)
        row["computed_share"] = round(
            statistics.fmean(line["rows"] / (line["tokens"] - line["prefix"]) for line in told), 4
        )
        row["repaired_share"] = round(
            statistics.fmean(line["repaired"] / max(1, line["moved"]) for line in told), 4
        )
        if family == "shuffled_docs":
            right = sum(line["is_right"] for line in told)
            low, high = wilson(right, len(told))
            row["relative_accuracy"] = round(right / len(told), 4)
            row["interval"] = [round(low, 4), round(high, 4)]
            row["full_accuracy"] = round(len(told) / len(group), 4)
        table.setdefault(family, {})[method] = row
    return table


# ---------------------------------------------------------------- agents, by tokens


def agents(tokenizer: Any, folder: Path, max_tokens: int) -> dict[str, Any]:
    """Of recorded sessions, as they came: which prompt tokens were there as a prefix, or elsewhere."""
    import numpy as np

    from ostinato.engines.blending import MIN_RUN_TOKENS
    from ostinato.reuse.match import RunIndex
    from ostinato.types import num_common

    shares: dict[str, Any] = {}
    for name in ("magagent", "taubench", "miniswe"):
        files = sorted((folder / name).glob("*.jsonl")) if (folder / name).exists() else []
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        if not lines:
            continue
        index, stored = RunIndex(1 << 21), defaultdict(list)
        total = prefix = moved = 0
        for line in sorted(lines, key=lambda line: line["timestamp"])[:150]:
            tokens = tokenizer.encode(line["input"])[:max_tokens].astype(np.int32)
            own = stored[line["session_id"]]
            start = min(max((num_common(other, tokens) for other in own), default=0), len(tokens) - 1)
            for others in stored.values():
                if others and others is not own:
                    start = max(start, min(num_common(others[-1], tokens), len(tokens) - 1))
            found = index.find("", tokens, start=start, end=len(tokens) - 1, min_tokens=MIN_RUN_TOKENS)
            total, prefix = total + len(tokens), prefix + start
            moved += sum(run.length for run in found)
            index.add("", tokens)
            own[:] = [*own[-3:], tokens]
        shares[name] = {
            "prompt_tokens": total,
            "prefix": round(prefix / total, 4),
            "moved": round(moved / total, 4),
            "computed": round(1 - (prefix + moved) / total, 4),
        }
    return shares


# ---------------------------------------------------------------- what is written down


def headline_of(table: dict[str, Any], speed: dict[str, Any]) -> dict[str, Any]:
    """The adaptive default, beside the bars."""
    headline: dict[str, Any] = {}
    for family, name in (
        ("changed_date", "changed_head"),
        ("changed_role", "changed_role"),
        ("different_head", "different_head"),
        ("shuffled_docs", "shuffled_docs"),
    ):
        row, fast = table.get(family, {}).get("adaptive"), speed.get("ttft", {}).get(family)
        told: dict[str, Any] = {}
        if fast is not None:
            told["ttft_speedup"] = fast["speedup"]["median"]
        if row is not None and family == "shuffled_docs":
            told["relative_accuracy"], told["cases"] = row["relative_accuracy"], row["cases"]
        elif row is not None:
            told |= {"kl": row["kl"]["mean"], "agreement": row["agreement"]["mean"], "cases": row["cases"]}
        headline[name] = told
    if "no_reuse" in speed:
        headline["no_reuse_cost"] = speed["no_reuse"]["search_share"]
    if "account" in speed:
        headline["account"] = speed["account"]["ratios"]
    return headline


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--families", nargs="+", default=list(DEFAULT_CASES), choices=list(DEFAULT_CASES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--minutes", type=float, default=20.0, help="then this part of the quality ends")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--part", choices=("all", "quality", "speed", "account", "report"), default="all")
    parser.add_argument("--length", type=int, default=4000, help="tokens of the prompts that are timed")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of each kind that is timed")
    parser.add_argument("--conversations", type=int, default=3, help="of the account")
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--window", type=int, default=2000, help="tokens of a conversation at most")
    parser.add_argument("--traces", type=Path, default=Path(__file__).parents[2] / "shared/data/traces/agent")
    options = parser.parse_args()
    options.weights = {"shuffled_docs": 3}
    tame_waiting_threads(os.environ)
    records = Records(options.records, options.model)
    if options.part in ("all", "quality"):
        quality(records, options)
    if options.part == "quality":
        print(json.dumps({"lines": len(records.lines)}))
        return
    speed_path = options.records.with_suffix(".speed.json")
    speed = json.loads(speed_path.read_text()) if speed_path.exists() else {}
    if options.part in ("all", "speed"):
        speed |= speeds(options)
    if options.part in ("all", "account"):
        speed["account"] = service(options)
    if options.part != "report":
        speed_path.parent.mkdir(parents=True, exist_ok=True)
        speed_path.write_text(json.dumps(speed))
    table = quality_table(records.lines)
    details = {"quality": table, **speed}
    if table:
        CHART.parent.mkdir(parents=True, exist_ok=True)
        CHART.write_text(draw(table))
    finish("reuse", headline_of(table, speed), details)


def speeds(options: argparse.Namespace) -> dict[str, Any]:
    import ostinato
    from retention_tasks import Prose
    from reuse_speed import KINDS, no_reuse_cost, ttft

    with ostinato.load(options.model, kv_cache="2GiB") as engine:
        prose = Prose.load(lambda text: len(engine.runtime.tokenizer.encode(text)))
        told: dict[str, Any] = {"length": options.length}
        told["agents"] = agents(engine.runtime.tokenizer, options.traces, engine.runtime.max_model_len)
        told["ttft"] = {kind: ttft(engine, prose, kind, options.length, options.rounds) for kind in KINDS}
        told["no_reuse"] = no_reuse_cost(engine, prose, options.length // 2, options.rounds)
    return told


def service(options: argparse.Namespace) -> dict[str, Any]:
    import ostinato
    from retention_tasks import Prose
    from reuse_account import account, ratios

    size = {"conversations": options.conversations, "turns": options.turns, "window": options.window}
    with ostinato.load(options.model, kv_cache="2GiB", reuse_sample=0.0) as engine:
        prose = Prose.load(lambda text: len(engine.runtime.tokenizer.encode(text)))
        prefix, moved = (account(engine, prose, is_moved=is_moved, **size) for is_moved in (False, True))
    published = {"share": 2.76, "ttft": 1.81, "between": 2.6, "peak": 1.41}
    told = ratios(prefix, moved)
    return {"prefix": prefix, "moved": moved, "ratios": told, "published_ratios": published, **size}


if __name__ == "__main__":
    main()
