"""From ids that arrive one by one to text that may be shown, with stop strings."""

from __future__ import annotations

from ..errors import ParameterError
from ..ports import Tokenizer


class Detokenizer:
    """The text of one answer while it is generated.

    ``push`` gives the text that is certain now: it holds back unfinished characters, and text that may turn
    out to begin a stop string. Without stop strings, all it gives, with ``finish``, is exactly
    ``tokenizer.decode`` of all ids. An answer ends where the first stop string is complete, and that stop
    string is not part of it; of two that are complete at the same character, the longer one counts. So the
    text does not depend on how it was cut into tokens.

    Args:
        tokenizer: of the model that generates.
        stop: the stop strings.

    Raises:
        ParameterError: a stop string is empty.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        if "" in stop:
            raise ParameterError("a stop string must not be empty", param="stop")
        self.stopped: str | None = None
        self._stream = tokenizer.text_stream()
        self._matchers = [_Matcher(text) for text in dict.fromkeys(stop)]
        self._held = ""

    def push(self, token_id: int) -> str:
        """One more token: the text that is certain now. Nothing more comes once ``stopped`` is set."""
        if self.stopped is not None:
            return ""
        return self._scan(self._stream.push(token_id))

    def flush(self) -> str:
        """What is held back as the possible beginning of a stop string, which now cannot be completed."""
        text, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.length = 0
        return text

    def finish(self) -> str:
        """No more tokens: the rest of the text. May still find a stop string in it."""
        if self.stopped is not None:
            return ""
        text = self._scan(self._stream.finish())
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _scan(self, new: str) -> str:
        if not self._matchers:
            return new
        text = self._held + new
        start = len(self._held)
        for index, character in enumerate(new, start + 1):
            longest: _Matcher | None = None
            for matcher in self._matchers:
                if matcher.advance(character) and (longest is None or len(matcher.text) > len(longest.text)):
                    longest = matcher
            if longest is not None:
                self.stopped = longest.text
                self._held = ""
                return text[: index - len(longest.text)]
        certain = len(text) - max(matcher.length for matcher in self._matchers)
        self._held = text[certain:]
        return text[:certain]


class _Matcher:
    """Knuth, Morris and Pratt: how much of ``text`` the characters so far end with, a step a character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        # fallback[n]: the longest proper beginning of text that text[:n] ends with
        self._fallback = [0] * (len(text) + 1)
        length = 0
        for end in range(1, len(text)):
            while length and text[end] != text[length]:
                length = self._fallback[length]
            length += text[end] == text[length]
            self._fallback[end + 1] = length

    def advance(self, character: str) -> bool:
        """Take one character; whether ``text`` is complete with it."""
        length = self.length
        while length and character != self.text[length]:
            length = self._fallback[length]
        self.length = length + (character == self.text[length])
        return self.length == len(self.text)
