"""ChatML and what grew out of it: SmolLM, Yi, Qwen with tools and thinking, Phi-4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...types import Conversation, Segment
from .common import (
    Format,
    Numbered,
    arguments_json,
    as_json,
    marker,
    native_role,
    refuse_tools,
    split_system,
    text,
)

_TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, '
    '"arguments": <args-json-object>}\n</tool_call>'
)


def _message(role: str, content: str, index: int | None = None) -> Iterator[Segment]:
    yield marker("<|im_start|>", index)
    yield text(f"{role}\n{content}", index)
    yield marker("<|im_end|>", index)
    yield text("\n", index)


def _prompt(content: str = "") -> Iterator[Segment]:
    yield marker("<|im_start|>")
    yield text(f"assistant\n{content}")


def write_chatml(
    conversation: Conversation, add_generation_prompt: bool, *, default_system: str | None
) -> Iterator[Segment]:
    """``<|im_start|>role⏎content<|im_end|>⏎``, and ``default_system`` where no system message comes first."""
    refuse_tools(conversation, "ChatML")
    if default_system is not None and native_role(conversation.messages[0]) != "system":
        yield from _message("system", default_system)
    for index, message in enumerate(conversation.messages):
        yield from _message(native_role(message), message.content, index)
    if add_generation_prompt:
        yield from _prompt()


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _system_with_tools(conversation: Conversation, system: str) -> str:
    tools = "".join("\n" + as_json(tool) for tool in conversation.tools)
    return f"{system}{_TOOLS_BEFORE}{tools}{_TOOLS_AFTER}"


def _result(messages: Sequence[Numbered], place: int) -> Iterator[Segment]:
    """Results in a row are one message of the user."""
    index, message = messages[place]
    if place == 0 or messages[place - 1][1].role != "tool":
        yield marker("<|im_start|>", index)
        yield text("user", index)
    yield text(f"\n<tool_response>\n{message.content}\n</tool_response>", index)
    if place == len(messages) - 1 or messages[place + 1][1].role != "tool":
        yield marker("<|im_end|>", index)
        yield text("\n", index)


def write_qwen25(
    conversation: Conversation, add_generation_prompt: bool, *, default_system: str
) -> Iterator[Segment]:
    """ChatML with tools in the system message, calls as ``<tool_call>``, results as ``<tool_response>``."""
    system, messages = split_system(conversation)
    index = None if system is None else 0
    system = default_system if system is None else system
    if conversation.tools:
        system = _system_with_tools(conversation, f"{system}\n\n")
    yield from _message("system", system, index)
    for place, (index, message) in enumerate(messages):
        if message.role == "tool":
            yield from _result(messages, place)
        elif message.tool_calls:
            content = f"\n{message.content}" if message.content else ""
            for call in message.tool_calls:
                content += "\n" + _call(call.name, arguments_json(call))
            yield marker("<|im_start|>", index)
            yield text(f"assistant{content}", index)
            yield marker("<|im_end|>", index)
            yield text("\n", index)
        else:
            yield from _message(native_role(message), message.content, index)
    if add_generation_prompt:
        yield from _prompt()


def write_qwen3(
    conversation: Conversation, add_generation_prompt: bool, *, enable_thinking: bool
) -> Iterator[Segment]:
    """Qwen 2.5's format without a default system text, and with thinking.

    What the model thought is written only after the user's last question, and dropped from earlier turns.
    """
    system, messages = split_system(conversation)
    if conversation.tools:
        lead = "" if system is None else f"{system}\n\n"
        yield from _message("system", _system_with_tools(conversation, lead), None if system is None else 0)
    elif system is not None:
        yield from _message("system", system, 0)
    last_question = _last_question(conversation)
    last_index = len(conversation.messages) - 1
    for place, (index, message) in enumerate(messages):
        if message.role == "tool":
            yield from _result(messages, place)
            continue
        if message.role != "assistant":
            yield from _message(native_role(message), message.content, index)
            continue
        content, reasoning = _split_reasoning(message.content, message.reasoning)
        body = content
        if index > last_question and (index == last_index or reasoning):
            thought = reasoning.strip("\n")
            body = f"<think>\n{thought}\n</think>\n\n" + content.lstrip("\n")
        for number, call in enumerate(message.tool_calls):
            body += "\n" if content or number else ""
            body += _call(call.name, call.arguments)
        yield from _message("assistant", body, index)
    if add_generation_prompt:
        yield from _prompt("" if enable_thinking else "<think>\n\n</think>\n\n")


def _last_question(conversation: Conversation) -> int:
    """Where the user last spoke other than by tool results; the last message where that never was."""
    for index in range(len(conversation.messages) - 1, -1, -1):
        message = conversation.messages[index]
        is_result = message.content.startswith("<tool_response>") and message.content.endswith(
            "</tool_response>"
        )
        if message.role == "user" and not is_result:
            return index
    return len(conversation.messages) - 1


def _split_reasoning(content: str, reasoning: str) -> tuple[str, str]:
    """Answer and thought, where the thought may stand inside the content."""
    if reasoning or "</think>" not in content:
        return content, reasoning
    thought = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    return content.split("</think>")[-1].lstrip("\n"), thought


def write_phi4(conversation: Conversation, add_generation_prompt: bool) -> Iterator[Segment]:
    """``<|im_start|>role<|im_sep|>content<|im_end|>`` without line ends."""
    refuse_tools(conversation, "Phi-4")
    for index, message in enumerate(conversation.messages):
        yield marker("<|im_start|>", index)
        yield text(native_role(message), index)
        yield marker("<|im_sep|>", index)
        if message.content:
            yield text(message.content, index)
        yield marker("<|im_end|>", index)
    if add_generation_prompt:
        yield marker("<|im_start|>")
        yield text("assistant")
        yield marker("<|im_sep|>")


FORMATS = (
    Format(
        "chatml",
        1,
        write_chatml,
        "https://github.com/openai/openai-python/blob/release-v0.28.0/chatml.md",
        {"default_system": None},
    ),
    Format(
        "smollm2",
        1,
        write_chatml,
        "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        {"default_system": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"},
    ),
    Format(
        "qwen2.5",
        1,
        write_qwen25,
        "https://qwen.readthedocs.io/en/latest/framework/function_call.html",
        {"default_system": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."},
    ),
    Format(
        "qwen3",
        1,
        write_qwen3,
        "https://qwen.readthedocs.io/en/latest/getting_started/quickstart.html",
        {"enable_thinking": True},
    ),
    Format("phi4", 1, write_phi4, "https://huggingface.co/microsoft/phi-4#input-formats"),
)
