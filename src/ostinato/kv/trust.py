"""Whether those who say that a sequence is over are right, lately."""

from __future__ import annotations

from collections import OrderedDict, deque

from ostinato.types import TokenArray

from .hashing import Namespace
from .policies.history import Names

_SPAN = 2048  # words remembered of a tenant
_SETTLES_AFTER = 512  # more words: what has not gone on by then counts as right
_MIN_WRONG = 12  # that it takes to lose trust
_MAX_WRONG_SHARE = 0.125
_MAX_TENANTS = 64


class _Record:
    """The last words of one tenant, oldest first, by the names of the sequences; the value: it went on."""

    __slots__ = ("num_wrong", "order", "went_on")

    def __init__(self) -> None:
        self.order: deque[int] = deque()
        self.went_on: dict[int, bool] = {}
        self.num_wrong = 0

    def add(self, name: int) -> None:
        if name in self.went_on:
            self.order.remove(name)
            self.num_wrong -= self.went_on.pop(name)
        self.order.append(name)
        self.went_on[name] = False
        if len(self.order) > _SPAN:
            self.num_wrong -= self.went_on.pop(self.order.popleft())

    @property
    def is_good(self) -> bool:
        # Wrong words show early, right ones only by and by.
        num_settled = max(0, len(self.order) - _SETTLES_AFTER) + self.num_wrong
        return self.num_wrong < _MIN_WRONG or self.num_wrong <= _MAX_WRONG_SHARE * num_settled


class Trust:
    """Remembers what tenants said to be over, and notices when it goes on after all.

    For rules that obey. A tenant is believed while at most an eighth of its words proved wrong, and a few
    are believed before that. At most 2048 words of 64 tenants are kept, some 150 bytes each; the tenant
    not heard of for longest is forgotten first.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def said(self, namespace: Namespace, tokens: TokenArray) -> bool:
        """A tenant says that this sequence is over; whether that is to be believed."""
        record = self._records.setdefault(namespace.tenant, _Record())
        self._records.move_to_end(namespace.tenant)
        if len(self._records) > _MAX_TENANTS:
            self._records.popitem(last=False)
        is_believed = record.is_good
        names = self._names(namespace, tokens)
        if names.keys:
            # Not by its very end: who goes on from all but that goes on from it.
            record.add(names.keys[-2] if len(names.keys) > 1 else names.keys[-1])
        return is_believed

    def asked(self, namespace: Namespace, tokens: TokenArray) -> None:
        """This is asked for now: whatever was said of its beginnings was wrong."""
        record = self._records.get(namespace.tenant)
        if record is None:
            return
        for name in self._names(namespace, tokens).keys:
            if record.went_on.get(name) is False:
                record.went_on[name] = True
                record.num_wrong += 1

    def _names(self, namespace: Namespace, tokens: TokenArray) -> Names:
        names = Names(namespace.digest)
        names.extend(tokens.tobytes(), self._block_tokens)
        return names
