"""Guards, one by one: what they refuse, what they let pass, and what holds for any text."""

from __future__ import annotations

import string

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ostinato.responses.likeness.compare import Comparison, Seen, compare
from ostinato.responses.likeness.guards import GUARDS, judge_all
from ostinato.responses.likeness.guards.moments import is_fresh
from ostinato.responses.likeness.lexicon import stem_of, the_lexicon
from ostinato.responses.likeness.risk import risk_of
from ostinato.responses.likeness.words import parse


def seen(text: str) -> Seen:
    """Read without an embedder: guards look at words only."""
    sentence = parse(text)
    empty = np.zeros((len(sentence.content), 2), np.float32)
    return Seen(sentence, np.zeros(2, np.float32), empty, empty, (0.0,) * len(sentence.content))


def pair_of(one: str, other: str) -> Comparison:
    return compare(seen(one), seen(other))


def refusals(one: str, other: str) -> set[str]:
    return {verdict.guard for verdict in judge_all(pair_of(one, other)) if verdict.opinion == "refuses"}


REFUSED = [
    ("polarity", "Is it safe to swim here?", "Is it not safe to swim here?"),
    ("polarity", "Can I pay with cash?", "Can I pay without cash?"),
    ("polarity", "Why does the door close?", "Why doesn't the door close?"),
    ("antonym", "How do I enable cookies?", "How do I disable cookies?"),
    ("antonym", "Is the bridge safe?", "Is the bridge unsafe?"),
    ("antonym", "Where can I buy a kayak?", "Where can I sell a kayak?"),
    ("antonym", "What to do before surgery?", "What to do after surgery?"),
    ("number", "Can I take 2 pills?", "Can I take 3 pills?"),
    ("number", "What is 15% of 80?", "What is 25% of 80?"),
    ("number", "Does it cost $1,500?", "Does it cost $1,050?"),
    ("number", "Meet at 10:30?", "Meet at 10:45?"),
    ("number", "Install version 3.11", "Install version 3.12"),
    ("number", "Remind me twice", "Remind me three times"),
    ("unit", "How heavy is 5 kg of sand?", "How heavy is 5 pounds of sand?"),
    ("code", "Where is order AB-1234?", "Where is order AB-1243?"),
    ("code", "Is flight LH455 late?", "Is flight LH454 late?"),
    ("date", "Are you open on Monday?", "Are you open on Tuesday?"),
    ("date", "Is it raining today?", "Is it raining tomorrow?"),
    ("name", "Who is the mayor of Lyon?", "Who is the mayor of Nantes?"),
    ("name", "Does it run on Windows?", "Does it run on Solaris?"),
    ("scope", "Delete all files", "Delete some files"),
    ("scope", "List only the admins", "List the admins"),
    ("direction", "How do I fly from Rome to Oslo?", "How do I fly from Oslo to Rome?"),
    ("direction", "Is tea healthier than coffee?", "Is coffee healthier than tea?"),
    ("direction", "Can my boss read my diary?", "Can I read my boss's diary?"),
    ("particle", "How do I check in at the desk?", "How do I check out at the desk?"),
    ("question", "How do I close my account?", "Why do I close my account?"),
    ("question", "When was it built?", "Who built it?"),
    ("question", "How long is the film?", "How much is the film?"),
    ("question", "What is a sonnet?", "Write a sonnet poem about spring"),
    ("quote", 'Translate "red house" into Dutch', 'Translate "blue house" into Dutch'),
    ("quote", "What does `ls -l` do?", "What does `ls -a` do?"),
    ("letter", "What is vitamin C good for?", "What is vitamin K good for?"),
    ("language", "What is the price of the ticket?", "Was ist der Preis für die Karte und ist das alles?"),
    ("person", "What is my order status?", "What is her order status?"),
    ("degree", "Which one is the most popular?", "Which one is the least popular?"),
]


@pytest.mark.parametrize(("guard", "one", "other"), REFUSED)
def test_what_each_guard_refuses(guard: str, one: str, other: str) -> None:
    assert guard in refusals(one, other)
    assert guard in refusals(other, one)
    verdict = next(v for v in judge_all(pair_of(one, other)) if v.guard == guard)
    assert verdict.reason, "a refusal without its reason"


SAME = [
    ("How do I turn on notifications?", "How can I switch notifications on?"),
    ("What's the capital of France?", "what is the capital of france"),
    ("Is it cheaper by train than by bus?", "Is it less expensive by train than by bus?"),
    ("I can't log in", "I cannot sign in"),
    ("Is a dog smarter than a cat?", "Is a dog more intelligent than a cat?"),
    ("When did World War II end?", "When did World War 2 end?"),
    ("What is the annual fee?", "What is the yearly fee?"),
    ("What does it cost per month?", "What is the monthly price?"),
    ("Is mold killed by vinegar?", "Does vinegar kill mold?"),
    ("How do I center a div?", "How do I centre a div?"),
    ("Turn on the lights in the kitchen", "Turn on the kitchen lights"),
    ("Which city is Peru's capital?", "What is the capital of Peru?"),
    ("Can I cancel within 14 days?", "Can I cancel within fourteen days?"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_no_guard_refuses_what_is_the_same(one: str, other: str) -> None:
    assert not refusals(one, other)
    assert not refusals(other, one)


def test_every_guard_is_tried() -> None:
    assert {guard.name for guard in GUARDS} - {name for name, _, _ in REFUSED} == {
        *("freshness", "tense", "sibling"),  # these only doubt, or doubt before they refuse
    }


@pytest.mark.parametrize(
    ("guard", "one", "other"),
    [
        ("freshness", "Who leads the league?", "Who leads the league now?"),
        ("tense", "What is the price?", "What was the price?"),
        ("sibling", "How do I cook rice?", "How do I cook wheat?"),
        ("scope", "List the users", "List all users"),
    ],
)
def test_what_guards_doubt(guard: str, one: str, other: str) -> None:
    found = {verdict.guard: verdict.opinion for verdict in judge_all(pair_of(one, other))}
    assert found[guard] == "doubts"


TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(
        st.sampled_from(
            [
                "how",
                "do",
                "i",
                "not",
                "disable",
                "3",
                "kg",
                "from",
                "Rome",
                "to",
                "Oslo",
                '"x"',
                "can't",
                "the",
                "US",
                "e-mail",
                "?",
            ]
        ),
        max_size=12,
    ).map(" ".join),
)


@settings(max_examples=150, deadline=None)
@given(TEXTS)
@example("")
@example("\x00'-/''s")
@example("İİİ ẞ ﬁ")
def test_no_guard_refuses_a_text_for_itself(text: str) -> None:
    sentence = parse(text)
    for word in sentence.words:
        assert 0 <= word.start <= word.end <= len(text)
    assert not refusals(text, text)


@settings(max_examples=150, deadline=None)
@given(TEXTS, TEXTS)
def test_any_two_texts_can_be_judged(one: str, other: str) -> None:
    for verdict in judge_all(pair_of(one, other)):
        assert verdict.opinion in ("passes", "doubts", "refuses")
        assert bool(verdict.reason) == (verdict.opinion != "passes")


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 10**6), st.integers(2, 10**6))
def test_another_number_is_always_refused(one: int, other: int) -> None:
    found = refusals(f"Where is order {one}?", f"Where is order {other}?")
    assert ("number" in found) == (one != other)


@settings(max_examples=100, deadline=None)
@given(st.text(string.ascii_lowercase, min_size=3, max_size=9))
def test_a_negation_is_always_refused(verb: str) -> None:
    assert "polarity" in refusals(f"Does it {verb}?", f"Does it not {verb}?")


def test_stems_of_both_spellings_are_one() -> None:
    for british, american in (
        ("colour", "color"),
        ("organise", "organize"),
        ("tyres", "tire"),
        ("metre", "meter"),
    ):
        assert stem_of(british) == stem_of(american)
    assert stem_of("employer") != stem_of("employee")
    assert stem_of("written") == stem_of("writes")


def test_the_lexicon_knows_both_lists() -> None:
    lexicon = the_lexicon()
    assert lexicon.are_alike(stem_of("car"), stem_of("automobile"))
    assert lexicon.are_opposite(stem_of("enable"), stem_of("disable"))
    assert lexicon.are_opposite(stem_of("visible"), stem_of("invisible"))
    assert not lexicon.are_opposite(stem_of("red"), stem_of("car"))
    assert lexicon.are_siblings(stem_of("monday"), stem_of("tuesday"))


def test_risks_and_questions_of_the_moment() -> None:
    for text, topic in (
        ("I want to kill myself", "self-harm"),
        ("What dose of aspirin for a child?", "dosage"),
        ("I have chest pain", "emergency"),
        ("Send 300 dollars to Bob", "payment"),
    ):
        assert risk_of(text) == topic
    assert risk_of("How do I bake bread?") == ""
    assert is_fresh(parse("What is the latest version?"))
    assert not is_fresh(parse("What is a version?"))
