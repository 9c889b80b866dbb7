"""Processes that use one store and are killed. A program of its own, that can fork: no torch, no threads.

``crash FOLDER ROUNDS SEED``  kills a writer in every round, then looks at the store from a fresh process
``hammer FOLDER SECONDS SEED``  stores, loads and purges until the time is up
``hold FOLDER SLOT_BYTES CAPACITY``  opens, says "open", and waits for its input to end

The last line of output is JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from tier_cases import NAMESPACE, chain, payload, pieces

from ostinato.kv.terms import Selection
from ostinato.kv.tiers.base import Outcome
from ostinato.kv.tiers.shared import SharedTier

SLOT = 192 << 10
SLOTS = 16
CHAINS = [chain(seed, 8) for seed in range(8)] + [
    chain(seed, 8, replace(NAMESPACE, salt="b")) for seed in (0, 1)
]
KEYS = [key for keys in CHAINS for key in keys]
SIZES = {key.hash: SLOT - 1000 * (i % 7) for i, key in enumerate(KEYS)}
PAYLOADS = {key.hash: payload(key, SIZES[key.hash]) for key in KEYS}


def open_store(folder: Path) -> SharedTier:
    return SharedTier.open(folder, slot_bytes=SLOT, capacity_bytes=SLOT * SLOTS)


def check_all(store: SharedTier) -> int:
    """Loads everything; returns how many blocks were there. Wrong bytes end the process."""
    num_hits = 0
    buffer = memoryview(bytearray(SLOT))
    for key in KEYS:
        into = buffer[: SIZES[key.hash]]
        if store.load(key, into):
            assert bytes(into) == PAYLOADS[key.hash], "wrong bytes were served"
            num_hits += 1
    return num_hits


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a forked child must not return into its parent's code
        traceback.print_exc()
        os._exit(1)


def write_forever(folder: Path, seed: int, ready: int) -> None:
    store = open_store(folder)
    rng = random.Random(seed)
    os.write(ready, b"x")
    while True:
        key = rng.choice(KEYS)
        store.store(key, pieces(PAYLOADS[key.hash]))


def verify(folder: Path, number: int, is_alone: bool, results: int) -> None:
    store = open_store(folder)
    assert store.rebuilt is None, f"the store was given up: {store.rebuilt}"
    found = store.check_integrity()
    assert found.num_bad_records == 0, found
    assert found.num_bad_payloads == 0, found
    if is_alone:
        assert found.num_writing == 0, f"abandoned slots were not reclaimed: {found}"
        num_found = sum(store.lookup([key]).num_hits for key in KEYS)
        assert check_all(store) == num_found, "what was found could not be loaded"
        fresh = [chain(1000 + number * SLOTS + i, 1)[0] for i in range(SLOTS)]
        for key in fresh:
            assert store.store(key, [memoryview(b"fresh")]) is Outcome.STORED
        assert store.check_integrity().num_ready == SLOTS, "not every slot can be had"
    else:
        check_all(store)
    os.write(results, f"{store.counters.reclaimed} ".encode())
    store.close()


def crash(folder: Path, rounds: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    results_in, results_out = os.pipe()
    num_alone = 0
    for number in range(rounds):
        ready_in, ready_out = os.pipe()
        is_alone = number % 3 != 0
        writers = [
            fork(partial(write_forever, folder, seed + 7 * number + i, ready_out))
            for i in range(1 if is_alone else 3)
        ]
        for _ in writers:
            os.read(ready_in, 1)
        time.sleep(rng.random() * 0.02)
        os.kill(writers[0], signal.SIGKILL)
        os.waitpid(writers[0], 0)
        verifier = fork(partial(verify, folder, number, is_alone, results_out))
        _, status = os.waitpid(verifier, 0)
        for pid in writers[1:]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert status == 0, f"round {number}: see above"
        os.close(ready_in)
        os.close(ready_out)
        num_alone += is_alone
    reclaimed = sum(int(word) for word in os.read(results_in, 1 << 16).split())
    return {"rounds": rounds, "alone": num_alone, "reclaimed": reclaimed}


def hammer(folder: Path, seconds: float, seed: int) -> dict[str, int]:
    store = open_store(folder)
    rng = random.Random(seed)
    until = time.monotonic() + seconds
    buffer = memoryview(bytearray(SLOT))
    num_stored = num_loaded = 0
    while time.monotonic() < until:
        keys = rng.choice(CHAINS)
        roll = rng.random()
        if roll < 0.45:
            for key in keys[: rng.randint(1, 8)]:
                num_stored += store.store(key, pieces(PAYLOADS[key.hash])) is Outcome.STORED
            store.touch(keys)
        elif roll < 0.995:
            found = store.lookup(keys)
            for key in keys[: found.num_hits]:
                into = buffer[: SIZES[key.hash]]
                if store.load(key, into):
                    assert bytes(into) == PAYLOADS[key.hash], "wrong bytes were served"
                    num_loaded += 1
        else:
            store.purge(Selection(tenant=keys[0].origin.tenant))
    # Others write on meanwhile, so payloads are compared through `load` above, not here.
    found_all = store.check_integrity(payloads=False)
    misses = {miss.value: count for miss, count in store.counters.misses.items()}
    evicted = store.counters.evicted
    store.close()
    assert found_all.num_bad_records == 0, found_all
    return {"stored": num_stored, "loaded": num_loaded, "evicted": evicted, **misses}


def hold(folder: Path, slot_bytes: int, capacity_bytes: int) -> dict[str, int]:
    store = SharedTier.open(folder, slot_bytes=slot_bytes, capacity_bytes=capacity_bytes)
    sys.stdout.write("open\n")
    sys.stdout.flush()
    sys.stdin.read()
    store.close()
    return {}


def main(mode: str, folder: str, first: str, second: str) -> None:
    if mode == "crash":
        result = crash(Path(folder), int(first), int(second))
    elif mode == "hammer":
        result = hammer(Path(folder), float(first), int(second))
    else:
        result = hold(Path(folder), int(first), int(second))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
