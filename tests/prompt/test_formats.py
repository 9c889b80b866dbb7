"""Chat formats as code: the documented text to the character, and transformers' tokens where it has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import TemplateError
from ostinato.ports import SystemClock
from ostinato.prompt.check import check_template
from ostinato.prompt.conversation import conversation_from_dicts
from ostinato.prompt.formats import FORMATS
from ostinato.prompt.template import JinjaTemplate, chatml, named_template
from ostinato.prompt.tokens import HFTokenizer
from ostinato.types import Conversation, Message, ToolCall

from .jinja_sources import MISTRAL
from .talk import alternating, conversation, with_tools
from .test_template import TOOL
from .vocabularies import NONCE

Tokenizers = Callable[[str], HFTokenizer]

TALK = (("system", "Be kind."), ("user", " Hi "), ("assistant", "Yes? "), ("user", "Why?"))
BARE = TALK[1:]

# Format: (conversation, what it is with a generation prompt)
DOCUMENTED = {
    "chatml": (
        TALK,
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n"
        "<|im_start|>assistant\nYes? <|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "smollm2": (
        BARE[:1],
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen2.5": (
        BARE[:1],
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3": (
        TALK,
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n"
        "<|im_start|>assistant\nYes? <|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "phi4": (
        TALK,
        "<|im_start|>system<|im_sep|>Be kind.<|im_end|><|im_start|>user<|im_sep|> Hi <|im_end|>"
        "<|im_start|>assistant<|im_sep|>Yes? <|im_end|><|im_start|>user<|im_sep|>Why?<|im_end|>"
        "<|im_start|>assistant<|im_sep|>",
    ),
    "llama2": (
        TALK,
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\n Hi [/INST] Yes? </s><s>[INST] Why? [/INST]",
    ),
    "llama3": (
        TALK,
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llama3.1": (
        BARE[:1],
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral-v1": (TALK, "<s> [INST] Be kind.\n\n Hi  [/INST] Yes? </s> [INST] Why? [/INST]"),
    "mistral-v3": (TALK, "<s>[INST]  Hi [/INST] Yes?</s>[INST] Be kind.\n\nWhy?[/INST]"),
    "mistral-v3-tekken": (TALK, "<s>[INST] Hi [/INST]Yes? </s>[INST]Be kind.\n\nWhy?[/INST]"),
    "mistral-v7": (
        TALK,
        "<s>[SYSTEM_PROMPT] Be kind.[/SYSTEM_PROMPT][INST]  Hi [/INST] Yes? </s>[INST] Why?[/INST]",
    ),
    "mistral-v7-tekken": (
        TALK,
        "<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][INST] Hi [/INST]Yes? </s>[INST]Why?[/INST]",
    ),
    "gemma": (
        TALK,
        "<bos><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\nYes?<end_of_turn>\n"
        "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
    ),
    "phi3": (
        TALK,
        "<|system|>\nBe kind.<|end|>\n<|user|>\n Hi <|end|>\n<|assistant|>\nYes? <|end|>\n"
        "<|user|>\nWhy?<|end|>\n<|assistant|>\n",
    ),
    "deepseek-v3": (
        TALK,
        "<｜begin▁of▁sentence｜>Be kind.<｜User｜> Hi <｜Assistant｜>Yes? <｜end▁of▁sentence｜><｜User｜>Why?"
        "<｜Assistant｜>",
    ),
    "deepseek-r1": (
        (("user", "Hi"), ("assistant", "<think>\nhm\n</think>\n\nYes?"), ("user", "Why?")),
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>\n\nYes?<｜end▁of▁sentence｜><｜User｜>Why?"
        "<｜Assistant｜><think>\n",
    ),
    "command-r": (
        TALK,
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be kind.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Yes?<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Why?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "zephyr": (
        TALK,
        "<|system|>\nBe kind.</s>\n<|user|>\n Hi </s>\n<|assistant|>\nYes? </s>\n"
        "<|user|>\nWhy?</s>\n<|assistant|>\n",
    ),
    "vicuna": (
        BARE,
        "<s>A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions. "
        "USER:  Hi  ASSISTANT: Yes? </s>USER: Why? ASSISTANT:",
    ),
    "alpaca": (
        BARE[:1],
        "<s>Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n### Instruction:\n Hi \n\n### Response:",
    ),
    "plain": (TALK, "System: Be kind.\n\nUser:  Hi \n\nAssistant: Yes? \n\nUser: Why?\n\nAssistant:"),
    "harmony": (
        TALK,
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2025-06-28\n\nReasoning: medium\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe kind.\n\n<|end|>"
        "<|start|>user<|message|> Hi <|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes? <|end|><|start|>user<|message|>Why?<|end|>"
        "<|start|>assistant",
    ),
}  # fmt: skip


def test_every_format_is_here() -> None:
    assert DOCUMENTED.keys() == FORMATS.keys()
    assert all(chat_format.source for chat_format in FORMATS.values())


@pytest.mark.parametrize("name", FORMATS)
def test_documented_text(name: str) -> None:
    turns, expected = DOCUMENTED[name]
    template = named_template(name)
    rendered = template.render(conversation(*turns))
    assert rendered.text == expected
    without = template.render(conversation(*turns), add_generation_prompt=False).text
    assert expected.startswith(without) or name == "phi3"


@pytest.mark.parametrize("name", FORMATS)
def test_segments_say_where_they_come_from(name: str) -> None:
    rendered = named_template(name).render(conversation(*BARE))
    for index, (_, content) in enumerate(BARE):
        own = "".join(segment.text for segment in rendered.segments if segment.message_index == index)
        assert content.strip() in own


@pytest.mark.parametrize("name", FORMATS)
def test_a_longer_conversation_begins_with_the_shorter_one(name: str) -> None:
    """What makes prefix caching work. Two formats say otherwise, and their documentation says why."""
    template = named_template(name)
    shorter = template.render(conversation(*TALK[:2]), add_generation_prompt=False).text
    longer = template.render(conversation(*TALK), add_generation_prompt=False).text
    moves_system = name in ("mistral-v3", "mistral-v3-tekken")
    assert longer.startswith(shorter) != (moves_system or name == "phi3")


# Format, and the pair of tokenizer and template in ``jinja_sources`` that is its measure.
MEASURES = {
    "llama2": "llama2", "llama3": "llama3", "llama3.1": "llama31", "mistral-v3": "mistral", "qwen3": "qwen",
    "gemma": "gemma", "phi3": "phi3",
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURES)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_tokens_are_transformers(
    model_folders: Callable[[str], Path], references: Callable[[str], Any], name: str, data: st.DataObject
) -> None:
    messages = data.draw(alternating(system=name != "gemma"))
    prompt = data.draw(st.booleans())
    options = {"date": "30 Nov 2026"} if name == "llama3.1" else {}
    tools = None
    if name in ("llama3.1", "mistral-v3", "qwen3") and data.draw(st.booleans()):
        messages, tools = data.draw(with_tools())
    template = named_template(name, **options)
    rendered = template.render(conversation_from_dicts(messages, tools), add_generation_prompt=prompt)
    if name != "qwen3":
        messages = [_parsed(message) for message in messages]
    # Mistral's template takes every message for the last of the user's that says the same.
    contents = [message["content"] for message in messages if message["role"] == "user"]
    if name == "mistral-v3" and len(set(contents)) < len(contents):
        return
    expected = references(MEASURES[name]).apply_chat_template(
        messages, tools=tools, add_generation_prompt=prompt, date_string="30 Nov 2026"
    )["input_ids"]
    tokenizer = HFTokenizer.from_folder(model_folders(MEASURES[name]), nonce=NONCE)
    assert tokenizer.encode_rendered(rendered).tolist() == expected


def _parsed(message: dict[str, Any]) -> dict[str, Any]:
    import json

    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


CALL = ToolCall("call00001", "look", '{"a":  1}')
CALLING = Conversation(
    (
        Message("user", "Look!"),
        Message("assistant", tool_calls=(CALL,), reasoning="Hm."),
        Message("tool", "42", tool_call_id="call00001"),
    ),
    (TOOL,),
)
ANSWERED = Conversation(
    (*CALLING.messages, Message("assistant", "42 it is."), Message("user", "Thanks.")), CALLING.tools
)


@pytest.mark.parametrize(
    ("name", "has"),
    [
        (
            "qwen2.5",
            ['<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>', "<tool_response>\n42\n"],
        ),
        ("qwen3", ['<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"a":  1}}']),
        (
            "llama3.1",
            ["Environment: ipython", '{"name": "look", "parameters": {"a": 1}}', '\n\n"42"<|eot_id|>'],
        ),
        ("mistral-v3", ['[TOOL_CALLS] [{"name": "look", "arguments": {"a": 1}, "id": "call00001"}]</s>']),
        ("mistral-v3-tekken", ['[TOOL_RESULTS]{"content": 42, "call_id": "call00001"}[/TOOL_RESULTS]']),
        (
            "harmony",
            [
                "// Looks.\ntype look = () => any;",
                "analysis<|message|>Hm.<|end|><|start|>assistant to=functions.look<|channel|>commentary json"
                '<|message|>{"a": 1}<|call|><|start|>functions.look to=assistant<|channel|>commentary'
                '<|message|>"42"',
            ],
        ),
    ],
)
def test_tools(name: str, has: list[str]) -> None:
    text = named_template(name).render(CALLING).text
    for part in has:
        assert part in text
    assert "Hm." not in named_template(name).render(ANSWERED).text  # thoughts end with the turn


@pytest.mark.parametrize("name", FORMATS)
def test_formats_without_tools_say_so(name: str) -> None:
    knows = name in ("qwen2.5", "qwen3", "llama3.1", "mistral-v3", "mistral-v3-tekken", "harmony")
    if knows:
        return
    for talk in (CALLING, Conversation(CALLING.messages)):
        with pytest.raises(TemplateError, match="tools"):
            named_template(name).render(talk)


def test_typescript_of_schemas() -> None:
    schema = {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "What to say."},
            "kind": {"type": "string", "enum": ["a", "b"], "default": "a"},
            "count": {"type": "integer", "default": 3, "nullable": True},
            "parts": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}},
            "either": {"type": ["string", "null"]},
            "any": {},
            "list": {"type": "array", "nullable": True},
            "deep": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "object"}},
                     "required": ["y"]},
        },
        "required": ["text", "parts"],
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "say", "description": "Says.", "parameters": schema}}
    text = (
        named_template("harmony")
        .render(conversation_from_dicts([{"role": "user", "content": "x"}], [tool]))
        .text
    )
    assert (
        "// Says.\ntype say = (_: {\n// What to say.\ntext: string,\nkind?: \"a\" | \"b\", // default: a,\n"
        "count?: number, // default: 3,\nparts: boolean[][],\neither?: string | null,\nany?: any,\n"
        "list?: any[] | null,\ndeep?: {\nx?: number, y: object},\n}) => any;\n\n} // namespace functions"
    ) in text  # fmt: skip


@pytest.mark.parametrize(
    ("name", "talk", "says"),
    [
        ("gemma", conversation(("user", "a"), ("user", "b")), r"messages\[1\]: in the Gemma format"),
        ("llama2", conversation(("assistant", "a")), r"messages\[0\]: in the Llama 2 format"),
        ("vicuna", conversation(("user", "a"), ("system", "b")), r"messages\[1\]: in the Vicuna format"),
        ("llama3.1", Conversation((Message("system", "x"),), (TOOL,)), "needs a user message"),
        (
            "mistral-v3",
            Conversation(
                (Message("user", "x"), Message("assistant", tool_calls=(ToolCall("c", "f", "{}"),)))
            ),
            "a tool call's id has 9 characters",
        ),
        (
            "llama3.1",
            Conversation(
                (Message("user", "x"), Message("assistant", tool_calls=(CALL, ToolCall("d", "f", "{}"))))
            ),
            "makes several calls",
        ),
        (
            "harmony",
            Conversation(
                (Message("user", "x"), Message("assistant", tool_calls=(CALL, ToolCall("d", "f", "{}"))))
            ),
            "makes several calls",
        ),
        (
            "harmony",
            Conversation(
                (Message("user", "x"), Message("assistant", "y", tool_calls=(CALL,), reasoning="z"))
            ),
            "both text and reasoning",
        ),
    ],
)
def test_what_formats_cannot_say(name: str, talk: Conversation, says: str) -> None:
    with pytest.raises(TemplateError, match=says):
        named_template(name).render(talk)


# ---------------------------------------------------------------- does a template fit a tokenizer?


@pytest.mark.parametrize(
    ("kind", "name"),
    [("chatml", "chatml"), ("qwen", "qwen3"), ("llama3", "llama3"), ("llama2", "llama2"),
     ("mistral", "mistral-v3"), ("phi3", "phi3"), ("gemma", "gemma"), ("llama2", "mistral-v1")],
)  # fmt: skip
def test_templates_that_fit(tokenizers: Tokenizers, kind: str, name: str) -> None:
    report = check_template(named_template(name), tokenizers(kind))
    assert report.is_good, report.problems
    assert report.markers
    assert report.template == name


def test_the_first_marker_that_is_no_token_is_named(tokenizers: Tokenizers) -> None:
    report = check_template(named_template("llama3"), tokenizers("chatml"))
    assert not report.is_good
    assert "'<|begin_of_text|>', which is no token of this model" in report.problems[0]


def test_text_that_only_looks_like_a_marker_is_noted(tokenizers: Tokenizers) -> None:
    report = check_template(named_template("zephyr"), tokenizers("llama2"))
    assert report.notes
    assert "'<|user|>' looks like a special token" in " ".join(report.notes)
    missing = check_template(named_template("chatml"), tokenizers("llama2"))
    assert "'<|im_start|>', which is no token" in missing.problems[0]


def test_bos_is_there_and_once(tokenizers: Tokenizers) -> None:
    llama = tokenizers("llama3")

    def jinja(source: str) -> JinjaTemplate:
        return JinjaTemplate(
            source,
            special_tokens=llama.special_tokens,
            nonce=NONCE,
            clock=SystemClock(),
            named_tokens=llama.named_tokens,
        )

    body = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert check_template(jinja("{{ bos_token }}" + body), llama).is_good
    without = check_template(jinja(body), llama)
    assert "the template does not" in without.problems[0]
    twice = check_template(jinja("{{ bos_token }}{{ bos_token }}" + body), llama)
    assert "twice" in twice.problems[0]


def test_a_template_that_refuses_everything(tokenizers: Tokenizers) -> None:
    template = JinjaTemplate(
        "{{ raise_exception('no') }}", special_tokens=[], nonce=NONCE, clock=SystemClock()
    )
    report = check_template(template, tokenizers("chatml"))
    assert report.problems == ("it renders none of the sample conversations",)
    assert len(report.notes) == 3


def test_mistrals_own_template_fits(tokenizers: Tokenizers) -> None:
    mistral = tokenizers("mistral")
    template = JinjaTemplate(
        MISTRAL,
        special_tokens=mistral.special_tokens,
        nonce=NONCE,
        clock=SystemClock(),
        named_tokens=mistral.named_tokens,
    )
    assert check_template(template, mistral).is_good


@pytest.mark.model
def test_the_default_model(default_model_path: Path) -> None:
    tokenizer = HFTokenizer.from_folder(default_model_path, nonce=NONCE)
    for template in (chatml(), named_template("smollm2")):
        assert check_template(template, tokenizer).is_good
