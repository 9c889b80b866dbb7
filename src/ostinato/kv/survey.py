"""The prefix index as a picture for people: every node at about one moment.

The books' lock is held for a few hundred nodes at a time, so that requests do not wait for whoever looks. In
between the trees may change: then a node may be missing, or its tokens be counted where it stood before. For
looking that is near enough; nothing else may be built on it. An index at rest is told exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from threading import Lock
from typing import TYPE_CHECKING

from .hashing import Namespace

if TYPE_CHECKING:
    from .index import PrefixIndex
    from .nodes import Node
    from .pool import BlockPool

_NODES_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class SeenNode:
    """One node. ``serial`` names it as long as this process runs; ``parent`` is a place in the survey, -1
    for the first of a tree.

    ``tokens`` are its own, int32 bytes. ``last_used`` is a rank: compare it with :attr:`Survey.rank`.
    """

    serial: int
    parent: int
    space: int
    depth_tokens: int
    tokens: bytes
    num_uses: int
    last_used: int
    num_pins: int
    prompt: str

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


@dataclass(frozen=True, slots=True)
class Survey:
    """All nodes, parents before children, and the namespaces they are in, which ``space`` counts.

    ``rank``: how many look-ups and commits there have been.
    """

    nodes: tuple[SeenNode, ...]
    spaces: tuple[Namespace, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What there is to know of one node.

    ``path`` is everything from the first token to the node's last, int32 bytes, of which the first
    ``depth_tokens`` stand above it. ``age_s`` is since it was stored, where a clock was asked;
    ``expires_in_s`` may be infinite. ``num_blocks`` of its own, of which requests or pins hold
    ``num_held_blocks``. ``tokens_below`` and ``num_nodes_below`` are of what goes on from it.
    """

    serial: int
    space: Namespace
    path: bytes
    depth_tokens: int
    num_uses: int
    last_used: int
    rank: int
    num_pins: int
    prompt: str
    age_s: float
    expires_in_s: float
    num_blocks: int
    num_held_blocks: int
    num_children: int
    num_nodes_below: int
    tokens_below: int
    parent: int | None
    children: tuple[int, ...]


class Surveyor:
    """Looks at the books of one manager, whose lock it takes."""

    def __init__(
        self,
        index: PrefixIndex,
        pool: BlockPool,
        lock: Lock,
        spaces: Callable[[], list[Namespace]],
        moment: Callable[[], tuple[int, float]],
    ) -> None:
        """``spaces``: whose trees there may be. ``moment``: rank and seconds now. Both are asked under the
        lock."""
        self._index = index
        self._pool = pool
        self._lock = lock
        self._spaces = spaces
        self._moment = moment

    def survey(self) -> Survey:
        """All that is findable now. Takes about a microsecond a node."""
        with self._lock:
            known = {space.digest: space for space in self._spaces()}
            roots = self._index.roots()
            rank, _ = self._moment()
        spaces: list[Namespace] = []
        nodes: list[SeenNode] = []
        for digest, root in roots:
            if (space := known.get(digest)) is None:
                continue  # it came between the two questions: next time
            spaces.append(space)
            for batch in self._batches(root, len(spaces) - 1, len(nodes)):
                nodes += batch
        return Survey(tuple(nodes), tuple(spaces), rank)

    def _batches(self, root: Node, space: int, first: int) -> Iterator[list[SeenNode]]:
        """The nodes below ``root``, the first of which will be number ``first``."""
        with self._lock:
            stack = [(node, -1) for node in root.children.values()]
        count = first
        while stack:
            batch: list[SeenNode] = []
            with self._lock:
                while stack and len(batch) < _NODES_AT_ONCE:
                    node, parent = stack.pop()
                    if node.parent is None:
                        continue  # it has gone meanwhile
                    batch.append(
                        SeenNode(
                            node.serial,
                            parent,
                            space,
                            node.depth_tokens,
                            node.tokens,
                            node.num_uses,
                            node.last_used,
                            node.num_pins,
                            node.terms.prompt,
                        )
                    )
                    stack.extend((child, count) for child in node.children.values())
                    count += 1
            yield batch

    def facts(self, serial: int) -> NodeFacts | None:
        """One node by its serial number; ``None`` where there is none (any more)."""
        with self._lock:
            known = {space.digest: space for space in self._spaces()}
            roots = self._index.roots()
        for digest, root in roots:
            if digest in known and (node := self._find(root, serial)) is not None:
                return self._facts(node, known[digest])
        return None

    def _find(self, root: Node, serial: int) -> Node | None:
        with self._lock:
            stack = list(root.children.values())
        while stack:
            with self._lock:
                for _ in range(min(_NODES_AT_ONCE, len(stack))):
                    node = stack.pop()
                    if node.serial == serial:
                        return node if node.parent is not None else None
                    stack.extend(node.children.values())
                    if not stack:
                        break
        return None

    def _facts(self, node: Node, space: Namespace) -> NodeFacts | None:
        num_below, tokens_below = self._below(node)
        with self._lock:
            if node.parent is None:
                return None
            rank, now_s = self._moment()
            runs: list[bytes] = []
            above: Node | None = node
            while above is not None:
                runs.append(above.tokens)
                above = above.parent
            is_first = node.parent.parent is None
            return NodeFacts(
                serial=node.serial,
                space=space,
                path=b"".join(reversed(runs)),
                depth_tokens=node.depth_tokens,
                num_uses=node.num_uses,
                last_used=node.last_used,
                rank=rank,
                num_pins=node.num_pins,
                prompt=node.terms.prompt,
                age_s=now_s - node.stored_s,
                expires_in_s=inf if node.expires_s == inf else node.expires_s - now_s,
                num_blocks=len(node.blocks),
                num_held_blocks=self._pool.count_held(node.blocks),
                num_children=len(node.children),
                num_nodes_below=num_below,
                tokens_below=tokens_below,
                parent=None if is_first else node.parent.serial,
                children=tuple(child.serial for child in node.children.values()),
            )

    def _below(self, top: Node) -> tuple[int, int]:
        num_nodes = num_tokens = 0
        with self._lock:
            stack = list(top.children.values())
        while stack:
            with self._lock:
                for _ in range(min(_NODES_AT_ONCE, len(stack))):
                    node = stack.pop()
                    num_nodes += 1
                    num_tokens += node.num_tokens
                    stack.extend(node.children.values())
                    if not stack:
                        break
        return num_nodes, num_tokens
