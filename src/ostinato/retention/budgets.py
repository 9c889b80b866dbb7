"""How much KV a sequence may keep: in tokens, as a part of its prompt, or in bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ParameterError

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG])(?:i?B)?\s*", re.IGNORECASE)
_LEAST_TOKENS = 128
_WHOLE = re.compile(r"\s*(\d+)\s*")


@dataclass(frozen=True, slots=True)
class KVBudget:
    """One of: ``tokens``, ``ratio`` of the prompt's tokens (above 0, at most 1), or ``size_bytes``."""

    tokens: int | None = None
    ratio: float | None = None
    size_bytes: int | None = None

    def in_tokens(self, prompt_tokens: int, bytes_per_token: int) -> int:
        """The budget of a sequence with such a prompt, on a model with so much KV a token; at least 1.

        A part of a short prompt leaves no room to work in, and saves nothing: it is never less than 128.
        """
        if self.tokens is not None:
            return self.tokens
        if self.ratio is not None:
            return max(_LEAST_TOKENS, int(self.ratio * prompt_tokens))
        assert self.size_bytes is not None, "a budget of nothing"
        return max(1, self.size_bytes // max(1, bytes_per_token))


def parse_budget(value: object) -> KVBudget:
    """``2048`` or ``"2048"``: tokens; ``"50%"``: of the prompt; ``"64MiB"``: bytes (units of 1024).

    Raises:
        ParameterError: it is none of these.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return KVBudget(tokens=value)
    if isinstance(value, str):
        if (match := _WHOLE.fullmatch(value)) and int(match[1]) >= 1:
            return KVBudget(tokens=int(match[1]))
        if (match := _PERCENT.fullmatch(value)) and 0 < float(match[1]) <= 100:
            return KVBudget(ratio=float(match[1]) / 100)
        if (match := _BYTES.fullmatch(value)) and float(match[1]) > 0:
            return KVBudget(size_bytes=int(float(match[1]) * _UNITS[match[2].upper()]))
    raise ParameterError(
        f'kv_budget is {value!r}; write tokens (2048), a part of the prompt ("50%") or bytes ("64MiB")',
        param="kv_budget",
    )
