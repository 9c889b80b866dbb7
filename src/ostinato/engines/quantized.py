"""Linear layers with weights and inputs in eight bits: faster, at the price of answers that may differ.

Most of a row's numbers would have few of the levels, beside the few that are many times as large. So rows are
mixed first: what equal parts of a row have at the same place is turned by a Hadamard matrix, and weights
likewise, which changes no product (QuaRot, arXiv 2404.00456). Then a weight is ``step of its output * int8``,
a number of a row ``step of the row * (uint8 - zero)``; a step follows from the largest magnitude.

The products are summed in whole numbers, where order does not matter: even more simply than in the float
layers of ``packed.py``, a row's result does not depend on how many others are computed with it. For a decode
step a quarter of the bytes stream in, and with VNNI or AMX an instruction does several times as many
products. What it costs and gains: ``docs/devices.md``.

The operators are those that torch's own compiler uses for quantized models; that they compute what is
meant is checked for every layer when it is replaced.
"""

from __future__ import annotations

import logging
import math

import llvmlite.binding
import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ModelUnsupportedError
from .packed import PackedLinear, replace_linears, round_up
from .row_kernels import quantize_rows

_log = logging.getLogger(__name__)

_FEATURES = llvmlite.binding.get_host_cpu_features()
# Without VNNI oneDNN adds two products in 16 bits, which holds them only if inputs have seven.
_LEVELS = 127 if _FEATURES.get("avx512vnni") or _FEATURES.get("avxvnni") else 63
_ZERO = _LEVELS + 1
_MOST_MIXED = 64
# About 1 % of an output is lost; more where a few weights dwarf the others of their row.
_TOLERANCE = 0.1


class QuantizedLinear(nn.Module):
    """A linear layer in eight bits (inference only, on a processor)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """``weight``: float32 ``[out_features, in_features]``."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach().clone()
        self._num_mixed = math.gcd(self.in_features, _MOST_MIXED)
        weight = _mixed(weight, self._num_mixed)
        self._steps = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        whole = (weight / self._steps.unsqueeze(1)).round().to(torch.int8).contiguous()
        self._packed = torch.ops.onednn.qlinear_prepack(whole, None)
        self._zeros = torch.zeros(self.out_features, dtype=torch.int32)

    @property
    def nbytes(self) -> int:
        return self.out_features * (self.in_features + self._steps.itemsize)

    def forward(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, self.in_features)
        num_rows = len(flat)
        whole = np.empty((round_up(num_rows), self.in_features), np.uint8)
        steps = np.empty((len(whole), 1), np.float32)
        quantize_rows(flat.numpy(), whole, steps, _LEVELS, self._num_mixed)
        output: Tensor = torch.ops.onednn.qlinear_pointwise(
            torch.from_numpy(whole),
            1.0,
            _ZERO,
            self._packed,
            self._steps,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        output = output[:num_rows].mul_(torch.from_numpy(steps[:num_rows]))
        if self._bias is not None:
            output += self._bias
        return output.view(*rows.shape[:-1], self.out_features)


def _mixed(weight: Tensor, num_mixed: int) -> Tensor:
    """The weights (``[out, in]``) by which mixed rows give what the rows themselves give by ``weight``."""
    mix = torch.ones(1, 1)
    while len(mix) < num_mixed:
        mix = torch.cat([torch.cat([mix, mix], 1), torch.cat([mix, -mix], 1)])
    return (mix @ weight.reshape(len(weight), num_mixed, -1) / num_mixed).reshape(weight.shape)


def can_quantize(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch has the operators, for a model of ``dtype`` on ``device``."""
    operators = torch.ops.onednn
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(operators, "qlinear_prepack")
        and hasattr(operators, "qlinear_pointwise")
    )


@torch.inference_mode()
def quantize_linears(model: nn.Module) -> int:
    """Replace the linear layers of ``model``, its head included; returns the bytes of weights that are left.

    A layer that eight bits would distort stays in float.

    Raises:
        ModelUnsupportedError: that is so of every layer, or there is none.
    """
    noise = torch.Generator().manual_seed(0)
    num_quantized, num_float, num_bytes = 0, 0, 0

    def make(weight: Tensor, bias: Tensor | None) -> nn.Module:
        nonlocal num_quantized, num_float, num_bytes
        layer = QuantizedLinear(weight, bias)
        rows = torch.randn((3, layer.in_features), generator=noise)
        exact = nn.functional.linear(rows, weight, bias)
        error = float((layer(rows) - exact).norm() / exact.norm().clamp(min=1e-30))
        if error < _TOLERANCE:
            num_quantized, num_bytes = num_quantized + 1, num_bytes + layer.nbytes
            return layer
        _log.info("a layer of %d inputs would differ by %.0f%%", layer.in_features, 100 * error)
        num_float, num_bytes = num_float + 1, num_bytes + weight.nbytes
        return PackedLinear(weight, bias)

    replace_linears(model, make, math.inf)
    if not num_quantized:
        raise ModelUnsupportedError("no linear layer of this model can be quantized; run it without")
    if num_float:
        _log.warning("%d of %d linear layers stay in float32", num_float, num_float + num_quantized)
    return num_bytes + sum(parameter.nbytes for parameter in model.parameters())
