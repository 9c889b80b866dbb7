"""Text to tokens and back, with Hugging Face's ``tokenizers``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
from blake3 import blake3

from ..errors import TemplateError
from ..ports import TextStream
from ..types import Rendered, Segment, TokenArray
from .pieces import NO_NEIGHBOUR, STRIPPING_LEFT, PieceEncoder, kind_of
from .token_text import TokenText
from .tokenizer_files import TokenizerFiles, read_tokenizer_files

# Part of the identity: raise it when the same files tokenize differently than before.
_VERSION = 1


@dataclass(frozen=True, slots=True)
class SpannedTokens:
    """Tokens of a rendered prompt, and for each the index of the segment it begins in."""

    ids: TokenArray
    segments: TokenArray


class MarkerEnd(NamedTuple):
    """Where a marker of some ``kind`` ends: how many segments and ids there are up to here, and how many of
    these ids are not the tokenizer's."""

    num_segments: int
    num_ids: int
    kind: str
    num_known: int


class MarkedTokens(NamedTuple):
    """Ids, where the markers among them end, and how many ids are not the tokenizer's."""

    ids: TokenArray
    ends: list[MarkerEnd]
    num_known: int


class Run(NamedTuple):
    """A marker, or the text of the segments from ``first`` to ``stop`` between markers of two kinds.

    For a marker ``right`` is its own kind.
    """

    text: str
    first: int
    stop: int
    left: str = NO_NEIGHBOUR
    right: str = NO_NEIGHBOUR
    is_marker: bool = False

    @property
    def loses_end(self) -> bool:
        """Whether the marker after the text takes white space away from it."""
        return self.right in STRIPPING_LEFT and self.text[-1:].isspace()


@dataclass(frozen=True, slots=True)
class Tail:
    """The text after a prompt's last marker, the kind of that marker, and the text's ids."""

    left: str
    text: str
    ids: TokenArray


class HFTokenizer:
    """One model's tokenizer; safe to use from several threads.

    Args:
        files: the tokenizer as its folder describes it.
        nonce: a secret random text of digits, new with every process.

    Raises:
        ModelCorruptError: ``tokenizers`` cannot read the description.
    """

    def __init__(self, files: TokenizerFiles, *, nonce: str) -> None:
        self._pieces = PieceEncoder(files, nonce=nonce)
        added = self._pieces.added_tokens
        self.vocab_size = self._pieces.vocab_size
        self.special_tokens: dict[str, int] = {
            token.content: number for number, token in added.items() if token.special
        }
        # Also tokens that are not special may be markers: a template function may write any added token.
        self._marker_ids = {
            token.content: np.array([number], dtype=np.int32) for number, token in added.items()
        }
        self._marker_kinds = {token.content: kind_of(token) for token in added.values()}
        self._special_ids = frozenset(self.special_tokens.values())
        backend = self._pieces.tokenizer
        self._text = TokenText(backend, files.backend.get("decoder"), self._special_ids, self.vocab_size)
        self._before, self._after = self._pieces.around_prompt
        self.named_tokens = dict(files.named_tokens)
        self.bos_token = files.named_tokens.get("bos_token")
        self.eos_token = files.named_tokens.get("eos_token")
        own_eos = () if self.eos_token is None else (backend.token_to_id(self.eos_token),)
        self.eos_token_ids = frozenset(
            number for number in (*files.eos_token_ids, *own_eos) if number is not None
        )
        self.chat_templates = dict(files.chat_templates)
        self.chat_template = files.chat_templates.get("default")
        self.identity = _identity(files, special=sorted(self.special_tokens))

    @classmethod
    def from_folder(cls, path: Path, *, nonce: str) -> HFTokenizer:
        """Read the tokenizer of a model's folder in Hugging Face's layout.

        Raises:
            ModelUnsupportedError: there is no ``tokenizer.json``.
            ModelCorruptError: a file cannot be read.
        """
        return cls(read_tokenizer_files(Path(path)), nonce=nonce)

    # ------------------------------------------------------------ text to tokens

    def encode(self, text: str, *, scope: str = "") -> TokenArray:
        """Plain text to ids. Nothing is added, and no text ever becomes a special token."""
        return self._pieces.encode(NO_NEIGHBOUR, text, NO_NEIGHBOUR, scope=scope)

    def encode_prompt(self, text: str, *, scope: str = "") -> TokenArray:
        """Plain text to ids, with what the tokenizer itself puts around a prompt (BOS, where it does so)."""
        return np.concatenate([self._before, self.encode(text, scope=scope), self._after])

    def encode_rendered(self, rendered: Rendered, *, scope: str = "") -> TokenArray:
        """A rendered prompt to ids: its markers become exactly their tokens, all else is plain text.

        Pieces of text that were encoded before in the same ``scope`` are not encoded again; the result is the
        same.

        Raises:
            TemplateError: a marker is not a token of this model.
        """
        return self.encode_after(NO_NEIGHBOUR, rendered.segments, scope=scope).ids

    def encode_after(
        self,
        left: str,
        segments: Sequence[Segment],
        *,
        known: Callable[[str, str], TokenArray | None] | None = None,
        scope: str = "",
    ) -> MarkedTokens:
        """The ids of segments that stand after a marker of the kind ``left``, or at the beginning (``""``).

        ``known(kind, text)`` may give the ids of a text after a marker of that kind instead; it is asked for
        every text between two markers.

        Raises:
            TemplateError: a marker is not a token of this model.
        """
        parts = [np.zeros(0, dtype=np.int32)]
        ends: list[MarkerEnd] = []
        count = num_known = 0
        for run in self._runs(segments, left):
            if run.is_marker:
                parts.append(self._marker_ids[run.text])
                count += 1
                ends.append(MarkerEnd(run.stop, count, run.right, num_known))
                continue
            ids = known(run.left, run.text) if known is not None and not run.loses_end else None
            if ids is None:
                ids = self._pieces.encode(run.left, run.text, run.right, scope=scope)
            else:
                num_known += len(ids)
            parts.append(ids)
            count += len(ids)
        return MarkedTokens(np.concatenate(parts), ends, num_known)

    def tail(self, segments: Sequence[Segment], left: str = NO_NEIGHBOUR, *, scope: str = "") -> Tail:
        """The text after a prompt's last marker: what is generated goes on from there.

        ``left`` is the kind of the marker before ``segments``, where there is one.
        """
        last = Run("", 0, 0, left=left)
        for run in self._runs(segments, left):
            last = Run("", 0, 0, left=run.right) if run.is_marker else run
        ids = self._pieces.encode(last.left, last.text, NO_NEIGHBOUR, scope=scope)
        return Tail(last.left, last.text, ids)

    def encode_spans(self, rendered: Rendered, *, scope: str = "") -> SpannedTokens:
        """:meth:`encode_rendered`, with the segment of every token.

        Raises:
            TemplateError: a marker is not a token of this model.
        """
        ids, segments = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.int32)]
        for run in self._runs(rendered.segments):
            if run.is_marker:
                ids.append(self._marker_ids[run.text])
                segments.append(np.array([run.first], dtype=np.int32))
                continue
            piece = self._pieces.piece(run.left, run.text, run.right, scope=scope)
            ends = np.cumsum([len(segment.text) for segment in rendered.segments[run.first : run.stop]])
            inside = np.searchsorted(ends, piece.starts, side="right")
            ids.append(piece.ids)
            # A token that stands for no character of its own belongs to what comes last.
            segments.append(
                np.minimum(inside, run.stop - run.first - 1).astype(np.int32) + np.int32(run.first)
            )
        return SpannedTokens(np.concatenate(ids), np.concatenate(segments))

    def _runs(self, segments: Sequence[Segment], left: str = NO_NEIGHBOUR) -> Iterator[Run]:
        """The markers of a prompt, and the text between them, segments beside each other as one."""
        first, texts = 0, list[str]()
        for index, segment in enumerate(segments):
            if not segment.is_marker:
                texts.append(segment.text)
                continue
            right = self._marker_kinds.get(segment.text)
            if right is None:
                raise TemplateError(
                    f"the template writes {segment.text!r}, which is no token of this model: "
                    "take the model's own template, or one made for its family"
                )
            if text := "".join(texts):
                yield Run(text, first, index, left, right)
            yield Run(segment.text, index, index + 1, left, right, is_marker=True)
            left, first, texts = right, index + 1, []
        if text := "".join(texts):
            yield Run(text, first, len(segments), left, NO_NEIGHBOUR)

    # ------------------------------------------------------------ tokens to text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text; ids outside the vocabulary stand for nothing."""
        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        return self._text.decode(
            [int(number) for number in token_ids if number < self.vocab_size and number not in skipped]
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this one token stands for in the middle of a text; may be part of a character."""
        return self._text.bytes_of(token_id)

    def text_stream(self) -> TextStream:
        """A fresh stream for ids that arrive one by one."""
        return self._text.stream()


def _identity(files: TokenizerFiles, *, special: list[str]) -> str:
    described = {
        "version": _VERSION,
        "backend": {**files.backend, "truncation": None, "padding": None},
        "added": [[number, repr(token)] for number, token in sorted(files.added.items())],
        "controls": [repr(token) for token in files.control_tokens],
        "special": special,
    }
    return "b3:" + blake3(orjson.dumps(described, option=orjson.OPT_SORT_KEYS)).hexdigest()
