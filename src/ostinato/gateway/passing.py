"""One request that is passed on: looked up, translated, planned for and sent; and its answer back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any, Final, Protocol

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import OstinatoError, ParameterError, ShuttingDownError, UpstreamError
from ..server.answering import EVENT_STREAM
from ..server.caching import ANSWER_HEADER, CACHE_HEADER, semantic_headers
from ..types import CacheControl
from .answers import AnswerCache, PassedAnswer, PassedRequest, Question
from .events import EventReader, items
from .events import Route as Kind
from .keeping import Keeper
from .misses import answers_diagnosis
from .planning import Incoming, Planning, Sent
from .relay import Answer, Relay, answer_headers, body_of
from .spelling import loads
from .translation import Json, StreamTranslator, Target, Translation
from .upstreams import Upstream

logger = logging.getLogger("ostinato.gateway")

REPAIRS_HEADER: Final = "x-ostinato-repairs"
MISS_HEADER: Final = "x-ostinato-cache-miss"
# A longer stream is passed on and not kept.
MAX_KEPT_STREAM_BYTES: Final = 16 << 20
READ_OUT_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it came: ``path`` and ``body`` are the client's, ``kind`` is ``None`` where nothing is
    generated."""

    upstream: Upstream
    path: str
    kind: Kind | None
    body: bytes
    parsed: Mapping[str, Any]
    headers: Mapping[str, str]
    tenant: str
    prompt_name: str
    salt: str
    control: CacheControl
    query: str = ""
    translation: Translation | None = None
    target: Target = field(default_factory=Target)

    @property
    def is_stream(self) -> bool:
        return self.parsed.get("stream") is True


class Surroundings(Protocol):
    """What a request needs of the gateway."""

    relay: Relay
    planning: Planning
    answers: AnswerCache | None
    keeper: Keeper

    def begin(self, task: asyncio.Task[None], /) -> None: ...

    def end(self, task: asyncio.Task[None], /) -> None: ...

    async def enter(self, sent: Sent, usage: Mapping[str, Any] | None, /) -> None: ...


class Passing(Response):
    """A request that is passed on when it is called. However it ends, the upstream's connection is let go."""

    def __init__(self, gateway: Surroundings, call: Call, release: Callable[[], None]) -> None:
        super().__init__()
        self._gateway, self._call, self._release = gateway, call, release
        self._own_headers: list[tuple[bytes, bytes]] = []
        self._is_answered = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._run(send))
        self._gateway.begin(task)
        watcher = asyncio.ensure_future(_until_gone(receive))
        try:
            done, _ = await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if task not in done and self._is_answered:
                await task  # nobody can leave any more: only the books are still open
            elif task not in done:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                raise ClientDisconnect
            if task.cancelled():
                raise ShuttingDownError("The gateway is shutting down and ended this request.")
            task.result()
        finally:
            watcher.cancel()
            if not task.done():
                task.cancel()
            self._release()
            self._gateway.end(task)

    async def _run(self, send: Send) -> None:
        gateway, call = self._gateway, self._call
        question: Question | None = None
        if gateway.answers is not None and call.kind is not None:
            question = await asyncio.to_thread(gateway.answers.ask, _asked(call))
            self._own_headers = [(CACHE_HEADER.encode(), question.outcome.encode())]
            if (known := question.known) is not None:
                age = (b"age", str(int(question.age_s)).encode())
                if question.entry_id:
                    self._own_headers.append((ANSWER_HEADER.encode(), question.entry_id.encode()))
                self._own_headers += semantic_headers(question.details)
                headers = [(b"content-type", known.content_type), *self._own_headers, age]
                await _send_whole(send, 200, headers, known.body)
                return
        path, body, parsed = call.path, call.body, call.parsed
        if call.translation is not None:
            path = call.translation.path
            parsed = translated(call.translation, call.parsed, call.target)
            body = orjson.dumps(parsed)
        sent: Sent | None = None
        if call.kind is not None:
            betas = call.headers.get("anthropic-beta", "")
            incoming = Incoming(path, body, parsed, call.tenant, call.prompt_name, call.salt, betas)
            body, sent = await gateway.planning.prepare(call.upstream, incoming, today())
            self._own_headers += _told(sent)
        usage: Mapping[str, Any] | None = None
        answer: PassedAnswer | None = None
        try:
            target = f"{path}?{call.query}" if call.query else path
            async with gateway.relay.answer(call.upstream, target, body, call.headers) as response:
                usage, answer = await self._answer(response, send, sent)
        finally:
            if sent is not None:
                await gateway.enter(sent, usage)
        if sent is not None and usage is not None and call.upstream.keep_alive:
            gateway.keeper.follow(call.upstream, path, body, call.headers, sent)
        if answer is not None and question is not None:
            await asyncio.to_thread(question.keep, answer)

    async def _answer(
        self, response: Answer, send: Send, sent: Sent | None
    ) -> tuple[Mapping[str, Any] | None, PassedAnswer | None]:
        upstream = self._call.upstream
        if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise UpstreamError(
                f"The upstream '{upstream.name}' compressed its answer, and was asked not to."
            )
        if 300 <= response.status_code < 400:
            # Clients would follow it, and take their keys along.
            raise UpstreamError(f"The upstream '{upstream.name}' says that it is elsewhere.")
        if upstream.key and response.status_code in (401, 403):
            # What it says of the key is for whoever set it, and may have a part of it.
            logger.error("%s refuses the key of this gateway: %d", upstream.name, response.status_code)
            raise UpstreamError(f"The upstream '{upstream.name}' refuses the key of this gateway.")
        kind = response.headers.get("content-type", "")
        if self._call.is_stream and response.status_code == 200 and kind.startswith("text/event-stream"):
            return await self._stream(response, send, sent)
        return await self._whole(response, send, sent)

    async def _whole(
        self, response: Answer, send: Send, sent: Sent | None
    ) -> tuple[Mapping[str, Any] | None, PassedAnswer | None]:
        call = self._call
        body = b"".join([piece async for piece in body_of(call.upstream, response)])
        content_type = response.headers.get("content-type", "application/json").encode("latin-1")
        usage, answer = None, None
        if response.status_code == 200:
            try:
                parsed = loads(body)
            except ValueError:
                raise UpstreamError(
                    f"The upstream '{call.upstream.name}' sent an answer that is not JSON."
                ) from None
            if sent is not None:
                await self._gateway.planning.begun(sent, time.monotonic())
            if isinstance(parsed, dict):
                _note(sent, parsed.get("id"), answers_diagnosis(parsed))
                found = parsed.get("usage")
                usage = found if isinstance(found, dict) else None
            if sent is not None and usage is None:
                self._gateway.planning.num_untold_usages += 1
            if call.translation is not None:
                body = translated_answer(call.translation, parsed)
            answer = PassedAnswer(content_type, body)
        elif call.translation is not None:
            body, content_type = call.translation.error(response.status_code, body), b"application/json"
        headers = [(b"content-type", content_type), *self._headers_back(response)]
        self._is_answered = True
        await _send_whole(send, response.status_code, headers, body)
        return usage, answer

    async def _stream(
        self, response: Answer, send: Send, sent: Sent | None
    ) -> tuple[Mapping[str, Any] | None, PassedAnswer | None]:
        call = self._call
        path = call.translation.path if call.translation is not None else ""
        reader = EventReader(
            _KIND_OF_PATH.get(path, call.kind or "chat"), hides_usage=sent is not None and sent.hides_usage
        )
        translator = None if call.translation is None else call.translation.stream(call.parsed)
        pieces: list[bytes] = []
        num_kept = 0
        is_kept = self._gateway.answers is not None
        headers = [(b"content-type", EVENT_STREAM), *self._headers_back(response)]
        is_started = False
        body = body_of(call.upstream, response)
        async for data in _ended(body, reader):
            events, fault = reader.whole_events(data)
            if sent is not None and reader.has_content:
                await self._gateway.planning.begun(sent, time.monotonic())
            if translator is not None:
                events, fault = _translated_events(translator, events, fault)
            if events:
                if not is_started:
                    is_started = True
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": events, "more_body": True})
            if is_kept:
                pieces.append(events)
                num_kept += len(events)
                if num_kept > MAX_KEPT_STREAM_BYTES:
                    is_kept = False
                    pieces.clear()
            if fault is not None:
                raise fault
            if reader.is_complete:
                break
        reader.finish()
        if translator is not None and not reader.is_failed:
            last = b"".join(guarded(translator.finish()))
            pieces.append(last)
            await send({"type": "http.response.body", "body": last, "more_body": True})
        _note(sent, reader.answer_id, reader.diagnosis)
        self._is_answered = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        await _read_out(body)
        usage = reader.usage or None
        if usage is None and not reader.is_failed:
            self._gateway.planning.num_untold_usages += 1
        if reader.is_failed or not is_kept:
            return usage, None
        return usage, PassedAnswer(EVENT_STREAM, b"".join(pieces))

    def _headers_back(self, response: Answer) -> list[tuple[bytes, bytes]]:
        own = {name for name, _ in self._own_headers}
        return [
            *(pair for pair in answer_headers(response.headers) if pair[0] not in own),
            *self._own_headers,
        ]


_KIND_OF_PATH: Final[Mapping[str, Kind]] = {"/v1/messages": "messages", "/v1/chat/completions": "chat"}


def _asked(call: Call) -> PassedRequest:
    # All that decides what it will be asked: another address, API or repair is another upstream.
    where = call.upstream
    upstream = " ".join([where.name, where.url, where.protocol, *sorted(where.repair)])
    return PassedRequest(
        call.path,
        upstream,
        str(call.parsed["model"]),
        call.salt,
        call.parsed,
        call.headers,
        call.control,
        call.is_stream,
        call.body,
        call.query,
    )


def _told(sent: Sent) -> list[tuple[bytes, bytes]]:
    """What the client is told of its request, in headers."""
    headers = []
    if sent.repairs:
        headers.append((REPAIRS_HEADER.encode(), "; ".join(sent.repairs).encode("latin-1", "replace")))
    if sent.diagnosis is not None and sent.diagnosis.miss is not None:
        # As JSON in ASCII: texts of prompts have line breaks and worse.
        headers.append((MISS_HEADER.encode(), _ascii(sent.diagnosis.miss.as_json())))
    return headers


def _ascii(item: Json) -> bytes:
    text = orjson.dumps(item).decode()
    return "".join(char if " " <= char < "\x7f" else f"\\u{ord(char) & 0xFFFF:04x}" for char in text).encode()


def _note(sent: Sent | None, answer_id: Any, diagnosis: Any) -> None:
    if sent is not None and sent.diagnosis is not None:
        sent.diagnosis.answer_id = answer_id if isinstance(answer_id, str) and len(answer_id) < 200 else None
        sent.diagnosis.vendor = diagnosis


# ---------------------------------------------------------------- translation, where anything may be wrong


def translated(translation: Translation, body: Mapping[str, Any], target: Target) -> Json:
    """The request in the upstream's words. Raises :class:`ParameterError`."""
    try:
        return translation.request(body, target)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise ParameterError(
            "The request has not the form that its API describes, and cannot be translated.", param="body"
        ) from error


def translated_answer(translation: Translation, parsed: Any) -> bytes:
    try:
        return orjson.dumps(translation.answer(parsed))
    except OstinatoError:
        raise
    except (AttributeError, TypeError, KeyError, ValueError, IndexError) as error:
        raise UpstreamError("The upstream's answer has not the form that its API describes.") from error


def _translated_events(
    translator: StreamTranslator, events: bytes, fault: UpstreamError | None
) -> tuple[bytes, UpstreamError | None]:
    """All that can be said, and the first thing that is wrong behind it."""
    made: list[bytes] = []
    try:
        for item in items(events):
            made.extend(guarded(translator.feed(item)))
    except UpstreamError as error:
        return b"".join(made), error
    return b"".join(made), fault


def guarded(events: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from events
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise UpstreamError("The upstream sent an event that has not the form its API describes.") from error


async def _ended(body: AsyncIterator[bytes], reader: EventReader) -> AsyncIterator[bytes]:
    """The stream, with the empty line behind its last event that some leave out."""
    async for data in body:
        yield data
    if reader.is_event_left:
        yield b"\n\n"


async def _read_out(body: AsyncIterator[bytes]) -> None:
    """Up to where the answer ends in HTTP, too, so that the connection can be used again.

    What comes behind the last event, and whether anything comes, is of no interest.
    """
    with suppress(UpstreamError, TimeoutError):
        async with asyncio.timeout(READ_OUT_S):
            async for _ in body:
                pass


async def _send_whole(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def today() -> date:
    return datetime.now(UTC).date()
