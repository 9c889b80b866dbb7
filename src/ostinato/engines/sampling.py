"""From logits to a token, one request's way.

Order, as Hugging Face's ``generate`` has it: bias and penalties, temperature, top-k, top-p, min-p, draw.
The warpers are transformers' own. Reported log-probabilities are the model's, before any of that.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..types import SamplingParams, TokenArray, TokenLogprob
from .base import Sampled

# Below this, dividing by the temperature overflows float32, and the likeliest token has all probability
# anyway: its limit, greedy, is the exact answer.
_COLDEST = 1e-5


class Sampler:
    """Chooses the tokens of one sequence; remembers what penalties need and its own random stream."""

    def __init__(self, params: SamplingParams, prompt: TokenArray, vocab_size: int) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._greedy = params.temperature < _COLDEST
        self._generator: torch.Generator | None = None
        if not self._greedy:
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)
        self._bias: tuple[Tensor, Tensor] | None = None
        if params.logit_bias:
            ids = torch.tensor(sorted(params.logit_bias), dtype=torch.long)
            self._bias = ids, torch.tensor([params.logit_bias[int(i)] for i in ids], dtype=torch.float32)
        self._repetition: RepetitionPenaltyLogitsProcessor | None = None
        self._seen: dict[int, None] = {}
        if params.repetition_penalty != 1.0:
            self._repetition = RepetitionPenaltyLogitsProcessor(penalty=float(params.repetition_penalty))
            self._seen = dict.fromkeys(prompt.tolist())
        self._counts: dict[int, int] | None = None
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._counts = {}
        self._warpers = self._make_warpers()

    def _make_warpers(self) -> LogitsProcessorList:
        params, warpers = self._params, LogitsProcessorList()
        if self._greedy:
            return warpers
        if params.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_k > 0:
            warpers.append(TopKLogitsWarper(top_k=params.top_k))
        if params.top_p < 1.0:
            warpers.append(TopPLogitsWarper(top_p=params.top_p))
        if params.min_p > 0.0:
            warpers.append(MinPLogitsWarper(min_p=params.min_p))
        return warpers

    def sample(self, logits: Tensor) -> Sampled:
        """Choose after ``logits`` ``[vocabulary]`` (any float type, any device)."""
        raw = logits.detach().to("cpu", torch.float32)
        # numpy's passes over a row this short take a sixth of the time of torch's.
        if not np.isfinite(raw.numpy().max()):
            return Sampled(-1, error="the model's logits are not finite")
        scores = self._penalised(raw)
        if self._greedy:
            token_id = int(scores.numpy().argmax())
        else:
            warped = self._warpers(torch.empty(1, 0, dtype=torch.long), scores.unsqueeze(0))
            probabilities = torch.softmax(warped, dim=-1)
            if not bool(torch.isfinite(probabilities.sum())):  # a fault of this request must end only it
                return Sampled(-1, error="these sampling parameters leave no probabilities to draw from")
            token_id = int(torch.multinomial(probabilities, 1, generator=self._generator))
        self._remember(token_id)
        return Sampled(token_id, self._logprob(raw, token_id))

    def _penalised(self, raw: Tensor) -> Tensor:
        scores = raw
        if self._bias is not None:
            ids, values = self._bias
            scores = scores.index_add(0, ids, values)
        if self._repetition is not None and self._seen:
            seen = torch.tensor([list(self._seen)], dtype=torch.long)
            scores = self._repetition(seen, scores.unsqueeze(0)).squeeze(0)
        if self._counts:
            ids = torch.tensor(list(self._counts), dtype=torch.long)
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            penalty = self._params.frequency_penalty * counts + self._params.presence_penalty
            scores = scores.index_add(0, ids, -penalty)
        return scores

    def _remember(self, token_id: int) -> None:
        if self._counts is not None:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
        if self._repetition is not None:
            self._seen[token_id] = None

    def _logprob(self, raw: Tensor, token_id: int) -> TokenLogprob | None:
        num_top = self._params.logprobs
        if num_top is None:
            return None
        logprobs = torch.log_softmax(raw, dim=-1)
        top: tuple[tuple[int, float], ...] = ()
        if num_top > 0:
            values, ids = logprobs.topk(min(num_top, self._vocab_size))
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprob(token_id, float(logprobs[token_id]), top)
