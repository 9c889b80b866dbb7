"""``ostinato replay`` from the command line, on small files."""

import json
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import orjson
import pytest
from click.testing import CliRunner
from made_traces import conversations

from ostinato.cli import main
from ostinato.sim.compare import Row
from ostinato.sim.svg import svg


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


def test_the_picture_shows_every_row_where_it_belongs(trace_file, tmp_path):
    picture = tmp_path / "chart.svg"
    arguments = (trace_file, "--policy", "lirs,workload", "--capacity", "60,120,240")
    result = run(*arguments, "--json", "--svg", str(picture))
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines()]
    root = ElementTree.fromstring(picture.read_text())
    names = {"svg": "http://www.w3.org/2000/svg"}
    texts = [text.text for text in root.iterfind(".//svg:text", names)]
    policies = ["lru", "lirs", "workload", "optimum"]
    assert {"small_trace", "60", "120", "240", *policies} <= set(texts)
    lines = {
        tuple(tuple(map(float, point.split(","))) for point in line.get("points").split())
        for line in root.iterfind(".//svg:polyline", names)
    }
    assert len(lines) == 4
    # All points of a picture lie on one scale: heights differ as rates do.
    points = sorted((x, y) for line in lines for x, y in line)
    served = sorted((row["capacity"], -row["hit_rate"]) for row in rows)
    heights = [y for _, y in points]
    slope, start = np.polyfit([rate for _, rate in served], heights, 1)
    assert slope > 0
    for (_, rate), height in zip(served, heights, strict=True):
        assert height == pytest.approx(slope * rate + start, abs=0.11)
    labels = [t for t in root.iterfind(".//svg:text", names) if t.text in policies]
    places = sorted(float(label.get("y")) for label in labels)
    assert min(below - above for above, below in pairwise(places)) >= 13.9
    colors = {label.text: label.get("style") for label in labels}
    assert len(set(colors.values())) == 4


def test_a_picture_of_many_lines_that_end_together_stays_inside():
    rows = [
        Row("<a & b>", f"rule {number}", size, 0.5, 0.5, 1, 2, 0, 1.0, 0.0)
        for number in range(20)
        for size in (10, 20)
    ]
    root = ElementTree.fromstring(svg(rows))
    names = {"svg": "http://www.w3.org/2000/svg"}
    places = [
        float(t.get("y")) for t in root.iterfind(".//svg:text", names) if (t.text or "").startswith("rule")
    ]
    assert len(set(places)) == len(places) == 20
    assert min(places) > 0
    assert max(places) < 380
    assert any(text.text == "<a & b>" for text in root.iterfind(".//svg:text", names))
    assert ElementTree.fromstring(svg(rows[:1])) is not None  # one capacity: no line, a dot


def test_a_picture_that_cannot_be_written_is_said(trace_file, tmp_path):
    result = run(trace_file, "--policy", "lru", "--capacity", "60", "--svg", str(tmp_path / "no" / "a.svg"))
    assert result.exit_code == 1
    assert "cannot write" in result.output


@pytest.mark.parametrize("policy", ["lru", "workload"])
def test_what_is_told_truly_helps(trace_file, policy):
    served = {}
    for hints in ("none", "perfect"):
        result = run(trace_file, "--policy", policy, "--capacity", "60", "--hints", hints, "--json")
        assert result.exit_code == 0, result.output
        rows = [json.loads(line) for line in result.output.splitlines()]
        served[hints] = next(row["hit_tokens"] for row in rows if row["policy"] == policy)
    assert served["perfect"] > 1.05 * served["none"]
