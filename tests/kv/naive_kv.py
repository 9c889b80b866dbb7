"""The prefix cache written down as simply as possible: lists, sets and linear scans. Only for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import numpy as np

from ostinato.kv.policy import NodeStats
from ostinato.kv.terms import NO_TERMS, Terms

Tokens = tuple[int, ...]


def as_array(tokens: Tokens | list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


class Oldest:
    """The test's own LRU."""

    def priority(self, stats: NodeStats) -> int:
        return stats.last_used


class LeastUsed:
    def priority(self, stats: NodeStats) -> tuple[int, int]:
        return stats.num_uses, stats.last_used


class FirstIn:
    def priority(self, stats: NodeStats) -> tuple[int, int]:
        return stats.inserted, stats.last_used


class Deepest:
    def priority(self, stats: NodeStats) -> tuple[int, int]:
        return -stats.depth_tokens, stats.last_used


class Longest:
    def priority(self, stats: NodeStats) -> tuple[int, int]:
        return -stats.num_tokens, stats.last_used


POLICIES: tuple[Callable[[], object], ...] = (Oldest, LeastUsed, FirstIn, Deepest, Longest)


@dataclass(eq=False)
class NaiveNode:
    """``entries`` maps the index of a block in the sequence to the block that holds it."""

    parent: NaiveNode | None
    tokens: Tokens
    entries: dict[int, int]
    depth: int
    last_used: int = 0
    inserted: int = 0
    num_uses: int = 0
    terms: Terms = NO_TERMS
    stored: float = 0.0
    expires: float = inf
    pins: int = 0
    children: list[NaiveNode] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.depth + len(self.tokens)

    def stats(self) -> NodeStats:
        return NodeStats(self.last_used, self.inserted, self.num_uses, self.depth, len(self.tokens))

    def ancestors(self) -> list[NaiveNode]:
        """Nearest first, the root excluded."""
        found, node = [], self.parent
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return found


class NaiveIndex:
    def __init__(self, block_size: int, policy) -> None:
        self.block_size = block_size
        self.policy = policy
        self.roots: dict[str, NaiveNode] = {}

    # ---- reading

    def nodes(self, namespace: str | None = None) -> list[NaiveNode]:
        roots = [r for n, r in self.roots.items() if namespace in (None, n)]
        found: list[NaiveNode] = []
        for node in roots:
            todo = list(node.children)
            while todo:
                found.append(todo[0])
                todo = todo[1:] + todo[0].children
        return found

    def num_tokens(self, namespace: str | None = None) -> int:
        return sum(len(node.tokens) for node in self.nodes(namespace))

    def owned(self) -> set[int]:
        return {block for node in self.nodes() for block in node.entries.values()}

    def path(self, namespace: str, tokens: Tokens) -> tuple[list[NaiveNode], int]:
        node, path, found = self.roots.get(namespace), [], 0
        while node is not None:
            below = [c for c in node.children if found < len(tokens) and c.tokens[0] == tokens[found]]
            node = below[0] if below else None
            if node is None:
                break
            path.append(node)
            for token in node.tokens:
                if found == len(tokens) or token != tokens[found]:
                    return path, found
                found += 1
        return path, found

    def table(self, path: list[NaiveNode], num_tokens: int) -> tuple[list[int], set[int]]:
        """Blocks of the first ``num_tokens`` tokens of a path, and what of the path is not among them."""
        chosen: dict[int, int] = {}
        seen: set[int] = set()
        for node in path:
            if node.depth < num_tokens:
                used = {k: b for k, b in node.entries.items() if k * self.block_size < num_tokens}
                chosen.update(used)
                seen.update(used.values())
        blocks = [chosen[k] for k in sorted(chosen)]
        return blocks, seen - set(blocks)

    # ---- changing

    def living_path(self, namespace: str, tokens: Tokens, now: float) -> tuple[list[NaiveNode], int]:
        path, found = self.path(namespace, tokens)
        for place, node in enumerate(path):
            if node.expires <= now and not node.pins:
                return path[:place], node.depth
        return path, found

    def match(
        self, namespace: str, tokens: Tokens, limit: int, rank: int, now: float = 0.0, ttl: float = inf
    ) -> tuple[int, list[int], set[int]]:
        path, found = self.living_path(namespace, tokens, now)
        for node in path:
            parts_here = node is path[-1] and found < node.end and found < len(tokens)
            if not parts_here:
                node.last_used = rank
                node.num_uses += 1
                node.expires = max(node.expires, now + ttl)
        hit = min(found, limit)
        return hit, *self.table(path, hit)

    def insert(
        self,
        namespace: str,
        tokens: Tokens,
        table: list[int],
        rank: int,
        now: float = 0.0,
        ttl: float = inf,
        terms: Terms = NO_TERMS,
    ) -> tuple[int, set[int]]:
        """Returns how many tokens are new, and every block on their path."""
        if not tokens:
            return 0, set()
        root = self.roots.setdefault(namespace, NaiveNode(None, (), {}, 0))
        path, found = self.path(namespace, tokens)
        if found < len(tokens):
            parent = path[-1] if path else root
            if path and found < parent.end:
                parent = path[-1] = self.split(parent, found)
            size = self.block_size
            fresh = {k: b for k, b in enumerate(table) if (k + 1) * size > found and k * size < len(tokens)}
            if path and not parent.children and self.goes_on(parent, len(tokens) - found, rank, terms):
                parent.tokens += tokens[found:]
                parent.entries.update(fresh)
            else:
                path.append(NaiveNode(parent, tokens[found:], fresh, found, inserted=rank))
                path[-1].terms, path[-1].stored, path[-1].expires = terms, now, now + ttl
                parent.children.append(path[-1])
            self.align(path[-1])
        for node in path:
            node.last_used = rank
            node.expires = max(node.expires, now + ttl)
        blocks, others = self.table(path, len(tokens))
        return len(tokens) - found, set(blocks) | others

    def goes_on(self, leaf: NaiveNode, num_fresh: int, rank: int, terms: Terms) -> bool:
        """Whether fresh tokens join a leaf: one is shorter than a block, or the policy sees no difference."""
        if leaf.terms != terms or leaf.pins:
            return False
        place = (leaf.depth, len(leaf.tokens))
        joined = self.policy.priority(NodeStats(rank, leaf.inserted, leaf.num_uses, *place))
        apart = self.policy.priority(NodeStats(rank, rank, 0, *place))
        return min(num_fresh, len(leaf.tokens)) < self.block_size or joined == apart

    def split(self, node: NaiveNode, at: int) -> NaiveNode:
        size, parent = self.block_size, node.parent
        assert parent is not None
        upper = NaiveNode(parent, node.tokens[: at - node.depth], {}, node.depth)
        upper.entries = {k: b for k, b in node.entries.items() if k * size < at}
        upper.last_used, upper.inserted, upper.num_uses = node.last_used, node.inserted, node.num_uses
        upper.terms, upper.stored, upper.expires, upper.pins = (
            node.terms, node.stored, node.expires, node.pins,
        )  # fmt: skip
        upper.children = [node]
        parent.children[parent.children.index(node)] = upper
        node.entries = {k: b for k, b in node.entries.items() if (k + 1) * size > at}
        node.parent, node.tokens, node.depth = upper, node.tokens[at - node.depth :], at
        return upper

    def align(self, node: NaiveNode) -> None:
        at = min(node.entries)
        chain = node.ancestors()
        same = [i for i, above in enumerate(chain) if above.entries.get(at) == node.entries[at]]
        for between in chain[: same[0]] if same else []:
            between.entries[at] = node.entries[at]

    def evict(self, num_blocks: int, held: set[int]) -> int:
        """Returns how many blocks became free."""
        before = self.owned() - held
        while len(before - self.owned()) < num_blocks:
            victims = [n for n in self.nodes() if not n.children and n.entries[max(n.entries)] not in held]
            victim = min(victims, key=lambda node: self.policy.priority(node.stats()))
            while (
                victim.entries
                and victim.entries[max(victim.entries)] not in held
                and len(before - self.owned()) < num_blocks
            ):
                self.drop_tail(victim)
        return len(before - self.owned())

    def clear(self, namespace: str, held: set[int]) -> int:
        """Leaf after leaf, last first; a parent follows its last child. The order decides what merges."""
        before = self.owned() - held
        todo, leaves = [self.roots[namespace]] if namespace in self.roots else [], []
        while todo:
            node = todo.pop()
            todo += node.children
            leaves += [] if node.children else [node]
        while leaves:
            leaf = leaves.pop()
            parent = leaf.parent
            while leaf.entries and leaf.entries[max(leaf.entries)] not in held:
                self.drop_tail(leaf)
            if not parent.children and parent.parent is not None:
                leaves.append(parent)
        return len(before - self.owned())

    def evict_from(self, namespace: str, num_blocks: int, held: set[int]) -> int:
        """The same out of one namespace, and no more than it has."""
        before = self.owned() - held
        while len(before - self.owned()) < num_blocks:
            leaves = [n for n in self.nodes(namespace) if not n.children]
            victims = [n for n in leaves if n.entries[max(n.entries)] not in held]
            if not victims:
                break
            victim = min(victims, key=lambda node: self.policy.priority(node.stats()))
            while (
                victim.entries
                and victim.entries[max(victim.entries)] not in held
                and len(before - self.owned()) < num_blocks
            ):
                self.drop_tail(victim)
        return len(before - self.owned())

    def expire(self, now: float, held: set[int]) -> None:
        due = sorted((n for n in self.nodes() if n.expires <= now), key=lambda node: -node.depth)
        for node in due:
            while node.entries and not node.children and node.entries[max(node.entries)] not in held:
                self.drop_tail(node)

    def purge(self, namespace: str, is_meant) -> set[int]:
        """Drops what is meant and all below it, held or not; returns the blocks of what went."""
        lost: set[int] = set()
        while meant := [node for node in self.nodes(namespace) if is_meant(node)]:
            top = meant[0]
            below = [top]
            for node in below:
                below += node.children
                lost |= set(node.entries.values())
            top.children, top.entries = [], {0: -1}
            top.depth, top.tokens = 0, ()
            self.drop_tail(top)
        return lost

    def pin(self, namespace: str, tokens: Tokens) -> set[int]:
        path, found = self.path(namespace, tokens)
        assert found == len(tokens)
        if found < path[-1].end:
            path[-1] = self.split(path[-1], found)
        for node in path:
            node.pins += 1
        blocks, others = self.table(path, found)
        return set(blocks) | others

    def unpin(self, namespace: str, tokens: Tokens) -> None:
        for node in self.path(namespace, tokens)[0]:
            node.pins -= 1

    def drop_tail(self, leaf: NaiveNode) -> None:
        at = max(leaf.entries)
        del leaf.entries[at]
        leaf.tokens = leaf.tokens[: max(0, at * self.block_size - leaf.depth)]
        if leaf.tokens:
            return
        parent = leaf.parent
        assert parent is not None
        assert not leaf.entries
        parent.children.remove(leaf)
        if parent.parent is None:
            self.roots = {n: r for n, r in self.roots.items() if r.children}
        elif len(parent.children) == 1:
            self.merge(parent, parent.children[0])

    def merge(self, upper: NaiveNode, lower: NaiveNode) -> None:
        if (upper.terms, upper.pins, upper.expires) != (lower.terms, lower.pins, lower.expires):
            return
        differ = self.policy.priority(upper.stats()) != self.policy.priority(lower.stats())
        if min(len(upper.tokens), len(lower.tokens)) >= self.block_size and differ:
            return
        if len(lower.tokens) < len(upper.tokens):
            lower.last_used, lower.inserted, lower.num_uses = upper.last_used, upper.inserted, upper.num_uses
        lower.stored = min(lower.stored, upper.stored)
        lower.tokens = upper.tokens + lower.tokens
        lower.entries = upper.entries | lower.entries
        lower.depth, lower.parent = upper.depth, upper.parent
        assert upper.parent is not None
        siblings = upper.parent.children
        siblings[siblings.index(upper)] = lower
