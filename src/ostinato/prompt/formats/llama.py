"""Llama 2, and Llama 3 without and with tools."""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import TemplateError
from ...types import Conversation, Segment
from .common import (
    Format,
    arguments_json,
    as_json,
    check_alternation,
    marker,
    native_role,
    refuse_tools,
    split_system,
    text,
)

_TOOLS_BEFORE = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments "
    "that best answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)


def write_llama2(conversation: Conversation, add_generation_prompt: bool) -> Iterator[Segment]:
    """``<s>[INST] user [/INST] assistant </s>``; the system text stands inside the first user turn.

    The end of an instruction is the generation prompt.
    """
    refuse_tools(conversation, "Llama 2")
    system, messages = split_system(conversation)
    check_alternation(messages, "Llama 2")
    for place, (index, message) in enumerate(messages):
        content = message.content
        if place == 0 and system is not None:
            content = f"<<SYS>>\n{system}\n<</SYS>>\n\n{content}"
        if message.role == "user":
            yield marker("<s>", index)
            yield text(f"[INST] {content.strip()} [/INST]", index)
        else:
            yield text(f" {content.strip()} ", index)
            yield marker("</s>", index)


def _header(role: str, index: int | None = None) -> Iterator[Segment]:
    yield marker("<|start_header_id|>", index)
    yield text(role, index)
    yield marker("<|end_header_id|>", index)


def _message(role: str, content: str, index: int | None = None) -> Iterator[Segment]:
    yield from _header(role, index)
    yield text(f"\n\n{content}", index)
    yield marker("<|eot_id|>", index)


def _prompt() -> Iterator[Segment]:
    yield from _header("assistant")
    yield text("\n\n")


def write_llama3(conversation: Conversation, add_generation_prompt: bool) -> Iterator[Segment]:
    """``<|start_header_id|>role<|end_header_id|>⏎⏎content<|eot_id|>``, contents trimmed."""
    refuse_tools(conversation, "Llama 3")
    yield marker("<|begin_of_text|>")
    for index, message in enumerate(conversation.messages):
        yield from _message(native_role(message), message.content.strip(), index)
    if add_generation_prompt:
        yield from _prompt()


def write_llama31(conversation: Conversation, add_generation_prompt: bool, *, date: str) -> Iterator[Segment]:
    """Llama 3.1 to 3.3: a system message always, tools in the first user turn, one call a message.

    ``date`` is what the system message says of today: fixed, so that it does not change the prompt's
    beginning from day to day.
    """
    system, messages = split_system(conversation)
    yield marker("<|begin_of_text|>")
    ipython = "Environment: ipython\n" if conversation.tools else ""
    about = f"{ipython}Cutting Knowledge Date: December 2023\nToday Date: {date}\n\n"
    yield from _message("system", about + (system or "").strip(), None if system is None else 0)
    if conversation.tools:
        if not messages:
            raise TemplateError("the Llama 3.1 format needs a user message to put the tools into")
        index, message = messages.pop(0)
        tools = "".join(as_json(tool, indent=4) + "\n\n" for tool in conversation.tools)
        yield from _message("user", _TOOLS_BEFORE + tools + message.content.strip(), index)
    for index, message in messages:
        if message.role == "tool":
            yield from _message("ipython", as_json(message.content), index)
        elif message.tool_calls:
            if len(message.tool_calls) > 1:
                raise TemplateError(
                    f"messages[{index}] makes several calls: the Llama 3.1 format has room for one",
                    param=f"messages[{index}]",
                )
            (call,) = message.tool_calls
            content = f'{{"name": "{call.name}", "parameters": {arguments_json(call)}}}'
            yield from _message("assistant", content, index)
        else:
            yield from _message(native_role(message), message.content.strip(), index)
    if add_generation_prompt:
        yield from _prompt()


FORMATS = (
    Format("llama2", 1, write_llama2, "https://huggingface.co/blog/llama2#how-to-prompt-llama-2"),
    Format(
        "llama3",
        1,
        write_llama3,
        "https://www.llama.com/docs/model-cards-and-prompt-formats/meta-llama-3/",
    ),
    Format(
        "llama3.1",
        1,
        write_llama31,
        "https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/",
        {"date": "26 Jul 2024"},
    ),
)
