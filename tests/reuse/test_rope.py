"""Moving inside an arena: against the definition, and there and back."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.kv.arena import Arena, LayerShape
from ostinato.reuse import rope
from ostinato.reuse.rope import Mover, Rotation
from ostinato.reuse.shifts import shifts_of
from ostinato.types import SlotShift

CPU = torch.device("cpu")


def halves(start: int, num_pairs: int, base: float = 1e4, factor: float = 1.0) -> Rotation:
    return Rotation(
        tuple(range(start, start + num_pairs)),
        tuple(range(start + num_pairs, start + 2 * num_pairs)),
        tuple(factor * base ** (-i / num_pairs) for i in range(num_pairs)),
    )


def interleaved(start: int, num_pairs: int, base: float = 1e4) -> Rotation:
    return Rotation(
        tuple(range(start, start + 2 * num_pairs, 2)),
        tuple(range(start + 1, start + 2 * num_pairs, 2)),
        tuple(base ** (-i / num_pairs) for i in range(num_pairs)),
    )


ODD = Rotation((5, 0, 3), (1, 9, 2), (0.5, -0.25, 1.0))
LAYERS = (LayerShape(2, 16, 12), LayerShape(3, 24, 24))
ROTATIONS = [
    halves(0, 8),
    halves(0, 8, base=1e6, factor=0.125),
    halves(0, 4),
    halves(8, 4),
    interleaved(0, 8),
    interleaved(4, 3),
    ODD,
    Rotation(),
]


def arena_of(rotations: list[Rotation], dtype: torch.dtype, num_slots: int = 64) -> tuple[Arena, Mover]:
    shapes = [LAYERS[i % 2] for i in range(len(rotations))]
    arena = Arena(shapes, num_slots, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for group in arena.groups:
        group.normal_(generator=generator)
    return arena, Mover(arena, rotations)


def turned(
    keys: torch.Tensor, rotation: Rotation, distance: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """By complex numbers, in float64."""
    expected = keys.double().numpy().copy()
    first, second = list(rotation.first), list(rotation.second)
    pairs = expected[..., first] + 1j * expected[..., second]
    pairs = pairs * np.exp(1j * distance * np.array(rotation.frequencies))
    expected[..., first], expected[..., second] = pairs.real, pairs.imag
    return expected


@pytest.fixture(params=["kernel", "torch", "bfloat16"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    if request.param == "bfloat16":
        return torch.bfloat16
    if request.param == "torch":
        monkeypatch.setattr(rope, "_load_kernel", lambda: None)
    else:
        assert rope._load_kernel() is not None
    return torch.float32


@pytest.mark.parametrize("distance", [1, -1, 0, 1_000, -131_071, 1 << 20])
def test_every_layer_is_moved_as_its_rotation_says_and_nothing_else(
    dtype: torch.dtype, distance: int
) -> None:
    arena, mover = arena_of(ROTATIONS, dtype)
    keys, values = [k.clone() for k in arena.keys], [v.clone() for v in arena.values]
    mover.move([SlotShift(3, 40, 20, distance), SlotShift(30, 0, 2, -distance)])
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[40:60] = untouched[0:2] = False
    error = 4 * torch.finfo(dtype).eps
    for layer, rotation in enumerate(ROTATIONS):
        new = arena.keys[layer]
        for (source, target, length), by in (((3, 40, 20), distance), ((30, 0, 2), -distance)):
            expected = turned(keys[layer][:, source : source + length], rotation, by)
            found = new[:, target : target + length].double().numpy()
            size = np.abs(expected).max() * 1.5
            assert np.abs(found - expected).max() <= error * size, rotation
            still = [i for i in range(new.shape[2]) if i not in {*rotation.first, *rotation.second}]
            assert np.array_equal(found[..., still], expected[..., still])
            assert torch.equal(
                arena.values[layer][:, target : target + length],
                values[layer][:, source : source + length],
            )
        assert torch.equal(new[:, untouched], keys[layer][:, untouched])
        assert torch.equal(arena.values[layer][:, untouched], values[layer][:, untouched])


@given(
    rotation=st.sampled_from(ROTATIONS),
    distances=st.lists(st.integers(-(1 << 17), 1 << 17), min_size=1, max_size=6),
    length=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_there_and_back_is_the_identity_within_rounding(
    rotation: Rotation, distances: list[int], length: int
) -> None:
    """By any way: each step rounds once, and no way is longer than its steps."""
    arena, mover = arena_of([rotation, rotation], torch.float32)
    before = [keys[:, :length].clone() for keys in arena.keys]
    at = 0
    for distance in [*distances, -sum(distances)]:
        mover.move([SlotShift(at, 32 - at, length, distance)])
        at = 32 - at
    for keys, old in zip(arena.keys, before, strict=True):
        error = (keys[:, at : at + length] - old).abs().max()
        assert error <= (len(distances) + 1) * 4 * torch.finfo(torch.float32).eps * old.abs().max()


def test_moving_in_steps_is_moving_at_once() -> None:
    arena, mover = arena_of([halves(0, 8)], torch.float32)
    mover.move([SlotShift(0, 20, 4, 700), SlotShift(20, 40, 4, 300), SlotShift(0, 50, 4, 1000)])
    difference = (arena.keys[0][:, 40:44] - arena.keys[0][:, 50:54]).abs().max()
    assert difference <= 1e-6 * arena.keys[0].abs().max()


def test_the_kernel_and_plain_operations_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, mover = arena_of(ROTATIONS, torch.float32)
    monkeypatch.setattr(rope, "_load_kernel", lambda: None)
    plain, other = arena_of(ROTATIONS, torch.float32)
    moves = [SlotShift(0, 33, 31, 4097), SlotShift(40, 2, 9, -12)]
    mover.move(moves)
    other.move(moves)
    for a, b in zip(compiled.groups, plain.groups, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-6)


def test_what_lies_over_itself_or_outside_is_refused() -> None:
    _, mover = arena_of([halves(0, 8)], torch.float32)
    mover.move([])
    for move in (
        SlotShift(0, 3, 4, 1),
        SlotShift(3, 0, 4, 1),
        SlotShift(60, 0, 5, 1),
        SlotShift(0, -1, 1, 1),
    ):
        with pytest.raises(AssertionError):
            mover.move([move])
    with pytest.raises(AssertionError, match="two pairs"):
        Rotation((0, 1), (1, 2), (1.0, 1.0))


@given(
    st.lists(st.integers(0, 6), max_size=12, unique=True),
    st.lists(st.integers(10, 16), max_size=12, unique=True),
)
def test_moves_are_few_and_say_each_slot(source: list[int], target: list[int]) -> None:
    length = min(len(source), len(target))
    moves = shifts_of(np.array(source[:length], np.int32), np.array(target[:length], np.int32), -3)
    said = [(m.source + i, m.target + i) for m in moves for i in range(m.length)]
    assert said == list(zip(source, target, strict=False))
    for before, move in pairwise(moves):
        ends = (before.source + before.length, before.target + before.length)
        assert ends != (move.source, move.target), "two that are one"
    assert all(move.distance == -3 for move in moves)
