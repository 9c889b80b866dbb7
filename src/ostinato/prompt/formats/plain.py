"""Formats that are mere text: Vicuna, Alpaca, and one for models that were never taught any."""

from __future__ import annotations

from collections.abc import Iterator

from ...types import Conversation, Segment
from .common import Format, check_alternation, marker, native_role, refuse_tools, split_system, text


def write_vicuna(
    conversation: Conversation, add_generation_prompt: bool, *, default_system: str
) -> Iterator[Segment]:
    """``<s>system USER: question ASSISTANT: answer</s>USER: …``"""
    refuse_tools(conversation, "Vicuna")
    system, messages = split_system(conversation)
    check_alternation(messages, "Vicuna")
    yield marker("<s>")
    yield text((default_system if system is None else system) + " ", None if system is None else 0)
    for index, message in messages:
        if message.role == "user":
            yield text(f"USER: {message.content} ", index)
        else:
            yield text(f"ASSISTANT: {message.content}", index)
            yield marker("</s>", index)
    if add_generation_prompt:
        yield text("ASSISTANT:")


def write_alpaca(
    conversation: Conversation, add_generation_prompt: bool, *, default_system: str
) -> Iterator[Segment]:
    """``<s>system⏎⏎### Instruction:⏎…⏎⏎### Response:…</s>``; the answer follows its heading at once."""
    refuse_tools(conversation, "Alpaca")
    system, messages = split_system(conversation)
    check_alternation(messages, "Alpaca")
    yield marker("<s>")
    yield text(default_system if system is None else system, None if system is None else 0)
    for index, message in messages:
        if message.role == "user":
            yield text(f"\n\n### Instruction:\n{message.content}", index)
        else:
            yield text(f"\n\n### Response:{message.content}", index)
            yield marker("</s>", index)
    if add_generation_prompt:
        yield text("\n\n### Response:")


def write_plain(
    conversation: Conversation, add_generation_prompt: bool, *, bos: str | None, separator: str
) -> Iterator[Segment]:
    """``Role: content`` and ``separator``; ``bos`` is the marker to begin with, where the model wants one."""
    refuse_tools(conversation, "plain")
    if bos is not None:
        yield marker(bos)
    for index, message in enumerate(conversation.messages):
        yield text(f"{native_role(message).capitalize()}: {message.content}{separator}", index)
    if add_generation_prompt:
        yield text("Assistant:")


FORMATS = (
    Format(
        "vicuna",
        1,
        write_vicuna,
        "https://github.com/lm-sys/FastChat/blob/main/docs/vicuna_weights_version.md",
        {
            "default_system": (
                "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
                "helpful, detailed, and polite answers to the user's questions."
            )
        },
    ),
    Format(
        "alpaca",
        1,
        write_alpaca,
        "https://github.com/tatsu-lab/stanford_alpaca#data-release",
        {
            "default_system": (
                "Below is an instruction that describes a task. "
                "Write a response that appropriately completes the request."
            )
        },
    ),
    Format("plain", 1, write_plain, "this project", {"bos": None, "separator": "\n\n"}),
)
