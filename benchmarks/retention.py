"""What a KV budget does to answers, and what it costs.

Answers. Cases of ``retention_tasks.py`` are answered greedily with all of the KV, and then by every method
within every budget. ``accuracy`` is the mean score, ``relative`` that of the cases that full KV answers in
full, each with its 95 % interval (Wilson). ``summary-plain`` is our method without its preference for
entities. Perplexity is that of real text, whose next 96 tokens are forced one by one, relative to full KV.

Recall. The fact of the first turn is asked for in the turn after one that asked for something else, with what
was dropped at hand (``recalled``), and computed anew (``computed``): accuracy, and seconds to the first
token.

The answers are taken in parts: every answer is a line of ``--records``, what stands there is not computed
again, and ``--minutes`` ends a part. ``--report`` only writes down what is there. All tasks come in turn, so
that parts are balanced.

Speed. ``itl_ratio``: the pause between tokens with scoring on, in turn with a request without a budget, same
prompt, nothing dropped in either. ``kv_peak_ratio_50``: most blocks held within a budget of half the prompt,
against all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from common import finish, pairs, ratio, spread
from ostinato.config import DEFAULT_MODEL, tame_waiting_threads
from retention_tasks import TASKS, Prose, cases

METHODS = ("window", "sinks", "h2o", "tova", "snapkv", "summary-plain", "summary")
OURS = "summary"
BUDGETS = ("75%", "50%", "25%")
RECORDS = Path(__file__).parents[1] / "build" / "retention.jsonl"
ANSWER_TOKENS = 32
FORCED_TOKENS = 96
NUM_TEXTS = 6


def options_of(method: str, budget: str) -> dict[str, Any]:
    """A request's options; none for full KV."""
    if method == "full":
        return {}
    name, _, plain = method.partition("-")
    return {"kv_budget": budget, "retention": name} | ({"entities": False} if plain else {})


class Records:
    """Answers so far, one JSON line each; a part that was cut off goes on where it ended."""

    def __init__(self, path: Path, stamp: dict[str, Any]) -> None:
        self._path, self._stamp = path, stamp
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            lines = (json.loads(line) for line in path.read_text().splitlines())
            self.lines = [line for line in lines if line["stamp"] == stamp]
        self._known = {self._key(line) for line in self.lines}

    @staticmethod
    def _key(line: dict[str, Any]) -> tuple[Any, ...]:
        return line["task"], line["index"], line["method"], line["budget"]

    def get(
        self, task: str, index: int, method: str, budget: str, compute: Callable[[], dict[str, Any]]
    ) -> bool:
        """Computes what is not there yet; whether it did."""
        line: dict[str, Any] = {"task": task, "index": index, "method": method, "budget": budget}
        if self._key(line) in self._known:
            return False
        line |= compute() | {"stamp": self._stamp}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)
        self._known.add(self._key(line))
        return True


# ---------------------------------------------------------------- answers


def wanted(methods: list[str], budgets: list[str]) -> Iterator[tuple[str, str]]:
    yield "full", "100%"
    for budget in budgets:
        for method in methods:
            yield method, budget


def answer(engine: Any, case: Any, method: str, budget: str) -> dict[str, Any]:
    started = time.perf_counter()
    options = options_of(method, budget)
    reply = engine.chat(case.messages, temperature=0, max_tokens=ANSWER_TOKENS, **options)
    return {
        "score": case.score(reply.text),
        "prompt_tokens": reply.usage.prompt_tokens,
        "dropped_tokens": reply.usage.dropped_tokens,
        "seconds": round(time.perf_counter() - started, 2),
        "text": reply.text[:80],
    }


class Forcing:
    """In place of an engine's samplers: tells it what to say, and notes how likely that was."""

    def __init__(self, tokens: list[int]) -> None:
        self._left = iter(tokens)
        self.loss = 0.0

    def open(self, *_: Any) -> None: ...

    def close(self, *_: Any) -> None: ...

    def sample(self, sequence_ids: list[int], logits: Any) -> dict[int, Any]:
        import torch

        from ostinato.engines.base import Sampled

        sampled = {}
        for sequence_id, row in zip(sequence_ids, logits, strict=True):  # none in a step amid the prompt
            token = next(self._left)
            self.loss -= float(torch.log_softmax(row.double(), -1)[token])
            sampled[sequence_id] = Sampled(token)
        return sampled


def loss(engine: Any, tokens: list[int], method: str, budget: str) -> dict[str, Any]:
    """Mean loss, in nats, of the last tokens of a text."""
    runner = engine.runtime._batcher._runner
    prompt, rest = tokens[:-FORCED_TOKENS], tokens[-FORCED_TOKENS:]
    own, runner._samplers = runner._samplers, Forcing(rest)
    try:
        reply = engine.complete(
            prompt, max_tokens=FORCED_TOKENS, ignore_eos=True, **options_of(method, budget)
        )
        assert list(reply.choices[0].token_ids) == rest, "it said something else"
        return {"score": runner._samplers.loss / FORCED_TOKENS, "prompt_tokens": len(prompt)}
    finally:
        runner._samplers = own


def answers(engine: Any, records: Records, options: argparse.Namespace) -> None:
    tokenizer = engine.runtime.tokenizer
    prose = Prose.load(lambda text: len(tokenizer.encode(text)))
    end_s = time.monotonic() + 60 * options.minutes
    lists = {task: list(islice(cases(task, prose, options.length), options.cases)) for task in options.tasks}
    texts = list(prose.texts(tokenizer.encode, options.length + FORCED_TOKENS, min(NUM_TEXTS, options.cases)))
    for index in range(options.cases):
        work: list[tuple[str, Callable[[str, str], dict[str, Any]]]] = [
            (task, lambda m, b, case=found[index]: answer(engine, case, m, b))
            for task, found in lists.items()
        ]
        if index < len(texts):
            work.append(("perplexity", partial(loss, engine, texts[index])))
        for task, compute in work:
            for method, budget in wanted(options.methods, options.budgets):
                if time.monotonic() > end_s:
                    print(f"  the time is up; {len(records.lines)} answers are in the records")
                    return
                if records.get(task, index, method, budget, partial(compute, method, budget)):
                    last = records.lines[-1]
                    print(f"  {task} {index} {method} {budget}: {last['score']:.2f}", flush=True)


SMALL_TALK = "Thank you for all this. What did I send you last?"


def recall(engine: Any, records: Records, options: argparse.Namespace) -> None:
    """The quiet fact asked for in a turn after a turn that asked for something else.

    Once by somebody whose first turn left an archive (``recalled``), once by somebody new (``computed``).
    """
    tokenizer = engine.runtime.tokenizer
    prose = Prose.load(lambda text: len(tokenizer.encode(text)))
    end_s = time.monotonic() + 60 * options.minutes
    for case in islice(cases("quiet", prose, options.length), options.cases):
        for budget in options.budgets:
            for name, salt in (("recalled", "known"), ("computed", f"new {case.index} {budget}")):
                if time.monotonic() > end_s:
                    return
                compute = partial(second_turn, engine, case, budget, salt)
                if records.get("recall", case.index, name, budget, compute):
                    last = records.lines[-1]
                    print(f"  recall {case.index} {name} {budget}: {last['score']:.2f}", flush=True)


def second_turn(engine: Any, case: Any, budget: str, salt: str) -> dict[str, Any]:
    asked = {"temperature": 0, "max_tokens": ANSWER_TOKENS, "kv_budget": budget, "retention": OURS}
    before = [*case.messages[:-1], {"role": "user", "content": SMALL_TALK}]
    first = engine.chat(before, salt="known", **asked)
    messages = [*before, {"role": "assistant", "content": first.text}, case.messages[-1]]
    reply = engine.chat(messages, salt=salt, **asked)
    return {
        "score": case.score(reply.text),
        "recalled_tokens": reply.usage.recalled_tokens,
        "prompt_tokens": reply.usage.prompt_tokens,
        "ttft_s": round(reply.usage.ttft_s, 3),
    }


def recall_table(lines: list[dict[str, Any]]) -> dict[str, Any]:
    by: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
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


def wilson(mean: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    if not count:
        return 0.0, 1.0
    z, share = 1.96, min(1.0, max(0.0, mean))
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return round(middle - half, 3), round(middle + half, 3)


def summary(lines: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, float]]:
    """Per task, method and budget; and the mean of ``relative`` over the tasks, by ``method budget``."""
    by: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
    for line in lines:
        if line["task"] != "recall":
            by[line["task"], line["method"], line["budget"]][line["index"]] = line["score"]
    tables: dict[str, Any] = {}
    relatives: dict[str, list[float]] = defaultdict(list)
    for (task, method, budget), scores in sorted(by.items()):
        full = by[task, "full", "100%"]
        if task == "perplexity":
            losses = [scores[i] - full[i] for i in scores if i in full]
            tables.setdefault(task, {})[f"{method} {budget}"] = {
                "perplexity_ratio": round(math.exp(statistics.mean(losses)), 4), "texts": len(losses),
            }  # fmt: skip
            continue
        solved = [scores[i] for i in scores if full.get(i) == 1]
        mean = statistics.mean(scores.values())
        entry = {
            "accuracy": round(mean, 3),
            "accuracy_interval": wilson(mean, len(scores)),
            "cases": len(scores),
        }
        if solved and method != "full":
            relative = statistics.mean(solved)
            entry |= {"relative": round(relative, 3), "relative_interval": wilson(relative, len(solved))}
            entry["solved_by_full"] = len(solved)
            relatives[f"{method} {budget}"].append(relative)
        tables.setdefault(task, {})[f"{method} {budget}"] = entry
    return tables, {name: round(statistics.mean(values), 4) for name, values in relatives.items()}


# ---------------------------------------------------------------- speed and memory


def speed(engine: Any, rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """The pause between tokens with scoring, in turn with none."""
    prompt = [1 + i % 400 for i in range(1500)]
    num_tokens = 65

    def itl(**options: Any) -> float:
        times: list[float] = []
        for chunk in stream(engine, prompt, num_tokens, **options):
            times.extend(time.perf_counter() for _ in chunk.token_ids)
        return statistics.median(b - a for a, b in pairwise(times))

    budget = len(prompt) + num_tokens - 2  # one too few to be roomy: it is scored, and hardly drops
    ours, theirs = pairs(lambda: itl(kv_budget=budget), itl, rounds, "scored, not scored")
    return ratio(ours, theirs), {"scored_s": spread(ours), "not_scored_s": spread(theirs)}


def stream(engine: Any, prompt: list[int], num_tokens: int, **options: Any) -> Iterator[Any]:
    from ostinato.delivery import iterate
    from ostinato.types import GenerationRequest

    chosen = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, **options}
    return iterate(engine._prepare(GenerationRequest(tuple(prompt)), chosen))


def peaks(engine: Any, length: int) -> dict[str, int]:
    """Most blocks held, with all KV and within half of the prompt."""
    from ostinato.events import StepFinished

    manager, held = engine.runtime._manager, [0]

    def observe(event: Any) -> None:
        if isinstance(event, StepFinished):
            held.append(manager.num_held_blocks)

    engine.runtime.observers.append(observe)
    found = {}
    for name, options in (("full", {}), ("half", {"kv_budget": "50%"})):
        held[:] = [0]
        engine.purge()
        for _ in stream(engine, [1 + i % 300 for i in range(length)], 32, **options):
            pass
        found[name] = max(held)
    engine.runtime.observers.remove(observe)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--length", type=int, default=2000, help="tokens of text in a prompt")
    parser.add_argument("--cases", type=int, default=25, help="of each task")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS))
    parser.add_argument("--minutes", type=float, default=20.0, help="then this part of the answers ends")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--rounds", type=int, default=7, help="of the measurement of speed; 0: none")
    parser.add_argument("--report", action="store_true", help="compute no more answers")
    options = parser.parse_args()
    tame_waiting_threads(os.environ)
    import ostinato

    records = Records(options.records, {"model": options.model, "length": options.length})
    details: dict[str, Any] = {"length": options.length}
    headline: dict[str, Any] = {}
    settings: dict[str, Any] = {"kv_cache": "1GiB", "policy": "lru"}
    if not options.report:
        with ostinato.load(options.model, kv_recall="1GiB", **settings) as engine:
            recall(engine, records, options)
    with ostinato.load(options.model, **settings) as engine:
        if not options.report:
            answers(engine, records, options)
        if options.rounds:
            itl_ratio, details["itl"] = speed(engine, options.rounds)
            details["peak_blocks"] = found = peaks(engine, options.length)
            headline = {
                "itl_ratio": itl_ratio["median"],
                "kv_peak_ratio_50": round(found["half"] / found["full"], 4),
            }
    details["tasks"], details["relative"] = summary(records.lines)
    details["recall"] = recall_table(records.lines)
    for budget in ("50", "25"):
        ours = details["relative"].get(f"{OURS} {budget}%")
        others = {
            name: value for name, value in details["relative"].items()
            if name.endswith(f" {budget}%") and not name.startswith(OURS)
        }  # fmt: skip
        if ours is not None and others:
            headline[f"ours_relative_{budget}"] = ours
            headline[f"best_other_{budget}"] = max(others.values())
            details[f"best_other_{budget}"] = max(others, key=lambda name: others[name])
    finish("retention", headline, details)


if __name__ == "__main__":
    main()
