"""Loading a Hugging Face model, and finding out what its KV is.

That is not looked up in a table of architectures: it is *observed*, by running a few tokens and recording
how the model calls attention, and then *checked*, by comparing the paged way, cut in the middle, with the
model's own. A model that does not pass, or whose state cannot be cut at a token, runs without reuse and says
why.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from ..errors import ModelCorruptError, ModelUnsupportedError
from ..kv.arena import Arena
from ..reuse.rope import Movement
from ..types import SequencePlan, TokenArray
from .norms import replace_norms
from .packed import can_pack, pack_linears
from .quantized import can_quantize, quantize_linears
from .rotations import observe_movement
from .runners import ATTENTION_NAME, LoadedModel, Probe, StatefulRunner, forward

_log = logging.getLogger(__name__)

# Layer types (as transformers names them) whose attention is a plan over keys; others carry other state.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
# Frequencies that change with the length of the sequence: keys are only exchangeable below the change.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
# For models without a length of their own (recurrent ones).
_UNBOUNDED = 1 << 20


def load_model(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    max_model_len: int | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    """Load the causal language model in folder ``path`` and observe its KV.

    Args:
        max_model_len: longest sequence in tokens; ``None``: what the model was made for (for frequencies
            that depend on the length: up to where they change, so that KV stays exchangeable).
        quantization: ``int8``: linear layers in eight bits (``engines/quantized.py``); ``None``: as they are.

    Raises:
        ModelUnsupportedError: the architecture is not one transformers can run as a causal LM, or its
            linear layers cannot be quantized here.
        ModelCorruptError: the weights do not fit the configuration.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        with _without_progress_bar():  # it lasts a fraction of a second, and the terminal is not ours
            model = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, local_files_only=True, use_safetensors=True
            )
    except (ValueError, KeyError, ImportError) as error:
        raise ModelUnsupportedError(f"cannot load the model in {path}: {error}") from error
    except (OSError, RuntimeError) as error:
        raise ModelCorruptError(f"cannot read the model in {path}: {error}") from error
    model = model.to(device).eval()
    if quantization is not None and not can_quantize(model.device, model.dtype):
        raise ModelUnsupportedError(
            f"{quantization} needs a processor, float32 and a torch with oneDNN's quantized layers; this is "
            f"{model.dtype} on {model.device}"
        )
    return observe_model(model, max_model_len=max_model_len, quantization=quantization)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    was_on = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            hf_logging.enable_progress_bar()


def observe_model(
    model: Any, *, max_model_len: int | None = None, quantization: str | None = None
) -> LoadedModel:
    """Find out what KV ``model`` (a transformers causal LM, in eval mode) keeps, and if it can be cut."""
    config = model.config.get_text_config()
    limit, reason = _length_limit(config, max_model_len)
    loaded = LoadedModel(
        model=model,
        device=model.device,
        dtype=model.dtype,
        max_model_len=limit,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        layers=(),
        rules={},
        rotary=json.dumps(_rotary(config), sort_keys=True, default=str),
        eos_token_ids=_eos_token_ids(model),
        reuse_reason=reason or _static_reason(model, config),
        weight_bytes=sum(parameter.nbytes for parameter in model.parameters()),
    )
    if loaded.reuse_reason is None:
        loaded.reuse_reason = _observe(loaded, is_packed=quantization is None)
    if loaded.reuse_reason is None:
        loaded.movement = _movement(loaded)
    if loaded.reuse_reason is not None:
        loaded.layers, loaded.rules = (), {}
        loaded.keeps_state = _check_state(loaded)
        _log.warning("this model runs without KV reuse: %s", loaded.reuse_reason)
    if quantization is not None:  # last: what is observed and checked is what the model itself computes
        loaded.weight_bytes = quantize_linears(model)
    return loaded


def _movement(loaded: LoadedModel) -> Movement:
    try:
        return observe_movement(loaded)
    except (AssertionError, TypeError, ValueError, RuntimeError, KeyError) as error:
        return Movement(reason=f"how its KV moves cannot be observed: {error}")


def _rotary(config: Any) -> Any:
    parameters = getattr(config, "rope_parameters", None)
    return parameters if parameters else {"rope_type": "none"}


def _length_limit(config: Any, wanted: int | None) -> tuple[int, str | None]:
    """The model's length in tokens, and why KV cannot be reused at that length (or ``None``)."""
    trained: int | None = getattr(config, "max_position_embeddings", None)
    if trained is None:
        return wanted or _UNBOUNDED, None
    fixed = trained
    parameters = _rotary(config)
    nested = [p for p in parameters.values() if isinstance(p, Mapping)] or [parameters]
    for rope in nested:
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            fixed = min(trained, rope.get("original_max_position_embeddings") or trained)
    limit = min(wanted, trained) if wanted else fixed
    if limit > fixed:
        return limit, (
            f"its rotary frequencies change beyond {fixed} tokens; "
            f"with a length of at most {fixed} its KV is reused"
        )
    return limit, None


def _static_reason(model: Any, config: Any) -> str | None:
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        return f"{name} keeps a recurrent state, which cannot be cut at a token"
    odd = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if odd:
        return f"{name} has layers of kind {', '.join(sorted(odd))}, which are not attention over keys"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not offer transformers' attention seam"
    return None


def _eos_token_ids(model: Any) -> frozenset[int]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


@torch.inference_mode()
def _observe(loaded: LoadedModel, *, is_packed: bool) -> str | None:
    """Record the layers' shapes and rules, then check the paged way against the model's own."""
    model = loaded.model
    own = model.config._attn_implementation
    length = min(8, loaded.max_model_len)
    tokens = torch.arange(length, device=loaded.device).unsqueeze(0) % loaded.vocab_size
    expected = model(input_ids=tokens, use_cache=False).logits[0, -1].float()
    model.set_attn_implementation(ATTENTION_NAME)
    probe = Probe()
    try:
        positions = torch.arange(length, device=loaded.device).unsqueeze(0)
        model(input_ids=tokens, position_ids=positions, use_cache=False, ostinato=probe)
        problem = probe.problem
        if sorted(probe.shapes) != list(range(len(probe.shapes))) or not probe.shapes:
            problem = "not every layer reaches the attention seam"
        if problem is None:
            if loaded.device.type == "cpu" and loaded.dtype == torch.float32:
                replace_norms(model)
            if is_packed and can_pack(loaded.device, loaded.dtype):
                pack_linears(model)
            loaded.layers = tuple(probe.shapes[i] for i in range(len(probe.shapes)))
            loaded.rules = dict(probe.rules)
            problem = _check(loaded, tokens[0].to("cpu", torch.int32).numpy(), expected)
    except (AssertionError, TypeError, ValueError, RuntimeError, KeyError) as error:
        problem = f"its forward call does not fit: {error}"
    if problem is not None:
        model.set_attn_implementation(own)
    return problem


def _check(loaded: LoadedModel, tokens: TokenArray, expected: Tensor) -> str | None:
    """Run ``tokens`` in two cut pieces through an arena and compare the last logits with ``expected``."""
    arena = Arena(loaded.layers, len(tokens), dtype=loaded.dtype, device=loaded.device)
    positions = np.arange(len(tokens), dtype=np.int32)
    cut = len(tokens) * 5 // 8
    logits = expected
    for start, end in ((0, cut), (cut, len(tokens))):
        piece = SequencePlan(
            sequence_id=0,
            tokens=tokens[start:end],
            positions=positions[start:end],
            slots=positions[start:end],
            block_ids=np.zeros(1, np.intp),
            block_size=len(tokens),
            sample=True,
        )
        logits = forward(loaded, arena, (piece,))[0].float()
    if not _close(loaded, logits, expected):
        error = float((logits - expected).abs().max())
        return f"computed in pieces its logits differ by {error:.2g}"
    return None


@torch.inference_mode()
def _check_state(loaded: LoadedModel) -> bool:
    """Whether two sequences can take turns: some models keep their state in themselves, or lose it."""
    runner = StatefulRunner(loaded, keep_state=True)
    sequences = [np.arange(i, 8 + i, dtype=np.int32) % loaded.vocab_size for i in range(2)]
    try:
        for start, end in ((0, 5), (5, 6), (6, 7), (7, 8)):
            positions = np.arange(start, end, dtype=np.int32)
            logits = [
                runner.advance(_state_plan(i, tokens[start:end], positions))
                for i, tokens in enumerate(sequences)
            ]
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        _log.info("transformers' state cannot be used for this model: %s", error)
        return False
    plain = StatefulRunner(loaded, keep_state=False)
    positions = np.arange(8, dtype=np.int32)
    return all(
        _close(loaded, row, plain.advance(_state_plan(i, tokens, positions)))
        for i, (row, tokens) in enumerate(zip(logits, sequences, strict=True))
    )


def _state_plan(sequence_id: int, tokens: TokenArray, positions: TokenArray) -> SequencePlan:
    """Rows of a sequence whose state is the model's own: it has no blocks."""
    return SequencePlan(sequence_id, tokens, positions, positions, np.empty(0, np.intp), 1, sample=True)


def _close(loaded: LoadedModel, got: Tensor, expected: Tensor) -> bool:
    """Equal within rounding, which is generous: what is asked is whether it is the same computation."""
    tolerance = 1e-3 if loaded.dtype == torch.float32 else 0.1
    error = float((got.float() - expected.float()).abs().max())
    return error <= tolerance * max(1.0, float(expected.abs().max()))
