"""From a request to how its sequence is kept: the budget in tokens, and what of the prompt must stay.

Which message a token is of is asked of the template (:meth:`~ostinato.prompt.base.Template.locate`). Where
that cannot be told, a prompt that is not assembled from one rendering, only text and place count.
"""

from __future__ import annotations

import numpy as np

from .assembly import Assembled, Assembler
from .engines.base import RunnerInfo
from .errors import ParameterError
from .retention.budgets import parse_budget
from .retention.keeping import Keep
from .retention.methods import method_by_name
from .retention.protection import entity_spans, flags_of, occurrences
from .types import GenerationRequest, Retention

_TURN_SHARE = 2
_RAW_TURN_TOKENS = 32
"""A raw prompt has no turns: its last tokens count as one."""


def check_retention(retention: Retention, info: RunnerInfo, model_name: str) -> None:
    """
    Raises:
        ParameterError: a field that is out of its range or of the wrong type, or a model that cannot do it.
    """
    parse_budget(retention.budget)
    method = method_by_name(retention.method)
    if retention.entities is not None and not isinstance(retention.entities, bool):
        raise ParameterError("entities must be true or false", param="entities", code="invalid_type")
    if not isinstance(retention.renumber, bool):
        raise ParameterError("renumber must be true or false", param="renumber", code="invalid_type")
    pins: object = retention.pinned_text
    if not isinstance(pins, tuple) or not all(isinstance(text, str) and text for text in pins):
        raise ParameterError("pinned_text must be texts, none of them empty", param="pinned_text")
    reason = info.compaction_reason
    if reason is None and len(set(info.kv_heads)) > 1:
        reason = "its layers have different numbers of key heads"
    if reason is not None:
        raise ParameterError(
            f"{model_name} cannot be kept within a KV budget: {reason}", param="kv_budget", code="unsupported"
        )
    if (reason := info.movement_reason) is not None:
        for param, is_asked in (("retention", method.watches == "queries"), ("renumber", retention.renumber)):
            if is_asked:
                raise ParameterError(
                    f"{model_name} cannot do what {param} asks for: {reason}", param=param, code="unsupported"
                )


def keep_of(
    request: GenerationRequest,
    assembled: Assembled,
    assembler: Assembler,
    info: RunnerInfo,
    max_new_tokens: int,
    most_tokens: int,
) -> Keep | None:
    """How a checked request's sequence is kept; ``None``: it never has more tokens than its budget.

    ``most_tokens``: what there is room for at all.

    Raises:
        BudgetTooSmallError: what is protected leaves no room; both numbers are in it.
    """
    retention, tokens = request.retention, assembled.tokens
    assert retention is not None, "no budget was asked for"
    budget = parse_budget(retention.budget).in_tokens(len(tokens), info.kv_bytes_per_token)
    budget = min(budget, most_tokens, info.max_model_len)
    if len(tokens) + max_new_tokens - 1 <= budget:
        return None
    method = method_by_name(retention.method)
    protected = np.zeros(len(tokens), np.bool_)
    protected[: method.num_sinks] = True
    turn_start = len(tokens) - min(_RAW_TURN_TOKENS, len(tokens))
    owners = assembler.owners(assembled, continue_final_message=request.continue_final_message)
    if owners is not None:
        assert assembled.conversation is not None, "owners of a raw prompt"
        roles = [message.role for message in assembled.conversation.messages]
        system = [index for index, role in enumerate(roles) if role in ("system", "developer")]
        protected |= np.isin(owners, [*system, *assembled.pinned])
        users = np.flatnonzero(
            owners == max((i for i, role in enumerate(roles) if role == "user"), default=-2)
        )
        turn_start = int(users[0]) if len(users) else turn_start
    if len(tokens) - turn_start > budget // _TURN_SHARE:
        # A document with a question, rather than a question: its end is what asks.
        turn_start = len(tokens) - min(_RAW_TURN_TOKENS, budget // 8)
    protected[turn_start:] = True
    is_wanted = method.prefers_entities if retention.entities is None else retention.entities
    preferred = np.zeros(len(tokens), np.bool_)
    if retention.pinned_text or is_wanted:
        pieces = assembler.pieces(tokens)
        text = b"".join(pieces).decode(errors="surrogateescape")
        pinned = [span for wanted in retention.pinned_text for span in occurrences(text, wanted)]
        protected |= flags_of(pieces, text, pinned)
        if is_wanted:
            preferred = flags_of(pieces, text, entity_spans(text))
    setting = str(retention.budget), method.name, str(is_wanted), *retention.pinned_text
    return Keep(budget, method, protected, preferred, setting, retention.renumber)
