"""Tool calls in answers, through the library and over the wire, from a model that makes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

import ostinato
from doors.scripted import save_scripted_model
from doors.serving import serving

CHATML = ["<|im_end|>", "<|im_start|>"]
MISTRAL = ["</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
MISTRAL += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
LLAMA = ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"]
HARMONY = ["<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"]

OPEN, CLOSE = ["Let me", " look.", "\n<tool", '_call>\n{"name": "look", "arg'], ["}\n</to", "ol_call>"]
TAGGED = [*OPEN, 'uments": {"place": "Bonn"}', *CLOSE]
BROKEN = [*OPEN, 'uments": {"place": }', *CLOSE]
# Other tokens: one stands in a script once.
TWICE = [*TAGGED, "\n<tool_call>\n", '{"name": "look", "arguments": {"place": "Köln"}}', "\n</tool_call>"]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        },
    }
]
TALK: list[Any] = [{"role": "user", "content": "What is to be seen in Bonn?"}]


@contextmanager
def talking(
    folder: Path, template: str, after: str, script: list[str], special: list[str]
) -> Iterator[ostinato.Engine]:
    save_scripted_model(folder, after=after, script=script, special=special)
    with ostinato.load(folder, template=template, kv_cache=16 << 20) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ostinato.Engine]:
    folder = tmp_path_factory.mktemp("qwen") / "qwen"
    with talking(folder, "qwen2.5", "\n", TAGGED, CHATML) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ostinato.Engine]:
    folder = tmp_path_factory.mktemp("twice") / "twice"
    with talking(folder, "qwen2.5", "\n", TWICE, CHATML) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def client(engine: ostinato.Engine) -> Iterator[openai.OpenAI]:
    with serving(engine) as connected:
        yield connected


def model_of(client: openai.OpenAI) -> str:
    return next(iter(client.models.list())).id


# ---------------------------------------------------------------- library


def test_calls_are_taken_out_of_the_text_and_come_back_in_the_same_tokens(engine: ostinato.Engine) -> None:
    first = engine.chat(TALK, tools=TOOLS, salt="library")
    assert first.finish_reason == "tool_calls"
    assert first.text == "Let me look."
    (call,) = first.tool_calls
    assert (call.name, call.arguments) == ("look", '{"place": "Bonn"}')
    result = ostinato.Message("tool", "A river.", tool_call_id=call.id)
    second = engine.chat([*TALK, first.message, result], tools=TOOLS, salt="library")
    # Everything the first turn left behind is found again: the history has the tokens that were generated.
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.tool_calls[0].id != call.id
    again = engine.chat(TALK, tools=TOOLS, salt="library")
    assert again.tool_calls == first.tool_calls  # ids included


def test_several_calls(twice: ostinato.Engine) -> None:
    reply = twice.chat(TALK, tools=TOOLS)
    assert [(call.name, json.loads(call.arguments)["place"]) for call in reply.tool_calls] == [
        ("look", "Bonn"),
        ("look", "Köln"),
    ]
    assert len({call.id for call in reply.tool_calls}) == 2


def test_without_tools_the_text_is_the_text(engine: ostinato.Engine) -> None:
    reply = engine.chat(TALK)
    assert reply.text == "".join(TAGGED)
    assert (reply.tool_calls, reply.finish_reason) == ((), "stop")


def test_a_stop_string_or_the_limit_leaves_no_half_call(engine: ostinato.Engine) -> None:
    cut = engine.chat(TALK, tools=TOOLS, max_tokens=5)
    assert (cut.text, cut.tool_calls, cut.finish_reason) == ("".join(TAGGED[:5]), (), "length")
    stopped = engine.chat(TALK, tools=TOOLS, stop="Bonn")
    assert stopped.text == "".join(TAGGED).partition("Bonn")[0]
    assert (stopped.tool_calls, stopped.finish_reason) == ((), "stop")


# ---------------------------------------------------------------- over the wire


def test_the_client_gets_calls_and_may_send_them_back(client: openai.OpenAI) -> None:
    model = model_of(client)
    extra = {"cache_salt": "wire"}
    first = client.chat.completions.create(model=model, messages=TALK, tools=TOOLS, extra_body=extra)
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    calls = choice.message.tool_calls
    assert calls is not None
    assert [call.type for call in calls] == ["function"]
    history = [*TALK, choice.message.model_dump(exclude_none=True)]
    history += [{"role": "tool", "content": "A river.", "tool_call_id": call.id} for call in calls]
    second = client.chat.completions.create(model=model, messages=history, tools=TOOLS, extra_body=extra)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= first.usage.total_tokens - 1


def test_a_stream_gives_calls_as_the_client_collects_them(client: openai.OpenAI) -> None:
    model = model_of(client)
    whole = client.chat.completions.create(model=model, messages=TALK, tools=TOOLS)
    with client.chat.completions.stream(model=model, messages=TALK, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.content == whole.choices[0].message.content
    streamed, given = final.choices[0].message.tool_calls, whole.choices[0].message.tool_calls
    assert streamed is not None
    assert given is not None
    assert [(c.id, c.function.name, c.function.arguments) for c in streamed] == [
        (c.id, c.function.name, c.function.arguments) for c in given if c.type == "function"
    ]


def test_one_call_at_a_time_where_it_is_asked_for(twice: ostinato.Engine) -> None:
    with serving(twice) as client:
        options: dict[str, Any] = {"model": model_of(client), "messages": TALK, "tools": TOOLS}
        for expected, more in ((2, {}), (1, {"parallel_tool_calls": False})):
            reply = client.chat.completions.create(**options, **more)
            assert len(reply.choices[0].message.tool_calls or ()) == expected
            stream = client.chat.completions.create(**options, **more, stream=True)
            deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
            assert [delta.index for delta in deltas] == list(range(expected))


def test_with_tool_choice_none_nothing_is_read(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=model_of(client), messages=TALK, tools=TOOLS, tool_choice="none"
    )
    assert reply.choices[0].message.content == "".join(TAGGED)
    assert reply.choices[0].message.tool_calls is None


def test_what_is_no_call_stays_text(tmp_path: Path) -> None:
    with talking(tmp_path / "broken", "qwen2.5", "\n", BROKEN, CHATML) as engine, serving(engine) as client:
        reply = client.chat.completions.create(model=model_of(client), messages=TALK, tools=TOOLS)
        assert reply.choices[0].message.content == "".join(BROKEN)
        assert reply.choices[0].message.tool_calls is None
        assert reply.choices[0].finish_reason == "stop"


# ---------------------------------------------------------------- other families


def test_mistral(tmp_path: Path) -> None:
    script = [
        "[TOOL_CALLS]",
        '[{"name": "look", "arg',
        'uments": {"place": "Bonn"}',
        ', "id": "abc123XYZ"}',
        "]",
    ]
    with talking(tmp_path / "mistral", "mistral-v3-tekken", "[/INST]", script, MISTRAL) as engine:
        first = engine.chat(TALK, tools=TOOLS)
        (call,) = first.tool_calls
        assert (call.id, call.name, call.arguments) == ("abc123XYZ", "look", '{"place": "Bonn"}')
        assert (first.text, first.finish_reason) == ("", "tool_calls")
        result = ostinato.Message("tool", '"A river."', tool_call_id=call.id)
        second = engine.chat([*TALK, first.message, result], tools=TOOLS, max_tokens=1)
        assert second.usage.cached_tokens >= first.usage.prompt_tokens + first.usage.completion_tokens - 1


def test_llama(tmp_path: Path) -> None:
    script = ['{"name": "look", ', '"parameters": {"place": ', '"Bonn"}}']
    with talking(tmp_path / "llama", "llama3.1", "\n", ["\n\n", *script], LLAMA) as engine:
        first = engine.chat(TALK, tools=TOOLS)
        (call,) = first.tool_calls
        assert (call.name, call.arguments) == ("look", '{"place": "Bonn"}')
        other = [{"type": "function", "function": {"name": "other", "parameters": {}}}]
        unknown = engine.chat(TALK, tools=other)  # JSON that is the answer, and no call of what is offered
        assert (unknown.text.strip(), unknown.tool_calls) == ("".join(script), ())


def test_harmony(tmp_path: Path) -> None:
    script = ["<|channel|>", "analysis", "<|message|>", "I shall look.", "<|call|>"]
    # A token stands in a script once: the rest of the format is tested without a model.
    with talking(tmp_path / "harmony", "harmony", "t", script, HARMONY) as engine, serving(engine) as client:
        reply = engine.chat(TALK)
        assert (reply.text, reply.choices[0].reasoning) == ("", "I shall look.")
        answer: Any = client.chat.completions.create(model=model_of(client), messages=TALK)
        assert answer.choices[0].message.reasoning_content == "I shall look."
        stream = client.chat.completions.create(model=model_of(client), messages=TALK, stream=True)
        thoughts = [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in stream]
        assert "".join(thought for thought in thoughts if thought) == "I shall look."
