"""The finer points of the two APIs' shapes: how requests become generations, and answers JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ostinato.errors import ParameterError
from ostinato.server.chat import ChatRequest, ChatWriter
from ostinato.server.completions import CompletionRequest, CompletionWriter
from ostinato.server.fields import decode, validate
from ostinato.server.wire import Frame, TokenText
from ostinato.types import Chunk, Conversation, GenerationRequest, Message, TokenLogprob, ToolCall, Usage
from server.conftest import Running
from server.echo_engine import ByteTokenizer
from server.wire import chat_body

FRAME = Frame("id-1", 7, "echo", "fp_1")


def chat(**fields: Any) -> GenerationRequest:
    body = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]} | fields
    request = validate(ChatRequest, decode(json.dumps(body).encode()))
    request.check(model_name="echo", max_choices=8, max_model_len=100)
    return request.generation(request_id="r", key_salt="")


def messages(*given: dict[str, Any]) -> tuple[Message, ...]:
    prompt = chat(messages=list(given)).prompt
    assert isinstance(prompt, Conversation)
    return prompt.messages


def test_parameters_reach_the_engine_under_its_names() -> None:
    params = chat(
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=2,
        seed=-5,
        stop=["a", "b"],
        stop_token_ids=[3],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=4,
        logit_bias={"5": -100, "0": 1.5},
    ).params
    assert params.max_tokens == 9
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, -1, 2)
    assert (params.seed, params.stop, params.stop_token_ids, params.ignore_eos) == (
        -5,
        ("a", "b"),
        (3,),
        True,
    )
    assert params.logprobs == 4
    assert params.logit_bias == {5: -100.0, 0: 1.5}


def test_left_out_or_null_is_the_default() -> None:
    assert chat() == chat(temperature=None, top_p=None, stop=None, n=None, logprobs=None, seed=None)
    assert chat().params.temperature == 1.0
    assert chat().params.max_tokens is None
    assert chat(stop="x").params.stop == ("x",)
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=False).params.logprobs is None


def test_top_p_of_nothing_is_greedy() -> None:
    params = chat(top_p=0, temperature=1.5).params
    assert (params.temperature, params.top_p) == (0.0, 1.0)


def test_messages_of_every_kind() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert messages(
        {"role": "system", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "hi", "name": "anna"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "assistant", "content": "done", "reasoning_content": "hm", "audio": None},
    ) == (
        Message("system", "one\ntwo"),
        Message("user", "hi", name="anna"),
        Message("assistant", "", tool_calls=(ToolCall("c1", "f", '{"a": 1}'),)),
        Message("tool", "", tool_call_id="c1"),
        Message("assistant", "done", reasoning="hm"),
    )


def test_tools_reach_the_template_in_one_order_of_keys() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    one = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    two = {
        "function": {"strict": False, "parameters": schema, "description": "d", "name": "f"},
        "type": "function",
    }
    first, second = chat(tools=[one]).prompt, chat(tools=[two]).prompt
    assert isinstance(first, Conversation)
    assert first == second
    assert json.dumps(first.tools) == json.dumps([one])
    assert chat(tools=[one], tool_choice="none").prompt == chat().prompt


def test_prompts_of_every_kind() -> None:
    def prompts(prompt: Any, **more: Any) -> list[Any]:
        body = {"model": "echo", "prompt": prompt} | more
        request = validate(CompletionRequest, body)
        request.check(model_name="echo", max_choices=8, max_model_len=100)
        made = request.generations(request_id="r", key_salt="")
        assert [made.params.max_tokens for made in made] == [16] * len(made)
        assert len({made.request_id for made in made}) == len(made)
        return [made.prompt for made in made]

    assert prompts("a") == ["a"]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [(1, 2)]
    assert prompts([[1, 2], [3]]) == [(1, 2), (3,)]
    assert prompts("a", best_of=2, n=2, suffix="") == ["a"]
    with pytest.raises(ParameterError):
        prompts(["a"] * 5, n=2)


def test_tokens_that_are_part_of_a_character() -> None:
    euro = [TokenLogprob(byte, -0.5, ((byte, -0.5),)) for byte in "a€b".encode()]
    tokens = TokenText(ByteTokenizer())
    chunk = Chunk(0, "a€b", logprobs=tuple(euro), finish_reason="stop", usage=Usage())
    legacy = CompletionWriter(
        FRAME, tokens, num_choices=1, logprobs=1, echo=lambda index: "", include_usage=False
    )
    legacy.collect(0, chunk)
    logprobs = legacy.whole([Usage()])["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2]
    assert logprobs["top_logprobs"][1] == {"bytes:\\xe2": -0.5}
    modern = ChatWriter(FRAME, tokens, logprobs=True, include_usage=False)
    modern.collect(0, chunk)
    content = modern.whole([Usage()])["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "a€b"


def test_impossible_tokens_have_a_number_too() -> None:
    entry = TokenLogprob(65, -math.inf, ((66, math.nan), (67, -0.1)))
    writer = ChatWriter(FRAME, TokenText(ByteTokenizer()), logprobs=True, include_usage=False)
    writer.collect(0, Chunk(0, "A", logprobs=(entry,), finish_reason="length", usage=Usage()))
    (token,) = writer.whole([Usage()])["choices"][0]["logprobs"]["content"]
    assert token["logprob"] == -9999.0
    assert [top["logprob"] for top in token["top_logprobs"]] == [-9999.0, -0.1]


def test_the_first_and_last_events_of_a_choice() -> None:
    writer = ChatWriter(FRAME, TokenText(ByteTokenizer()), logprobs=False, include_usage=True)
    chunks = [Chunk(0, "", (1,)), Chunk(0, "a"), Chunk(0, "b", finish_reason="stop", stop_reason="END")]
    events = [event for chunk in chunks for event in writer.events(0, chunk)]
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert events[-1]["choices"][0]["stop_reason"] == "END"
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "stop"]
    assert all(event["usage"] is None for event in events)


def test_usage_and_timings_are_summed_over_prompts() -> None:
    writer = CompletionWriter(
        FRAME, TokenText(ByteTokenizer()), num_choices=1, logprobs=None, echo=lambda _: "", include_usage=True
    )
    last = writer.usage_event(
        [
            Usage(10, 4, 6, 3, ttft_s=0.2, queue_s=0.15, total_s=0.3),
            Usage(20, 5, 15, 4, ttft_s=0.1, queue_s=0.01, total_s=0.9),
        ]
    )
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 30,
        "completion_tokens": 7,
        "total_tokens": 37,
        "prompt_tokens_details": {"cached_tokens": 9, "cache_write_tokens": 21},
    }
    assert last["ostinato"] == {"ttft_ms": 100.0, "queue_ms": 10.0, "total_ms": 900.0}


def test_approximate_tokens_are_told_where_there_are_some() -> None:
    usages = [Usage(10, 8, approximate_tokens=6), Usage(10, 4), Usage(10, 8, approximate_tokens=3)]
    chat = ChatWriter(FRAME, TokenText(ByteTokenizer()), logprobs=False, include_usage=True)
    legacy = CompletionWriter(
        FRAME, TokenText(ByteTokenizer()), num_choices=1, logprobs=None, echo=lambda _: "", include_usage=True
    )
    for writer in (chat, legacy):
        assert writer.usage_event(usages)["ostinato"]["approximate_tokens"] == 9
        assert writer.whole(usages)["ostinato"]["approximate_tokens"] == 9
        assert "approximate_tokens" not in writer.whole(usages[1:2])["ostinato"]
        # A stream says so even where usage was not asked for.
        last = [Chunk(0, "a", finish_reason="stop", usage=usage) for usage in usages]
        assert [*writer.events(0, last[0])][-1]["ostinato"] == {"approximate_tokens": 6}
        assert "ostinato" not in [*writer.events(0, last[1])][-1]


def test_stop_reason_is_told(running: Running) -> None:
    reply = running.post("/v1/chat/completions", chat_body("say END now", stop=["END"])).json()
    assert reply["choices"][0]["message"]["content"] == "say "
    assert reply["choices"][0]["stop_reason"] == "END"
    reply = running.post("/v1/chat/completions", chat_body("abc", stop_token_ids=[ord("c")])).json()
    assert (reply["choices"][0]["message"]["content"], reply["choices"][0]["stop_reason"]) == ("ab", ord("c"))
