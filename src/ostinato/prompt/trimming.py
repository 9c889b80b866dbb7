"""Trimming to a token budget, by whole turns, so that the cache loses as little as possible.

A *turn* is a message of the user and all that follows it up to the next one. Turns are dropped whole, oldest
first; where a tool's result answers a call of an earlier turn, the turns from the call to the result are
one. System messages stay, wherever they stand. So do pinned messages, with their turn: half a turn helps no
model, and many templates refuse it. A role of the user's own counts as what it is written as. Counts are
exact: each is a prompt rendered and tokenized.

What a trimmed prompt costs the cache depends on how it moves from turn to turn:

- ``drop`` drops just enough. Over budget, nearly every turn drops something, and nearly every prompt parts
  from the one before right behind the system text.
- ``sticky`` cuts down to a low-water mark once the budget is full. The prompts after that only grow, and
  share their prefix, until the budget is full again.
- ``shorten`` shortens old tool results where they stand, oldest first, down to the low-water mark, too.
  Everything before the first result that is newly shortened stays byte for byte what it was. Where that is
  not enough, it drops as ``sticky`` does. Results that no answer follows yet are not old.

Trimming is a function of the conversation alone, so a server that gets the whole history with every request
cuts where it cut before: it finds the earlier cuts by going through the prompts there have been, from where
it was last, if it remembers that.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..errors import ParameterError, PromptTooLongError
from ..ports import Tokenizer
from ..types import Conversation, Message, TrimRules
from .base import Template
from .conversation import validate
from .rules import written_as

_MESSAGE_CHARS = 300
"""What a remembered message takes besides its content."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What is left, and what it cost.

    ``num_tokens`` is the prompt's length, ``given_tokens`` what it would have been; ``kept``, ``dropped`` and
    ``shortened`` are indices of the messages as they were given. ``given``, ``cut`` and ``num_short`` let the
    next trimming go on from here: messages from ``cut`` on were not dropped, and so many tool results are
    shortened.
    """

    conversation: Conversation
    num_tokens: int
    given_tokens: int
    kept: tuple[int, ...]
    dropped: tuple[int, ...]
    shortened: tuple[int, ...]
    given: Conversation
    cut: int
    num_short: int


class Trimmer:
    """Trims the conversations of one model.

    Args:
        template: what renders them.
        tokenizer: what counts them.
        rules: how to trim; the budget must be given.

    Raises:
        ParameterError: it is not.
    """

    def __init__(self, template: Template, tokenizer: Tokenizer, rules: TrimRules) -> None:
        if rules.budget_tokens is None:
            raise ParameterError("a trimmer needs a budget: give budget_tokens", param="budget_tokens")
        self._template = template
        self._tokenizer = tokenizer
        self._rules = rules
        self._budget_tokens = rules.budget_tokens

    def count(
        self, conversation: Conversation, *, scope: str = "", continue_final_message: bool = False
    ) -> int:
        """Tokens of the complete prompt."""
        rendered = self._template.render(
            conversation,
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
        )
        return len(self._tokenizer.encode_rendered(rendered, scope=scope))

    def trim(
        self,
        conversation: Conversation,
        *,
        pinned: Collection[int] = (),
        since: Trimmed | None = None,
        scope: str = "",
        continue_final_message: bool = False,
    ) -> Trimmed:
        """The conversation within the budget; as it is where it fits.

        Args:
            conversation: the whole history.
            pinned: indices of messages that must stay.
            since: what this trimmer gave for an earlier part of the same conversation with the same pins. It
                spares the search for earlier cuts.
            scope: keeps what the tokenizer remembers apart: a tenant's salt.
            continue_final_message: the prompt will end inside the assistant's last message.

        Raises:
            ConversationError: the conversation breaks a rule.
            TemplateError: the template refuses it, or refuses what is left of it.
            ParameterError: ``pinned`` names a message that is not there.
            PromptTooLongError: what always stays is longer than the budget; says by how much.
        """
        validate(conversation, roles=self._template.roles)
        for index in pinned:
            if not 0 <= index < len(conversation.messages):
                raise ParameterError(f"pinned names messages[{index}], which is not there", param="pinned")

        def count(part: Conversation, is_whole: bool) -> int:
            return self.count(part, scope=scope, continue_final_message=is_whole and continue_final_message)

        task = _Task(
            conversation,
            frozenset(pinned),
            self._rules,
            self._budget_tokens,
            count,
            written_as=written_as(self._template),
        )
        return task.run(since)


class EarlierCuts:
    """Where conversations were cut before, so that the search for the next cut begins there.

    It changes no result, only how long it takes to find. Safe to use from several threads.

    Args:
        capacity_chars: how much text of conversations it may hold on to.
    """

    def __init__(self, capacity_chars: int = 16 << 20) -> None:
        self._capacity_chars = capacity_chars
        self._num_chars = 0
        self._trimmed: OrderedDict[Hashable, tuple[Trimmed, int]] = OrderedDict()
        self._lock = threading.Lock()

    def trim(
        self,
        trimmer: Trimmer,
        conversation: Conversation,
        *,
        pinned: Collection[int] = (),
        scope: str = "",
        continue_final_message: bool = False,
        space: Hashable = (),
    ) -> Trimmed:
        """:meth:`Trimmer.trim`, from where the same conversation was cut last.

        The conversation must be a valid one. ``space`` is all that decides counts and cuts besides: template
        and rules. What is remembered in one ``scope`` (a salt) is not used in another.
        """
        # Who begins alike is taken for the same; the trimmer looks whether it is.
        key = (scope, space, frozenset(pinned), conversation.messages[:2])
        with self._lock:
            since = self._trimmed.get(key)
        trimmed = trimmer.trim(
            conversation,
            pinned=pinned,
            since=None if since is None else since[0],
            scope=scope,
            continue_final_message=continue_final_message,
        )
        num_chars = sum(len(message.content) + _MESSAGE_CHARS for message in conversation.messages)
        with self._lock:
            self._num_chars += num_chars - self._trimmed.pop(key, (None, 0))[1]
            self._trimmed[key] = trimmed, num_chars
            while self._num_chars > self._capacity_chars:
                self._num_chars -= self._trimmed.popitem(last=False)[1][1]
        return trimmed


class _Task:
    """One conversation that is being trimmed.

    A cut is the index of a message at which a turn begins. ``num_short`` counts shortened tool results, the
    oldest first; those in dropped turns count, too.
    """

    def __init__(
        self,
        conversation: Conversation,
        pinned: frozenset[int],
        rules: TrimRules,
        budget_tokens: int,
        count: Callable[[Conversation, bool], int],
        *,
        written_as: Mapping[str, str],
    ) -> None:
        self._given = conversation
        # What decides which messages belong together, and which stay.
        self._shape = tuple(
            replace(message, role=written_as[message.role]) if message.role in written_as else message
            for message in conversation.messages
        )
        # System text stays by itself, without the turn it stands in.
        self._pinned = frozenset(i for i in pinned if not _is_system(self._shape[i]))
        self._strategy = rules.strategy
        self._budget_tokens = budget_tokens
        self._count = count
        self._low_tokens = max(1, int(budget_tokens * rules.low_water))
        self._short: dict[int, Message] = {}
        if rules.strategy == "shorten":
            for index, message in enumerate(conversation.messages):
                content = _shortened(message.content, rules.keep_chars)
                if message.role == "tool" and index not in pinned and len(content) < len(message.content):
                    self._short[index] = replace(message, content=content)
        self._order = list(self._short)

    def run(self, since: Trimmed | None) -> Trimmed:
        end, budget, strategy = len(self._given.messages), self._budget_tokens, self._strategy
        cut, num_short = 0, 0
        num_tokens = given_tokens = self._num_tokens(cut, end, num_short)
        if num_tokens > budget and strategy in ("sticky", "shorten"):
            cut, num_short = self._walk(since)
            num_tokens = self._num_tokens(cut, end, num_short)
        if num_tokens > budget and strategy != "off":
            cut = self._cut_further(cut, end, num_short, budget)
            num_tokens = self._num_tokens(cut, end, num_short)
        if num_tokens > budget:
            what = "the prompt" if strategy == "off" else "the newest turn, with what always stays,"
            raise PromptTooLongError(
                f"{what} has {num_tokens} tokens: {num_tokens - budget} more than the budget of {budget}; "
                "shorten it, or unpin messages",
                num_tokens=num_tokens,
                max_tokens=budget,
            )
        kept = self._indices(cut, end)
        gone = set(range(end)).difference(kept)
        shortened = tuple(index for index in self._order[:num_short] if index not in gone)
        left = self._left(kept, num_short)
        return Trimmed(
            conversation=left,
            num_tokens=num_tokens,
            given_tokens=given_tokens,
            kept=tuple(kept),
            dropped=tuple(sorted(gone)),
            shortened=shortened,
            given=self._given,
            cut=cut,
            num_short=num_short,
        )

    def _walk(self, since: Trimmed | None) -> tuple[int, int]:
        """Cut and shortened results after all the prompts there have been, the newest included."""
        ends = _prompt_ends(self._shape)
        cut, num_short, first = 0, 0, 0
        if since is not None and self._continues(since):
            cut, num_short = since.cut, since.num_short
            first = ends.index(len(since.given.messages)) + 1

        def is_over(end: int) -> bool:
            return self._num_tokens(cut, end, num_short) > self._budget_tokens

        while (over := bisect_left(ends, True, lo=first, key=is_over)) < len(ends):
            cut, num_short = self._relieve(cut, ends[over], num_short)
            first = over + 1
        return cut, num_short

    def _relieve(self, cut: int, end: int, num_short: int) -> tuple[int, int]:
        """Make room in the prompt that ends at ``end``, down to the low-water mark if that can be."""
        more = range(num_short + 1, bisect_left(self._order, self._first_fresh(end)) + 1)
        if more:
            at = bisect_left(
                more, True, key=lambda number: self._num_tokens(cut, end, number) <= self._low_tokens
            )
            num_short = more[min(at, len(more) - 1)]
            if self._num_tokens(cut, end, num_short) <= self._budget_tokens:
                return cut, num_short
        return self._cut_further(cut, end, num_short, self._low_tokens), num_short

    def _cut_further(self, cut: int, end: int, num_short: int, target_tokens: int) -> int:
        """The first cut behind ``cut`` that leaves ``target_tokens`` or fewer; the last there is, if none."""
        cuts = [start for start in _turn_starts(self._shape[:end]) if start > cut] or [cut]
        at = bisect_left(
            cuts, True, key=lambda start: self._num_tokens(start, end, num_short) <= target_tokens
        )
        return cuts[min(at, len(cuts) - 1)]

    def _first_fresh(self, end: int) -> int:
        """Tool results before here have been answered to."""
        messages = self._shape[:end]
        return max(
            (index for index, message in enumerate(messages) if message.role == "assistant"), default=0
        )

    def _continues(self, since: Trimmed) -> bool:
        before, messages = since.given.messages, self._given.messages
        return (
            since.given.tools == self._given.tools
            and messages[: len(before)] == before
            and len(before) in _prompt_ends(self._shape)
        )

    # ------------------------------------------------------------ what is left

    def _indices(self, cut: int, end: int) -> list[int]:
        """The messages before ``end`` that a cut leaves."""
        messages = self._shape
        starts = [*_turn_starts(messages[:end]), end]
        # A result that came late may have joined the turns on both sides of an earlier cut.
        cut = max(start for start in starts if start <= cut)
        staying = {
            index
            for start, stop in pairwise(starts)
            if not self._pinned.isdisjoint(range(start, stop))
            for index in range(start, stop)
        }
        return [
            index for index in range(end) if index >= cut or index in staying or _is_system(messages[index])
        ]

    def _left(self, indices: Sequence[int], num_short: int) -> Conversation:
        short = set(self._order[:num_short])
        messages = (
            self._short[index] if index in short else self._given.messages[index] for index in indices
        )
        return replace(self._given, messages=tuple(messages))

    def _num_tokens(self, cut: int, end: int, num_short: int) -> int:
        left = self._left(self._indices(cut, end), num_short)
        return self._count(left, end == len(self._given.messages))


def _turn_starts(messages: Sequence[Message]) -> list[int]:
    """Where turns begin, the first at 0; a tool's result is in the turn of its call."""
    starts = [0]
    made: dict[str, int] = {}
    for index, message in enumerate(messages):
        if message.role == "user" and index > 0:
            starts.append(index)
        for call in message.tool_calls:
            made[call.id] = index
        if message.role == "tool" and message.tool_call_id is not None:
            called = made[message.tool_call_id]
            while starts[-1] > called:
                starts.pop()
    # What stands before the first word of the user is not a turn by itself if it is only system text.
    if len(starts) > 1 and all(map(_is_system, messages[: starts[1]])):
        del starts[1]
    return starts


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")


def _prompt_ends(messages: Sequence[Message]) -> list[int]:
    """The ends of the prompts there have been, the whole being the last."""
    return [
        index + 1
        for index, message in enumerate(messages)
        if index + 1 == len(messages)
        or (message.role != "assistant" and messages[index + 1].role == "assistant")
    ]


def _shortened(content: str, keep_chars: int) -> str:
    left_out = len(content) - keep_chars
    return f"{content[:keep_chars]}\n[… {left_out} characters left out]"
