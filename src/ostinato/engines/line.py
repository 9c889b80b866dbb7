"""Who is next: fair between tenants, prefixes together, and nobody overtaken for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several

from .sequence import Sequence

# So many of those who are next are looked at for the longest prefix that is in the cache, and so often may
# anybody be overtaken for it.
_WINDOW = 8
_MOST_OVERTAKEN = 4


class Turns:
    """Tenants (salts) take turns, counting what they have running; within one it is the order of arrival."""

    def __init__(self) -> None:
        self._started: dict[str, int] = {}  # when each tenant that is still around was last let in
        self._num_started = 0

    def started(self, sequence: Sequence) -> None:
        self._num_started += 1
        self._started[sequence.namespace.salt] = self._num_started

    def order(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> list[Sequence]:
        """The waiting in the order in which they should start."""
        line = list(waiting)
        taken = Counter(sequence.namespace.salt for sequence in running)
        salts = {sequence.namespace.salt for sequence in line}
        self._started = {s: at for s, at in self._started.items() if s in salts or s in taken}
        if len(salts) < 2:
            return line
        turns = []
        for place, sequence in enumerate(line):
            salt = sequence.namespace.salt
            turns.append((taken[salt], self._started.get(salt, 0), place))
            taken[salt] += 1
        return [line[place] for *_, place in sorted(turns)]


def prefixes_first(line: Several[Sequence], num_found: Callable[[Sequence], int]) -> list[Sequence]:
    """``line`` with the one at its head that has most in the cache, of the first few.

    What is in the cache now may be gone when its turn comes, and what it shares is read once by all who run.
    Whoever has been overtaken often enough is not overtaken again.
    """
    head = list(line[:_WINDOW])
    if len(head) < 2 or head[0].num_overtaken >= _MOST_OVERTAKEN:
        return list(line)
    best = max(head, key=num_found)  # the first of equals
    if best is head[0]:
        return list(line)
    return [best, *(sequence for sequence in line if sequence is not best)]
