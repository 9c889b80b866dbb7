"""Linear layers with their weights packed for the processor.

On a CPU, torch multiplies through MKL with weights as they lie. Packed once into oneDNN's blocked layout the
same products run 1.2 times as fast for long prompts and about twice as fast for a few rows (a decode step is
bound by how fast weights stream in; blocked, they stream better). And they are *invariant*: a row's result
does not depend, to the last bit, on how many other rows are multiplied with it, so that an answer does not
depend on who else is being served or on how a prompt is cut (``benchmarks/results``, ``LOG.md``).

For every number of rows it is given, oneDNN makes code of half a MiB and keeps it, up to 2,048 times in its
own cache and torch's. Rows are filled up to one of a few numbers, so that it stays at some tens of MiB.

The operators are those that torch's own compiler uses when it freezes a model. Where they are missing the
plain layers stay; that the packed model computes the same is checked when it is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# Packing depends on the number of rows it is told to expect; one number for all keeps results invariant.
_EXPECTED_ROWS = 512
# A head that shares its weights with the embedding must be packed as a copy; larger ones are not worth it.
_MAX_TIED_BYTES = 256 << 20


class PackedLinear(nn.Module):
    """A linear layer over packed weights (inference only)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """``weight``: ``[out_features, in_features]``."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _EXPECTED_ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        num_rows = rows.shape[-2]
        num_spare = round_up(num_rows) - num_rows
        if num_spare:
            rows = nn.functional.pad(rows, (0, 0, 0, num_spare))
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return output[..., :num_rows, :] if num_spare else output


def round_up(num_rows: int) -> int:
    """To one of 48 numbers up to 512; on average 4 rows in 100 are spare."""
    for limit, step in ((16, 1), (32, 4), (128, 8), (256, 16)):
        if num_rows <= limit:
            return -(-num_rows // step) * step
    return -(-num_rows // 32) * 32


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch can pack weights of ``dtype`` on ``device``."""
    operators = torch.ops.mkldnn
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(operators, "_reorder_linear_weight")
        and hasattr(operators, "_linear_pointwise")
    )


@torch.inference_mode()
def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers of ``model`` by packed ones and free their weights; returns how many."""
    embeddings = {module.weight.data_ptr() for module in model.modules() if isinstance(module, nn.Embedding)}
    num_packed = 0
    for parent in list(model.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            # Only the plain classes: what a subclass does in its forward call is its own.
            if type(child) not in (nn.Linear, Conv1D) or child._forward_hooks or child._forward_pre_hooks:
                continue
            tied = child.weight.data_ptr() in embeddings
            if tied and child.weight.nbytes > _MAX_TIED_BYTES:
                continue
            weight = child.weight.T if type(child) is Conv1D else child.weight  # GPT-2's lie the other way
            setattr(parent, name, PackedLinear(weight, child.bias))
            if not tied:
                child.weight = nn.Parameter(torch.empty(0), requires_grad=False)
            num_packed += 1
    if num_packed:
        # What is left (embeddings, norms) may be a view of a mapped file; a copy lets go of the whole of it.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return num_packed
