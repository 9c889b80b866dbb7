"""``tier_codec`` through the doors: who asks for it gets it and is told, and nobody else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import pytest

import ostinato
from doors.test_serve import start, stop
from doors.tiny import save_tiny_chat_model
from ostinato.errors import ParameterError

TALK: list[Any] = [{"role": "user", "content": "Tell me, at some length, where an ostinato comes from."}]
OPTIONS = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}

CHILD = """
import json, sys
import ostinato

folder, tier, codec, talk, options = json.loads(sys.argv[1])
with ostinato.load(
    folder, kv_cache=1 << 20, block_size=4, shared_tier=tier, shared_tier_bytes="4MiB", tier_codec=codec
) as engine:
    for line in sys.stdin:
        reply = engine.chat(talk, **options)
        told = reply.usage.cached_tokens, reply.usage.approximate_tokens
        print(json.dumps([reply.choices[0].token_ids, *told]), flush=True)
"""


class Process:
    """An engine in a process of its own, asked as often as one likes."""

    def __init__(self, folder: Path, tier: Path, codec: str) -> None:
        arguments = json.dumps([str(folder), str(tier), codec, TALK, OPTIONS])
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self) -> tuple[list[int], int, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        token_ids, cached, approximate = json.loads(self._process.stdout.readline())
        return token_ids, cached, approximate

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def test_an_exact_and_a_lossy_process_share_a_folder_and_no_block(folder: Path, tmp_path: Path) -> None:
    with ostinato.load(folder, kv_cache=1 << 20, block_size=4) as engine:
        expected = list(engine.chat(TALK, **OPTIONS).choices[0].token_ids)

    def processes() -> tuple[Process, Process]:
        return Process(folder, tmp_path, "int8"), Process(folder, tmp_path, "exact")

    lossy, exact = processes()
    with lossy, exact:
        assert lossy.ask() == (expected, 0, 0), "what it computed itself is exact"
        assert exact.ask() == (expected, 0, 0)
    # Both have stored all of it now, at the same time, in one folder; each finds its own.
    lossy, exact = processes()
    with lossy, exact:
        token_ids, cached, approximate = exact.ask()
        assert (token_ids, approximate) == (expected, 0)
        assert cached > 50
        _, cached, approximate = lossy.ask()
        assert cached == approximate > 50
        _, cached, approximate = lossy.ask()
        assert cached == approximate > 50, "from the arena now, and no better for it"
        assert exact.ask()[0] == expected


def test_the_server_says_so_at_start_and_in_every_answer_that_used_it(folder: Path, tmp_path: Path) -> None:
    arguments = ("--shared-tier", str(tmp_path), "--tier-codec", "0:int8,1:int8/fp16", "--block-size", "4")
    ask: dict[str, Any] = {"messages": TALK, "max_tokens": 4}
    for run in range(2):
        served = start(folder, *arguments)
        try:
            whole = served.ask(**ask)
            *_, last = served.ask(**ask, stream=True)
        finally:
            assert stop(served) == 0
        extras = whole.ostinato
        if run == 0:
            assert "approximate_tokens" not in extras
        else:
            cached = whole.usage.prompt_tokens_details.cached_tokens
            assert extras["approximate_tokens"] == cached > 50
            assert last.ostinato["approximate_tokens"] >= cached


def test_a_codec_that_cannot_be_is_said_at_once(folder: Path, tmp_path: Path) -> None:
    for spec, reason in (("int9", "'int9' is none of"), ("0-1:int8,2:int8", "layers 0 to 1")):
        with pytest.raises(ParameterError, match=reason):
            ostinato.load(folder, kv_cache=1 << 20, shared_tier=tmp_path, tier_codec=spec)
    with pytest.raises(ParameterError, match="set shared_tier, too"):
        ostinato.load(folder, kv_cache=1 << 20, tier_codec="int8")
