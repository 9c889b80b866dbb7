"""Pieces of text between markers, to tokens: each by itself, and each only once.

A piece is encoded with a stand-in for the marker at either end. The stand-ins are tokens added to a private
copy of the tokenizer, whose text contains a secret and so cannot occur in a prompt; they take white space
away on their left and right as the markers do. So the result is what ``tokenizers`` makes of the whole text
at once, down to the word that begins after a marker, while text that only looks like a marker stays text.
And because pieces do not depend on each other, those seen before are looked up instead of encoded again; of
a long piece that has grown, only the end is encoded (:mod:`ostinato.prompt.resync`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson
from blake3 import blake3
from tokenizers import AddedToken, Tokenizer

from ..errors import ModelCorruptError, ModelUnsupportedError, TemplateError
from ..types import TokenArray
from .memo import PieceMemo
from .resync import MARGIN_CHARS, Joints, find_joints
from .tokenizer_files import TokenizerFiles

MIN_NONCE_LENGTH = 16

NO_NEIGHBOUR: Final = ""
_INERT: Final = "n"
# The kinds of stand-ins, by what the marker does to the white space on its left and right.
_KINDS: Final = {(False, False): _INERT, (True, False): "l", (False, True): "r", (True, True): "b"}
STRIPPING_LEFT: Final = frozenset({"l", "b"})

# From this length on it pays to look for the piece that this one grew out of.
_LONG_CHARS = 2_000
_MAX_ANCHORS = 32
_MAX_ANCHOR_CHARS = 4_000_000


def kind_of(token: AddedToken) -> str:
    """Which stand-in stands for a marker."""
    return _KINDS[token.lstrip, token.rstrip]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a piece, and the characters each stands for, half-open."""

    ids: TokenArray
    starts: TokenArray
    ends: TokenArray


@dataclass(frozen=True, slots=True)
class _Backend:
    """A private tokenizer with the texts of its stand-ins by kind."""

    tokenizer: Any
    stand_ins: dict[str, str]


class PieceEncoder:
    """Encodes pieces; safe to use from several threads.

    Raises:
        ModelCorruptError: ``tokenizers`` cannot read the description.
        ModelUnsupportedError: the vocabulary has gaps.
    """

    def __init__(self, files: TokenizerFiles, *, nonce: str) -> None:
        assert len(nonce) >= MIN_NONCE_LENGTH, "a short nonce can be guessed"
        assert nonce.isdigit(), "a nonce is made of digits"
        self._nonce = nonce
        self._additions = [files.added[number] for number in sorted(files.added)]
        self._controls = list(files.control_tokens)
        # Kept as bytes: parsed, a vocabulary takes many times the room.
        description = {**files.backend, "truncation": None, "padding": None}
        self._description = orjson.dumps(description)
        self._backend = self._build(nonce, self._description)
        self.tokenizer = self._backend.tokenizer
        self.around_prompt = _around_prompt(self.tokenizer)
        # From here on it would only move the offsets about.
        self.tokenizer.post_processor = None
        stand_in_ids = {self.tokenizer.token_to_id(text) for text in self._backend.stand_ins.values()}
        assert None not in stand_in_ids, "a stand-in was not added"
        declared: dict[int, AddedToken] = self.tokenizer.get_added_tokens_decoder()
        self.added_tokens = {
            number: token for number, token in sorted(declared.items()) if number not in stand_in_ids
        }
        self.vocab_size: int = min(stand_in_ids)
        if self.vocab_size <= _last_id(files.backend["model"]):
            raise ModelUnsupportedError("the tokenizer's vocabulary has gaps: its ids reach beyond its size")
        special = {number for number, token in self.added_tokens.items() if token.special}
        self._guarded = frozenset(special - {_unknown_id(files.backend["model"])})
        self._memo = PieceMemo()
        self._anchors: deque[tuple[str, str, Piece]] = deque()
        declarations = [{"content": token.content} for token in self.added_tokens.values()]
        self._joints = find_joints({**description, "added_tokens": declarations})
        self._suffix_backend = self._backend
        if self._joints is not None and self._joints.prepends:
            bare = {**_without_prepend(description), "post_processor": None}
            self._suffix_backend = self._build(nonce, orjson.dumps(bare))
        self._lock = threading.Lock()

    def encode(self, left: str, text: str, right: str, *, scope: str = "") -> TokenArray:
        """The ids of a piece between two markers of the kinds ``left`` and ``right``; not to be changed.

        What is remembered for one ``scope`` is never looked up for another: how quick it is tells nobody
        what others wrote.

        Raises:
            TemplateError: the text contains what this vocabulary can only read as a special token.
        """
        key = (_place(left, scope), text, right)
        ids = self._memo.get(key)
        if ids is None:
            if len(text) < _LONG_CHARS or self._joints is None:
                ids = np.array(self._plain_ids(left, text, right), dtype=np.int32)
                ids.flags.writeable = False
            else:
                ids = self.piece(left, text, right, scope=scope).ids
            self._memo.put(key, ids)
        return ids

    def piece(self, left: str, text: str, right: str, *, scope: str = "") -> Piece:
        """The same with the characters of each token. Of long pieces only what is new is encoded."""
        if len(text) < _LONG_CHARS or self._joints is None:
            return self._encode(self._backend_for(text), left, text, right)
        place = _place(left, scope)
        piece = self._extend(self._joints, place, text, right)
        if piece is None:
            piece = self._encode(self._backend_for(text), left, text, right)
        self._remember(place, text, piece)
        return piece

    # ------------------------------------------------------------ one piece

    def _plain_ids(self, left: str, text: str, right: str) -> list[int]:
        backend = self._backend_for(text)
        before, after = backend.stand_ins.get(left, ""), backend.stand_ins.get(right, "")
        # Without the characters of each token it is a fifth faster; only a batch can be had without.
        (encoding,) = backend.tokenizer.encode_batch_fast([before + text + after], add_special_tokens=False)
        ids: list[int] = encoding.ids
        ids = ids[self._edge(ids, before, after)]
        if self._guarded.isdisjoint(ids):
            return ids
        return [part for number in ids for part in self._as_text(number)]

    def _encode(self, backend: _Backend, left: str, text: str, right: str) -> Piece:
        before, after = backend.stand_ins.get(left, ""), backend.stand_ins.get(right, "")
        encoding = _encoded(backend.tokenizer, before + text + after)
        inside = self._edge(encoding.ids, before, after)
        ids, spans = encoding.ids[inside], encoding.offsets[inside]
        if not self._guarded.isdisjoint(ids):
            parts = [
                (part, span)
                for number, span in zip(ids, spans, strict=True)
                for part in self._as_text(number)
            ]
            ids, spans = [part for part, _ in parts], [span for _, span in parts]
        bounds = np.array(spans, dtype=np.int32).reshape(-1, 2) - len(before)
        return _frozen(np.array(ids, dtype=np.int32), bounds[:, 0].copy(), bounds[:, 1].copy())

    def _edge(self, ids: Sequence[int], before: str, after: str) -> slice:
        """The part of ``ids`` without stand-ins."""
        assert not before or ids[0] >= self.vocab_size, "the stand-in before the text was not found"
        assert not after or ids[-1] >= self.vocab_size, "the stand-in after the text was not found"
        return slice(1 if before else 0, len(ids) - 1 if after else len(ids))

    def _as_text(self, token_id: int) -> list[int]:
        """The token, or where it is a special one, its text in ordinary tokens.

        For vocabularies that have special tokens among their ordinary entries, and so find them in text.
        """
        if token_id not in self._guarded:
            return [token_id]
        token = self.tokenizer.id_to_token(token_id)
        for middle in range(len(token) // 2, 0, -1):
            halves = (token[:middle], token[middle:])
            ids = [part.id for half in halves for part in self.tokenizer.model.tokenize(half)]
            if self._guarded.isdisjoint(ids):
                return ids
        raise TemplateError(
            f"the text contains {token!r}, which this model's tokenizer can only read as a special token"
        )

    # ------------------------------------------------------------ pieces that grew

    def _extend(self, joints: Joints, place: str, text: str, right: str) -> Piece | None:
        """The piece out of an earlier one with the same beginning; ``None`` where there is none to use."""
        with self._lock:
            anchors = list(self._anchors)
        best_length, best = 0, None
        for anchor_place, anchor_text, anchor in anchors:
            if anchor_place == place:
                length = _common_length(anchor_text, text)
                if length > best_length:
                    best_length, best = length, anchor
        if best is None or best_length < _LONG_CHARS // 2:
            return None
        for cut in joints.before(text, best_length - MARGIN_CHARS):
            count = int(np.searchsorted(best.starts, cut))
            if count == 0 or count == len(best.starts) or best.ends[count - 1] > cut:
                continue
            rest = text[cut:]
            if self._nonce in rest:
                return None
            after = self._encode(self._suffix_backend, _INERT, rest, right)
            if joints.prepends and not self.added_tokens.keys().isdisjoint(after.ids.tolist()):
                return None  # what follows an added token gets a ▁ that this encoding does not give
            return _frozen(
                np.concatenate([best.ids[:count], after.ids]),
                np.concatenate([best.starts[:count], after.starts + np.int32(cut)]),
                np.concatenate([best.ends[:count], after.ends + np.int32(cut)]),
            )
        return None

    def _remember(self, place: str, text: str, piece: Piece) -> None:
        with self._lock:
            # What this piece begins with is of no more use: it does as well.
            others = [
                anchor for anchor in self._anchors if anchor[0] != place or not text.startswith(anchor[1])
            ]
            self._anchors = deque([(place, text, piece), *others])
            total = sum(len(anchor[1]) for anchor in self._anchors)
            while len(self._anchors) > _MAX_ANCHORS or (total > _MAX_ANCHOR_CHARS and len(self._anchors) > 1):
                total -= len(self._anchors.pop()[1])

    # ------------------------------------------------------------ private copies

    def _backend_for(self, text: str) -> _Backend:
        nonce, backend = self._nonce, self._backend
        while nonce in text:  # by a chance of one in 10^16, or because somebody tries
            nonce = str(int.from_bytes(blake3(nonce.encode()).digest()))[:40]
            backend = self._build(nonce, self._description)
            backend.tokenizer.post_processor = None
        return backend

    def _build(self, nonce: str, description: bytes) -> _Backend:
        try:
            tokenizer = Tokenizer.from_buffer(description)
        except Exception as error:  # the library raises no narrower class
            raise ModelCorruptError(f"tokenizers cannot read tokenizer.json: {error}") from error
        # As transformers does: what the configuration declares beyond tokenizer.json is added.
        known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
        tokenizer.add_tokens([token for token in self._additions if repr(token) not in known])
        tokenizer.add_special_tokens(self._controls)
        tokenizer.encode_special_tokens = True
        stand_ins = {kind: f"{nonce}{kind}{nonce}" for kind in _KINDS.values()}
        tokenizer.add_tokens(
            [
                AddedToken(stand_ins[kind], lstrip=lstrip, rstrip=rstrip, normalized=False)
                for (lstrip, rstrip), kind in _KINDS.items()
            ]
        )
        return _Backend(tokenizer, stand_ins)


def _encoded(tokenizer: Any, text: str) -> Any:
    """``tokenizer.encode``; of a long text by way of a batch, which alone lets other threads run meanwhile.

    Without that a prompt of megabytes, far too long for any model, stops every thread for seconds: the event
    loop, and the engine with all that it generates.
    """
    if len(text) < _LONG_CHARS:
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def _place(left: str, scope: str) -> str:
    return f"{scope}\0{left}" if scope else left


def _around_prompt(tokenizer: Any) -> tuple[TokenArray, TokenArray]:
    """The ids that the tokenizer's own rule puts before and after a prompt."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    own = [index for index, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
    first, last = (own[0], own[-1]) if own else (len(encoding.ids), len(encoding.ids))
    return np.array(encoding.ids[:first], dtype=np.int32), np.array(encoding.ids[last + 1 :], dtype=np.int32)


def _frozen(ids: TokenArray, starts: TokenArray, ends: TokenArray) -> Piece:
    for array in (ids, starts, ends):
        array.flags.writeable = False
    return Piece(ids, starts, ends)


def _common_length(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    if second.startswith(first):
        return len(first)
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _without_prepend(description: dict[str, Any]) -> dict[str, Any]:
    def strip(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
        if normalizer is None or normalizer["type"] == "Prepend":
            return None
        if normalizer["type"] != "Sequence":
            return normalizer
        parts = [part for part in map(strip, normalizer["normalizers"]) if part is not None]
        return {**normalizer, "normalizers": parts}

    return {**description, "normalizer": strip(description.get("normalizer"))}


def _unknown_id(model: dict[str, Any]) -> int | None:
    """The id of what the vocabulary itself puts for unknown text: no user can do harm with it."""
    if "unk_id" in model:
        number: int | None = model["unk_id"]
        return number
    unknown = model.get("unk_token")
    vocabulary = model.get("vocab")
    return vocabulary.get(unknown) if isinstance(vocabulary, dict) and isinstance(unknown, str) else None


def _last_id(model: dict[str, Any]) -> int:
    vocabulary = model.get("vocab", {})
    return max(vocabulary.values(), default=-1) if isinstance(vocabulary, dict) else len(vocabulary) - 1
