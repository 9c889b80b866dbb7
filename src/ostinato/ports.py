"""What the world lends us, as protocols, with the system's own versions beside them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

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

    def encode_rendered(self, rendered: Rendered) -> TokenArray:
        """A rendered prompt to ids: its markers become exactly their tokens, all else is plain text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this one token stands for (for ``logprobs``); may be part of a character."""
