"""Finding stored tokens that come back, wherever they stand.

What is stored is a radix tree of tokens for every namespace, because prompts begin alike. Of it every
``STRIDE``-th n-gram of ``GRAM`` tokens goes into a table of fingerprints, and of a prompt *every* n-gram is
looked up. (Winnowing, which samples both sides by content, needs twice the entries for the same guarantee;
and here no text, however periodic, decides how many there are.) Fingerprints only propose: a run is what was
compared token by token, and is as long as can be in both directions::

    stored   a b c|d e f g h i j k|l m          run: source_start 3, length 8
    prompt       x y|d e f g h i j k|z          target_start 2

*The guarantee.* Whatever has ``GUARANTEED_TOKENS`` tokens in common with what is stored is found; so is a
unit (a document, a turn) of ``SHORT_GRAM`` tokens or more that was stored as one. Two bounds: of what is
stored more than eight times some copies are found, not all; and of very many proposals the best are tried.

*Stale is never wrong.* The tree knows tokens, not where KV lies: that of a run is got by looking up
``Found.source``, the stored sequence up to the run's end, in whatever exact index has it (all of it is
compared again). What is not there any more is told to ``forget``. A tree that lags behind costs a look-up.

*What stays.* At most ``max_tokens``. What came back once is kept before what never did, and each in the order
of its last use; leaves go first.

Memory, for each token stored: 4 bytes and its share of the table, 2.2 bytes; about 0.5 kB for each piece, of
which there is at most one for every 64 tokens of room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from ostinato.types import TokenArray

from .choose import choose
from .comparing import Matcher, place_of
from .fingerprints import GRAM, SHORT_GRAM, FingerprintTable, Hashes, Places, gram_hashes
from .pieces import Piece, Tree, walk

STRIDE = 16
GUARANTEED_TOKENS = GRAM + STRIDE - 1
SEAM_TOKENS = 8
_PROTECTED_SHARE = 0.8  # of all tokens, for what came back
_MIN_PIECE = (
    64  # tokens below which a leaf is extended rather than given a child; what pieces have on average
)


@dataclass(frozen=True, slots=True)
class Found:
    """Tokens ``[target_start, target_end)`` of a prompt are ``[source_start, source_end)`` of ``source``.

    ``source`` is the stored sequence from its first token to the run's end, int32: to be looked up where KV
    is, and not to be written to.
    """

    source: TokenArray = field(repr=False)
    source_start: int
    target_start: int
    length: int

    @property
    def source_end(self) -> int:
        return self.source_start + self.length

    @property
    def target_end(self) -> int:
        return self.target_start + self.length

    @property
    def distance(self) -> int:
        """By how many positions it moves."""
        return self.target_start - self.source_start


class RunIndex:
    """Stored tokens, to be found anywhere in a prompt. Namespaces are digests; nothing here locks."""

    def __init__(self, max_tokens: int, *, seed: int = 0) -> None:
        """Room for ``max_tokens``. With a secret ``seed`` nobody can make texts of equal fingerprints."""
        assert max_tokens > 0, f"an index of {max_tokens} tokens"
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._max_pieces = max_tokens // _MIN_PIECE + 64
        self._seed = seed
        self._trees: dict[str, Tree] = {}
        self._table = FingerprintTable(max_tokens // 12 + 64)
        self._num_marks = 0
        self._num_short = 0  # of them, those of SHORT_GRAM tokens
        self._pieces: list[Piece | None] = []
        self._unused: list[int] = []
        # What never came back, and what did; least recently used first. A piece stands before its parent.
        self._cold: OrderedDict[Piece, None] = OrderedDict()
        self._hot: OrderedDict[Piece, None] = OrderedDict()
        self._hot_tokens = 0

    @property
    def num_pieces(self) -> int:
        """Into how many pieces what is stored is divided."""
        return len(self._cold) + len(self._hot)

    @property
    def size_bytes(self) -> int:
        """Memory of tokens and table, without Python's own for each piece."""
        return 4 * self.num_tokens + self._table.size_bytes

    # ------------------------------------------------------------ store

    def add(self, namespace: str, tokens: TokenArray, units: Iterable[tuple[int, int]] = ()) -> int:
        """Stores a sequence (its first ``max_tokens`` tokens); returns how many of them are new.

        ``units`` are spans ``[start, end)`` of it that may come back alone, such as documents and turns. To
        store what is here already is a use of it.
        """
        assert tokens.dtype == np.int32, f"tokens are {tokens.dtype}, not int32"
        tokens = tokens[: self.max_tokens]
        if not len(tokens):
            return 0
        tree = self._trees.get(namespace)
        if tree is None:
            digest = xxhash.xxh3_64_intdigest(namespace.encode("utf-8", "surrogatepass"), self._seed % 2**64)
            tree = self._trees[namespace] = Tree(namespace, digest)
        piece, found = walk(tree.root, tokens)
        if found < piece.end:
            piece = self._split(piece, found)
        if piece is not tree.root:
            self._use(piece)
        if found == len(tokens):
            self._make_room(piece)  # for what a split may have added
            return 0
        fresh = tokens[found:].copy()
        marks = tuple(_short_units(units, found, len(tokens)))
        is_short = min(len(piece.tokens), len(fresh)) < _MIN_PIECE
        if piece.parent is not None and not piece.children and is_short:
            piece.tokens = np.concatenate((piece.tokens, fresh))
            piece.units += marks
            self._note(piece, found, 1)
            self._count(piece, len(fresh))
        else:
            child = self._attach(tree, piece, fresh, found, marks)
            self._cold[child] = None
            self._use_all(piece)
            piece = child
        self._make_room(piece)
        return len(fresh)

    def _attach(
        self, tree: Tree, parent: Piece, tokens: TokenArray, start: int, units: tuple[tuple[int, int], ...]
    ) -> Piece:
        piece = Piece(tree, parent, tokens, start)
        piece.units = units
        parent.children[int(tokens[0])] = piece
        self._enter(piece)
        self._count(piece, len(tokens))
        return piece

    def _enter(self, piece: Piece) -> None:
        """Gives a piece a number, and puts its fingerprints into the table."""
        if self._unused:
            piece.number = self._unused.pop()
            self._pieces[piece.number] = piece
        else:
            piece.number = len(self._pieces)
            self._pieces.append(piece)
        self._note(piece, piece.start, 1)

    def _split(self, piece: Piece, at: int) -> Piece:
        """Puts a new piece over ``piece`` that takes its tokens before ``at``; returns the new one."""
        parent = piece.parent
        assert parent is not None, "split a root"
        self._note(piece, piece.start, -1)
        upper = Piece(piece.tree, parent, piece.tokens[: at - piece.start].copy(), piece.start)
        upper.units = tuple(unit for unit in piece.units if sum(unit) <= at)
        upper.is_hot = piece.is_hot
        parent.children[int(upper.tokens[0])] = upper
        piece.units = tuple(unit for unit in piece.units if sum(unit) > at)
        piece.tokens = piece.tokens[at - piece.start :].copy()
        piece.parent, piece.start = upper, at
        upper.children[int(piece.tokens[0])] = piece
        self._enter(upper)
        self._note(piece, at, 1)
        (self._hot if upper.is_hot else self._cold)[upper] = None
        self._use_all(parent)
        return upper

    def _note(self, piece: Piece, start: int, sign: int) -> None:
        """Adds to the table (``sign`` 1) or removes from it (-1) what ends in a piece behind token ``start``.

        Those are the n-grams at multiples of ``STRIDE``, and those that short units begin with.
        """
        first = max(0, start - GRAM + 1)
        tokens = piece.path_tokens(first, piece.end)
        at = np.arange(-(-first // STRIDE) * STRIDE, piece.end - GRAM + 1, STRIDE)
        hashes = gram_hashes(tokens, GRAM, piece.tree.seed)[at - first]
        for place, size in piece.units:
            if place + size > start:
                gram = piece.path_tokens(place, place + size)
                hashes = np.append(hashes, gram_hashes(gram, size, piece.tree.seed))
                at = np.append(at, place)
        if len(hashes):
            places = place_of(piece.number, at)
            (self._table.insert if sign > 0 else self._table.remove)(hashes, places)
            self._num_marks += sign * len(hashes)
            self._num_short += sign * sum(
                size == SHORT_GRAM for place, size in piece.units if place + size > start
            )

    # ------------------------------------------------------------ what stays

    def _use(self, last: Piece) -> None:
        """What ends with ``last`` came back."""
        for piece in last.up():
            if not piece.is_hot:
                piece.is_hot = True
                del self._cold[piece]
                self._hot[piece] = None
                self._hot_tokens += len(piece.tokens)
        self._use_all(last)
        while self._hot_tokens > _PROTECTED_SHARE * self.max_tokens:
            piece = next(iter(self._hot))
            del self._hot[piece]
            self._cold[piece] = None
            piece.is_hot = False
            self._hot_tokens -= len(piece.tokens)

    def _use_all(self, last: Piece) -> None:
        for piece in last.up():
            (self._hot if piece.is_hot else self._cold).move_to_end(piece)

    def _count(self, piece: Piece, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        if piece.is_hot:
            self._hot_tokens += num_tokens

    def _make_room(self, newest: Piece) -> None:
        """Removes what is worth least until all is within bounds or only ``newest`` and its path are left."""
        while (
            self.num_tokens > self.max_tokens
            or self.num_pieces > self._max_pieces
            or self._num_marks > self._table.max_entries
        ):
            leaf = next(iter(self._cold), newest)
            if leaf is newest:
                leaf = next(iter(self._hot), newest)
            if leaf is newest or leaf.children:
                break
            self._remove(leaf)

    def _remove(self, leaf: Piece) -> None:
        parent = leaf.parent
        assert parent is not None, "removed a root"
        assert not leaf.children, "removed what something stands below"
        self._note(leaf, leaf.start, -1)
        self._count(leaf, -len(leaf.tokens))
        del (self._hot if leaf.is_hot else self._cold)[leaf]
        del parent.children[int(leaf.tokens[0])]
        self._pieces[leaf.number] = None
        self._unused.append(leaf.number)
        if parent.parent is None and not parent.children:
            del self._trees[leaf.tree.namespace]

    def _remove_below(self, top: Piece) -> None:
        """Removes a piece and all that stands below it."""
        below = [top]
        for piece in below:
            below.extend(piece.children.values())
        for piece in reversed(below):
            self._remove(piece)

    def forget(self, namespace: str, tokens: TokenArray, keep: int = 0) -> int:
        """Of the sequence ``tokens`` only the first ``keep`` are still to be had.

        Forgets the one behind those, and with it all that is stored behind it. Returns how many tokens that
        was; 0 where it is not here.
        """
        tree = self._trees.get(namespace)
        assert 0 <= keep <= len(tokens), f"kept {keep} of {len(tokens)} tokens"
        if tree is None or keep == len(tokens):
            return 0
        num_before = self.num_tokens
        piece, found = walk(tree.root, tokens)
        if found > keep:
            while piece.start > keep:
                assert piece.parent is not None
                piece = piece.parent
            if piece.start < keep:
                self._split(piece, keep)
            self._remove_below(piece)
        return num_before - self.num_tokens

    def clear(self, namespace: str) -> int:
        """Forgets all of a namespace; returns how many tokens that was."""
        tree, num_before = self._trees.get(namespace), self.num_tokens
        for piece in list(tree.root.children.values()) if tree is not None else ():
            self._remove_below(piece)
        return num_before - self.num_tokens

    # ------------------------------------------------------------ find

    def find(
        self,
        namespace: str,
        tokens: TokenArray,
        *,
        start: int = 0,
        end: int | None = None,
        min_tokens: int = GUARANTEED_TOKENS,
        seam_tokens: int = SEAM_TOKENS,
    ) -> tuple[Found, ...]:
        """Runs of ``tokens[start:end]`` that are stored, in order, none overlapping another.

        Of all runs of at least ``min_tokens`` those that cover the most, where one run more has to cover
        more than ``seam_tokens`` tokens more, because each seam has to be repaired. Where two overlap the
        second is cut. This is no use of what is found: ``note_use`` is.
        """
        end = len(tokens) if end is None else end
        assert tokens.dtype == np.int32, f"tokens are {tokens.dtype}, not int32"
        assert 0 <= start <= end <= len(tokens), f"looked for [{start}, {end}) of {len(tokens)} tokens"
        tree = self._trees.get(namespace)
        if tree is None or end - start < SHORT_GRAM:
            return ()
        proposed = self._propose(tree, tokens, start, end)
        runs = Matcher(self._pieces, tree, tokens, start, end).runs(*proposed)
        runs = [run for run in runs if run.end - run.start >= min_tokens]
        found = []
        for part in choose([(run.start, run.end) for run in runs], seam_tokens):
            run = runs[part.index]
            source = run.piece.path_tokens(0, part.end - run.shift)
            found.append(Found(source, part.start - run.shift, part.start, part.end - part.start))
        return tuple(found)

    def note_use(self, namespace: str, found: Found) -> None:
        """What was found has been used: it came back."""
        tree = self._trees.get(namespace)
        if tree is not None:
            piece, _ = walk(tree.root, found.source)
            if piece is not tree.root:
                self._use(piece)

    def _propose(
        self, tree: Tree, tokens: TokenArray, start: int, end: int
    ) -> tuple[npt.NDArray[np.intp], Places]:
        """Where in the prompt an n-gram begins that may be stored, and its place (piece and token)."""
        sides: list[tuple[npt.NDArray[np.intp], Places]] = []
        for size in (GRAM, SHORT_GRAM) if self._num_short else (GRAM,):
            hashes: Hashes = gram_hashes(tokens[start:end], size, tree.seed)
            sides.append(self._table.look_up(hashes))
        at, places = (np.concatenate(side) for side in zip(*sides, strict=True))
        return at + start, places

    def check_integrity(self) -> None:
        """Asserts every invariant. For tests: it looks at everything."""
        num_tokens = num_hot = num_pieces = num_marks = 0
        rank = {piece: at for at, piece in enumerate((*self._cold, *self._hot))}
        for tree in self._trees.values():
            todo = list(tree.root.children.values())
            while todo:
                piece = todo.pop()
                todo.extend(piece.children.values())
                parent = piece.parent
                assert parent is not None
                assert piece.tree is tree
                assert parent.children[int(piece.tokens[0])] is piece
                assert piece.start == parent.end
                assert self._pieces[piece.number] is piece
                assert piece in (self._hot if piece.is_hot else self._cold)
                assert parent is tree.root or rank[piece] < rank[parent], "a parent would go first"
                first = -(-max(0, piece.start - GRAM + 1) // STRIDE) * STRIDE
                num_marks += len(range(first, piece.end - GRAM + 1, STRIDE)) + len(piece.units)
                num_tokens += len(piece.tokens)
                num_hot += len(piece.tokens) if piece.is_hot else 0
                num_pieces += 1
        assert (num_tokens, num_hot, num_pieces) == (self.num_tokens, self._hot_tokens, self.num_pieces)
        assert num_marks == self._num_marks
        assert self._table.count() <= num_marks, "the table has what is not stored"
        assert len(self._pieces) == num_pieces + len(self._unused)
        assert num_tokens <= self.max_tokens


def _short_units(units: Iterable[tuple[int, int]], found: int, length: int) -> Iterator[tuple[int, int]]:
    """Of units that may escape the n-grams at multiples of ``STRIDE``: the n-gram each begins with.

    Only such as end behind token ``found``, up to which everything was stored before.
    """
    for start, end in dict.fromkeys(units):
        assert 0 <= start <= end, f"a unit [{start}, {end})"
        num_tokens = min(end, length) - start
        size = GRAM if num_tokens >= GRAM else SHORT_GRAM
        is_short = SHORT_GRAM <= num_tokens < GUARANTEED_TOKENS
        if is_short and start + size > found and (size == SHORT_GRAM or start % STRIDE):
            yield start, size
