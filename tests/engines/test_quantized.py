"""Linear layers in eight bits: near the exact ones, and each row for itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ostinato
from engines.models import fresh, loaded, quantized
from ostinato.config import Settings
from ostinato.engines.hf import load_model
from ostinato.engines.quantized import QuantizedLinear, quantize_linears
from ostinato.engines.row_kernels import quantize_rows
from ostinato.errors import ModelUnsupportedError, ParameterError


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    num_rows=st.integers(1, 600),
    out_features=st.sampled_from([1, 7, 64, 300]),
    in_features=st.sampled_from([1, 5, 64, 333, 1536]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=20, deadline=None)
@torch.inference_mode()
def test_a_row_does_not_depend_on_others(
    num_rows: int, out_features: int, in_features: int, seed: int
) -> None:
    weight, rows = draw(seed, out_features, in_features), draw(seed + 1, 1, num_rows, in_features)
    layer = QuantizedLinear(weight, draw(seed + 2, out_features))
    together = layer(rows)
    assert together.shape == (1, num_rows, out_features)
    for i in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(layer(rows[:, i : i + 1]), together[:, i : i + 1])


@given(seed=st.integers(0, 2**20), size=st.floats(1e-6, 1e6))
@settings(max_examples=15, deadline=None)
@torch.inference_mode()
def test_it_is_what_whole_numbers_say(seed: int, size: float) -> None:
    """Against the same sums in float64, of the numbers that rounding leaves."""
    # An odd width, so that nothing is mixed.
    weight, bias, rows = draw(seed, 96, 201), draw(seed + 1, 96), draw(seed + 2, 9, 201) * size
    rows[4] = 0
    got = QuantizedLinear(weight, bias)(rows)
    whole, steps = np.empty((9, 201), np.uint8), np.empty((9, 1), np.float32)
    quantize_rows(rows.numpy(), whole, steps, 127, 1)
    near = (torch.from_numpy(whole).double() - 128) * torch.from_numpy(steps)
    assert float((near - rows).abs().max() / rows.abs().max()) < 0.5 / 127 + 1e-6, "half a step"
    weight_steps = weight.abs().amax(1, keepdim=True) / 127
    exact = near @ ((weight / weight_steps).round().double() * weight_steps).T + bias
    assert torch.allclose(got.double(), exact, rtol=1e-4, atol=1e-4 * max(size, 1.0))
    assert torch.equal(got[4], bias), "of a row of zeros the bias is left"


@pytest.mark.parametrize("width", [576, 1536, 4096])
@torch.inference_mode()
def test_what_is_large_in_a_row_does_not_drown_the_rest(width: int) -> None:
    """Rounded as they are, rows would lose 0.23 of the rest: steps of 100 / 127 beside numbers of 1."""
    weight, rows = draw(1, 200, width), draw(2, 20, width)
    layer, exact = QuantizedLinear(weight, None), rows @ weight.T
    assert (layer(rows) - exact).norm() / exact.norm() < 0.02
    rows[:, 5] += 100
    rest = layer(rows) - 100 * weight[:, 5]
    assert (rest - exact).norm() / exact.norm() < 0.1


def test_every_linear_layer_is_replaced_and_its_weight_freed() -> None:
    model, before = fresh("gpt2"), loaded("gpt2").weight_bytes
    left = quantize_linears(model)
    assert not [m for m in model.modules() if type(m).__name__ in ("Linear", "Conv1D")]
    assert left < before
    assert quantized("gpt2").weight_bytes == left


@torch.inference_mode()
def test_its_logits_are_near(subtests: pytest.Subtests) -> None:
    tokens = torch.arange(40).unsqueeze(0) % 128
    for name in ("llama", "qwen3", "gpt2", "gpt-neox"):
        with subtests.test(name):
            model = fresh(name)
            exact = model(tokens).logits
            quantize_linears(model)
            error = (model(tokens).logits - exact).norm() / exact.norm()
            assert 0 < error < 0.1


def distorted() -> nn.Linear:
    """A layer with one weight for each output that dwarfs the others, which together count as well."""
    layer = nn.Linear(4097, 8, bias=False)  # an odd width: nothing is mixed
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.weight[:, 0] = 300.0
    return layer


@torch.inference_mode()
def test_what_eight_bits_would_distort_stays_in_float(caplog: pytest.LogCaptureFixture) -> None:
    model, rows = nn.Sequential(distorted(), nn.Linear(8, 8)), draw(3, 5, 4097)
    exact = model[0](rows)
    quantize_linears(model)
    assert torch.allclose(model[0](rows), exact, rtol=1e-4, atol=1e-3)
    assert isinstance(model[1], QuantizedLinear)
    assert "1 of 2 linear layers stay in float32" in caplog.text
    with pytest.raises(ModelUnsupportedError, match="no linear layer"):
        quantize_linears(nn.Sequential(distorted()))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    fresh("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupportedError, match="int8 needs a processor, float32"):
        load_model(tmp_path, dtype=torch.bfloat16, quantization="int8")
    with pytest.raises(ParameterError, match="it may be int8"):
        Settings.from_environment({}, quantization="int4")


@pytest.mark.model
def test_kv_of_either_stays_with_it(default_model_path: Path, tmp_path: Path) -> None:
    """One tier, two engines: neither reads what the other stored, and each answers as it does cold."""
    prompt = "Name three rivers of Europe, and the seas into which they flow. " * 8
    first: dict[str | None, str] = {}
    for quantization in (None, "int8", None, "int8"):
        with ostinato.load(
            str(default_model_path), kv_cache=64 << 20, shared_tier=tmp_path, quantization=quantization
        ) as engine:
            reply = engine.complete(prompt, max_tokens=12, temperature=0.0)
            again = engine.complete(prompt, max_tokens=12, temperature=0.0)
        assert reply.usage.cached_tokens == 0 if quantization not in first else reply.usage.cached_tokens > 64
        assert again.usage.cached_tokens > reply.usage.cached_tokens or quantization in first
        assert {reply.choices[0].text, again.choices[0].text} == {
            first.setdefault(quantization, reply.choices[0].text)
        }
