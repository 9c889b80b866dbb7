"""Finding out how a model's keys change with their position.

Not looked up by name: observed. A few tokens run through the model, each at many positions and none attending
to another, and every layer's keys and values are recorded. What no rotation explains cannot be moved. The
rest shows, layer by layer and without knowing the model's code, which elements turn, with which partner (in
halves, interleaved, some of them), and how fast: measured at positions 1, 2, 4, ..., each of which fixes the
frequency twice as exactly as the one before. Then keys are moved between all these positions, and some more,
and compared with what the model computed there.

Frequencies that change with the length (dynamic NTK, longrope) are observed within the length that the model
is loaded for, up to which they do not change; beyond it KV is not reused at all (``engines/hf.py``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ..reuse.rope import Movement, Rotation
from .runners import KeyProbe, LoadedModel

_Floats = npt.NDArray[np.float64]

_NUM_TOKENS = 6
_MOST_POSITIONS = 1 << 20


@torch.inference_mode()
def observe_movement(loaded: LoadedModel) -> Movement:
    """How KV of ``loaded`` (which is run in pages) moves; or why it does not."""
    assert loaded.reuse_reason is None, "a model without KV in pages has none to move"
    name = type(loaded.model).__name__
    limit = min(loaded.max_model_len, _MOST_POSITIONS)
    if limit < 4:
        return Movement(reason=f"{name} is loaded for {limit} positions, too few to see how keys move")
    doubling = [1 << power for power in range((limit - 1).bit_length()) if 1 << power < limit]
    checked = [limit - 1, 5 * limit // 7, limit // 3]
    positions = np.array([0, *doubling, *checked])
    probe = _run(loaded, positions)
    rotations = []
    for layer in range(len(loaded.layers)):
        keys, values = (
            _by_position(tensors[layer], len(positions)) for tensors in (probe.keys, probe.values)
        )
        noise = _noise(loaded.dtype)
        if np.abs(values - values[0]).max() > noise * np.abs(values).max():
            return Movement(
                reason=f"{name} adds positions to its tokens (learned or computed, not rotary): "
                f"a token's values are others at every place"
            )
        rotation = _fit(keys, positions, len(doubling), noise)
        if rotation is None or not _is_right(rotation, keys, positions, noise):
            return Movement(
                reason=f"the keys of {name} change with their position otherwise than by a rotation"
            )
        rotations.append(rotation)
    return Movement(tuple(rotations))


def _run(loaded: LoadedModel, positions: npt.NDArray[np.int64]) -> KeyProbe:
    """Every token at every position, in one forward call in which nobody attends to anybody."""
    tokens = 1 + np.arange(_NUM_TOKENS) * (loaded.vocab_size - 1) // _NUM_TOKENS
    probe = KeyProbe()
    loaded.model(
        input_ids=torch.from_numpy(np.tile(tokens, len(positions))).to(loaded.device).unsqueeze(0),
        position_ids=torch.from_numpy(np.repeat(positions, len(tokens))).to(loaded.device).unsqueeze(0),
        use_cache=False,
        logits_to_keep=1,
        ostinato=probe,
    )
    return probe


def _by_position(tensor: torch.Tensor, num_positions: int) -> _Floats:
    """``[heads, positions * tokens, dim]`` as ``[positions, heads * tokens, dim]``."""
    heads, rows, dim = tensor.shape
    apart = tensor.double().cpu().reshape(heads, num_positions, rows // num_positions, dim)
    array: _Floats = apart.transpose(0, 1).reshape(num_positions, -1, dim).numpy()
    return array


def _noise(dtype: torch.dtype) -> float:
    """What rounding may change, relative to the largest; rotary embeddings are in float32 at best."""
    if dtype in (torch.float32, torch.float64):
        return 64 * torch.finfo(torch.float32).eps
    return 4 * torch.finfo(dtype).eps


def _fit(keys: _Floats, positions: npt.NDArray[np.int64], num_doubling: int, noise: float) -> Rotation | None:
    """The rotation that keys at position 0, 1, 2, 4, ... show; ``None``: they do not turn in pairs.

    For elements i and j with vectors a at position 0 and b at another, the turn that fits best has
    ``cos = (aᵢbᵢ + aⱼbⱼ) / E`` and ``sin = (aᵢbⱼ - aⱼbᵢ) / E``, and what it leaves unexplained is
    ``|bᵢ|² + |bⱼ|² - E (cos² + sin²)``, where ``E = |aᵢ|² + |aⱼ|²``.
    """
    start, others = keys[0], keys[1 : 1 + num_doubling]
    turns = np.abs(keys - start).max(axis=(0, 1)) > noise * _sizes(keys)
    if not turns.any():
        return Rotation()
    products = np.einsum("ni,pnj->pij", start, others)
    energy = (start**2).sum(axis=0)
    both = energy[:, None] + energy
    both = np.where(both > 0, both, 1.0)
    diagonal = np.diagonal(products, axis1=1, axis2=2)
    cos = (diagonal[:, :, None] + diagonal[:, None, :]) / both
    sin = (products - products.transpose(0, 2, 1)) / both
    after = (others**2).sum(axis=1)
    left = (after[:, :, None] + after[:, None, :] - both * (cos**2 + sin**2)).sum(axis=0)
    np.fill_diagonal(left, np.inf)
    partner = left.argmin(axis=1)
    pairs = {tuple(sorted((int(i), int(partner[i])))) for i in np.flatnonzero(turns)}
    if len({element for pair in pairs for element in pair}) != 2 * len(pairs):
        return None
    first, second = np.array(sorted(pairs)).T
    angles = np.arctan2(sin[:, first, second], cos[:, first, second])
    frequencies = angles[0]
    for row in range(1, num_doubling):
        position = positions[1 + row]
        ahead = angles[row] - position * frequencies
        frequencies = frequencies + (ahead - 2 * np.pi * np.round(ahead / (2 * np.pi))) / position
    return Rotation(tuple(first.tolist()), tuple(second.tolist()), tuple(frequencies.tolist()))


def _is_right(rotation: Rotation, keys: _Floats, positions: npt.NDArray[np.int64], noise: float) -> bool:
    """Whether keys moved between any two positions are those that the model has there.

    Its own angles are products in float32, which are the less exact the larger they are.
    """
    first, second = np.array(rotation.first, np.intp), np.array(rotation.second, np.intp)
    frequencies = np.array(rotation.frequencies)
    fastest = np.abs(frequencies).max(initial=0.0)
    sizes = _sizes(keys)
    sizes[first] = sizes[second] = np.maximum(sizes[first], sizes[second])
    allowed = (noise + 2.0**-22 * fastest * positions.max()) * sizes
    for source in range(len(positions)):
        distances = positions - positions[source]
        angles = distances[:, None, None] * frequencies
        moved = np.broadcast_to(keys[source], keys.shape).copy()
        a, b = keys[source][:, first], keys[source][:, second]
        moved[..., first] = a * np.cos(angles) - b * np.sin(angles)
        moved[..., second] = b * np.cos(angles) + a * np.sin(angles)
        if (np.abs(moved - keys) > allowed).any():
            return False
    return True


def _sizes(keys: _Floats) -> _Floats:
    """What is large in each element; some models have a few elements that are a hundred times the others."""
    sizes: _Floats = np.abs(keys).max(axis=(0, 1))
    sizes = np.maximum(sizes, 2.0**-10 * sizes.max())
    return sizes
