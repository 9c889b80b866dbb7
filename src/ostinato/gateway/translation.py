"""A request in one vendor's API for an upstream with another's: what both directions share.

Nothing is left out in silence: a field is said in the other API's words, or is known to have no part in the
answer, or the request is refused and the field named. So are fields that nobody here knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import orjson

from ..errors import ParameterError, UpstreamError
from ..providers.accounting import TokenUse, read_usage

Json: TypeAlias = dict[str, Any]
NOT_TRANSLATABLE: Final = "not_translatable"


@dataclass(frozen=True, slots=True)
class Target:
    """What the upstream is known to take.

    Attributes:
        vendor: whose API it is, strictly; empty: a server of one's own that speaks it, with additions.
        has_breakpoints: whether it knows ``prompt_cache_breakpoint`` (of OpenAI's kind only).
        max_tokens: how long answers may be where a request does not say; 0: it has to.
    """

    vendor: str = ""
    has_breakpoints: bool = False
    max_tokens: int = 0


class StreamTranslator(Protocol):
    """One answer's events."""

    def feed(self, item: Mapping[str, Any], /) -> Iterator[bytes]:
        """The client's events for one of the upstream's. Raises :class:`~ostinato.errors.UpstreamError`."""

    def finish(self) -> Iterator[bytes]:
        """The upstream has ended as it should: what is still to be said."""


@dataclass(frozen=True, slots=True)
class Translation:
    """One direction. ``path`` is the upstream's; ``headers_dropped`` are the beginnings of headers' names."""

    path: str
    headers_dropped: str
    request: Callable[[Mapping[str, Any], Target], Json]
    answer: Callable[[Mapping[str, Any]], Json]
    stream: Callable[[Mapping[str, Any]], StreamTranslator]
    error: Callable[[int, bytes], bytes]


def refused(param: str, why: str) -> ParameterError:
    return ParameterError(
        f"{param}: {why}. The model is behind another vendor's API here, and this cannot be said in it.",
        param=param,
        code=NOT_TRANSLATABLE,
    )


def check_fields(body: Mapping[str, Any], known: frozenset[str], where: str = "") -> None:
    """Refuse what nobody here knows; ``None`` says nothing. Raises :class:`ParameterError`."""
    for name, value in body.items():
        if name not in known and value is not None:
            raise refused(f"{where}{name}"[:120], "unknown to the gateway")


def only(body: Mapping[str, Any], name: str, harmless: tuple[Any, ...]) -> None:
    """Refuse a field unless it asks for nothing. Raises :class:`ParameterError`."""
    value = body.get(name)
    if value is not None and value not in harmless:
        raise refused(name, "no counterpart")


def listed(value: Any, where: str) -> list[Mapping[str, Any]]:
    """A list of objects. Raises :class:`ParameterError`."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ParameterError(f"{where} has to be a list of objects", param=where)
    return value


def text_of(value: Any, where: str) -> str:
    """Raises :class:`ParameterError`."""
    if not isinstance(value, str):
        raise ParameterError(f"{where} has to be text", param=where)
    return value


# ---------------------------------------------------------------- usage


def messages_usage(usage: Any) -> Json:
    """A report of OpenAI's kind as Anthropic counts: input is what no cache had a part in."""
    use = read_usage("deepseek", usage) or TokenUse()
    return {
        "input_tokens": use.uncached,
        "cache_creation_input_tokens": use.num_written,
        "cache_read_input_tokens": use.read,
        "output_tokens": use.output,
    }


def chat_usage(usage: Any) -> Json:
    """A report of Anthropic's kind as OpenAI counts: input is all of it."""
    use = read_usage("anthropic", usage) or TokenUse()
    return {
        "prompt_tokens": use.input,
        "completion_tokens": use.output,
        "total_tokens": use.input + use.output,
        "prompt_tokens_details": {"cached_tokens": use.read, "cache_write_tokens": use.num_written},
    }


# ---------------------------------------------------------------- errors

_ANTHROPIC_KINDS: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def message_in(body: bytes | Mapping[str, Any]) -> str:
    """What an upstream's error says, in either API's shape."""
    try:
        item = orjson.loads(body) if isinstance(body, bytes) else body
    except orjson.JSONDecodeError:
        item = None
    error = item.get("error", item) if isinstance(item, Mapping) else None
    text = error.get("message") if isinstance(error, Mapping) else error
    return text if isinstance(text, str) and text else "The upstream refused, and did not say why."


def anthropic_error(status: int, body: bytes) -> bytes:
    """An error of OpenAI's shape in Anthropic's."""
    kind = _ANTHROPIC_KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message_in(body)}})


def openai_error(status: int, body: bytes) -> bytes:
    """An error of Anthropic's shape in OpenAI's."""
    kind = (
        "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    )
    try:
        theirs = orjson.loads(body)["error"]["type"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        theirs = None
    error = {"message": message_in(body), "type": kind, "param": None, "code": theirs}
    return orjson.dumps({"error": error})


def arguments_of(text: Any, where: str) -> Json:
    """A call's arguments, which have to be a JSON object. Raises ``ValueError``."""
    try:
        value = orjson.loads(text or "{}")
    except (orjson.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{where} is not JSON") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a JSON object")
    return value


def unreadable(what: str) -> UpstreamError:
    return UpstreamError(f"The upstream's answer cannot be translated: {what}.")
