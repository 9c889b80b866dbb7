"""The arena's memory."""

from __future__ import annotations

import sys

import psutil
import pytest
import torch

from ostinato.kv.arena import Arena, LayerShape


@pytest.mark.skipif(sys.platform != "linux", reason="asked of Linux only")
def test_memory_is_taken_ahead_piece_by_piece_and_what_is_there_stays() -> None:
    shapes = [LayerShape(2, 64, 64)] * 2
    arena = Arena(shapes, 40_000, dtype=torch.float32, device=torch.device("cpu"))
    arena.keys[1][:, 77] = 3.0
    before = psutil.Process().memory_info().rss
    steps = sum(1 for _ in arena.populate(1 << 40))
    if steps == 0:
        pytest.skip("this kernel does not know how")
    assert steps >= arena.size_bytes // (4 << 20)
    assert psutil.Process().memory_info().rss - before > arena.size_bytes * 0.8
    assert bool((arena.keys[1][:, 77] == 3.0).all())
    small = Arena(shapes, 40_000, dtype=torch.float32, device=torch.device("cpu"))
    assert sum(1 for _ in small.populate(9 << 20)) == 2, "no more than was allowed"
