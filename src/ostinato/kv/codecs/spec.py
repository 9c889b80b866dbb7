"""What a user writes to choose how KV is stored: ``int8``, ``int8/int4``, ``0-14:int8,15-29:fp16``.

A form for all layers, or forms for ranges of layers (numbered from 0, both ends included, the last one may be
open). Two forms with a slash are one for keys and one for values. Layers that are not named stay exact.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby

from ostinato.errors import ParameterError

FORMS = ("exact", "fp32", "fp16", "bf16", "int8", "int4")
_RANGE = re.compile(r"(\d{1,6})(-(\d{1,6})?)?")


@dataclass(frozen=True, slots=True)
class Coding:
    """The forms of one layer's keys and values, each of ``FORMS``."""

    keys: str = "exact"
    values: str = "exact"

    def __str__(self) -> str:
        return self.keys if self.keys == self.values else f"{self.keys}/{self.values}"


@dataclass(frozen=True, slots=True)
class Choice:
    """``coding`` for the layers ``first`` to ``last``, both included; ``None``: to the last there is."""

    first: int
    last: int | None
    coding: Coding


def parse_spec(spec: str) -> tuple[Choice, ...]:
    """What ``spec`` says, without knowing how many layers there are.

    Raises:
        ParameterError: it cannot be read.
    """
    if ":" not in spec:
        return (Choice(0, None, _coding(spec, spec)),)
    return tuple(_choice(part, spec) for part in spec.split(","))


def is_lossy(spec: str) -> bool:
    """Whether ``spec`` asks for anything that loses something of a wide enough type.

    Raises:
        ParameterError: it cannot be read.
    """
    exact = {"exact", "fp32"}
    return any(not {choice.coding.keys, choice.coding.values} <= exact for choice in parse_spec(spec))


def codings_of(spec: str, num_layers: int) -> tuple[Coding, ...]:
    """The coding of each of ``num_layers`` layers.

    Raises:
        ParameterError: it cannot be read, names a layer twice, or one that is not there.
    """
    codings: list[Coding | None] = [None] * num_layers
    for choice in parse_spec(spec):
        last = num_layers - 1 if choice.last is None else choice.last
        if max(choice.first, last) >= num_layers:
            raise _error(spec, f"the model has layers 0 to {num_layers - 1}")
        for layer in range(choice.first, last + 1):
            if codings[layer] is not None:
                raise _error(spec, f"layer {layer} is named twice")
            codings[layer] = choice.coding
    return tuple(coding or Coding() for coding in codings)


def spec_of(codings: tuple[Coding, ...]) -> str:
    """The one way to write ``codings``: equal choices have equal texts."""
    if len(set(codings)) == 1:
        return str(codings[0])
    parts = []
    end = 0
    for coding, run in groupby(codings):
        first, end = end, end + len(list(run))
        parts.append(f"{first}-{end - 1}:{coding}")
    return ",".join(parts)


def _choice(part: str, spec: str) -> Choice:
    layers, _, form = part.partition(":")
    found = _RANGE.fullmatch(layers.strip())
    if found is None:
        raise _error(spec, f"{layers.strip()!r} is not a range of layers such as 0-14 or 15-")
    first = int(found[1])
    last = first if found[2] is None else int(found[3]) if found[3] else None
    if last is not None and last < first:
        raise _error(spec, f"the range {layers.strip()} goes backwards")
    return Choice(first, last, _coding(form, spec))


def _coding(text: str, spec: str) -> Coding:
    forms = [form.strip().lower() for form in text.split("/")]
    for form in forms:
        if form not in FORMS:
            raise _error(spec, f"{form!r} is none of {', '.join(FORMS)}")
    if len(forms) > 2:
        raise _error(spec, "one form for keys and one for values, not more")
    return Coding(forms[0], forms[-1])


def _error(spec: str, reason: str) -> ParameterError:
    return ParameterError(f"tier_codec is {spec!r}: {reason}", param="tier_codec")
