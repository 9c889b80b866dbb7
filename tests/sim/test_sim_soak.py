"""Mixed traffic: what it is made of, and that nothing grows while it is played under faults."""

import random
import tracemalloc
from collections import Counter
from itertools import pairwise

import pytest

from ostinato.sim.soak import soak
from ostinato.sim.traffic import mixed_traffic


def test_traffic_is_mixed_comes_in_order_and_again_from_its_seed():
    made = [list(mixed_traffic(random.Random(seed), duration_s=1800, begun_per_s=0.5)) for seed in (1, 1, 2)]
    first, again, other = ([(r.time_s, r.session, r.units.tolist()) for r in each] for each in made)
    assert first == again != other
    times = [time_s for time_s, _, _ in first]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 1800
    kinds = Counter(session.split()[0] for _, session, _ in first)
    assert kinds.keys() == {"chat", "agent", "documents", "once"}
    assert min(kinds.values()) > 20
    # Turns go on from one another, and sessions share systems and documents.
    turns = [
        units
        for _, session, units in first
        if session == Counter(s for _, s, _ in first).most_common(1)[0][0]
    ]
    assert all(later[: len(units)] == units for units, later in pairwise(turns))
    heads = Counter(tuple(units[:3]) for _, session, units in first if not session.startswith("once"))
    assert heads.most_common(1)[0][1] > 30


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "workload"])
def test_nothing_grows_from_lap_to_lap(tmp_path, policy):
    """`make soak-sim` plays two hours; this is enough to fill everything and then look for growth."""
    tracemalloc.start()
    try:
        laps = soak(
            random.Random(5),
            tmp_path / "tier",
            policy=policy,
            capacity=300,
            tier_capacity=600,
            duration_s=1800,
            lap_s=200,
            history_floor=0,
            begun_per_s=0.1,
            check_every=100,
        )
    finally:
        tracemalloc.stop()
    assert len(laps) == 9
    third = len(laps) // 3
    before = max(lap.python_bytes for lap in laps[third : 2 * third])
    after = max(lap.python_bytes for lap in laps[2 * third :])
    assert after - before < max(256 << 10, before // 20)
    assert laps[-1].hit_units > laps[-1].tier_hit_units > 0
    for lap in laps:
        assert lap.num_cached <= 300
        assert lap.num_in_tier <= 600
