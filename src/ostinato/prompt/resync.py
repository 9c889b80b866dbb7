"""Where a text can be cut so that its parts tokenize as the whole.

A long text that grew at its end need not be tokenized again from its beginning: what stands before a cut
keeps its tokens. A cut is sound where two things hold. The tokenizer splits there whatever surrounds it, and
its decisions before the cut do not look at what has changed. So cuts are made between a word and the single
space before the next, some way before the first change, and only for tokenizers whose splitting is known to
go from left to right without looking back: others tokenize the whole text, every time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# How far before the first change a cut must stand: more than any pattern here looks ahead.
MARGIN_CHARS = 16
_MAX_TRIES = 200

_CUT = re.compile(r"[A-Za-z0-9] (?=[A-Za-z])")

# What a pattern may be made of: classes, letters, groups, quantities, and "no space follows".
_LOOKING_BACK = re.compile(r"\(\?<|\(\?=|\(\?![^)]|\\[bBAGzZK1-9]|(?<!\[)\^|\$|(?<!\\)\.")


@dataclass(frozen=True, slots=True)
class Joints:
    """How texts of one tokenizer can be cut.

    ``prepends``: the tokenizer puts a ``▁`` before every piece it is given, which the part after a cut must
    not get.
    """

    prepends: bool

    def before(self, text: str, position: int) -> Iterator[int]:
        """Cuts in ``text`` at or before ``position``, the last first, a limited number of them."""
        for _ in range(_MAX_TRIES):
            position = text.rfind(" ", 1, position + 1)
            if position < 1:
                return
            if _CUT.match(text, position - 1):
                yield position
            position -= 1


def find_joints(description: Mapping[str, Any]) -> Joints | None:
    """Read off a ``tokenizer.json`` how its texts can be cut; ``None`` where none can with certainty."""
    prepends = _prepends(description.get("normalizer"))
    if prepends is None or any(" " in token["content"] for token in description.get("added_tokens", ())):
        return None
    model = description["model"]
    splits = _splits_words(description.get("pre_tokenizer"))
    if splits is None:
        return None
    if not splits and not _keeps_words(model):
        return None
    return Joints(prepends)


def _prepends(normalizer: Mapping[str, Any] | None) -> bool | None:
    """Whether a ``▁`` is put first; ``None`` for a normalizer that may see further than one character."""
    if normalizer is None:
        return False
    kind = normalizer["type"]
    if kind == "Sequence":
        parts = [_prepends(part) for part in normalizer["normalizers"]]
        return None if None in parts else any(parts)
    if kind == "Prepend":
        return True if normalizer["prepend"] == "▁" else None
    if kind == "Replace":
        return False if normalizer["pattern"] == {"String": " "} else None
    # These compose a character with the marks after it, never across a space.
    return False if kind in ("NFC", "NFKC", "NFD", "NFKD", "Lowercase", "BertNormalizer") else None


def _splits_words(pre_tokenizer: Mapping[str, Any] | None) -> bool | None:
    """Whether a word and a space after it are always split; ``None`` where splitting may look back."""
    if pre_tokenizer is None:
        return False
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        parts = [_splits_words(part) for part in pre_tokenizer["pretokenizers"]]
        return None if None in parts else any(parts)
    if kind == "ByteLevel":
        return None if pre_tokenizer["add_prefix_space"] else pre_tokenizer["use_regex"]
    if kind == "Split":
        pattern = pre_tokenizer["pattern"]
        if "String" in pattern:
            # The pieces it makes end at its own matches only, wherever the text begins.
            return False
        plain = pattern["Regex"].replace(r"(?!\S)", "")
        return None if _LOOKING_BACK.search(plain) or pre_tokenizer["invert"] else True
    if kind in ("Digits", "Punctuation"):
        return False
    if kind == "Metaspace":
        return bool(pre_tokenizer["split"])
    return True if kind in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit") else None


def _keeps_words(model: Mapping[str, Any]) -> bool:
    """Whether no entry of a BPE vocabulary goes on after a word into the space behind it."""
    if model.get("type", "BPE") != "BPE":
        return False
    return not any("▁" in piece.lstrip("▁") for piece in model["vocab"])
