"""A simulated fleet against what has to hold of any: nothing lost, no time gained from nowhere."""

from __future__ import annotations

import json
import random

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from made_traces import conversations, recorded

from ostinato.cli import main
from ostinato.kv.policies import make_policy
from ostinato.routing import STRATEGIES, RoutingRule
from ostinato.sim.fleet import FleetPlan, Profile, copies_of, percentile, simulate
from ostinato.sim.fleets import compare_fleets
from ostinato.sim.replay import ReplayClock, replay
from ostinato.sim.traces import read_mooncake

FAST = Profile(prefill_tokens_per_s=10_000.0, decode_token_s=0.001)


def test_one_idle_worker_serves_what_a_plain_replay_serves():
    trace, clock = conversations(3, 300), ReplayClock()
    policy = make_policy("lru", num_blocks=60, block_tokens=1, clock=clock)
    plain = replay(trace.requests, 60, policy, clock, unit_tokens=trace.unit_tokens)
    plan = FleetPlan(1, 60, utilization=1e-4, policy="lru")
    for strategy in STRATEGIES:
        result = simulate(trace, plan, FAST, RoutingRule(strategy), random.Random(0))
        assert (result.hit_tokens, result.input_tokens) == (plain.hit_tokens, plain.input_tokens)
        computed_s = [
            max(request.input_tokens - min(hit * trace.unit_tokens, request.input_tokens), 1) / 10_000
            for request, hit in zip(trace.requests, plain.hits, strict=True)
        ]
        assert result.ttfts_s == pytest.approx(computed_s)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 100),
    st.integers(1, 6),
    st.sampled_from(STRATEGIES),
    st.sampled_from([0.3, 1.5]),
    st.sampled_from([0, 500]),
)
def test_work_is_neither_lost_nor_made(seed, num_workers, strategy, utilization, shared):
    trace = conversations(seed, 120)
    plan = FleetPlan(num_workers, 40, shared, utilization, "lru")
    result = simulate(trace, plan, FAST, RoutingRule(strategy), random.Random(seed), num_copies=2)
    assert result.num_requests == len(result.ttfts_s) == 240
    assert result.input_tokens == 2 * sum(request.input_tokens for request in trace.requests)
    assert 0 <= result.global_hit_tokens <= result.hit_tokens < result.input_tokens
    assert min(result.ttfts_s) > 0
    # Workers cannot have computed more than time allows.
    computed = result.input_tokens - result.hit_tokens
    assert computed / num_workers / 10_000 <= result.duration_s
    again = simulate(trace, plan, FAST, RoutingRule(strategy), random.Random(seed), num_copies=2)
    assert again.ttfts_s == result.ttfts_s


def test_copies_are_other_people_with_the_same_system_prompts():
    trace = conversations(1, 50)
    played = list(copies_of(trace, 3, random.Random(1), num_requests=None))
    assert len(played) == 150
    assert [request.time_s for request in played] == sorted(request.time_s for request in played)
    counts: dict[int, int] = {}
    for request in trace.requests:
        for unit in request.units.tolist():
            counts[unit] = counts.get(unit, 0) + 1
    common = {unit for unit, count in counts.items() if count >= max(2, 0.05 * 50)}
    found = {unit for request in played for unit in request.units.tolist()}
    assert len(found) == len(common) + 3 * (len(counts) - len(common))


def test_percentiles_are_values_that_occurred():
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0, 0.3, 0.5, 1)] == [1.0, 1.0, 2.0, 3.0]


def test_routing_by_prefix_serves_the_recorded_conversations_better_than_turns():
    trace = read_mooncake(recorded("mooncake", "conversation_trace.jsonl"))
    plan = FleetPlan(4, 5859, policy="lru", num_requests=4000)
    turns, prefix = compare_fleets(
        trace, [plan], ["round-robin", "prefix"], Profile(), lambda: random.Random(0)
    )
    assert prefix.hit_tokens >= 1.5 * turns.hit_tokens
    assert prefix.ttft_p50_s <= 0.8 * turns.ttft_p50_s
    assert prefix.most_over_mean < 1.1


def test_the_command_compares_fleets_with_a_profile(tmp_path):
    trace, profile = tmp_path / "small.jsonl", tmp_path / "worker.toml"
    rows = [
        {"timestamp": 10 * i, "input_length": 1024, "output_length": 5, "hash_ids": [i % 5, 100 + i]}
        for i in range(60)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    profile.write_text("prefill_tokens_per_s = 5000.0\ntoken_bytes = 1000\n")
    asked = ["replay", str(trace), "--fleet", "1,3", "--capacity", "50", "--global-capacity", "0,10"]
    result = CliRunner().invoke(main, [*asked, "--profile", str(profile), "--json"])
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.output.splitlines()]
    assert {(row["num_workers"], row["routing"], row["global_capacity"]) for row in found} == {
        (n, name, n * shared) for n in (1, 3) for name in STRATEGIES for shared in (0, 10)
    }
    assert all(row["num_requests"] == 60 for row in found)
    table = CliRunner().invoke(main, [*asked, "--routing", "prefix"])
    assert "TTFT p50" in table.output
    for wrong in (["--fleet", "none"], ["--routing", "best"], ["--capacity", "1"], ["--policy", "none"]):
        result = CliRunner().invoke(main, [*asked, *wrong])
        assert result.exit_code != 0
        assert "Traceback" not in result.output
    profile.write_text("speed = 3")
    assert "speed" in CliRunner().invoke(main, [*asked, "--profile", str(profile)]).output
