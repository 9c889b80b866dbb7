"""Recorded requests: forms that are read, and forms that are refused by name."""

import numpy as np
import orjson
import pytest
from made_traces import recorded

from ostinato.errors import TraceError
from ostinato.sim.sessions import encode_bytes, read_session
from ostinato.sim.traces import Blocks, merge_sessions, read_mooncake

ROW = {"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [3, 4]}


def write(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else orjson.dumps(row) for row in rows))
    return path


def test_a_mooncake_line_is_a_request(tmp_path):
    trace = read_mooncake(write(tmp_path, ROW, b"", ROW | {"timestamp": 0, "input_length": 1024}))
    whole, part = trace.requests
    assert (whole.time_s, part.time_s) == (0.0, 1.5)
    assert (whole.has_part_block, part.has_part_block) == (False, True)
    assert part.units.tolist() == whole.units.tolist() == [0, 1]


@pytest.mark.parametrize(
    "bad",
    [
        b"{",
        b"[]",
        {},
        ROW | {"hash_ids": []},
        ROW | {"hash_ids": [3, 4, 5]},
        ROW | {"hash_ids": [3.5, 4]},
        ROW | {"block_tokens": 350},
        ROW | {"block_tokens": 0},
        ROW | {"input_length": 2000},
        ROW | {"timestamp": "soon"},
        ROW | {"hash_ids": [[1], [2]]},
    ],
)
def test_another_form_is_refused_by_line(tmp_path, bad):
    with pytest.raises(TraceError, match="line 2"):
        read_mooncake(write(tmp_path, ROW, bad))


def test_ids_of_any_size_and_blocks_of_any_length_are_read(tmp_path):
    ours = {"v": 1, "block_tokens": 16, "timestamp": 0, "output_length": 1, "session": 2**53}
    rows = [
        ours | {"input_length": 20, "hash_ids": [2**53 - 1, 7]},
        ours | {"input_length": 32, "hash_ids": [2**53 - 1, 5]},
    ]
    torn = b'{"v":1,"timestamp":1764544000'
    trace = read_mooncake(write(tmp_path, rows[0], torn, rows[1]))
    assert trace.unit_tokens == 16
    assert [request.units.tolist() for request in trace.requests] == [[0, 1], [0, 2]]
    assert [request.has_part_block for request in trace.requests] == [True, False]
    assert trace.requests[0].session == str(2**53)


def test_an_empty_or_missing_file_is_refused(tmp_path):
    with pytest.raises(TraceError, match="no requests"):
        read_mooncake(write(tmp_path))
    with pytest.raises(TraceError, match="cannot read"):
        read_mooncake(tmp_path / "nowhere")


def test_blocks_are_equal_where_prefixes_are(tmp_path):
    path = write(
        tmp_path,
        {"timestamp": 2_000_000, "input": "abcdefgh" + "same" * 4, "output": ""},
        {"timestamp": 1_000_000, "input": "abcdefgh" + "some" * 4, "output": "x"},
        {"timestamp": 3_000_000, "input": "other", "output": "x"},
    )
    trace = Blocks(2).of(read_session(path, encode_bytes))
    first, second, third = (request.units.tolist() for request in trace.requests)
    assert [len(first), len(second), len(third)] == [3, 3, 1]
    assert first[0] == second[0]
    assert not set(first[1:]) & set(second[1:])
    assert not set(third) & set(first + second)
    assert [request.has_part_block for request in trace.requests] == [False, False, False]


def test_sessions_merge_in_order_of_time(tmp_path):
    path = write(tmp_path, *({"timestamp": t * 1e6, "input": "text", "output": ""} for t in (50, 51, 55)))
    session = read_session(path, encode_bytes)
    merged = merge_sessions([session, session], [10.0, 10.5], "two")
    assert [request.time_s for request in merged.requests] == [10.0, 10.5, 11.0, 11.5, 15.0, 15.5]


def test_text_that_is_not_a_session_is_refused(tmp_path):
    with pytest.raises(TraceError, match="line 1"):
        read_session(write(tmp_path, {"timestamp": 1, "input": ["a"], "output": ""}), encode_bytes)


def test_the_recorded_traces_are_what_they_are_said_to_be():
    trace = read_mooncake(recorded("mooncake", "conversation_trace.jsonl"))
    assert len(trace.requests) == 12_031
    assert trace.num_units == 288_500
    assert np.diff([request.time_s for request in trace.requests]).min() >= 0
