"""Requests to the embedded engine as questions for the semantic cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from blake3 import blake3

from ..types import Chunk, Conversation, GenerationRequest, Message, Served
from .control import SemanticFor
from .exact import Asked
from .semantic import Match, Question, Semantic, Sought

_CONTEXT: Final = "ostinato semantic space v1"


@dataclass(frozen=True, slots=True)
class Alike:
    """A kept answer to a question that is held to mean the same."""

    chunks: Sequence[Chunk]
    served: Served


def space_of(name: bytes, *more: str) -> bytes:
    """A space: the name of a request that lacks what may differ, and what else has to be equal."""
    hasher = blake3(name, derive_key_context=_CONTEXT)
    for text in more:
        data = text.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()


def wants(semantic: bool | None, whose: SemanticFor) -> bool:
    """Whether a request is given such answers, by what it says and what the operator says."""
    return semantic is True if whose == "asked" else semantic is not False and whose == "all"


class SemanticChats:
    """The second cache of :class:`~ostinato.front.Front`.

    Args:
        semantic: decides; closed with this.
        whose: requests of whom.
        is_guarded: whether earlier turns are judged instead of having to be equal.
    """

    def __init__(
        self, semantic: Semantic[Chunk], *, whose: SemanticFor = "asked", is_guarded: bool = False
    ) -> None:
        self.semantic = semantic
        self._whose = whose
        self._is_guarded = is_guarded

    def find(
        self, request: GenerationRequest, asked: Asked, name: Callable[[GenerationRequest], bytes]
    ) -> Alike | Sought[Chunk] | None:
        question = self._question(request, asked, name)
        if question is None:
            return None
        found = self.semantic.find(question)
        if isinstance(found, Match):
            return Alike(found.pieces, Served("semantic", found.age_s, found.entry_id, found.details()))
        return found

    def file(self, sought: Sought[Chunk], chunks: Sequence[Chunk]) -> None:
        self.semantic.file(sought, chunks)

    def feedback(self, entry_id: str, is_good: bool, tenant: str | None = None) -> bool:
        return self.semantic.feedback(entry_id, is_good, tenant)

    def close(self) -> None:
        self.semantic.close()

    def _question(
        self, request: GenerationRequest, asked: Asked, name: Callable[[GenerationRequest], bytes]
    ) -> Question | None:
        control, prompt = request.cache_control, request.prompt
        if not wants(control.semantic, self._whose) or request.continue_final_message:
            return None
        if not isinstance(prompt, Conversation) or not prompt.messages or not _is_plain(prompt.messages[-1]):
            return None
        messages = prompt.messages
        first = len(messages) - 1
        if self._is_guarded:
            first = _first_of_turns(messages)
        blanks = tuple(replace(message, content="") for message in messages[first:])
        stripped = replace(request, prompt=replace(prompt, messages=(*messages[:first], *blanks)))
        space = space_of(name(stripped), self.semantic.identity, control.namespace)
        return Question(
            asked.key,
            space,
            messages[-1].content,
            tuple(message.content for message in messages[first:-1]),
            asked.tenant,
            asked.model,
            asked.prompt,
            control,
            asked.ttl_s,
        )


def text_of(chunks: Sequence[Chunk]) -> str:
    """The first choice's text, to compare answers by."""
    return "".join(chunk.text for chunk in chunks if chunk.choice_index == 0)


def _is_plain(message: Message) -> bool:
    return message.role == "user" and not message.tool_calls and message.tool_call_id is None


def _first_of_turns(messages: Sequence[Message]) -> int:
    """Where the plain turns of user and assistant begin that lead to the last message."""
    first = len(messages) - 1
    while first >= 2:
        answer, question = messages[first - 1], messages[first - 2]
        if answer.role != "assistant" or answer.tool_calls or answer.reasoning or not _is_plain(question):
            break
        first -= 2
    return first
