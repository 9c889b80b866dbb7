"""Overlap, cancellation, failure and jumps of the clock: nothing wrong is served, and a seed says it all."""

import random

import pytest
from made_traces import conversations

from ostinato.kv.policies import POLICY_NAMES, make_policy
from ostinato.kv.policy import LRU
from ostinato.sim.faults import FaultyReplay, WrongBlockError
from ostinato.sim.replay import ReplayClock


def faulty(name, seed, capacity=60):
    clock = ReplayClock()
    policy = make_policy(name, num_blocks=capacity, block_tokens=1, clock=clock)
    return FaultyReplay(capacity, policy, clock, random.Random(seed))


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_rule_keeps_the_books_in_order(name, seed):
    counts = faulty(name, seed).run(conversations(seed, 400).requests)
    assert counts.num_checked == counts.num_events > 800
    assert min(counts.num_cancelled, counts.num_failed, counts.num_jumps) > 0
    assert counts.hit_units > 0
    ended = counts.num_finished + counts.num_cancelled + counts.num_failed + counts.num_refused
    assert ended == 400


def test_requests_that_do_not_fit_together_are_refused():
    assert faulty("workload", 3, capacity=35).run(conversations(3, 300).requests).num_refused


def test_a_seed_replays_the_same_events():
    requests = conversations(4, 300).requests
    first, again, other = (faulty("workload", seed).run(requests) for seed in (7, 7, 8))
    assert first == again != other


def test_a_block_given_away_under_a_lease_is_noticed():
    """The check itself: an arena in which one cached slot changed must not go unseen."""
    replay = FaultyReplay(500, LRU(), ReplayClock(), random.Random(1))
    requests = conversations(1, 200).requests
    replay.run(requests[:100])
    replay._arena = [None for _ in replay._arena]
    with pytest.raises(WrongBlockError, match="wanted unit"):
        replay.run(requests[100:])
