"""What a client says of its conversation: in a header, in a field, or in a request of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import Discriminator, Field, Tag

from ..errors import ParameterError
from ..types import MAX_SESSION_ID_CHARS, GenerationRequest, Session, SessionState
from .fields import Wire

SESSION_HEADER: Final = "x-ostinato-session"

SessionId = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID_CHARS)]
Seconds = Annotated[float, Field(gt=0)]


class SessionFields(Wire):
    """A session in full."""

    id: SessionId
    state: SessionState | None = None
    expires_in: Seconds | None = None

    def session(self) -> Session:
        return Session(self.id, self.state or "open", self.expires_in)


class SessionWord(Wire):
    """The body of a request that says how a session stands. ``cache_salt`` as its own requests had it."""

    state: SessionState
    expires_in: Seconds | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None

    def session(self, session_id: str) -> Session:
        return Session(session_id, self.state, self.expires_in)


def _id_or_object(value: Any) -> str | None:
    if isinstance(value, str):
        return "<id>"
    return "<object>" if isinstance(value, dict) else None


SessionGiven = Annotated[
    Annotated[SessionId, Tag("<id>")] | Annotated[SessionFields, Tag("<object>")],
    Discriminator(_id_or_object),
]


def session_of(given: str | SessionFields | None) -> Session | None:
    """A request's field ``session``."""
    return given.session() if isinstance(given, SessionFields) else Session(given) if given else None


def session_in_header(text: str | None) -> Session | None:
    """``ID; state=closed; expires_in=60`` of the header, both parts optional.

    Raises:
        ParameterError: it has another form.
    """
    if text is None:
        return None
    session_id, *parts = (part.strip() for part in text.split(";"))
    state: Any = "open"
    expires_in_s = None
    for part in parts:
        name, _, value = (each.strip() for each in part.partition("="))
        if name == "state":
            state = value
        elif name == "expires_in":
            try:
                expires_in_s = float(value)
            except ValueError:
                raise ParameterError(
                    f"The header {SESSION_HEADER} needs a number of seconds in 'expires_in'.", param="session"
                ) from None
        else:
            raise ParameterError(
                f"The header {SESSION_HEADER} has an id and after it 'state' and 'expires_in', nothing else.",
                param="session",
            )
    return Session(session_id, state, expires_in_s)


def with_session(requests: Sequence[GenerationRequest], header: str | None) -> Sequence[GenerationRequest]:
    """Requests with the header's session where they have none of their own.

    Raises:
        ParameterError: the header has another form, or several prompts are said to be one session.
    """
    session = requests[0].session or session_in_header(header)
    if session is not None and len(requests) > 1:
        raise ParameterError("A session is one prompt after the other, not several at once.", param="session")
    return requests if session is None else [replace(request, session=session) for request in requests]
