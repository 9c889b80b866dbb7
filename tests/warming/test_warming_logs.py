"""Request logs of every form that is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from ostinato.errors import ParameterError, TraceError
from ostinato.types import Conversation, GenerationRequest, TokenArray
from ostinato.warming.logs import PromptLog, read_log

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def encode(request: GenerationRequest) -> TokenArray:
    """A token for every character of all that was asked."""
    prompt = request.prompt
    if isinstance(prompt, Conversation):
        prompt = "".join(f"{m.role}:{m.content};" for m in prompt.messages)
    if isinstance(prompt, str):
        if "too long" in prompt:
            raise ParameterError("too long", param="prompt")
        return np.array([ord(char) for char in prompt], np.int32)
    return np.array(prompt, np.int32)


def read(tmp_path: Path, *rows: Any) -> PromptLog:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else orjson.dumps(row) for row in rows))
    return read_log(path, encode)


def as_text(log: PromptLog) -> list[str]:
    return ["".join(map(chr, each.tokens.tolist())) for each in log.prompts]


CHAT = "system:Be brief.;user:Hi;"


@pytest.mark.parametrize(
    "row",
    [
        {"model": "m", "messages": MESSAGES, "temperature": 0.3, "unknown": 1},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES}},
        {"v": 1, "hash_ids": [1], "request": {"messages": MESSAGES}, "salt": ""},
        {"messages": [MESSAGES[0], {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    ],
)
def test_a_chat_is_read_in_every_wrapping(tmp_path: Path, row: Any) -> None:
    log = read(tmp_path, row)
    assert as_text(log) == [CHAT]
    assert (log.prompts[0].salt, log.prompts[0].cache_salt) == ("", "")


def test_raw_prompts_and_sessions_are_read(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        {"prompt": "abc", "timestamp": 3},
        {"prompt": [100, 101], "timestamp": 1},
        {"prompt": ["ab", "cd"], "timestamp": 2},
        {"timestamp": 1_760_428_436_442_742, "input": "hello", "output": "x", "session_id": "s"},
        {"timestamp": 1_760_428_436_443, "prompt": "ms"},
        {"timestamp": 1_760_428_436, "prompt": "seconds"},
    )
    assert as_text(log) == ["de", "ab", "cd", "abc", "seconds", "user:hello;", "ms"]
    assert log.prompts[-1].time_s == pytest.approx(1_760_428_436.443)


def test_salts_keep_tenants_apart_and_say_whether_a_client_can_get_there(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        {"prompt": "abc", "cache_salt": "mine"},
        {"v": 1, "request": {"prompt": "abc"}, "salt": "b3:derived"},
        {"prompt": "abc"},
    )
    mine, derived, nobody = log.prompts
    assert mine.cache_salt == "mine"
    assert mine.salt not in ("", "mine")  # as the server derives it
    assert (derived.salt, derived.cache_salt) == ("b3:derived", None)
    assert (nobody.salt, nobody.cache_salt) == ("", "")


def test_lines_that_cannot_be_used_are_counted_by_reason(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        b"{broken",
        {"v": 1, "hash_ids": [1, 2], "timestamp": 0},
        {"prompt": "this is too long"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"something": "else"},
        b"[]",
        {"prompt": "abc"},
        b'{"v":1,"cut',
    )
    assert as_text(log) == ["abc"]
    assert log.num_unusable == 6
    assert "line 1: not JSON" in log.reason


def test_a_log_of_nothing_says_why(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="--trace-content"):
        read(tmp_path, {"v": 1, "hash_ids": [1, 2], "timestamp": 0})
    with pytest.raises(TraceError, match="cannot read the log"):
        read_log(tmp_path / "nowhere", encode)


def test_a_folder_is_read_whole(tmp_path: Path) -> None:
    for name in ("b/x.jsonl", "a.jsonl", "note.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(orjson.dumps({"prompt": name}))
    assert as_text(read_log(tmp_path, encode)) == ["a.jsonl", "b/x.jsonl"]
