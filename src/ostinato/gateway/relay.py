"""One request to an upstream and its answer back: retries before anything was said, one clear end after."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Final, Protocol

import httpx2

from ..errors import UpstreamError, UpstreamTimeoutError
from .upstreams import Upstream

logger = logging.getLogger("ostinato.gateway")

MAX_ANSWER_BYTES: Final = 64 << 20
# Refused before anything was done: it may be sent again.
_RETRY_STATUS: Final = frozenset({429, 503, 529})
_FIRST_WAIT_S: Final = 0.5
_HOP_BY_HOP: Final = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
        "transfer-encoding", "upgrade", "host", "content-length", "accept-encoding", "expect",
    }
)  # fmt: skip
# Where vendors look for keys.
CREDENTIALS: Final = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
# Not for upstreams: keys are theirs, the rest is between the client and us, or says where the client is.
_OURS: Final = frozenset({*CREDENTIALS, "cookie", "x-request-id", "forwarded", "via", "x-real-ip"})
_NOT_BACK: Final = _HOP_BY_HOP | {
    "content-encoding",
    "content-type",
    "set-cookie",
    "x-request-id",
    "server",
    "date",
}


def joined_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by name; one that comes more than once is a list, but a key, of which the first counts."""
    found: dict[str, str] = {}
    for name_bytes, value_bytes in raw:
        name, value = name_bytes.decode("latin-1").lower(), value_bytes.decode("latin-1")
        if name not in found:
            found[name] = value
        elif name not in CREDENTIALS:
            found[name] += f", {value}"
    return found


def request_headers(
    upstream: Upstream, given: Mapping[str, str], *, is_open: bool, dropped: str = ""
) -> dict[str, str]:
    """What is passed on of a client's headers. Its own key only if this gateway asks for none of its own.

    ``dropped``: where requests are translated, the beginning of names that make no sense there.
    """
    between_neighbours = {name.strip().lower() for name in given.get("connection", "").split(",")}
    headers = {
        name: value
        for name, value in given.items()
        if name not in _HOP_BY_HOP
        and name not in _OURS
        and name not in between_neighbours
        and (upstream.own_headers or not name.startswith("x-ostinato-"))
        and not name.startswith("x-forwarded")
        and not (dropped and name.startswith(dropped))
    }
    headers["accept-encoding"] = "identity"  # so that what passes can be read
    if upstream.key:
        if upstream.protocol == "anthropic":
            headers["x-api-key"] = upstream.key
        else:
            headers["authorization"] = f"Bearer {upstream.key}"
    elif is_open:
        headers |= _callers_key(upstream, given) if dropped else _callers_headers(given)
    if upstream.protocol == "anthropic":
        headers.setdefault("anthropic-version", "2023-06-01")
    return headers


def _callers_headers(given: Mapping[str, str]) -> dict[str, str]:
    return {name: given[name] for name in CREDENTIALS if name in given}


def _callers_key(upstream: Upstream, given: Mapping[str, str]) -> dict[str, str]:
    """Where the upstream's API looks for it."""
    key = given.get("x-api-key") or given.get("authorization", "").removeprefix("Bearer ").strip()
    if not key:
        return {}
    return {"x-api-key": key} if upstream.protocol == "anthropic" else {"authorization": f"Bearer {key}"}


def answer_headers(given: httpx2.Headers) -> list[tuple[bytes, bytes]]:
    """What is passed back of an upstream's headers."""
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in given.multi_items()
        if name.lower() not in _NOT_BACK
    ]
    if "x-request-id" in given:
        headers.append((b"x-upstream-request-id", given["x-request-id"].encode("latin-1")))
    return headers


class Answer(Protocol):
    """An upstream's response as whoever passes it on reads it: its head is here, its body comes."""

    @property
    def status_code(self) -> int: ...

    @property
    def headers(self) -> httpx2.Headers: ...

    def aiter_raw(self) -> AsyncIterator[bytes]: ...


class Relay:
    """Connections to all upstreams, kept open."""

    def __init__(self, *, max_connections: int = 1024) -> None:
        # It logs addresses, and some vendors have keys in their queries.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        limits = httpx2.Limits(max_connections=max_connections, max_keepalive_connections=256)
        self._client = httpx2.AsyncClient(limits=limits, follow_redirects=False, trust_env=False)
        self._chance = random.Random()

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def answer(
        self, upstream: Upstream, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Answer]:
        """The upstream's response, its head only: its body is read by whoever asked.

        Raises:
            UpstreamError: it cannot be reached, or what it sends is not HTTP.
            UpstreamTimeoutError: it is silent.
        """
        for attempt in range(upstream.max_retries + 1):
            is_last = attempt == upstream.max_retries
            try:
                response = await self._send(upstream, path, body, headers)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                if is_last:
                    raise UpstreamError(f"The upstream '{upstream.name}' cannot be reached.") from error
                await asyncio.sleep(self._wait_s(attempt))
                continue
            except httpx2.TimeoutException as error:
                raise UpstreamTimeoutError(f"The upstream '{upstream.name}' does not answer.") from error
            except httpx2.HTTPError as error:
                raise UpstreamError(f"The upstream '{upstream.name}' broke off.") from error
            wait_s = self._retry_wait_s(upstream, response, attempt)
            if is_last or wait_s is None:
                break
            await response.aclose()
            logger.info("%s answered %d: again in %.1f s", upstream.name, response.status_code, wait_s)
            await asyncio.sleep(wait_s)
        try:
            yield response
        finally:
            await response.aclose()

    async def _send(
        self, upstream: Upstream, path: str, body: bytes, headers: Mapping[str, str]
    ) -> httpx2.Response:
        timeout = httpx2.Timeout(
            upstream.idle_timeout_s, connect=upstream.connect_timeout_s, pool=upstream.connect_timeout_s
        )
        # As they came: latin-1 is every byte as it is.
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        request = self._client.build_request(
            "POST", upstream.url + path, content=body, headers=raw, timeout=timeout
        )
        return await self._client.send(request, stream=True)

    def _wait_s(self, attempt: int) -> float:
        """Twice as long every time, and never the same for two clients."""
        return _FIRST_WAIT_S * float(2**attempt) * self._chance.uniform(0.5, 1.0)

    def _retry_wait_s(self, upstream: Upstream, response: httpx2.Response, attempt: int) -> float | None:
        """How long to wait before sending again; ``None``: the answer is passed on."""
        if response.status_code not in _RETRY_STATUS:
            return None
        asked_s = _asked_wait_s(response.headers.get("retry-after", ""))
        wait_s = self._wait_s(attempt) if asked_s is None else asked_s + self._chance.uniform(0, 0.1)
        return wait_s if 0 <= wait_s <= upstream.max_wait_s else None


def _asked_wait_s(retry_after: str) -> float | None:
    """Seconds, or until a date; ``None``: neither is said."""
    with suppress(ValueError):
        return float(retry_after)
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    return None


async def body_of(upstream: Upstream, response: Answer) -> AsyncIterator[bytes]:
    """The answer's bytes as they come.

    Raises:
        UpstreamError: it broke off, or does not end.
        UpstreamTimeoutError: it fell silent.
    """
    num_bytes = 0
    try:
        async for piece in response.aiter_raw():
            num_bytes += len(piece)
            if num_bytes > MAX_ANSWER_BYTES:
                raise UpstreamError(
                    f"The upstream '{upstream.name}' sent more than {MAX_ANSWER_BYTES} bytes."
                )
            yield piece
    except httpx2.TimeoutException as error:
        raise UpstreamTimeoutError(f"The upstream '{upstream.name}' fell silent.") from error
    except httpx2.HTTPError as error:
        raise UpstreamError(
            f"The upstream '{upstream.name}' broke off in the middle of its answer."
        ) from error
