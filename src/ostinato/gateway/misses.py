"""Requests that read less of a vendor's cache than went before: why, by the vendor and by comparison."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from ..providers.accounting import TokenUse
from ..providers.diagnosis import Miss, SentPrompt, common_tokens, explain
from ..providers.planner import History
from ..providers.shape import Prompt
from ..providers.simulator import Asked

MAX_REMEMBERED: Final = 2000
MAX_BYTES: Final = 64 << 20
MAX_MISSES: Final = 200
MAX_SAID_BYTES: Final = 2000
# A prompt that has so much of an earlier one's messages goes on with it.
_LEAST_COMMON: Final = 0.5
_CANDIDATES: Final = 32


@dataclass(slots=True)
class Diagnosis:
    """What is known of one request: ``before`` is the one that it goes on with, by the id of its answer."""

    scope: tuple[str, str]
    sent: SentPrompt
    expected: TokenUse
    previous_id: str | None = None
    miss: Miss | None = None
    answer_id: str | None = None
    vendor: Any = None


@dataclass(slots=True)
class _Scope:
    by_id: OrderedDict[str, SentPrompt] = field(default_factory=OrderedDict)


class Misses:
    """Earlier requests by upstream and caller, bounded in number and bytes; and the latest misses."""

    def __init__(self) -> None:
        self._scopes: OrderedDict[tuple[str, str], _Scope] = OrderedDict()
        self._num_bytes = self._num_remembered = 0
        self._number = 0
        self.latest: deque[dict[str, Any]] = deque(maxlen=MAX_MISSES)

    def look(
        self,
        scope: tuple[str, str],
        body: bytes,
        prompt: Prompt,
        asked: Asked,
        history: History,
        now_s: float,
        *,
        given_id: str | None,
        shows_text: bool,
    ) -> Diagnosis:
        """Compare a request with the one it goes on with. Before ``history`` is told of it."""
        sent = SentPrompt(prompt, asked.chain, body, now_s)
        found = Diagnosis(scope, sent, asked.use)
        before = self._before(scope, prompt, given_id)
        if before is not None:
            found.previous_id = None if before[0].startswith("#") else before[0]
            found.miss = explain(before[1], body, prompt, asked, history, now_s, shows_text=shows_text)
        return found

    def _before(
        self, scope: tuple[str, str], prompt: Prompt, given_id: str | None
    ) -> tuple[str, SentPrompt] | None:
        known = self._scopes.get(scope)
        if known is None:
            return None
        if given_id is not None:
            return (given_id, known.by_id[given_id]) if given_id in known.by_id else None
        best, most = None, 0
        for answer_id in list(reversed(known.by_id))[:_CANDIDATES]:
            before = known.by_id[answer_id]
            common = common_tokens(before.prompt, prompt)
            whole = sum(block.num_tokens for block in before.prompt.blocks if block.level == "messages")
            if common > most and common >= _LEAST_COMMON * whole:
                best, most = (answer_id, before), common
        return best

    def ended(self, found: Diagnosis, use: TokenUse | None) -> str | None:
        """The answer is whole. Remembers the request; the reason, if it was a miss."""
        self._number += 1
        self._remember(found.scope, found.answer_id or f"#{self._number}", found.sent)
        miss = found.miss
        if miss is None and use is not None and use.read == 0 and found.expected.read > 0:
            miss = Miss("evicted", found.expected.read)
        reason = _vendors_reason(found.vendor)
        if miss is None and reason is None:
            return None
        row: dict[str, Any] = {
            "model": found.sent.prompt.model,
            "answer": found.answer_id,
            "previous": found.previous_id,
            "ours": None if miss is None else miss.as_json(),
            "vendors": found.vendor if _is_small(found.vendor) else "(too long)",
            "verdict": _verdict(miss, reason, found.expected, use),
        }
        if use is not None:
            row["read_tokens"], row["input_tokens"] = use.read, use.input
        self.latest.append(row)
        return miss.reason if miss is not None else str(reason)

    def _remember(self, scope: tuple[str, str], answer_id: str, sent: SentPrompt) -> None:
        known = self._scopes.pop(scope, None) or _Scope()
        self._scopes[scope] = known
        if (old := known.by_id.pop(answer_id, None)) is not None:
            self._num_bytes -= len(old.body)
            self._num_remembered -= 1
        self._num_bytes += len(sent.body)
        self._num_remembered += 1
        known.by_id[answer_id] = sent
        while self._num_bytes > MAX_BYTES or self._num_remembered > MAX_REMEMBERED:
            oldest = next(iter(self._scopes))
            _, dropped = self._scopes[oldest].by_id.popitem(last=False)
            self._num_bytes -= len(dropped.body)
            self._num_remembered -= 1
            if not self._scopes[oldest].by_id:
                del self._scopes[oldest]


Verdict = Literal["request_changed", "late_change", "cache_lost", "unclear"]


def _verdict(miss: Miss | None, reason: str | None, expected: TokenUse, use: TokenUse | None) -> Verdict:
    """Both findings in one word.

    Little read and nothing changed: the entry is gone. Much read all the same: the change came late.
    """
    is_changed = (miss is not None and miss.reason.endswith("_changed")) or (
        miss is None and reason is not None and reason.endswith("_changed")
    )
    if is_changed:
        read = use.read if use is not None else expected.read
        whole = use.input if use is not None else expected.input
        return "late_change" if read * 2 >= whole else "request_changed"
    if miss is not None and miss.reason in ("expired", "evicted"):
        return "cache_lost"
    return "unclear"


# ---------------------------------------------------------------- vendors' fields


def add_request_fields(
    made: dict[str, Any], protocol: str, path: str, previous_id: str | None
) -> dict[str, Any]:
    """The body with the vendor's own diagnosis asked for, unless the caller did it. Other APIs have none."""
    if protocol == "anthropic" and path == "/v1/messages" and "diagnostics" not in made:
        return {**made, "diagnostics": {"previous_message_id": previous_id}}
    if protocol == "openai" and path == "/v1/responses" and previous_id is not None:
        options = made.get("prompt_cache_options")
        options = options if isinstance(options, Mapping) else {}
        if "comparison_response_id" not in options:
            return {**made, "prompt_cache_options": {**options, "comparison_response_id": previous_id}}
    return made


def given_previous(body: Mapping[str, Any]) -> str | None:
    """The earlier answer that the caller itself compares with."""
    for holder, name in (
        ("diagnostics", "previous_message_id"),
        ("prompt_cache_options", "comparison_response_id"),
    ):
        options = body.get(holder)
        found = options.get(name) if isinstance(options, Mapping) else None
        if isinstance(found, str):
            return found
    return None


def answers_diagnosis(answer: Mapping[str, Any]) -> Any:
    """What the vendor says of the cache in a message or a response; ``None``: nothing."""
    for name in ("diagnostics", "prompt_cache_diagnostics"):
        if answer.get(name) is not None:
            return answer[name]
    return None


def _is_small(said: Any) -> bool:
    return len(orjson.dumps(said)) <= MAX_SAID_BYTES


def _vendors_reason(said: Any) -> str | None:
    if not isinstance(said, Mapping):
        return None
    reason = said.get("cache_miss_reason")
    if isinstance(reason, Mapping):
        return str(reason.get("type"))[:60]
    if said.get("type") == "cache_miss":
        return str(said.get("reason"))[:60]
    return None
