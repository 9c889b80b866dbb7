"""Hugging Face models behind our plans.

A model is run through transformers' public attention seam: our attention function is registered under a
name, the model calls it for every layer with the rows' queries, keys (already rotated) and values, and it
writes them to the arena and attends to where they lie. No cache object of transformers is involved.

What a model's KV looks like is not looked up in a table of architectures: it is *observed*, by running a
few tokens and recording the calls, and then *checked*, by comparing the paged way, cut in the middle, with
the model's own. A model that does not pass, or whose state cannot be cut at a token, runs without reuse
(:class:`StatefulRunner`) and says why.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from ..errors import ModelCorruptError, ModelUnsupportedError
from ..kv.arena import Arena, LayerShape
from ..types import Plan, Run, SamplingParams, SequencePlan, TokenArray
from .attention import LayerRule, Rows, Step, attend_step
from .base import RunnerInfo, Sampled
from .packed import can_pack, pack_linears
from .sampling import Sampler

_log = logging.getLogger(__name__)

ATTENTION_NAME = "ostinato"
KV_LAYOUT_VERSION = "heads-slots-1"
# Layer types (as transformers names them) whose attention is a plan over keys; others carry other state.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
# Frequencies that change with the length of the sequence: keys are only exchangeable below the change.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(slots=True)
class _Probe:
    """Records how a model calls attention, layer by layer."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    rules: dict[int, LayerRule] = field(default_factory=dict)
    problem: str | None = None


@dataclass(slots=True)
class _Running:
    """What travels with a forward call to our attention function."""

    step: Step
    arena: Arena
    rules: Mapping[int, LayerRule]


def _paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    ostinato: _Running | _Probe | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(ostinato, _Running):
        output = attend_step(
            ostinato.step, ostinato.arena, layer, ostinato.rules[layer], query, key, value, s_aux
        )
        return output, None
    assert isinstance(ostinato, _Probe), "the model does not pass keyword arguments on to its attention"
    if layer in ostinato.shapes:
        ostinato.problem = f"layer {layer} attends more than once"
    if attention_mask is not None:
        ostinato.problem = "it makes its own attention masks"
    if not getattr(module, "is_causal", True):
        ostinato.problem = f"layer {layer} is not causal"
    ostinato.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
    ostinato.rules[layer] = LayerRule(
        scaling if scaling is not None else key.shape[3] ** -0.5, sliding_window, softcap
    )
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(ATTENTION_NAME, _paged_attention)


@dataclass(slots=True)
class LoadedModel:
    """A model in memory and what was observed of its KV.

    ``reuse_reason`` is ``None`` where KV can be cut at a token. Where it cannot, ``keeps_state`` says whether
    transformers' own state can stand for a sequence among others; if not, each step computes all of it.
    """

    model: Any
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    layers: tuple[LayerShape, ...]
    rules: Mapping[int, LayerRule]
    rotary: str
    eos_token_ids: frozenset[int]
    reuse_reason: str | None
    keeps_state: bool = False

    @property
    def kv_bytes_per_token(self) -> int:
        return Arena.bytes_per_slot(self.layers, self.dtype)

    @property
    def info(self) -> RunnerInfo:
        shapes = [[s.kv_heads, s.key_dim, s.value_dim] for s in self.layers]
        return RunnerInfo(
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            kv_bytes_per_token=self.kv_bytes_per_token,
            kv_layout=json.dumps([KV_LAYOUT_VERSION, shapes]),
            kv_dtype=str(self.dtype),
            rotary=self.rotary,
            reuse=self.reuse_reason is None,
            reuse_reason=self.reuse_reason,
            chunked=self.reuse_reason is None,
        )


def load_model(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    max_model_len: int | None = None,
) -> LoadedModel:
    """Load the causal language model in folder ``path`` and observe its KV.

    Args:
        max_model_len: longest sequence in tokens; ``None``: what the model was made for (for frequencies
            that depend on the length: up to where they change, so that KV stays exchangeable).

    Raises:
        ModelUnsupportedError: the architecture is not one transformers can run as a causal LM.
        ModelCorruptError: the weights do not fit the configuration.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, local_files_only=True, use_safetensors=True
        )
    except (ValueError, KeyError, ImportError) as error:
        raise ModelUnsupportedError(f"cannot load the model in {path}: {error}") from error
    except (OSError, RuntimeError) as error:
        raise ModelCorruptError(f"cannot read the model in {path}: {error}") from error
    return observe_model(model.to(device).eval(), max_model_len=max_model_len)


def observe_model(model: Any, *, max_model_len: int | None = None) -> LoadedModel:
    """Find out what KV ``model`` (a transformers causal LM, in eval mode) keeps, and whether it can be cut."""
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
    )
    if loaded.reuse_reason is None:
        loaded.reuse_reason = _observe(loaded)
    if loaded.reuse_reason is not None:
        loaded.layers, loaded.rules = (), {}
        loaded.keeps_state = _check_state(loaded)
        _log.warning("this model runs without KV reuse: %s", loaded.reuse_reason)
    return loaded


def _rotary(config: Any) -> Any:
    parameters = getattr(config, "rope_parameters", None)
    return parameters if parameters else {"rope_type": "none"}


def _length_limit(config: Any, wanted: int | None) -> tuple[int, str | None]:
    """The model's length in tokens, and why KV cannot be reused at that length (or ``None``)."""
    trained = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    fixed = trained
    parameters = _rotary(config)
    nested = [p for p in parameters.values() if isinstance(p, Mapping)] or [parameters]
    for rope in nested:
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            fixed = rope.get("original_max_position_embeddings") or trained
    if trained is None:
        return wanted or 1 << 20, None
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
def _observe(loaded: LoadedModel) -> str | None:
    """Record the layers' shapes and rules, then check the paged way against the model's own."""
    model = loaded.model
    own = model.config._attn_implementation
    length = min(8, loaded.max_model_len)
    tokens = torch.arange(length, device=loaded.device).unsqueeze(0) % loaded.vocab_size
    expected = model(input_ids=tokens, use_cache=False).logits[0, -1].float()
    model.set_attn_implementation(ATTENTION_NAME)
    probe = _Probe()
    try:
        positions = torch.arange(length, device=loaded.device).unsqueeze(0)
        model(input_ids=tokens, position_ids=positions, use_cache=False, ostinato=probe)
        problem = probe.problem
        if sorted(probe.shapes) != list(range(len(probe.shapes))) or not probe.shapes:
            problem = "not every layer reaches the attention seam"
        if problem is None:
            if can_pack(model):
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
            past=(Run(0, 0, start),) if start else (),
            sample=True,
        )
        logits = _forward(loaded, arena, (piece,))[0].float()
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
                runner.advance(SequencePlan(i, tokens[start:end], positions, positions, (), True))
                for i, tokens in enumerate(sequences)
            ]
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        _log.info("transformers' state cannot be used for this model: %s", error)
        return False
    plain = StatefulRunner(loaded, keep_state=False)
    positions = np.arange(8, dtype=np.int32)
    return all(
        _close(loaded, row, plain.advance(SequencePlan(i, tokens, positions, positions, (), True)))
        for i, (row, tokens) in enumerate(zip(logits, sequences, strict=True))
    )


def _close(loaded: LoadedModel, got: Tensor, expected: Tensor) -> bool:
    """Equal within rounding, which is generous: what is asked is whether it is the same computation."""
    tolerance = 1e-3 if loaded.dtype == torch.float32 else 0.1
    error = float((got.float() - expected.float()).abs().max())
    return error <= tolerance * max(1.0, float(expected.abs().max()))


def _forward(loaded: LoadedModel, arena: Arena, sequences: tuple[SequencePlan, ...]) -> Tensor:
    """All rows of all sequences in one forward call; logits ``[sampled sequences, vocabulary]``."""
    device = loaded.device
    rows: list[Rows] = []
    sampled: list[int] = []
    end = 0
    for sequence in sequences:
        start, end = end, end + len(sequence.tokens)
        rows.append(Rows(start, end, int(sequence.positions[0]), sequence.past, _attended(sequence)))
        if sequence.sample:
            sampled.append(end - 1)
    slots = np.concatenate([sequence.slots for sequence in sequences])
    tokens = np.concatenate([sequence.tokens for sequence in sequences])
    positions = np.concatenate([sequence.positions for sequence in sequences])
    step = Step(tuple(rows), torch.from_numpy(slots.astype(np.int64)).to(device))
    output = loaded.model(
        input_ids=torch.from_numpy(tokens.astype(np.int64)).to(device).unsqueeze(0),
        position_ids=torch.from_numpy(positions.astype(np.int64)).to(device).unsqueeze(0),
        use_cache=False,
        logits_to_keep=torch.tensor(sampled, dtype=torch.long, device=device),
        ostinato=_Running(step, arena, loaded.rules),
    )
    logits: Tensor = output.logits[0]
    return logits


def _attended(sequence: SequencePlan) -> tuple[Run, ...]:
    """Past and own row as runs, joined where they meet; only needed for a single row."""
    if len(sequence.tokens) != 1:
        return ()
    own = Run(int(sequence.slots[0]), int(sequence.positions[0]), 1)
    if sequence.past:
        last = sequence.past[-1]
        if last.slot + last.length == own.slot and last.position + last.length == own.position:
            return (*sequence.past[:-1], Run(last.slot, last.position, last.length + 1))
    return (*sequence.past, own)


class _Samplers:
    """Samplers of the open sequences."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._samplers: dict[int, Sampler] = {}

    def open(self, sequence_id: int, prompt: TokenArray, params: SamplingParams) -> None:
        self._samplers[sequence_id] = Sampler(params, prompt, self._vocab_size)

    def sample(self, sequence_ids: list[int], logits: Tensor) -> dict[int, Sampled]:
        return {
            sequence_id: self._samplers[sequence_id].sample(row)
            for sequence_id, row in zip(sequence_ids, logits, strict=True)
        }

    def close(self, sequence_id: int) -> None:
        self._samplers.pop(sequence_id, None)


class PagedRunner:
    """Runs plans on a model whose KV can be cut, in an arena of ``num_slots`` tokens."""

    def __init__(self, loaded: LoadedModel, num_slots: int) -> None:
        assert loaded.reuse_reason is None, "this model needs a StatefulRunner"
        self._loaded = loaded
        self._arena = Arena(loaded.layers, num_slots, dtype=loaded.dtype, device=loaded.device)
        self._samplers = _Samplers(loaded.vocab_size)
        self.info = loaded.info

    def open(self, sequence_id: int, prompt: TokenArray, params: SamplingParams) -> None:
        self._samplers.open(sequence_id, prompt, params)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> dict[int, Sampled]:
        for copy in plan.copies:
            self._arena.copy(copy)
        if not plan.sequences:
            return {}
        logits = _forward(self._loaded, self._arena, plan.sequences)
        return self._samplers.sample([s.sequence_id for s in plan.sequences if s.sample], logits)

    def release_state(self, sequence_id: int) -> None:
        """Nothing to do: what a sequence computed lies in slots, which its lease gives back."""

    def close(self, sequence_id: int) -> None:
        self._samplers.close(sequence_id)


class StatefulRunner:
    """Runs a model whose state cannot be cut: one state a sequence, prompts in one piece, no reuse.

    Slots in plans are only accounting here; the state is transformers' own, advanced as ``generate`` does
    it. Without ``keep_state`` there is none, and each step computes the whole sequence again.
    """

    def __init__(self, loaded: LoadedModel, *, keep_state: bool | None = None) -> None:
        assert loaded.reuse_reason is not None, "this model's KV can be cut: use a PagedRunner"
        self._loaded = loaded
        self._keep_state = loaded.keeps_state if keep_state is None else keep_state
        self._samplers = _Samplers(loaded.vocab_size)
        self._states: dict[int, dict[str, Any]] = {}
        self._tokens: dict[int, Tensor] = {}
        self.info = loaded.info

    def open(self, sequence_id: int, prompt: TokenArray, params: SamplingParams) -> None:
        self._samplers.open(sequence_id, prompt, params)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> dict[int, Sampled]:
        sampled: dict[int, Sampled] = {}
        for sequence in plan.sequences:
            logits = self.advance(sequence)
            if sequence.sample:
                sampled |= self._samplers.sample([sequence.sequence_id], logits)
        return sampled

    def advance(self, sequence: SequencePlan) -> Tensor:
        """Take in a sequence's rows; the logits of the last one, ``[1, vocabulary]``."""
        model, sequence_id = self._loaded.model, sequence.sequence_id
        new = torch.from_numpy(sequence.tokens.astype(np.int64)).to(self._loaded.device).unsqueeze(0)
        is_first = int(sequence.positions[0]) == 0
        tokens = new if is_first else torch.cat([self._tokens[sequence_id], new], dim=1)
        self._tokens[sequence_id] = tokens
        if not self._keep_state:
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0, -1:]
            return logits
        state = (
            {"use_cache": True, "attention_mask": torch.ones_like(new)}
            if is_first
            else self._states[sequence_id]
        )
        inputs = model.prepare_inputs_for_generation(
            tokens, next_sequence_length=new.shape[1], is_first_iteration=is_first, **state
        )
        output = model(**inputs, return_dict=True)
        self._states[sequence_id] = model._update_model_kwargs_for_generation(output, state)
        logits = output.logits[0, -1:]
        return logits

    def release_state(self, sequence_id: int) -> None:
        self._states.pop(sequence_id, None)
        self._tokens.pop(sequence_id, None)

    def close(self, sequence_id: int) -> None:
        self.release_state(sequence_id)
        self._samplers.close(sequence_id)
