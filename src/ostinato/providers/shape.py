"""A request as a vendor's cache sees it: blocks in order, and what else decides over hits.

Text is not kept. Two requests have a prefix in common exactly where their chains of digests agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from blake3 import blake3

from .rules import LEVELS, CacheRules, Level

Path: TypeAlias = tuple[str | int, ...]
DIGEST_BYTES = 16


def digest_of(*parts: bytes) -> bytes:
    """A digest of a list of parts; where one ends and the next begins counts."""
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest(DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a prompt.

    Attributes:
        level: where it stands in the order of tools, system, messages.
        kind: ``tool``, ``text``, ``image``, ``tool_use``, ``tool_result``, ``thinking`` ...
        digest: of its content, without a marker.
        num_tokens: how long it is.
        path: where it stands in the request's body.
        can_mark: whether a breakpoint may stand on it (it is not empty, not a part of another block).
        ttl: the caller's breakpoint on it, by its time to live; ``None``: none.
        role: whose message it is in; empty outside messages.
        ends_message: whether it is the last of its message.
    """

    level: Level
    kind: str
    digest: bytes
    num_tokens: int
    path: Path = ()
    can_mark: bool = True
    ttl: str | None = None
    role: str = ""
    ends_message: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """A whole request. ``settings`` names what is not content and yet decides over hits (``tool_choice`` …).

    ``automatic`` is the time to live of a breakpoint that the vendor shall place itself; ``scope`` is who
    shares a cache: a workspace, an organisation.
    """

    vendor: str
    model: str
    blocks: tuple[Block, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    automatic: str | None = None
    is_explicit: bool = False
    scope: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(block.num_tokens for block in self.blocks)

    @property
    def markers(self) -> dict[int, str]:
        """The caller's breakpoints: index of the block → time to live."""
        return {index: block.ttl for index, block in enumerate(self.blocks) if block.ttl is not None}


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt's prefixes: at every block the digest of all up to it, the tokens so far, its position.

    ``indices`` are the blocks' places in the prompt: thinking that the vendor takes out is in no prefix.
    """

    digests: tuple[bytes, ...]
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.digests)


def chain_of(prompt: Prompt, rules: CacheRules) -> Chain:
    """The prefixes by which ``rules`` look a prompt up.

    Every level begins with the settings whose change loses it, so that they cost exactly what the table says.
    """
    dropped = _stripped(prompt) if rules.strips_thinking else frozenset()
    parent = digest_of(b"scope", prompt.scope.encode("utf-8", "surrogatepass"))
    digests: list[bytes] = []
    tokens: list[int] = []
    positions: list[int] = []
    indices: list[int] = []
    num_tokens, position, last_kind = 0, -1, ""
    seeds = {level: _seed(prompt, rules, level) for level in LEVELS}
    entered = 0
    for index, block in enumerate(prompt.blocks):
        while entered < len(LEVELS) and entered <= LEVELS.index(block.level):
            parent = digest_of(parent, seeds[LEVELS[entered]])
            entered += 1
        if index in dropped:
            continue
        if not (block.kind == last_kind and block.kind in rules.collapsed):
            position += 1
        last_kind = block.kind
        parent = digest_of(parent, block.role.encode(), block.digest)
        num_tokens += block.num_tokens
        digests.append(parent)
        tokens.append(num_tokens)
        positions.append(position)
        indices.append(index)
    return Chain(tuple(digests), tuple(tokens), tuple(positions), tuple(indices))


def _seed(prompt: Prompt, rules: CacheRules, level: Level) -> bytes:
    parts: list[str] = [level]
    values = {"model": prompt.model, **prompt.settings}
    for change, lost in sorted(rules.invalidates.items()):
        if lost == level:
            parts += [change, values.get(change, "")]
    return digest_of(*(part.encode("utf-8", "surrogatepass") for part in parts))


def _stripped(prompt: Prompt) -> frozenset[int]:
    """Thinking before the last message in which a user says something that is not a tool's result."""
    last = max(
        (
            index
            for index, block in enumerate(prompt.blocks)
            if block.role == "user" and block.kind != "tool_result"
        ),
        default=-1,
    )
    return frozenset(
        index
        for index, block in enumerate(prompt.blocks[: last + 1])
        if block.kind in ("thinking", "redacted_thinking")
    )


def run_ends(chain: Chain) -> list[int]:
    """Places in the chain at which a position ends: where looking back can find an entry."""
    last = len(chain) - 1
    return [
        place
        for place in range(len(chain))
        if place == last or chain.positions[place] != chain.positions[place + 1]
    ]
