"""Whether a request is given kept answers: what the operator says, and what its ``Cache-Control`` does."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from ..types import CacheControl

AnswersFor: TypeAlias = Literal["asked", "greedy", "all"]
"""Which requests: those that ask for it, also those whose answer is not drawn (temperature 0), or all."""

SemanticFor: TypeAlias = Literal["off", "asked", "all"]
"""Who is given the answers of questions that mean the same: nobody, those that ask, or all that answers are
kept for."""

SEMANTIC_FOR: Final[tuple[SemanticFor, ...]] = ("off", "asked", "all")
HISTORIES: Final = ("exact", "guarded")
"""Whether a conversation has to be the same before its last message, or to mean the same turn by turn."""

ANSWERS_FOR: Final[tuple[AnswersFor, ...]] = ("asked", "greedy", "all")


def read_cache_control(
    header: str | None, asked: bool | None = None, *, semantic: bool | None = None, namespace: str = ""
) -> CacheControl:
    """The directives of a request's header. Unknown ones are passed over, as RFC 9111 says.

    ``no-store``: neither give nor keep. ``no-cache``: compute it, and keep that. ``max-age=N``: give nothing
    older. ``asked`` is what the request says beside it: true also where answers are drawn; false is
    ``no-store``. ``semantic`` and ``namespace``: see :class:`~ostinato.types.CacheControl`.
    """
    read = store = asked is not False
    max_age_s: float | None = None
    for directive in (header or "").lower().split(","):
        name, _, value = (part.strip() for part in directive.partition("="))
        if name == "no-store":
            read = store = False
        elif name == "no-cache":
            read = False
        elif name == "max-age":
            value = value.strip('"')
            age_s = float(value) if value.isascii() and value.isdecimal() and len(value) < 16 else 0.0
            max_age_s = age_s if max_age_s is None else min(max_age_s, age_s)
    return CacheControl(read, store, max_age_s, bool(asked), semantic, namespace)
