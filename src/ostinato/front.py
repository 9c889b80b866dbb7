"""The response caches in front of a runtime: a request that was answered before does not get there.

::

    request ─► equal one kept, or under way? ─► (one that means the same?) ─► the runtime ─► keep the answer

A :class:`Front` has the runtime's own methods, so the doors do not know which of the two they talk to. What
an equal request is says :mod:`ostinato.responses.digest`; the second cache, where there is one, has to be
given.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

import orjson

from .delivery import Cancellable, iterate, stream
from .events import AnswerLookedUp, AnswerOutcome, Observer, RequestServed, ReuseLayer
from .kv.terms import model_id, prompt_id, tenant_of
from .ports import Clock, Tokenizer
from .prompt.template import reads_clock
from .responses.chunks import is_whole
from .responses.control import AnswersFor
from .responses.digest import request_key
from .responses.exact import Asked, Exact, Found, Joined, Missing
from .responses.semantic import Sought
from .responses.semantic_chats import Alike
from .runtime import Health, Prepared, Runtime
from .types import Chunk, Conversation, GenerationRequest, Served, Session, Usage


class SecondCache(Protocol):
    """What may know an answer where no equal request was answered. It decides itself whom it serves."""

    def find(
        self, request: GenerationRequest, asked: Asked, name: Callable[[GenerationRequest], bytes], /
    ) -> Alike | Sought[Chunk] | None:
        """Called in the thread that prepares a request. ``name`` gives the exact cache's key of another
        request that all else is equal for. ``None``: it has no part in this one."""

    def file(self, sought: Sought[Chunk], chunks: Sequence[Chunk], /) -> None:
        """A whole answer that was computed. Called in the engine's thread: must neither wait nor raise."""

    def feedback(self, entry_id: str, is_good: bool, tenant: str | None = None, /) -> bool:
        """What somebody thought of an answer of that tenant; false where there is no such."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that can be started: it is answered already, waits with others, or is prepared for the
    engine."""

    request: GenerationRequest
    asked: Asked | None
    found: Found[Chunk] | Joined[Chunk] | Alike | Missing
    prepared: Prepared | None
    arrived_s: float
    sought: Sought[Chunk] | None = None


class FrontHandle:
    """A request under way. ``outcome`` says who answers; ``served`` what is known of a kept answer by now."""

    __slots__ = ("_call", "outcome", "served")

    def __init__(self, outcome: AnswerOutcome, served: Served | None, call: Cancellable | None) -> None:
        self.outcome: AnswerOutcome | None = outcome
        self.served = served
        self._call = call

    def cancel(self) -> None:
        """No more of it, please. Whoever waits for the same answer still gets it."""
        if self._call is not None:
            self._call.cancel()


class Front:
    """Thread-safe, as the runtime is.

    Args:
        runtime: what answers in the end.
        exact: the cache of equal requests; closed with this.
        clock: for the times in usage.
        answers_for: see :data:`~ostinato.responses.control.AnswersFor`.
        ttl_of: for how long a tenant's answers may be kept at most, by its id.
        second: asked where the exact cache has nothing; closed with this.
    """

    def __init__(
        self,
        runtime: Runtime,
        exact: Exact[Chunk],
        clock: Clock,
        *,
        answers_for: AnswersFor = "greedy",
        ttl_of: Callable[[str], float] = lambda tenant: inf,
        second: SecondCache | None = None,
    ) -> None:
        self.runtime = runtime
        self.exact = exact
        self.second = second
        self._clock = clock
        self._answers_for = answers_for
        self._ttl_of = ttl_of
        self._model = model_id(runtime.weights_digest)
        self._habits = orjson.dumps(runtime.assembler.habits, option=orjson.OPT_SORT_KEYS).decode()

    # ------------------------------------------------------------ requests

    def prepare(self, request: GenerationRequest) -> Ready:
        """Looks for the answer, and where there is none makes the request ready for the engine.

        CPU work, and a wait for the store: call it off an event loop.

        Raises:
            ClientError: what is wrong with the request, by name.
        """
        arrived_s = self._clock.monotonic()
        asked, prepared, name = self._asked(request)
        found: Found[Chunk] | Joined[Chunk] | Alike | Missing = Missing()
        sought: Sought[Chunk] | None = None
        if asked is not None:
            found = self.exact.find(asked)
            if self.second is not None and isinstance(found, Missing):
                like = self.second.find(request, asked, name)
                if isinstance(like, Alike):
                    found = like
                else:
                    sought = like
        if isinstance(found, Missing) and prepared is None:
            prepared = self.runtime.prepare(request)
        return Ready(request, asked, found, prepared, arrived_s, sought)

    def num_prompt_tokens(self, request: GenerationRequest) -> int:
        """As :meth:`~ostinato.runtime.Runtime.num_prompt_tokens`."""
        return self.runtime.num_prompt_tokens(request)

    def start(self, ready: Ready, deliver: Callable[[Chunk], None]) -> FrontHandle:
        """Begins to deliver an answer; one that is kept comes at once, in this thread.

        Raises:
            QueueFullError: too many requests wait.
            ShuttingDownError: no more requests are taken.
        """
        found, request = ready.found, ready.request
        if isinstance(found, Missing):
            if ready.asked is None:
                return self._compute(ready, deliver)
            found = self.exact.lead(ready.asked, found, self._call(ready), self._fit(ready))
        elif request.session is not None:  # the runtime hears of it with the requests that it gets
            self.runtime.tell_session(request.session, request.salt)
        if isinstance(found, Joined):
            outcome: AnswerOutcome = "miss" if found.is_leader else "joined"
            served = None if found.is_leader else Served("joined")
            prepared = ready.prepared if served is None else None
            self._say(ready, outcome, served, 0, 0 if prepared is None else len(prepared.tokens))
            sink = deliver if served is None else self._retimed(ready, served, deliver)
            found.passenger.start(sink)
            return FrontHandle(outcome, served, found.passenger)
        if isinstance(found, Alike):
            chunks, served = found.chunks, found.served
        else:
            chunks, served = found.pieces, Served("exact", found.age_s, found.entry_id)
        sink = self._retimed(ready, served, deliver)
        for chunk in chunks:
            sink(chunk)
        usage = chunks[-1].usage
        assert usage is not None, "a kept answer without its end"
        self._say(ready, served.layer, served, usage.completion_tokens, usage.prompt_tokens)
        return FrontHandle(served.layer, served, None)

    def iterate(self, ready: Ready) -> Iterator[Chunk]:
        """Start a request and yield its chunks; closing the iterator cancels it."""
        return iterate(lambda deliver: self.start(ready, deliver))

    def stream(self, ready: Ready) -> AsyncGenerator[Chunk, None]:
        """The same for asyncio; closing the iterator or cancelling its task cancels the request at once."""
        return stream(lambda deliver: self.start(ready, deliver))

    # ------------------------------------------------------------ inside

    def _asked(
        self, request: GenerationRequest
    ) -> tuple[Asked | None, Prepared | None, Callable[[GenerationRequest], bytes]]:
        """What the exact cache is asked (``None`` where it has no part in it), and what names requests."""

        def name(other: GenerationRequest) -> bytes:
            return request_key(identity, other, *more)

        control, identity, more = request.cache_control, dict[str, str](), list[bytes]()
        if request.is_warming or not (control.read or control.store) or not self._serves(request):
            return None, None, name
        runtime, prepared = self.runtime, None
        if (use := request.named_prompt) is not None:
            messages = runtime.prompts.fill(use.name, use.variables)
            more.append(repr(messages).encode("utf-8", "surrogatepass"))
        if isinstance(request.prompt, Conversation) and reads_clock(runtime.template):
            prepared = runtime.prepare(request)  # the prompt says what time it is
            more.append(prepared.tokens.tobytes())
        identity |= {
            "namespace": runtime.assembler.namespace.digest,
            "revision": runtime.revision,
            "habits": self._habits,
        }
        try:
            key = name(request)
        except ValueError:
            return None, prepared, name
        tenant = tenant_of(request.salt)
        ttl_s = inf if request.cache_ttl_s is None else request.cache_ttl_s
        asked = Asked(
            key,
            tenant,
            self._model,
            "" if use is None else prompt_id(use.name),
            control,
            min(ttl_s, self._ttl_of(tenant)),
            # A deadline counts from one's own arrival: nobody's answer is cut short by another's.
            may_join=request.deadline_s is None and runtime.deadline_s == inf,
        )
        return asked, prepared, name

    def _serves(self, request: GenerationRequest) -> bool:
        if request.cache_control.asked or self._answers_for == "all":
            return True
        return self._answers_for == "greedy" and request.params.temperature == 0

    def _compute(self, ready: Ready, deliver: Callable[[Chunk], None]) -> FrontHandle:
        """The runtime's answer to what the exact cache has no part in."""
        assert ready.prepared is not None, "a request that is neither answered nor prepared"
        if not ready.request.is_warming:
            self._say(ready, "bypass", None, 0, len(ready.prepared.tokens))
        return FrontHandle("bypass", None, self.runtime.start(ready.prepared, deliver))

    def _call(self, ready: Ready) -> Callable[[Callable[[Chunk], None]], Cancellable]:
        prepared = ready.prepared
        assert prepared is not None, "a request that is neither answered nor prepared"
        return lambda sink: self.runtime.start(prepared, sink)

    def _fit(self, ready: Ready) -> Callable[[Sequence[Chunk]], bool]:
        def is_fit(chunks: Sequence[Chunk]) -> bool:
            is_fit = is_whole(chunks, ready.request)
            if is_fit and self.second is not None and ready.sought is not None:
                self.second.file(ready.sought, chunks)
            return is_fit

        return is_fit

    def _retimed(
        self, ready: Ready, served: Served, deliver: Callable[[Chunk], None]
    ) -> Callable[[Chunk], None]:
        """``deliver``, with this request's own times in the usage, and who answered."""
        first_s: float | None = None

        def sink(chunk: Chunk) -> None:
            nonlocal first_s
            passed_s = self._clock.monotonic() - ready.arrived_s
            first_s = passed_s if first_s is None else first_s
            if (usage := chunk.usage) is not None:
                usage = _served(usage, served, first_s, passed_s)
                chunk = replace(chunk, usage=usage)
                if not ready.request.is_warming:
                    space = self.runtime.assembler.namespace.with_salt(ready.request.salt).digest
                    reason = chunk.finish_reason or "stop"
                    self.runtime.observe(RequestServed(reason, usage, ready.request, space))
            deliver(chunk)

        return sink

    def _say(
        self, ready: Ready, outcome: AnswerOutcome, served: Served | None, num_tokens: int, num_prompt: int
    ) -> None:
        layers: tuple[ReuseLayer, ...] = () if ready.asked is None else ("exact",)
        if self.second is not None and outcome in ("semantic", "miss", "bypass"):
            layers += ("semantic",)
        age_s = 0.0 if served is None else served.age_s
        self.runtime.observe(AnswerLookedUp(outcome, age_s, num_tokens, num_prompt, layers))

    # ------------------------------------------------------------ what else the doors need

    @property
    def model_name(self) -> str:
        return self.runtime.model_name

    @property
    def revision(self) -> str:
        return self.runtime.revision

    @property
    def created_s(self) -> int:
        return self.runtime.created_s

    @property
    def max_model_len(self) -> int:
        return self.runtime.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        return self.runtime.tokenizer

    @property
    def observers(self) -> list[Observer]:
        return self.runtime.observers

    @property
    def rated(self) -> SecondCache | None:
        """What learns from feedback, if anything does."""
        return self.second

    def tell_session(self, session: Session, salt: str = "") -> bool:
        return self.runtime.tell_session(session, salt)

    def health(self) -> Health:
        return self.runtime.health()

    async def drain(self, timeout_s: float) -> None:
        await self.runtime.drain(timeout_s)

    def close(self) -> None:
        """Close what is kept; after the runtime, whose last answers are still to be written."""
        if self.second is not None:
            self.second.close()
        self.exact.close()


def _served(usage: Usage, served: Served, first_s: float, total_s: float) -> Usage:
    return replace(
        usage,
        cached_tokens=usage.prompt_tokens,
        written_tokens=0,
        ttft_s=first_s,
        queue_s=0.0,
        total_s=total_s,
        loaded_tokens=0,
        load_s=0.0,
        served=served,
    )
