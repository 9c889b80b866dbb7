"""The fleet's tier: blocks of many machines' processes in a Mooncake store.

An object is a block's payload and, behind it, the sealed record that the shared tier has in its index: whose
block it is, of which tokens, its checksum, its deadline. The record is compared and the checksum computed on
what was *copied*, so a value that Mooncake gave away, mixed up or received in part is a miss.

Where a value lies, how often, and what goes when memory is full is Mooncake's. A look-up leases what it finds
there for as long as its master says (5 s by default), which is longer than a load waits.

Bytes go between the store and registered memory of this process (*staging*) without a copy inside Mooncake,
several blocks a call. Calls are made in threads of their own and waited for only so long: when the master is
gone one can take seconds, and engines do not wait for that. What is overdue keeps its staging memory until it
ends. After a failure everything is a miss for a while that doubles each time (:class:`Backoff`).
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol, Self, TypeVar

from xxhash import xxh3_128

from ostinato.errors import TierError
from ostinato.ports import Clock

from ..hashing import BlockKey
from ..terms import FREE_FOR_ALL, ID_BYTES, Allowances, Selection, id_to_bytes
from .base import Content, Found, Miss, Outcome, Status, TierCounters, TierUse
from .records import CHECKSUM_BYTES, NEVER_MS, READY, Record, decode, encode
from .slab import CHUNK_BYTES

P2P = "P2PHANDSHAKE"
"""Instead of a metadata server's address: peers tell each other."""

_OK, _ABSENT, _TOO_SMALL, _NO_ROOM = 0, -704, -600, -200
_UNREACHABLE = -800  # this and less: a transfer or a call to the master failed; above, it was an answer
_STAGED_BYTES = 64 << 20
_MIN_STAGED, _MAX_STAGED = 2, 32  # blocks, for each direction
_SETUP_BUFFER_BYTES = 16 << 20  # Mooncake's own; what is registered does not go through it
_CONNECT_PATIENCE_S = 5.0
_LOOKUP_PATIENCE_S = 0.25
_LOAD_PATIENCE_S = 2.0
_STORE_PATIENCE_S = 30.0
_T = TypeVar("_T")


class Store(Protocol):
    """What is called of ``mooncake.store.MooncakeDistributedStore``; 0 or a length is good, less is not."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...
    def unregister_buffer(self, buffer_ptr: int) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_put_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]: ...
    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]: ...
    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int: ...
    def close(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Address:
    """Where a Mooncake store is, and what this process is in it.

    ``master`` and ``host`` (this process, for its peers) are ``HOST:PORT`` and a name or address;
    ``metadata`` the address of a metadata server, such as ``http://HOST:PORT/metadata``. ``lent_bytes`` of
    this process' memory are the store's, and gone with the process.
    """

    master: str
    metadata: str = P2P
    host: str = "127.0.0.1"
    protocol: str = "tcp"
    device: str = ""
    lent_bytes: int = 0


def connect(address: Address) -> Store:
    """A client of the store.

    Raises:
        TierError: the package is not installed or does not load, or the store does not answer.
    """
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise TierError(
            f"Mooncake's client cannot be loaded ({error}): install ostinato[mooncake], and its libraries "
            "(on Debian libibverbs1 librdmacm1 libnuma1 libcurl4 liburing2)"
        ) from error
    refusal = f"no Mooncake store at {address.master}: start mooncake_master there, or correct the address"
    host, _, port = address.master.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _CONNECT_PATIENCE_S):
            pass  # Mooncake itself would try for a minute and a half
    except (OSError, ValueError) as error:
        raise TierError(f"{refusal} ({error})") from error
    store: Any = module.MooncakeDistributedStore()
    code = store.setup(
        address.host,
        address.metadata,
        address.lent_bytes,
        _SETUP_BUFFER_BYTES,
        address.protocol,
        address.device,
        address.master,
    )
    if code != _OK:
        how = f"metadata {address.metadata}, protocol {address.protocol}, error {code}"
        raise TierError(f"{refusal} ({how})")
    client: Store = store
    return client


class Backoff:
    """After a failure nothing is tried for a while: 0.1 s, and twice as long after each further one."""

    FIRST_S, MOST_S = 0.1, 10.0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wait_s = self.FIRST_S
        self._until_s = -inf

    @property
    def is_open(self) -> bool:
        """Whether something may be tried now."""
        return self._clock.monotonic() >= self._until_s

    def failed(self) -> None:
        if self.is_open:  # several calls that were under way fail once
            self._until_s = self._clock.monotonic() + self._wait_s
            self._wait_s = min(self.MOST_S, 2 * self._wait_s)

    def worked(self) -> None:
        """Bytes have come or gone. That a master answers says nothing of its peers."""
        self._wait_s = self.FIRST_S


class _Staging:
    """``num_places`` places of ``place_bytes`` bytes each, registered with the store."""

    def __init__(self, store: Store, place_bytes: int, num_places: int) -> None:
        self.place_bytes = place_bytes
        self._store = store
        memory = mmap.mmap(-1, place_bytes * num_places)
        self._view = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._free = list(range(num_places))
        if store.register_buffer(self.address, len(self._view)) != _OK:
            raise TierError(f"Mooncake does not register {len(self._view)} bytes of memory")

    def take(self, most: int) -> list[int]:
        """Up to so many places."""
        taken, self._free = self._free[:most], self._free[most:]
        return taken

    def give_back(self, places: Sequence[int]) -> None:
        self._free.extend(places)

    def at(self, place: int) -> int:
        return self.address + place * self.place_bytes

    def view(self, place: int) -> memoryview:
        start = place * self.place_bytes
        return self._view[start : start + self.place_bytes]

    def close(self) -> None:
        self._store.unregister_buffer(self.address)


@dataclass(frozen=True, slots=True)
class _Fetched:
    """One block of a batch that was asked for: its place in staging, and which of the call's results."""

    call: Future[list[int]]
    index: int
    place: int


class MooncakeTier:
    """See the module's text. Any number of threads; not to be used on across ``fork``."""

    def __init__(
        self,
        store: Store,
        *,
        slot_bytes: int,
        tokens_per_block: int,
        version: int,
        clock: Clock,
        allowances: Allowances = FREE_FOR_ALL,
    ) -> None:
        """``allowances``: their times hold here; of their sizes only zero does, since Mooncake evicts."""
        assert slot_bytes >= 1, f"slots of {slot_bytes} bytes"
        self.counters = TierCounters()
        self.slot_bytes = slot_bytes
        self.backoff = Backoff(clock)
        self._store = store
        self._version = version
        self._clock = clock
        self._allowances = allowances
        place_bytes = slot_bytes + len(encode(b"", _blank(bytes(4 * tokens_per_block))))
        num_places = max(_MIN_STAGED, min(_MAX_STAGED, _STAGED_BYTES // place_bytes))
        self._up = _Staging(store, place_bytes, num_places)
        self._down = _Staging(store, place_bytes, num_places)
        self._fetched: OrderedDict[bytes, _Fetched] = OrderedDict()
        self._changed = threading.RLock()  # guards staging, what was fetched, and purges
        self._purges: list[Selection] = []
        self._num_removed = 0  # by purges that nobody has counted yet
        self._calls = ThreadPoolExecutor(4, thread_name_prefix="ostinato-mooncake")

    @classmethod
    def open(
        cls,
        address: Address,
        *,
        slot_bytes: int,
        tokens_per_block: int,
        version: int,
        clock: Clock,
        allowances: Allowances = FREE_FOR_ALL,
    ) -> Self:
        """Connects to a store that runs.

        Args:
            slot_bytes: longest payload of a block.
            tokens_per_block: of every block.
            version: of whoever makes the KV; a part of the objects' names.

        Raises:
            TierError: it cannot be had; says what to do.
        """
        return cls(
            connect(address),
            slot_bytes=slot_bytes,
            tokens_per_block=tokens_per_block,
            version=version,
            clock=clock,
            allowances=allowances,
        )

    def close(self) -> None:
        """Waits for calls that are under way, and leaves the store; memory lent to it goes."""
        self._calls.shutdown(wait=True, cancel_futures=True)
        self._up.close()
        self._down.close()
        self._store.close()

    # ------------------------------------------------------------ reading

    def lookup(self, keys: Sequence[BlockKey]) -> Found:
        """How many of ``keys``, a chain from its root, are here; they are leased by Mooncake.

        What is there can be past its deadline or damaged: loading finds that out.
        """
        names = [self._name(key) for key in keys]
        codes = self._ask(lambda: self._store.batch_is_exist(names), _LOOKUP_PATIENCE_S) if names else []
        num_hits = next((i for i, code in enumerate(codes or ()) if code != 1), len(codes or ()))
        return Found(num_hits, Status.HIT if num_hits == len(keys) else Status.MISS)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Does nothing: in Mooncake looking up is using."""

    def expect(self, keys: Sequence[BlockKey]) -> None:
        """Fetches what of ``keys`` finds room in staging, in one call that nobody waits for yet."""
        if not self.backoff.is_open:
            return
        with self._changed:
            wanted = [key for key in keys if key.hash not in self._fetched]
            places = self._up.take(len(wanted))
            while len(places) < len(wanted) and self._drop_oldest({key.hash for key in keys}):
                places += self._up.take(1)
            wanted = wanted[: len(places)]
            if not wanted:
                return
            names = [self._name(key) for key in wanted]
            at = [self._up.at(place) for place in places]
            sizes = [self._up.place_bytes] * len(places)
            call = self._calls.submit(self._store.batch_get_into, names, at, sizes)
            for index, (key, place) in enumerate(zip(wanted, places, strict=True)):
                self._fetched[key.hash] = _Fetched(call, index, place)

    def _drop_oldest(self, but: set[bytes]) -> bool:
        """Gives up a block that was fetched and never asked for."""
        for name, fetched in self._fetched.items():
            if name not in but and fetched.call.done():
                del self._fetched[name]
                self._up.give_back([fetched.place])
                return True
        return False

    def load(self, key: BlockKey, into: memoryview) -> bool:
        """Copies the payload of ``key`` into ``into``, a writable buffer of bytes of exactly its length.

        ``False``: counted in ``counters.misses`` by reason, and ``into`` holds anything.
        """
        miss = self._load(key, into)
        if miss is None:
            self.counters.hits += 1
            return True
        self.counters.misses[miss] += 1
        if miss is Miss.CORRUPT:
            self._forget(key)
        return False

    def _load(self, key: BlockKey, into: memoryview) -> Miss | None:
        fetched = self._fetch(key)
        if fetched is None:
            return Miss.IO_ERROR if not self.backoff.is_open else Miss.PENDING
        try:
            codes = self._wait(fetched.call, _LOAD_PATIENCE_S)
            if codes is None:
                return Miss.IO_ERROR
            return self._take(key, codes[fetched.index], self._up.view(fetched.place), into)
        finally:
            self._free_after(fetched)

    def _fetch(self, key: BlockKey) -> _Fetched | None:
        """What ``expect`` fetched, or the block fetched now, for which room in staging may be waited for."""
        self.expect([key])
        with self._changed:
            fetched = self._fetched.pop(key.hash, None)
            oldest = next(iter(self._fetched.values()), None)
        if fetched is None and oldest is not None and self._wait(oldest.call, _LOAD_PATIENCE_S) is not None:
            self.expect([key])
            with self._changed:
                fetched = self._fetched.pop(key.hash, None)
        return fetched

    def _take(self, key: BlockKey, code: int, place: memoryview, into: memoryview) -> Miss | None:
        """What arrived at ``place`` with this result, checked on its way into ``into``."""
        if code == _ABSENT:
            return Miss.ABSENT
        if code == _TOO_SMALL:
            return Miss.MISMATCH
        if code <= _UNREACHABLE:
            self.backoff.failed()
            return Miss.IO_ERROR
        if code < 0:
            return Miss.PENDING
        payload_bytes = len(into)
        record = decode(key.hash, bytes(place[payload_bytes:code]), 1) if code > payload_bytes else None
        if record is None:
            return Miss.MISMATCH if code != payload_bytes + self._record_bytes(key) else Miss.CORRUPT
        if not record.is_of(key) or record.payload_bytes != payload_bytes or record.version != self._version:
            return Miss.MISMATCH
        if record.expires_ms <= self._now_ms():
            self._forget(key)
            return Miss.ABSENT
        self.backoff.worked()
        checksum = _copy([place[:payload_bytes]], into)
        return None if checksum == record.checksum else Miss.CORRUPT

    # ------------------------------------------------------------ writing

    def store(self, key: BlockKey, parts: Sequence[memoryview]) -> Outcome:
        """Stores a payload given as contiguous pieces of bytes. ``FULL`` also where Mooncake is not there."""
        return self.store_all([(key, parts)])[0]

    def store_all(self, blocks: Sequence[tuple[BlockKey, Sequence[memoryview]]]) -> list[Outcome]:
        """Stores several, in calls of as many as staging has room for."""
        step = max(1, min(_MAX_STAGED, _STAGED_BYTES // self._down.place_bytes))
        outcomes: list[Outcome] = []
        for start in range(0, len(blocks), step):
            outcomes += self._store_batch(blocks[start : start + step])
        for outcome in outcomes:
            self.counters.outcomes[outcome] += 1
        return outcomes

    def _store_batch(self, blocks: Sequence[tuple[BlockKey, Sequence[memoryview]]]) -> list[Outcome]:
        names = [self._name(key) for key, _ in blocks]
        known = self._ask(lambda: self._store.batch_is_exist(names), _STORE_PATIENCE_S)
        if known is None:
            return [Outcome.FULL] * len(blocks)
        outcomes: list[Outcome] = []
        sent: list[tuple[int, int, int]] = []  # which of the blocks, its place, its bytes
        seen: set[bytes] = set()
        for at, (key, parts) in enumerate(blocks):
            if self._is_refused(key):
                outcomes.append(Outcome.REFUSED)
            elif known[at] == 1 or key.hash in seen:
                outcomes.append(Outcome.KNOWN)
            else:
                with self._changed:
                    places = self._down.take(1)
                outcomes.append(Outcome.FULL)
                if places:
                    seen.add(key.hash)
                    sent.append((at, places[0], self._fill(key, parts, self._down.view(places[0]))))
        if sent:
            codes = self._put([names[at] for at, _, _ in sent], sent)
            for (at, _, _), code in zip(sent, codes, strict=True):
                outcomes[at] = self._published(blocks[at][0], code)
        return outcomes

    def _put(self, names: list[str], sent: Sequence[tuple[int, int, int]]) -> list[int]:
        places = [place for _, place, _ in sent]
        at, sizes = [self._down.at(place) for place in places], [size for _, _, size in sent]
        call = self._calls.submit(self._store.batch_put_from, names, at, sizes)
        call.add_done_callback(lambda _: self._give_back(self._down, places))
        codes = self._wait(call, _STORE_PATIENCE_S)
        return [_NO_ROOM] * len(names) if codes is None else codes

    def _published(self, key: BlockKey, code: int) -> Outcome:
        if code == _OK and self._is_refused(key):  # purged while it was written
            self._forget(key)
            return Outcome.REFUSED
        if code == _OK:
            self.backoff.worked()
            return Outcome.STORED
        if code <= _UNREACHABLE:
            self.backoff.failed()
            return Outcome.FULL
        return Outcome.FULL if code == _NO_ROOM else Outcome.PENDING  # somebody else is at it

    def _fill(self, key: BlockKey, parts: Sequence[memoryview], place: memoryview) -> int:
        """Payload and record go to ``place``; returns how many bytes they are."""
        size = sum(len(part) for part in parts)
        assert 0 < size <= self.slot_bytes, f"{size} bytes for a slot of {self.slot_bytes}"
        checksum = _copy(parts, place[:size])
        record = _blank(key.tokens)._replace(
            version=self._version,
            payload_bytes=size,
            checksum=checksum,
            namespace=key.namespace,
            parent=key.parent,
            stored_ms=self._now_ms(),
            expires_ms=self._deadline_ms(key),
            tenant=id_to_bytes(key.origin.tenant),
            model=id_to_bytes(key.origin.model),
            prompt=id_to_bytes(key.origin.prompt),
        )
        data = encode(key.hash, record)
        place[size : size + len(data)] = data
        return size + len(data)

    # ------------------------------------------------------------ dropping

    def drop_stale(self, limit: int) -> int:
        """Nothing: other versions' blocks have other names, and Mooncake evicts what nobody uses."""
        return 0

    def drop_expired(self, limit: int) -> int:
        """Nothing here either: what is past its deadline is dropped when it is met."""
        return 0

    @property
    def epoch(self) -> int:
        """How many purges this process has announced."""
        return len(self._purges)

    def announce(self, selection: Selection) -> None:
        """Removes what is selected, from the whole store, and refuses what of it is on its way from here.

        A prompt or an age cannot be selected in Mooncake: all of the tenant and model goes then.

        Raises:
            TierError: the store did not answer; nothing was removed.
        """
        if self._remove(selection) is None:
            raise TierError("the Mooncake store cannot be purged: it does not answer")
        with self._changed:
            self._purges.append(selection)
            left, self._fetched = self._fetched, OrderedDict()
        for fetched in left.values():
            self._free_after(fetched)

    def finish_purges(self) -> int:
        """Removes what was stored meanwhile. Returns how many blocks purges have removed since last asked."""
        with self._changed:
            selection = self._purges[-1] if self._purges else None
        if selection is not None:
            self._remove(selection)
        num_purged, self._num_removed = self._num_removed, 0
        self.counters.purged += num_purged
        return num_purged

    def _remove(self, selection: Selection) -> int | None:
        tenant, model = (
            f"[0-9a-f]{{{2 * ID_BYTES}}}" if name is None else id_to_bytes(name).hex()
            for name in (selection.tenant, selection.model)
        )
        pattern = f"^ostinato-{self._version}/{tenant}/{model}/"
        call = self._calls.submit(self._store.remove_by_regex, pattern, True)
        removed = self._wait(call, _STORE_PATIENCE_S)
        if removed is None or removed < 0:
            return None
        self._num_removed += removed
        return removed

    def news(self) -> Iterator[Selection]:
        """None: other processes' purges are not heard of through Mooncake."""
        return iter(())

    def contents(self) -> list[Content] | None:
        """``None``: a Mooncake store cannot be listed by its clients."""
        return None

    def use(self) -> TierUse:
        """All zero but the size of a slot: Mooncake's master has metrics of its own."""
        return TierUse(0, self.slot_bytes, 0, 0)

    # ------------------------------------------------------------ inside

    def _name(self, key: BlockKey) -> str:
        tenant, model = id_to_bytes(key.origin.tenant).hex(), id_to_bytes(key.origin.model).hex()
        return f"ostinato-{self._version}/{tenant}/{model}/{key.hash.hex()}"

    def _record_bytes(self, key: BlockKey) -> int:
        return len(encode(key.hash, _blank(key.tokens)))

    def _is_refused(self, key: BlockKey) -> bool:
        origin = key.origin
        if self._allowances.of(origin.tenant).max_blocks == 0:
            return True
        epoch = len(self._purges) if origin.epoch is None else origin.epoch
        return any(purge.takes_space(origin.tenant, origin.model) for purge in self._purges[epoch:])

    def _forget(self, key: BlockKey) -> None:
        """Removes an object that is of no use, leased or not; nobody waits for that."""
        if self.backoff.is_open:
            self._calls.submit(self._store.batch_remove, [self._name(key)], True)

    def _free_after(self, fetched: _Fetched) -> None:
        """The place is free once nothing can arrive there any more."""
        fetched.call.add_done_callback(lambda _: self._give_back(self._up, [fetched.place]))

    def _give_back(self, staging: _Staging, places: Sequence[int]) -> None:
        with self._changed:
            staging.give_back(places)

    def _ask(self, call: Callable[[], list[int]], patience_s: float) -> list[int] | None:
        """The results of a call; ``None`` where they do not come in time, or the master is not there."""
        if not self.backoff.is_open:
            return None
        codes = self._wait(self._calls.submit(call), patience_s)
        if codes is not None and any(code <= _UNREACHABLE for code in codes):
            self.backoff.failed()
            return None
        return codes

    def _wait(self, call: Future[_T], patience_s: float) -> _T | None:
        try:
            return call.result(patience_s)
        except FutureTimeoutError:
            self.backoff.failed()
            return None

    def _now_ms(self) -> int:
        return max(0, int(self._clock.now() * 1000))

    def _deadline_ms(self, key: BlockKey) -> int:
        ttl_s = min(key.origin.ttl_s, self._allowances.of(key.origin.tenant).ttl_s)
        return NEVER_MS if ttl_s == inf else min(NEVER_MS - 1, self._now_ms() + int(ttl_s * 1000))


def _blank(tokens: bytes) -> Record:
    none, nobody = bytes(32), bytes(ID_BYTES)
    return Record(
        READY, 0, 1, 0, 0, 0, bytes(CHECKSUM_BYTES), none, none, 0, NEVER_MS, nobody, nobody, nobody, tokens
    )


def _copy(parts: Sequence[memoryview], into: memoryview) -> bytes:
    """Copies pieces one after the other; returns the XXH3-128 of what arrived."""
    hasher = xxh3_128()
    done = 0
    for part in parts:
        for start in range(0, len(part), CHUNK_BYTES):
            piece = part[start : start + CHUNK_BYTES]
            target = into[done : done + len(piece)]
            target[:] = piece
            hasher.update(target)
            done += len(piece)
    return hasher.digest()
