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
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import ParameterError, PromptTooLongError
from ..ports import Tokenizer
from ..types import Conversation, Message, TrimRules
from .base import Template
from .conversation import validate
from .rules import written_as

_MESSAGE_CHARS = 300
"""What a remembered message takes besides its content."""

MAX_COUNTED_MESSAGES = 500_000
"""How many messages one trimming may render, over all the prompts it counts. Conversations need thousands."""


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
            ParameterError: ``pinned`` names a message that is not there, or finding the cuts takes more than
                :data:`MAX_COUNTED_MESSAGES`.
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
        self._end = len(conversation.messages)
        # What decides which messages belong together, and which stay.
        shape = [
            replace(message, role=written_as[message.role]) if message.role in written_as else message
            for message in conversation.messages
        ]
        self._turns = _Turns(shape)
        self._ends = _prompt_ends(shape)
        self._system = [index for index, message in enumerate(shape) if _is_system(message)]
        self._assistant = [index for index, message in enumerate(shape) if message.role == "assistant"]
        # System text stays by itself, without the turn it stands in.
        self._pinned = sorted(index for index in pinned if not _is_system(shape[index]))
        self._strategy = rules.strategy
        self._budget_tokens = budget_tokens
        self._count = count
        self._num_counted = 0
        self._low_tokens = max(1, int(budget_tokens * rules.low_water))
        self._short: dict[int, Message] = {}
        if rules.strategy == "shorten":
            for index, message in enumerate(conversation.messages):
                content = _shortened(message.content, rules.keep_chars)
                if message.role == "tool" and index not in pinned and len(content) < len(message.content):
                    self._short[index] = replace(message, content=content)
        self._order = list(self._short)

    def run(self, since: Trimmed | None) -> Trimmed:
        end, budget, strategy = self._end, self._budget_tokens, self._strategy
        cut, num_short = 0, 0
        num_tokens = given_tokens = self._num_tokens(cut, end, num_short)
        if num_tokens > budget and strategy != "off":
            # If this is too long nothing else will do, and there is no need to look for it.
            cut, num_short = self._turns.starts(end)[-1], self._num_old(end)
            num_tokens = self._num_tokens(cut, end, num_short)
        if num_tokens > budget:
            what = "the prompt" if strategy == "off" else "the newest turn, with what always stays,"
            raise PromptTooLongError(
                f"{what} has {num_tokens} tokens: {num_tokens - budget} more than the budget of {budget}; "
                "shorten it, or unpin messages",
                num_tokens=num_tokens,
                max_tokens=budget,
            )
        if given_tokens > budget:
            cut, num_short = (0, 0) if strategy == "drop" else self._walk(since)
            num_tokens = self._num_tokens(cut, end, num_short)
            if num_tokens > budget:
                cut = self._cut_further(cut, end, num_short, budget)
                num_tokens = self._num_tokens(cut, end, num_short)
            assert num_tokens <= budget, "no cut does, though the last one would"
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
        ends = self._ends
        cut, num_short, first = 0, 0, 0
        if since is not None and self._continues(since):
            cut, num_short = since.cut, since.num_short
            first = bisect_left(ends, len(since.given.messages)) + 1

        def is_over(end: int) -> bool:
            return self._num_tokens(cut, end, num_short) > self._budget_tokens

        while first < len(ends):
            step = 1  # in growing steps: what is counted is never much longer than the budget
            while first + step <= len(ends) and not is_over(ends[first + step - 1]):
                first, step = first + step, 2 * step
            first = bisect_left(ends, True, lo=first, hi=min(first + step, len(ends)), key=is_over)
            if first < len(ends):
                cut, num_short = self._relieve(cut, ends[first], num_short)
                first += 1
        return cut, num_short

    def _relieve(self, cut: int, end: int, num_short: int) -> tuple[int, int]:
        """Make room in the prompt that ends at ``end``, down to the low-water mark if that can be."""
        more = range(num_short + 1, self._num_old(end) + 1)
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
        cuts = self._turns.starts(end, after=cut) or [cut]

        def fits(start: int) -> bool:
            return self._num_tokens(start, end, num_short) <= target_tokens

        at, step = len(cuts) - 1, 1  # from the newest, for the same reason as in `_walk`
        while at - step >= 0 and fits(cuts[at - step]):
            at, step = at - step, 2 * step
        return cuts[bisect_left(cuts, True, lo=max(0, at - step), hi=at, key=fits)]

    def _num_old(self, end: int) -> int:
        """How many of the results that can be shortened have been answered to before ``end``."""
        before = bisect_left(self._assistant, end)
        return bisect_left(self._order, self._assistant[before - 1]) if before else 0

    def _continues(self, since: Trimmed) -> bool:
        before, messages = since.given.messages, self._given.messages
        place = bisect_left(self._ends, len(before))
        return (
            since.given.tools == self._given.tools
            and self._ends[place : place + 1] == [len(before)]
            and messages[: len(before)] == before
        )

    # ------------------------------------------------------------ what is left

    def _indices(self, cut: int, end: int) -> list[int]:
        """The messages before ``end`` that a cut leaves."""
        # A result that came late may have joined the turns on both sides of an earlier cut.
        cut = self._turns.start_of(cut, end)
        staying = set(self._system[: bisect_left(self._system, cut)])
        for index in self._pinned[: bisect_left(self._pinned, cut)]:
            if index not in staying:
                staying.update(range(self._turns.start_of(index, end), self._turns.stop_of(index, end)))
        return [*sorted(staying), *range(cut, end)]

    def _left(self, indices: Sequence[int], num_short: int) -> Conversation:
        first_whole = self._order[num_short] if num_short < len(self._order) else self._end
        messages = (
            self._short[index]
            if index < first_whole and index in self._short
            else self._given.messages[index]
            for index in indices
        )
        return replace(self._given, messages=tuple(messages))

    def _num_tokens(self, cut: int, end: int, num_short: int) -> int:
        indices = self._indices(cut, end)
        self._num_counted += len(indices)
        if self._num_counted > MAX_COUNTED_MESSAGES:
            raise ParameterError(
                f"trimming {self._end} messages to {self._budget_tokens} tokens takes too long: "
                "raise the budget, or send fewer messages",
                param="trim",
            )
        return self._count(self._left(indices, num_short), end == self._end)


class _Turns:
    """Where turns begin in the first messages of a conversation, for any number of them.

    A turn begins with a message of the user. A tool's result is in the turn of its call: it joins all turns
    that begin between the two. What stands before the first word of the user is no turn by itself if it is
    only system text.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        starts: list[int] = []
        made: dict[str, int] = {}
        joined_at: dict[int, int] = {}
        for index, message in enumerate(messages):
            if message.role == "user" and index > 0:
                starts.append(index)
            for call in message.tool_calls:
                made[call.id] = index
            if message.role == "tool" and message.tool_call_id is not None:
                called = made[message.tool_call_id]
                while starts and starts[-1] > called:
                    joined_at[starts.pop()] = index
        self._starts = sorted([*starts, *joined_at])
        # A start is one as long as no result has come that joins its turn to the one before.
        self._joined_at = [joined_at.get(start, len(messages)) for start in self._starts]
        self._num_lead = next(
            (index for index, message in enumerate(messages) if not _is_system(message)), len(messages)
        )

    def starts(self, end: int, *, after: int = -1) -> list[int]:
        """The starts behind ``after`` among the messages before ``end``, which there must be some of."""
        found = [0] if after < 0 else []
        for place in range(bisect_right(self._starts, after), len(self._starts)):
            if self._starts[place] >= end:
                break
            if self._is_start(place, end):
                found.append(self._starts[place])
        return found

    def start_of(self, index: int, end: int) -> int:
        """Where the turn of a message begins."""
        place = bisect_right(self._starts, index) - 1
        while place >= 0 and not self._is_start(place, end):
            place -= 1
        return self._starts[place] if place >= 0 else 0

    def stop_of(self, index: int, end: int) -> int:
        """Where it ends."""
        for place in range(bisect_right(self._starts, index), len(self._starts)):
            if self._starts[place] >= end:
                break
            if self._is_start(place, end):
                return self._starts[place]
        return end

    def _is_start(self, place: int, end: int) -> bool:
        return self._joined_at[place] >= end and self._starts[place] > self._num_lead


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
