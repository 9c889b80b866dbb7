"""What is recorded of a request: where matching stopped and why, its parts, what it is."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ostinato.events import RequestFinished, RequestServed, reuse_of
from ostinato.records import MAX_SEGMENTS, RecordMaker, SeenPrompts, log_key, pattern_of, segments_of
from ostinato.types import Conversation, GenerationRequest, Message, Served, ToolCall, Usage

KEY = log_key("k")
MARK = 3


def finished(
    tokens: list[int], cached: int, *, ttft_s: float = 0.1, output: int = 2, **usage: Any
) -> RequestFinished:
    used = Usage(len(tokens), cached, len(tokens) - cached, output, ttft_s=ttft_s, total_s=ttft_s, **usage)
    return RequestFinished(
        "stop", used, GenerationRequest("x", request_id="r"), np.array(tokens, np.int32), "s"
    )


def why(maker: RecordMaker, tokens: list[int], cached: int, at_s: float, **more: Any) -> str:
    record = maker.make(finished(tokens, cached, **more), at_s)
    assert record is not None
    return record.stop.reason


def test_why_a_look_up_stopped() -> None:
    maker = RecordMaker(KEY, 4)
    first = list(range(100, 116))
    assert why(maker, first, 0, 1.0) == "unseen"
    assert why(maker, first, 15, 2.0) == "whole"
    assert why(maker, [*first, *range(8)], 16, 3.0) == "end"
    assert why(maker, [*first[:8], *range(50, 58)], 8, 4.0) == "parts"
    assert why(maker, [*first, *range(60, 68)], 4, 5.0) == "gone"
    assert why(maker, list(range(900, 916)), 8, 6.0) == "unknown", "found, and never asked in these records"


def test_what_was_still_being_computed_is_pending() -> None:
    maker = RecordMaker(KEY, 4)
    tokens = list(range(16))
    assert why(maker, tokens, 0, 10.0, ttft_s=5.0) == "unseen"
    record = maker.make(finished([*tokens, 7, 7, 7, 7], 0), 12.0)
    assert record is not None
    assert record.stop.reason == "pending"
    assert record.stop.age_s == -3.0
    assert record.stop.num_known_tokens == 16
    assert why(maker, [*tokens, 8, 8, 8, 8], 0, 16.0) == "gone"


def test_a_prompt_that_got_no_token_was_not_computed() -> None:
    maker = RecordMaker(KEY, 4)
    assert why(maker, list(range(16)), 0, 1.0, output=0) == "unseen"
    assert why(maker, list(range(16)), 0, 2.0) == "unseen"


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12), st.integers(2, 9))
def test_what_is_remembered_is_bounded_and_beginnings_go_last(prompts: list[list[int]], most: int) -> None:
    seen = SeenPrompts(most)
    for time, prompt in enumerate(prompts):
        ids = [hash((n, *prompt[: n + 1])) for n in range(len(prompt))]
        seen.add(ids, float(time), is_last_full=True)
        assert len(seen._blocks) <= most
        stop = seen.stop_of(ids, 4 * len(ids), 0, 4, time + 1.0)
        assert stop.num_known_tokens == 4 * min(len(ids), most), "what went was somebody's beginning"


def test_parts_are_cut_alike_wherever_they_stand() -> None:
    body = [MARK, 10, 11, 12, 13, MARK, 9]
    marks = np.array([MARK], np.int32)
    one = segments_of(KEY, "s", np.array([MARK, 4, 5, 6, *body, *body, MARK, 5, 6, 7], np.int32), marks)
    assert [part.num_tokens for part in one] == [4, 7, 7, 4]
    assert one[1].digest == one[2].digest
    alone = np.array([*body, MARK, 8, 8, 8, 8], np.int32)
    assert segments_of(KEY, "s", alone, marks)[0] == one[1]
    assert segments_of(KEY, "t", alone, marks)[0].digest != one[1].digest
    many = segments_of(KEY, "s", np.array([MARK, 5, 6, 7] * 2000, np.int32), marks)
    assert len(many) == MAX_SEGMENTS
    assert sum(part.num_tokens for part in many) == 8000


def test_layers_and_kinds() -> None:
    assert reuse_of(Usage(100, 60, loaded_tokens=20)) == {"arena": 40, "shared": 20}
    assert reuse_of(Usage(100, 100, served=Served("joined"))) == {"exact": 100}
    assert reuse_of(Usage(100, 100, served=Served("semantic"))) == {"semantic": 100}
    assert reuse_of(Usage(100, 0)) == {}

    def of(*messages: Message, **more: Any) -> str:
        return pattern_of(GenerationRequest(Conversation(messages, **more)))

    user, answer = Message("user", "hi"), Message("assistant", "yes")
    assert pattern_of(GenerationRequest("once")) == "completion"
    assert of(user) == of(Message("system", "be"), user) == "one_shot"
    assert of(user, answer, user) == "chat"
    assert of(user, tools=({"type": "function"},)) == "agent"
    assert of(user, Message("assistant", "", tool_calls=(ToolCall("1", "f", "{}"),))) == "agent"
    assert of(Message("user", "<document>a</document>\n<document>b</document>\nWhy?")) == "rag"
    assert of(Message("user", "[1] first\n[2] second\nWhy?")) == "rag"


def test_a_kept_answer_is_recorded_without_its_prompt() -> None:
    usage = Usage(30, 30, 0, 5, served=Served("exact", 2.0, "e"))
    maker = RecordMaker(KEY, 4)
    record = maker.make(RequestServed("stop", usage, GenerationRequest("x", request_id="r"), "s"), 1.0)
    assert record is not None
    assert (record.block_ids, record.segments, record.stop.reason) == ((), (), "whole")
