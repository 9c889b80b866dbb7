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

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# Packing depends on the number of rows it is told to expect; one number for all keeps results invariant.
_EXPECTED_ROWS = 512
# A head that shares its weights with the embedding must be packed as a copy; larger ones are not worth it.
_MAX_TIED_BYTES = 256 << 20
# Layers that read the same rows, by the names that transformers' models give them: fewer and larger products,
# a seventh off a decode step's.
_SAME_ROWS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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
    return replace_linears(model, PackedLinear, _MAX_TIED_BYTES)


def replace_linears(
    model: nn.Module, make: Callable[[Tensor, Tensor | None], nn.Module], max_tied_bytes: float
) -> int:
    """Replace linear layers by what ``make`` makes of a weight (``[out, in]``) and a bias; returns how many.

    Layers of one parent that by their names read the same rows become one (:class:`Joined`). A weight that is
    an embedding's too stays, and its layer is only replaced up to ``max_tied_bytes``.
    """
    embeddings = {module.weight.data_ptr() for module in model.modules() if isinstance(module, nn.Embedding)}
    num_replaced = 0
    for parent in list(model.modules()):
        children: dict[str, Any] = {
            name: child
            for name, child in parent.named_children()
            # Only the plain classes: what a subclass does in its forward call is its own.
            if type(child) in (nn.Linear, Conv1D) and not (child._forward_hooks or child._forward_pre_hooks)
        }
        tied = {name for name, child in children.items() if child.weight.data_ptr() in embeddings}
        for names in _groups(children, tied):
            layers = [children[name] for name in names]
            if names[0] in tied and layers[0].weight.nbytes > max_tied_bytes:
                continue
            for name, layer in zip(names, _join(layers, make), strict=True):
                setattr(parent, name, layer)
            for name in set(names) - tied:
                children[name].weight = nn.Parameter(torch.empty(0), requires_grad=False)
            num_replaced += len(names)
    if num_replaced:
        # What is left (embeddings, norms) may be a view of a mapped file; a copy lets go of the whole of it.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return num_replaced


def _groups(children: dict[str, Any], tied: set[str]) -> Iterator[tuple[str, ...]]:
    """The names of ``children``, those together whose layers can be one."""
    rest = dict(children)
    for names in _SAME_ROWS:
        layers = [rest[name] for name in names if name in rest and name not in tied]
        if len(layers) < len(names) or any(type(layer) is not nn.Linear for layer in layers):
            continue
        if len({(layer.in_features, layer.weight.dtype) for layer in layers}) == 1:
            for name in names:
                del rest[name]
            yield names
    yield from ((name,) for name in rest)


def _join(layers: list[Any], make: Callable[[Tensor, Tensor | None], nn.Module]) -> Sequence[nn.Module]:
    if len(layers) == 1:
        # GPT-2's lie the other way.
        weight = layers[0].weight.T if type(layers[0]) is Conv1D else layers[0].weight
        return (make(weight, layers[0].bias),)
    bias = None
    if any(layer.bias is not None for layer in layers):
        zeros = [layer.weight.new_zeros(layer.out_features) for layer in layers]
        bias = torch.cat([z if x.bias is None else x.bias for x, z in zip(layers, zeros, strict=True)])
    whole = make(torch.cat([layer.weight for layer in layers]), bias)
    joined = Joined(whole, [layer.out_features for layer in layers])
    return [Part(joined, place) for place in range(len(layers))]


class Joined:
    """Several linear layers that read the same rows, computed as one when the first of them is called.

    That they are the same is told by the tensor's identity; other rows are computed for themselves.
    """

    def __init__(self, whole: nn.Module, sizes: Sequence[int]) -> None:
        self.whole = whole
        self._sizes = list(sizes)
        self._rows: Tensor | None = None
        self._left: dict[int, Tensor] = {}

    def part(self, place: int, rows: Tensor) -> Tensor:
        if rows is not self._rows or place not in self._left:
            self._rows = rows
            self._left = dict(enumerate(self.whole(rows).split(self._sizes, dim=-1)))
        output = self._left.pop(place)
        if not self._left:
            self._rows = None
        return output


class Part(nn.Module):
    """One of them."""

    def __init__(self, joined: Joined, place: int) -> None:
        super().__init__()
        self._joined = joined
        self._place = place

    def forward(self, rows: Tensor) -> Tensor:
        return self._joined.part(self._place, rows)
