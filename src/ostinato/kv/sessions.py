"""What is said of a sequence's future: by how answers end, by sessions, by which of several answers goes on.

Hints reach the cache through here. None can make an answer wrong; at worst something is computed again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
from blake3 import blake3

from ostinato.ports import Clock
from ostinato.types import Session, SessionState, TokenArray, num_common

from .hashing import Namespace
from .manager import KVManager
from .policy import Outlook
from .trust import Trust

_STATES: dict[SessionState, Outlook] = {
    "open": Outlook.UNKNOWN,
    "idle": Outlook.LATER,
    "closed": Outlook.OVER,
}


def outlook_of(finish_reason: str, *, offers_tools: bool) -> Outlook:
    """What the end of an answer says of what will follow it.

    Tool calls are run and their results sent at once; an answer without one, from a model that could have
    called tools, is for somebody to read. "abort": whoever asked hung up.
    """
    if finish_reason == "tool_calls":
        return Outlook.SOON
    if finish_reason == "abort":
        return Outlook.ABANDONED
    return Outlook.LATER if offers_tools and finish_reason == "stop" else Outlook.UNKNOWN


@dataclass(slots=True)
class _Known:
    """A session's sequence as it was last; ``ends_s`` is when it will be over."""

    namespace: Namespace
    tokens: TokenArray
    ends_s: float = math.inf


@dataclass(slots=True)
class _Asked:
    """A prompt of several answers, and those that have come."""

    namespace: Namespace
    prompt: TokenArray
    answers: list[TokenArray] = field(default_factory=list)


class Sessions:
    """Knows the latest sequences of sessions and of prompts with several answers; tells the cache of them.

    At most ``max_sessions`` sessions and as many prompts, of ``max_tokens`` tokens in all either (4 bytes a
    token): the longest unused are forgotten, which takes nothing from the cache. Ids are kept as digests.
    A rule that obeys is told that something is over by those only who are mostly right (:class:`Trust`).
    Any thread may call anything.
    """

    def __init__(
        self, manager: KVManager, clock: Clock, *, max_sessions: int = 4096, max_tokens: int = 4 << 20
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._max_sessions, self._max_tokens = max_sessions, max_tokens
        self._lock = Lock()
        self._trust = Trust(manager.block_size) if manager.obeys_hints else None
        self._known: OrderedDict[tuple[str, bytes], _Known] = OrderedDict()
        self._num_known_tokens = 0
        self._asked: OrderedDict[tuple[str, bytes], _Asked] = OrderedDict()
        self._num_asked_tokens = 0

    # ------------------------------------------------------------ from the engine

    def began(self, namespace: Namespace, tokens: TokenArray) -> None:
        """A request is under way: where it goes on from one of several answers, the others have lost."""
        with self._lock:
            lost = self._lost_to(namespace, tokens) if self._asked else []
            if self._trust is not None:
                self._trust.asked(namespace, tokens)
        for sequence in lost:
            self._tell(namespace, sequence, Outlook.OVER)

    def ended(
        self,
        namespace: Namespace,
        tokens: TokenArray,
        outlook: Outlook,
        *,
        session: Session | None = None,
        num_prompt: int = 0,
        num_choices: int = 1,
    ) -> None:
        """A sequence was answered; ``tokens`` (copied) are what of it was committed.

        ``outlook`` is what its answer says; a session that is not open says more.
        """
        if num_choices > 1:
            with self._lock:
                self._remember_answer(namespace, tokens, num_prompt)
        if session is not None:
            with self._lock:
                self._remember(namespace, tokens.copy(), session)
            outlook = _STATES[session.state] or outlook
        if outlook is not Outlook.UNKNOWN:
            self._tell(namespace, tokens, outlook)

    # ------------------------------------------------------------ from anyone

    def say(self, namespace: Namespace, session: Session) -> bool:
        """What became of a session, without a request; false when it is not known (any more)."""
        key = _key(namespace, session)
        with self._lock:
            known = self._known.get(key)
            if known is None:
                return False
            self._known.move_to_end(key)
            self._set_end(known, session)
            if session.state == "closed":
                self._forget(key)
        self._tell(namespace, known.tokens, _STATES[session.state])
        return True

    def expire(self) -> float:
        """Tells the cache of sessions whose time is up; returns the seconds until the next one's is."""
        now_s = self._clock.monotonic()
        with self._lock:
            over = [(key, known) for key, known in self._known.items() if known.ends_s <= now_s]
            for key, _ in over:
                self._forget(key)
            next_s = min((known.ends_s for known in self._known.values()), default=math.inf)
        for _, known in over:
            self._tell(known.namespace, known.tokens, Outlook.OVER)
        return next_s - now_s

    @property
    def num_sessions(self) -> int:
        return len(self._known)

    # ------------------------------------------------------------ inside

    def _tell(self, namespace: Namespace, tokens: TokenArray, outlook: Outlook) -> None:
        if self._trust is not None and outlook >= Outlook.ABANDONED:
            with self._lock:
                if not self._trust.said(namespace, tokens):
                    return
        self._manager.hint(namespace, tokens, outlook)

    def _remember(self, namespace: Namespace, tokens: TokenArray, session: Session) -> None:
        key = _key(namespace, session)
        if key in self._known:
            self._forget(key)
        if session.state == "closed":
            return
        known = self._known[key] = _Known(namespace, tokens)
        self._num_known_tokens += len(tokens)
        self._set_end(known, session)
        while len(self._known) > self._max_sessions or self._num_known_tokens > self._max_tokens:
            self._forget(next(iter(self._known)))

    def _set_end(self, known: _Known, session: Session) -> None:
        if session.expires_in_s is not None:
            known.ends_s = self._clock.monotonic() + session.expires_in_s

    def _forget(self, key: tuple[str, bytes]) -> None:
        self._num_known_tokens -= len(self._known.pop(key).tokens)

    def _remember_answer(self, namespace: Namespace, tokens: TokenArray, num_prompt: int) -> None:
        prompt = tokens[:num_prompt]
        key = namespace.digest, blake3(prompt.tobytes()).digest(16)
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _Asked(namespace, prompt.copy())
            self._num_asked_tokens += num_prompt
        self._asked.move_to_end(key)
        asked.answers.append(tokens[num_prompt:].copy())
        self._num_asked_tokens += len(tokens) - num_prompt
        while self._asked and (
            len(self._asked) > self._max_sessions or self._num_asked_tokens > self._max_tokens
        ):
            self._forget_asked(next(iter(self._asked)))

    def _forget_asked(self, key: tuple[str, bytes]) -> None:
        asked = self._asked.pop(key)
        self._num_asked_tokens -= len(asked.prompt) + sum(map(len, asked.answers))

    def _lost_to(self, namespace: Namespace, tokens: TokenArray) -> list[TokenArray]:
        """The sequences that ``tokens`` did not go on from, though it went on from a sibling of theirs."""
        for key, asked in self._asked.items():
            length = len(asked.prompt)
            if (
                key[0] != namespace.digest
                or len(tokens) <= length
                or not np.array_equal(tokens[:length], asked.prompt)
            ):
                continue
            rest = tokens[length:]
            common = [num_common(answer, rest) for answer in asked.answers]
            lost = [
                np.concatenate((asked.prompt, answer))
                for answer, number in zip(asked.answers, common, strict=True)
                if number < max(common)
            ]
            if lost:
                self._forget_asked(key)
            return lost
        return []


def _key(namespace: Namespace, session: Session) -> tuple[str, bytes]:
    return namespace.digest, blake3(session.id.encode("utf-8", "surrogatepass")).digest(16)
