"""``ostinato replay`` from the command line, on small files."""

import json

import orjson
import pytest
from click.testing import CliRunner
from made_traces import conversations

from ostinato.cli import main


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "small_trace.jsonl"
    path.write_bytes(
        b"\n".join(
            orjson.dumps(
                {
                    "timestamp": int(request.time_s * 1000),
                    "input_length": request.input_tokens,
                    "output_length": request.output_tokens,
                    "hash_ids": request.units.tolist(),
                }
            )
            for request in conversations(1, 150).requests
        )
    )
    return str(path)


def run(*arguments):
    return CliRunner().invoke(main, ["replay", *arguments])


def test_every_policy_stands_in_a_row_between_lru_and_the_optimum(trace_file):
    result = run(trace_file, "--capacity", "60,30%", "--json")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert len({row["policy"] for row in rows}) == 12
    assert len({row["capacity"] for row in rows}) == 2
    for row in rows:
        bound = next(
            r["hit_rate"] for r in rows if (r["policy"], r["capacity"]) == ("optimum", row["capacity"])
        )
        assert row["hit_rate"] <= bound
        assert row["hit_tokens"] <= row["input_tokens"]


def test_the_table_and_the_chart_are_drawn(trace_file):
    result = run(trace_file, "--policy", "workload", "--capacity", "60", "--plot")
    assert result.exit_code == 0, result.output
    assert "x LRU" in result.output
    assert "share served" in result.output
    assert result.output.count("workload") == 2


def test_faults_say_what_happened_and_a_seed_says_it_again(trace_file):
    arguments = (trace_file, "--policy", "workload", "--capacity", "60", "--faults", "--seed", "5")
    first, again = run(*arguments), run(*arguments)
    assert first.exit_code == 0, first.output
    assert first.output == again.output
    lru, ours = map(json.loads, first.output.splitlines())
    assert (lru["policy"], ours["policy"]) == ("lru", "workload")
    assert ours["num_checked"] == ours["num_events"] > 300


def test_a_tier_serves_what_the_arena_gave_up(trace_file):
    result = run(trace_file, "--policy", "lru", "--capacity", "60", "--tier-capacity", "0,100,100%", "--json")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines()]
    alone, small, all_of_it = (row for row in rows if row["policy"] == "lru")
    bounds = [row["hit_rate"] for row in rows if row["policy"] == "optimum"]
    assert alone["tier_hit_tokens"] == alone["stored_bytes"] == 0
    assert alone["hit_rate"] < small["hit_rate"] < all_of_it["hit_rate"] == bounds[2]
    assert small["hit_rate"] <= bounds[1]
    assert small["num_tier_evicted"] > 0 == all_of_it["num_tier_evicted"]
    for row in (small, all_of_it):
        assert row["hit_tokens"] == alone["hit_tokens"] + row["tier_hit_tokens"]
        assert row["loaded_bytes"] == row["tier_hit_tokens"] * 46_080
        assert row["ttft_s"] < alone["ttft_s"]
    again = run(trace_file, "--policy", "lru", "--capacity", "60", "--tier-capacity", "0,100,100%", "--json")
    assert again.output == result.output


def test_a_tier_slower_than_computing_is_left_alone(trace_file):
    arguments = ("--policy", "lru", "--capacity", "60", "--tier-capacity", "100%", "--json")
    result = run(trace_file, *arguments, "--load-rate", "1K", "--prefill-rate", "100000")
    row = json.loads(result.output.splitlines()[0])
    quick = json.loads(run(trace_file, *arguments).output.splitlines()[0])
    assert 0 < row["tier_hit_tokens"] < 0.1 * quick["tier_hit_tokens"]


def test_the_table_has_the_tier(trace_file):
    result = run(trace_file, "--policy", "lru", "--capacity", "60", "--tier-capacity", "100", "--plot")
    assert result.exit_code == 0, result.output
    assert "of tier" in result.output
    assert "60 blocks over 100" in result.output


def test_faults_with_a_tier_and_the_same_seed_are_the_same(trace_file):
    arguments = (
        "--policy",
        "workload",
        "--capacity",
        "60",
        "--tier-capacity",
        "100",
        "--faults",
        "--seed",
        "3",
    )
    first, again = run(trace_file, *arguments), run(trace_file, *arguments)
    assert first.exit_code == 0, first.output
    assert first.output == again.output
    assert json.loads(first.output.splitlines()[1])["num_torn"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "clock"], "no policy 'clock'"),
        (["--capacity", "many"], "'many' is no capacity"),
        (["--tier-capacity", "-4"], "below 0"),
        (["--tier-capacity", "100", "--load-rate", "fast"], "not a size"),
        (["--capacity", "3"], "do not hold the longest request"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(trace_file, arguments, says):
    result = run(trace_file, *arguments)
    assert result.exit_code == 2
    assert says in result.output
