"""Payloads: exact where they say so, within their bound where they do not, and never a padded byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.kv.arena import Arena, LayerShape
from ostinato.kv.codec import Int4Codec, Int8Codec, RawCodec

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
shapes = st.builds(LayerShape, st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))


def filled(layers: list[LayerShape], num_slots: int, dtype: torch.dtype, seed: int = 0) -> Arena:
    arena = Arena(layers, num_slots, dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for group in arena.groups:
        group.copy_(torch.randn(group.shape, generator=generator))
    return arena


def block_of(arena: Arena, slot: int, size: int) -> list[torch.Tensor]:
    return [tensor[:, slot : slot + size].clone() for tensor in (*arena.keys, *arena.values)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(shapes, min_size=1, max_size=5), st.integers(1, 7), st.sampled_from(DTYPES), st.integers(0, 3)
)
def test_raw_keeps_every_bit_of_any_mix_of_layers(layers, size, dtype, place):
    arena, other = filled(layers, size * 4, dtype), filled(layers, size * 4, dtype, seed=1)
    codec = RawCodec(arena.groups, size)
    assert codec.payload_bytes == Arena.bytes_per_slot(layers, dtype) * size
    payload = memoryview(bytearray(codec.payload_bytes))
    assert codec.encode(place * size, payload)
    before = [block_of(other, i * size, size) for i in range(4)]
    target = (place + 1) % 4
    RawCodec(other.groups, size).decode(payload, target * size)
    for i in range(4):
        expected = block_of(arena, place * size, size) if i == target else before[i]
        assert all(torch.equal(a, b) for a, b in zip(block_of(other, i * size, size), expected, strict=True))


def test_raw_keeps_numbers_that_are_none():
    layers = [LayerShape(1, 2, 2)]
    arena, other = filled(layers, 2, torch.float32), filled(layers, 2, torch.float32)
    bits = torch.tensor([0x7FC00001, 0x7F800000, -1, -(2**31)], dtype=torch.int32).view(torch.float32)
    arena.keys[0][0].copy_(bits.view(2, 2))
    payload = memoryview(bytearray(RawCodec(arena.groups, 2).payload_bytes))
    RawCodec(arena.groups, 2).encode(0, payload)
    RawCodec(other.groups, 2).decode(payload, 0)
    assert torch.equal(other.keys[0].view(torch.int32), arena.keys[0].view(torch.int32))


def round_trip(codec_type, arena: Arena, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    codec = codec_type(arena.groups, size)
    payload = memoryview(bytearray(codec.payload_bytes))
    assert codec.encode(size, payload)
    codec.decode(payload, 0)
    return [g[:, :, size : 2 * size].float() for g in arena.groups], [
        g[:, :, :size].float() for g in arena.groups
    ]


@settings(deadline=None, max_examples=40)
@given(st.lists(shapes, min_size=1, max_size=4), st.integers(1, 7), st.sampled_from(DTYPES))
def test_int8_is_within_half_a_step_of_each_token(layers, size, dtype):
    exact, got = round_trip(Int8Codec, filled(layers, size * 2, dtype), size)
    for a, b in zip(exact, got, strict=True):
        half_step = (a.amax(3, keepdim=True) - a.amin(3, keepdim=True)) / 510
        rounding = a.abs().amax() * torch.finfo(dtype).eps + 1e-6
        assert ((a - b).abs() <= half_step * 1.001 + rounding).all()


@settings(deadline=None, max_examples=40)
@given(st.lists(shapes, min_size=1, max_size=4), st.integers(1, 7))
def test_int4_is_within_half_a_step_of_each_channel_or_token(layers, size):
    exact, got = round_trip(Int4Codec, filled(layers, size * 2, torch.float32), size)
    for place, (a, b) in enumerate(zip(exact, got, strict=True)):
        axis = 2 if place % 2 == 0 else 3
        half_step = (a.amax(axis, keepdim=True) - a.amin(axis, keepdim=True)) / 30
        # Scale and zero point are float16: fifteen steps add up fifteen times its rounding.
        rounding = a.abs().amax() * 2 * 2**-10 + 1e-6
        assert ((a - b).abs() <= half_step * 1.001 + rounding).all()


def test_keys_with_large_channels_are_why_keys_go_by_channel():
    size = 16
    arena = filled([LayerShape(2, 64, 64)], size * 2, torch.float32)
    arena.groups[0][..., 5] *= 100
    exact, got = round_trip(Int4Codec, arena, size)
    others = [i for i in range(64) if i != 5]
    error = (exact[0] - got[0])[..., others].pow(2).mean().sqrt() / exact[0][..., others].pow(2).mean().sqrt()
    assert error < 0.1


@pytest.mark.parametrize(("codec_type", "limit"), [(Int8Codec, 0.29), (Int4Codec, 0.22)])
def test_what_they_save(codec_type, limit):
    """SmolLM2's shape: 64 numbers a head, blocks of 16 tokens."""
    arena = filled([LayerShape(3, 64, 64)] * 30, 32, torch.float32)
    ratio = codec_type(arena.groups, 16).payload_bytes / RawCodec(arena.groups, 16).payload_bytes
    assert ratio < limit


@pytest.mark.parametrize("codec_type", [Int8Codec, Int4Codec])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_are_refused(codec_type, bad):
    arena = filled([LayerShape(1, 4, 4)], 8, torch.float32)
    arena.values[0][0, 5, 2] = bad
    codec = codec_type(arena.groups, 4)
    payload = memoryview(bytearray(codec.payload_bytes))
    assert codec.encode(0, payload)
    assert not codec.encode(4, payload)
