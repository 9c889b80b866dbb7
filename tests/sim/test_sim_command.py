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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "clock"], "no policy 'clock'"),
        (["--capacity", "many"], "'many' is no capacity"),
        (["--capacity", "3"], "do not hold the longest request"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(trace_file, arguments, says):
    result = run(trace_file, *arguments)
    assert result.exit_code == 2
    assert says in result.output
