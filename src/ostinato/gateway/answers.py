"""Kept answers in front of the upstreams: what was answered before is not asked again.

The cache is the server's (:mod:`ostinato.responses.exact`); an answer's pieces are its content type and its
bytes, so what comes again is what came, to the byte. Streams and whole answers are kept apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import inf, isfinite
from typing import Any, Final, Protocol

import orjson
from blake3 import blake3

from ..errors import OstinatoError
from ..events import AnswerLookedUp, AnswerOutcome, Observer
from ..kv.terms import model_id, tenant_id
from ..responses.control import AnswersFor
from ..responses.digest import body_key
from ..responses.exact import Asked, Exact, Found, Missing
from ..responses.semantic import Match, Sought
from ..types import CacheControl
from .alike import SemanticBodies
from .relay import CREDENTIALS

NO_INFLUENCE_HEADERS: Final = frozenset(
    {
        *("accept", "accept-encoding", "accept-language", "cache-control", "content-type", "user-agent"),
        *CREDENTIALS,  # whose it is: part of the salt
        *("idempotency-key", "origin", "referer", "traceparent", "tracestate", "baggage", "priority"),
    }
)
"""Headers that are passed on and have no part in an answer; nor have those that begin with one of:"""
_NO_INFLUENCE_PREFIXES: Final = ("x-stainless-", "sec-", "x-ostinato-")

_UNFINISHED: Final = frozenset({"failed", "cancelled", "queued", "in_progress"})


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """A request as it will be passed on. ``salt`` keeps tenants apart; ``path`` is its route.

    ``upstream`` names where it goes: another address is another upstream. ``raw`` is the body as it came.
    """

    path: str
    upstream: str
    model: str
    salt: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    control: CacheControl
    is_stream: bool
    raw: bytes = b""
    query: str = ""


@dataclass(frozen=True, slots=True)
class PassedAnswer:
    """A whole answer of an upstream: status 200, complete, well-formed. A stream's body is all its events."""

    content_type: bytes
    body: bytes


class Question(Protocol):
    """A request that was looked up. ``outcome`` says who answers; ``known`` is the kept answer, if there is
    one."""

    @property
    def outcome(self) -> AnswerOutcome: ...

    @property
    def known(self) -> PassedAnswer | None: ...

    @property
    def age_s(self) -> float: ...

    @property
    def entry_id(self) -> str:
        """Names the kept answer, where there is one."""

    @property
    def details(self) -> Mapping[str, Any]:
        """How the answer of another question was judged."""

    def keep(self, answer: PassedAnswer, /) -> None:
        """Told of the whole answer, and of nothing that failed or broke off. In a thread, as ``ask``."""


class AnswerCache(Protocol):
    """What may answer in an upstream's place."""

    def ask(self, request: PassedRequest, /) -> Question:
        """Looks for the answer to an equal request. Called in a thread, never on the event loop."""


class KeptAnswers:
    """:class:`AnswerCache` over the exact cache.

    Args:
        exact: where answers are; closed by whoever made it.
        answers_for: whose are kept and given.
        ttl_of: for how long a tenant's answers may be kept at most, by its id.
        observer: hears what requests met.
        second: asked where no equal request was answered; closed with this.
    """

    def __init__(
        self,
        exact: Exact[bytes],
        *,
        answers_for: AnswersFor,
        ttl_of: Callable[[str], float] = lambda tenant: inf,
        observer: Observer = lambda event: None,
        second: SemanticBodies | None = None,
    ) -> None:
        self.exact = exact
        self.second = second
        self._ttl_of = ttl_of
        self._answers_for = answers_for
        self._observe = observer

    def ask(self, request: PassedRequest) -> _Asked:
        asked, name = self._asked(request)
        found = Missing() if asked is None else self.exact.find(asked)
        like: Match[bytes] | Sought[bytes] | None = None
        if asked is not None and self.second is not None and isinstance(found, Missing):
            like = self.second.find(request.path, request.body, request.control, asked, name)
        outcome = _outcome(asked, found, like)
        kept = found if isinstance(found, Found) else like if isinstance(like, Match) else None
        age_s = 0.0 if kept is None else kept.age_s
        self._observe(AnswerLookedUp(outcome, age_s))
        return _Asked(
            self,
            asked,
            found if isinstance(found, Missing) else None,
            outcome,
            None if kept is None else PassedAnswer(*kept.pieces),
            age_s,
            "" if kept is None else kept.entry_id,
            like.details() if isinstance(like, Match) else {},
            like if isinstance(like, Sought) else None,
        )

    def close(self) -> None:
        """Writes what waits to be written, and closes the store."""
        if self.second is not None:
            self.second.semantic.close()
        self.exact.close()

    def _asked(self, request: PassedRequest) -> tuple[Asked | None, Callable[[Mapping[str, Any]], bytes]]:
        """What the exact cache is asked (``None`` where it has no part in it), and what names bodies."""
        control, body = request.control, request.body
        serves = (
            control.asked
            or self._answers_for == "all"
            or (self._answers_for == "greedy" and body.get("temperature") == 0)
        )
        headers = {
            name: value
            for name, value in request.headers.items()
            if name not in NO_INFLUENCE_HEADERS and not name.startswith(_NO_INFLUENCE_PREFIXES)
        }
        identity = {"upstream": request.upstream, "salt": request.salt, "is_stream": request.is_stream}
        # How a stream is to be written is part of what is kept here, unlike in the server.
        written = orjson.dumps(
            [headers, body.get("stream_options"), request.query], option=orjson.OPT_SORT_KEYS
        )

        def name(other: Mapping[str, Any]) -> bytes:
            return body_key(identity, request.path, other, written)

        if not serves or not (control.read or control.store) or _is_ambiguous(request.raw):
            return None, name
        try:
            key = name(body)
        except ValueError:
            return None, name
        # Calls are not shared: an upstream's second answer need not go on as its first one began.
        tenant = tenant_id(request.salt)
        model, ttl_s = model_id(request.model), self._ttl_of(tenant)
        return Asked(key, tenant, model, control=control, ttl_s=ttl_s, may_join=False), name


@dataclass(frozen=True, slots=True)
class _Asked:
    answers: KeptAnswers
    asked: Asked | None
    missing: Missing | None
    outcome: AnswerOutcome
    known: PassedAnswer | None
    age_s: float
    entry_id: str
    details: Mapping[str, Any]
    sought: Sought[bytes] | None

    def keep(self, answer: PassedAnswer) -> None:
        if self.asked is None or self.missing is None or not self.asked.control.store:
            return
        pieces = [answer.content_type, answer.body]
        self.answers.exact.file(self.asked, self.missing, pieces, _is_answer)
        if self.sought is not None and self.answers.second is not None and _is_answer(pieces):
            self.answers.second.semantic.file(self.sought, pieces)


def _is_ambiguous(raw: bytes) -> bool:
    """Whether it says more than is read here, so that different bodies would seem equal.

    A key twice in an object: which one counts is the upstream's to decide. Numbers that no double is equal
    to, integers of more than 64 bits.
    """

    def checked(pairs: list[tuple[str, Any]]) -> None:
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError

    try:
        json.loads(
            raw or b"{}",
            object_pairs_hook=checked,
            parse_int=_checked_integer,
            parse_float=_checked_decimal,
            parse_constant=_refused,
        )
    except (ValueError, RecursionError):
        return True
    return False


def _checked_integer(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= (value := int(digits)) < 1 << 64:
        raise ValueError
    return value


def _checked_decimal(digits: str) -> float:
    value = float(digits)
    if not isfinite(value) or Decimal(digits) != Decimal(repr(value)):
        raise ValueError
    return value


def _refused(name: str) -> float:
    raise ValueError(name)


def _outcome(asked: Asked | None, found: object, like: object) -> AnswerOutcome:
    if asked is None:
        return "bypass"
    if isinstance(like, Match):
        return "semantic"
    return "exact" if isinstance(found, Found) else "miss"


def _is_answer(pieces: Sequence[bytes]) -> bool:
    """Whether it answers: some upstreams report failures with status 200, or answer later."""
    content_type, body = pieces
    if content_type.startswith(b"text/event-stream"):
        return True  # whoever read it to its end knows
    try:
        item = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(item, dict) and not item.get("error") and item.get("status") not in _UNFINISHED


def caller_salt(salt: str, headers: Mapping[str, str], *, upstream_key: str | None) -> str:
    """Whose answers: the tenant's of this gateway; without such, of whoever holds the key that is passed
    on."""
    credentials = [headers.get(name, "") for name in CREDENTIALS]
    if salt or upstream_key or not any(credentials):
        return salt
    framed = b"".join(len(part).to_bytes(4, "little") + part.encode() for part in credentials)
    return f"b3:{blake3(framed, derive_key_context='ostinato gateway caller v1').hexdigest()}"


class PassedForm:
    """:class:`~ostinato.responses.exact.Form` of an upstream's answers: content type, and body."""

    def ends(self, piece: bytes) -> bool:
        return True

    def fails(self, piece: bytes) -> bool:
        return False

    def last_of(self, piece: bytes) -> bytes:
        return piece

    def failure(self, error: OstinatoError) -> bytes:
        return str(error).encode()

    def is_same(self, one: bytes, other: bytes) -> bool:
        return one == other

    def encode(self, pieces: Sequence[bytes]) -> bytes:
        content_type, body = pieces
        return len(content_type).to_bytes(2, "little") + content_type + body

    def decode(self, data: bytes) -> list[bytes]:
        end = 2 + int.from_bytes(data[:2], "little")
        if len(data) < end:
            raise ValueError("an answer without its content type")
        return [data[2:end], data[end:]]
