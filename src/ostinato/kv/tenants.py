"""Which tenant has how much of the pool.

A block belongs to the tenant whose lease took it, from then until it is free again: namespaces of two tenants
never share one. So two events are counted, a block is taken and a block becomes free, and the sum is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ostinato.types import BlockIds

from .hashing import Namespace

_SPARE = 64


class TenantBooks:
    """Blocks and namespaces by tenant. Nothing here locks; memory is bounded by blocks and trees."""

    __slots__ = ("_account_of_block", "_accounts", "_counts", "_spaces", "_unused")

    def __init__(self, num_blocks: int) -> None:
        self._account_of_block: npt.NDArray[np.int32] = np.full(num_blocks, -1, np.int32)
        self._accounts: dict[str, int] = {}
        self._counts: npt.NDArray[np.int64] = np.zeros(_SPARE, np.int64)
        self._unused: list[int] = []
        self._spaces: dict[str, dict[str, Namespace]] = {}

    # ------------------------------------------------------------ blocks

    def took(self, tenant: str, block_ids: BlockIds) -> None:
        """A lease of this tenant took these free blocks."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._open(tenant)
        self._account_of_block[block_ids] = account
        self._counts[account] += len(block_ids)

    def freed(self, block_ids: BlockIds) -> None:
        """These blocks became free."""
        accounts = self._account_of_block[block_ids]
        np.subtract.at(self._counts, accounts, 1)
        self._account_of_block[block_ids] = -1

    def num_blocks(self, tenant: str) -> int:
        """Blocks that this tenant's leases hold or its namespaces keep."""
        account = self._accounts.get(tenant)
        return 0 if account is None else int(self._counts[account])

    def tenants(self) -> Iterator[tuple[str, int]]:
        """Every tenant that has blocks, and how many."""
        return ((t, int(self._counts[a])) for t, a in self._accounts.items() if self._counts[a])

    def _open(self, tenant: str) -> int:
        if not self._unused and len(self._accounts) == len(self._counts):
            idle = [name for name, account in self._accounts.items() if not self._counts[account]]
            self._unused += [self._accounts.pop(name) for name in idle]
            if len(self._unused) < len(self._counts) // 2:
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        account = self._unused.pop() if self._unused else len(self._accounts)
        self._accounts[tenant] = account
        return account

    # ------------------------------------------------------------ namespaces

    def note(self, namespace: Namespace, has_tree: Callable[[str], bool]) -> None:
        """Something of this namespace is kept now. ``has_tree`` tells for which that still is so."""
        spaces = self._spaces.setdefault(namespace.tenant, {})
        if namespace.digest in spaces:
            return
        spaces[namespace.digest] = namespace
        if len(spaces) & (len(spaces) - 1) == 0:  # at every doubling: what is gone is forgotten
            self._spaces[namespace.tenant] = {d: s for d, s in spaces.items() if has_tree(d)}
        if len(self._spaces) & (len(self._spaces) - 1) == 0:
            kept = {t: {d: s for d, s in e.items() if has_tree(d)} for t, e in self._spaces.items()}
            self._spaces = {tenant: entries for tenant, entries in kept.items() if entries}

    def spaces_of(self, tenant: str) -> list[str]:
        """Digests of all namespaces of a tenant that may have something; some may have nothing any more."""
        return list(self._spaces.get(tenant, ()))

    def spaces(self) -> list[Namespace]:
        """The same of all tenants."""
        return [space for spaces in self._spaces.values() for space in spaces.values()]

    def check_integrity(self, used_blocks: BlockIds) -> None:
        """Asserts every count. ``used_blocks``: those that are not free."""
        accounts = self._account_of_block
        assert (np.flatnonzero(accounts >= 0) == used_blocks).all(), "a free block is on an account"
        counts = np.bincount(accounts[used_blocks], minlength=len(self._counts))
        assert (counts == self._counts).all(), "a tenant's blocks are miscounted"
        known = sorted([*self._accounts.values(), *self._unused])
        assert known == list(range(len(known))), "an account is lost"
