"""The request log: what stands in it, what does not, and what happens when it cannot be written."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from click.testing import CliRunner

import ostinato
from doors.tiny import save_tiny_chat_model
from ostinato.cli import main
from ostinato.errors import ParameterError
from ostinato.events import RequestFinished
from ostinato.ports import SystemClock
from ostinato.records import block_ids, log_key
from ostinato.request_log import RequestLog
from ostinato.sim.traces import read_mooncake
from ostinato.types import Conversation, GenerationRequest, Message, Usage

OPTIONS = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
SECRET_TEXT = "the password is swordfish"
TALK = [
    {"role": "system", "content": "Be brief, and say only what is true."},
    {"role": "user", "content": SECRET_TEXT},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def made(text: str = "hello", **fields: Any) -> RequestFinished:
    request = GenerationRequest(text, request_id="r", **fields)
    return RequestFinished("stop", Usage(40, 32, 8, 3), request, np.arange(40, dtype=np.int32), "space")


@pytest.fixture
def log(tmp_path: Path) -> Any:
    opened: list[RequestLog] = []

    def open_log(**options: Any) -> RequestLog:
        fields = {"key": log_key("k"), "block_tokens": 16, "clock": SystemClock()} | options
        opened.append(RequestLog(tmp_path / "log.jsonl", **fields))
        return opened[-1]

    yield open_log
    for each in opened:
        each.close()


def test_requests_are_logged_as_a_trace_without_their_text(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ostinato.load(folder, kv_cache=1 << 20, block_size=4, trace=path) as engine:
        first = engine.chat(TALK, **OPTIONS)
        again = engine.chat([*TALK, {"role": "assistant", "content": "No."}, TALK[1]], **OPTIONS)
        other = engine.chat(TALK, salt="another", **OPTIONS)
    rows = lines(path)
    replies = (first, again, other)
    for row, reply in zip(rows, replies, strict=True):
        usage = reply.usage
        assert row["v"] == 1
        assert row["input_length"] == usage.prompt_tokens
        assert row["output_length"] == usage.completion_tokens == 6
        assert (row["cached_tokens"], row["written_tokens"]) == (usage.cached_tokens, usage.written_tokens)
        assert row["finish_reason"] == "length"
        assert 0 <= row["queue_s"] <= row["ttft_s"] <= row["total_s"]
        assert len(row["hash_ids"]) == -(-row["input_length"] // 4)
    a, b, c = (row["hash_ids"] for row in rows)
    shared = sum(x == y for x, y in zip(a, b, strict=False))
    assert shared == again.usage.cached_tokens // 4 > 10
    assert not set(a) & set(c), "tenants' prompts can be told to be the same"
    data = path.read_text()
    assert not any(word in data for word in ("swordfish", "brief", "another", "messages"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # What it recorded, replayed: blocks found again are what the cache found.
    trace = read_mooncake(path)
    assert trace.unit_tokens == 4
    assert [request.input_tokens for request in trace.requests] == [r.usage.prompt_tokens for r in replies]
    result = CliRunner().invoke(main, ["replay", str(path), "--policy", "lru", "--capacity", "200", "--json"])
    assert result.exit_code == 0, result.output
    row = orjson.loads(result.output.splitlines()[0])
    assert row["input_tokens"] == sum(r.usage.prompt_tokens for r in replies)
    assert row["hit_tokens"] == 4 * shared


def test_content_is_written_when_it_is_asked_for(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ostinato.load(folder, kv_cache=1 << 20, trace=path, trace_content=True) as engine:
        engine.chat(TALK, salt="theirs", **OPTIONS)
        engine.complete("Once upon", **OPTIONS)
        engine.complete([5, 6, 7], **OPTIONS)
    chat, text, ids = lines(path)
    assert chat["request"] == {"messages": TALK, **OPTIONS}
    assert chat["salt"] == "theirs"
    assert text["request"] == {"prompt": "Once upon", **OPTIONS}
    assert ids["request"] == {"prompt": [5, 6, 7], **OPTIONS}


def test_sessions_are_told_apart_and_not_told(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ostinato.load(folder, kv_cache=1 << 20, trace=path) as engine:
        for session in ("jane@example.org", "jane@example.org", "joe@example.org"):
            engine.chat(TALK, session=session, **OPTIONS)
        engine.chat(TALK, session="jane@example.org", salt="another", **OPTIONS)
        engine.chat(TALK, **OPTIONS)
    a, b, c, d, e = (row.get("session") for row in lines(path))
    assert a == b
    assert len({a, c, d, e}) == 4
    assert e is None
    assert "example.org" not in path.read_text()


def test_a_key_decides_whether_logs_can_be_compared() -> None:
    tokens = np.arange(40, dtype=np.int32)
    ids = block_ids(log_key("a"), "space", tokens, 16)
    assert len(set(ids)) == 3
    assert all(0 <= each < 2**53 for each in ids)
    assert ids == block_ids(log_key("a"), "space", tokens, 16)
    assert ids[:2] == block_ids(log_key("a"), "space", tokens[:32], 16)
    for other in (
        block_ids(log_key("b"), "space", tokens, 16),
        block_ids(log_key("a"), "elsewhere", tokens, 16),
        block_ids(log_key("a"), "space", tokens + 1, 16),
    ):
        assert not set(ids) & set(other)


def test_two_starts_without_a_key_cannot_be_compared(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for key in (None, None, "k", "k"):
        with ostinato.load(folder, kv_cache=1 << 20, trace=path, trace_key=key) as engine:
            engine.chat(TALK, **OPTIONS)
    a, b, c, d = lines(path)
    assert a["hash_ids"] != b["hash_ids"] != c["hash_ids"]
    assert a["key"] != b["key"] != c["key"]
    assert (c["key"], c["hash_ids"]) == (d["key"], d["hash_ids"])


def test_a_full_log_is_moved_and_one_moved_away_is_begun_anew(log: Callable[..., RequestLog]) -> None:
    writer = log(max_bytes=1500)
    for _ in range(12):
        writer(made())
    assert writer.flush(10)
    path = writer.path
    old = path.with_name("log.jsonl.1")
    assert len(lines(path)) + len(lines(old)) <= 12
    assert old.stat().st_size < 2500
    path.rename(path.with_name("taken"))
    writer(made())
    assert writer.flush(10)
    assert len(lines(path)) == 1


def test_a_line_cut_short_spoils_no_other(log: Callable[..., RequestLog]) -> None:
    writer = log()
    writer(made())
    writer.close()
    with writer.path.open("ab") as file:
        file.write(writer.path.read_bytes()[:50])
    writer = log()
    writer(made())
    writer.close()
    assert len(read_mooncake(writer.path).requests) == 2


def test_what_cannot_be_written_is_dropped_and_said(
    log: Callable[..., RequestLog], caplog: pytest.LogCaptureFixture
) -> None:
    writer = log(with_content=True)
    writer(made(salt="\ud800"))  # half a character: no JSON
    writer(made(salt="\ud800"))
    writer(made())
    assert writer.flush(10)
    (row,) = lines(writer.path)
    assert row["dropped"] == writer.num_dropped == 2
    assert len(caplog.records) == 1
    writer(made())
    assert writer.flush(10)
    assert "dropped" not in lines(writer.path)[-1]


def test_a_queue_that_is_full_drops_and_never_waits(log: Callable[..., RequestLog], tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(RequestLog):
        def _follow(self) -> None:
            entered.set()
            assert go_on.wait(30)
            super()._follow()

    clock = SystemClock()
    writer = Slow(tmp_path / "log.jsonl", key=log_key("k"), block_tokens=16, clock=clock)
    writer(made())
    assert entered.wait(10)
    for _ in range(5000):
        writer(made())
    go_on.set()
    writer.close()
    rows = lines(writer.path)
    assert len(rows) == 1 + 4096
    assert writer.num_dropped == sum(row.get("dropped", 0) for row in rows) == 5000 - 4096


def test_warming_is_not_logged_and_nothing_is_after_the_end(log: Callable[..., RequestLog]) -> None:
    writer = log()
    writer(made(is_warming=True))
    writer(made())
    writer.close()
    writer(made())
    writer.close()
    assert len(lines(writer.path)) == 1


def test_a_file_that_cannot_be_written_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="cannot write the request log"):
        ostinato.load(folder, trace=tmp_path)


def test_messages_come_back_as_they_were(log: Callable[..., RequestLog]) -> None:
    writer = log(with_content=True)
    tools = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    talk = Conversation((Message("user", "hi", reasoning="hm"), Message("assistant", "")), tools)
    writer(made(talk))  # type: ignore[arg-type]
    assert writer.flush(10)
    (row,) = lines(writer.path)
    assert row["request"] == {
        "messages": [
            {"role": "user", "content": "hi", "reasoning": "hm"},
            {"role": "assistant", "content": ""},
        ],
        "tools": list(tools),
    }
