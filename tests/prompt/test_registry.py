"""Named prompts: conversations with variables, out of a file, with statistics."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ostinato.errors import ParameterError
from ostinato.prompt.registry import (
    MAX_PROMPTS,
    NamedPrompt,
    PromptRegistry,
    PromptStatistics,
    read_prompts,
)
from ostinato.types import Message, Usage


def test_values_are_text_and_not_read_again() -> None:
    registry = PromptRegistry()
    registry.register("ask", "About {{topic}}: {{ question }} {not} {{topic}}")
    assert registry.fill("ask", {"topic": "{{question}}", "question": "Why?"}) == (
        Message("user", "About {{question}}: Why? {not} {{question}}"),
    )


def test_a_prompt_may_be_a_conversation() -> None:
    registry = PromptRegistry()
    prompt = registry.register(
        "guide",
        [
            {"role": "system", "content": "You guide in {{place}}."},
            Message("user", "{{question}}"),
            {"role": "assistant", "content": "In {{place}}: "},
        ],
    )
    assert prompt.variables == ("place", "question")
    assert registry.fill("guide", {"place": "Bonn", "question": "Who?"}) == (
        Message("system", "You guide in Bonn."),
        Message("user", "Who?"),
        Message("assistant", "In Bonn: "),
    )


@pytest.mark.parametrize("values", [{}, {"topic": "a", "more": "b"}, {"topic": 3}])
def test_values_must_fit(values: dict[str, str]) -> None:
    registry = PromptRegistry()
    registry.register("ask", "About {{topic}}")
    with pytest.raises(ParameterError):
        registry.fill("ask", values)


def test_a_name_means_one_prompt() -> None:
    registry = PromptRegistry()
    assert registry.register("ask", "a") == registry.register("ask", [Message("user", "a")])
    for name, text in (("ask", "b"), ("", "a")):
        with pytest.raises(ParameterError):
            registry.register(name, text)
    for call in (lambda: registry.fill("other", {}), lambda: registry.record("other", Usage())):
        with pytest.raises(ParameterError, match="no prompt 'other'"):
            call()


def test_there_is_an_end_to_names() -> None:
    registry = PromptRegistry(
        NamedPrompt(f"p{number}", (Message("user", ""),)) for number in range(MAX_PROMPTS)
    )
    registry.register("p0", "")
    with pytest.raises(ParameterError, match=f"{MAX_PROMPTS} prompts"):
        registry.register("another", "")
    for name in ("a b", "ä", 'a"b', "a" * 65, "-a", "a\n"):
        with pytest.raises(ParameterError, match="cannot be called"):
            PromptRegistry().register(name, "")


FILE = """
[guide]
messages = [
  {role = "system", content = "You are a guide."},
  {role = "curator", content = "{{note}}"},
  {role = "user", content = "{{question}}"},
]

[short]
text = '''
About {{topic}}
'''
"""


def test_prompts_out_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.toml"
    file.write_text(FILE)
    guide, short = read_prompts(file)
    assert guide.variables == ("note", "question")
    assert [message.role for message in guide.messages] == ["system", "curator", "user"]
    assert short == NamedPrompt("short", (Message("user", "About {{topic}}\n"),))
    assert set(PromptRegistry(read_prompts(file)).statistics()) == {"guide", "short"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a", "cannot be read"),
        ("a = 1", r"\[a\] must have text or messages"),
        ("[a]\ntext = 'x'\nmessages = []", r"\[a\] must have"),
        ("[a]\ntext = 3", r"text of \[a\]"),
        ("[a]\nmessages = []", r"\[a\]: the conversation is empty"),
        ("[a]\nmessages = [{role = 'user', content = 3}]", r"\[a\]: messages\[0\]"),
        ("['a b']\ntext = 'x'", "cannot be called"),
        ("[a]\ntext = '\xff'", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "prompts.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ParameterError, match=words) as caught:
        read_prompts(file)
    assert str(file) in str(caught.value)
    with pytest.raises(ParameterError, match="cannot be read"):
        read_prompts(tmp_path / "none.toml")


def test_statistics_add_up_over_threads() -> None:
    registry = PromptRegistry()
    registry.register("ask", "a")
    registry.register("never", "b")

    def record() -> None:
        for _ in range(200):
            registry.record("ask", Usage(prompt_tokens=10, cached_tokens=8))

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.statistics() == {
        "ask": PromptStatistics(800, 8_000, 6_400),
        "never": PromptStatistics(),
    }
    assert registry.statistics()["ask"].hit_rate == 0.8
    assert registry.statistics()["never"].hit_rate == 0.0
