"""Many processes hammer one shared tier: ``python tests/kv/tiers/soak.py FOLDER --seconds 300``.

Each stores, loads, purges and lets expire, for tenants with and without quotas; some are killed in the middle
of it and started again. Looked at, all the time: every byte that is served is the right one; everybody gets
on (a process that does nothing for too long would be a deadlock); slots, file and quotas are never exceeded.
At the end, the books: every slot accounted for, nothing half-written, nothing damaged.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from tier_cases import NAMESPACE, chain, payload, pieces

from ostinato.kv.hashing import BlockKey
from ostinato.kv.terms import Allowance, Allowances, Origin, Selection, id_to_bytes
from ostinato.kv.tiers.base import Miss
from ostinato.kv.tiers.shared import SharedTier
from ostinato.ports import SystemClock

SLOT = 64 << 10
SLOTS = 400
CHAIN = 12
TENANTS = [NAMESPACE.with_salt(f"tenant {number}") for number in range(6)]
QUOTAS = {TENANTS[0].tenant: 40, TENANTS[1].tenant: 5, TENANTS[2].tenant: 0}
STALLED_S = 60.0
KILL_EVERY_S = 2.0


def open_store(folder: Path) -> SharedTier:
    by_tenant = {tenant: Allowance(most) for tenant, most in QUOTAS.items()}
    return SharedTier.open(
        folder,
        slot_bytes=SLOT,
        capacity_bytes=SLOT * SLOTS,
        clock=SystemClock(),
        allowances=Allowances(by_tenant=by_tenant),
    )


def keys_of(number: int, seed: int, store: SharedTier) -> list[BlockKey]:
    """A chain of one tenant; every third lives for three seconds."""
    space = TENANTS[number]
    ttl_s = 3.0 if seed % 3 == 0 else float("inf")
    origin = Origin(space.tenant, ttl_s=ttl_s, epoch=store.epoch)
    return [replace(key, origin=origin) for key in chain(seed, CHAIN, space)]


def size_of(key: BlockKey) -> int:
    return SLOT - 8 * key.hash[0]


def hammer(folder: Path, seed: int, seconds: float) -> dict[str, int]:
    """One process' work; a line after every round says that it gets on."""
    store, rng = open_store(folder), random.Random(seed)
    buffer = memoryview(bytearray(SLOT))
    counts = {"rounds": 0, "stored": 0, "loaded": 0, "purged": 0}
    until_s, said_s = time.monotonic() + seconds, 0.0
    while time.monotonic() < until_s:
        counts["rounds"] += 1
        for _ in store.news():
            pass
        keys = keys_of(rng.randrange(len(TENANTS)), rng.randrange(40), store)
        roll = rng.random()
        if roll < 0.35:
            batch = [(key, pieces(payload(key, size_of(key)))) for key in keys[: rng.randint(1, CHAIN)]]
            counts["stored"] += sum(outcome.value == "stored" for outcome in store.store_all(batch))
            store.touch(keys)
        elif roll < 0.97:
            for key in keys[: store.lookup(keys).num_hits]:
                into = buffer[: size_of(key)]
                if store.load(key, into):
                    assert bytes(into) == payload(key, size_of(key)), "wrong bytes were served"
                    counts["loaded"] += 1
        elif roll < 0.985:
            store.drop_expired(rng.randint(1, 64))
        else:
            tenant = rng.choice(TENANTS).tenant
            selection = Selection(tenant=tenant, min_age_s=rng.choice((0.0, 2.0)))
            counts["purged"] += store.purge(selection)
        if time.monotonic() - said_s > 0.5:
            said_s = time.monotonic()
            sys.stdout.write(json.dumps(counts) + "\n")
            sys.stdout.flush()
    counts["damaged"] = sum(store.counters.misses[m] for m in (Miss.CORRUPT, Miss.MISMATCH, Miss.IO_ERROR))
    store.close()
    return counts


class Worker:
    """A hammering process, watched."""

    def __init__(self, folder: Path, seed: int, seconds: float) -> None:
        command = [sys.executable, __file__, str(folder), "--seed", str(seed), "--seconds", str(seconds)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self._output = self.process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._unread = b""
        self._heard_s = time.monotonic()
        self.counts: dict[str, int] = {}

    def look(self) -> bool:
        """Whether it still runs. Asserts that it gets on and has nothing to complain of."""
        is_running = self.process.poll() is None
        *lines, self._unread = (self._unread + (self._output.read() or b"")).split(b"\n")
        if lines:
            self._heard_s = time.monotonic()
            self.counts = json.loads(lines[-1])
        assert time.monotonic() - self._heard_s < STALLED_S, f"stalled after {self.counts}"
        if not is_running:
            assert self.process.returncode == 0, "a process failed: see above"
            self._output.close()
        return is_running

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._output.close()


def soak(folder: Path, num_processes: int, seconds: float, seed: int) -> dict[str, int]:
    """Runs it; returns what was done altogether. The watcher opens the store as one process more."""
    rng, started_s = random.Random(seed), time.monotonic()
    watch, num_killed, num_looks = open_store(folder), 0, 0
    quotas = [(id_to_bytes(tenant), most) for tenant, most in QUOTAS.items()]
    total: dict[str, int] = {}
    killed_s = started_s
    workers: list[Worker] = []
    try:
        workers += [Worker(folder, seed + number, seconds) for number in range(num_processes)]
        while workers:
            time.sleep(0.1)
            num_looks += 1
            use = watch.use()
            assert use.num_blocks <= SLOTS, f"{use.num_blocks} blocks in {SLOTS} slots"
            assert (folder / "slab").stat().st_size == SLOT * SLOTS, "the slab has grown"
            with watch._reading() as txn:
                for tenant, most in quotas:
                    assert watch._books.ledger.num_slots(txn, tenant) <= most, "a quota is exceeded"
            left_s = seconds - (time.monotonic() - started_s)
            if time.monotonic() - killed_s > KILL_EVERY_S and left_s > 2 * KILL_EVERY_S:
                killed_s = time.monotonic()
                workers.pop(rng.randrange(len(workers))).kill()
                num_killed += 1
                workers.append(Worker(folder, seed + 100 + num_killed, left_s))
            for worker in [worker for worker in workers if not worker.look()]:
                workers.remove(worker)
                for name, count in worker.counts.items():
                    total[name] = total.get(name, 0) + count
    finally:
        for worker in workers:
            worker.kill()
    watch.close()
    store = open_store(folder)
    found = store.check_integrity()
    assert found.num_writing == found.num_bad_payloads == found.num_bad_records == 0, found
    assert store.use().num_blocks == found.num_ready
    store.close()
    return total | {"killed": num_killed, "looks": num_looks, "ready": found.num_ready}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, help="be one of the hammering processes")
    given = parser.parse_args()
    if given.seed is not None:
        result = hammer(given.folder, given.seed, given.seconds)
    else:
        result = soak(given.folder, given.processes, given.seconds, seed=1)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
