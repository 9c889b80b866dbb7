"""Payloads: exact where they say so, within their bound where they do not, and never a padded byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ParameterError
from ostinato.kv.arena import Arena, LayerShape
from ostinato.kv.codecs.exact import RawCodec
from ostinato.kv.codecs.layered import LayeredCodec, make_codec
from ostinato.kv.codecs.spec import FORMS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LOSSY = ["fp16", "bf16", "int8", "int4", "int8/int4", "exact/int8"]
shapes = st.builds(LayerShape, st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
layer_lists = st.lists(shapes, min_size=1, max_size=5)
sizes = st.integers(1, 7)


def empty(layers: list[LayerShape], num_slots: int, dtype: torch.dtype) -> Arena:
    return Arena(layers, num_slots, dtype=dtype, device=torch.device("cpu"))


def filled(layers: list[LayerShape], num_slots: int, dtype: torch.dtype, seed: int = 0) -> Arena:
    arena = empty(layers, num_slots, dtype)
    generator = torch.Generator().manual_seed(seed)
    for group in arena.groups:
        group.copy_(torch.randn(group.shape, generator=generator))
    return arena


def block_of(arena: Arena, slot: int, size: int) -> list[torch.Tensor]:
    return [tensor[:, slot : slot + size].clone() for tensor in (*arena.keys, *arena.values)]


def buffer_for(codec: RawCodec | LayeredCodec) -> memoryview:
    return memoryview(bytearray(codec.payload_bytes))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def half_step(block: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """The bound that forms.py states, with the rounding of its float16 parameters."""
    low, high = block.amin(axis, keepdim=True), block.amax(axis, keepdim=True)
    reach = high - low + low.abs() * 2**-9 + 2**-23
    return (reach / ((1 << bits) - 1) * (1 + 2**-9) + 2**-23) / 2


# ---------------------------------------------------------------- exact


@settings(deadline=None, max_examples=60)
@given(layer_lists, sizes, st.sampled_from(DTYPES), st.integers(0, 3))
def test_raw_keeps_every_bit_of_any_mix_of_layers(layers, size, dtype, place):
    arena, other = filled(layers, size * 4, dtype), filled(layers, size * 4, dtype, seed=1)
    codec = make_codec(arena, size, "exact")
    assert codec.is_exact
    assert codec.payload_bytes == Arena.bytes_per_slot(layers, dtype) * size
    payload = buffer_for(codec)
    assert codec.encode(place * size, payload)
    before = [block_of(other, i * size, size) for i in range(4)]
    target = (place + 1) % 4
    RawCodec(other.groups, size).decode(payload, target * size)
    for i in range(4):
        expected = block_of(arena, place * size, size) if i == target else before[i]
        assert all(torch.equal(a, b) for a, b in zip(block_of(other, i * size, size), expected, strict=True))


NOT_NUMBERS = torch.tensor([0x7FC00001, 0x7F800000, -1, -(2**31)], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("spec", ["exact", "fp32", "1:int8"])
def test_what_is_exact_keeps_numbers_that_are_none(spec):
    layers = [LayerShape(1, 2, 2)] * 2
    arena, other = filled(layers, 2, torch.float32), filled(layers, 2, torch.float32, seed=1)
    arena.keys[0][0].copy_(NOT_NUMBERS.view(2, 2))
    codec = make_codec(arena, 2, spec)
    payload = buffer_for(codec)
    assert codec.encode(0, payload)
    make_codec(other, 2, spec).decode(payload, 0)
    assert same_bits(other.keys[0], arena.keys[0])
    assert same_bits(other.values[0], arena.values[0])


@pytest.mark.parametrize(
    ("dtype", "lossless"),
    [
        (torch.float32, {"exact", "fp32"}),
        (torch.float16, {"exact", "fp32", "fp16"}),
        (torch.bfloat16, {"exact", "fp32", "bf16"}),
    ],
)
def test_a_form_that_holds_every_number_of_the_arena_is_the_exact_codec(dtype, lossless):
    arena = filled([LayerShape(1, 4, 4)], 4, dtype)
    for form in FORMS:
        codec = make_codec(arena, 2, form)
        assert codec.is_exact == (form in lossless), form
        assert (codec.name == "raw") == codec.is_exact


# ---------------------------------------------------------------- lossy


@settings(deadline=None, max_examples=80)
@given(layer_lists, sizes, st.sampled_from(DTYPES), st.integers(0, 2), st.data())
def test_every_layer_is_within_the_bound_of_its_form_and_nothing_else_changes(
    layers, size, dtype, place, data
):
    forms = [data.draw(st.sampled_from(FORMS)) for _ in range(2 * len(layers))]
    spec = ",".join(f"{i}:{forms[2 * i]}/{forms[2 * i + 1]}" for i in range(len(layers)))
    arena, other = filled(layers, size * 3, dtype), filled(layers, size * 3, dtype, seed=1)
    codec = make_codec(arena, size, spec)
    payload = buffer_for(codec)
    assert codec.encode(place * size, payload)
    before = [block_of(other, i * size, size) for i in range(3)]
    target = (place + 1) % 3
    make_codec(other, size, spec).decode(payload, target * size)
    for i in range(3):
        if i != target:
            got = block_of(other, i * size, size)
            assert all(torch.equal(a, b) for a, b in zip(got, before[i], strict=True))
    exact, got = block_of(arena, place * size, size), block_of(other, target * size, size)
    for layer in range(len(layers)):
        for kind, tensors in enumerate((slice(0, len(layers)), slice(len(layers), None))):
            form = forms[2 * layer + kind]
            a, b = exact[tensors][layer], got[tensors][layer]
            if form.startswith("int"):
                bits, axis = int(form[3:]), 1 if form == "int4" and kind == 0 else 2
                rounding = a.float().abs().amax() * torch.finfo(dtype).eps + 1e-6
                assert ((a.float() - b.float()).abs() <= half_step(a.float(), bits, axis) + rounding).all()
            elif form in ("fp16", "bf16"):
                stored = torch.float16 if form == "fp16" else torch.bfloat16
                assert torch.equal(b, a.to(stored).to(dtype))
            else:
                assert torch.equal(a, b)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=32, max_size=32),
    st.sampled_from(LOSSY),
)
def test_any_numbers_are_refused_or_within_the_bound(numbers, spec):
    """Infinities, NaN, subnormal and very large ones, constant channels."""
    arena = empty([LayerShape(1, 4, 4)], 8, torch.float32)
    values = torch.tensor(numbers, dtype=torch.float32)
    arena.keys[0][0, :4] = values[:16].view(4, 4)
    arena.values[0][0, :4] = values[16:].view(4, 4)
    codec = make_codec(arena, 4, spec)
    payload = buffer_for(codec)
    fits = codec.encode(0, payload)
    lossy = values[16:] if spec == "exact/int8" else values
    largest = {"fp16": 65504.0, "bf16": torch.finfo(torch.bfloat16).max}.get(spec.partition("/")[0], 65000.0)
    if not bool(lossy.isfinite().all()):
        assert not fits
    if bool((lossy.abs() <= largest).all()):
        assert fits
    if fits:
        codec.decode(payload, 4)
        for group in arena.groups:
            a, b = group[0, :, :4], group[0, :, 4:]
            if group is arena.groups[0] and spec == "exact/int8":
                assert same_bits(a, b)
                continue
            assert b.isfinite().all()
            keys, _, rest = spec.partition("/")
            form = keys if group is arena.groups[0] else rest or keys
            bound = {
                "fp16": a.abs() * 2**-11 + 2**-25,
                "bf16": a.abs() * 2**-8 + 1e-40,
                "int8": half_step(a, 8, 2) + a.abs().amax() * 2**-20,
                "int4": half_step(a, 4, 1 if group is arena.groups[0] else 2) + a.abs().amax() * 2**-20,
            }[form]
            assert ((a - b).abs() <= bound).all()


@pytest.mark.parametrize("spec", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_are_refused(spec, bad):
    arena = filled([LayerShape(1, 4, 4)], 8, torch.float32)
    arena.values[0][0, 5, 2] = bad
    codec = make_codec(arena, 4, spec)
    payload = buffer_for(codec)
    assert codec.encode(0, payload)
    assert not codec.encode(4, payload)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(LOSSY), st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_bytes_decode_to_something(spec, size, chance):
    """Checksums keep damage out; what gets through all the same must not end the process."""
    arena = filled([LayerShape(2, 5, 3), LayerShape(1, 4, 4)], size, torch.float32)
    codec = make_codec(arena, size, spec)
    codec.decode(memoryview(bytearray(chance.randbytes(codec.payload_bytes))), 0)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.25, 1e-7, 6e4])
def test_what_is_constant_stays_nearly_that(value):
    arena = empty([LayerShape(2, 8, 8)], 8, torch.float32)
    for group in arena.groups:
        group.fill_(value)
    for spec in ("int8", "int4"):
        codec = make_codec(arena, 4, spec)
        payload = buffer_for(codec)
        assert codec.encode(0, payload)
        codec.decode(payload, 4)
        for group in arena.groups:
            assert ((group[:, :, 4:] - value).abs() <= abs(value) * 2**-9 + 2**-23).all()


def test_large_blocks_of_wide_heads_are_cut_and_come_back():
    """Groups end where they divide evenly; pieces stay small enough for one thread."""
    arena = filled([LayerShape(4, 256, 256)] * 2, 256, torch.float32)
    for spec in ("int8", "int4"):
        codec = make_codec(arena, 128, spec)
        assert isinstance(codec, LayeredCodec)
        assert all(t.shape[0] * t.shape[1] * 128 * 256 <= 32_768 for t, _, _ in codec._pieces)
        payload = buffer_for(codec)
        assert codec.encode(0, payload)
        codec.decode(payload, 128)
        for place, group in enumerate(arena.groups):
            axis = 2 if spec == "int4" and place % 2 == 0 else 3
            a, b = group[:, :, :128], group[:, :, 128:]
            assert ((a - b).abs() <= half_step(a, int(spec[3:]), axis) + 1e-5).all()


def test_keys_with_large_channels_are_why_keys_go_by_channel():
    size = 16
    arena = filled([LayerShape(2, 64, 64)], size * 2, torch.float32)
    arena.groups[0][..., 5] *= 100
    codec = make_codec(arena, size, "int4")
    payload = buffer_for(codec)
    assert codec.encode(size, payload)
    codec.decode(payload, 0)
    others = [i for i in range(64) if i != 5]
    exact, got = arena.groups[0][:, :, size:, others], arena.groups[0][:, :, :size, others]
    assert (exact - got).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt() < 0.1


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        ("fp16", 16),
        ("bf16", 16),
        ("int8", 8.5),
        ("int8/int4", 6.75),
        ("int4", 5.5),
        ("0-14:int8,15-:fp16", 12.25),
    ],
)
def test_what_they_take(spec, bits):
    """SmolLM2's shape: 64 numbers a head, blocks of 16 tokens."""
    arena = filled([LayerShape(3, 64, 64)] * 30, 16, torch.float32)
    assert make_codec(arena, 16, spec).payload_bytes * 8 == bits * 30 * 3 * 16 * 128


# ---------------------------------------------------------------- names


@given(st.lists(st.sampled_from(["exact", "int8", "int8/int4", "fp16"]), min_size=1, max_size=6))
@settings(deadline=None)
def test_equal_choices_have_equal_names_and_others_have_not(codings):
    arena = filled([LayerShape(1, 2, 2)] * len(codings), 4, torch.float32)
    written = ",".join(f"{i}:{coding}" for i, coding in enumerate(codings))
    codec = make_codec(arena, 2, written)
    if isinstance(codec, LayeredCodec):
        assert make_codec(arena, 2, codec.spec).name == codec.name
        assert codec.spec in codec.name
    for other in ("int4", "bf16", "exact", "0:int4"):
        different = make_codec(arena, 2, other)
        if codec.is_exact and different.is_exact:
            continue
        assert different.name != codec.name


def test_unnamed_layers_stay_exact_and_names_are_canonical():
    arena = filled([LayerShape(1, 2, 2)] * 4, 4, torch.float32)
    assert make_codec(arena, 2, "1-2:int8").name == "lossy v1 0-0:exact,1-2:int8,3-3:exact"
    assert make_codec(arena, 2, "0-:INT8").name == make_codec(arena, 2, "0-1:int8, 2-3: int8/int8").name


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("", "'' is none of"),
        ("int3", "'int3' is none of exact, fp32"),
        ("int8/int4/int4", "not more"),
        ("0-3:int8,3:fp16", "layer 3 is named twice"),
        ("0-4:int8", "layers 0 to 3"),
        ("7-:int8", "layers 0 to 3"),
        ("3-1:int8", "goes backwards"),
        ("a-b:int8", "not a range"),
        ("0-1:int8,", "not a range"),
        ("-1:int8", "not a range"),
        ("0-99999999999:int8", "not a range"),
    ],
)
def test_what_cannot_be_read_is_said(spec, reason):
    arena = filled([LayerShape(1, 2, 2)] * 4, 4, torch.float32)
    with pytest.raises(ParameterError, match=reason) as raised:
        make_codec(arena, 2, spec)
    assert raised.value.param == "tier_codec"


def test_payload_of_another_length_is_our_own_fault():
    arena = filled([LayerShape(1, 2, 2)], 4, torch.float32)
    codec = make_codec(arena, 2, "int8")
    with pytest.raises(AssertionError, match="bytes, not"):
        codec.decode(memoryview(bytearray(codec.payload_bytes + 1)), 0)


def test_encoding_does_not_touch_the_arena():
    arena = filled([LayerShape(2, 8, 8)] * 2, 8, torch.float32)
    before = [group.clone() for group in arena.groups]
    for spec in LOSSY:
        codec = make_codec(arena, 4, spec)
        assert codec.encode(4, buffer_for(codec))
    assert all(same_bits(a, b) for a, b in zip(arena.groups, before, strict=True))
