"""Small traffic with conversations in it, from a seed; and where the recorded traces are."""

import random
from pathlib import Path

import numpy as np
import pytest

from ostinato.sim.traces import Trace, TraceRequest

DATA = Path(__file__).parents[3] / "shared" / "data" / "traces"


def recorded(*names: str) -> Path:
    path = DATA.joinpath(*names)
    if not path.exists():
        pytest.skip(f"the recorded traces are not here: {path}")
    return path


def conversations(seed: int, num_requests: int, *, prompt_blocks: int = 6, answer_blocks: int = 3) -> Trace:
    """New prompts, of which some are continued a few times; ids name prefixes, as in Mooncake's traces."""
    chance = random.Random(seed)
    open_ones: list[list[int]] = []
    requests, next_id, time_s = [], 1, 0.0
    for _ in range(num_requests):
        time_s += chance.expovariate(1.0)
        if open_ones and chance.random() < 0.5:
            units = open_ones.pop(chance.randrange(len(open_ones)))
            fresh = answer_blocks
        else:
            units, fresh = [0], 1 + chance.randrange(prompt_blocks)
        units = units + list(range(next_id, next_id + fresh))
        next_id += fresh
        requests.append(TraceRequest(time_s, np.array(units, np.int32), 512 * len(units), 100))
        if chance.random() < 0.7:
            open_ones.append(units)
    return Trace(f"made {seed}", 512, tuple(requests))
