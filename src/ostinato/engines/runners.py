"""Executing plans on a transformers model: with KV in the arena, or with the model's own state.

A model is run through transformers' public attention seam: :func:`paged_attention` is registered under a
name, the model calls it for every layer with the rows' queries, keys (already rotated) and values, and it
writes them to the arena and attends to where they lie. No cache object of transformers is involved.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from ..kv.arena import Arena, LayerShape
from ..reuse.rope import Movement, Mover
from ..types import Plan, SamplingParams, SequencePlan, SlotCopy, SlotShift, TokenArray
from .attention import LayerRule
from .base import AttentionMass, Deviations, RunnerInfo, Sampled, StepResult
from .expected import NUM_LEFT_OUT, QueryStatistics
from .packed import can_pack, round_up
from .sampling import Sampler
from .step import LayerReached, Step

ATTENTION_NAME = "ostinato"
KV_LAYOUT_VERSION = "heads-slots-1"


@dataclass(slots=True)
class Probe:
    """Records how a model calls attention, layer by layer."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    rules: dict[int, LayerRule] = field(default_factory=dict)
    problem: str | None = None


@dataclass(slots=True)
class KeyProbe:
    """Records the keys and values of each layer, ``[kv_heads, rows, dim]``, where rows attend to nothing."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Running:
    """What travels with a forward call to our attention function."""

    step: Step
    rules: Mapping[int, LayerRule]
    num_rows: int


def paged_attention(
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
    ostinato: _Running | Probe | KeyProbe | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(ostinato, _Running):
        num_rows = ostinato.num_rows
        num_spare = query.shape[2] - num_rows
        query, key, value = (t[:, :, :num_rows] for t in (query, key, value))
        output = ostinato.step.attend(layer, ostinato.rules[layer], query, key, value, s_aux)
        return torch.nn.functional.pad(output, (0, 0, 0, 0, 0, num_spare)) if num_spare else output, None
    nothing = value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    if isinstance(ostinato, KeyProbe):
        ostinato.keys[layer], ostinato.values[layer] = key[0].clone(), value[0].clone()
        return nothing, None
    assert isinstance(ostinato, Probe), "the model does not pass keyword arguments on to its attention"
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
    return nothing, None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


@dataclass(slots=True)
class LoadedModel:
    """A model in memory and what was observed of its KV.

    ``reuse_reason`` is ``None`` where KV can be cut at a token. Where it cannot, ``keeps_state`` says whether
    transformers' own state can stand for a sequence among others; if not, each step computes all of it.
    ``movement``: how its KV moves, where that was observed (``engines/rotations.py``).
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
    weight_bytes: int = 0
    movement: Movement = field(
        default_factory=lambda: Movement(reason="it has not been observed how its KV moves")
    )

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
            weight_bytes=self.weight_bytes,
            reuse=self.reuse_reason is None,
            reuse_reason=self.reuse_reason,
            chunked=self.reuse_reason is None,
            compaction_reason=self.compaction_reason,
            keys_a_row=self._keys_a_row,
            kv_heads=tuple(shape.kv_heads for shape in self.layers),
            movement_reason=self.reuse_reason or self.movement.reason,
        )

    @property
    def _keys_a_row(self) -> float:
        """A multiplication for each weight; two in each layer and query head for each of a key's numbers.

        The heads of a layer together are taken to be as wide as what goes in and out of it.
        """
        if not self.layers:
            return math.inf
        num_weights = self.weight_bytes / self.dtype.itemsize
        width: int = self.model.get_input_embeddings().weight.shape[1]
        return num_weights / (2 * width * len(self.layers))

    @property
    def compaction_reason(self) -> str | None:
        """Why a sequence's places must be its positions; ``None``: they need not be."""
        if self.reuse_reason is not None:
            return self.reuse_reason
        if any(rule.window is not None for rule in self.rules.values()):
            return "it has layers with a sliding window, which counts places"
        return None


def forward(loaded: LoadedModel, arena: Arena, sequences: tuple[SequencePlan, ...]) -> Tensor:
    """All rows of all sequences in one forward call; logits ``[sampled sequences, vocabulary]``."""
    sequences = _at_least_two(sequences)
    return _call(loaded, sequences, Step(arena, sequences, loaded.device))


def _at_least_two(sequences: tuple[SequencePlan, ...]) -> tuple[SequencePlan, ...]:
    """A single row is computed twice: for one row oneDNN splits long sums between its threads, from two on it
    does not, and a row's result does not depend on how many others there are. The second costs nothing.
    """
    if sum(len(sequence.tokens) for sequence in sequences) > 1:
        return sequences
    return (sequences[0], replace(sequences[0], sample=False, num_watched=0, notes_queries=False))


def _call(loaded: LoadedModel, sequences: tuple[SequencePlan, ...], step: Step) -> Tensor:
    device = loaded.device
    for sequence in sequences:
        if sequence.places is not None and loaded.compaction_reason is not None:
            are_positions = np.array_equal(sequence.places, sequence.positions)
            assert are_positions, f"places must be positions: {loaded.compaction_reason}"
    ends = np.cumsum([len(sequence.tokens) for sequence in sequences])
    sampled = [int(end) - 1 for end, sequence in zip(ends, sequences, strict=True) if sequence.sample]
    num_rows = int(ends[-1])
    # Filled up here, not in every linear layer; nobody attends to the spare rows or looks at what they say.
    inputs = np.zeros((2, 1, round_up(num_rows) if can_pack(device, loaded.dtype) else num_rows), np.int64)
    inputs[0, 0, :num_rows] = np.concatenate([sequence.tokens for sequence in sequences])
    inputs[1, 0, :num_rows] = np.concatenate([sequence.positions for sequence in sequences])
    input_ids, position_ids = torch.from_numpy(inputs).to(device)
    output = loaded.model(
        input_ids=input_ids,
        position_ids=position_ids,
        use_cache=False,
        logits_to_keep=torch.tensor(sampled, dtype=torch.long, device=device),
        ostinato=_Running(step, loaded.rules, num_rows),
    )
    logits: Tensor = output.logits[0]
    return logits


class _Samplers:
    """Samplers of the open sequences."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._samplers: dict[int, Sampler] = {}

    def open(self, sequence_id: int, prompt: TokenArray, params: SamplingParams) -> None:
        self._samplers[sequence_id] = Sampler(params, prompt, self._vocab_size)

    def sample(
        self, sequence_ids: list[int], logits: Tensor, with_distribution: Collection[int] = ()
    ) -> dict[int, Sampled]:
        sampled = {
            sequence_id: self._samplers[sequence_id].sample(row)
            for sequence_id, row in zip(sequence_ids, logits, strict=True)
        }
        for sequence_id in with_distribution:
            row = logits[sequence_ids.index(sequence_id)].float()
            whole = torch.log_softmax(row, dim=-1).cpu().numpy()
            sampled[sequence_id] = replace(sampled[sequence_id], distribution=whole)
        return sampled

    def close(self, sequence_id: int) -> None:
        self._samplers.pop(sequence_id, None)


def _mass_of(step: Step, sequence_ids: list[int]) -> dict[int, AttentionMass]:
    by_layer = [step.mass[layer] for layer in range(len(step.mass))]
    return {
        sequence_id: tuple(masses[i].cpu().numpy() for masses in by_layer)
        for i, sequence_id in enumerate(sequence_ids)
    }


class PagedRunner:
    """Runs plans on a model whose KV can be cut, in an arena of ``num_slots`` tokens."""

    def __init__(self, loaded: LoadedModel, num_slots: int) -> None:
        assert loaded.reuse_reason is None, "this model needs a StatefulRunner"
        self._loaded = loaded
        self.arena = Arena(loaded.layers, num_slots, dtype=loaded.dtype, device=loaded.device)
        self._samplers = _Samplers(loaded.vocab_size)
        self._queries: dict[int, QueryStatistics] = {}
        self.info = loaded.info

    @functools.cached_property
    def _mover(self) -> Mover:
        movement = self._loaded.movement
        assert movement.reason is None, f"KV that cannot be moved: {movement.reason}"
        return Mover(self.arena, movement.rotations)

    def open(self, sequence_id: int, prompt: TokenArray, params: SamplingParams) -> None:
        self._samplers.open(sequence_id, prompt, params)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> StepResult:
        for move in plan.moves:
            if move.distances is None:
                self.arena.move(move)
            else:
                self._mover.move_each(move)
        for copy in plan.copies:
            self.arena.copy(copy)
        if plan.shifts:
            self._shift(plan.shifts)
        if not plan.sequences:
            return StepResult()
        sequences = _at_least_two(plan.sequences)
        step = Step(self.arena, sequences, self._loaded.device)
        logits = _call(self._loaded, sequences, step)
        asking = [s for s in plan.sequences if s.sample]
        whole = [s.sequence_id for s in asking if s.with_distribution]
        sampled = self._samplers.sample([s.sequence_id for s in asking], logits, whole)
        self._note_queries([s for s in plan.sequences if s.notes_queries], step)
        watched = [s.sequence_id for s in plan.sequences if s.num_watched]
        return StepResult(sampled, _mass_of(step, watched) if watched else {})

    def _shift(self, shifts: Sequence[SlotShift]) -> None:
        if self._loaded.movement.reason is None:
            self._mover.move(shifts)
            return
        for shift in shifts:
            assert not shift.distance, f"moved, but {self._loaded.movement.reason}"
            self.arena.copy(SlotCopy(shift.source, shift.target, shift.length))

    @torch.inference_mode()
    def deviations(self, sequence: SequencePlan, layer: int) -> Deviations:
        """Compute rows up to ``layer``, and compare their KV there with what lies in their slots.

        In the layers before, KV is written as in any step; in ``layer`` and after it nothing is.
        """
        assert 0 <= layer < len(self._loaded.layers), f"there is no layer {layer}"
        sequences = _at_least_two((replace(sequence, sample=False, num_watched=0),))
        step = Step(self.arena, sequences, self._loaded.device, compare_layer=layer)
        try:
            _call(self._loaded, sequences, step)
        except LayerReached:
            assert step.differences is not None
            return Deviations(*step.differences[:, : len(sequence.tokens)].cpu().numpy())
        raise AssertionError("the model did not come to that layer")

    def _note_queries(self, sequences: list[SequencePlan], step: Step) -> None:
        for i, sequence in enumerate(sequences):
            statistics = self._queries.get(sequence.sequence_id)
            if statistics is None:
                assert self.info.movement_reason is None, f"queries: {self.info.movement_reason}"
                statistics = QueryStatistics(self._loaded.movement.rotations)
                self._queries[sequence.sequence_id] = statistics
            queries = [step.queries[layer][i] for layer in range(len(step.queries))]
            statistics.add(sequence.positions, queries)

    @torch.inference_mode()
    def expect(self, sequence_id: int, slots: TokenArray, next_position: int) -> AttentionMass:
        statistics = self._queries[sequence_id]
        at = torch.from_numpy(slots.astype(np.int64)).to(self._loaded.device)
        mass = []
        for layer in range(len(self._loaded.layers)):
            keys, values = (t[layer].index_select(1, at) for t in (self.arena.keys, self.arena.values))
            scale = self._loaded.rules[layer].scaling
            scores = statistics.expect(layer, keys, values, next_position, scale, NUM_LEFT_OUT)
            mass.append(scores.numpy())
        return tuple(mass)

    def release_state(self, sequence_id: int) -> None:
        """What a sequence computed lies in slots, which its lease gives back; how it asked is forgotten."""
        self._queries.pop(sequence_id, None)

    def close(self, sequence_id: int) -> None:
        self.release_state(sequence_id)
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
    def execute(self, plan: Plan) -> StepResult:
        sampled: dict[int, Sampled] = {}
        for sequence in plan.sequences:
            assert sequence.places is None, "a state has no places"
            assert not sequence.num_watched, "a state shows no attention"
            logits = self.advance(sequence)
            if sequence.sample:
                sampled |= self._samplers.sample([sequence.sequence_id], logits)
        return StepResult(sampled)

    def deviations(self, sequence: SequencePlan, layer: int) -> Deviations:
        raise AssertionError("a state has no slots to compare with")

    def expect(self, sequence_id: int, slots: TokenArray, next_position: int) -> AttentionMass:
        raise AssertionError("a state shows no queries")

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
