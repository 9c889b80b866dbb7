"""Moving on the real default model, whole way through the engine's own runner and arena."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ostinato.engines.hf import load_model
from ostinato.engines.rotations import observe_movement
from ostinato.engines.runners import PagedRunner
from ostinato.reuse.rope import Mover
from ostinato.types import Plan, SamplingParams, SequencePlan, SlotShift

pytestmark = [pytest.mark.model, pytest.mark.slow]

LENGTH = 40


def test_a_moved_text_is_what_is_computed_there(default_model_path: Path) -> None:
    loaded = load_model(default_model_path)
    movement = observe_movement(loaded)
    assert movement.reason is None
    own = loaded.model.model.rotary_emb.inv_freq.double().numpy()
    for rotation in movement.rotations:
        assert (rotation.first, rotation.second) == (tuple(range(32)), tuple(range(32, 64)))
        assert np.abs(np.array(rotation.frequencies) - own).max() * loaded.max_model_len < 1e-6

    runner = PagedRunner(loaded, 3 * LENGTH)
    tokens = np.random.default_rng(0).integers(3, loaded.vocab_size, LENGTH, dtype=np.int32)
    places = np.arange(LENGTH, dtype=np.int32)
    for block, start in ((0, 0), (1, 3_000)):
        runner.open(block, tokens, SamplingParams(temperature=0))
        rows = SequencePlan(
            sequence_id=block,
            tokens=tokens,
            positions=places + np.int32(start),
            slots=places + np.int32(block * LENGTH),
            block_ids=np.array([block]),
            block_size=LENGTH,
            sample=True,
            places=places,
        )
        runner.execute(Plan((rows,)))
    mover = Mover(runner.arena, movement.rotations)
    mover.move([SlotShift(0, 2 * LENGTH, LENGTH, 3_000)])
    for tensors in (runner.arena.keys, runner.arena.values):
        for layer, tensor in enumerate(tensors):
            there, moved = tensor[:, LENGTH : 2 * LENGTH], tensor[:, 2 * LENGTH :]
            # Both were computed with the model's own angles, which at 3,000 radians are exact to 2e-4.
            assert (moved - there).abs().max() <= 1e-3 * there.abs().max(), f"layer {layer}"
    assert torch.equal(runner.arena.values[0][:, :LENGTH], runner.arena.values[0][:, 2 * LENGTH :])
