"""Overlap, cancellation, failure and jumps of the clock: nothing wrong is served, and a seed says it all."""

import random
from contextlib import closing

import pytest
from made_traces import conversations

from ostinato.kv.policies import POLICY_NAMES, make_policy
from ostinato.kv.policy import LRU
from ostinato.sim.faults import FaultyReplay
from ostinato.sim.replay import ReplayClock
from ostinato.sim.tiered import WrongBlockError


def faulty(name, seed, capacity=60, **options):
    clock = ReplayClock()
    policy = make_policy(name, num_blocks=capacity, block_tokens=1, clock=clock)
    return FaultyReplay(capacity, policy, clock, random.Random(seed), **options)


def played(folder, seed, name="lru", num_requests=250, *, play=FaultyReplay.run):
    with closing(faulty(name, seed, tier_folder=folder, tier_capacity=150)) as replay:
        return play(replay, conversations(4, num_requests).requests)


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
    replay._arena.wipe()
    with pytest.raises(WrongBlockError, match="wanted unit"):
        replay.run(requests[100:])


@pytest.mark.parametrize("name", ["lru", "workload"])
def test_a_failing_tier_serves_nothing_wrong(tmp_path, name):
    counts = played(tmp_path / "tier", 3, name, 500)
    assert counts.num_checked == counts.num_events > 900
    assert min(counts.num_tier_failures, counts.num_torn, counts.num_lost, counts.num_restarts) > 0
    assert counts.tier_hit_units > 30
    assert counts.num_cancelled_loads > 0
    assert counts.num_corrupt > 0, "torn blocks were never read"


def test_a_seed_replays_the_same_events_through_threads_and_files(tmp_path):
    first, again, other = (played(tmp_path / str(place), seed) for place, seed in enumerate((7, 7, 8)))
    assert first == again
    assert first.digest != other.digest


def test_a_tier_that_lies_is_noticed_at_the_same_event_each_time(tmp_path):
    """The check itself: a store without checksums would serve what was torn."""

    def lying(replay, requests):
        load = replay._below.tier._tier.load
        calls = 0

        def lie(key, into):
            nonlocal calls
            calls += 1
            found = load(key, into)
            if calls == 40:
                into[0] ^= 1
            return found

        replay._below.tier._tier.load = lie
        replay._happen_below = lambda below, draw: None  # no restart: the liar stays
        with pytest.raises(WrongBlockError, match="wanted unit") as caught:
            replay.run(requests)
        return str(caught.value), caught.value.__notes__

    first = played(tmp_path / "a", 5, num_requests=400, play=lying)
    assert first == played(tmp_path / "b", 5, num_requests=400, play=lying)
    assert "event " in first[1][0]
