"""The semantic cache over real stores and the real embedder: what it serves, to whom, and what it learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ostinato.gateway.answers import PassedForm
from ostinato.kv.terms import Selection, tenant_id
from ostinato.responses.embed.minilm import MiniLM
from ostinato.responses.likeness.judge import Judge
from ostinato.responses.semantic import Match, Question, Semantic, SemanticSettings, Sought
from ostinato.responses.stores.base import Limits, Store
from ostinato.responses.stores.envelope import Envelope
from ostinato.responses.stores.sqlite import SqliteStore
from ostinato.types import CacheControl

pytestmark = pytest.mark.model

SPACE, OTHER_SPACE = bytes(32), bytes([1]) * 32
ANNA = tenant_id("anna")


@dataclass
class FixedClock:
    now_s: float = 1_000_000.0

    def now(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def judge(embedder_path: Path) -> Judge:
    return Judge(MiniLM(embedder_path, "b3:test"), budget=0.01)


@pytest.fixture
def store(make_store: Callable[..., Store]) -> Store:
    return make_store()


MakeCache = Callable[..., Semantic[bytes]]


@pytest.fixture
def make(judge: Judge, store: Store) -> MakeCache:
    def build(clock: FixedClock | None = None, chance: float = 0.5, **options: Any) -> Semantic[bytes]:
        return Semantic(
            options.pop("store", store),
            PassedForm(),
            options.pop("judge", judge),
            clock or FixedClock(),
            text_of=lambda pieces: pieces[1].decode(),
            chance=lambda: chance,
            **options,
        )

    return build


def question(text: str, *, space: bytes = SPACE, earlier: tuple[str, ...] = (), **more: Any) -> Question:
    key = sha256(repr((text, space, earlier)).encode()).digest()
    return Question(key, space, text, earlier, **{"tenant": ANNA} | more)


def keep(cache: Semantic[bytes], asked: Question, answer: bytes = b"an answer") -> None:
    found = cache.find(replace(asked, control=replace(asked.control, read=False)))
    assert isinstance(found, Sought)
    cache.file(found, [b"text/plain", answer])
    assert cache.clerk.flush(10)


def reason(found: Match[bytes] | Sought[bytes]) -> str:
    return "served" if isinstance(found, Match) else found.reason


ASKED = "How do I turn on two-factor authentication?"
SAME = "How can I enable two-factor authentication?"
TRAP = "How can I disable two-factor authentication?"


def test_it_serves_the_same_and_refuses_the_opposite(make: MakeCache) -> None:
    cache = make()
    keep(cache, question(ASKED))
    found = cache.find(question(SAME))
    assert isinstance(found, Match)
    assert found.pieces == [b"text/plain", b"an answer"]
    assert found.matched == ASKED
    details = found.details()
    assert 0.5 < details["similarity"] <= 1
    assert details["matched"] == found.entry_id
    refused = cache.find(question(TRAP))
    assert isinstance(refused, Sought)
    assert refused.reason.startswith("antonym")
    assert reason(cache.find(question("What is the capital of Peru?"))) == "nothing near"


def test_spaces_do_not_see_one_another(make: MakeCache) -> None:
    cache = make()
    keep(cache, question(ASKED))
    assert reason(cache.find(question(SAME, space=OTHER_SPACE))) == "nothing near"


def test_what_bypasses_it(make: MakeCache) -> None:
    cache = make()
    for text in ("What dose of ibuprofen may I take?", "x" * 2000, "  "):
        asked = question(text)
        found = cache.find(asked)
        assert isinstance(found, Sought)
        cache.file(found, [b"text/plain", b"no"])
    assert cache.clerk.flush(10)
    assert reason(cache.find(question("What dose of ibuprofen may I take?"))).startswith("high risk")
    keep(cache, question(ASKED))
    assert reason(cache.find(question(SAME, is_marked=True))) == "marked"
    assert reason(cache.find(question(SAME, control=CacheControl(read=False)))) == "asked for a new one"


def test_age_and_expiry(make: MakeCache) -> None:
    clock = FixedClock()
    cache = make(clock)
    keep(cache, question(ASKED, ttl_s=100))
    clock.now_s += 50
    assert reason(cache.find(question(SAME, control=CacheControl(max_age_s=10)))) == "too old"
    found = cache.find(question(SAME))
    assert isinstance(found, Match)
    assert found.age_s == pytest.approx(50, abs=0.01)
    clock.now_s += 60
    assert reason(cache.find(question(SAME))) == "nothing near"


def test_questions_of_the_moment_are_not_answered_from_the_past(make: MakeCache) -> None:
    clock = FixedClock()
    cache = make(clock)
    keep(cache, question("What is the latest version of Python?"))
    asked = question("What's the latest version of Python?")
    assert reason(cache.find(asked)) == "served"
    clock.now_s += 3600
    assert reason(cache.find(asked)).startswith("freshness")


def test_purged_and_forgotten_answers_are_gone_at_once(make: MakeCache, store: Store) -> None:
    cache = make()
    keep(cache, question(ASKED))
    found = cache.find(question(SAME))
    assert isinstance(found, Match)
    assert store.forget(question(ASKED).key).num_entries == 1
    assert reason(cache.find(question(SAME))) == "nothing near"
    keep(cache, question(ASKED))
    store.purge(Selection(tenant=ANNA), 2_000_000_000)
    assert reason(cache.find(question(SAME))) == "nothing near"
    pending = cache.find(question(ASKED))  # computed while the next purge runs: not kept
    store.purge(Selection(tenant=ANNA), 2_000_000_000)
    assert isinstance(pending, Sought)
    cache.file(pending, [b"text/plain", b"late"])
    assert cache.clerk.flush(10)
    assert reason(cache.find(question(SAME))) == "nothing near"


def test_another_process_sees_what_was_filed(make: MakeCache) -> None:
    one, other = make(), make()
    assert reason(other.find(question(SAME))) == "nothing near"
    keep(one, question(ASKED))
    assert reason(other.find(question(SAME))) == "served"


def test_earlier_turns_are_judged_where_they_are_not_part_of_the_space(make: MakeCache) -> None:
    cache = make()
    passport = ("I want to renew my passport.", "You need a photo and the old passport.")
    keep(cache, question("How long does it take?", earlier=passport))
    same = ("I'd like to renew my passport.", "You need a photo and the old passport.")
    assert reason(cache.find(question("How long does it take?", earlier=same))) == "served"
    licence = ("I want to renew my driving licence.", "You need a photo and the old licence.")
    assert "turn" in reason(cache.find(question("How long does it take?", earlier=licence)))
    assert "turns" in reason(cache.find(question("How long does it take?")))


def test_checks_compare_and_switch_off_what_is_wrong(make: MakeCache) -> None:
    cache = make(chance=0.0, settings=SemanticSettings(check_share=0.5))
    keep(cache, question(ASKED), b"Open the settings and choose Security.")
    for at in range(40):
        found = cache.find(question(SAME))
        assert isinstance(found, Sought)
        if found.reason == "switched off":
            break
        keep(cache, question(ASKED), b"Open the settings and choose Security.")  # a fresh entry
        cache.file(found, [b"text/plain", b"Bananas are 12 of the yellow fruits in Kenya."])
        assert cache.clerk.flush(10), at
    record = cache.record(SPACE)
    assert record.num_wrong >= 1
    assert record.stricter > 0
    if record.is_off:
        cache.reset(SPACE)
        assert not cache.record(SPACE).is_off


def test_right_checks_change_nothing(make: MakeCache) -> None:
    cache = make(chance=0.0, settings=SemanticSettings(check_share=0.5))
    keep(cache, question(ASKED), b"Open the settings and choose Security.")
    found = cache.find(question(SAME))
    assert isinstance(found, Sought)
    assert found.reason == "to be checked"
    cache.file(found, [b"text/plain", b"Open  the settings and choose Security."])
    assert cache.clerk.flush(10)
    record = cache.record(SPACE)
    assert (record.num_checks, record.num_wrong, record.is_off) == (1, 0, False)


def test_bad_feedback_takes_an_answer_out_and_only_its_tenant_may_give_it(make: MakeCache) -> None:
    cache = make()
    keep(cache, question(ASKED))
    found = cache.find(question(SAME))
    assert isinstance(found, Match)
    assert not cache.feedback(found.entry_id, False, tenant_id("bob"))
    assert not cache.feedback("answer-" + "00" * 32, False, ANNA)
    assert not cache.feedback("nonsense", False, ANNA)
    assert reason(cache.find(question(SAME))) == "served"
    assert cache.feedback(found.entry_id, False, ANNA)
    assert reason(cache.find(question(SAME))) != "served"


@dataclass
class Second:
    says: bool | Exception
    num_asked: int = 0

    def is_same(self, one: str, other: str) -> bool:
        self.num_asked += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


@pytest.mark.parametrize("says", [True, False, RuntimeError("down")])
def test_a_second_judge_is_asked_in_doubt_and_its_failure_is_a_no(
    make: MakeCache, says: bool | Exception
) -> None:
    second = Second(says)
    cache = make(second=second, settings=SemanticSettings(uncertain=100.0))
    keep(cache, question(ASKED))
    found = cache.find(question(SAME))
    assert reason(found) == ("served" if says is True else "second judge")
    assert second.num_asked == 1
    assert cache.find(question(TRAP))
    assert second.num_asked == 1  # guards are not overruled


def test_damaged_entries_are_nobodys_answer(make: MakeCache, store: Store) -> None:
    cache = make()
    keep(cache, question(ASKED))
    entry = store.get("semantic", question(ASKED).key, 1_000_000_000)
    assert not isinstance(entry, str)
    for value in (b"", b"\xff\xff\xff\xff", b"\x02\0\0\0[]", b'\x0d\0\0\0["", [1, null]]'):
        store.put([replace(entry, value=value)], 1_000_000_000)  # type: ignore[type-var]
        assert isinstance(cache.find(question(SAME)), Sought)


def test_indexes_are_written_down_and_made_anew_when_missing(judge: Judge, tmp_path: Path) -> None:
    def opened() -> tuple[SqliteStore, Semantic[bytes]]:
        store = SqliteStore(tmp_path / "a.db", limits=Limits(), now_ms=1)
        cache = Semantic(
            store,
            PassedForm(),
            judge,
            FixedClock(),
            text_of=lambda pieces: "",
            chance=lambda: 0.5,
            folder=tmp_path / "indexes",
        )
        return store, cache

    for _ in range(3):
        store, cache = opened()
        keep(cache, question(ASKED))
        assert reason(cache.find(question(SAME))) == "served"
        cache.close()
        store.close()
        for path in (tmp_path / "indexes").glob("*"):
            path.unlink()


def test_encrypted_stores_serve_as_well(judge: Judge, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    store = SqliteStore(tmp_path / "a.db", limits=Limits(), now_ms=1, envelope=Envelope("secret"))
    cache = Semantic(store, PassedForm(), judge, FixedClock(), text_of=lambda pieces: "", chance=lambda: 0.5)
    keep(cache, question(ASKED))
    assert reason(cache.find(question(SAME))) == "served"
    assert b"two-factor" not in (tmp_path / "a.db").read_bytes()
    store.close()
