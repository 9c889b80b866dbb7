"""The last requests: what they brought, and for the holder of the admin key what they asked."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final
from uuid import uuid4

from ...events import MatchStop, RequestPattern, RequestRecord, reuse_of
from ...kv.terms import Selection, prompt_id, tenant_of
from ...ports import Clock
from ...types import Conversation, FinishReason, GenerationRequest, TokenArray, Usage, num_common

MAX_REQUESTS: Final = 1000
MAX_CONTENT_TOKENS: Final = 2 << 20
MAX_CONTENT_AGE_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Content:
    """What was asked: kept for a while, and only where somebody may see it."""

    request: GenerationRequest
    tokens: TokenArray
    expires_s: float


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """A request that ended, as the pages show it. There is no text in it.

    ``id`` is the answer's, ``name`` that by which it is asked for here; ``tenant`` and ``namespace`` are
    digests. ``part_tokens``: lengths of the prompt's parts, from marker to marker. ``num_messages`` is 0 of a
    raw prompt.
    """

    name: str
    id: str
    arrived_s: float
    tenant: str
    namespace: str
    pattern: RequestPattern
    finish_reason: FinishReason
    usage: Usage
    stop: MatchStop
    part_tokens: tuple[int, ...]
    num_choices: int
    num_messages: int

    @property
    def ended_s(self) -> float:
        return self.arrived_s + self.usage.total_s

    @property
    def reused_tokens(self) -> int:
        return sum(reuse_of(self.usage).values())

    @property
    def computed_tokens(self) -> int:
        return self.usage.prompt_tokens - self.reused_tokens

    @property
    def hit_rate(self) -> float | None:
        return self.reused_tokens / self.usage.prompt_tokens if self.usage.prompt_tokens else None


@dataclass(slots=True)
class _Entry:
    seen: RecentRequest
    content: Content | None = field(default=None, repr=False)


class RecentRequests:
    """Remembers a thousand requests. Any thread.

    Where that is wanted it keeps what they asked as well: up to two million tokens, an hour at most, no
    longer than KV of them may be found, and never what was purged.
    """

    def __init__(self, clock: Clock, ttl_s: Callable[[GenerationRequest], float] | None) -> None:
        """``ttl_s``: for how long what a request asked may be kept; ``None``: nothing is."""
        self._clock = clock
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._with_content: deque[_Entry] = deque()  # some may have lost theirs
        self._content_tokens = 0

    def add(self, record: RequestRecord, *, with_content: bool = True) -> None:
        """One more request; ``with_content`` false: what it asked was purged before it came here."""
        request = record.request
        assert request is not None, "a record of nobody's request"
        prompt = request.prompt
        content = None
        if self._ttl_s is not None and record.tokens is not None and with_content:
            ended_s = record.arrived_s + record.usage.total_s
            expires_s = ended_s + min(self._ttl_s(request), MAX_CONTENT_AGE_S)
            content = Content(request, record.tokens, expires_s)
        with self._lock:
            name = record.id or f"local-{uuid4().hex[:16]}"
            while name in self._entries:  # several prompts of one HTTP request have one id
                name = f"{record.id}.{uuid4().hex[:4]}"
            seen = RecentRequest(
                name=name,
                id=record.id,
                arrived_s=record.arrived_s,
                tenant=tenant_of(request.salt),
                namespace=record.namespace,
                pattern=record.pattern,
                finish_reason=record.finish_reason,
                usage=record.usage,
                stop=record.stop,
                part_tokens=tuple(part.num_tokens for part in record.segments),
                num_choices=request.num_choices,
                num_messages=len(prompt.messages) if isinstance(prompt, Conversation) else 0,
            )
            self._put(_Entry(seen, content))

    def _put(self, entry: _Entry) -> None:
        self._entries[entry.seen.name] = entry
        if len(self._entries) > MAX_REQUESTS:
            _, oldest = self._entries.popitem(last=False)
            self._forget(oldest)
        if entry.content is None:
            return
        self._content_tokens += len(entry.content.tokens)
        self._with_content.append(entry)
        while self._content_tokens > MAX_CONTENT_TOKENS or len(self._with_content) > MAX_REQUESTS:
            self._forget(self._with_content.popleft())

    def _forget(self, entry: _Entry) -> None:
        if entry.content is not None:
            self._content_tokens -= len(entry.content.tokens)
            entry.content = None

    def purged(self, selection: Selection) -> None:
        """Forget what these requests asked. What they brought stays: there is no text in it."""
        now_s = self._clock.now()
        with self._lock:
            for entry in self._entries.values():
                seen = entry.seen
                is_old = selection.takes_entry(prompt_id(seen.usage.prompt_name), now_s - seen.arrived_s)
                if selection.tenant in (None, seen.tenant) and is_old:
                    self._forget(entry)

    def forget_expired(self) -> None:
        """Forget what may not be kept any more."""
        now_s = self._clock.now()
        with self._lock:
            for entry in self._with_content:
                if entry.content is not None and entry.content.expires_s <= now_s:
                    self._forget(entry)
            while self._with_content and self._with_content[0].content is None:
                self._with_content.popleft()

    # ------------------------------------------------------------ to look at

    def newest(
        self, num: int, is_wanted: Callable[[RecentRequest], bool] = lambda seen: True
    ) -> list[RecentRequest]:
        """The newest first."""
        found: list[RecentRequest] = []
        with self._lock:
            for entry in reversed(self._entries.values()):
                if len(found) == num:
                    break
                if is_wanted(entry.seen):
                    found.append(entry.seen)
        return found

    def get(self, name: str) -> tuple[RecentRequest, Content | None] | None:
        """One request, and what it asked if that is still known."""
        self.forget_expired()
        with self._lock:
            entry = self._entries.get(name)
            return None if entry is None else (entry.seen, entry.content)

    def records(self, block_tokens: int) -> list[RequestRecord]:
        """Those whose text is known, the oldest first, with it, and with no digests."""
        self.forget_expired()
        with self._lock:
            pairs = [(entry.seen, entry.content) for entry in self._entries.values()]
        return [
            RequestRecord(
                seen.name,
                seen.arrived_s,
                seen.finish_reason,
                seen.usage,
                seen.namespace,
                block_tokens,
                (),
                (),
                seen.stop,
                seen.pattern,
                request=replace(content.request, salt=seen.tenant),
                tokens=content.tokens,
            )
            for seen, content in pairs
            if content is not None
        ]

    def alike(self, name: str, num: int) -> list[tuple[RecentRequest, int]]:
        """Requests whose text is known, too, by how many tokens they begin like this one, the most first."""
        self.forget_expired()
        with self._lock:
            mine = self._entries.get(name)
            content = None if mine is None else mine.content
            others = [(entry.seen, entry.content) for entry in self._entries.values() if entry is not mine]
        if mine is None or content is None:
            return []
        found = [
            (seen, num_common(other.tokens, content.tokens) if seen.namespace == mine.seen.namespace else -1)
            for seen, other in others
            if other is not None
        ]
        return sorted(found, key=lambda each: (-each[1], -each[0].arrived_s))[:num]

    def users_of(self, namespace: str, path: bytes, num: int) -> list[RecentRequest]:
        """The newest requests whose prompts begin with these tokens (int32 bytes)."""
        self.forget_expired()
        length = len(path) // 4
        with self._lock:
            entries = [entry for entry in reversed(self._entries.values()) if entry.content is not None]
        found: list[RecentRequest] = []
        for entry in entries:
            content = entry.content
            if content is None or entry.seen.namespace != namespace or len(content.tokens) < length:
                continue
            if content.tokens[:length].tobytes() == path:
                found.append(entry.seen)
                if len(found) == num:
                    break
        return found
