"""Prompts with a name and variables, and how much of each was found in the cache.

A named prompt is the beginning of a conversation: messages, in whose contents a variable is written
``{{name}}``. What stands for it is text: it is never read as a template again.
"""

from __future__ import annotations

import re
import threading
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..errors import ClientError, ParameterError
from ..types import Message, Usage
from .conversation import conversation_from_dicts

MAX_PROMPTS: Final = 256
"""How many prompts a registry takes. Their names are labels of metrics, so there must be an end to them."""

_VARIABLE = re.compile(r"\{\{ *([A-Za-z_][A-Za-z0-9_]*) *\}\}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a text with variables: stable text, or the variable of that name."""

    text: str
    is_variable: bool = False


def parts_of(text: str) -> Iterator[Part]:
    """Stable text and variables, in order."""
    end = 0
    for match in _VARIABLE.finditer(text):
        if match.start() > end:
            yield Part(text[end : match.start()])
        yield Part(match[1], is_variable=True)
        end = match.end()
    if end < len(text):
        yield Part(text[end:])


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """The first messages of a conversation, with variables in their contents, under a name."""

    name: str
    messages: tuple[Message, ...]

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables in the order of their first use."""
        contents = (message.content for message in self.messages)
        return tuple(
            dict.fromkeys(part.text for text in contents for part in parts_of(text) if part.is_variable)
        )

    def fill(self, values: Mapping[str, str]) -> tuple[Message, ...]:
        """The messages with a value for every variable.

        Raises:
            ParameterError: a value is missing, is no text, or belongs to no variable.
        """
        variables = self.variables
        for name in variables:
            if not isinstance(values.get(name), str):
                raise ParameterError(
                    f"the prompt {self.name!r} needs a text for {name!r}", param=f"prompt.variables.{name}"
                )
        for name in values:
            if name not in variables:
                raise ParameterError(
                    f"the prompt {self.name!r} has no variable {name!r}", param="prompt.variables"
                )
        return tuple(
            replace(
                message,
                content="".join(
                    values[part.text] if part.is_variable else part.text for part in parts_of(message.content)
                ),
            )
            for message in self.messages
        )


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

    def __init__(self, prompts: Iterable[NamedPrompt] = ()) -> None:
        self._prompts: dict[str, NamedPrompt] = {}
        self._statistics: dict[str, PromptStatistics] = {}
        self._lock = threading.Lock()
        for prompt in prompts:
            self.register(prompt.name, prompt.messages)

    def register(self, name: str, messages: str | Sequence[Mapping[str, Any] | Message]) -> NamedPrompt:
        """Keep messages under a name; a text is one message of the user.

        Raises:
            ParameterError: the name is none, or taken by another prompt, or there are too many.
            ConversationError: the messages break a rule.
        """
        if not _NAME.fullmatch(name):
            raise ParameterError(
                f"a prompt cannot be called {name!r}: letters, digits, '.', '_' and '-', 64 at most",
                param="name",
            )
        given = [Message("user", messages)] if isinstance(messages, str) else messages
        prompt = NamedPrompt(name, conversation_from_dicts(given, roles=_AnyRole()).messages)
        with self._lock:
            if self._prompts.get(name, prompt) != prompt:
                raise ParameterError(f"the name {name!r} is taken by another prompt", param="name")
            if name not in self._prompts and len(self._prompts) == MAX_PROMPTS:
                raise ParameterError(f"there are {MAX_PROMPTS} prompts already", param="name")
            self._prompts[name] = prompt
            self._statistics.setdefault(name, PromptStatistics())
        return prompt

    def fill(self, name: str, values: Mapping[str, str]) -> tuple[Message, ...]:
        """The messages of a prompt with its variables filled in.

        Raises:
            ParameterError: there is no such prompt, or the values do not fit its variables.
        """
        return self._prompt(name).fill(values)

    def record(self, name: str, usage: Usage) -> None:
        """Count a request that was made with the prompt ``name``; what is loaded here does so by itself.

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
            raise ParameterError(
                f"there is no prompt {name[:80]!r}", param="prompt.name", code="prompt_not_found"
            )
        return prompt


class _AnyRole:
    """Roles are looked at when the prompt is used: only then is it known which the template has."""

    def __contains__(self, role: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def read_prompts(file: Path) -> tuple[NamedPrompt, ...]:
    """Prompts out of a TOML file: a table for each, with ``text``, or with ``messages`` (role, content).

    Raises:
        ParameterError: it cannot be read; the message names the file and the prompt.
    """
    try:
        with file.open("rb") as opened:
            tables = tomllib.load(opened)
    except (OSError, ValueError) as error:  # a fault in TOML or in its encoding is a ValueError
        raise ParameterError(f"{file} cannot be read: {error}", param="prompts") from error
    registry = PromptRegistry()
    prompts: list[NamedPrompt] = []
    for name, table in tables.items():
        if not isinstance(table, dict) or len(table) != 1 or not table.keys() <= {"text", "messages"}:
            raise ParameterError(f"{file}: [{name}] must have text or messages, and no more", param="prompts")
        given: Any = table.get("text", table.get("messages"))
        if "text" in table and not isinstance(given, str):
            raise ParameterError(f"{file}: text of [{name}] must be text", param="prompts")
        try:
            prompts.append(registry.register(name, given))
        except ClientError as error:
            raise ParameterError(f"{file}: [{name}]: {error}", param="prompts") from error
    return tuple(prompts)
