"""Token for token what transformers makes of a conversation with the model's own template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import TemplateError
from ostinato.ports import SystemClock
from ostinato.prompt.conversation import conversation_from_dicts
from ostinato.prompt.template import JinjaTemplate, chatml, template_for
from ostinato.prompt.tokens import HFTokenizer

from .jinja_sources import PAIRS
from .talk import alternating, free, with_tools
from .vocabularies import NONCE

DATE = {"date_string": "30 Nov 2026"}


class Pair:
    """Our tokenizer and template, and transformers' for the same folder."""

    def __init__(self, folder: Path, reference: Any) -> None:
        self.tokenizer = HFTokenizer.from_folder(folder, nonce=NONCE)
        assert self.tokenizer.chat_template is not None
        self.template = JinjaTemplate(
            self.tokenizer.chat_template,
            special_tokens=self.tokenizer.special_tokens,
            nonce=NONCE,
            clock=SystemClock(),
            named_tokens=self.tokenizer.named_tokens,
            variables=DATE,
        )
        self.reference = reference

    def ours(self, messages: list[Any], tools: list[Any] | None = None, *, prompt: bool = True) -> list[int]:
        conversation = conversation_from_dicts(messages, tools)
        rendered = self.template.render(conversation, add_generation_prompt=prompt)
        return self.tokenizer.encode_rendered(rendered).tolist()

    def theirs(
        self, messages: list[Any], tools: list[Any] | None = None, *, prompt: bool = True
    ) -> list[int]:
        encoded = self.reference.apply_chat_template(
            messages, tools=tools, add_generation_prompt=prompt, return_dict=True, **DATE
        )
        ids: list[int] = encoded["input_ids"]
        return ids


@pytest.fixture(scope="module")
def pairs(model_folders: Callable[[str], Path], references: Callable[[str], Any]) -> dict[str, Pair]:
    return {name: Pair(model_folders(name), references(name)) for name in PAIRS}


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_alternating_turns(pairs: dict[str, Pair], name: str, data: st.DataObject) -> None:
    messages = data.draw(alternating(system=name != "gemma"))
    prompt = data.draw(st.booleans())
    assert pairs[name].ours(messages, prompt=prompt) == pairs[name].theirs(messages, prompt=prompt)


@pytest.mark.parametrize("name", ["llama3", "llama31", "qwen", "phi3", "vicuna"])
@settings(max_examples=25, deadline=None)
@given(free())
def test_roles_in_any_order(pairs: dict[str, Pair], name: str, messages: list[Any]) -> None:
    assert pairs[name].ours(messages) == pairs[name].theirs(messages)


@pytest.mark.parametrize("name", ["llama31", "mistral", "qwen"])
@settings(max_examples=25, deadline=None)
@given(with_tools())
def test_tools_and_calls(pairs: dict[str, Pair], name: str, talk: tuple[list[Any], list[Any]]) -> None:
    messages, tools = talk
    pair = pairs[name]
    expected = messages
    if name != "qwen":  # whose template takes the arguments as text, too
        expected = [
            {**message, "tool_calls": [_with_parsed_arguments(call) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in messages
        ]
    assert pair.ours(messages, tools) == pair.theirs(expected, tools)


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


@pytest.mark.parametrize("reasoning", ["Let me think.", "line\n\nline\n"])
def test_reasoning_is_kept_and_dropped_as_the_template_says(pairs: dict[str, Pair], reasoning: str) -> None:
    calling = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    answer = {"role": "assistant", "reasoning_content": reasoning, "content": "Yes."}
    done = [{"role": "user", "content": "Is it?"}, answer, {"role": "user", "content": "Sure?"}]
    underway = [
        {"role": "user", "content": "Is it?"},
        {**answer, "tool_calls": [calling]},
        {"role": "tool", "tool_call_id": "call00000", "content": "42"},
    ]
    qwen = pairs["qwen"]
    for messages in (done, underway):
        assert qwen.ours(messages) == qwen.theirs(messages)
    assert reasoning not in qwen.tokenizer.decode(qwen.ours(done), skip_special_tokens=False)
    assert reasoning.strip("\n") in qwen.tokenizer.decode(qwen.ours(underway), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "messages", "says"),
    [
        ("gemma", [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "System role not"),
        ("gemma", [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}], "must alternate"),
        ("mistral", [{"role": "assistant", "content": "x"}], "must alternate"),
    ],
)
def test_what_the_template_refuses(pairs: dict[str, Pair], name: str, messages: list[Any], says: str) -> None:
    with pytest.raises(TemplateError, match=says):
        pairs[name].ours(messages)


def test_reasoning_inside_the_content_is_cut_out_as_the_template_says(pairs: dict[str, Pair]) -> None:
    messages = [
        {"role": "user", "content": "a < b > c?"},
        {"role": "assistant", "content": "<think>\nhm <|\n</think>\n\nYes, a < b."},
        {"role": "user", "content": "Sure?"},
    ]
    assert pairs["qwen"].ours(messages) == pairs["qwen"].theirs(messages)


# ---------------------------------------------------------------- the default model


@pytest.fixture(scope="module")
def default_pair(default_model_path: Path) -> Pair:
    from transformers import AutoTokenizer

    return Pair(default_model_path, AutoTokenizer.from_pretrained(default_model_path))


@pytest.mark.model
@settings(max_examples=60, deadline=None)
@given(messages=free(), prompt=st.booleans())
def test_default_model(default_pair: Pair, messages: list[Any], prompt: bool) -> None:
    expected = default_pair.theirs(messages, prompt=prompt)
    assert default_pair.ours(messages, prompt=prompt) == expected
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    rendered = chatml(default_system=system).render(
        conversation_from_dicts(messages), add_generation_prompt=prompt
    )
    assert default_pair.tokenizer.encode_rendered(rendered).tolist() == expected


@pytest.mark.model
def test_default_models_own_template_is_chosen(default_pair: Pair) -> None:
    template = template_for(default_pair.tokenizer, clock=SystemClock(), nonce=NONCE)
    assert template is not None
    messages = [{"role": "user", "content": "Hello"}]
    rendered = template.render(conversation_from_dicts(messages))
    assert default_pair.tokenizer.encode_rendered(rendered).tolist() == default_pair.theirs(messages)
    assert rendered.text.endswith("<|im_start|>assistant\n")
    assert [segment.text for segment in rendered.segments if segment.is_marker] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]
