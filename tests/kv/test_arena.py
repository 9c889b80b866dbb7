"""The arena's memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A process of its own: in this one the allocator may give out memory that was used before.
SCRIPT = """
import psutil, sys, torch
from ostinato.kv.arena import Arena, LayerShape

def make():
    return Arena([LayerShape(2, 64, 64)] * 2, 40_000, dtype=torch.float32, device=torch.device("cpu"))

arena = make()
arena.keys[1][:, 77] = 3.0
before = psutil.Process().memory_info().rss
steps = sum(1 for _ in arena.populate(1 << 40))
if steps == 0:
    sys.exit("this kernel does not know how")
assert steps >= arena.size_bytes // (4 << 20)
assert psutil.Process().memory_info().rss - before > arena.size_bytes * 0.8
assert bool((arena.keys[1][:, 77] == 3.0).all())
assert sum(1 for _ in make().populate(9 << 20)) == 2, "no more than was allowed"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asked of Linux only")
def test_memory_is_taken_ahead_piece_by_piece_and_what_is_there_stays() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    if run.stderr == "this kernel does not know how\n":
        pytest.skip(run.stderr)
    assert run.returncode == 0, run.stderr
