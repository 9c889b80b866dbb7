"""A relay to one of several workers, as the router chooses, and to another where one fails too early."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2
import orjson

from ..errors import NoWorkerError, ParameterError, UpstreamError, UpstreamTimeoutError
from ..routing import Ask, Choice, Router, RoutingRule, Ticket
from .asking import BYTES_PER_TOKEN, ask_of, tells_nothing
from .events import items
from .relay import Answer, Relay, body_of
from .upstreams import Upstream

logger = logging.getLogger("ostinato.gateway")

WORKER_HEADER: Final = "x-ostinato-worker"
_ELSEWHERE_STATUS: Final = frozenset({429, 502, 503, 504, 529})
_MAX_HELD_BYTES: Final = 1 << 20
_PAUSE_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How workers are looked after.

    Attributes:
        rule: how they are chosen.
        cache_tokens: what the cache of each holds, roughly: how much is kept in mind of it.
        block_bytes: bytes of a prompt's JSON that have a name of their own.
        check_every_s: between two looks at a worker's ``/health``.
        check_timeout_s: after so long without an answer it is ill.
        max_tries: workers that a request is sent to at most, as long as none has begun to answer. A request
            that kills workers must not go through all of them.
        wait_s: how long a request waits for a worker when there is none.
    """

    rule: RoutingRule = field(default_factory=RoutingRule)
    cache_tokens: int = 1 << 20
    block_bytes: int = 512
    check_every_s: float = 2.0
    check_timeout_s: float = 5.0
    max_tries: int = 3
    wait_s: float = 10.0

    def __post_init__(self) -> None:
        if min(self.block_bytes, self.cache_tokens, self.max_tries) < 1:
            raise ParameterError("block_bytes, cache_tokens and max_tries are at least 1", param="fleet")
        if not min(self.check_every_s, self.check_timeout_s) > 0 or not self.wait_s >= 0:
            raise ParameterError("times have to be above 0", param="fleet")


@dataclass(slots=True)
class _State:
    worker: Upstream
    is_well: bool = True
    is_drained: bool = False


@dataclass(frozen=True, slots=True)
class _HeldAnswer:
    """An answer of which the beginning is here already: up to its first token, or all of it."""

    status_code: int
    headers: httpx2.Headers
    held: bytes
    rest: AsyncIterator[bytes] | None = None

    async def aiter_raw(self) -> AsyncIterator[bytes]:
        if self.held:
            yield self.held
        if self.rest is not None:
            async for piece in self.rest:
                yield piece


@dataclass(slots=True)
class _Attempt:
    """A request at one worker."""

    worker: Upstream
    ticket: Ticket
    response: httpx2.Response | None = None

    async def close(self) -> None:
        self.ticket.end()
        if self.response is not None:
            await self.response.aclose()


class FleetRelay(Relay):
    """Sends each request to one of ``workers``, which have equal models.

    What a client gets is of one worker from its first byte to its last: whatever a worker said before its
    first token is held back until then, so that another one can still answer.

    Args:
        workers: their names differ.
        options: how they are looked after.
        now_s: seconds that never go back.
        on_choice: told of every choice, and on_again of everything that was tried elsewhere, with the reason.
        on_open: told of workers that get requests from now on, or get none.
    """

    def __init__(
        self,
        workers: Sequence[Upstream],
        options: FleetOptions,
        *,
        now_s: Callable[[], float],
        max_connections: int = 1024,
        on_choice: Callable[[Choice], None] = lambda choice: None,
        on_again: Callable[[str, str], None] = lambda worker, reason: None,
        on_open: Callable[[str, bool], None] = lambda worker, is_open: None,
    ) -> None:
        super().__init__(max_connections=max_connections)
        if len({worker.name for worker in workers}) < len(workers) or not workers:
            raise ParameterError("workers need names of their own, and there has to be one", param="worker")
        self.options = options
        self._on_choice, self._on_again, self._on_open = on_choice, on_again, on_open
        block_tokens = max(options.block_bytes // BYTES_PER_TOKEN, 1)
        self.router = Router(options.rule, block_tokens=block_tokens, now_s=now_s)
        self._states = {worker.name: _State(worker) for worker in workers}
        for worker in workers:
            self.router.add(worker.name, num_blocks=max(options.cache_tokens // block_tokens, 1))
            on_open(worker.name, True)

    # ------------------------------------------------------------ one request

    @asynccontextmanager
    async def answer(
        self, upstream: Upstream, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Answer]:
        """The answer of a worker, from its first token on.

        Where all refuse, the last refusal. Raises:
            UpstreamError: those that were tried broke off, or could not be reached.
            NoWorkerError: there is none.
        """
        answer, close = await self._placed(path, body, headers)
        try:
            yield answer
        finally:
            await close()

    async def _placed(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[_HeldAnswer, Callable[[], Awaitable[None]]]:
        """The first answer that has begun, or the last refusal; and what lets go of it."""
        ask = ask_of(body, headers, block_bytes=self.options.block_bytes)
        tried: set[str] = set()
        refusal: _HeldAnswer | None = None
        failure: UpstreamError | None = None
        while len(tried) < self.options.max_tries:
            choice = await self._choice(ask, tried, waits=not tried)
            if choice is None:
                break
            tried.add(choice.worker)
            ticket = self.router.begin(ask, choice)
            self._on_choice(choice)
            attempt = _Attempt(self._states[choice.worker].worker, ticket)
            try:
                answer = await self._tried(attempt, path, body, headers)
            except UpstreamError as error:
                await attempt.close()
                failure = error
                self._failed(attempt)
                continue
            except BaseException:
                await attempt.close()
                raise
            if answer.status_code not in _ELSEWHERE_STATUS:
                return answer, attempt.close
            await attempt.close()
            refusal = answer
            self._on_again(choice.worker, "refused")
            if answer.status_code == 503:
                self._note(choice.worker, is_well=False)  # it drains, or is not ready: until it says so
        if refusal is not None:
            return refusal, _nothing
        raise failure or NoWorkerError("No worker is ready to take requests.")

    def _failed(self, attempt: _Attempt) -> None:
        name, is_reached = attempt.worker.name, attempt.response is not None
        self._on_again(name, "broke off" if is_reached else "unreachable")
        logger.warning("%s failed before its first token", name)
        self._note(name, is_well=False)

    async def _tried(
        self, attempt: _Attempt, path: str, body: bytes, headers: Mapping[str, str]
    ) -> _HeldAnswer:
        attempt.response = await self._head(attempt.worker, path, body, headers)
        return await self._begun(attempt.worker, attempt.response, attempt.ticket)

    async def _choice(self, ask: Ask, tried: set[str], *, waits: bool) -> Choice | None:
        """The router's; if there is no worker at all, the first that comes back in time."""
        left_s = self.options.wait_s
        while (choice := self.router.choose(ask, but=tried)) is None and waits and left_s > 0:
            await asyncio.sleep(_PAUSE_S)
            left_s -= _PAUSE_S
        return choice

    async def _head(
        self, worker: Upstream, path: str, body: bytes, headers: Mapping[str, str]
    ) -> httpx2.Response:
        try:
            return await self._send(worker, path, body, headers)
        except httpx2.ConnectError as error:
            self.router.forget(worker.name)  # nobody listens there: whoever comes next begins with nothing
            raise UpstreamError(f"The worker '{worker.name}' cannot be reached.") from error
        except httpx2.TimeoutException as error:
            raise UpstreamTimeoutError(f"The worker '{worker.name}' does not answer.") from error
        except httpx2.HTTPError as error:
            raise UpstreamError(f"The worker '{worker.name}' broke off.") from error

    async def _begun(self, worker: Upstream, response: httpx2.Response, ticket: Ticket) -> _HeldAnswer:
        """Reads a stream up to its first token, anything else to its end. Raises ``UpstreamError``."""
        headers = httpx2.Headers(response.headers)
        headers[WORKER_HEADER] = worker.name
        source = body_of(worker, response)
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        held = bytearray()
        if not is_stream or response.status_code != 200:
            async for piece in source:
                held += piece
            return _HeldAnswer(response.status_code, headers, bytes(held))
        is_over = True
        async for piece in source:
            held += piece
            told = [item for item in items(bytes(held)) if not tells_nothing(item)]
            if told and _is_error(told[0]):
                return _HeldAnswer(503, headers, orjson.dumps(told[0]))
            if told or len(held) > _MAX_HELD_BYTES:
                is_over = False
                break
        if is_over and b"[DONE]" not in held:
            raise UpstreamError(f"The worker '{worker.name}' ended its answer before it began.")
        ticket.first_token()
        return _HeldAnswer(200, headers, bytes(held), None if is_over else source)

    # ------------------------------------------------------------ looking after them

    async def watch(self) -> None:
        """Looks at all workers, again and again, until cancelled."""
        while True:
            await asyncio.sleep(self.options.check_every_s)
            await self.check()

    async def check(self) -> None:
        """Looks at all workers once."""
        await asyncio.gather(*(self._check(state.worker) for state in self._states.values()))

    async def _check(self, worker: Upstream) -> None:
        is_well = False
        try:
            response = await self._client.get(
                worker.url + "/health", timeout=self.options.check_timeout_s, headers={"accept": "*/*"}
            )
            is_well = response.status_code == 200
        except httpx2.ConnectError:
            self.router.forget(worker.name)
        except httpx2.HTTPError as error:
            logger.info("%s does not say how it is: %s", worker.name, type(error).__name__)
        self._note(worker.name, is_well=is_well)

    def drain(self, name: str, is_drained: bool) -> None:
        """Gives a worker no more requests, or some again. Raises ``ParameterError``: no such worker."""
        if name not in self._states:
            raise ParameterError(f"There is no worker '{name[:80]}'.", param="worker")
        self._states[name].is_drained = is_drained
        self._note(name, is_well=self._states[name].is_well)

    def _note(self, name: str, *, is_well: bool) -> None:
        state = self._states[name]
        if state.is_well is not is_well:
            logger.warning("%s is %s", name, "well again" if is_well else "ill: it gets no requests")
        state.is_well = is_well
        is_open = is_well and not state.is_drained
        if self.router.is_open(name) is not is_open:
            self.router.set_open(name, is_open)
            self._on_open(name, is_open)

    def workers(self) -> list[dict[str, Any]]:
        """How all are, for whoever looks after them."""
        return [
            {
                "name": name,
                "url": state.worker.url,
                "state": "drained" if state.is_drained else "well" if state.is_well else "ill",
                "num_running": self.router.num_running(name),
                "load_tokens": int(self.router.load_of(name)),
            }
            for name, state in self._states.items()
        ]

    async def models(self, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """What a worker says of its models: status and body. Raises ``UpstreamError``: none says anything."""
        for name, state in self._states.items():
            if self.router.is_open(name):
                try:
                    response = await self._client.get(
                        state.worker.url + "/v1/models",
                        headers=dict(headers),
                        timeout=self.options.check_timeout_s,
                    )
                except httpx2.HTTPError:
                    continue
                return response.status_code, response.content
        raise NoWorkerError("No worker is ready to take requests.")


async def _nothing() -> None:
    return


def _is_error(item: Mapping[str, Any]) -> bool:
    return "error" in item or item.get("type") in ("error", "response.failed")
