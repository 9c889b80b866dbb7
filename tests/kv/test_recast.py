"""A lease whose sequence drops tokens: its own blocks only, nothing leaked, nothing shared written over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.kv.terms import Allowance, Allowances
from ostinato.types import TokenArray

SPACE = Namespace(weights="w", tokenizer="t", template="", kv_layout="l", kv_dtype="f", rotary="r")
SIZE = 4


def _tokens(length: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).integers(0, 9, length).astype(np.int32)


def test_blocks_of_its_own_stay_in_place() -> None:
    manager = KVManager(8, SIZE)
    with manager.acquire(SPACE, _tokens(30)) as lease:
        assert lease.reserve(30)
        before = lease.block_ids.tolist()
        assert lease.recast(0, 20) == 0
        assert lease.block_ids.tolist() == before[:5]
        assert manager.num_held_blocks == 5
        manager.check_integrity()


def test_blocks_that_others_can_find_are_replaced() -> None:
    manager, tokens = KVManager(16, SIZE), _tokens(22)
    with manager.acquire(SPACE, tokens) as lease:
        assert lease.reserve(30)
        lease.commit(tokens)
        before = lease.block_ids.tolist()
        assert lease.recast(2, 28) == 2
        after = lease.block_ids.tolist()
        assert after[:2] == before[:2]
        # 22 tokens lie in 6 blocks; of the others two are its own.
        assert not set(after[2:]) & set(before[2:6])
        assert set(before[6:]) <= set(after)
        assert manager.peek(SPACE, np.append(tokens, 1).astype(np.int32)) == 22
        manager.check_integrity()
    manager.check_integrity()
    assert manager.num_held_blocks == 0


def test_what_is_kept_as_it_was_is_not_written_to_later() -> None:
    manager, tokens = KVManager(16, SIZE), _tokens(22)
    with manager.acquire(SPACE, tokens) as lease:
        assert lease.reserve(22)
        lease.commit(tokens)
        assert lease.recast(1, 20) == 1
        shared = set(lease.block_ids[:1].tolist())
        assert lease.recast(0, 20) == 0  # and now not even that
        assert not set(lease.block_ids.tolist()) & shared
        manager.check_integrity()


def test_nothing_can_be_committed_afterwards() -> None:
    manager = KVManager(8, SIZE)
    with manager.acquire(SPACE, _tokens(8)) as lease:
        assert lease.reserve(8)
        assert lease.recast(0, 8) == 0
        with pytest.raises(AssertionError, match="no prefix"):
            lease.commit(_tokens(8))


def test_without_room_nothing_changes() -> None:
    manager, tokens = KVManager(8, SIZE), _tokens(24)
    with manager.acquire(SPACE, tokens) as lease, manager.acquire(SPACE, _tokens(8, 1)) as other:
        assert lease.reserve(24)
        assert other.reserve(8)
        lease.commit(tokens)
        before = lease.block_ids.tolist()
        assert lease.recast(0, 24) is None
        assert lease.block_ids.tolist() == before
        manager.check_integrity()
        other.release()
        assert lease.recast(0, 24) == 0
        assert manager.peek(SPACE, np.append(tokens, 1).astype(np.int32)) == 0
        manager.check_integrity()


def test_pinned_blocks_are_never_its_own() -> None:
    manager, tokens = KVManager(8, SIZE, pinned_share=0.5), _tokens(24)
    with manager.acquire(SPACE, tokens) as lease:
        assert lease.reserve(24)
        lease.commit(tokens)
    pin = manager.pin(SPACE, tokens[:8])
    assert pin is not None
    with manager.acquire(SPACE, np.append(tokens, 1).astype(np.int32)) as lease:
        pinned = set(lease.block_ids[:2].tolist())
        assert lease.reserve(28)
        lease.take_copies()
        assert lease.recast(0, 24) == 0
        assert not set(lease.block_ids.tolist()) & pinned
        manager.check_integrity()
    assert manager.peek(SPACE, np.append(tokens[:8], 1).astype(np.int32)) == 8


def test_a_quota_is_kept() -> None:
    manager = KVManager(32, SIZE, allowances=Allowances(Allowance(8, np.inf), {}))
    tokens = _tokens(24)
    with manager.acquire(SPACE, tokens) as lease:
        assert lease.reserve(24)
        lease.commit(tokens)
        assert lease.recast(0, 24) == 0
        assert manager.tenants()[0].num_blocks <= 8
    manager.check_integrity()


@settings(deadline=None)
@given(st.data())
def test_any_order_of_events_leaves_the_books_right(data: st.DataObject) -> None:
    manager = KVManager(12, SIZE)
    leases = []
    for _ in range(data.draw(st.integers(1, 15))):
        step = data.draw(st.sampled_from(["open", "grow", "recast", "close"]))
        if step == "open" or not leases:
            tokens = _tokens(data.draw(st.integers(1, 40)), data.draw(st.integers(0, 1)))
            lease = manager.acquire(SPACE, tokens)
            if lease.reserve(len(tokens)):
                lease.take_copies()
                leases.append((lease, tokens, False))
            else:
                lease.release()
        else:
            lease, tokens, is_recast = leases.pop(data.draw(st.integers(0, len(leases) - 1)))
            if step == "grow" and not is_recast:
                lease.commit(tokens)
            if step == "recast":
                num_places = data.draw(st.integers(1, lease.num_tokens_reserved))
                if lease.recast(data.draw(st.integers(0, num_places // SIZE)), num_places) is not None:
                    is_recast, tokens = True, tokens[:num_places]
            if step == "close":
                lease.release()
            else:
                leases.append((lease, tokens, is_recast))
        manager.check_integrity()
    for lease, _, _ in leases:
        lease.release()
    manager.check_integrity()
    assert manager.num_held_blocks == 0
