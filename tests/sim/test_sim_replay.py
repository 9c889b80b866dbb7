"""The replay against published figures, the optimum against exhaustive search, rules against the optimum."""

from functools import cache

import numpy as np
import orjson
import pytest
from made_traces import conversations, recorded

from ostinato.kv.policies import POLICY_NAMES, make_policy
from ostinato.kv.policy import LRU, Outlook
from ostinato.sim.optimum import optimum_hits
from ostinato.sim.replay import ReplayClock, never_continued, outlooks_for, replay
from ostinato.sim.sessions import encode_bytes, read_session
from ostinato.sim.traces import TraceRequest, read_mooncake


def played(name, trace, capacity, **options):
    clock = ReplayClock()
    policy = make_policy(name, num_blocks=capacity, block_tokens=1, clock=clock)
    return replay(trace.requests, capacity, policy, clock, unit_tokens=trace.unit_tokens, **options)


@pytest.mark.parametrize(
    ("name", "capacity", "served"),
    [
        ("conversation", 1000, 4.5),
        ("conversation", 5859, 13.6),
        ("conversation", 10_000, 21.1),
        ("conversation", 30_000, 32.6),
        ("conversation", 200_000, 36.6),
        ("synthetic", 1000, 8.4),  # one table says 8.3; two replays beside this one 8.41
        ("synthetic", 5859, 30.9),
        ("synthetic", 10_000, 42.4),
        ("synthetic", 30_000, 62.4),
        ("synthetic", 200_000, 64.0),
    ],
)
def test_lru_serves_what_independent_replays_say(name, capacity, served):
    trace = read_mooncake(recorded("mooncake", f"{name}_trace.jsonl"))
    result = replay(trace.requests, capacity, LRU(), ReplayClock(), unit_tokens=512)
    assert 100 * result.hit_rate() == pytest.approx(served, abs=0.1)


def best_by_search(requests, capacity):
    """Most units that any eviction from the leaves can serve, by trying all."""
    chains = [tuple(request.units.tolist()) for request in requests]
    parent = {chain[i]: chain[i - 1] if i else None for chain in chains for i in range(len(chain))}

    @cache
    def best(at, resident):
        if at == len(chains):
            return 0
        hit = 0
        while hit < len(chains[at]) and chains[at][hit] in resident:
            hit += 1
        states = {resident | set(chains[at])}
        while len(next(iter(states))) > capacity:
            states = {
                state - {unit}
                for state in states
                for unit in state - set(chains[at])
                if not any(parent[other] == unit for other in state)
            }
        return hit + max(best(at + 1, state) for state in states)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_what_exhaustive_search_finds(seed):
    requests = conversations(seed, 14, prompt_blocks=2, answer_blocks=1).requests
    capacity = max(len(request.units) for request in requests) + 2
    assert sum(optimum_hits(requests, capacity)) == best_by_search(requests, capacity)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_no_rule_beats_the_optimum_and_room_for_all_serves_all(name):
    trace = conversations(3, 400)
    distinct = len({unit for request in trace.requests for unit in request.units.tolist()})
    for capacity in (60, 200):
        result = played(name, trace, capacity)
        assert 0 < sum(result.hits) <= sum(optimum_hits(trace.requests, capacity))
        assert result.num_evicted >= distinct - capacity
    assert played(name, trace, distinct).hits == optimum_hits(trace.requests, distinct)


def test_a_request_longer_than_the_pool_is_not_kept():
    long = TraceRequest(0.0, np.arange(20, dtype=np.int32), 20, 0)
    short = TraceRequest(1.0, np.arange(5, dtype=np.int32), 5, 0)
    result = replay([long, short, short], 10, LRU(), ReplayClock(), unit_tokens=1)
    assert result.hits == [0, 0, 5]


@pytest.mark.parametrize("name", ["lru", "workload", "s3-fifo"])
def test_a_replay_is_the_same_every_time(name):
    trace = conversations(5, 300)
    assert played(name, trace, 80).hits == played(name, trace, 80).hits


@pytest.mark.parametrize("name", ["lru", "workload"])
def test_a_true_hint_serves_more(name):
    trace = conversations(6, 1500)
    is_last = never_continued(trace.requests)
    assert 0.3 < sum(is_last) / len(is_last) < 0.9
    outlooks = [Outlook.OVER if last else Outlook.UNKNOWN for last in is_last]
    plain, hinted = played(name, trace, 80), played(name, trace, 80, outlooks=outlooks)
    assert sum(plain.hits) * 1.1 < sum(hinted.hits) <= sum(optimum_hits(trace.requests, 80))


@pytest.mark.parametrize("name", ["lru", "lru-2", "workload"])
def test_wrong_hints_cost_little(name):
    """Whatever goes on is said to be over, and the other way round: the cache stops listening, or learns."""
    trace = conversations(6, 4000)
    plain = played(name, trace, 80)
    wrong = played(name, trace, 80, outlooks=outlooks_for(trace, "wrong"))
    assert sum(wrong.hits) > 0.97 * sum(plain.hits)
    half = len(trace.requests) // 2
    assert sum(wrong.hits[half:]) > 0.99 * sum(plain.hits[half:])


def test_recorded_answers_say_what_will_follow(tmp_path):
    lines = [
        {"timestamp": 1, "input": "a", "output": '<tool_call>{"name": "f", "arguments": {}}</tool_call>'},
        {"timestamp": 2, "input": "b", "output": ""},
        {"timestamp": 3, "input": "c", "output": '{"name": "f", "parameters": {"x": 1}}'},
        {"timestamp": 4, "input": "d", "output": '{"answer": 1}'},
        {"timestamp": 5, "input": "e", "output": "Text that mentions <tool_call> only."},
    ]
    path = tmp_path / "with_tools.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    told = [request.outlook.name for request in read_session(path, encode_bytes).requests]
    assert told == ["SOON", "SOON", "SOON", "LATER", "LATER"]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines[3:])))
    assert {request.outlook.name for request in read_session(path, encode_bytes).requests} == {"UNKNOWN"}
