"""What a KV budget does to answers, and what it costs.

Answers. Cases of ``retention_tasks.py`` are answered greedily with all of the KV; what that answers in full
is asked of every method within every budget. ``relative`` is the share of it that a method answers, with its
95 % interval (Wilson), and the mean of that over tasks; ``duels`` compares ours with each other method case
by case (sign test). ``summary-plain`` is our method without its preference for entities; ``-renumber`` is a
method whose tokens have their positions renumbered. Ours, ours plain and SnapKV are asked every case at half
and a quarter of the KV, the others every third; at three quarters everybody every sixth (``--all`` asks
everybody everything). A task that full KV answers in fewer than a fifth of its first eight cases is left.

Perplexity is that of real text, whose next 96 tokens are forced one by one, relative to full KV.

Recall. The fact of the first turn is asked for in the turn after one that asked for something else, with what
was dropped at hand (``recalled``), and computed anew (``computed``): accuracy, and seconds to the first
token.

All that is taken in parts: every answer is a line of ``--records``, what stands there is not computed again,
and ``--minutes`` ends a part. ``--report`` only writes down what is there. All tasks come in turn, so that
parts are balanced. Cached prefixes are used where the engine uses them.

Speed. ``itl_ratio``: the pause between tokens with scoring on, in turn with a request without a budget, same
prompt, nothing dropped in either. ``kv_peak_ratio_50``: most blocks held within a budget of half the prompt,
against all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from common import RESULTS, finish, pairs, ratio, spread
from ostinato.config import DEFAULT_MODEL, tame_waiting_threads
from retention_report import (
    LEAST_SHARE,
    OURS,
    Scores,
    averages,
    chart,
    duels,
    headline,
    perplexities,
    recall_table,
    solved_share,
    tables,
)
from retention_tasks import TASKS, Prose, cases

METHODS = (
    "summary", "summary-plain", "snapkv", "expected", "h2o", "tova", "sinks", "window", "sinks-renumber",
    "summary-renumber",
)  # fmt: skip
CONTENDERS = ("summary", "summary-plain", "snapkv")
BUDGETS = ("50%", "25%", "75%")
PARTS = ("answers", "perplexity", "recall", "speed")
RECORDS = Path(__file__).parents[1] / "build" / "retention.jsonl"
CHART = Path(__file__).parents[1] / "docs" / "retention.svg"
ANSWER_TOKENS = 32
FORCED_TOKENS = 96
NUM_TEXTS = 6
NUM_TRIED = 8


def options_of(method: str, budget: str) -> dict[str, Any]:
    """A request's options; none for full KV."""
    if method == "full":
        return {}
    name, _, word = method.partition("-")
    more: dict[str, Any] = {"": {}, "plain": {"entities": False}, "renumber": {"renumber": True}}[word]
    return {"kv_budget": budget, "retention": name} | more


def is_due(method: str, budget: str, index: int) -> bool:
    """Whether a case is for a method, where not everybody is asked everything."""
    if budget == "75%":
        return index % 6 == 0
    return method in CONTENDERS or index % 3 == 0


class Records:
    """Answers so far, one JSON line each; a part that was cut off goes on where it ended."""

    def __init__(self, path: Path, stamp: dict[str, Any]) -> None:
        self._path, self._stamp = path, stamp
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            lines = (json.loads(line) for line in path.read_text().splitlines())
            self.lines = [line for line in lines if line["stamp"] == stamp]
        self._known = {self._key(line): line for line in self.lines}

    @staticmethod
    def _key(line: dict[str, Any]) -> tuple[Any, ...]:
        return line["task"], line["index"], line["method"], line["budget"]

    def get(
        self, task: str, index: int, method: str, budget: str, compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """What is there, or is computed now."""
        line: dict[str, Any] = {"task": task, "index": index, "method": method, "budget": budget}
        if (known := self._known.get(self._key(line))) is not None:
            return known
        line |= compute() | {"stamp": self._stamp}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)
        self._known[self._key(line)] = line
        print(f"  {task} {index} {method} {budget}: {line['score']:.2f}", flush=True)
        return line


# ---------------------------------------------------------------- answers


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
    prose = prose_of(engine)
    lists = {task: list(islice(cases(task, prose, options.length), options.cases)) for task in options.tasks}
    full: dict[str, list[float]] = {task: [] for task in lists}
    for index in range(options.cases):
        for task, found in lists.items():
            if len(full[task]) >= NUM_TRIED and solved_share(full[task]) < LEAST_SHARE:
                continue
            for method, budget in [("full", "100%"), *asked_of(options, index)]:
                if time.monotonic() > options.end_s:
                    return
                compute = partial(answer, engine, found[index], method, budget)
                score = records.get(task, index, method, budget, compute)["score"]
                if method == "full":
                    full[task].append(score)
                    if score < 1:
                        break


def asked_of(options: argparse.Namespace, index: int) -> Iterator[tuple[str, str]]:
    """The methods and budgets that are asked a case."""
    for budget in options.budgets:
        for method in options.methods:
            if options.all or is_due(method, budget, index):
                yield method, budget


def prose_of(engine: Any) -> Prose:
    return Prose.load(lambda text: len(engine.runtime.tokenizer.encode(text)))


def perplexity(engine: Any, records: Records, options: argparse.Namespace) -> None:
    texts = prose_of(engine).texts(
        engine.runtime.tokenizer.encode, options.length + FORCED_TOKENS, min(NUM_TEXTS, options.cases)
    )
    for index, text in enumerate(texts):
        for method, budget in (
            ("full", "100%"), *((m, b) for b in options.budgets if b != "75%" for m in options.methods)
        ):  # fmt: skip
            if time.monotonic() > options.end_s:
                return
            records.get("perplexity", index, method, budget, partial(loss, engine, text, method, budget))


SMALL_TALK = "Thank you for all this. What did I send you last?"


def recall(engine: Any, records: Records, options: argparse.Namespace) -> None:
    """The quiet fact asked for in a turn after a turn that asked for something else.

    Once by somebody whose first turn left an archive (``recalled``), once by somebody new (``computed``).
    """
    for case in islice(cases("quiet", prose_of(engine), options.length), options.cases):
        for budget in options.budgets:
            for name, salt in (("recalled", "known"), ("computed", f"new {case.index} {budget}")):
                if budget == "75%" or time.monotonic() > options.end_s:
                    continue
                compute = partial(second_turn, engine, case, budget, salt)
                records.get("recall", case.index, name, budget, compute)


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


def compute(records: Records, options: argparse.Namespace) -> None:
    """One part of the answers."""
    import ostinato

    settings: dict[str, Any] = {"kv_cache": "1GiB", "policy": "lru"}
    if "answers" in options.parts or "perplexity" in options.parts:
        with ostinato.load(options.model, **settings) as engine:
            if "answers" in options.parts:
                answers(engine, records, options)
            if "perplexity" in options.parts:
                perplexity(engine, records, options)
    if "recall" in options.parts and time.monotonic() < options.end_s:
        with ostinato.load(options.model, kv_recall="1GiB", **settings) as engine:
            recall(engine, records, options)
    print(f"  {len(records.lines)} answers are in the records")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Speed and memory; what the last run had of them, where they are not asked for."""
    import ostinato

    if "speed" not in options.parts or options.report:
        path = RESULTS / "retention.json"
        before = json.loads(path.read_text()) if path.exists() else {"headline": {}, "details": {}}
        return {
            name: before[part][name]
            for part, name in (
                ("headline", "itl_ratio"), ("headline", "kv_peak_ratio_50"), ("details", "itl"),
                ("details", "peak_blocks"),
            )
            if name in before[part]
        }  # fmt: skip
    with ostinato.load(options.model, kv_cache="1GiB", policy="lru") as engine:
        itl_ratio, itl = speed(engine, options.rounds)
        found = peaks(engine, options.length)
    return {
        "itl_ratio": itl_ratio["median"],
        "kv_peak_ratio_50": round(found["half"] / found["full"], 4),
        "itl": itl | {"ratio": itl_ratio},
        "peak_blocks": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--length", type=int, default=2000, help="tokens of text in a prompt")
    parser.add_argument("--cases", type=int, default=200, help="of each task")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--all", action="store_true", help="ask every method every case")
    parser.add_argument("--minutes", type=float, default=20.0, help="then this part of the answers ends")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--rounds", type=int, default=7, help="of the measurement of speed")
    parser.add_argument("--report", action="store_true", help="compute nothing more")
    options = parser.parse_args()
    tame_waiting_threads(os.environ)
    records = Records(options.records, {"model": options.model, "length": options.length})
    options.end_s = time.monotonic() + 60 * options.minutes
    if not options.report:
        compute(records, options)
    measured = measure(options)
    scores = Scores(records.lines)
    mean = averages(scores)
    details: dict[str, Any] = {
        "length": options.length,
        "tasks": tables(scores),
        "left": [task for task in scores.shares if task not in scores.tasks],
        "relative": mean,
        "duels": duels(scores),
        "perplexity": perplexities(records.lines),
        "recall": recall_table(records.lines),
    } | {name: measured[name] for name in ("itl", "peak_blocks") if name in measured}
    if mean:
        CHART.write_text(chart(mean))
    shown = {name: measured[name] for name in ("itl_ratio", "kv_peak_ratio_50") if name in measured}
    finish("retention", headline(mean) | shown, details)


if __name__ == "__main__":
    main()
