"""A conversation in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

from rich.console import Console
from rich.text import Text

from .errors import ClientError
from .library import Engine
from .types import Chunk, Message, Usage

_HELP = "Ctrl-C interrupts an answer, Ctrl-D or /quit leaves, /new starts over."


def converse(
    engine: Engine, *, system: str | None, params: dict[str, Any], console: Console | None = None
) -> None:
    """Read, answer, show what was reused; until the end of input."""
    with suppress(ImportError):
        import readline  # noqa: F401 - line editing and history for input()
    console = console or Console()
    console.print(Text(f"{engine.runtime.model_name}. {_HELP}", style="dim"))
    opening = [Message("system", system)] if system else []
    messages = list(opening)
    while True:
        try:
            text = console.input("[bold cyan]you[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text == "/quit":
            return
        if text == "/new":
            messages = list(opening)
            continue
        if not text:
            continue
        answer = _turn(engine, [*messages, Message("user", text)], params, console)
        if answer is not None:
            messages += [Message("user", text), answer]


def _turn(
    engine: Engine, messages: list[Message], params: dict[str, Any], console: Console
) -> Message | None:
    """One answer, streamed; ``None`` where the request was refused."""
    from .types import Conversation

    try:
        chunks = engine.stream(Conversation(tuple(messages)), **params)
        return _show(chunks, console)
    except ClientError as error:
        console.print(Text(f"{error} (/new starts over)", style="red"))
        return None


def _show(chunks: Iterator[Chunk], console: Console) -> Message:
    parts: list[str] = []
    usage: Usage | None = None
    with closing(chunks):  # type: ignore[type-var]
        try:
            for chunk in chunks:
                console.print(Text(chunk.text), end="", soft_wrap=True)
                parts.append(chunk.text)
                usage = chunk.usage or usage
                if chunk.error is not None:
                    raise chunk.error
        except KeyboardInterrupt:
            console.print(Text(" …", style="dim"), end="")
    console.print()
    if usage is not None:
        console.print(Text(_cost(usage), style="dim"))
    return Message("assistant", "".join(parts))


def _cost(usage: Usage) -> str:
    decode_s = usage.total_s - usage.ttft_s
    trim = usage.trimmed
    rate = f"{(usage.completion_tokens - 1) / decode_s:.0f} tokens/s" if usage.completion_tokens > 1 else ""
    parts = [
        f"reused {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens",
        f"first token after {usage.ttft_s * 1000:.0f} ms",
        f"{usage.completion_tokens} tokens",
        rate,
        ""
        if trim is None
        else f"{trim.given_tokens - usage.prompt_tokens} tokens did not fit and were left out",
    ]
    return "· " + " · ".join(part for part in parts if part)
