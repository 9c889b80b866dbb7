"""Where two prompts part, why, where they are the same again, and what each cache could have saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any, Final

from ..errors import ParameterError
from ..providers.rules import CacheRules, builtin_table, vendor_of_model
from .align import Run, align, elsewhere
from .causes import Cause, Gap, causes_of, gaps_of
from .writing import Written

MIN_MOVED_TOKENS: Final = 16
_NEAR_END_TOKENS: Final = 8
"""What the template writes for the answer: that both end alike is no text they have in common."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A gap between two prompts: where, why, and for how many tokens they are the same after it."""

    gap: Gap
    causes: tuple[Cause, ...]
    num_same_after: int

    @property
    def is_harmless(self) -> bool:
        return all(cause.is_harmless for cause in self.causes)


@dataclass(frozen=True, slots=True)
class Potential:
    """What one layer could have had of the second prompt after the first. ``note`` says what is in the
    way."""

    layer: str
    num_tokens: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Diff:
    """Two prompts beside each other.

    Attributes:
        runs: equal tokens, in order; ``moved``: those of ``b`` that stand elsewhere in ``a``.
        differences: what lies between the runs; the first one is where they part.
        num_common: tokens that both begin with.
        potentials: by layer.
    """

    a: Written
    b: Written
    runs: tuple[Run, ...]
    moved: tuple[Run, ...]
    differences: tuple[Difference, ...]
    num_common: int
    potentials: tuple[Potential, ...]

    @property
    def cause(self) -> Cause:
        """Why they part; ``identical`` or ``grows`` where they do not."""
        return self.differences[0].causes[0] if self.differences else Cause("identical", "")

    @property
    def num_lost(self) -> int:
        """Tokens of ``b`` that ``a`` has, too, and that no prefix cache finds."""
        after = sum(item.num_same_after for item in self.differences if not item.is_harmless)
        return after if self.differences and not self.differences[0].is_harmless else 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        a, b = self.a, self.b
        return {
            "a": {"where": a.asked.where, "num_tokens": len(a.tokens), "remark": a.remark},
            "b": {"where": b.asked.where, "num_tokens": len(b.tokens), "remark": b.remark},
            "num_common": self.num_common,
            "num_lost": self.num_lost,
            "cause": asdict(self.cause) | {"fix": self.cause.fix},
            "differences": [
                {
                    "a": [item.gap.a, item.gap.a_end],
                    "b": [item.gap.b, item.gap.b_end],
                    "was": a.text(item.gap.a, item.gap.a_end),
                    "now": b.text(item.gap.b, item.gap.b_end),
                    "segment": b.label(item.gap.b),
                    "num_same_after": item.num_same_after,
                    "causes": [asdict(cause) for cause in item.causes],
                }
                for item in self.differences
            ],
            "resynchronised": [
                {"a": run.a, "b": run.b, "num_tokens": run.length, "segment": b.label(run.b)}
                for run in self.runs
                if run.b > 0 or run.a > 0
            ],
            "moved": [{"a": run.a, "b": run.b, "num_tokens": run.length} for run in self.moved],
            "reuse": [asdict(potential) for potential in self.potentials],
        }


def compare(a: Written, b: Written, *, block_tokens: int = 16, on: date | None = None) -> Diff:
    """``b`` as it is asked after ``a``. ``on``: the day whose vendors' rules hold; ``None``: none are
    told."""
    runs = align(a.tokens, b.tokens)
    moved = elsewhere(a.tokens, b.tokens, runs, min_tokens=MIN_MOVED_TOKENS)
    num_common = runs[0].length if runs and runs[0].a == runs[0].b == 0 else 0
    gaps = gaps_of(runs, len(a.tokens), len(b.tokens))
    differences: list[Difference] = []
    for gap in gaps:
        after = sum(run.length for run in runs if run.b == gap.b_end)
        is_last = not any(run.b >= gap.b_end and _counts(run, b) for run in runs)
        if gap.a_end >= len(a.tokens) - _num_ending(a) and is_last and gap.a_end - gap.a <= _num_ending(a):
            kind = "grows" if gap.b_end > gap.b else "identical"
            causes: tuple[Cause, ...] = (Cause(kind, b.label(gap.b)),)
        else:
            causes = causes_of(a, b, gap, is_last=is_last, moved=moved)
        differences.append(Difference(gap, causes, 0 if is_last else after))
    return Diff(
        a, b, runs, moved, tuple(differences), num_common,
        tuple(_potentials(a, b, runs, moved, differences, num_common, block_tokens, on)),
    )  # fmt: skip


def _num_ending(written: Written) -> int:
    """The tokens that only ask for the answer."""
    conversation = written.asked.conversation
    if conversation is None or not conversation.messages:
        return 0
    last = len(conversation.messages) - 1
    count = 0
    for owner in reversed(written.owners.tolist()):
        if written.labels[owner].startswith(f"messages[{last}]"):
            break
        count += 1
        if count > 4 * _NEAR_END_TOKENS:
            return 0
    return count + 2  # and the mark that ended the last message


def _counts(run: Run, b: Written) -> bool:
    """Whether a run is more than what every prompt ends with."""
    return run.length > _NEAR_END_TOKENS + 4 or run.b_end < len(b.tokens)


def _potentials(
    a: Written,
    b: Written,
    runs: Sequence[Run],
    moved: Sequence[Run],
    differences: Sequence[Difference],
    num_common: int,
    block_tokens: int,
    on: date | None,
) -> list[Potential]:
    usable = min(num_common, max(0, len(b.tokens) - 1))
    blocks = usable // block_tokens * block_tokens
    later = sum(run.length for run in runs if run.a or run.b) + sum(run.length for run in moved)
    is_same = num_common == len(a.tokens) == len(b.tokens)
    same_asked = is_same and dict(a.asked.body) == dict(b.asked.body)
    found = [
        Potential("arena", usable),
        Potential("shared", blocks, f"in whole blocks of {block_tokens}"),
        Potential(
            "non_prefix", later, "would have to be moved, which may change the answer" if later else ""
        ),
        Potential("exact", len(b.tokens) if same_asked else 0, "" if same_asked else _why_not_exact(is_same)),
        _semantic(b, differences, num_common, is_same=is_same),
    ]
    return found if on is None else [*found, *_vendors(a, b, num_common, on)]


def _why_not_exact(is_same: bool) -> str:
    return "the prompts are the same, the rest of the request is not" if is_same else "the prompts differ"


def _semantic(b: Written, differences: Sequence[Difference], num_common: int, *, is_same: bool) -> Potential:
    if is_same:
        return Potential("semantic", len(b.tokens), "the same question")
    if len(differences) == 1 and differences[0].causes[0].kind == "new_text":
        return Potential(
            "semantic", 0, "perhaps: only the newest text differs, and it would have to mean the same"
        )
    return Potential("semantic", 0, "what comes before the question differs")


def _vendors(a: Written, b: Written, num_common: int, on: date) -> list[Potential]:
    name = b.asked.model
    models = (
        [(vendor_of_model(name), name)] if name else [("openai", "gpt-5"), ("anthropic", "claude-sonnet-4-5")]
    )
    found: list[Potential] = []
    for vendor, model in models:
        try:
            rules = builtin_table().rules(vendor, model, on)
        except ParameterError:
            continue
        found.append(_vendor(rules, num_common))
    return found


def _vendor(rules: CacheRules, num_common: int) -> Potential:
    layer = f"provider ({rules.vendor})"
    if num_common < rules.min_tokens:
        return Potential(layer, 0, f"fewer than the {rules.min_tokens} tokens that are cached at all")
    note = "with a breakpoint at the end of it" if rules.mechanism == "markers" else ""
    return Potential(layer, num_common // rules.granularity * rules.granularity, note)
