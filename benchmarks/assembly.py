"""From messages to token ids: one more turn of a long conversation, and whole agent sessions.

Physics. transformers renders the whole conversation and tokenizes the whole text at every turn: a few hundred
thousand tokens a second, so 8,000 tokens take tens of milliseconds. Of them, all but the newest turn were
there before. What is left is reading and checking the messages, finding out which of them are known (a hash
and a comparison each), and rendering and tokenizing the new turn: about half of the time is the tokenizer's.

- **turn**: a conversation of 40 turns (81 messages with the system text) and 8,000 tokens is known; one more
  turn comes. Measured is everything from dicts to ids: on our side an array, which is what the engine takes,
  on the other a list. Every measured turn has a new text. With the model's own Jinja template, and with the
  same format as a function.
- **sessions**: recorded agent sessions, request by request; what a prompt adds to the one before it is its
  next message. All assembly time together. Needs a folder of `*.jsonl` with `input` and `session_id`:
  `--sessions DIR`, or OSTINATO_AGENT_TRACES; without one this part is skipped.

The ids of both sides are compared at every request. The last line is JSON: `speedup` and `turn_ms` are for
the model's own template, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common import finish, spread
from ostinato.config import Settings
from ostinato.models.fetch import fetch
from ostinato.models.store import ModelStore
from ostinato.ports import SystemClock
from ostinato.prompt.conversation import conversation_from_dicts
from ostinato.prompt.growing import GrowingPrompts
from ostinato.prompt.template import template_for
from ostinato.prompt.tokens import HFTokenizer

NUM_TURNS = 40
NUM_TOKENS = 8_000
ROUNDS = 60
DEFAULT_SESSIONS = Path(__file__).parents[2] / "shared" / "data" / "traces" / "agent"

Ids = npt.NDArray[np.int32] | list[int]
Assemble = Callable[[list[dict[str, str]]], Ids]


def words(chance: np.random.Generator, vocabulary: list[str], count: int) -> str:
    return " ".join(chance.choice(vocabulary, count))


def conversation(
    chance: np.random.Generator, vocabulary: list[str], assemble: Assemble
) -> list[dict[str, str]]:
    """40 turns that come to 8,000 tokens, give or take a few."""
    per_message = 10
    while True:
        messages = [{"role": "system", "content": words(chance, vocabulary, 150)}]
        for _ in range(NUM_TURNS):
            messages.append({"role": "user", "content": words(chance, vocabulary, per_message)})
            messages.append({"role": "assistant", "content": words(chance, vocabulary, per_message)})
        if len(assemble(messages)) >= NUM_TOKENS:
            return messages
        per_message += 1


def timed(assemble: Assemble, messages: list[dict[str, str]]) -> tuple[float, Ids]:
    start_s = time.perf_counter()
    ids = assemble(messages)
    return time.perf_counter() - start_s, ids


def measure_turn(
    make: Callable[[], Assemble], theirs: Assemble, vocabulary: list[str], label: str
) -> tuple[dict[str, Any], float, float]:
    chance = np.random.default_rng(40)
    ours = make()
    messages = conversation(chance, vocabulary, theirs)
    ours(messages)
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(ROUNDS):
        asked = [*messages, {"role": "user", "content": words(chance, vocabulary, 60)}]
        sides = [("ours", ours), ("theirs", theirs)]
        results = {}
        for side, assemble in sides[:: 1 if turn % 2 else -1]:
            seconds, results[side] = timed(assemble, asked)
            times[side].append(seconds * 1e3)
        assert np.array_equal(results["ours"], results["theirs"]), "the ids differ"
    turn_ms, theirs_ms = float(np.median(times["ours"])), float(np.median(times["theirs"]))
    record = {
        "num_messages": len(messages) + 1,
        "num_tokens": len(results["ours"]),
        "ours_ms": spread(times["ours"], 3) | {"p95": round(float(np.percentile(times["ours"], 95)), 3)},
        "transformers_ms": spread(times["theirs"], 3),
        "speedup": round(theirs_ms / turn_ms, 1),
    }
    print(f"{label}: {turn_ms:.2f} ms against {theirs_ms:.2f} ms, {len(results['ours'])} tokens", flush=True)
    return record, turn_ms, theirs_ms / turn_ms


def sessions(folder: Path) -> Iterator[list[list[dict[str, str]]]]:
    """The sessions of every file: each a list of conversations in the order they were asked."""
    for file in sorted(folder.rglob("*.jsonl")):
        by_session: dict[str, list[dict[str, Any]]] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            by_session.setdefault(record["session_id"], []).append(record)
        for records in by_session.values():
            records.sort(key=lambda record: record["timestamp"])
            yield list(_as_conversations(record["input"] for record in records))


def _as_conversations(prompts: Iterator[str]) -> Iterator[list[dict[str, str]]]:
    contents: list[str] = []
    for prompt in prompts:
        before = "".join(contents)
        if not contents or not prompt.startswith(before):
            contents = [prompt]
        elif len(prompt) > len(before):
            contents = [*contents, prompt[len(before) :]]
        yield [{"role": "user", "content": content} for content in contents]


def measure_sessions(make: Callable[[], Assemble], theirs: Assemble, folder: Path) -> dict[str, Any]:
    """Every session with a tokenizer that has seen nothing yet."""
    ours_s = theirs_s = 0.0
    num_requests = num_sessions = num_tokens = 0
    for requests in sessions(folder):
        ours = make()
        num_sessions += 1
        for messages in requests:
            seconds, ids = timed(ours, messages)
            ours_s += seconds
            seconds, expected = timed(theirs, messages)
            theirs_s += seconds
            assert np.array_equal(ids, expected), "the ids differ"
            num_requests += 1
            num_tokens += len(ids)
    print(f"{num_requests} requests of {num_sessions} sessions: {ours_s:.2f} s against {theirs_s:.2f} s")
    return {
        "num_sessions": num_sessions,
        "num_requests": num_requests,
        "num_tokens": num_tokens,
        "ours_s": round(ours_s, 3),
        "transformers_s": round(theirs_s, 3),
        "speedup": round(theirs_s / ours_s, 1),
    }


def main() -> None:
    from transformers import AutoTokenizer

    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--sessions", type=Path, default=os.environ.get("OSTINATO_AGENT_TRACES"))
    folder = Path(options.parse_args().sessions or DEFAULT_SESSIONS)
    settings = Settings.from_environment(os.environ)
    assert settings.store is not None
    local = fetch(settings.model, ModelStore(settings.store), progress=None)
    reference = AutoTokenizer.from_pretrained(local.path)
    vocabulary = Path(__file__).with_name("assembly.py").read_text(encoding="utf-8").split()

    def make(choice: str) -> Callable[[], Assemble]:
        def build() -> Assemble:
            nonce = str(secrets.randbelow(9 * 10**19) + 10**19)
            tokenizer = HFTokenizer.from_folder(local.path, nonce=nonce)
            template = template_for(tokenizer, choice, clock=SystemClock(), nonce=nonce)
            assert template is not None

            prompts = GrowingPrompts(template, tokenizer)
            return lambda messages: prompts.tokens(conversation_from_dicts(messages))

        return build

    def theirs(messages: list[dict[str, str]]) -> list[int]:
        ids: list[int] = reference.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        return ids

    own, turn_ms, speedup = measure_turn(make("auto"), theirs, vocabulary, "turn, the model's own template")
    function, _, _ = measure_turn(make("smollm2"), theirs, vocabulary, "turn, the same as a function")
    details: dict[str, Any] = {"turn": own, "turn_function": function, "sessions": None}
    if folder.is_dir():
        details["sessions"] = measure_sessions(make("auto"), theirs, folder)
    else:
        print(f"sessions: skipped, there is no folder {folder}: give one with --sessions")
    replayed = details["sessions"]
    finish(
        "assembly",
        {
            "speedup": round(speedup, 1),
            "turn_ms": round(turn_ms, 3),
            "sessions_speedup": None if replayed is None else replayed["speedup"],
        },
        details,
    )


if __name__ == "__main__":
    main()
