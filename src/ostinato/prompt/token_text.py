"""How a vocabulary's tokens make text, token by token.

A token's text depends on where it stands: a character may be spread over several tokens, and the first token
of a text loses its leading space. What ``tokenizers`` decodes from all ids at once is the measure; here the
same text comes out piece by piece, each as early as no later token can change it, in constant time a token.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ..ports import TextStream

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """The text side of one tokenizer.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        decoder: its decoder as ``tokenizer.json`` describes it.
        special_ids: tokens without text.
        vocab_size: ids from here on are no tokens.
    """

    def __init__(
        self, backend: Any, decoder: Mapping[str, Any] | None, special_ids: frozenset[int], vocab_size: int
    ) -> None:
        self.special_ids = special_ids
        self.vocab_size = vocab_size
        self._backend = backend
        parts = _parts(decoder)
        kinds = [part["type"] for part in parts]
        self._is_byte_level = kinds == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in kinds
        self._is_local = _is_local(parts)
        self._bytes: dict[int, bytes] = {}

    def stream(self) -> TextStream:
        return _ByteLevelStream(self) if self._is_byte_level else _GeneralStream(self)

    def decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text

    def has_text(self, token_id: int) -> bool:
        return (
            token_id < self.vocab_size
            and token_id not in self.special_ids
            and self._backend.id_to_token(token_id) is not None
        )

    def byte_of(self, token_id: int) -> int | None:
        """The byte, where the token stands for a byte as such (``<0x0A>``)."""
        if not self._has_byte_tokens:
            return None
        match = _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "")
        return None if match is None else int(match[1], 16)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes one token stands for in the middle of a text; of a special token, its name's."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def _make_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id < self.vocab_size else None
        if token is None:
            return b""
        if self._is_byte_level:
            return _byte_level_bytes(token)
        if token_id in self.special_ids:
            return bytes(token.encode())
        if (byte := self.byte_of(token_id)) is not None:
            return bytes([byte])
        text = self.decode([*self.lead, token_id])
        return text.removeprefix(self.lead_text).encode()

    @cached_property
    def lead(self) -> list[int]:
        """A token to put before others, so that they are not the first; empty where there is none."""
        for token_id in range(self.vocab_size):
            if (
                self.has_text(token_id)
                and self.byte_of(token_id) is None
                and self.decode([token_id]).isalnum()
            ):
                return [token_id]
        return []

    @cached_property
    def lead_text(self) -> str:
        return self.decode(self.lead)

    @property
    def is_local(self) -> bool:
        """Whether a token's text depends on nothing but its being the first, and on bytes around it."""
        return self._is_local and bool(self.lead)


def _parts(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [part for inner in decoder["decoders"] for part in _parts(inner)]
    return [decoder]


def _is_local(parts: list[Mapping[str, Any]]) -> bool:
    is_fused = False
    for part in parts:
        kind = part["type"]
        if kind == "Fuse":
            is_fused = True
        elif kind == "Replace":
            if is_fused or "String" not in part["pattern"]:
                return False
        elif kind == "Strip":
            if part["stop"] != 0:
                return False
        elif is_fused or kind not in ("ByteFallback", "Metaspace", "WordPiece"):
            return False
    return True


def _byte_characters() -> dict[str, int]:
    """GPT-2's table: each byte as a printable character (https://github.com/openai/gpt-2, encoder.py)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()


def _byte_level_bytes(token: str) -> bytes:
    """A token with any character outside the table stands for its own text, as in ``tokenizers``."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


class _ByteLevelStream:
    """Tokens are bytes; what waits is at most an unfinished character."""

    def __init__(self, text: TokenText) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._text.special_ids:
            return ""
        return self._decoder.decode(self._text.bytes_of(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _GeneralStream:
    """Decodes the new tokens behind a few that stand for all before them.

    Bytes as tokens wait until another token follows: one wrong byte makes every byte of its run wrong.
    """

    def __init__(self, text: TokenText) -> None:
        self._text = text
        self._before: list[int] = []
        self._before_text = ""
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        if not self._text.has_text(token_id):
            return ""
        self._waiting.append(token_id)
        if self._text.byte_of(token_id) is not None:
            return ""
        return self._release()

    def finish(self) -> str:
        return self._release() if self._waiting else ""

    def _release(self) -> str:
        text = self._text
        ids = self._before + self._waiting
        decoded = text.decode(ids)
        if not decoded.startswith(self._before_text):  # a decoder that changes its mind: wait and see
            return ""
        new = decoded[len(self._before_text) :]
        last = self._waiting[-1]
        if text.is_local and (new or self._before is text.lead):
            self._before, self._before_text = text.lead, text.lead_text
        elif not text.is_local and text.byte_of(last) is None and (alone := text.decode([last])):
            self._before, self._before_text = [last], alone
        else:
            self._before, self._before_text = ids, decoded
        self._waiting = []
        return new
