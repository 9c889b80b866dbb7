"""Beam search: of all continuations that are looked at, the likeliest as a whole.

Each round asks for one token after each beam, all in one step of the engine. What a beam goes on from is
found in the cache: beams share the blocks of all they have in common, and a round computes one row for each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, Literal

from .errors import ParameterError
from .parameters import MAX_TOP_LOGPROBS
from .runtime import Prepared, Runtime
from .types import Chunk, GenerationRequest, SamplingParams

MAX_BEAMS = MAX_TOP_LOGPROBS // 2
"""Each beam offers twice as many next tokens as there are beams, so that ended ones crowd out nobody."""


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation and how likely it is: ``logprob`` is natural, and of all its tokens.

    ``score`` is that over ``len(token_ids) ** length_penalty``. ``token_ids`` end with the token that ended
    it, where ``finish_reason`` is "stop".
    """

    token_ids: tuple[int, ...]
    text: str
    logprob: float
    score: float
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class _Open:
    token_ids: tuple[int, ...]
    logprob: float


def search(
    runtime: Runtime,
    prepared: Prepared,
    *,
    beam_width: int,
    length_penalty: float = 1.0,
    ignore_eos: bool = False,
) -> tuple[Beam, ...]:
    """The ``beam_width`` best continuations of a prompt, as long as it asks for at most; best first.

    Raises:
        ParameterError: a value is out of range.
        ClientError, EngineError: as for any request.
    """
    given: Any = beam_width
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= beam_width <= MAX_BEAMS:
        raise ParameterError(f"beam_width must be between 1 and {MAX_BEAMS}", param="beam_width")
    penalty: Any = length_penalty
    if not isinstance(penalty, int | float) or isinstance(penalty, bool) or not math.isfinite(penalty):
        raise ParameterError("length_penalty must be a number", param="length_penalty")
    end_ids = frozenset[int]() if ignore_eos else runtime.eos_token_ids
    beams, ended = [_Open((), 0.0)], list[_Open]()
    for _ in range(prepared.max_new_tokens):
        longer = [
            _Open((*beam.token_ids, token_id), beam.logprob + logprob)
            for beam, following in zip(beams, _next(runtime, prepared, beams, 2 * beam_width), strict=True)
            for token_id, logprob in following
        ]
        ended += [beam for beam in longer if beam.token_ids[-1] in end_ids]
        going_on = [beam for beam in longer if beam.token_ids[-1] not in end_ids]
        beams = heapq.nlargest(beam_width, going_on, key=lambda beam: beam.logprob)
    found = [_close(runtime, beam, length_penalty, end_ids) for beam in (*ended, *beams)]
    return tuple(heapq.nlargest(beam_width, found, key=lambda beam: beam.score))


def _next(
    runtime: Runtime, prepared: Prepared, beams: list[_Open], num_tokens: int
) -> Iterator[tuple[tuple[int, float], ...]]:
    """The likeliest next tokens after each beam, with their log probabilities."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=num_tokens)
    prompt = tuple(prepared.tokens.tolist())
    # A round is nobody's request: it belongs in no log and no statistic of requests.
    request = GenerationRequest(prompt, params, salt=prepared.request.salt, is_warming=True)
    handles, queues = [], []
    try:
        for beam in beams:
            queue: SimpleQueue[Chunk] = SimpleQueue()
            queues.append(queue)
            asked = runtime.prepare(replace(request, prompt=prompt + beam.token_ids))
            handles.append(runtime.start(asked, queue.put))
        for queue in queues:
            yield _last_logprobs(queue)
    finally:
        for handle in handles:
            handle.cancel()


def _last_logprobs(queue: SimpleQueue[Chunk]) -> tuple[tuple[int, float], ...]:
    top: tuple[tuple[int, float], ...] = ()
    while True:
        chunk = queue.get()
        if chunk.error is not None:
            raise chunk.error
        if chunk.logprobs:
            top = chunk.logprobs[-1].top
        if chunk.usage is not None:
            return top


def _close(runtime: Runtime, beam: _Open, length_penalty: float, end_ids: frozenset[int]) -> Beam:
    is_ended = beam.token_ids[-1] in end_ids
    text = runtime.tokenizer.decode(beam.token_ids[:-1] if is_ended else beam.token_ids)
    score = beam.logprob / len(beam.token_ids) ** length_penalty
    return Beam(beam.token_ids, text, beam.logprob, score, "stop" if is_ended else "length")
