"""Prompts with a name and variables, and how much of each was found in the cache.

A variable is written ``{{name}}``. What stands for it is text: it is never read as a template again.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import ParameterError
from ..types import Usage

_VARIABLE = re.compile(r"\{\{ *([A-Za-z_][A-Za-z0-9_]*) *\}\}")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a named prompt: stable text, or the variable of that name."""

    text: str
    is_variable: bool = False


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A text with variables, under a name."""

    name: str
    text: str

    def parts(self) -> Iterator[Part]:
        """Stable text and variables, in order."""
        end = 0
        for match in _VARIABLE.finditer(self.text):
            if match.start() > end:
                yield Part(self.text[end : match.start()])
            yield Part(match[1], is_variable=True)
            end = match.end()
        if end < len(self.text):
            yield Part(self.text[end:])

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables in the order of their first use."""
        return tuple(dict.fromkeys(part.text for part in self.parts() if part.is_variable))

    def fill(self, values: Mapping[str, str]) -> str:
        """The text with a value for every variable.

        Raises:
            ParameterError: a value is missing, is no text, or belongs to no variable.
        """
        for name in self.variables:
            if not isinstance(values.get(name), str):
                raise ParameterError(f"the prompt {self.name!r} needs a text for {name!r}", param=name)
        for name in values:
            if name not in self.variables:
                raise ParameterError(f"the prompt {self.name!r} has no variable {name!r}", param=name)
        return "".join(values[part.text] if part.is_variable else part.text for part in self.parts())


@dataclass(frozen=True, slots=True)
class PromptStatistics:
    """What the requests of one named prompt brought, in tokens of the whole prompts they were part of."""

    num_calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Hit tokens by looked-up tokens; 0 before the first call."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class PromptRegistry:
    """Named prompts and their statistics. Safe to use from several threads."""

    def __init__(self) -> None:
        self._prompts: dict[str, NamedPrompt] = {}
        self._statistics: dict[str, PromptStatistics] = {}
        self._lock = threading.Lock()

    def register(self, name: str, text: str) -> NamedPrompt:
        """Keep ``text`` under ``name``.

        Raises:
            ParameterError: the name is empty, or taken by another text.
        """
        prompt = NamedPrompt(name, text)
        with self._lock:
            if not name or self._prompts.setdefault(name, prompt) != prompt:
                raise ParameterError(f"the name {name!r} is empty, or taken by another prompt", param="name")
            self._statistics.setdefault(name, PromptStatistics())
        return prompt

    def fill(self, name: str, **values: str) -> str:
        """The text of a prompt with its variables filled in.

        Raises:
            ParameterError: there is no such prompt, or the values do not fit its variables.
        """
        return self._prompt(name).fill(values)

    def record(self, name: str, usage: Usage) -> None:
        """Count a request that was made with the prompt ``name``.

        Raises:
            ParameterError: there is no such prompt.
        """
        self._prompt(name)
        with self._lock:
            before = self._statistics[name]
            self._statistics[name] = PromptStatistics(
                before.num_calls + 1,
                before.prompt_tokens + usage.prompt_tokens,
                before.cached_tokens + usage.cached_tokens,
            )

    def statistics(self) -> dict[str, PromptStatistics]:
        """The statistics of every prompt, by name."""
        with self._lock:
            return dict(self._statistics)

    def _prompt(self, name: str) -> NamedPrompt:
        with self._lock:
            prompt = self._prompts.get(name)
        if prompt is None:
            raise ParameterError(f"there is no prompt {name!r}", param="name")
        return prompt
