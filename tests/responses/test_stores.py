"""What every store has to do: the same tests on SQLite in a file, SQLite in memory, and PostgreSQL."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ostinato.kv.terms import Selection, model_id, prompt_id, tenant_id
from ostinato.responses.stores.base import CLOCK_SLACK_MS, Absent, Entry, Limits, Removed, Store, Use
from responses.conftest import MakeStore

SPACE = bytes(32)
ANNA, BOB = tenant_id("anna"), tenant_id("bob")


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def entry(number: int, **fields: Any) -> Entry:
    fields = {"kind": "exact", "space": SPACE, "value": b"answer %d" % number, "stored_ms": 1_000} | fields
    return Entry(key=key(number), **fields)


def found(store: Store, number: int, now_ms: int = 2_000, kind: Any = "exact") -> Entry:
    got = store.get(kind, key(number), now_ms)
    assert isinstance(got, Entry), got
    return got


def reason(store: Store, number: int, now_ms: int = 2_000) -> str:
    got = store.get("exact", key(number), now_ms)
    assert isinstance(got, Absent), got
    return got.reason


def present(store: Store, numbers: range, now_ms: int = 2_000) -> list[int]:
    keys = store.get_many("exact", [key(number) for number in numbers], now_ms)
    return sorted(int.from_bytes(each, "big") for each in keys)


def test_what_goes_in_comes_out(make_store: MakeStore) -> None:
    store = make_store()
    vector = np.linspace(-1, 1, 7, dtype=np.float32)
    given = entry(
        1,
        space=b"s" * 32,
        value=bytes(range(256)) * 40,
        expires_ms=9_000,
        tenant=ANNA,
        model=model_id("m"),
        prompt=prompt_id("p"),
        meta=b"\x00meta\xff",
        vector=vector,
    )
    assert store.put([given, entry(2, value=b"")], 1_000) == 2
    got = found(store, 1)
    assert got == given
    assert got.vector is not None
    assert got.vector.dtype == np.float32
    assert np.array_equal(got.vector, vector)
    assert found(store, 2).value == b""
    assert found(store, 2).vector is None
    assert reason(store, 3) == "absent"
    assert store.get("semantic", key(1), 2_000) == Absent("absent")


def test_a_second_put_replaces(make_store: MakeStore) -> None:
    store = make_store()
    store.put([entry(1, meta=b"learned")], 1_000)
    first = found(store, 1)
    store.put([entry(1, value=b"newer"), entry(1, kind="semantic", value=b"other kind")], 1_500)
    assert found(store, 1).value == b"newer"
    assert found(store, 1).meta == b""
    assert found(store, 1).seq > first.seq
    assert found(store, 1, kind="semantic").value == b"other kind"
    assert {(use.kind, use.num_entries) for use in store.uses()} == {("exact", 1), ("semantic", 1)}


def test_entries_expire(make_store: MakeStore) -> None:
    store = make_store()
    store.put([entry(1, expires_ms=5_000), entry(2)], 1_000)
    assert found(store, 1, 4_999)
    assert reason(store, 1, 5_000) == "expired"
    assert found(store, 2, 1 << 50)
    assert present(store, range(3), 4_999) == [1, 2]
    assert present(store, range(3), 5_000) == [2]
    assert [each.key for each in store.scan("exact", SPACE, 0, 9, 5_000)] == [key(2)]
    store.put([entry(3)], 6_000)  # drops what has expired, also for a clock that goes back
    assert reason(store, 1, 2_000) == "absent"


def test_entries_from_the_future_are_no_use(make_store: MakeStore) -> None:
    store = make_store()
    store.put([entry(1, stored_ms=10_000_000)], 10_000_000)
    assert reason(store, 1, 10_000_000 - CLOCK_SLACK_MS - 1) == "future"
    assert present(store, range(3), 10_000_000 - CLOCK_SLACK_MS - 1) == []
    assert found(store, 1, 10_000_000 - CLOCK_SLACK_MS)


def test_a_clock_put_back_between_two_starts_brings_nothing_back(make_store: MakeStore) -> None:
    first = make_store(now_ms=1_000)
    first.put([entry(1, expires_ms=5_000), entry(2, expires_ms=90_000)], 1_000)
    first.put([entry(3)], 4_000)
    first.close()
    second = make_store(now_ms=50_000)  # entry 1 has expired meanwhile, and is seen by nobody
    second.close()
    third = make_store(now_ms=2_000)
    assert present(third, range(4), 2_000) in ([2, 3], [])  # in memory nothing outlives a store
    third.close()
    make_store(now_ms=60_000).put([entry(4)], 70_000)
    assert 1 not in present(make_store(now_ms=2_000), range(4), 2_000)


def test_limits_hold_and_what_was_used_longest_ago_goes_first(make_store: MakeStore) -> None:
    size = entry(1).size_bytes
    store = make_store(limits=Limits(max_bytes=3 * size))
    for number in range(1, 4):
        store.put([entry(number)], 1_000)
    store.touch([found(store, 1).seq])
    store.put([entry(4)], 1_000)
    assert present(store, range(9)) == [1, 3, 4]
    assert store.put([entry(5, value=b"x" * 4 * size)], 1_000) == 0
    assert present(store, range(9)) == [1, 3, 4]
    assert store.put([entry(6, value=b"x" * (3 * size - 256))], 1_000) == 1
    assert present(store, range(9)) == [6]
    assert store.uses() == [Use("", "", "exact", 1, 3 * size)]


def test_a_tenant_pushes_out_its_own(make_store: MakeStore) -> None:
    size = entry(1).size_bytes
    store = make_store(limits=Limits(tenant_bytes=2 * size, by_tenant={BOB: size}))
    store.put([entry(1, tenant=ANNA), entry(2, tenant=ANNA), entry(3, tenant=BOB)], 1_000)
    assert present(store, range(9)) == [1, 2, 3]
    store.put([entry(4, tenant=BOB), entry(5, tenant=ANNA)], 1_000)
    assert present(store, range(9)) == [2, 4, 5]
    assert {(use.tenant, use.num_entries) for use in store.uses()} == {(ANNA, 2), (BOB, 1)}


def test_what_is_known_of_a_space_is_not_pushed_out(make_store: MakeStore) -> None:
    store = make_store(limits=Limits(max_bytes=entry(1).size_bytes))
    store.put([entry(1, kind="state", meta=b"m" * 5_000)], 1_000)
    store.put([entry(2)], 1_000)
    assert found(store, 1, kind="state").meta == b"m" * 5_000
    assert present(store, range(9)) == [2]


def test_meta_changes_without_losing_an_update(make_store: MakeStore) -> None:
    store = make_store()
    vector = np.ones(3, np.float32)
    store.put([entry(1, meta=b"0", vector=vector)], 1_000)

    def count() -> None:
        for _ in range(20):
            store.update("exact", key(1), lambda meta: b"%d" % (int(meta) + 1), 2_000)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = found(store, 1)
    assert got == entry(1, meta=b"80")
    assert np.array_equal(got.vector, vector)
    assert store.update("exact", key(2), lambda meta: meta, 2_000) is None
    assert store.uses()[0].num_bytes == got.size_bytes


def test_an_update_that_fails_changes_nothing(make_store: MakeStore) -> None:
    store = make_store()
    store.put([entry(1, meta=b"0")], 1_000)

    def fail(meta: bytes) -> bytes:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        store.update("exact", key(1), fail, 2_000)
    assert found(store, 1).meta == b"0"
    store.put([entry(2)], 1_000)
    assert present(store, range(9)) == [1, 2]


def test_scanning_follows_what_is_filed(make_store: MakeStore) -> None:
    store = make_store()
    other = b"o" * 32
    store.put([entry(number) for number in range(1, 6)] + [entry(9, space=other)], 1_000)
    first = store.scan("exact", SPACE, 0, 3, 2_000)
    assert [each.key for each in first] == [key(1), key(2), key(3)]
    store.put([entry(1), entry(6)], 1_000)
    rest = store.scan("exact", SPACE, first[-1].seq, 9, 2_000)
    assert [each.key for each in rest] == [key(4), key(5), key(1), key(6)]
    assert [each.key for each in store.scan("exact", other, 0, 9, 2_000)] == [key(9)]
    assert store.scan("semantic", SPACE, 0, 9, 2_000) == []


def test_what_is_near(make_store: MakeStore) -> None:
    store = make_store()
    random = np.random.default_rng(5)
    vectors = random.normal(size=(40, 16)).astype(np.float32)
    store.put([entry(n, kind="semantic", vector=vectors[n]) for n in range(40)], 1_000)
    store.put([entry(50, kind="semantic", vector=vectors[0], space=b"o" * 32)], 1_000)
    store.put([entry(51, kind="semantic", vector=np.ones(8, np.float32))], 1_000)
    wanted = (vectors[7] + 0.1 * random.normal(size=16)).astype(np.float32)
    near = store.nearest("semantic", SPACE, wanted, 3, 2_000)
    if near is None:
        assert type(store).__name__ == "SqliteStore", "PostgreSQL searches"
        return
    cosines = vectors @ wanted / np.linalg.norm(vectors, axis=1) / np.linalg.norm(wanted)
    best = np.argsort(-cosines)[:3]
    assert [each.entry.key for each in near] == [key(int(n)) for n in best]
    assert np.allclose([each.similarity for each in near], cosines[best], atol=1e-5)


def test_purges_take_what_meets_every_condition(make_store: MakeStore) -> None:
    store = make_store()
    one, two = model_id("one"), model_id("two")
    store.put(
        [
            entry(1, tenant=ANNA, model=one, prompt=prompt_id("p"), stored_ms=1_000),
            entry(2, tenant=ANNA, model=two, stored_ms=5_000),
            entry(3, tenant=BOB, model=one, stored_ms=5_000),
            entry(4, model=one, stored_ms=1_000),
        ],
        5_000,
    )
    size = entry(1).size_bytes
    assert store.purge(Selection(tenant=ANNA, model=one), 9_000) == Removed(1, size)
    assert store.purge(Selection(prompt=prompt_id("p")), 9_000) == Removed()
    assert store.purge(Selection(min_age_s=5), 9_000) == Removed(1, size)
    assert present(store, range(9), 9_000) == [2, 3]
    assert store.purge(Selection(tenant=""), 9_000) == Removed()
    assert store.forget(key(3)) == Removed(1, size)
    assert store.purge(Selection(), 9_000) == Removed(1, size)
    assert store.uses() == []


def test_dropping_is_of_the_row_that_was_seen(make_store: MakeStore) -> None:
    store = make_store()
    store.put([entry(1, expires_ms=2_000), entry(2)], 1_000)
    seen = store.get("exact", key(1), 3_000)
    assert isinstance(seen, Absent)
    assert seen.seq is not None
    store.put([entry(1, value=b"newer", stored_ms=3_000)], 3_000)
    store.drop([seen.seq, 12_345])
    assert found(store, 1, 3_000).value == b"newer"
    store.drop([found(store, 1, 3_000).seq])
    assert reason(store, 1) == "absent"


def test_encrypted_entries_open_with_their_key_alone(make_store: MakeStore) -> None:
    store = make_store(secret="sesame")
    given = entry(1, value=b"confidential", meta=b"secret too", vector=np.ones(4, np.float32))
    store.put([given], 1_000)
    assert found(store, 1) == given
    assert store.update("exact", key(1), lambda meta: meta + b"!", 2_000) == b"secret too!"
    assert found(store, 1) == replace(given, meta=b"secret too!")
    assert store.nearest("exact", SPACE, np.ones(4, np.float32), 1, 2_000) is None
    for other in (make_store(secret="guess"), make_store()):
        got = other.get("exact", key(1), 2_000)
        assert isinstance(got, Absent)
        assert got.reason in ("corrupt", "absent")  # absent: another store's memory
