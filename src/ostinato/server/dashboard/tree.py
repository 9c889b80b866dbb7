"""The prefix tree as columns of numbers for a picture: bounded, whatever there is.

A node's *total* is its own tokens and those of everything below it, which is how wide it is drawn. Where
there are more nodes than a picture can have, the smallest totals are left out (a parent's is never smaller
than its child's, so what is left is a tree), and their parent says how many there were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from ...kv.survey import NodeFacts, Survey

MAX_BYTES: Final = 1_000_000
MAX_NODES: Final = 12_000
MAX_LABELS: Final = 400
LABEL_TOKENS: Final = 24
LABEL_CHARS: Final = 48
SHOWN_TOKENS: Final = 4_000
CONTEXT_TOKENS: Final = 200

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Columns:
    """Everything, one row a node; the first row is the whole, the next ones are the namespaces."""

    serial: Ints
    parent: Ints
    tokens: Ints
    total: Ints
    uses: Ints
    ago: Ints
    pins: Ints


def tree_data(
    survey: Survey,
    *,
    root: int | None = None,
    tenant_name: Callable[[str], str],
    prompt_name: Mapping[str, str],
    text_of: Callable[[bytes], str] | None,
    max_nodes: int = MAX_NODES,
    max_bytes: int = MAX_BYTES,
) -> bytes | None:
    """JSON of the tree, or of what is below the node with serial ``root``; ``None`` where that is gone.

    ``text_of`` makes text of tokens, where the visitor may see it. Fields, all lists of equal length but
    the last: ``id`` (0 for the whole and the namespaces), ``parent`` (a place in the list, -1 of the first),
    ``tokens``, ``total``, ``uses``, ``ago`` (look-ups and commits since the last use), ``pinned``,
    ``left_out`` (nodes below that are not in the list), ``labels`` (by place, of some).
    """
    columns = _columns(survey)
    top = 0
    if root is not None:
        places = np.flatnonzero(columns.serial == root)
        if not len(places):
            return None
        top = int(places[0])
    inside = _below(columns.parent, top)
    while True:
        data = _picture(survey, columns, top, inside, max_nodes, tenant_name, prompt_name, text_of)
        if len(data) <= max_bytes:
            return data
        max_nodes = max_nodes * 3 // 4


def _columns(survey: Survey) -> _Columns:
    num_spaces, nodes = len(survey.spaces), survey.nodes
    first = 1 + num_spaces
    size = first + len(nodes)
    zeros: Callable[[], Ints] = lambda: np.zeros(size, np.int64)  # noqa: E731
    made = _Columns(zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros())
    made.parent[0] = -1
    for place, node in enumerate(nodes, first):
        made.serial[place] = node.serial
        made.parent[place] = 1 + node.space if node.parent < 0 else first + node.parent
        made.tokens[place] = len(node.tokens) // 4
        made.uses[place] = node.num_uses
        made.ago[place] = survey.rank - node.last_used if node.last_used else survey.rank
        made.pins[place] = node.num_pins
    total = made.tokens.tolist()
    parents = made.parent.tolist()
    for place in range(size - 1, 0, -1):  # parents stand before their children
        total[parents[place]] += total[place]
    made.total[:] = total
    return made


def _below(parents: Ints, top: int) -> npt.NDArray[np.bool_]:
    """Which rows are ``top`` or below it."""
    inside = np.zeros(len(parents), np.bool_)
    inside[top] = True
    if top == 0:
        inside[:] = True
        return inside
    for place, parent in enumerate(parents[top + 1 :].tolist(), top + 1):
        if inside[parent]:
            inside[place] = True
    return inside


def _picture(
    survey: Survey,
    columns: _Columns,
    top: int,
    inside: npt.NDArray[np.bool_],
    max_nodes: int,
    tenant_name: Callable[[str], str],
    prompt_name: Mapping[str, str],
    text_of: Callable[[bytes], str] | None,
) -> bytes:
    rows = np.flatnonzero(inside)
    by_size = rows[np.argsort(-columns.total[rows], kind="stable")]
    kept = np.sort(by_size[: max(1, max_nodes)])
    place_of = np.full(len(columns.parent), -1, np.int64)
    place_of[kept] = np.arange(len(kept))
    left_out = _left_out(columns.parent, inside, place_of, len(kept))
    parent = place_of[columns.parent[kept]]
    parent[0] = -1
    picture: dict[str, Any] = {
        "num_nodes": int(np.count_nonzero(columns.serial[rows])),
        "id": columns.serial[kept].tolist(),
        "parent": parent.tolist(),
        "tokens": columns.tokens[kept].tolist(),
        "total": columns.total[kept].tolist(),
        "uses": columns.uses[kept].tolist(),
        "ago": columns.ago[kept].tolist(),
        "pinned": columns.pins[kept].tolist(),
        "left_out": left_out,
    }
    largest = kept[np.argsort(-columns.total[kept], kind="stable")][:MAX_LABELS].tolist()
    picture["labels"] = {
        str(int(place_of[row])): label
        for row in largest
        if (label := _label(survey, row, tenant_name, prompt_name, text_of))
    }
    picture["zoomed"] = top > 0
    return orjson.dumps(picture)


def _left_out(parents: Ints, inside: npt.NDArray[np.bool_], place_of: Ints, num_kept: int) -> list[int]:
    """How many nodes are missing below each row that is there."""
    counts = [0] * num_kept
    missing = np.flatnonzero(inside & (place_of < 0))
    above = parents.tolist()
    nearest: dict[int, int] = {}
    for row in missing.tolist():  # parents stand before their children
        parent = above[row]
        place = int(place_of[parent])
        if place < 0:
            place = nearest[parent]
        nearest[row] = place
        counts[place] += 1
    return counts


def _label(
    survey: Survey,
    row: int,
    tenant_name: Callable[[str], str],
    prompt_name: Mapping[str, str],
    text_of: Callable[[bytes], str] | None,
) -> str:
    first = 1 + len(survey.spaces)
    if row == 0:
        return "everything"
    if row < first:
        return tenant_name(survey.spaces[row - 1].tenant)
    node = survey.nodes[row - first]
    name = prompt_name.get(node.prompt, "") if node.prompt else ""
    if text_of is not None:
        text = one_line(text_of(node.tokens[: 4 * LABEL_TOKENS]), LABEL_CHARS)
        return f"{name} · {text}" if name else text
    return name


def one_line(text: str, max_chars: int) -> str:
    """The beginning of a text without line breaks and control characters, as a label has it."""
    cleaned = "".join(char if char.isprintable() else " " for char in text[: 4 * max_chars])
    words = " ".join(cleaned.split())
    return words if len(words) <= max_chars else words[: max_chars - 1] + "…"


def widest(
    survey: Survey,
    *,
    root: int | None,
    num: int,
    tenant_name: Callable[[str], str],
    prompt_name: Mapping[str, str],
    text_of: Callable[[bytes], str] | None,
) -> dict[str, Any]:
    """Values for the table of what is directly below a node, or below the whole; the widest first."""
    columns = _columns(survey)
    first = 1 + len(survey.spaces)
    top = 1 if len(survey.spaces) == 1 else 0
    if root is not None:
        places = np.flatnonzero(columns.serial == root)
        top = int(places[0]) if len(places) else top
    below = np.flatnonzero(columns.parent == top)
    rows = below[np.argsort(-columns.total[below], kind="stable")][:num].tolist()
    shown = [
        WideRow(
            serial=int(columns.serial[row]),
            label=_label(survey, row, tenant_name, prompt_name, text_of) or f"node {columns.serial[row]}",
            num_tokens=int(columns.tokens[row]),
            total_tokens=int(columns.total[row]),
            num_uses=int(columns.uses[row]),
            is_pinned=bool(columns.pins[row]),
            is_space=row < first,
        )
        for row in rows
    ]
    return {
        "rows": shown,
        "root": root,
        "num_below": len(below),
        "whole_tokens": int(columns.total[top]),
        "num_nodes": len(survey.nodes),
        "num_spaces": len(survey.spaces),
        "all_tokens": int(columns.total[0]),
    }


@dataclass(frozen=True, slots=True)
class WideRow:
    """A row of that table."""

    serial: int
    label: str
    num_tokens: int
    total_tokens: int
    num_uses: int
    is_pinned: bool
    is_space: bool


def node_page(
    facts: NodeFacts, text_of: Callable[[bytes], str] | None, prompt_name: Mapping[str, str]
) -> dict[str, Any]:
    """Values for the page of one node. Of a long text the beginning and the end are shown."""
    at = 4 * facts.depth_tokens
    before = after = None
    if text_of is not None:
        before = text_of(facts.path[max(0, at - 4 * CONTEXT_TOKENS) : at])
        after = text_of(facts.path[at : at + 4 * SHOWN_TOKENS])
    num_own = len(facts.path) // 4 - facts.depth_tokens
    return {
        "facts": facts,
        "num_own": num_own,
        "before": before,
        "text": after,
        "num_hidden_before": max(0, facts.depth_tokens - CONTEXT_TOKENS),
        "num_hidden": max(0, num_own - SHOWN_TOKENS),
        "prompt": prompt_name.get(facts.prompt, "") if facts.prompt else "",
    }
