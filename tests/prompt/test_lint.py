"""What the linter finds in named prompts and in real requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.prompt.lint import lint_prompt, lint_requests
from ostinato.prompt.registry import NamedPrompt
from ostinato.types import Message

STABLE = "You look after the museum's instruments. " * 8


def words(text: str) -> int:
    return len(text.split())


# ---------------------------------------------------------------- order


def named(text: str) -> NamedPrompt:
    return NamedPrompt("p", (Message("user", text),))


def test_in_a_conversation_variables_move_to_the_last_message() -> None:
    prompt = NamedPrompt(
        "p",
        (
            Message("system", f"Today is {{{{date}}}}.\n\n{STABLE}"),
            Message("user", "About {{topic}}"),
            Message("assistant", "Yes, {{topic}}."),
            Message("user", f"{STABLE}\n\n{{{{question}}}}"),
        ),
    )
    advice = lint_prompt(prompt, words)
    assert advice.variables == ("date", "topic")
    assert advice.proposal == (
        Message("system", STABLE),
        Message("assistant", "Yes, {{topic}}."),
        Message("user", f"{STABLE}\n\nToday is {{{{date}}}}.\n\nAbout {{{{topic}}}}\n\n{{{{question}}}}"),
    )
    assert (advice.shared_tokens, advice.lost_tokens) == (2, words(STABLE) + 1 - 2)
    again = lint_prompt(NamedPrompt("p", advice.proposal), words)
    assert again.proposal == advice.proposal


def test_a_variable_before_stable_text_costs_what_stands_behind_it() -> None:
    prompt = named(f"Today is {{{{date}}}}.\n\n{STABLE}\n\nAnswer {{{{question}}}}")
    advice = lint_prompt(prompt, words)
    assert advice.variables == ("date",)
    (proposal,) = advice.proposal
    assert proposal.content == f"{STABLE}\n\nToday is {{{{date}}}}.\n\nAnswer {{{{question}}}}"
    assert advice.shared_tokens == 2
    assert advice.lost_tokens == words(STABLE + " Today is") - 2
    again = lint_prompt(NamedPrompt("p", advice.proposal), words)
    assert again.lost_tokens == 0
    assert again.proposal == advice.proposal


@pytest.mark.parametrize("text", [STABLE, "", f"{STABLE}{{{{question}}}}", "{{question}}"])
def test_nothing_to_mend(text: str) -> None:
    advice = lint_prompt(named(text), words)
    assert advice.lost_tokens == 0
    assert advice.proposal == (Message("user", text),)
    assert advice.variables == ()


# ---------------------------------------------------------------- requests

RULES = "Answer briefly.\n" + "Name the instrument, its maker and its year. " * 6


def log(*volatile: str) -> list[str]:
    return [f"You are a guide. {value}\n{RULES}\nQuestion {n}?" for n, value in enumerate(volatile)]


@pytest.mark.parametrize(
    ("kind", "volatile"),
    [
        ("timestamp", ("It is 2026-11-30T10:00:01Z.", "It is 2026-11-30T10:07:41Z.")),
        ("timestamp", ("It is November 30, 2026.", "It is December 1, 2026.")),
        ("timestamp", ("Now: 1764500000", "Now: 1764500421")),
        ("timestamp", ("It is 10:00 AM.", "It is 4:30 PM.")),
        ("uuid", ("a1b2c3d4-0000-4000-8000-1234567890ab", "ffb2c3d4-0000-4000-8000-1234567890ab")),
        ("id", ("Request req_8f3ac91b77", "Request req_01bd88aa31")),
        ("id", ("Trace 4bf92f3577b34da6a3ce929d0e0e4736", "Trace 00f067aa0ba902b7a3ce929d0e0e4736")),
        ("number format", ("Budget: 1,234.50", "Budget: 1.234,50")),
        ("order", ("Tools: saw, hammer, file", "Tools: hammer, file, saw")),
        ("content", ("\nWho built the first organ?", "\nWhy are there no trumpets?")),
        ("order", ("Tools:\n- saw\n- hammer\n- file", "Tools:\n- file\n- saw\n- hammer")),
    ],
)
def test_what_changes_by_itself_is_found(kind: str, volatile: tuple[str, str]) -> None:
    findings = lint_requests(log(*volatile), words)
    assert [finding.kind for finding in findings] == [kind]
    assert findings[0].num_requests == 1
    assert findings[0].lost_tokens >= words(RULES) - 2  # a short first line may be taken for changed


def test_findings_of_many_requests_are_one() -> None:
    requests = log(*(f"It is 2026-11-30 10:{minute}:00." for minute in range(10, 30)))
    (finding,) = lint_requests(requests, words)
    assert finding.num_requests == 19
    assert len(finding.examples) == 4


@pytest.mark.parametrize(
    "requests",
    [
        log("The same.", "The same.", "The same."),
        [f"{RULES}{question}" for question in ("Who built the first organ?", "Why are there no trumpets?")],
        ["Hello, it is 10:00.", "Hello, it is 11:00."],  # nothing stays behind it
        [],
    ],
)
def test_new_questions_are_no_findings(requests: list[str]) -> None:
    assert [f for f in lint_requests(requests, words) if f.lost_tokens > 0] == []


def test_two_changes_in_one_request_are_both_found() -> None:
    requests = [
        f"Guide.\nIt is {hour}:00:00.\n{RULES}\nid: {hour}b2c3d4-0000-4000-8000-1234567890ab\n{RULES}"
        for hour in (10, 11, 12)
    ]
    assert {finding.kind for finding in lint_requests(requests, words)} == {"timestamp", "uuid"}


# ---------------------------------------------------------------- recorded requests

VOLATILE = {
    "timestamp": lambda n: f"The time is 2026-11-30T10:{10 + n}:07Z.",
    "uuid": lambda n: f"Session {0xA1B2C3D4 + n:08x}-0000-4000-8000-1234567890ab.",
    "id": lambda n: f"Request req_{0x8F3AC91B77 + 7919 * n:x}.",
    "number format": lambda n: f"The budget is {('1,234.50', '1.234,50', '1 234,50')[n % 3]} in all.",
    "order": lambda n: "Tools: " + ", ".join(("saw", "file", "plane", "hammer")[n % 4 :] + TOOLS[: n % 4]),
}
TOOLS = ("saw", "file", "plane", "hammer")


@pytest.mark.parametrize("kind", VOLATILE)
def test_what_changes_is_found_in_recorded_requests(kind: str) -> None:
    """An agent's own prompts, in which only what was put in changes without being new."""
    folder = Path(__file__).parents[3] / "shared" / "data" / "traces" / "agent" / "miniswe"
    if not folder.is_dir():
        pytest.skip("the agent traces are not here (../shared/data/traces/agent)")
    session = min(folder.glob("*.jsonl"))
    recorded = [json.loads(line)["input"] for line in session.read_text().splitlines()]
    assert len(recorded) > 5
    assert lint_requests(recorded, words) == ()
    head = "You are an engineer and fix what is described below.\n"
    changed = [f"{head}{VOLATILE[kind](number)}\n{request}" for number, request in enumerate(recorded)]
    findings = [finding for finding in lint_requests(changed, words) if finding.num_requests > 1]
    assert [finding.kind for finding in findings] == [kind]
    assert findings[0].num_requests == len(recorded) - 1
    # All that stayed is lost: on average the length of the shorter of two requests in a row.
    assert findings[0].lost_tokens > 0.9 * words(recorded[0])
