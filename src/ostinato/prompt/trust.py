"""User text can never become a special token; what the template writes always does.

A Jinja template returns one string, in which a marker the template wrote and the same characters out of a
user's message look alike. So the user's strings are *disguised* before they reach the template: an escape
that nobody can guess is put into every occurrence of a special token's text. The special tokens found in
the rendered string are then the template's own, and taking the escape out gives the text back.

Two disguises exist. The **light** one touches nothing but special tokens' text (in any letter case) and
fragments of it at the ends of a string, so that templates which look into the content see what they
expect. It is proof against everything but a template that cuts content up and joins the parts again. For
such templates there is the **heavy** one, which puts other characters for a text's own, as many; under it
nothing the user wrote is left to make a special token of. Templates that look into content take it for
another, so its rendering only serves as the proof: both must show the same special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from blake3 import blake3

from ..errors import ConversationError, ModelUnsupportedError
from ..types import Conversation, Segment

_ESCAPE_DIGITS = 20
_MAX_TRIES = 1000


def longest_first(tokens: Iterable[str]) -> str:
    """A regular expression for any of ``tokens``: the longest where several begin, as tokenizers match."""
    alternatives = "|".join(
        re.escape(token) for token in sorted(tokens, key=lambda token: (-len(token), token))
    )
    return alternatives or "(?!)"  # (?!) never matches


class Disguise:
    """Hides ``special_tokens`` in user text, and splits a rendering at those that are left.

    ``nonce`` seeds the escapes; it must be secret and random, and come anew with every process.
    """

    def __init__(self, special_tokens: Collection[str], nonce: str) -> None:
        # A special token of one character cannot be broken; the tokenizer sees to it that text stays text.
        self._tokens = tuple(sorted(token for token in special_tokens if len(token) > 1))
        self._nonce = nonce
        self._markers = re.compile(longest_first(self._tokens))
        lowered = {token.lower() for token in self._tokens}
        self._any_case = re.compile(longest_first(lowered), re.IGNORECASE)
        self._beginnings = sorted({token[:2] for token in lowered})
        self._prefixes = frozenset(token[:end] for token in lowered for end in range(1, len(token)))
        self._suffixes = frozenset(token[start:] for token in lowered for start in range(1, len(token)))
        self._beginnings_of_tokens = frozenset(
            token[:end] for token in self._tokens for end in range(1, len(token))
        )
        self._prefix_ends = frozenset(prefix[-1] for prefix in self._prefixes)
        self._suffix_starts = frozenset(suffix[0] for suffix in self._suffixes)
        self._max_fragment = max((len(token) - 1 for token in lowered), default=0)
        self._first_char = _char_class(token[0] for token in lowered)
        self._last_char = _char_class(token[-1] for token in lowered)
        self._marker_segments = {token: Segment(token, is_marker=True) for token in self._tokens}
        self._all_tokens = "\0".join(lowered)
        private = map(chr, range(0xE000, 0xF900))
        self._fillers = [char for char in private if char not in self._all_tokens]
        self._neutral_space = frozenset(" \t\r\n") - frozenset(self._all_tokens)
        self._escapes: list[str] = []
        self._edges = _char_class(char for token in self._tokens for char in (token[0], token[-1]))

    def escape_for(self, texts: Collection[str]) -> str:
        """The first escape that occurs in none of ``texts``."""
        number = 0
        while any(self._escape(number) in text for text in texts):
            number += 1
        return self._escape(number)

    def _escape(self, number: int) -> str:
        """Escapes in a fixed order, such that no special token can overlap one where it stands in a text."""
        while number >= len(self._escapes):
            candidates = (self._digits(len(self._escapes), attempt) for attempt in range(_MAX_TRIES))
            fitting = next((escape for escape in candidates if self._fits(escape)), None)
            if fitting is None:
                raise ModelUnsupportedError(
                    "the tokenizer's special tokens leave no room to keep user text apart from them"
                )
            self._escapes.append(fitting)
        return self._escapes[number]

    def _digits(self, number: int, attempt: int) -> str:
        digest = blake3(f"escape\0{number}\0{attempt}\0{self._nonce}".encode()).digest()
        return str(int.from_bytes(digest) % 10**_ESCAPE_DIGITS).zfill(_ESCAPE_DIGITS)

    def _fits(self, escape: str) -> bool:
        return not any(
            token in escape
            or any(escape.startswith(token[start:]) for start in range(1, len(token)))
            or any(escape.endswith(token[:end]) for end in range(1, len(token)))
            for token in self._tokens
        )

    def light(self, text: str, escape: str) -> str:
        """``text`` with every special token in it broken, and nothing at its ends that could complete one."""
        if self._may_have_token(text):
            # Again and again, because what overlaps a broken token may be one itself.
            while self._any_case.search(text) is not None:
                text = self._any_case.sub(lambda match: match[0][:1] + escape + match[0][1:], text)
        # A template may trim the text, so what stands before white space at the end counts as the end.
        core = text.rstrip()
        if self._ends_in_prefix(core):
            text = core + escape + text[len(core) :]
        elif len(core) < len(text) and self._ends_in_prefix(text):
            text += escape
        core = text.lstrip()
        if self._begins_with_suffix(core):
            text = text[: len(text) - len(core)] + escape + core
        elif len(core) < len(text) and self._begins_with_suffix(text):
            text = escape + text
        return text

    def _may_have_token(self, text: str) -> bool:
        """A quick look that spares most text the search for all tokens."""
        if self._first_char.search(text) is None:
            return False
        lowered = text.lower()
        return any(beginning in lowered for beginning in self._beginnings)

    def _ends_in_prefix(self, text: str) -> bool:
        if text[-1:].lower() not in self._prefix_ends:
            return False
        tail = text[-self._max_fragment :].lower()
        if self._first_char.search(tail) is None:  # nearly always
            return False
        return any(tail[-length:] in self._prefixes for length in range(1, len(tail) + 1))

    def _begins_with_suffix(self, text: str) -> bool:
        if text[:1].lower() not in self._suffix_starts:
            return False
        head = text[: self._max_fragment].lower()
        if self._last_char.search(head) is None:
            return False
        return any(head[:length] in self._suffixes for length in range(1, len(head) + 1))

    def heavy(self, text: str, number: int) -> str:
        """As many characters that are in no special token, other ones for every ``number``.

        White space stays, so that what trims to nothing still does.
        """
        filler = self._fillers[number % len(self._fillers)]
        return "".join(char if char in self._neutral_space else filler for char in text)

    def leads_into_token(self, literal: str) -> bool:
        """Whether a text that the template writes stops in the middle of a special token."""
        end = max((match.end() for match in self._markers.finditer(literal)), default=0)
        return self._ends_in_prefix(literal[end:])

    def is_suspect(self, text: str, *, is_cut: bool, is_wrapped: bool) -> bool:
        """Whether a template could make a special token out of ``text`` in spite of the light disguise.

        ``is_cut``: the template may cut ``text`` up and join the parts; ``is_wrapped``: it writes beginnings
        of special tokens, which parts of a text may complete.
        """
        if is_cut and (is_wrapped or self._edges.search(text) is not None):
            return True
        core = text.strip()
        return 0 < len(core) <= self._max_fragment and core.lower() in self._all_tokens

    def split(self, rendered: str, escape: str) -> tuple[Segment, ...]:
        """The rendering as text and markers, without the escapes."""
        segments = []
        end = 0
        is_escaped = escape in rendered
        for match in self._markers.finditer(rendered):
            start = match.start()
            if start > end and (text := _clean(rendered[end:start], escape if is_escaped else "")):
                segments.append(Segment(text))
            segments.append(self._marker_segments[match[0]])
            end = match.end()
        if text := _clean(rendered[end:], escape if is_escaped else ""):
            segments.append(Segment(text))
        return tuple(segments)

    def settled_end(self, rendered: str) -> int:
        """Where the last marker ends that is one in every text that begins with ``rendered``; 0 for none."""
        last = len(rendered)
        undecided = next(
            (
                start
                for start in range(max(0, last - self._max_fragment), last)
                if rendered[start:] in self._beginnings_of_tokens
            ),
            last,
        )
        end = 0
        for match in self._markers.finditer(rendered):
            if match.start() >= undecided:
                break
            end = match.end()
        return end

    def mark(self, number: int = 0) -> str:
        """What stands for a border in a rendering; in no text but by a guess, and in no special token.

        None of another ``number`` is in it.
        """
        return f"{self._fillers[0]}{self._escape(0)}{self._fillers[1]}{number}{self._fillers[0]}"

    def pieces(self, rendered: str) -> Iterator[tuple[int, int, bool]]:
        """Where the text and the markers of a rendering stand, and which are markers."""
        end = 0
        for match in self._markers.finditer(rendered):
            if match.start() > end:
                yield end, match.start(), False
            yield *match.span(), True
            end = match.end()
        if end < len(rendered):
            yield end, len(rendered), False


def refuse_special_tokens(
    conversation: Conversation, special_tokens: Collection[str], *, num_ahead: int = 0
) -> None:
    """For who would rather refuse the text of special tokens in messages than have it as text.

    The first ``num_ahead`` messages are not the caller's own, and not counted: they are of a named prompt.

    Raises:
        ConversationError: a message contains such text; names the message and the token.
    """
    found = re.compile(longest_first(special_tokens))
    for index, message in enumerate(conversation.messages):
        texts = [message.content, message.reasoning, message.name or ""]
        texts += [part for call in message.tool_calls for part in (call.name, call.arguments)]
        for text in texts:
            if match := found.search(text):
                own = index - num_ahead
                raise ConversationError(
                    f"{'the named prompt' if own < 0 else f'messages[{own}]'} contains the special token "
                    f"{match[0]!r}, which is refused here",
                    index=None if own < 0 else own,
                )


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """``value``, made of JSON types, with every string in it changed, the keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    return value


def _clean(text: str, escape: str) -> str:
    return text.replace(escape, "") if escape else text


def _char_class(chars: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any one of ``chars`` in any letter case."""
    distinct = sorted(set(chars))
    if not distinct:
        return re.compile("(?!)")
    return re.compile("[" + "".join(re.escape(char) for char in distinct) + "]", re.IGNORECASE)
