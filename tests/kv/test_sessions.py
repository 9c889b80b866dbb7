"""What callers say of the future: whose entries it moves, and for how long it is remembered."""

import threading

import numpy as np
import pytest

from ostinato.errors import ParameterError
from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.kv.policies import make_policy
from ostinato.kv.policy import Outlook
from ostinato.kv.sessions import Sessions, outlook_of
from ostinato.kv.tending import Tender
from ostinato.kv.trust import Trust
from ostinato.types import Session

SPACE = Namespace("w", "", "", "", "", "")


class Hands:
    """A clock that the test sets."""

    time_s = 0.0

    def now(self):
        return self.time_s

    def monotonic(self):
        return self.time_s


def tokens(*values):
    return np.array(values, np.int32)


class Cache:
    """Twelve blocks of one token, least recently used; what goes when two more are needed is told."""

    def __init__(self, **limits):
        self.clock = Hands()
        self.manager = KVManager(12, 1)
        self.sessions = Sessions(self.manager, self.clock, **limits)

    def serve(self, *values, space=SPACE, outlook=Outlook.UNKNOWN, **more):
        array = tokens(*values)
        with self.manager.acquire(space, array) as lease:
            assert lease.reserve(len(array))
            lease.take_copies()
            lease.commit(array)
        self.sessions.ended(space, array, outlook, **more)

    def has(self, *values, space=SPACE):
        return self.manager.peek(space, tokens(*values, 2**30)) == len(values)

    def squeeze(self):
        """Something new comes: three blocks have to go."""
        self.serve(900, 901, 902)


def fill(cache, **last):
    """Three chains of four blocks fill the cache; ``last`` is said of the one used last."""
    cache.serve(1, 2, 3, 4)
    cache.serve(11, 12, 13, 14)
    cache.serve(21, 22, 23, 24, **last)


@pytest.mark.parametrize(
    ("reason", "offers_tools", "outlook"),
    [
        ("tool_calls", True, Outlook.SOON),
        ("stop", True, Outlook.LATER),
        ("stop", False, Outlook.UNKNOWN),
        ("length", True, Outlook.UNKNOWN),
        ("abort", False, Outlook.ABANDONED),
        ("abort", True, Outlook.ABANDONED),
    ],
)
def test_how_an_answer_ended_says_what_will_follow(reason, offers_tools, outlook):
    assert outlook_of(reason, offers_tools=offers_tools) is outlook


def test_unsaid_the_least_recently_used_goes():
    cache = Cache()
    fill(cache)
    cache.squeeze()
    assert not cache.has(1, 2)
    assert cache.has(21, 22, 23, 24)


def test_an_abandoned_answer_goes_first():
    cache = Cache()
    fill(cache, outlook=Outlook.ABANDONED)
    cache.squeeze()
    assert cache.has(1, 2, 3, 4)
    assert not cache.has(21, 22)


def test_a_session_that_closes_with_its_answer_goes_first():
    cache = Cache()
    fill(cache, session=Session("a", "closed"))
    cache.squeeze()
    assert not cache.has(21, 22)
    assert cache.sessions.num_sessions == 0


def test_a_session_is_closed_by_a_word_and_only_in_its_own_namespace():
    cache = Cache()
    fill(cache, session=Session("a"))
    other = SPACE.with_salt("other")
    assert not cache.sessions.say(other, Session("a", "closed"))
    assert not cache.sessions.say(SPACE, Session("b", "closed"))
    cache.squeeze()
    assert cache.has(21, 22, 23, 24)
    assert cache.sessions.say(SPACE, Session("a", "closed"))
    cache.serve(911, 912, 913, 914)
    assert not cache.has(21, 22)
    assert cache.has(11, 12, 13, 14)
    assert not cache.sessions.say(SPACE, Session("a", "closed"))


def test_a_word_is_of_the_latest_turn_and_leaves_what_others_share():
    cache = Cache()
    cache.serve(1, 2, 3, session=Session("a"))
    cache.serve(1, 2, 3, 4, 5, session=Session("a"))
    cache.serve(1, 2, 31, 32)
    cache.serve(11, 12, 13, 14, 15)
    assert cache.sessions.say(SPACE, Session("a", "closed"))
    cache.squeeze()
    assert not cache.has(1, 2, 3)
    assert cache.has(1, 2, 31, 32)


def test_a_session_expires_when_its_time_is_up_and_not_before():
    cache = Cache()
    fill(cache, session=Session("a", expires_in_s=60.0))
    assert cache.sessions.expire() == 60.0
    cache.clock.time_s = 59.0
    assert cache.sessions.expire() == 1.0
    assert cache.sessions.num_sessions == 1
    cache.clock.time_s = 60.0
    assert cache.sessions.expire() == float("inf")
    assert cache.sessions.num_sessions == 0
    cache.squeeze()
    assert not cache.has(21, 22)


def test_a_use_makes_what_was_said_void():
    cache = Cache()
    fill(cache, session=Session("a", "closed"))
    cache.serve(21, 22, 23, 24)
    cache.squeeze()
    assert cache.has(21, 22, 23, 24)
    assert not cache.has(1, 2)


def test_of_several_answers_those_that_nobody_goes_on_from_have_lost():
    cache = Cache()
    prompt = (1, 2)
    for answer in ((3, 4), (3, 5), (6, 7)):
        cache.serve(*prompt, *answer, num_prompt=2, num_choices=3)
    cache.serve(51, 52, 53, 54)
    cache.sessions.began(SPACE, tokens(1, 2, 3, 5, 8))
    cache.serve(61, 62, 63, 64)  # one block is free, three have to go: 4, then 6 7
    assert not cache.has(1, 2, 3, 4)
    assert not cache.has(1, 2, 6)
    assert cache.has(1, 2, 3, 5)
    assert cache.has(51, 52, 53, 54)


def test_a_prompt_that_goes_on_from_none_of_the_answers_says_nothing():
    cache = Cache()
    for answer in ((3, 4), (5, 6)):
        cache.serve(1, 2, *answer, num_prompt=2, num_choices=2)
    cache.sessions.began(SPACE, tokens(1, 2))
    cache.sessions.began(SPACE, tokens(1, 2, 9))
    cache.sessions.began(SPACE.with_salt("other"), tokens(1, 2, 3, 4))
    assert len(cache.sessions._asked) == 1
    cache.sessions.began(SPACE, tokens(1, 2, 3, 4, 9))
    assert not cache.sessions._asked


def test_what_is_remembered_is_bounded():
    cache = Cache(max_sessions=3, max_tokens=20)
    for number in range(50):
        cache.serve(number, 1, 2, session=Session(f"s{number}"), num_prompt=1, num_choices=2)
        assert cache.sessions.num_sessions <= 3
        assert cache.sessions._num_known_tokens <= 20
        assert cache.sessions._num_asked_tokens <= 20
    cache.serve(*range(100, 112), session=Session("long"))
    cache.serve(*range(200, 212), session=Session("longer"))
    assert cache.sessions.num_sessions == 1
    assert cache.sessions._num_known_tokens == 12


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": ""},
        {"id": "x" * 257},
        {"id": 7},
        {"id": "a", "state": "gone"},
        {"id": "a", "expires_in_s": 0},
        {"id": "a", "expires_in_s": float("inf")},
        {"id": "a", "expires_in_s": float("nan")},
        {"id": "a", "expires_in_s": True},
    ],
)
def test_a_session_is_checked(wrong):
    with pytest.raises(ParameterError) as caught:
        Session(**wrong)
    assert caught.value.param == "session"


# ---------------------------------------------------------------- the thread


def test_the_tender_does_what_was_put_off_and_expires_sessions():
    clock = Hands()
    policy = make_policy("workload", num_blocks=64, block_tokens=1, clock=clock)
    manager = KVManager(64, 1, policy=policy)
    sessions = Sessions(manager, clock)
    told = threading.Event()
    hint, said = manager.hint, []

    def spy(namespace, sequence, outlook):
        said.append((sequence.tolist(), outlook))
        told.set()
        return hint(namespace, sequence, outlook)

    manager.hint = spy
    tender = Tender(manager, sessions)
    try:
        for start in range(0, 500, 5):
            array = np.arange(start, start + 5, dtype=np.int32)
            with manager.acquire(SPACE, array) as lease:
                assert lease.reserve(5)
                lease.commit(array)
        sessions.ended(SPACE, array, Outlook.UNKNOWN, session=Session("a", expires_in_s=5.0))
        clock.time_s = 6.0
        tender.wake()
        assert told.wait(30)
        assert said == [(array.tolist(), Outlook.OVER)]
        assert not manager.tend()  # nothing was left
        assert policy.guard._refs > 0
    finally:
        tender.close()
    assert not tender._thread.is_alive()
    manager.check_integrity()


# ---------------------------------------------------------------- who is believed


def said_and_went_on(trust, space, start, *, goes_on):
    """One sequence is said to be over; whether that was believed. Then it goes on, or not."""
    sequence = np.arange(start, start + 4, dtype=np.int32)
    believed = trust.said(space, sequence)
    if goes_on:
        trust.asked(space, np.append(sequence, 7).astype(np.int32))
    return believed


def test_who_is_mostly_wrong_is_not_believed_for_long_and_only_he():
    trust = Trust(1)
    liar, honest = SPACE.with_salt("liar"), SPACE.with_salt("honest")
    believed = [said_and_went_on(trust, liar, 10 * n, goes_on=True) for n in range(100)]
    assert believed == [True] * 12 + [False] * 88
    assert all(said_and_went_on(trust, honest, 10 * n, goes_on=False) for n in range(100))
    assert not said_and_went_on(trust, liar, 5000, goes_on=False)


def test_who_is_seldom_wrong_is_believed_again_once_the_right_words_show():
    trust = Trust(1)
    believed = [said_and_went_on(trust, SPACE, 10 * n, goes_on=n % 20 == 0) for n in range(3000)]
    assert all(believed[1000:])


def test_trust_can_be_won_back():
    trust = Trust(1)
    for number in range(200):
        said_and_went_on(trust, SPACE, 10 * number, goes_on=True)
    assert not said_and_went_on(trust, SPACE, 9_000, goes_on=False)
    for number in range(2500):
        said_and_went_on(trust, SPACE, 10_000 + 10 * number, goes_on=False)
    assert said_and_went_on(trust, SPACE, 90_000, goes_on=False)


def test_what_is_remembered_of_words_is_bounded():
    trust = Trust(1)
    for number in range(100):
        space = SPACE.with_salt(f"t{number}")
        for word in range(30):
            said_and_went_on(trust, space, 10 * word, goes_on=word % 2 == 0)
    assert len(trust._records) == 64
    for word in range(5000):
        said_and_went_on(trust, SPACE, 10 * word, goes_on=word % 3 == 0)
        record = trust._records[SPACE.tenant]
        assert len(record.order) == len(record.went_on) <= 2048
    assert record.num_wrong == sum(record.went_on.values())


def test_to_a_rule_that_weighs_everything_is_told():
    clock = Hands()
    policy = make_policy("workload", num_blocks=8, block_tokens=1, clock=clock)
    for rule, is_gated in (
        (policy, False),
        (make_policy("lru-2", num_blocks=8, block_tokens=1, clock=clock), True),
    ):
        manager = KVManager(8, 1, policy=rule)
        assert manager.obeys_hints is is_gated
        assert (Sessions(manager, clock)._trust is not None) is is_gated
