"""Text to tokens and back, with Hugging Face's ``tokenizers``.

A rendered prompt is cut at its markers, and every piece of text between two markers is encoded by itself,
with a stand-in for the marker at either end. The stand-ins are tokens added to a private copy of the
tokenizer, whose text contains a secret and so cannot occur in a prompt; they take white space away on their
left and right as the markers do. So the result is what ``tokenizers`` makes of the whole text at once, down
to the word that begins after a marker, while text that only looks like a marker stays text. And because
pieces do not depend on each other, those seen before are looked up instead of encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from blake3 import blake3
from tokenizers import AddedToken, Tokenizer

from ..errors import ModelCorruptError, TemplateError
from ..ports import TextStream
from ..types import Rendered, TokenArray
from .memo import PieceMemo
from .token_text import TokenText
from .tokenizer_files import TokenizerFiles, read_tokenizer_files

# Part of the identity: raise it when the same files tokenize differently than before.
_VERSION = 1

MIN_NONCE_LENGTH = 16

# The kinds of stand-ins, by what the marker does to the white space around it.
_KINDS: Final = {(False, False): "n", (True, False): "l", (False, True): "r", (True, True): "b"}
_NO_NEIGHBOUR: Final = ""


class HFTokenizer:
    """One model's tokenizer; safe to use from several threads.

    Args:
        files: the tokenizer as its folder describes it.
        nonce: a secret random text of digits, new with every process.

    Raises:
        ModelCorruptError: ``tokenizers`` cannot read the description.
    """

    def __init__(self, files: TokenizerFiles, *, nonce: str) -> None:
        assert len(nonce) >= MIN_NONCE_LENGTH, "a short nonce can be guessed"
        assert nonce.isdigit(), "a nonce is made of digits"
        self._description = orjson.dumps({**files.backend, "truncation": None, "padding": None})
        self._additions = [files.added[number] for number in sorted(files.added)]
        self._controls = files.control_tokens
        self._nonce = nonce
        self._backend, self._stand_ins = self._build(nonce)
        stand_in_ids = {self._backend.token_to_id(text) for text in self._stand_ins.values()}
        assert None not in stand_in_ids, "a stand-in was not added"
        declared: dict[int, AddedToken] = self._backend.get_added_tokens_decoder()
        added = {number: token for number, token in declared.items() if number not in stand_in_ids}
        self.vocab_size: int = min(stand_in_ids)
        self.special_tokens: dict[str, int] = {
            token.content: number for number, token in sorted(added.items()) if token.special
        }
        # Also tokens that are not special may be markers: a template function may write any added token.
        self._marker_ids = {
            token.content: np.array([number], dtype=np.int32) for number, token in added.items()
        }
        self._marker_kinds = {token.content: _KINDS[token.lstrip, token.rstrip] for token in added.values()}
        self._guarded = frozenset(self.special_tokens.values()) - {_unknown_id(files.backend["model"])}
        self._memo = PieceMemo()
        self._special_ids = frozenset(self.special_tokens.values())
        self._text = TokenText(
            self._backend, files.backend.get("decoder"), self._special_ids, self.vocab_size
        )
        self._before, self._after = self._around_prompt()
        self.named_tokens = dict(files.named_tokens)
        self.bos_token = files.named_tokens.get("bos_token")
        self.eos_token = files.named_tokens.get("eos_token")
        own_eos = () if self.eos_token is None else (self._backend.token_to_id(self.eos_token),)
        self.eos_token_ids = frozenset(
            number for number in (*files.eos_token_ids, *own_eos) if number is not None
        )
        self.chat_templates = dict(files.chat_templates)
        self.chat_template = files.chat_templates.get("default")
        self.identity = _identity(files, declared=sorted(self.special_tokens))

    @classmethod
    def from_folder(cls, path: Path, *, nonce: str) -> HFTokenizer:
        """Read the tokenizer of a model's folder in Hugging Face's layout.

        Raises:
            ModelUnsupportedError: there is no ``tokenizer.json``.
            ModelCorruptError: a file cannot be read.
        """
        return cls(read_tokenizer_files(Path(path)), nonce=nonce)

    # ------------------------------------------------------------ text to tokens

    def encode(self, text: str) -> TokenArray:
        """Plain text to ids. Nothing is added, and no text ever becomes a special token."""
        return self._piece(_NO_NEIGHBOUR, text, _NO_NEIGHBOUR)

    def encode_prompt(self, text: str) -> TokenArray:
        """Plain text to ids, with what the tokenizer itself puts around a prompt (BOS, where it does so)."""
        return np.concatenate([self._before, self.encode(text), self._after])

    def encode_rendered(self, rendered: Rendered) -> TokenArray:
        """A rendered prompt to ids: its markers become exactly their tokens, all else is plain text.

        Raises:
            TemplateError: a marker is not a token of this model.
        """
        parts = []
        text: list[str] = []
        left = _NO_NEIGHBOUR
        for segment in rendered.segments:
            if not segment.is_marker:
                text.append(segment.text)
                continue
            marker = self._marker_ids.get(segment.text)
            if marker is None:
                raise TemplateError(
                    f"the template writes {segment.text!r}, which is no token of this model: "
                    "take the model's own template, or one made for its family"
                )
            right = self._marker_kinds[segment.text]
            if text:
                parts.append(self._piece(left, "".join(text), right))
                text = []
            parts.append(marker)
            left = right
        if text:
            parts.append(self._piece(left, "".join(text), _NO_NEIGHBOUR))
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    def _piece(self, left: str, text: str, right: str) -> TokenArray:
        """The ids of one piece of text between two markers of the kinds ``left`` and ``right``."""
        key = (left, text, right)
        ids = self._memo.get(key)
        if ids is None:
            ids = np.array(self._encode_piece(left, text, right), dtype=np.int32)
            ids.flags.writeable = False
            self._memo.put(key, ids)
        return ids

    def _encode_piece(self, left: str, text: str, right: str) -> list[int]:
        backend, stand_ins = self._backend, self._stand_ins
        nonce = self._nonce
        while nonce in text:  # by a chance of one in 10^16, or because somebody tries
            nonce = str(int.from_bytes(blake3(nonce.encode()).digest()))[:40]
            backend, stand_ins = self._build(nonce)
        before, after = stand_ins.get(left, ""), stand_ins.get(right, "")
        ids: list[int] = backend.encode(before + text + after, add_special_tokens=False).ids
        if before:
            assert ids[0] >= self.vocab_size, "the stand-in before the text was not found"
            ids = ids[1:]
        if after:
            assert ids[-1] >= self.vocab_size, "the stand-in after the text was not found"
            ids = ids[:-1]
        if self._guarded.isdisjoint(ids):
            return ids
        return [
            part
            for number in ids
            for part in (self._spelled(number) if number in self._guarded else [number])
        ]

    def _spelled(self, special_id: int) -> list[int]:
        """The text of a special token in ordinary tokens.

        For vocabularies that have special tokens among their ordinary entries, and so find them in text.
        """
        token = self._backend.id_to_token(special_id)
        for middle in range(len(token) // 2, 0, -1):
            halves = (token[:middle], token[middle:])
            ids = [part.id for half in halves for part in self._backend.model.tokenize(half)]
            if self._guarded.isdisjoint(ids):
                return ids
        raise TemplateError(
            f"the text contains {token!r}, which this model's tokenizer can only read as a special token"
        )

    def _build(self, nonce: str) -> tuple[Any, dict[str, str]]:
        """A private copy of the tokenizer, and the texts of its stand-ins by kind."""
        try:
            backend = Tokenizer.from_buffer(self._description)
        except Exception as error:  # the library raises no narrower class
            raise ModelCorruptError(f"tokenizers cannot read tokenizer.json: {error}") from error
        # As transformers does: what the configuration declares beyond tokenizer.json is added.
        known = backend.get_added_tokens_decoder().values()
        backend.add_tokens(
            [token for token in self._additions if all(repr(token) != repr(has) for has in known)]
        )
        backend.add_special_tokens(list(self._controls))
        backend.encode_special_tokens = True
        stand_ins = {kind: f"{nonce}{kind}{nonce}" for kind in _KINDS.values()}
        backend.add_tokens(
            [
                AddedToken(stand_ins[kind], lstrip=lstrip, rstrip=rstrip, normalized=False)
                for (lstrip, rstrip), kind in _KINDS.items()
            ]
        )
        return backend, stand_ins

    def _around_prompt(self) -> tuple[TokenArray, TokenArray]:
        """The ids that the tokenizer's own rule puts before and after a prompt."""
        encoding = self._backend.encode("a", add_special_tokens=True)
        own = [index for index, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
        first, last = (own[0], own[-1]) if own else (len(encoding.ids), len(encoding.ids))
        return (
            np.array(encoding.ids[:first], dtype=np.int32),
            np.array(encoding.ids[last + 1 :], dtype=np.int32),
        )

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


def _unknown_id(model: dict[str, Any]) -> int | None:
    """The id of what the vocabulary itself puts for unknown text: no user can do harm with it."""
    if "unk_id" in model:
        number: int | None = model["unk_id"]
        return number
    unknown = model.get("unk_token")
    vocabulary = model.get("vocab")
    return vocabulary.get(unknown) if isinstance(vocabulary, dict) and isinstance(unknown, str) else None


def _identity(files: TokenizerFiles, *, declared: list[str]) -> str:
    described = {
        "version": _VERSION,
        "backend": {**files.backend, "truncation": None, "padding": None},
        "added": [[number, repr(token)] for number, token in sorted(files.added.items())],
        "controls": [repr(token) for token in files.control_tokens],
        "special": declared,
    }
    return "b3:" + blake3(orjson.dumps(described, option=orjson.OPT_SORT_KEYS)).hexdigest()
