"""Formats of turns with a marker before each: Gemma, Phi-3, DeepSeek, Command R, Zephyr."""

from __future__ import annotations

from collections.abc import Iterator

from ...types import Conversation, Segment
from .common import Format, check_alternation, marker, native_role, refuse_tools, split_system, text


def write_gemma(conversation: Conversation, add_generation_prompt: bool) -> Iterator[Segment]:
    """``<start_of_turn>user⏎content<end_of_turn>⏎``; the assistant is called ``model``.

    There is no system role: its text stands before the first user message, as in Gemma 3's own template.
    """
    refuse_tools(conversation, "Gemma")
    system, messages = split_system(conversation)
    check_alternation(messages, "Gemma")
    yield marker("<bos>")
    for place, (index, message) in enumerate(messages):
        lead = f"{system}\n\n" if place == 0 and system is not None else ""
        role = "model" if message.role == "assistant" else message.role
        yield marker("<start_of_turn>", index)
        yield text(f"{role}\n{lead}{message.content.strip()}", index)
        yield marker("<end_of_turn>", index)
        yield text("\n", index)
    if add_generation_prompt:
        yield marker("<start_of_turn>")
        yield text("model\n")


def write_phi3(conversation: Conversation, add_generation_prompt: bool) -> Iterator[Segment]:
    """``<|role|>⏎content<|end|>⏎``, and ``<|endoftext|>`` where no answer is to follow."""
    refuse_tools(conversation, "Phi-3")
    for index, message in enumerate(conversation.messages):
        yield marker(f"<|{native_role(message)}|>", index)
        yield text(f"\n{message.content}", index)
        yield marker("<|end|>", index)
        yield text("\n", index)
    if add_generation_prompt:
        yield marker("<|assistant|>")
        yield text("\n")
    else:
        yield marker("<|endoftext|>")


def write_deepseek(
    conversation: Conversation, add_generation_prompt: bool, *, think: bool
) -> Iterator[Segment]:
    """``<｜User｜>question<｜Assistant｜>answer<｜end▁of▁sentence｜>`` after BOS and all system texts.

    Thoughts are dropped from earlier turns. ``think`` (R1) begins the answer with a thought.
    """
    refuse_tools(conversation, "DeepSeek")
    systems = [message.content for message in conversation.messages if native_role(message) == "system"]
    yield marker("<｜begin▁of▁sentence｜>")
    if any(systems):
        yield text("\n\n".join(systems))
    for index, message in enumerate(conversation.messages):
        if message.role == "user":
            yield marker("<｜User｜>", index)
            yield text(message.content, index)
        elif message.role == "assistant":
            yield marker("<｜Assistant｜>", index)
            yield text(message.content.split("</think>")[-1], index)
            yield marker("<｜end▁of▁sentence｜>", index)
    if add_generation_prompt:
        yield marker("<｜Assistant｜>")
        if think:
            yield text("<think>\n")


def write_command_r(conversation: Conversation, add_generation_prompt: bool) -> Iterator[Segment]:
    """``<|START_OF_TURN_TOKEN|><|USER_TOKEN|>content<|END_OF_TURN_TOKEN|>``, contents trimmed."""
    refuse_tools(conversation, "Command R")
    system, messages = split_system(conversation)
    check_alternation(messages, "Command R")
    yield marker("<BOS_TOKEN>")
    if system is not None:
        yield from _command_turn("SYSTEM", system, 0)
    for index, message in messages:
        speaker = "USER" if message.role == "user" else "CHATBOT"
        yield from _command_turn(speaker, message.content.strip(), index)
    if add_generation_prompt:
        yield marker("<|START_OF_TURN_TOKEN|>")
        yield marker("<|CHATBOT_TOKEN|>")


def _command_turn(speaker: str, content: str, index: int) -> Iterator[Segment]:
    yield marker("<|START_OF_TURN_TOKEN|>", index)
    yield marker(f"<|{speaker}_TOKEN|>", index)
    yield text(content, index)
    yield marker("<|END_OF_TURN_TOKEN|>", index)


def write_zephyr(conversation: Conversation, add_generation_prompt: bool) -> Iterator[Segment]:
    """``<|role|>⏎content</s>⏎``, in which only ``</s>`` is a special token."""
    refuse_tools(conversation, "Zephyr")
    for index, message in enumerate(conversation.messages):
        yield text(f"<|{native_role(message)}|>\n{message.content}", index)
        yield marker("</s>", index)
        yield text("\n", index)
    if add_generation_prompt:
        yield text("<|assistant|>\n")


FORMATS = (
    Format("gemma", 1, write_gemma, "https://ai.google.dev/gemma/docs/core/prompt-structure"),
    Format("phi3", 1, write_phi3, "https://huggingface.co/microsoft/Phi-3.5-mini-instruct#input-formats"),
    Format(
        "deepseek-v3",
        1,
        write_deepseek,
        "https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/tokenizer_config.json",
        {"think": False},
    ),
    Format(
        "deepseek-r1",
        1,
        write_deepseek,
        "https://huggingface.co/deepseek-ai/DeepSeek-R1/blob/main/tokenizer_config.json",
        {"think": True},
    ),
    Format("command-r", 1, write_command_r, "https://docs.cohere.com/docs/command-r-hf"),
    Format("zephyr", 1, write_zephyr, "https://huggingface.co/HuggingFaceH4/zephyr-7b-beta"),
)
