"""Root mean square norms of rows in one compiled pass: a decode step has two for each layer, of a few rows.

transformers' modules do the same in seven operations, each of which costs more to call than to compute.
Which modules are such norms is found by what they compute, not by their class.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from .row_kernels import normalize_rows


class RowNorm(nn.Module):
    """``row / sqrt(mean(row²) + epsilon) * weight`` (inference only, on a processor, float32)."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._epsilon = np.float32(epsilon)
        self._numbers = weight.detach().numpy()

    def forward(self, rows: Tensor) -> Tensor:
        # For rows apart in memory other code would be compiled, which sums in another order.
        flat = rows.reshape(-1, rows.shape[-1]).contiguous().numpy()
        normal = np.empty_like(flat)
        normalize_rows(flat, self._numbers, self._epsilon, normal)
        return torch.from_numpy(normal).view(rows.shape)


@torch.inference_mode()
def replace_norms(model: nn.Module) -> int:
    """Replace the modules of ``model`` that compute what :class:`RowNorm` does; returns how many.

    On a processor, in float32.
    """
    num_replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (norm := _as_row_norm(child)) is not None:
                setattr(parent, name, norm)
                num_replaced += 1
    return num_replaced


def _as_row_norm(module: nn.Module) -> RowNorm | None:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = dict(module.named_parameters())
    if not isinstance(epsilon, float) or set(parameters) != {"weight"} or parameters["weight"].dim() != 1:
        return None
    others: list[object] = [*module.buffers(), *module.children()]
    if others or module._forward_hooks or module._forward_pre_hooks:
        return None
    weight = parameters["weight"].clone()  # it may be a view of a mapped file
    norm = RowNorm(weight, epsilon)
    rows = torch.randn((1, 3, len(weight)), generator=torch.Generator().manual_seed(0)) * 0.01
    try:
        expected = module(rows)
    except (TypeError, ValueError, RuntimeError):
        return None
    return norm if torch.allclose(norm(rows), expected, rtol=1e-5, atol=1e-7) else None
