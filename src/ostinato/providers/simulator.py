"""A vendor's prompt cache, by the rules of the table, over token counts. No text, no clock, no network.

A request is asked for in two steps, because an entry can be read only once the response to the request that
writes it has begun: :meth:`VendorCache.ask` says what is read and what will be written, and
:meth:`VendorCache.commit` makes the entries readable from a moment on. Times are seconds on any one clock and
never go back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import nsmallest

from ..errors import ParameterError
from .accounting import TokenUse
from .rules import CacheRules
from .shape import Chain, Prompt, chain_of, run_ends


@dataclass(slots=True)
class Entry:
    """One prefix that a vendor keeps."""

    ttl: str
    num_tokens: int
    readable_at_s: float
    expires_at_s: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request reads and writes.

    ``hit`` is the place in ``chain`` up to which it is read, ``None``: nothing is. ``writes`` are entries
    that :meth:`VendorCache.commit` makes: place in the chain → time to live.
    """

    use: TokenUse
    chain: Chain
    hit: int | None
    writes: Mapping[int, str]
    asked_at_s: float


class VendorCache:
    """One vendor's cache for one model and everybody in a scope.

    Args:
        rules: what to go by.
        capacity: entries at most; those that expire first go. Vendors name no number.
    """

    def __init__(self, rules: CacheRules, *, capacity: int = 1_000_000) -> None:
        self.rules = rules
        self._capacity = capacity
        self._entries: dict[bytes, Entry] = {}
        self._times = {known.name: known.seconds for known in rules.ttl}
        self._next_sweep_s = 0.0
        self._seen: dict[bytes, float] = {}  # prefixes that were sent, where only units are kept

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, digest: bytes, now_s: float) -> Entry | None:
        """The entry of a prefix, if it can be read now."""
        entry = self._entries.get(digest)
        if entry is None or not entry.readable_at_s <= now_s < entry.expires_at_s:
            return None
        return entry

    def ask(self, prompt: Prompt, now_s: float, *, is_peek: bool = False) -> Asked:
        """Look a request up; what is read has its time begin anew where the rules say so.

        With ``is_peek`` nothing changes: what would be.

        Raises:
            ParameterError: the vendor would answer 400 (:func:`check`).
        """
        prompt = with_automatic(prompt, self.rules)
        check(prompt, self.rules)
        chain = chain_of(prompt, self.rules)
        if self.rules.mechanism == "markers":
            asked, read = self._ask_markers(prompt, chain, now_s)
        elif self.rules.mechanism == "endpoints":
            asked, read = self._ask_endpoints(prompt, chain, now_s)
        else:
            asked, read = self._ask_automatic(chain, now_s)
        if not is_peek:
            self._sweep(now_s)
            for place in read:
                self._refresh(chain.digests[place], now_s)
            if self.rules.mechanism == "units":
                seen_until_s = now_s + self._times[self.rules.default_ttl]
                self._seen.update(dict.fromkeys(chain.digests, seen_until_s))
        return asked

    def commit(self, asked: Asked, readable_at_s: float) -> None:
        """The response has begun: its entries can be read from now on. Their time runs from the request."""
        for place, ttl in asked.writes.items():
            self._put(asked, place, ttl, readable_at_s)
        if (surplus := len(self._entries) - self._capacity) > 0:
            # Some more than has to go, so that finding them is not paid with every request.
            num_dropped = max(surplus, self._capacity // 16)
            for digest in nsmallest(
                num_dropped, self._entries, key=lambda key: self._entries[key].expires_at_s
            ):
                del self._entries[digest]

    def _put(self, asked: Asked, place: int, ttl: str, readable_at_s: float) -> None:
        digest = asked.chain.digests[place]
        expires_at_s = asked.asked_at_s + self._times[ttl]
        known = self.entry(digest, asked.asked_at_s)
        if known is not None and known.expires_at_s >= expires_at_s:
            return  # somebody wrote the same in the meantime, for longer
        self._entries[digest] = Entry(ttl, asked.chain.tokens[place], readable_at_s, expires_at_s)

    # ------------------------------------------------------------ breakpoints (Anthropic, Bedrock, Qwen)

    def _ask_markers(self, prompt: Prompt, chain: Chain, now_s: float) -> tuple[Asked, list[int]]:
        rules = self.rules
        place_of = {index: place for place, index in enumerate(chain.indices)}
        markers = {place_of[index]: ttl for index, ttl in prompt.markers.items() if index in place_of}
        ends = run_ends(chain)
        hits: list[int] = []
        for place in markers:
            found = self._look_back(chain, ends, place, now_s)
            if found is not None:
                hits.append(found)
        hit = max(hits, default=None)
        after = -1 if hit is None else hit
        writes = {
            place: ttl
            for place, ttl in markers.items()
            if place > after and chain.tokens[place] >= rules.min_tokens
        }
        return Asked(_bill(chain, hit, writes, rules), chain, hit, writes, now_s), hits

    def _look_back(self, chain: Chain, ends: Iterable[int], place: int, now_s: float) -> int | None:
        """The longest entry in the window of a breakpoint at ``place``."""
        first = chain.positions[place] - self.rules.look_back + 1
        candidates = [end for end in ends if end < place and chain.positions[end] >= first]
        for candidate in [place, *reversed(candidates)]:
            if self.entry(chain.digests[candidate], now_s) is not None:
                return candidate
        return None

    def _refresh(self, digest: bytes, now_s: float) -> None:
        if self.rules.refresh_on_read:
            entry = self._entries[digest]
            entry.expires_at_s = now_s + self._times[entry.ttl]

    # ------------------------------------------------------------ ends of messages (OpenAI since GPT-5.6)

    def _ask_endpoints(self, prompt: Prompt, chain: Chain, now_s: float) -> tuple[Asked, list[int]]:
        rules = self.rules
        explicit = sorted(prompt.markers)
        endpoints = message_endpoints(prompt)
        reads = set(explicit[: rules.read_first_markers]) | set(explicit[-rules.read_latest_markers :])
        max_explicit = rules.max_markers
        writes: dict[int, str] = {}
        if not prompt.is_explicit and endpoints:
            reads |= set(endpoints[-1 - rules.look_back :])
            reads |= {end for end in endpoints if prompt.blocks[end].level == "system"}
            writes[endpoints[-1]] = prompt.automatic or rules.default_ttl
            max_explicit -= 1
        writes |= {index: prompt.markers[index] for index in explicit[-max_explicit:]}
        hit = max(
            (index for index in reads if self.entry(chain.digests[index], now_s) is not None), default=None
        )
        after = -1 if hit is None else hit
        writes = {
            index: ttl
            for index, ttl in writes.items()
            if index > after and chain.tokens[index] >= rules.min_tokens
        }
        read = [] if hit is None else [hit]
        return Asked(_bill(chain, hit, writes, rules), chain, hit, writes, now_s), read

    # ------------------------------------------------------------ automatic (OpenAI before, Gemini, DeepSeek)

    def _ask_automatic(self, chain: Chain, now_s: float) -> tuple[Asked, list[int]]:
        rules = self.rules
        units = [place for place, digest in enumerate(chain.digests) if self.entry(digest, now_s) is not None]
        if rules.mechanism == "units":
            # Only whole units can be read; what two prompts begin with in common is one from then on.
            common = [
                place for place, digest in enumerate(chain.digests) if self._seen.get(digest, 0) > now_s
            ]
            writes = dict.fromkeys((*common[-1:], *range(len(chain))[-1:]), rules.default_ttl)
        else:
            writes = dict.fromkeys(range(len(chain)), rules.default_ttl)
        num_read = chain.tokens[units[-1]] // rules.granularity * rules.granularity if units else 0
        if num_read < rules.min_tokens:
            num_read = 0
        hit = units[-1] if num_read else None
        use = TokenUse(uncached=(chain.tokens[-1] if len(chain) else 0) - num_read, read=num_read)
        return Asked(use, chain, hit, writes, now_s), units

    def _sweep(self, now_s: float) -> None:
        """Drop what has expired, about once a minute."""
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + 60.0
        for digest in [digest for digest, entry in self._entries.items() if entry.expires_at_s <= now_s]:
            del self._entries[digest]
        for digest in [digest for digest, until_s in self._seen.items() if until_s <= now_s]:
            del self._seen[digest]


def _bill(chain: Chain, hit: int | None, writes: Mapping[int, str], rules: CacheRules) -> TokenUse:
    """Read up to the hit; from there written, to the last breakpoint of every time to live, longest first."""
    read = billed = 0 if hit is None else chain.tokens[hit]
    written: dict[str, int] = {}
    for known in reversed(rules.ttl):
        ends = [chain.tokens[place] for place, ttl in writes.items() if ttl == known.name]
        if ends and max(ends) > billed:
            written[known.name] = max(ends) - billed
            billed = max(ends)
    return TokenUse((chain.tokens[-1] if len(chain) else 0) - billed, written, read)


# ---------------------------------------------------------------- what a vendor refuses


def check(prompt: Prompt, rules: CacheRules) -> None:
    """Refuse what the vendor would refuse.

    Raises:
        ParameterError: too many breakpoints, one where none may stand, a time to live that is not offered, or
            a longer one behind a shorter.
    """
    markers = prompt.markers
    if rules.mechanism not in ("markers", "endpoints"):
        return
    if rules.mechanism == "markers" and len(markers) > rules.max_markers:
        raise ParameterError(
            f"A maximum of {rules.max_markers} blocks with cache_control may be provided. "
            f"Found {len(markers)}.",
            param="cache_control",
        )
    shortest: float | None = None
    for index, ttl in markers.items():
        block = prompt.blocks[index]
        where = path_text(block.path)
        seconds = rules.lifetime(ttl).seconds
        if not can_mark(prompt, index, rules):
            raise ParameterError(f"{where}: cache_control cannot be set on this block.", param=where)
        if rules.mechanism == "markers":
            if shortest is not None and seconds > shortest:
                raise ParameterError(
                    f"{where}: a ttl={ttl!r} cache_control block must not come after a shorter one.",
                    param=where,
                )
            shortest = seconds


def can_mark(prompt: Prompt, index: int, rules: CacheRules) -> bool:
    """Whether a breakpoint may stand on this block."""
    block = prompt.blocks[index]
    return block.can_mark and block.kind not in rules.unmarkable


def with_automatic(prompt: Prompt, rules: CacheRules) -> Prompt:
    """The prompt with the breakpoint that the vendor places itself, where it was asked to.

    Raises:
        ParameterError: there are as many already as may be, or the block has one of another time to live.
    """
    if rules.mechanism != "markers" or prompt.automatic is None or not prompt.blocks:
        return prompt
    last = next(
        (index for index in reversed(range(len(prompt.blocks))) if can_mark(prompt, index, rules)), None
    )
    if last is None:
        return prompt
    present = prompt.blocks[last].ttl
    if present == prompt.automatic:
        return prompt
    if present is not None:
        raise ParameterError(
            f"The last block has cache_control with ttl {present!r}, the request one with "
            f"{prompt.automatic!r}.",
            param="cache_control",
        )
    if len(prompt.markers) >= rules.max_markers:
        raise ParameterError(
            f"Automatic caching needs one of {rules.max_markers} breakpoints, and all are taken.",
            param="cache_control",
        )
    return with_markers(prompt, {last: prompt.automatic})


def with_markers(prompt: Prompt, markers: Mapping[int, str]) -> Prompt:
    """The prompt with breakpoints added: index of the block → time to live."""
    blocks = list(prompt.blocks)
    for index, ttl in markers.items():
        blocks[index] = replace(blocks[index], ttl=ttl)
    return replace(prompt, blocks=tuple(blocks))


def message_endpoints(prompt: Prompt) -> list[int]:
    """Where newer OpenAI models look by themselves.

    The end of the first developer messages, of every user message, and of the last tool result of a group.
    """
    ends: list[int] = []
    num_blocks = len(prompt.blocks)
    for index, block in enumerate(prompt.blocks):
        following = prompt.blocks[index + 1] if index + 1 < num_blocks else None
        if block.level == "system":
            if following is None or following.level == "messages":
                ends.append(index)
        elif block.kind == "tool_result":
            if following is None or following.kind != "tool_result":
                ends.append(index)
        elif block.role == "user" and block.ends_message:
            ends.append(index)
    return ends


def path_text(path: tuple[str | int, ...]) -> str:
    """``("messages", 0, "content", 1)`` as it is written: ``messages.0.content.1``."""
    return ".".join(map(str, path))
