"""What the prefix index is made of: nodes with runs of tokens, in a tree for every namespace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ostinato.types import BlockIds

from .policy import Candidate
from .terms import NO_TERMS, Terms

TOKEN_BYTES = 4
NO_BLOCKS: BlockIds = np.empty(0, np.intp)
_serials = count(1)


class BlockCounts(Protocol):
    """What the index needs of whoever counts blocks. ``block_ids`` holds distinct ids."""

    def own(self, block_ids: BlockIds) -> int:
        """A node took these blocks; returns how many had no owner before."""

    def disown(self, block_ids: BlockIds) -> int:
        """A node gave these blocks up; returns how many became free."""

    def count_held(self, block_ids: BlockIds) -> int:
        """How many of these blocks a lease holds."""


class Node(Candidate):
    """A run of tokens below its parent. ``tokens`` and ``blocks`` are replaced, never written to.

    ``serial`` names it to people; of a split node the lower part keeps it, of two merged ones the lower.
    """

    __slots__ = (
        "blocks", "children", "expires_s", "num_pins", "parent", "serial", "stored_s", "terms", "tokens",
        "tree",
    )  # fmt: skip

    def __init__(
        self, tree: Tree, parent: Node | None, tokens: bytes, blocks: BlockIds, *, depth: int, rank: int
    ) -> None:
        super().__init__(rank=rank, depth_tokens=depth, num_tokens=len(tokens) // TOKEN_BYTES)
        self.serial = next(_serials)
        self.terms = NO_TERMS
        self.stored_s = 0.0
        self.expires_s = 0.0
        self.num_pins = 0
        self.tree = tree
        self.parent = parent  # None: a root, or no longer in a tree
        self.children: dict[bytes, Node] = {}
        self.tokens = tokens  # int32, native order
        self.blocks = blocks

    @property
    def end_tokens(self) -> int:
        return self.depth_tokens + self.num_tokens


class Tree:
    """One namespace's tree. Its root holds no tokens; an empty tree is dropped."""

    __slots__ = ("namespace", "num_tokens", "root")

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.num_tokens = 0
        self.root = Node(self, None, b"", NO_BLOCKS, depth=0, rank=0)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


@dataclass(frozen=True, slots=True)
class Match:
    """A path of the index. ``blocks`` cover its first ``num_tokens`` tokens.

    ``overridden`` are blocks of nodes on the path whose place in the table a child's block took: whoever
    holds ``blocks`` has to hold them too.
    """

    num_tokens: int
    blocks: BlockIds
    overridden: frozenset[int]


@dataclass(frozen=True, slots=True)
class Inserted:
    """``num_tokens`` tokens became findable, for which ``num_blocks`` blocks got their first owner.

    ``path`` is where they now stand, ``None`` when nothing was new.
    """

    num_tokens: int = 0
    num_blocks: int = 0
    path: Match | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """When something is used, and for how long that keeps it. ``rank`` orders uses; seconds are a clock's."""

    rank: int
    now_s: float = 0.0
    ttl_s: float = inf
    terms: Terms = NO_TERMS

    @property
    def expires_s(self) -> float:
        return self.now_s + self.ttl_s


NO_MATCH = Match(0, NO_BLOCKS, frozenset())
NOTHING_NEW = Inserted()


class Deadlines:
    """When nodes expire, the earliest first. An entry may come up too early, never too late."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Node]] = []
        self._num_entered = 0  # orders equal ones

    def note(self, node: Node, num_nodes: int) -> None:
        """The node has a deadline, if it has one; ``num_nodes`` there are in all."""
        if node.expires_s == inf:
            return
        self._num_entered += 1
        heappush(self._heap, (node.expires_s, self._num_entered, node))
        if len(self._heap) > 64 + 2 * num_nodes:
            self._heap = [entry for entry in self._heap if entry[2].parent is not None]
            heapify(self._heap)

    def take_due(self, now_s: float, num_nodes: int) -> list[Node]:
        """Nodes whose time is up, leaves first. Those that stay are to be noted again."""
        due: list[Node] = []
        while self._heap and self._heap[0][0] <= now_s:
            node = heappop(self._heap)[2]
            if node.parent is None or node.expires_s == inf:
                continue
            if node.expires_s <= now_s:
                due.append(node)
            else:
                self.note(node, num_nodes)
        due.sort(key=lambda node: -node.depth_tokens)
        return due

    def clear(self) -> None:
        self._heap.clear()

    def check_integrity(self, nodes: Iterator[Node]) -> None:
        """Asserts that each of these nodes comes up in time."""
        entered = {id(node): deadline for deadline, _, node in self._heap}
        for node in nodes:
            assert node.expires_s == inf or entered[id(node)] <= node.expires_s, (
                "a deadline comes up too late"
            )


def walk(root: Node, tokens: bytes) -> tuple[list[Node], int]:
    """The nodes that ``tokens`` run through, root excluded, and how many tokens they match."""
    path: list[Node] = []
    node, at, end = root, 0, len(tokens)
    while at < end:
        child = node.children.get(tokens[at : at + TOKEN_BYTES])
        if child is None:
            break
        path.append(child)
        if not tokens.startswith(child.tokens, at):
            at += TOKEN_BYTES * common_tokens(child.tokens, tokens, at)
            break
        at += len(child.tokens)
        node = child
    return path, at // TOKEN_BYTES


def walk_living(root: Node, tokens: bytes, now_s: float) -> tuple[list[Node], int]:
    """The same up to what has expired, which a lease may still hold."""
    path, found = walk(root, tokens)
    for place, node in enumerate(path):
        if node.expires_s <= now_s and not node.num_pins:
            return path[:place], node.depth_tokens
    return path, found


def assemble(path: list[Node], num_tokens: int, block_size: int) -> Match:
    """The table of the first ``num_tokens`` tokens of ``path``."""
    num_blocks = -(-num_tokens // block_size)
    if num_tokens == 0:
        return NO_MATCH
    if num_tokens <= path[0].num_tokens:
        return Match(num_tokens, path[0].blocks[:num_blocks], frozenset())
    table = np.empty(num_blocks, np.intp)
    overridden: set[int] = set()
    above = path[0]
    for node in path:
        if node.depth_tokens >= num_tokens:
            break
        first = node.depth_tokens // block_size
        if node.depth_tokens % block_size and above.blocks[-1] != node.blocks[0]:
            overridden.add(int(above.blocks[-1]))
        table[first : first + len(node.blocks)] = node.blocks[: num_blocks - first]
        above = node
    return Match(num_tokens, table, frozenset(overridden))


def common_tokens(edge: bytes, tokens: bytes, at: int) -> int:
    """How many tokens ``edge`` and ``tokens`` from byte ``at`` on have in common."""
    length = min(len(edge), len(tokens) - at) // TOKEN_BYTES
    differ = np.frombuffer(edge, np.int32, length) != np.frombuffer(tokens, np.int32, length, at)
    first = int(differ.argmax())
    return first if differ[first] else length


def check_node(node: Node, tree: Tree, holds: npt.NDArray[np.int32], block_size: int) -> None:
    """Asserts what holds of every node in a tree."""
    size, parent = block_size, node.parent
    assert parent is not None, "a node without a parent stands in a tree"
    assert node.tree is tree
    assert parent.children.get(node.tokens[:TOKEN_BYTES]) is node, "a child under a wrong first token"
    assert node.num_tokens * TOKEN_BYTES == len(node.tokens) > 0
    assert node.depth_tokens == parent.end_tokens
    assert parent is tree.root or parent.expires_s >= node.expires_s, "a child outlives its parent"
    assert parent is tree.root or parent.num_pins >= node.num_pins, "a child is pinned, its parent is not"
    assert not node.num_pins or holds[node.blocks].all(), "a pinned block can be evicted"
    first, behind = node.depth_tokens // size, -(-node.end_tokens // size)
    assert len(node.blocks) == behind - first, f"{len(node.blocks)} blocks cover [{first}, {behind})"
    is_held = holds[node.blocks] > 0
    assert (is_held[:-1] >= is_held[1:]).all(), "an entry is held, the one before it is not"
    if is_held[0] and parent is not tree.root:
        assert holds[parent.blocks[-1]], "a child is held, its parent is not"
    above: Node | None = node
    seen, is_apart = node.blocks[0], False
    while above is not None and above.depth_tokens % size and above.depth_tokens // size == first:
        above = above.parent
        assert above is not None
        is_same = above.blocks[-1] == seen
        assert not (is_apart and is_same), f"the entries of block {seen} do not lie together"
        is_apart = is_apart or not is_same
