"""What moving KV costs: 4,096 tokens to other slots and positions, against copying them.

Physics. In the default model's shape (30 layers, 3 key heads of 64, float32) the KV of a token is 46 kB: 189
MB are read and as many written, and the lines written to are read first. At 20 GB/s that is under 30 ms.
Turning keys is three operations an element on what is in registers anyway, so the floor is the copy; a
prefill of these tokens takes more than ten seconds.

Layouts: keys that turn in halves (Llama), interleaved pairs (Cohere, GPT-J), a quarter of the elements
(GPT-NeoX). Slots: one run of 4,096; or 256 blocks of 16 that lie apart. Ours and the copy alternate. The last
line is one JSON object: median of the ratios to the copy, and milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from common import finish, pairs, ratio, spread
from ostinato.kv.arena import Arena, LayerShape
from ostinato.reuse.rope import Mover, Rotation
from ostinato.reuse.shifts import shifts_of
from ostinato.types import SlotCopy, SlotShift

NUM_TOKENS, BLOCK_SIZE = 4_096, 16
DISTANCE = 1_234
FREQUENCIES = tuple(100_000.0 ** (-i / 32) for i in range(32))
LAYOUTS = {
    "halves": Rotation(tuple(range(32)), tuple(range(32, 64)), FREQUENCIES),
    "interleaved": Rotation(tuple(range(0, 64, 2)), tuple(range(1, 64, 2)), FREQUENCIES),
    "quarter": Rotation(tuple(range(8)), tuple(range(8, 16)), FREQUENCIES[:8]),
}


def timed(action: Callable[..., object], *arguments: object) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        action(*arguments)
        return time.perf_counter() - started

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    arena = Arena(
        [LayerShape(3, 64, 64)] * 30, 3 * NUM_TOKENS, dtype=torch.float32, device=torch.device("cpu")
    )
    for group in arena.groups:
        group.normal_()
    blocks = np.random.default_rng(0).permutation(2 * NUM_TOKENS // BLOCK_SIZE)[: NUM_TOKENS // BLOCK_SIZE]
    apart = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel().astype(np.int32)
    target = np.arange(2 * NUM_TOKENS, 3 * NUM_TOKENS, dtype=np.int32)
    slots = {
        "run": (SlotShift(0, 2 * NUM_TOKENS, NUM_TOKENS, DISTANCE),),
        "blocks": shifts_of(apart, target, DISTANCE),
    }

    def copy() -> None:
        arena.copy(SlotCopy(0, 2 * NUM_TOKENS, NUM_TOKENS))

    details: dict[str, dict[str, dict[str, float]]] = {}
    headline: dict[str, float] = {"tokens": NUM_TOKENS}
    for layout, rotation in LAYOUTS.items():
        mover = Mover(arena, [rotation] * 30)
        for kind, moves in slots.items():
            name = f"{layout}_{kind}"
            ours, theirs = pairs(timed(mover.move, moves), timed(copy), options.rounds, name)
            details[name] = {"move_s": spread(ours), "copy_s": spread(theirs), "ratio": ratio(ours, theirs)}
            headline[f"{name}_ms"] = round(1e3 * details[name]["move_s"]["median"], 1)
            headline[f"{name}_to_copy"] = details[name]["ratio"]["median"]
    finish("moving", headline, details)


if __name__ == "__main__":
    main()
