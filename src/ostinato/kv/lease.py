"""What one request holds of the arena. The books are the manager's: a lease asks it, under its lock."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ostinato.types import BlockIds, SlotCopy, TokenArray

from .hashing import Namespace
from .nodes import TOKEN_BYTES, Match
from .policy import RequestHints, Use
from .pool import BlockTable
from .terms import Terms

if TYPE_CHECKING:
    from .manager import KVManager


class Lease:
    """What one request holds: a prefix that was found, and the blocks it grows into.

    Leaving the ``with`` block always releases. Token indices count from the start of the sequence, and the
    table covers ``[0, num_tokens_reserved)``. Slots before ``prefix_len`` are shared: read them, never write.
    """

    __slots__ = (
        "_also_held",
        "_copies",
        "_is_purged",
        "_is_recast",
        "_is_released",
        "_manager",
        "_needs_copy",
        "_source",
        "_table",
        "_terms",
        "_tokens",
        "_use",
        "namespace",
        "prefix_len",
    )

    def __init__(
        self,
        manager: KVManager,
        namespace: Namespace,
        match: Match,
        tokens: bytes,
        hints: RequestHints,
        terms: Terms,
    ) -> None:
        self.namespace = namespace
        self.prefix_len = match.num_tokens
        self._manager = manager
        self._table = BlockTable(match.blocks, manager.block_size)
        self._needs_copy = match.num_tokens % manager.block_size != 0  # the last block is not ours to write
        self._copies: tuple[SlotCopy, ...] = ()
        self._source: int | None = None  # of a copy that may not have run yet
        self._also_held = set(match.overridden)
        self._tokens = tokens  # found or committed so far
        self._use = Use(namespace.digest, hints)
        self._terms = terms
        self._is_purged = False
        self._is_recast = False
        self._is_released = False

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def num_tokens_reserved(self) -> int:
        """How many tokens the table has room for. A shared last block counts up to the hit only."""
        return self.prefix_len if self._needs_copy else self._table.num_blocks * self._manager.block_size

    @property
    def terms(self) -> Terms:
        """For how long and under which name its tokens are kept."""
        return self._terms

    @property
    def is_purged(self) -> bool:
        """Whether a purge has caught it: what it computes is its own, and is not kept anywhere."""
        return self._is_purged

    @property
    def block_ids(self) -> BlockIds:
        """The block table, int. Do not write to it; it is valid until the next ``reserve``."""
        return self._table.ids

    def reserve(self, num_tokens: int, *, spare_tokens: int = 0) -> bool:
        """Makes room for the tokens ``[0, num_tokens)``, evicting what nobody holds where that is needed.

        ``False``: there is not room now, and nothing changed. The only lease there is can always have all
        of the arena. ``spare_tokens`` more are taken if they are free and continue the last block.

        The first growth after a hit that ends inside a block replaces that block by a private copy:
        ``take_copies`` afterwards.
        """
        assert not self._is_released, "reserved on a released lease"
        return num_tokens <= self.num_tokens_reserved or self._manager._reserve(
            self, num_tokens, spare_tokens
        )

    def take_copies(self) -> tuple[SlotCopy, ...]:
        """The copies to run before anything is written or read, each handed out once.

        Their sources stay as they are until the first ``commit`` of more than the hit, or ``release``.
        """
        copies, self._copies = self._copies, ()
        return copies

    def slots(self, start: int, end: int) -> TokenArray:
        """Slots of the tokens ``[start, end)``: int32, shape ``(end - start,)``."""
        self._check_range(start, end)
        return self._table.slots(start, end)

    def commit(self, tokens: TokenArray) -> int:
        """Makes ``tokens``, the whole sequence so far, findable: all of its KV is written.

        May be called as often as the sequence grows; the owner goes on writing behind ``tokens`` in the last
        block. A commit of no more than the hit does nothing: the lease has written nothing yet. Returns how
        many tokens became newly findable, and emits ``BlocksStored`` if any did.
        """
        return self._manager._commit(self, tokens)

    def recast(self, num_blocks: int, num_tokens: int) -> int | None:
        """Of a sequence that drops tokens: a table of room for ``num_tokens`` places in all.

        Up to ``num_blocks`` leading blocks stay as they are: their number is returned. All others are the
        lease's own from here on, blocks that somebody else can find having been replaced. Whoever asks moves
        what is kept there, from the blocks of the table as it was, before anybody else gets to write; copies
        that were taken have run. Nothing can be committed any more: what was committed stays findable.
        ``None``: there is not room now, and nothing changed.
        """
        return self._manager._recast(self, num_blocks, num_tokens)

    def note_output(self, num_tokens: int) -> None:
        """Says how long the answer is, before it is committed; for the policy."""
        self._use.hints = replace(self._use.hints, output_tokens=num_tokens)

    def release(self) -> None:
        """Lets go of everything; again is nothing. What was not committed is as if it never was."""
        self._manager._release(self)

    def _check_range(self, start: int, end: int) -> None:
        assert not self._is_released, "read the table of a released lease"
        assert 0 <= start <= end <= self.num_tokens_reserved, (
            f"tokens [{start}, {end}) of {self.num_tokens_reserved} reserved"
        )

    @property
    def _num_shared_blocks(self) -> int:
        """Leading blocks that others may find: of the hit, and of what was committed."""
        num_tokens = max(self.prefix_len, len(self._tokens) // TOKEN_BYTES)
        return -(-num_tokens // self._manager.block_size)

    def _held_blocks(self) -> set[int]:
        held = self._also_held.union(self._table.ids.tolist())
        return held if self._source is None else held | {self._source}

    def _tally(self, holds: npt.NDArray[np.int32]) -> None:
        """Adds what this lease holds to every block's count."""
        holds[self._table.ids] += 1
        holds[as_block_ids(self._also_held)] += 1
        if self._source is not None:
            holds[self._source] += 1
        assert len(set(self._table.ids.tolist())) == self._table.num_blocks, "a block is in a table twice"
        assert len(self._tokens) <= TOKEN_BYTES * self.num_tokens_reserved


def as_block_ids(block_ids: Collection[int]) -> BlockIds:
    """As an array, in the order in which they come."""
    return np.fromiter(block_ids, np.intp, len(block_ids))
