"""What the world lends us, as protocols, with the system's own versions beside them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .types import Rendered, TokenArray


class Clock(Protocol):
    """Time comes in by argument, so that it can be fixed."""

    def now(self) -> float:
        """Seconds since the Unix epoch."""

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean anything."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.perf_counter()


def local_strftime(now_s: float, format_text: str) -> str:
    """The moment ``now_s`` (seconds since the Unix epoch) in local time, as chat templates print it."""
    return datetime.fromtimestamp(now_s).strftime(format_text)


class TextStream(Protocol):
    """Ids that arrive one by one, to text."""

    def push(self, token_id: int) -> str:
        """One more token: the text that no later token can change."""

    def finish(self) -> str:
        """No more tokens: the rest of the text."""


class Tokenizer(Protocol):
    """Text to token ids and back, for one model."""

    @property
    def identity(self) -> str:
        """Versioned digest (``b3:…``) of everything that decides how text becomes tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_tokens(self) -> dict[str, int]:
        """Every special token's text and id."""

    def encode(self, text: str) -> TokenArray:
        """Plain text to ids. Nothing is added, and no text ever becomes a special token."""

    def encode_prompt(self, text: str, *, scope: str = "") -> TokenArray:
        """The same with what the tokenizer itself puts around a prompt (BOS, where it does so)."""

    def encode_rendered(self, rendered: Rendered, *, scope: str = "") -> TokenArray:
        """A rendered prompt to ids: its markers become exactly their tokens, all else is plain text.

        What a tokenizer remembers to be quicker, it may use again in the same ``scope`` only (a salt).
        """

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this one token stands for (for ``logprobs``); may be part of a character."""

    def text_stream(self) -> TextStream:
        """A fresh stream; all it gives adds up to ``decode`` of all its ids, special tokens skipped."""
