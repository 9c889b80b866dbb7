"""No wrong KV is ever served: any interleaving of requests against a simulated arena and the naive index.

The arena is an array of what each slot holds: the number of a (namespace, whole prefix up to this token).
A simulated engine copies and writes as the leases tell it, scribbles over whatever it may scribble over
(free blocks, and the room behind what a lease has written), and after every single step every lease must
still read its own prefix out of its slots, hits as well as what it wrote itself.
"""

from dataclasses import dataclass, field
from math import inf

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from naive_kv import POLICIES, NaiveIndex, as_array

from ostinato.errors import PinRefusedError
from ostinato.events import BlocksEvicted, BlocksStored
from ostinato.kv.hashing import Namespace
from ostinato.kv.lease import Lease
from ostinato.kv.manager import KVManager
from ostinato.kv.terms import Allowance, Allowances, Purged, Selection, Terms, prompt_id
from ostinato.types import SlotCopy

NAMESPACES = {salt: Namespace("w", "t", "c", "l", "d", "r", salt=salt) for salt in "ab"}
GARBAGE = -1
MENU = prompt_id("menu")


@dataclass(eq=False)
class Sequence:
    """A running request as the test's engine knows it."""

    lease: Lease
    salt: str
    tokens: tuple[int, ...]  # whose KV is in the lease's slots
    also_held: set[int]  # on its path but not in its table
    num_committed: int = 0
    copies: list[SlotCopy] = field(default_factory=list)  # handed out, not run yet
    source: set[int] = field(default_factory=set)
    terms: Terms = field(default_factory=Terms)
    is_purged: bool = False

    @property
    def held(self) -> set[int]:
        return set(self.lease.block_ids.tolist()) | self.also_held | self.source


@dataclass(eq=False)
class Pinned:
    id: str
    salt: str
    tokens: tuple[int, ...]
    held: set[int]
    table: list[int]
    terms: Terms
    expires: float


class Hand:
    now_s = 0.0

    def now(self):
        return self.now_s

    def monotonic(self):
        return self.now_s


some_terms = st.builds(Terms, st.sampled_from([inf, inf, 3.0, 8.0]), st.sampled_from(["", "", MENU]))


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 24),
        block_size=st.sampled_from([1, 2, 4, 8]),
        policy=st.sampled_from(POLICIES),
        quotas=st.fixed_dictionaries({salt: st.none() | st.integers(0, 12) for salt in NAMESPACES}),
    )
    def start(self, num_blocks, block_size, policy, quotas):
        self.events = []
        self.clock = Hand()
        self.quotas = quotas
        self.pins = []
        self.manager = KVManager(
            num_blocks,
            block_size,
            policy=policy(),
            observer=self.events.append,
            clock=self.clock,
            allowances=Allowances(
                by_tenant={NAMESPACES[salt].tenant: Allowance(most) for salt, most in quotas.items()}
            ),
            pinned_share=0.5,
        )
        self.naive = NaiveIndex(block_size, policy())
        self.size = block_size
        self.rank = 0
        self.arena = np.full(num_blocks * block_size, GARBAGE)
        self.meanings = {}
        self.known = [()]
        self.sequences = []

    # ---- what the machine knows

    def held(self):
        return set().union(*(holder.held for holder in (*self.sequences, *self.pins)))

    def pinned(self):
        return set().union(*(pin.held for pin in self.pins))

    def used_by(self, salt):
        """Blocks of a tenant: held by its sequences and pins, or kept for it."""
        own = [holder.held for holder in (*self.sequences, *self.pins) if holder.salt == salt]
        kept = [block for node in self.naive.nodes(salt) for block in node.entries.values()]
        return set().union(*own, kept)

    def num_over(self, salt, num_more=0):
        """How many blocks a tenant has to give up to have room for some more."""
        quota = self.quotas[salt]
        return 0 if quota is None else max(0, len(self.used_by(salt)) + num_more - quota)

    def give_up_excess(self, salt):
        self.naive.evict_from(salt, self.num_over(salt), self.held())

    def expire(self):
        for pin in [pin for pin in self.pins if pin.expires <= self.clock.now_s]:
            self.unpin_naively(pin)
        self.naive.expire(self.clock.now_s, self.held())

    def unpin_naively(self, pin):
        self.pins.remove(pin)
        self.naive.unpin(pin.salt, pin.tokens)

    def out_of_reach(self, sequence):
        """Blocks that the only sequence cannot have: others' pins, and what its copies need."""
        table, pinned = sequence.lease.block_ids.tolist(), self.pinned()
        copies = sequence.lease.num_tokens_reserved % self.size != 0
        return len(pinned - set(table)) + (copies and table[-1] in pinned) + len(sequence.source - pinned)

    def free(self):
        return set(range(self.manager.num_blocks)) - self.held() - self.naive.owned()

    def meaning(self, salt, tokens):
        """What the slots of ``tokens`` have to hold: one number for each of its prefixes."""
        prefixes = [(salt, tokens[: i + 1]) for i in range(len(tokens))]
        return [self.meanings.setdefault(prefix, len(self.meanings)) for prefix in prefixes]

    def draw_tokens(self, data, base, max_size=9):
        return base + tuple(data.draw(st.lists(st.integers(0, 1), max_size=max_size)))

    def run_copies(self, sequence):
        for copy in sequence.copies:
            self.arena[copy.target : copy.target + copy.length] = self.arena[
                copy.source : copy.source + copy.length
            ]
        sequence.copies = []

    # ---- rules

    def draw_prompt(self, data):
        base = data.draw(st.sampled_from(self.known[-8:]))
        tokens = self.draw_tokens(data, base[: data.draw(st.integers(0, len(base)))])
        self.known.append(tokens)
        return tokens

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(data=st.data(), salt=st.sampled_from("aaab"), terms=some_terms)
    def acquire(self, data, salt, terms):
        self.start_sequence(salt, self.draw_prompt(data), terms)

    @rule(num_s=st.integers(1, 5))
    def wait(self, num_s):
        self.clock.now_s += num_s

    @rule(data=st.data(), salt=st.sampled_from("aaab"), terms=some_terms, ttl=st.sampled_from([inf, 4.0]))
    def pin(self, data, salt, terms, ttl):
        tokens, now = self.draw_prompt(data), self.clock.now_s
        self.rank += 1
        self.expire()
        found = self.naive.living_path(salt, tokens, now)[1]
        tokens = tokens[: found // self.size * self.size]
        expected = None
        if tokens:
            _, table, others = self.naive.match(salt, tokens, len(tokens), self.rank, now, terms.ttl_s)
            num_new = len({*table, *others} - self.pinned())
            own = set().union(*(pin.held for pin in self.pins if pin.salt == salt))
            quota = self.manager.num_blocks if self.quotas[salt] is None else self.quotas[salt]
            too_many = len(self.pinned()) + num_new > self.manager.num_blocks // 2
            expected = not (too_many or len(own) + num_new > quota)
        try:
            pin = self.manager.pin(NAMESPACES[salt], as_array((*tokens, 7)), ttl_s=ttl, terms=terms)
        except PinRefusedError:
            assert expected is False
            return
        assert expected is (None if pin is None else True)
        if pin is None:
            return
        known = [item for item in self.pins if item.id == pin.id]
        if known:
            known[0].expires = now + ttl
        else:
            held = self.naive.pin(salt, tokens)
            self.pins.append(Pinned(pin.id, salt, tokens, held, table, terms, now + ttl))
        assert (pin.num_tokens, pin.expires_in_s) == (len(tokens), ttl)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        pin = data.draw(st.sampled_from(self.pins))
        for other in [other for other in self.pins if other.expires <= self.clock.now_s]:
            self.unpin_naively(other)
        assert self.manager.unpin(pin.id) == (pin in self.pins)
        if pin in self.pins:
            self.unpin_naively(pin)
            self.give_up_excess(pin.salt)

    @rule(
        salt=st.sampled_from(["a", "b", "b", None]),
        prompt=st.sampled_from([None, None, "", MENU, MENU]),
        min_age=st.sampled_from([0.0, 0.0, 3.0]),
    )
    def purge(self, salt, prompt, min_age):
        selection = Selection(NAMESPACES[salt].tenant if salt else None, None, prompt, min_age)
        salts, now, free = [salt] if salt else list(NAMESPACES), self.clock.now_s, self.free()
        num_cached, num_pins = self.naive.num_tokens(), len(self.pins)

        def is_meant(node):
            return prompt in (None, node.terms.prompt) and now - node.stored >= min_age

        for pin in list(self.pins):
            if pin.salt in salts and any(map(is_meant, self.naive.path(pin.salt, pin.tokens)[0])):
                self.unpin_naively(pin)
        lost = set().union(*(self.naive.purge(name, is_meant) for name in salts))
        for sequence in self.sequences:
            is_named = prompt in (None, sequence.terms.prompt) and min_age <= 0
            if sequence.salt in salts and (is_named or lost & sequence.held):
                sequence.is_purged = True
        assert self.manager.purge(selection) == Purged(
            num_cached - self.naive.num_tokens(),
            len(self.free() - free),
            len(lost & self.held()),
            num_pins - len(self.pins),
        )

    @rule(data=st.data(), salt=st.sampled_from("aaab"), keep=st.booleans(), terms=some_terms)
    def request(self, data, salt, keep, terms):
        """A whole request at once, unless there is no room; it may stay and generate."""
        if len(self.sequences) > 5:
            self.drop(self.sequences[0])
        self.run_request(salt, self.draw_prompt(data), keep, terms)

    def run_request(self, salt, tokens, keep, terms=Terms()):  # noqa: B008 - frozen
        sequence = self.start_sequence(salt, tokens, terms)
        if self.reserve_for(sequence, len(tokens), 0) and len(tokens) > len(sequence.tokens):
            self.write_for(sequence, tokens)
            self.commit_for(sequence, len(tokens))
        if not keep:
            self.drop(sequence)

    @precondition(lambda self: any(s.num_committed for s in self.sequences))
    @rule(data=st.data(), others=st.lists(st.integers(0, 1), min_size=1, max_size=4), keep=st.booleans())
    def overtake(self, data, others, keep):
        """Others part from a running sequence, and go on where it stands; it follows them for a while."""
        sequence = data.draw(st.sampled_from([s for s in self.sequences if s.num_committed]))
        tokens = sequence.tokens[: sequence.num_committed]
        cut = data.draw(st.integers(0, len(tokens) - 1))
        self.run_request(sequence.salt, (*tokens[:cut], 1 - tokens[cut]), keep)
        self.run_request(sequence.salt, (*tokens, *others), keep)
        follow = (*tokens, *others[: data.draw(st.integers(0, len(others)))], 2)
        start = len(sequence.tokens)
        if follow[:start] == sequence.tokens[: len(follow)] and self.reserve_for(sequence, len(follow), 0):
            if len(follow) > start:
                self.write_for(sequence, follow)
            self.commit_for(sequence, len(sequence.tokens))

    def drop(self, sequence):
        self.sequences.remove(sequence)
        sequence.lease.release()
        self.give_up_excess(sequence.salt)

    def start_sequence(self, salt, tokens, terms=Terms()):  # noqa: B008 - frozen
        prompt = as_array(tokens)
        self.manager.pins()  # those whose time is up end here
        for pin in [pin for pin in self.pins if pin.expires <= self.clock.now_s]:
            self.unpin_naively(pin)
        peeked = self.manager.peek(NAMESPACES[salt], prompt)
        lease = self.manager.acquire(NAMESPACES[salt], prompt, terms=terms)
        self.rank += 1
        self.expire()
        limit, now = max(0, len(tokens) - 1), self.clock.now_s
        hit, table, others = self.naive.match(salt, tokens, limit, self.rank, now, terms.ttl_s)
        assert lease.prefix_len == peeked == hit
        assert lease.block_ids.tolist() == table
        self.sequences.append(Sequence(lease, salt, tokens[:hit], others, num_committed=hit, terms=terms))
        return self.sequences[-1]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_more=st.integers(0, 12), num_spare=st.integers(0, 6))
    def reserve(self, data, num_more, num_spare):
        sequence = data.draw(st.sampled_from(self.sequences))
        self.reserve_for(sequence, len(sequence.tokens) + num_more, num_spare)

    def reserve_for(self, sequence, num_tokens, num_spare):
        lease, size = sequence.lease, self.size
        table, free, held = lease.block_ids.tolist(), self.free(), self.held()
        copies = lease.num_tokens_reserved % size != 0 and num_tokens > lease.num_tokens_reserved
        num_missing = max(0, -(-num_tokens // size) - len(table) + copies)
        num_evictable = len(self.naive.owned() - held)
        num_events, num_cached = len(self.events), self.naive.num_tokens()
        num_over = self.num_over(sequence.salt, num_missing)

        fits = num_missing <= len(free) + num_evictable
        takes_over = (
            not fits
            and len(self.sequences) == 1
            and -(-num_tokens // size) + self.out_of_reach(sequence) <= self.manager.num_blocks
        )
        assert lease.reserve(num_tokens, spare_tokens=num_spare) == (fits or takes_over)
        if not (fits or takes_over):
            assert lease.block_ids.tolist() == table
            assert len(self.events) == num_events
            return False
        if takes_over:
            self.naive.roots.clear()
            for pin in self.pins:
                self.naive.insert(
                    pin.salt, pin.tokens, pin.table, self.rank, self.clock.now_s, pin.terms.ttl_s,
                    pin.terms,
                )  # fmt: skip
                pin.held = self.naive.pin(pin.salt, pin.tokens)
            sequence.also_held = set()
            copies = bool(copies and table[-1] in self.pinned())
        elif num_missing:
            self.naive.evict_from(sequence.salt, num_over, held)
            num_free = self.manager.num_blocks - len(held | self.naive.owned())
            self.naive.evict(max(0, num_missing - num_free), held)
        said = self.events[num_events:]
        assert all(isinstance(event, BlocksEvicted) for event in said)
        assert sum(event.num_tokens for event in said) == num_cached - self.naive.num_tokens()

        grown = lease.block_ids.tolist()
        assert lease.num_tokens_reserved == len(grown) * size >= num_tokens or num_missing == 0
        assert len(grown) - len(table) + copies <= num_missing + -(-num_spare // size) or takes_over
        taken = lease.take_copies()
        if copies:
            offset = len(sequence.tokens) % size
            assert taken == (SlotCopy(table[-1] * size, grown[len(table) - 1] * size, offset),)
            sequence.copies, sequence.source = list(taken), {table[-1]}
            table.pop()
        else:
            assert taken == ()
        assert grown[: len(table)] == table
        return True

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_spare=st.integers(0, 1))
    def fill(self, data, num_spare):
        """Everybody else is preempted: the one that is left can have the whole arena."""
        sequence = data.draw(st.sampled_from(self.sequences))
        for other in [other for other in self.sequences if other is not sequence]:
            self.drop(other)
        everything = self.manager.num_blocks * self.size
        self.reserve_for(sequence, everything - data.draw(st.integers(0, everything)), num_spare)
        missing = self.out_of_reach(sequence)
        assert self.reserve_for(sequence, everything, num_spare) == (not missing)
        assert self.reserve_for(sequence, everything - missing * self.size, num_spare)
        assert not self.reserve_for(sequence, everything + 1, num_spare)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def write(self, data):
        """Goes on, where that is possible along what somebody else has written already."""
        sequence = data.draw(st.sampled_from(self.sequences))
        start = len(sequence.tokens)
        longer = [known for known in self.known if known[:start] == sequence.tokens and len(known) > start]
        base = data.draw(st.sampled_from(longer)) if longer else sequence.tokens
        base = base[: data.draw(st.integers(start, len(base)))]
        tokens = self.draw_tokens(data, base, max_size=3)
        if len(tokens) > start and self.reserve_for(sequence, len(tokens), 0):
            self.known.append(tokens)
            self.write_for(sequence, tokens)
            if data.draw(st.booleans()):
                self.commit_for(sequence, len(tokens))

    def write_for(self, sequence, tokens):
        """A step of the engine: copies first, then rows, then rubbish behind them."""
        lease, start = sequence.lease, len(sequence.tokens)
        self.run_copies(sequence)
        slots = lease.slots(start, lease.num_tokens_reserved)
        self.arena[slots] = GARBAGE
        self.arena[slots[: len(tokens) - start]] = self.meaning(sequence.salt, tokens)[start:]
        sequence.tokens = tokens

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def commit(self, data):
        sequence = data.draw(st.sampled_from(self.sequences))
        self.commit_for(sequence, data.draw(st.integers(sequence.num_committed, len(sequence.tokens))))

    def commit_for(self, sequence, end):
        lease, tokens = sequence.lease, sequence.tokens[:end]
        table = lease.block_ids.tolist()
        owned = self.naive.owned()
        num_events = len(self.events)
        if end <= lease.prefix_len:  # its copy may not have run
            assert lease.commit(as_array(tokens)) == 0
            return
        assert not sequence.copies
        num_new = lease.commit(as_array(tokens))
        self.rank += 1
        if sequence.is_purged:
            assert num_new == 0
            sequence.num_committed, sequence.source = end, set()
            return
        expected, path = self.naive.insert(
            sequence.salt, tokens, table, self.rank, self.clock.now_s, sequence.terms.ttl_s, sequence.terms
        )
        assert num_new == expected
        if num_new:
            sequence.also_held |= path - set(table)
            assert self.events[num_events:] == [BlocksStored(num_new, len(self.naive.owned() - owned))]
        else:
            assert len(self.events) == num_events
        sequence.num_committed, sequence.source = end, set()
        found = self.manager.peek(NAMESPACES[sequence.salt], as_array((*tokens, 7)))
        assert found == end, "what is committed is found"

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), again=st.booleans())
    def release(self, data, again):
        """Finished, cancelled, or preempted: then the same tokens come back at once."""
        sequence = data.draw(st.sampled_from(self.sequences))
        self.drop(sequence)
        if again:
            self.start_sequence(sequence.salt, sequence.tokens)
        sequence.lease.release()

    @precondition(lambda self: self.naive.num_tokens() > 4 * self.manager.num_blocks * self.size // 5)
    @rule(salt=st.sampled_from(["a", "b", None]))
    def clear(self, salt):
        held = self.held()
        if salt is None:
            expected = self.naive.evict(len(self.naive.owned() - held), held)
        else:
            expected = self.naive.clear(salt, held)
        assert self.manager.clear(NAMESPACES[salt] if salt else None) == expected

    # ---- what must always be so

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        manager.check_integrity()
        held, owned = self.held(), self.naive.owned()
        assert manager.num_held_blocks == len(held)
        assert manager.num_pinned_blocks == len(self.pinned())
        used = {use.tenant: use.num_blocks for use in manager.tenants()}
        for salt, namespace in NAMESPACES.items():
            assert used.get(namespace.tenant, 0) == len(self.used_by(salt))
            assert all(sequence.lease.is_purged == sequence.is_purged for sequence in self.sequences)
        assert manager.num_evictable_blocks == len(owned - held)
        assert manager.num_free_blocks == len(self.free())
        assert manager.num_cached_tokens == self.naive.num_tokens()
        assert len(held | owned) <= manager.num_blocks

    @invariant()
    def everybody_reads_their_own(self):
        if not hasattr(self, "manager"):
            return
        blocks = self.arena.reshape(-1, self.size)
        blocks[sorted(self.free())] = GARBAGE
        for sequence in self.sequences:
            lease, tokens = sequence.lease, sequence.tokens
            slots = lease.slots(0, len(tokens))
            for copy in sequence.copies:  # as it will read once the copy has run
                slots[-copy.length :] = range(copy.source, copy.source + copy.length)
            assert self.arena[slots].tolist() == self.meaning(sequence.salt, tokens)

    @invariant()
    def the_cache_holds_what_it_says(self):
        """Every path of the index, put together and read back, without waiting for a look-up."""
        if not hasattr(self, "manager"):
            return
        for salt in NAMESPACES:
            for node in self.naive.nodes(salt):
                path = [*reversed(node.ancestors()), node]
                tokens = tuple(token for part in path for token in part.tokens)
                table, _ = self.naive.table(path, len(tokens))
                read = self.arena.reshape(-1, self.size)[table].ravel()[: len(tokens)]
                assert read.tolist() == self.meaning(salt, tokens)

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for sequence in self.sequences:
            sequence.lease.release()
        for pin in self.pins:
            self.manager.unpin(pin.id)
        assert self.manager.num_held_blocks == 0
        self.manager.clear()
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert self.manager.num_cached_tokens == 0
        self.manager.check_integrity()


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
