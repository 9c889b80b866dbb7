"""Every value of a request in its range, checked once, where the request enters.

Types are checked exactly: what is nearly right would fail in the engine's thread, amid requests of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ParameterError
from .types import GenerationRequest, SamplingParams

MAX_CHOICES = 64
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MIN_TTL_S = 1.0


def check_request(request: GenerationRequest, vocab_size: int) -> None:
    """
    Raises:
        ParameterError: naming the parameter and its range, or what type it should have.
    """
    check_params(request.params, vocab_size)
    if not isinstance(request.salt, str):
        raise ParameterError("salt must be text", param="salt", code="invalid_type")
    ttl_s = request.cache_ttl_s
    if ttl_s is not None and not (_is_number(ttl_s) and ttl_s >= MIN_TTL_S):
        raise ParameterError(f"cache_ttl_s must be at least {MIN_TTL_S:g} seconds", param="cache_ttl_s")
    deadline_s = request.deadline_s
    if deadline_s is not None and not (_is_number(deadline_s) and deadline_s > 0):
        raise ParameterError("deadline must be seconds above 0", param="deadline")
    if not _is_whole(request.num_choices) or not 1 <= request.num_choices <= MAX_CHOICES:
        raise ParameterError(f"n must be between 1 and {MAX_CHOICES}", param="n")
    best_of = request.best_of
    if best_of is not None and not (_is_whole(best_of) and request.num_choices <= best_of <= MAX_CHOICES):
        raise ParameterError(f"best_of must be between n and {MAX_CHOICES}", param="best_of")
    if isinstance(request.prompt, tuple) and any(
        not (_is_whole(token) and 0 <= token < vocab_size) for token in request.prompt
    ):
        raise ParameterError(f"token ids must be between 0 and {vocab_size - 1}", param="prompt")


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """
    Raises:
        ParameterError: naming the parameter and its range, or what type it should have.
    """
    _check_types(params)
    for name, low, high in (
        ("temperature", 0.0, 2.0),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
    ):
        if not low <= getattr(params, name) <= high:  # "not" also refuses NaN
            raise ParameterError(f"{name} must be between {low:g} and {high:g}", param=name)
    if not 0.0 < params.top_p <= 1.0:
        raise ParameterError("top_p must be above 0 and at most 1", param="top_p")
    if not 0.01 <= params.repetition_penalty <= 100.0:
        raise ParameterError("repetition_penalty must be between 0.01 and 100", param="repetition_penalty")
    if params.top_k < 0:
        raise ParameterError("top_k must be 0 (off) or more", param="top_k")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise ParameterError("max_tokens must be at least 1", param="max_tokens")
    if params.seed is not None and not -(2**63) <= params.seed < 2**63 - MAX_CHOICES:
        raise ParameterError("seed must be a signed 64-bit integer", param="seed")
    if len(params.stop) > MAX_STOPS or any(not text for text in params.stop):
        raise ParameterError(f"stop takes up to {MAX_STOPS} strings, none of them empty", param="stop")
    if any(not 0 <= token < vocab_size for token in params.stop_token_ids):
        raise ParameterError(f"token ids must be between 0 and {vocab_size - 1}", param="stop_token_ids")
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_TOP_LOGPROBS:
        raise ParameterError(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}", param="top_logprobs")
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise ParameterError(f"token ids must be between 0 and {vocab_size - 1}", param="logit_bias")
        if not -100.0 <= bias <= 100.0:
            raise ParameterError("logit_bias values must be between -100 and 100", param="logit_bias")


_REAL_PARAMS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_WHOLE_PARAMS = ("max_tokens", "top_k", "seed", "logprobs")


def _check_types(params: SamplingParams) -> None:
    for name in _REAL_PARAMS:
        if not _is_number(getattr(params, name)):
            raise ParameterError(f"{name} must be a number", param=name, code="invalid_type")
    for name in _WHOLE_PARAMS:
        value = getattr(params, name)
        if not (_is_whole(value) or (value is None and name != "top_k")):
            raise ParameterError(f"{name} must be a whole number", param=name, code="invalid_type")
    stop: Any = params.stop
    if not isinstance(stop, tuple) or not all(isinstance(text, str) for text in stop):
        raise ParameterError("stop must be strings", param="stop", code="invalid_type")
    ids: Any = params.stop_token_ids
    if not isinstance(ids, tuple) or not all(map(_is_whole, ids)):
        raise ParameterError("stop_token_ids must be token ids", param="stop_token_ids", code="invalid_type")
    if not isinstance(params.ignore_eos, bool):
        raise ParameterError("ignore_eos must be true or false", param="ignore_eos", code="invalid_type")
    bias: Any = params.logit_bias
    if not isinstance(bias, Mapping) or not all(_is_whole(t) and _is_number(b) for t, b in bias.items()):
        raise ParameterError(
            "logit_bias must map token ids to numbers", param="logit_bias", code="invalid_type"
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
