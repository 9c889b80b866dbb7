"""The radix tree of stored tokens that runs are found in."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ostinato.types import TokenArray, num_common

_NO_TOKENS: TokenArray = np.empty(0, np.int32)


class Piece:
    """A run of tokens below its parent.

    ``number`` names it in the table; ``units`` are n-grams that short units begin with, and that end in it.
    """

    __slots__ = ("children", "is_hot", "number", "parent", "start", "tokens", "tree", "units")

    def __init__(self, tree: Tree, parent: Piece | None, tokens: TokenArray, start: int) -> None:
        self.tree = tree
        self.parent = parent
        self.tokens = tokens  # replaced, never written to
        self.start = start
        self.children: dict[int, Piece] = {}
        self.units: tuple[tuple[int, int], ...] = ()  # (place, size of the n-gram)
        self.number = 0
        self.is_hot = False

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def up(self) -> Iterator[Piece]:
        """Itself and all above it but the root."""
        piece = self
        while piece.parent is not None:
            yield piece
            piece = piece.parent

    def path_tokens(self, start: int, end: int) -> TokenArray:
        """Tokens ``[start, end)`` of the sequence that ends with this piece."""
        parts = []
        for piece in self.up():
            if piece.start < end and start < piece.end:
                parts.append(piece.tokens[max(0, start - piece.start) : end - piece.start])
            if piece.start <= start:
                break
        return np.concatenate(parts[::-1]) if parts else _NO_TOKENS


class Tree:
    """One namespace's pieces. An empty tree is dropped."""

    __slots__ = ("namespace", "root", "seed")

    def __init__(self, namespace: str, seed: int) -> None:
        self.namespace = namespace
        self.seed = seed
        self.root = Piece(self, None, _NO_TOKENS, 0)


def walk(root: Piece, tokens: TokenArray) -> tuple[Piece, int]:
    """The last piece that ``tokens`` run through, and how many of them do."""
    piece, found = root, 0
    while found < len(tokens):
        child = piece.children.get(int(tokens[found]))
        if child is None:
            break
        piece = child
        found += num_common(piece.tokens, tokens[found:])
        if found < piece.end:
            break
    return piece, found


def owner(piece: Piece, place: int) -> Piece:
    """The piece at or above ``piece`` that has token ``place``."""
    while piece.start > place:
        assert piece.parent is not None, f"token {place} stands in no piece"
        piece = piece.parent
    return piece
