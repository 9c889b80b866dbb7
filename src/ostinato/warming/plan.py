"""Which beginnings of prompts are worth having, and in what order.

The prompts of a log make a tree, in which a token is worth as many tokens as it is expected to be asked for
again. A request counts half for every half-life it lies back. What ``k`` requests ran through was seen to
come back ``k - D`` times, with Kneser and Ney's discount ``D`` from the numbers of tokens seen once and
twice: where most were seen once only, one request is hardly a sign of another. A token that is not expected
once does not pay for being computed ahead, and is left out.

A prefix' value is the sum over its tokens, less those that a prefix chosen before has too: what is chosen
next is what adds most. As the best path through the rest of a tree always ends at a leaf, taking the tree
apart into longest paths is that greedy choice, all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from ostinato.types import TokenArray

from .logs import LoggedPrompt


@dataclass(frozen=True, slots=True)
class Prefix:
    """A beginning to have in the cache: of ``tokens``, the last ``new_tokens`` are no earlier prefix'.

    ``value``: tokens of prefill that it is expected to save, those of earlier prefixes aside.
    ``num_requests`` of the log begin with all of it, ``expected_uses`` are expected to.
    """

    tokens: TokenArray
    new_tokens: int
    value: float
    num_requests: int
    expected_uses: float
    salt: str
    cache_salt: str | None


@dataclass(slots=True, eq=False)
class _Node:
    """Tokens ``[start, end)`` of ``prompt``, which ``count`` requests of together ``weight`` run through.

    ``ends`` are those that end here. ``best`` is what the most valuable path from here down is worth,
    ``next`` the child that it goes on with.
    """

    prompt: LoggedPrompt
    start: int
    end: int
    ends: list[LoggedPrompt] = field(default_factory=list)
    children: list[_Node] = field(default_factory=list)
    count: int = 0
    weight: float = 0.0
    expected: float = 0.0
    best: float = 0.0
    next: _Node | None = None


def choose(
    prompts: Sequence[LoggedPrompt], top: int, *, half_life_s: float | None = None, min_uses: float = 1.0
) -> list[Prefix]:
    """The ``top`` most valuable prefixes, best first; fewer where fewer are worth it.

    ``half_life_s`` ``None``: half of what the log spans. A prefix is at most all of a prompt but its last
    token, which is always computed.
    """
    assert top >= 0, f"the {top} best prefixes"
    ordered = sorted(prompts, key=_order)
    roots = [_tree(list(group)) for _, group in groupby(ordered, key=lambda each: each.salt)]
    nodes = [node for root in roots for node in _nodes(root)]
    _weigh(nodes, prompts, half_life_s)
    heads: list[_Node] = []
    for node in reversed(nodes):  # children first
        worthy = [child for child in node.children if child.expected >= min_uses]
        node.next = max(worthy, key=lambda child: child.best, default=None)
        node.best = (node.end - node.start) * node.expected + (node.next.best if node.next else 0.0)
        heads += [child for child in worthy if child is not node.next or node.end == 0]
    heads.sort(key=lambda head: (-head.best, head.start))
    return [_prefix(head) for head in heads[:top]]


def _prefix(head: _Node) -> Prefix:
    last = head
    while last.next is not None:
        last = last.next
    prompt = last.prompt
    return Prefix(
        prompt.tokens[: last.end],
        last.end - head.start,
        head.best,
        last.count,
        last.expected,
        prompt.salt,
        prompt.cache_salt,
    )


def _weigh(nodes: Sequence[_Node], prompts: Sequence[LoggedPrompt], half_life_s: float | None) -> None:
    """Counts requests from the leaves up, and says how often each node is expected."""
    last_s = max(each.time_s for each in prompts)
    half_s = half_life_s or (last_s - min(each.time_s for each in prompts)) / 2 or 1.0
    seen = [0, 0, 0]  # tokens that one and two requests ran through
    for node in reversed(nodes):
        node.count = len(node.ends) + sum(child.count for child in node.children)
        node.weight = sum(0.5 ** ((last_s - each.time_s) / half_s) for each in node.ends)
        node.weight += sum(child.weight for child in node.children)
        if node.count <= 2:
            seen[node.count] += node.end - node.start
    discount = seen[1] / (seen[1] + 2 * seen[2]) if seen[1] else 0.0
    for node in nodes:
        node.expected = node.weight * (node.count - discount) / node.count


def _order(prompt: LoggedPrompt) -> tuple[str, bytes]:
    # Big-endian: then the order of bytes is that of tokens, and neighbours share the most.
    return prompt.salt, prompt.tokens.astype(">i4").tobytes()


def _tree(ordered: Sequence[LoggedPrompt]) -> _Node:
    """The tree of all but the last token of each prompt; ``ordered`` are of one salt, neighbours alike.

    Every prompt ends where a node does.
    """
    root = _Node(ordered[0], 0, 0)
    path = [root]
    before: LoggedPrompt | None = None
    for prompt in ordered:
        length = len(prompt.tokens) - 1
        shared = 0 if before is None else min(_common(before.tokens, prompt.tokens), length, path[-1].end)
        while len(path) > 1 and path[-1].start >= shared:
            path.pop()
        top = path[-1]
        if top.end > shared:
            _split(top, shared)
        if length > shared:
            top.children.append(_Node(prompt, shared, length))
            path.append(top.children[-1])
        path[-1].ends.append(prompt)
        before = prompt
    return root


def _split(node: _Node, at: int) -> None:
    """Cuts a node; what was below the cut becomes its only child."""
    lower = _Node(node.prompt, at, node.end, node.ends, node.children)
    node.end, node.ends, node.children = at, [], [lower]


def _common(a: TokenArray, b: TokenArray) -> int:
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _nodes(root: _Node) -> list[_Node]:
    """All nodes, parents first."""
    found: list[_Node] = []
    stack = [root]
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children
    return found
