"""Norms in one pass: only what computes the same is replaced, and each row stands for itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ostinato.engines.norms import RowNorm, replace_norms


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    num_rows=st.integers(1, 70),
    width=st.integers(1, 700),
    size=st.sampled_from([0.0, 1e-6, 1.0, 1e6]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=40, deadline=None)
@torch.inference_mode()
def test_it_computes_what_transformers_does(num_rows: int, width: int, size: float, seed: int) -> None:
    own = LlamaRMSNorm(width, eps=1e-5)
    own.weight.copy_(draw(seed, width))
    rows = draw(seed + 1, 1, num_rows, width) * size
    norm = RowNorm(own.weight, 1e-5)
    got = norm(rows)
    assert torch.allclose(got, own(rows), rtol=1e-5, atol=1e-6)
    for i in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(norm(rows[:, i : i + 1]), got[:, i : i + 1])


@torch.inference_mode()
def test_rows_that_do_not_lie_together() -> None:
    norm = RowNorm(draw(1, 8), 1e-6)
    rows = draw(2, 1, 5, 24)
    assert torch.equal(norm(rows[..., 8:16]), norm(rows[..., 8:16].contiguous()))
    heads = rows.view(1, 5, 3, 8).transpose(1, 2)
    assert torch.equal(norm(heads), norm(heads.contiguous()))


class Centred(nn.Module):
    """Named like such a norm, and another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps = 1e-6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(rows, (16,), self.weight, eps=self.eps)


@pytest.mark.parametrize("module", [Centred(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Identity()])
def test_others_are_left(module: nn.Module) -> None:
    model = nn.Sequential(module)
    assert replace_norms(model) == 0
    assert model[0] is module


def test_gemma_adds_one_to_its_weight() -> None:
    module = Gemma3RMSNorm(16)
    with torch.no_grad():
        module.weight.fill_(0.5)
    assert replace_norms(nn.Sequential(module)) == 0


def test_norms_of_a_model_are_found() -> None:
    model = nn.Sequential(LlamaRMSNorm(16), nn.Sequential(LlamaRMSNorm(32), nn.Linear(32, 32)))
    assert replace_norms(model) == 2
