"""The prefix index: one radix tree over tokens for every namespace.

An edge holds a run of tokens and the blocks that cover them. Trees part at any token, also inside a block;
then the block at the boundary is in both the upper node (which vouches for its first tokens only) and a lower
one. A child that begins inside a block always has that whole block's content, so when a table is put together
the child's block *overrides* the parent's partly valid last one::

    block_size 4      upper  [a b c d|e f]      blocks 7 8      (8 is valid up to f)
                       ├── lower    [g h|i]     blocks     8 9  (split off upper: still the same block)
                       └── other    [x y|z]     blocks     5 6  (5 begins with a copy of e f)

Three invariants carry everything else; ``check_integrity`` asserts the first two.

- *Holds are closed upwards.* If a lease holds an entry, some lease holds every entry above it, overridden
  ones included. So every owned block that nobody holds can be evicted from the leaves inwards, and their
  number is exact. The manager does its part by holding what ``match`` and ``insert`` report.
- *The entries of one block lie next to each other on one path*, so one chain of leaves gives it up.
- *Nodes are bounded by blocks.* Only commits add nodes, and a node left with one child is merged with it
  when one of the two is shorter than a block or the policy cannot tell them apart. (Of different terms or
  deadlines, or pinned differently, they stay apart: then tokens are the bound.)

Every node has a deadline: some use, and the time to live that its user asked for. What is used is used up to
the root, so a parent's deadline is never before its child's, and what has expired can be dropped from the
leaves inwards as well.

No recursion: prompts decide how deep a tree is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from ostinato.types import BlockIds

from .nodes import (
    NO_BLOCKS,
    NO_MATCH,
    NOTHING_NEW,
    TOKEN_BYTES,
    BlockCounts,
    Deadlines,
    Inserted,
    Match,
    Moment,
    Node,
    Tree,
    assemble,
    check_node,
    walk,
    walk_living,
)
from .policy import (
    EvictionPolicy,
    HistoryPolicy,
    NodeStats,
    Outlook,
    Priority,
    ScoredQueue,
    Use,
    VictimQueue,
)

_MAX_BEHIND = 8  # requests that an order of victims may be old
_LEAVES_AT_ONCE = 64


class PrefixIndex:
    """All trees. Token sequences are int32 arrays' bytes, namespaces are digests; nothing here locks."""

    def __init__(self, block_size: int, blocks: BlockCounts, policy: EvictionPolicy | HistoryPolicy) -> None:
        assert block_size >= 1, f"block size {block_size}"
        self.num_tokens = 0
        self.num_nodes = 0
        self._block_size = block_size
        self._blocks = blocks
        self._trees: dict[str, Tree] = {}
        self._policy: EvictionPolicy | None = None
        self._history: HistoryPolicy | None = None
        self._deadlines = Deadlines()
        self._leaves: VictimQueue[Node]
        if isinstance(policy, HistoryPolicy):
            self._history = policy
            self._leaves = ScoredQueue(policy, max_behind=_MAX_BEHIND)
        else:
            self._policy = policy
            self._leaves = VictimQueue(policy)

    @property
    def block_size(self) -> int:
        return self._block_size

    # ------------------------------------------------------------ look up

    def peek(self, namespace: str, tokens: bytes, now_s: float = 0.0) -> int:
        """Length of the longest prefix of ``tokens`` that is here."""
        tree = self._trees.get(namespace)
        return 0 if tree is None else walk_living(tree.root, tokens, now_s)[1]

    def match(self, namespace: str, tokens: bytes, max_tokens: int, moment: Moment) -> Match:
        """The longest prefix that is here, cut at ``max_tokens``; ``moment`` uses what it runs through.

        A node that the prompt parts from is not touched: when the rest is committed it is split there, and
        only the upper half was used.
        """
        tree = self._trees.get(namespace)
        if tree is None:
            return NO_MATCH
        path, found = walk_living(tree.root, tokens, moment.now_s)
        parts = bool(path) and found < path[-1].end_tokens and found * TOKEN_BYTES < len(tokens)
        for node in path[:-1] if parts else path:
            node.num_uses += 1
            self._touch(node, moment)
        return assemble(path, min(found, max_tokens), self._block_size)

    def hint(self, namespace: str, tokens: bytes, outlook: Outlook) -> int:
        """What is said of ``tokens`` holds for what only they ran through; returns how many tokens that is.

        That is the end of their path up to where another prompt parts from it. Rules by rank give up first
        what is abandoned or over; to rules with a history it is something to judge by. A use makes it void.
        """
        tree = self._trees.get(namespace)
        path, found = ([], 0) if tree is None else walk(tree.root, tokens)
        num_tokens = 0
        if not path or path[-1].children or found < path[-1].end_tokens:
            return 0  # something went on from there
        goes_first = outlook >= Outlook.ABANDONED
        for node in reversed(path):
            if len(node.children) > 1:
                break
            num_tokens += node.num_tokens
            if self._history is not None:
                self._history.hinted(node.tag, outlook)
            elif goes_first:
                node.last_used = node.inserted = node.num_uses = 0
            self._leaves.refresh(node)
        return num_tokens

    @property
    def obeys_hints(self) -> bool:
        return self._history is None or self._history.obeys

    def tend(self) -> bool:
        """A slice of what the policy has put off, then the order of victims; true while more is left."""
        if self._history is None:
            return False
        assert isinstance(self._leaves, ScoredQueue)
        if self._history.tend():
            return True
        self._leaves.renew()
        return False

    def num_tokens_in(self, namespace: str) -> int:
        """Tokens findable in one namespace."""
        tree = self._trees.get(namespace)
        return 0 if tree is None else tree.num_tokens

    def roots(self) -> list[tuple[str, Node]]:
        """Every namespace that has something, and the root of its tree: to look at, not to touch."""
        return [(name, tree.root) for name, tree in self._trees.items()]

    # ------------------------------------------------------------ insert

    def insert(
        self, namespace: str, tokens: bytes, table: BlockIds, moment: Moment, use: Use | None = None
    ) -> Inserted:
        """Makes all of ``tokens``, whose KV lies in ``table``, findable; what is here keeps its blocks.

        The caller holds ``table``, and has to hold all of the returned path before anything else happens.
        ``use`` tells a policy with a history whose tokens these are.
        """
        num_tokens = len(tokens) // TOKEN_BYTES
        assert len(table) * self._block_size >= num_tokens, f"{len(table)} blocks for {num_tokens} tokens"
        if num_tokens == 0:
            return NOTHING_NEW
        tree = self._trees.get(namespace)
        if tree is None:
            tree = self._trees[namespace] = Tree(namespace)
        cuts = [] if self._history is None else self._observe(use or Use(namespace), tokens)
        path, found = walk(tree.root, tokens)
        if found == num_tokens:
            if self._history is not None:
                self._part_tail(path, found)
            self._place(path, moment)
            return NOTHING_NEW
        if path and found < path[-1].end_tokens:
            path[-1] = self._split(path[-1], found)
        num_blocks = 0
        for end in (*(cut for cut in cuts if cut > found), num_tokens):
            part = tokens if end == num_tokens else tokens[: end * TOKEN_BYTES]
            if path and not path[-1].children and self._goes_on(path[-1], end, moment):
                num_blocks += self._extend(path[-1], part, table)
            else:
                path.append(self._add_child(path[-1] if path else tree.root, part, table, moment))
                num_blocks += self._blocks.own(path[-1].blocks)
            self._align(path[-1])
        self._place(path, moment)
        self._count(tree, num_tokens - found)
        return Inserted(num_tokens - found, num_blocks, assemble(path, num_tokens, self._block_size))

    def _observe(self, use: Use, tokens: bytes) -> list[int]:
        assert self._history is not None
        assert isinstance(self._leaves, ScoredQueue)
        self._leaves.observed()
        return self._history.observe(use, tokens)

    def _part_tail(self, path: list[Node], found: int) -> None:
        """Cuts the last node where the request ended, at a block's end: only the upper part was used."""
        at = found - found % self._block_size
        if path[-1].depth_tokens < at < path[-1].end_tokens:
            path[-1] = self._split(path[-1], at)

    def _goes_on(self, leaf: Node, end: int, moment: Moment) -> bool:
        """Whether tokens up to ``end`` may join a leaf: the policy could not tell them from it.

        Or one of the two is shorter than a block, which would let nodes outnumber blocks.
        """
        if leaf.terms != moment.terms or leaf.num_pins:
            return False
        if self._history is not None:
            return leaf.tag is self._history.tag_at(leaf.end_tokens)
        assert self._policy is not None
        rank = moment.rank
        num_fresh = end - leaf.end_tokens
        if min(num_fresh, leaf.num_tokens) < self._block_size:
            return True
        joined = NodeStats(rank, leaf.inserted, leaf.num_uses, leaf.depth_tokens, leaf.num_tokens)
        apart = NodeStats(rank, rank, 0, leaf.depth_tokens, leaf.num_tokens)
        priority, other = self._policy.priority(joined), self._policy.priority(apart)
        return not (priority < other or other < priority)

    def _split(self, node: Node, at: int) -> Node:
        """Puts a new node over ``node`` that takes its tokens before ``at``; returns the new one."""
        parent = node.parent
        assert parent is not None, "split a root"
        cut_bytes = TOKEN_BYTES * (at - node.depth_tokens)
        first = node.depth_tokens // self._block_size
        num_upper = -(-at // self._block_size) - first
        tokens, blocks = node.tokens[:cut_bytes], node.blocks[:num_upper]
        upper = Node(node.tree, parent, tokens, blocks, depth=node.depth_tokens, rank=node.inserted)
        upper.last_used, upper.num_uses, upper.tag = node.last_used, node.num_uses, node.tag
        upper.terms, upper.num_pins = node.terms, node.num_pins
        upper.stored_s, upper.expires_s = node.stored_s, node.expires_s
        self._deadlines.note(upper, self.num_nodes)
        parent.children[upper.tokens[:TOKEN_BYTES]] = upper
        node.parent = upper
        node.tokens = node.tokens[cut_bytes:]
        node.blocks = node.blocks[at // self._block_size - first :]
        node.num_tokens -= at - node.depth_tokens
        node.depth_tokens = at
        upper.children[node.tokens[:TOKEN_BYTES]] = node
        if at % self._block_size:
            self._blocks.own(node.blocks[:1])
        self.num_nodes += 1
        self._leaves.refresh(node)
        return upper

    def _add_child(self, parent: Node, tokens: bytes, table: BlockIds, moment: Moment) -> Node:
        depth, size = parent.end_tokens, self._block_size
        blocks = table[depth // size : -(-(len(tokens) // TOKEN_BYTES) // size)].copy()
        tokens = tokens[TOKEN_BYTES * depth :]
        child = Node(parent.tree, parent, tokens, blocks, depth=depth, rank=moment.rank)
        child.terms, child.stored_s, child.expires_s = moment.terms, moment.now_s, moment.expires_s
        self._deadlines.note(child, self.num_nodes)
        self._leaves.drop(parent)
        parent.children[child.tokens[:TOKEN_BYTES]] = child
        self.num_nodes += 1
        return child

    def _extend(self, leaf: Node, tokens: bytes, table: BlockIds) -> int:
        """Appends the rest of ``tokens`` to a leaf; its partly valid last block gives way to the table's."""
        end, size = leaf.end_tokens, self._block_size
        fresh = table[end // size : -(-(len(tokens) // TOKEN_BYTES) // size)]
        kept = leaf.blocks[: end // size - leaf.depth_tokens // size]
        replaced = leaf.blocks[len(kept) :]
        leaf.tokens += tokens[TOKEN_BYTES * end :]
        leaf.num_tokens = len(leaf.tokens) // TOKEN_BYTES
        leaf.blocks = np.concatenate((kept, fresh))
        if len(replaced) and replaced[0] == fresh[0]:
            return self._blocks.own(fresh[1:])
        num_blocks = self._blocks.own(fresh)
        self._blocks.disown(replaced)
        return num_blocks

    def _align(self, node: Node) -> None:
        """Keeps the entries of a block together.

        The block that ``node`` begins in may stand further up already, with another's block between: the
        writer of 8 above committed up to ``f``, somebody's 5 went on with ``g``, and now the writer of 8 has
        gone through ``g`` as well and parted. What stands between gives way to it: it holds the same tokens.
        """
        block = node.blocks[0]
        between: list[Node] = []
        while node.depth_tokens % self._block_size:
            assert node.parent is not None, "a root begins inside a block"
            node = node.parent
            if node.blocks[-1] == block:
                for lower in between:
                    self._blocks.disown(lower.blocks[-1:])
                    lower.blocks = np.append(lower.blocks[:-1], block)
                    self._blocks.own(lower.blocks[-1:])
                return
            between.append(node)
            if len(node.blocks) > 1:
                return

    # ------------------------------------------------------------ evict

    def evict(self, num_blocks: int) -> tuple[int, int]:
        """Gives up leaves, smallest priority first and tail first, until ``num_blocks`` blocks became free.

        The caller knows that so many are evictable. Returns the blocks freed (a merge may free a few
        more) and the tokens no longer findable.
        """
        num_freed, num_before = 0, self.num_tokens
        while num_freed < num_blocks:
            num_freed += self._trim(self._leaves.pop(), num_blocks - num_freed)
        return num_freed, num_before - self.num_tokens

    def clear(self, namespace: str) -> tuple[int, int]:
        """Gives up all of a tree that nobody holds; returns blocks freed and tokens no longer findable."""
        tree = self._trees.get(namespace)
        num_freed, num_before = 0, self.num_tokens
        leaves = [] if tree is None else [node for node in tree.nodes() if not node.children]
        while leaves:
            leaf = leaves.pop()
            parent = leaf.parent
            assert parent is not None, "cleared a root"
            num_freed += self._trim(leaf, len(leaf.blocks))
            if not parent.children and parent.parent is not None:
                leaves.append(parent)
        return num_freed, num_before - self.num_tokens

    def evict_from(self, namespaces: Iterable[str], num_blocks: int) -> int:
        """As :meth:`evict`, out of these trees only, as far as they have so many; returns the blocks freed.

        All of their leaves are looked at. Of very many leaves some more are given up, so that this is rare.
        """
        trees = [tree for name in namespaces if (tree := self._trees.get(name)) is not None]
        found = [node for tree in trees for node in tree.nodes() if not node.children and node.parked_on < 0]
        order = [(key, node.ticket, node) for key, node in zip(self._keys(found), found, strict=True)]
        heapify(order)
        num_freed, num_blocks = 0, max(num_blocks, len(found) // _LEAVES_AT_ONCE)
        while order and num_freed < num_blocks:
            _, ticket, leaf = heappop(order)
            parent = leaf.parent
            if parent is None or leaf.children or leaf.parked_on >= 0:
                continue
            if leaf.ticket != ticket:  # a merge has moved it
                heappush(order, (self._keys([leaf])[0], leaf.ticket, leaf))
                continue
            num_freed += self._trim(leaf, num_blocks - num_freed)
            if leaf.parent is not None and leaf.parked_on < 0:
                heappush(order, (self._keys([leaf])[0], leaf.ticket, leaf))
            elif parent.parent is not None and not parent.children:
                heappush(order, (self._keys([parent])[0], parent.ticket, parent))
        return num_freed

    def _keys(self, leaves: list[Node]) -> list[Priority]:
        """What orders leaves now; the smallest goes first."""
        if self._history is not None:
            scores: list[Priority] = []
            if leaves:
                scores += self._history.scores([leaf.tag for leaf in leaves]).tolist()
            return scores
        assert self._policy is not None
        return [self._policy.priority(leaf) for leaf in leaves]

    # ------------------------------------------------------------ what may not stay, and what must

    def expire(self, now_s: float) -> tuple[int, int]:
        """Gives up what has expired and nobody holds; returns blocks freed and tokens no longer findable.

        What is held comes back here until it is let go.
        """
        num_freed, num_before = 0, self.num_tokens
        for node in self._deadlines.take_due(now_s, self.num_nodes):
            if node.parent is not None and not node.children:
                num_freed += self._trim(node, len(node.blocks))
            if node.parent is not None:
                self._deadlines.note(node, self.num_nodes)
        return num_freed, num_before - self.num_tokens

    def purge(self, namespace: str, is_meant: Callable[[Node], bool]) -> tuple[int, BlockIds]:
        """Drops every node that is meant, held or not, and what stands below it.

        Returns the tokens no longer findable, and the blocks that lost an entry; some may be in use still.
        """
        tree = self._trees.get(namespace)
        if tree is None:
            return 0, NO_BLOCKS
        num_before = self.num_tokens
        dropped: list[BlockIds] = []
        todo = list(tree.root.children.values())
        while todo:
            node = todo.pop()
            if node.parent is None:
                continue  # it went with what stood above it
            if is_meant(node):
                dropped += self._cut_off(node)
            else:
                todo.extend(node.children.values())
        return num_before - self.num_tokens, np.unique(np.concatenate(dropped)) if dropped else NO_BLOCKS

    def _cut_off(self, top: Node) -> list[BlockIds]:
        """Takes a node and all below it out of its tree, leaves first; returns their blocks."""
        below = [top]
        for node in below:
            below.extend(node.children.values())
        blocks = [node.blocks for node in below]
        for node in reversed(below):
            parent = node.parent
            assert parent is not None, "cut off a root"
            self._blocks.disown(node.blocks)
            if node is not top:
                parent.children.clear()  # its siblings go as well: no merge, no turn as a leaf
                node.children.clear()
                self._leaves.drop(node)
                if self._history is not None:
                    self._history.evicted(node.tag)
                node.parent = None
                self.num_nodes -= 1
                self._count(node.tree, -node.num_tokens)
        top.children.clear()
        self._remove(top)
        return blocks

    def pin(self, namespace: str, tokens: bytes) -> Match:
        """Says that all of ``tokens``, which are here, stay; the caller has to hold the returned path."""
        tree = self._trees.get(namespace)
        num_tokens = len(tokens) // TOKEN_BYTES
        assert tree is not None, "pinned what is not here"
        path, found = walk(tree.root, tokens)
        assert found == num_tokens > 0, f"pinned {num_tokens} tokens, of which {found} are here"
        if found < path[-1].end_tokens:
            path[-1] = self._split(path[-1], found)
        for node in path:
            node.num_pins += 1
        return assemble(path, num_tokens, self._block_size)

    def meets(self, namespace: str, tokens: bytes, is_meant: Callable[[Node], bool]) -> bool:
        """Whether a node that ``tokens`` run through is meant."""
        tree = self._trees.get(namespace)
        return tree is not None and any(map(is_meant, walk(tree.root, tokens)[0]))

    def unpin(self, namespace: str, tokens: bytes) -> None:
        """The way back, of one call of :meth:`pin`."""
        path, found = walk(self._trees[namespace].root, tokens)
        assert found * TOKEN_BYTES == len(tokens), "a pinned prefix is gone"
        for node in path:
            assert node.num_pins > 0, "unpinned more often than pinned"
            node.num_pins -= 1

    def has(self, namespace: str) -> bool:
        """Whether anything of a namespace is here."""
        return namespace in self._trees

    def forget(self) -> tuple[int, int]:
        """Drops every entry, held or not; returns blocks freed and tokens no longer findable."""
        num_freed, num_before = 0, self.num_tokens
        for tree in self._trees.values():
            for node in tree.nodes():
                num_freed += self._blocks.disown(node.blocks)
        self.num_tokens = self.num_nodes = 0
        self._trees.clear()
        self._leaves.clear()
        self._deadlines.clear()
        return num_freed, num_before

    def wake(self, block_ids: BlockIds) -> None:
        """These blocks became evictable."""
        self._leaves.wake(block_ids.tolist())

    def _trim(self, leaf: Node, num_blocks: int) -> int:
        """Gives up to ``num_blocks`` unheld blocks of a leaf's tail; returns how many became free."""
        assert not leaf.children, "trimmed a node that has children"
        tail = leaf.blocks[-num_blocks:]
        num_dropped = len(tail) - self._blocks.count_held(tail)
        if num_dropped == 0:
            self._leaves.park(leaf, int(leaf.blocks[-1]))
            return 0
        kept = leaf.blocks[: len(leaf.blocks) - num_dropped]
        num_freed = self._blocks.disown(tail[len(tail) - num_dropped :])
        if not len(kept):
            return num_freed + self._remove(leaf)
        end = (leaf.depth_tokens // self._block_size + len(kept)) * self._block_size
        num_lost = leaf.end_tokens - end
        leaf.tokens = leaf.tokens[: -TOKEN_BYTES * num_lost]
        leaf.num_tokens -= num_lost
        leaf.blocks = kept
        self._count(leaf.tree, -num_lost)
        self._leaves.put(leaf)
        return num_freed

    def _remove(self, leaf: Node) -> int:
        """Takes a leaf that has no entry left out of its tree; returns how many blocks a merge freed."""
        parent = leaf.parent
        assert parent is not None, "removed a root"
        self._leaves.drop(leaf)
        if self._history is not None:
            self._history.evicted(leaf.tag)
        del parent.children[leaf.tokens[:TOKEN_BYTES]]
        leaf.parent = None
        self.num_nodes -= 1
        self._count(leaf.tree, -leaf.num_tokens)
        if parent.parent is None:
            if not parent.children:
                assert leaf.tree.num_tokens == 0, "an empty tree has tokens"
                del self._trees[leaf.tree.namespace]
        elif not parent.children:
            self._leaves.put(parent)
        elif len(parent.children) == 1:
            return self._merge(parent)
        return 0

    def _merge(self, upper: Node) -> int:
        """Joins a node with its only child where that costs next to nothing of what the policy knows.

        The longer of the two keeps its statistics. Returns how many blocks became free: an overridden one.
        """
        (lower,) = upper.children.values()
        parent, size = upper.parent, self._block_size
        assert parent is not None, "merged a root"
        if upper.terms != lower.terms or upper.num_pins != lower.num_pins:
            return 0
        if upper.expires_s != lower.expires_s:
            return 0  # neither shall go with the other, or stay for it
        if self._policy is None:
            if upper.tag is not lower.tag:
                return 0
        elif size <= upper.num_tokens and size <= lower.num_tokens:
            priority, other = self._policy.priority(upper), self._policy.priority(lower)
            if priority < other or other < priority:
                return 0
        if lower.num_tokens < upper.num_tokens:
            lower.last_used, lower.inserted, lower.num_uses = upper.last_used, upper.inserted, upper.num_uses
        lower.stored_s = min(lower.stored_s, upper.stored_s)
        kept, overridden = upper.blocks, upper.blocks[:0]
        if lower.depth_tokens % size:
            kept, overridden = upper.blocks[:-1], upper.blocks[-1:]
        lower.tokens = upper.tokens + lower.tokens
        lower.blocks = np.concatenate((kept, lower.blocks))
        lower.depth_tokens = upper.depth_tokens
        lower.num_tokens += upper.num_tokens
        lower.parent = parent
        parent.children[lower.tokens[:TOKEN_BYTES]] = lower
        upper.parent = None
        self.num_nodes -= 1
        self._leaves.refresh(lower)
        return self._blocks.disown(overridden)

    # ------------------------------------------------------------ inside

    def _place(self, path: list[Node], moment: Moment) -> None:
        for node in path:
            if self._history is not None:
                node.tag = self._history.tag_at(node.depth_tokens)
            self._touch(node, moment)

    def _touch(self, node: Node, moment: Moment) -> None:
        node.last_used = moment.rank
        node.inserted = node.inserted or moment.rank  # 0: it was said that it would not come back
        node.expires_s = max(node.expires_s, moment.expires_s)
        if not node.children:
            self._leaves.put(node)

    def _count(self, tree: Tree, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        tree.num_tokens += num_tokens

    def check_integrity(self, holds: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Asserts every invariant. ``holds`` is each block's count of leases; returns its count of nodes."""
        owners = np.zeros(len(holds), np.int32)
        num_tokens = num_nodes = 0
        leaves: list[Node] = []
        for namespace, tree in self._trees.items():
            assert tree.namespace == namespace
            assert tree.root.children, "an empty tree was kept"
            num_before = num_tokens
            for node in tree.nodes():
                num_nodes += 1
                num_tokens += node.num_tokens
                np.add.at(owners, node.blocks, 1)
                check_node(node, tree, holds, self._block_size)
                if not node.children:
                    leaves.append(node)
                    waits_for = node.parked_on
                    assert waits_for < 0 or (waits_for == node.blocks[-1] and holds[waits_for])
            assert tree.num_tokens == num_tokens - num_before
        self._leaves.check_integrity(leaves)
        assert self.num_tokens == num_tokens
        assert self.num_nodes == num_nodes
        self._deadlines.check_integrity(node for tree in self._trees.values() for node in tree.nodes())
        return owners
