"""Two requests beside each other: where their prompts part, why, and where they are the same again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from ...diagnose.diff import Diff, compare
from ...diagnose.material import Asked
from ...diagnose.writing import TEMPLATE, TEXT, Words, Written
from ...types import Conversation, TokenArray
from .recent import Content, RecentRequest

MAX_SHOWN_CHARS: Final = 4_000
MAX_STRETCHES: Final = 200

Origins: TypeAlias = Callable[[Content], TokenArray | None]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the comparison, in the order of the second prompt.

    ``same``: both have ``now``. ``differs``: one has ``was`` there, the other ``now``; ``place`` is the token
    of the second where that begins, ``segment`` what it is of. ``moved``: the first has ``now`` elsewhere.
    """

    kind: Literal["same", "differs", "moved"]
    num_tokens: int
    now: str
    was: str = ""
    num_was: int = 0
    place: int = 0
    segment: str = ""
    causes: tuple[str, ...] = ()


def written(seen: RecentRequest, content: Content, owners: TokenArray | None, words: Words) -> Written:
    """A remembered request as a comparison takes it: the very tokens that were looked up."""
    request, prompt = content.request, content.request.prompt
    body = {"params": repr(request.params), "choices": (request.num_choices, request.best_of)}
    conversation = prompt if isinstance(prompt, Conversation) else None
    asked = Asked(
        seen.name,
        conversation=conversation,
        text=prompt if isinstance(prompt, str) else None,
        token_ids=prompt if isinstance(prompt, tuple) else None,
        body=body,
        salt=request.salt,
    )
    if conversation is None or owners is None:
        label = TEXT if conversation is None else TEMPLATE
        return Written(asked, content.tokens, np.zeros(len(content.tokens), np.int32), (label,), words)
    roles = [f"messages[{i}] ({message.role})" for i, message in enumerate(conversation.messages)]
    return Written(asked, content.tokens, (owners + 1).astype(np.int32), (TEMPLATE, *roles), words)


def diff_page(
    a: tuple[RecentRequest, Content],
    b: tuple[RecentRequest, Content],
    *,
    origins: Origins,
    words: Words,
    block_tokens: int,
) -> dict[str, Any]:
    """Values for ``diff.html``: the second as it was asked after the first."""
    one, other = (written(seen, content, origins(content), words) for seen, content in (a, b))
    diff = compare(one, other, block_tokens=block_tokens)
    return {
        "a": a[0],
        "b": b[0],
        "diff": diff,
        "cause": diff.cause,
        "cause_name": diff.cause.kind.replace("_", " "),
        "stretches": stretches(diff),
        "is_same_space": a[0].namespace == b[0].namespace,
    }


def stretches(diff: Diff) -> list[Stretch]:
    """The comparison in order. Of long stretches the beginning and the end are shown."""
    a, b = diff.a, diff.b
    found: list[Stretch] = []
    by_start = {run.b: run for run in diff.runs}
    place = 0
    for item in diff.differences:
        gap = item.gap
        run = by_start.get(place)
        if run is not None and run.length:
            found.append(Stretch("same", run.length, _cut(b.text(run.b, run.b_end))))
        is_moved = any(run.b < gap.b_end and gap.b < run.b_end for run in diff.moved)
        found.append(
            Stretch(
                "moved" if is_moved else "differs",
                gap.b_end - gap.b,
                _cut(b.text(gap.b, gap.b_end)),
                _cut(a.text(gap.a, gap.a_end)),
                gap.a_end - gap.a,
                gap.b,
                b.label(gap.b),
                tuple(cause.kind.replace("_", " ") for cause in item.causes),
            )
        )
        place = gap.b_end
    run = by_start.get(place)
    if run is not None and run.length:
        found.append(Stretch("same", run.length, _cut(b.text(run.b, run.b_end))))
    return found[:MAX_STRETCHES]


def _cut(text: str) -> str:
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    half = MAX_SHOWN_CHARS // 2
    return f"{text[:half]}\n⋯ {len(text) - MAX_SHOWN_CHARS:,} characters ⋯\n{text[-half:]}"
