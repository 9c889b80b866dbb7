"""What a chat request may ask for beyond OpenAI's fields, and what is said of it in the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from ..types import PromptUse, Reuse, Reused, ReuseMode, TrimRules, Usage
from .fields import Wire
from .wire import Json, timings_object

Strategy: TypeAlias = Literal["off", "drop", "shorten", "sticky"]
MessageIndex = Annotated[int, Field(ge=0)]


class TrimFields(Wire):
    """How to trim, in full. What is left out is as in :class:`~ostinato.types.TrimRules`."""

    strategy: Strategy | None = None
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    low_water: Annotated[float, Field(gt=0, le=1)] | None = None
    keep_chars: Annotated[int, Field(ge=0)] | None = None
    pinned: Annotated[list[MessageIndex], Field(max_length=4096)] | None = None


def _text_or_object(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<object>" if isinstance(value, dict) else None


TrimChoice = Annotated[
    Annotated[Strategy, Tag("<text>")] | Annotated[TrimFields, Tag("<object>")],
    Discriminator(_text_or_object),
]


class PromptFields(Wire):
    """A named prompt, whose messages come before the request's."""

    name: str
    variables: dict[str, str] | None = None

    def use(self) -> PromptUse:
        return PromptUse(self.name, self.variables or {})


def trim_rules(choice: Strategy | TrimFields | None) -> TrimRules | None:
    """The rules a request asks for; ``None``: the operator's."""
    if choice is None:
        return None
    if isinstance(choice, str):
        return TrimRules(strategy=choice)
    given = choice.model_dump(exclude_none=True, exclude={"pinned"})
    return TrimRules(**given)


def pinned_messages(choice: Strategy | TrimFields | None) -> tuple[int, ...]:
    return tuple(choice.pinned or ()) if isinstance(choice, TrimFields) else ()


class ReuseFields(Wire):
    """What KV that is no prefix may be used, in full. What is left out is as in
    :class:`~ostinato.types.Reuse`."""

    mode: ReuseMode
    repair: Annotated[str, Field(max_length=64)] | None = None
    max_deviation: Annotated[float, Field(ge=0)] | None = None


ReuseChoice = Annotated[
    Annotated[ReuseMode, Tag("<text>")] | Annotated[ReuseFields, Tag("<object>")],
    Discriminator(_text_or_object),
]


def reuse_wanted(choice: ReuseMode | ReuseFields | None) -> Reuse | None:
    """What a request asks for; ``None``: the operator's."""
    if choice is None:
        return None
    return Reuse(choice) if isinstance(choice, str) else Reuse(**choice.model_dump(exclude_none=True))


def reuse_object(reuse: Reused, prefix_tokens: int) -> Json:
    """Where the KV of a prompt came from, and how far from exact it is."""
    said: Json = {
        "mode": reuse.mode,
        "prefix_tokens": prefix_tokens,
        "moved_tokens": reuse.moved_tokens,
        "repaired_tokens": reuse.repaired_tokens,
        "computed_tokens": reuse.computed_tokens,
        "deviation": None if reuse.deviation is None else round(reuse.deviation, 6),
        "refused": reuse.is_refused,
    }
    if (verified := reuse.verified) is not None:
        said["verified"] = {
            "kl": verified.kl,
            "first_difference": verified.first_difference,
            "compared_tokens": verified.num_compared,
        }
    return said


def remarks_object(usages: Sequence[Usage]) -> Json:
    """What became of the prompt on its way to the model; empty where all of it is there as it came.

    ``approximate_tokens``: so many of the cached ones are not exactly what computing them would have given.
    """
    remarks: Json = {}
    if num_approximate := sum(usage.approximate_tokens for usage in usages):
        remarks["approximate_tokens"] = num_approximate
    for usage in usages:
        if (served := usage.served) is not None:
            kept = {"id": served.entry_id} if served.entry_id else {}
            remarks["cache"] = {
                "layer": served.layer,
                "age_s": round(served.age_s, 3),
                **kept,
                **served.details,
            }
        if usage.prompt_name:
            remarks["prompt"] = usage.prompt_name
        if usage.retention:
            remarks["retention"] = {
                "method": usage.retention,
                "dropped_tokens": sum(u.dropped_tokens for u in usages),
                "recalled_tokens": sum(u.recalled_tokens for u in usages),
            }
        if (reuse := usage.reuse) is not None:
            remarks["reuse"] = reuse_object(reuse, usage.cached_tokens)
        if usage.kept_tokens:
            remarks["kept_tokens"] = usage.kept_tokens
        if (trim := usage.trimmed) is not None:
            remarks["trim"] = {
                "strategy": trim.strategy,
                "budget_tokens": trim.budget_tokens,
                "given_tokens": trim.given_tokens,
                "left_out_tokens": trim.given_tokens - usage.prompt_tokens,
                "dropped_messages": len(trim.dropped),
                "shortened_messages": len(trim.shortened),
            }
        if usage.changed:
            remarks["canonical"] = [{"rule": item.rule, "where": item.where} for item in usage.changed]
        if usage.unrendered:
            remarks["unrendered"] = [
                {"field": item.field, "messages": list(item.messages)} for item in usage.unrendered
            ]
    return remarks


def extras_object(usages: Sequence[Usage]) -> Json:
    """Our own addition beside ``usage``: times, and remarks where there are some."""
    return timings_object(usages) | remarks_object(usages)
