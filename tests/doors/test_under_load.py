"""Too much of everything, with the real engine: it waits, refuses with numbers, and ends well."""

from __future__ import annotations

import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

import ostinato
from doors.test_serve import Served, start, stop
from doors.tiny import save_tiny_chat_model
from ostinato.errors import PromptTooLongError

TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # of KV: two layers of two heads, keys and values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("loaded") / "tiny", max_len=4096)


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Served]:
    running = start(folder, *arguments)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            assert stop(running) == 0
        running.own.close()
        assert running.process.stdout is not None
        running.process.stdout.close()


def counted(served: Served, name: str) -> int:
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=30) as reply:
        found = re.search(rf"^{name} (\S+)", reply.read().decode(), re.MULTILINE)
    assert found, name
    return int(float(found.group(1)))


def wait_for(served: Served, name: str, count: int) -> None:
    ends_s = time.monotonic() + 60
    while counted(served, name) != count:
        assert time.monotonic() < ends_s, f"{name} did not become {count}"
        time.sleep(0.01)


def talk(number: int) -> list[Any]:
    return [{"role": "user", "content": f"Question {number}: {'why ' * (number % 7)}?"}]


def test_the_ledger_is_printed_at_the_start(folder: Path) -> None:
    """What memory goes to, and what it holds: in numbers that are those of this model."""
    with serving(folder, "--kv-cache", "2M", "--max-model-len", "1024") as served:
        assert served.process.stdout is not None
        lines = [served.process.stdout.readline() for _ in range(3)]
    weights, kv, conversations = lines
    assert re.fullmatch(r"weights +\d+(\.\d)? KiB\n", weights)
    num_tokens = (2 << 20) // TOKEN_BYTES
    assert kv.split() == [
        "KV",
        "2.0",
        "MiB,",
        f"{TOKEN_BYTES}",
        "B",
        "a",
        "token:",
        f"{num_tokens:,}",
        "tokens",
    ]
    assert f"{num_tokens // 1024} conversations of 1,024 tokens at once" in conversations


def test_a_full_queue_is_429_and_says_when_to_come_back(folder: Path) -> None:
    with serving(folder, "--max-sequences", "1", "--max-waiting", "2") as served:
        stream = served.ask(talk(0), max_tokens=4000, stream=True)
        next(iter(stream))
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(served.ask, talk(i)) for i in (1, 2)]
            wait_for(served, "ostinato_num_requests_waiting", 2)
            with pytest.raises(openai.RateLimitError) as refused:
                served.ask(talk(3))
            assert int(refused.value.response.headers["retry-after"]) >= 1
            assert refused.value.code == "queue_full"
            stream.close()
            assert all(reply.result().choices[0].finish_reason == "length" for reply in waiting)
        assert served.ask(talk(3)).choices[0].finish_reason == "length"


def test_what_there_is_no_room_for_is_refused_with_the_numbers(folder: Path) -> None:
    """A request that fits waits for others to end; one that never can is told why."""
    with ostinato.load(folder, kv_cache=200 * TOKEN_BYTES, block_size=4) as engine:
        assert engine.runtime.max_model_len == 200
        with pytest.raises(PromptTooLongError, match=r"has 250 tokens; there is KV for at most 200") as long:
            engine.complete(list(range(250)), max_tokens=1)
        assert (long.value.num_tokens, long.value.max_tokens) == (250, 200)
        with pytest.raises(PromptTooLongError, match="lower max_tokens to 50"):
            engine.complete([7] * 150, max_tokens=51)
        with ThreadPoolExecutor(6) as pool:
            prompts = [[20 + i] * 150 for i in range(6)]
            found = list(
                pool.map(lambda p: engine.complete(p, max_tokens=50, temperature=0, ignore_eos=True), prompts)
            )
        assert all(reply.usage.completion_tokens == 50 for reply in found)
        assert engine.runtime.health().num_held_blocks == 0


def test_sigterm_amid_load_loses_no_accepted_request(folder: Path) -> None:
    """Four run, twenty wait, half of them streams: every one gets its whole answer, and the process ends."""
    with serving(folder, "--max-sequences", "4") as served:

        def ask(number: int) -> str:
            if number % 2:
                reply = served.ask(talk(number), max_tokens=40)
                assert reply.choices[0].finish_reason == "length"
                return str(reply.choices[0].message.content)
            pieces = list(served.ask(talk(number), max_tokens=40, stream=True))
            assert pieces[-1].choices[0].finish_reason == "length"
            return "".join(piece.choices[0].delta.content or "" for piece in pieces)

        with ThreadPoolExecutor(24) as pool:
            expected = list(pool.map(ask, range(20)))
            running = [pool.submit(served.ask, talk(100 + i), max_tokens=1000) for i in range(4)]
            wait_for(served, "ostinato_num_requests_running", 4)
            answers = [pool.submit(ask, number) for number in range(20)]
            wait_for(served, "ostinato_num_requests_waiting", 20)
            served.process.send_signal(signal.SIGTERM)
            assert [answer.result() for answer in answers] == expected
            assert [reply.result().usage.completion_tokens for reply in running] == [1000] * 4
        assert served.process.wait(60) == 0
