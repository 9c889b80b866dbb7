"""Trimming, named prompts, roles and begun answers, through the library and over the wire."""

from __future__ import annotations

import itertools
import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import ostinato
from doors.serving import serving
from doors.tiny import save_tiny_chat_model
from ostinato.errors import ConversationError, ParameterError, PromptTooLongError, UnknownRoleError
from ostinato.prompt.canonical import CanonicalRules, Replacement, read_canonical_rules
from ostinato.prompt.rules import CustomRole, MessageRules
from ostinato.types import GenerationRequest, Message, TrimRules

OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
FITTING = {"place": "Bonn", "question": "Who?"}
PROMPTS = """
[guide]
messages = [
  {role = "system", content = "You guide in {{place}}."},
  {role = "user", content = "{{question}}"},
]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny") / "tiny", max_len=2048)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ostinato.Engine]:
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.toml"
    prompts.write_text(PROMPTS)
    with ostinato.load(folder, kv_cache=16 << 20, block_size=16, prompts=prompts) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def client(engine: ostinato.Engine) -> Iterator[openai.OpenAI]:
    with serving(engine) as connected:
        yield connected


def talk(num_turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief, and be kind to everyone."}]
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"Question {turn}: " + "why " * 20})
        messages.append({"role": "assistant", "content": f"Answer {turn}: " + "so " * 20})
    messages.append({"role": "user", "content": "And now?"})
    return messages


def ask(client: openai.OpenAI, messages: list[dict[str, Any]], **extra: Any) -> Any:
    return client.chat.completions.create(
        model=next(iter(client.models.list())).id,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=4,
        extra_body={"ignore_eos": True, **extra},
    )


# ---------------------------------------------------------------- trimming


@pytest.mark.parametrize("strategy", ["drop", "sticky"])
def test_a_conversation_is_trimmed_where_it_is_asked_for(engine: ostinato.Engine, strategy: str) -> None:
    whole = engine.chat(talk(6), **OPTIONS)
    assert whole.usage.trimmed is None
    budget = whole.usage.prompt_tokens // 2
    reply = engine.chat(talk(6), trim=TrimRules(budget, strategy), **OPTIONS)  # type: ignore[arg-type]
    trimmed = reply.usage.trimmed
    assert trimmed is not None
    assert (trimmed.strategy, trimmed.budget_tokens) == (strategy, budget)
    assert trimmed.given_tokens == whole.usage.prompt_tokens
    assert reply.usage.prompt_tokens <= budget
    assert trimmed.dropped == tuple(range(1, 1 + len(trimmed.dropped)))
    # What is left is what anyone would get who left it out by hand.
    left = [message for index, message in enumerate(talk(6)) if index not in trimmed.dropped]
    by_hand = engine.chat(left, **OPTIONS)
    assert by_hand.text == reply.text
    assert by_hand.usage.prompt_tokens == reply.usage.prompt_tokens


def test_pinned_messages_stay(engine: ostinato.Engine) -> None:
    reply = engine.chat(talk(6), trim={"budget_tokens": 700}, pinned=[3], **OPTIONS)
    assert reply.usage.trimmed is not None
    assert {3, 4}.isdisjoint(reply.usage.trimmed.dropped)
    assert {1, 2} <= set(reply.usage.trimmed.dropped)


def test_without_a_budget_it_is_what_the_answer_leaves(engine: ostinato.Engine) -> None:
    messages = talk(20)
    with pytest.raises(PromptTooLongError):
        engine.chat(messages, **OPTIONS)
    for max_tokens, budget in ((4, 2044), (1000, 1048)):
        reply = engine.chat(messages, trim="drop", **OPTIONS | {"max_tokens": max_tokens}, n=1, stop="\n")
        assert reply.usage.trimmed is not None
        assert reply.usage.trimmed.budget_tokens == budget
    unsaid = engine.runtime.prepare(
        GenerationRequest(
            ostinato.Conversation(tuple(Message(m["role"], m["content"]) for m in messages)),
            trim=TrimRules(strategy="drop"),
        )
    )
    assert unsaid.assembled.trimmed is not None
    assert unsaid.assembled.trimmed.budget_tokens == 1536
    assert unsaid.max_new_tokens >= 512
    with pytest.raises(PromptTooLongError, match="lower max_tokens"):
        engine.chat(talk(0), trim="drop", max_tokens=5000)


def test_sticky_cuts_at_the_same_place_turn_after_turn_without_state(folder: Path) -> None:
    """Every turn by an engine that never saw the conversation before: the cuts are those of one that did."""
    cuts = []
    with ostinato.load(folder, kv_cache=16 << 20) as one, ostinato.load(folder, kv_cache=16 << 20) as other:
        sticky = drop = 0
        for turns in range(1, 16):
            rules = TrimRules(900, "sticky", 0.5)
            reply = one.chat(talk(turns), trim=rules, **OPTIONS)
            again = other.chat(talk(turns), trim=rules, salt=str(turns), **OPTIONS)
            assert again.usage.trimmed == reply.usage.trimmed
            assert again.usage.cached_tokens == 0
            assert again.text == reply.text
            cuts.append(() if reply.usage.trimmed is None else reply.usage.trimmed.dropped)
            sticky += reply.usage.cached_tokens
            drop += one.chat(
                talk(turns), trim=TrimRules(900, "drop"), salt="drop", **OPTIONS
            ).usage.cached_tokens
    assert sticky > 1.5 * drop
    lengths = [len(cut) for cut in cuts]
    assert lengths == sorted(lengths)
    runs = [len(list(run)) for _, run in itertools.groupby(lengths)]
    assert max(runs[1:]) >= 3  # it holds for several turns, and then moves
    assert len(runs) >= 4


def test_trimming_over_the_wire(client: openai.OpenAI, engine: ostinato.Engine) -> None:
    messages = talk(6)
    whole = ask(client, messages)
    assert "trim" not in whole.ostinato
    trim = {"strategy": "drop", "budget_tokens": 700, "pinned": [3]}
    reply = ask(client, messages, trim=trim)
    expected = engine.chat(messages, trim=TrimRules(700, "drop"), pinned=[3], **OPTIONS)
    assert reply.choices[0].message.content == expected.text
    assert expected.usage.trimmed is not None
    assert reply.ostinato["trim"] == {
        "strategy": "drop",
        "budget_tokens": 700,
        "given_tokens": whole.usage.prompt_tokens,
        "left_out_tokens": whole.usage.prompt_tokens - reply.usage.prompt_tokens,
        "dropped_messages": len(expected.usage.trimmed.dropped),
        "shortened_messages": 0,
    }
    stream = client.chat.completions.create(
        model=engine.runtime.model_name,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=4,
        stream=True,
        extra_body={"trim": trim},
    )
    said = [chunk.model_extra["ostinato"] for chunk in stream if "ostinato" in (chunk.model_extra or {})]
    assert said == [{"trim": reply.ostinato["trim"]}]


def test_shortened_results_are_reported(folder: Path) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "blue " * 200, "tool_call_id": "c1"},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Sure?"},
    ]
    with (
        ostinato.load(folder, kv_cache=16 << 20, template="qwen2.5", max_model_len=2048) as engine,
        serving(engine) as client,
    ):
        reply = ask(client, messages, trim={"strategy": "shorten", "budget_tokens": 600, "keep_chars": 10})
        trim = reply.ostinato["trim"]
        assert (trim["dropped_messages"], trim["shortened_messages"]) == (0, 1)
        assert trim["left_out_tokens"] > 900


@pytest.mark.parametrize(
    ("trim", "param"),
    [
        ("oldest", "trim"),
        (3, "trim"),
        ({"strategy": "oldest"}, "trim.strategy"),
        ({"budget_tokens": 0}, "trim.budget_tokens"),
        ({"low_water": 1.5}, "trim.low_water"),
        ({"keep_chars": -1}, "trim.keep_chars"),
        ({"pinned": [99]}, "pinned"),
        ({"more": 1}, "trim.more"),
        ({"budget_tokens": 20, "strategy": "drop"}, "messages"),
    ],
)
def test_trimming_that_cannot_be_is_named(client: openai.OpenAI, trim: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, talk(1), trim=trim)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_trimming_is_for_conversations(engine: ostinato.Engine) -> None:
    with pytest.raises(ParameterError, match="no parameter 'trim'"):
        engine.complete("text", trim="drop", **OPTIONS)
    for wrong in ({"low": 1}, 3, "oldest"):
        with pytest.raises(ParameterError):
            engine.chat(talk(1), trim=wrong, **OPTIONS)


def test_an_operator_may_trim_for_all(folder: Path) -> None:
    with ostinato.load(folder, kv_cache=16 << 20, trim="drop", trim_budget=600) as engine:
        reply = engine.chat(talk(10), **OPTIONS)
        assert reply.usage.trimmed is not None
        assert reply.usage.trimmed.budget_tokens == 600
        own = engine.chat(talk(10), trim="sticky", **OPTIONS)  # the budget stays the operator's
        assert own.usage.trimmed is not None
        assert own.usage.trimmed.budget_tokens == 600
        assert own.usage.prompt_tokens <= 300
        assert engine.chat(talk(5), trim="off", **OPTIONS).usage.trimmed is None
        with pytest.raises(PromptTooLongError):
            engine.chat(talk(40), trim="off", **OPTIONS)
    for setting in ({"trim": "oldest"}, {"trim_budget": 0}, {"trim_low_water": 2.0}):
        with pytest.raises(ParameterError) as caught:
            ostinato.load(folder, **setting)
        assert caught.value.param == next(iter(setting))
        assert next(iter(setting)) in str(caught.value) or caught.value.param == "trim"


# ---------------------------------------------------------------- named prompts


def test_a_named_prompt_is_the_beginning_of_a_conversation(engine: ostinato.Engine) -> None:
    by_hand = [
        {"role": "system", "content": "You guide in Bonn."},
        {"role": "user", "content": "Who {{place}}?"},
    ]
    values = {"place": "Bonn", "question": "Who {{place}}?"}
    before = engine.prompts.statistics()["guide"]
    reply = engine.chat(prompt="guide", variables=values, salt="named", **OPTIONS)
    assert reply.text == engine.chat(by_hand, **OPTIONS).text
    assert reply.usage.prompt_name == "guide"
    more = [reply.message, Message("user", "More?")]
    second = engine.chat(more, prompt="guide", variables=values, salt="named", **OPTIONS)
    assert second.text == engine.chat([*by_hand, *more], **OPTIONS).text
    after = engine.prompts.statistics()["guide"]
    assert after.num_calls == before.num_calls + 2
    both = reply.usage.prompt_tokens + second.usage.prompt_tokens
    assert after.prompt_tokens - before.prompt_tokens == both
    assert after.cached_tokens - before.cached_tokens == second.usage.cached_tokens > 0


def test_a_named_prompt_over_the_wire_counts_by_name(client: openai.OpenAI, engine: ostinato.Engine) -> None:
    use = {"name": "guide", "variables": {"place": "Ulm", "question": "Who?"}}
    reply = ask(client, [], prompt=use)
    assert reply.ostinato["prompt"] == "guide"
    assert (
        reply.choices[0].message.content
        == engine.chat(prompt="guide", variables=use["variables"], **OPTIONS).text
    )
    url = str(client.base_url).removesuffix("/v1/") + "/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    counts = dict(re.findall(r"^ostinato_named_prompt_(\w+?)_total\{prompt=\"guide\"\} (\S+)$", text, re.M))
    assert set(counts) == {"requests", "tokens", "cached_tokens"}
    assert float(counts["tokens"]) >= reply.usage.prompt_tokens


@pytest.mark.parametrize(
    ("use", "param", "code"),
    [
        ({"name": "other"}, "prompt.name", "prompt_not_found"),
        ({"name": "guide"}, "prompt.variables.place", "invalid_value"),
        ({"name": "guide", "variables": {"place": 3}}, "prompt.variables.place", "invalid_type"),
        ({"name": "guide", "variables": FITTING | {"c": "d"}}, "prompt.variables", "invalid_value"),
        ({}, "prompt.name", "missing_required_parameter"),
        ("guide", "prompt", "invalid_type"),
    ],
)
def test_a_prompt_that_cannot_be_used(client: openai.OpenAI, use: Any, param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [], prompt=use)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_faults_are_named_by_the_callers_own_count(engine: ostinato.Engine) -> None:
    values = {"place": "Bonn", "question": "Who?"}
    wrong = [Message("assistant", "I."), Message("stranger", "Hm.")]
    with pytest.raises(ConversationError) as caught:
        engine.chat(ostinato.Conversation(tuple(wrong)), prompt="guide", variables=values, **OPTIONS)
    assert caught.value.index == 1
    reply = engine.chat(
        [Message("assistant", "I."), *map(_message, talk(6)[1:])],
        prompt="guide",
        variables=values,
        trim={"budget_tokens": 700, "strategy": "drop"},
        pinned=[2],
        **OPTIONS,
    )
    assert reply.usage.trimmed is not None  # in the whole conversation it is messages[4] then
    assert {3, 4}.isdisjoint(reply.usage.trimmed.dropped)


def _message(given: dict[str, Any]) -> Message:
    return Message(given["role"], given["content"])


# ---------------------------------------------------------------- roles


def test_a_role_changes_rendering_and_namespace_at_once(folder: Path) -> None:
    talk = [{"role": "note", "content": "It rains."}, {"role": "user", "content": "Hello, and how are you?"}]
    plain = [{"role": "user", "content": "Hello, and how are you?"}]
    with ostinato.load(folder, kv_cache=16 << 20, block_size=4) as engine, serving(engine) as client:
        with pytest.raises(UnknownRoleError):
            engine.chat(talk, **OPTIONS)
        first = engine.chat(plain, **OPTIONS)
        assert engine.chat(plain, **OPTIONS).usage.cached_tokens > 0
        engine.register_role("note", as_role="system", pattern="Note: {content}")
        cold = ask(client, plain)  # the same tokens, and yet nothing of before is found
        assert cold.usage.prompt_tokens_details.cached_tokens == 0
        assert cold.choices[0].message.content == first.text
        assert ask(client, plain).usage.prompt_tokens_details.cached_tokens > 0
        noted = ask(client, talk)
        by_hand = [{"role": "system", "content": "Note: It rains."}, *plain]
        assert noted.choices[0].message.content == engine.chat(by_hand, salt="x", **OPTIONS).text
        engine.register_role("note", as_role="system", pattern="({content})")  # another rendering
        assert ask(client, talk).usage.prompt_tokens_details.cached_tokens == 0
        engine.register_role("note", as_role="system", pattern="Note: {content}")  # and back
        back = ask(client, talk)
        assert back.usage.prompt_tokens_details.cached_tokens == back.usage.prompt_tokens - 1
        for wrong in ({"name": "user"}, {"pattern": "no place"}, {"as_role": "tool"}):
            with pytest.raises(ParameterError):
                engine.register_role(**{"name": "note", "as_role": "user", **wrong})


def test_no_request_mixes_old_and_new(folder: Path) -> None:
    """While roles change under them, every request renders and looks up by one and the same registration."""
    conversation = ostinato.Conversation((Message("note", "x" * 40), Message("user", "Hello")))
    request = GenerationRequest(conversation)
    with ostinato.load(folder, kv_cache=4 << 20) as engine:
        engine.register_role("note", as_role="user", pattern="0{content}")
        pairs: dict[str, set[bytes]] = {}
        stop = threading.Event()

        def register() -> None:
            for number in itertools.cycle(range(8)):
                engine.register_role("note", as_role="user", pattern=f"{number}{{content}}")
                if stop.is_set():
                    return

        threads = [threading.Thread(target=register) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(400):
            prepared = engine.runtime.prepare(request)
            pairs.setdefault(prepared.namespace.digest, set()).add(prepared.tokens.tobytes())
        stop.set()
        for thread in threads:
            thread.join()
    assert len(pairs) > 1
    assert all(len(rendered) == 1 for rendered in pairs.values())
    assert len(set.union(*pairs.values())) == len(pairs)


RULES = """
repeats = "merge"
separator = " / "
[roles.note]
as_role = "system"
pattern = "N: {content}"
"""


def test_rules_out_of_a_file_and_by_hand(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(RULES)
    messages = [
        {"role": "note", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    with ostinato.load(folder, kv_cache=4 << 20, message_rules=file) as engine:
        by_file = engine.chat(messages, **OPTIONS)
        identity = engine.runtime.cache().namespace
    rules = MessageRules(
        roles=(CustomRole("note", "system", "N: {content}"),),
        repeats="merge",
        separator=" / ",
    )
    with ostinato.load(folder, kv_cache=4 << 20, rules=rules) as engine:
        assert engine.runtime.cache().namespace == identity
        assert engine.chat(messages, **OPTIONS).text == by_file.text
    with ostinato.load(folder, kv_cache=4 << 20) as engine:
        assert engine.runtime.cache().namespace != identity
        plain = engine.chat(
            [{"role": "system", "content": "N: a"}, {"role": "user", "content": "b / c"}], **OPTIONS
        )
        assert plain.text == by_file.text
    for text in ("[", "repeats = 3", "other = 'x'", "repeats = 'x'", "[roles.note]\npattern = '{content}'",
                 "roles = 3", "[roles.note]\nas_role = 'tool'", "[roles.note]\nas_role = 3"):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ParameterError, match=re.escape(str(file))):
            ostinato.load(folder, message_rules=file)


# ---------------------------------------------------------------- what is left out, and begun answers


def test_what_the_template_leaves_out_is_said(client: openai.OpenAI, engine: ostinato.Engine) -> None:
    messages = [
        {"role": "user", "name": "Ada", "content": "Hello"},
        {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."},
        {"role": "user", "content": "And?"},
        {"role": "user", "name": "Bob", "content": "Or?"},
    ]
    expected = [{"field": "name", "messages": [0, 3]}, {"field": "reasoning", "messages": [1]}]
    reply = ask(client, messages)
    assert reply.ostinato["unrendered"] == expected
    assert "unrendered" not in ask(client, talk(1)).ostinato
    stream = client.chat.completions.create(
        model=engine.runtime.model_name,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    *_, last, usage = stream
    assert (last.model_extra or {})["ostinato"] == {"unrendered": expected}
    assert (usage.model_extra or {})["ostinato"]["unrendered"] == expected
    # By the indices of what was given, also when the beginning is trimmed away.
    trimmed = engine.chat(
        [*talk(6)[:-1], *messages], trim={"budget_tokens": 400, "strategy": "drop"}, **OPTIONS
    )
    assert trimmed.usage.trimmed is not None
    assert [(item.field, item.messages) for item in trimmed.usage.unrendered] == [
        ("name", (13, 16)),
        ("reasoning", (14,)),
    ]


def test_a_begun_answer_is_continued(client: openai.OpenAI, engine: ostinato.Engine) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two"}]
    reply = ask(client, messages, continue_final_message=True)
    raw = "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\nOne, two"
    tokenizer = engine.runtime.tokenizer
    ids: list[int] = []
    for part in re.split(r"(<\|im_start\|>|<\|im_end\|>)", raw):
        special = tokenizer.special_tokens.get(part)
        ids += tokenizer.encode(part).tolist() if special is None else [special]
    expected = engine.complete(ids, **OPTIONS)
    assert reply.usage.prompt_tokens == len(ids)
    assert reply.choices[0].message.content == expected.text
    with pytest.raises(openai.BadRequestError, match="cannot be continued"):
        ask(client, messages[:1], continue_final_message=True)


# ---------------------------------------------------------------- canonical form


def test_one_form_for_all_conversations_of_an_engine(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "canonical.toml"
    file.write_text(
        "line_ends = true\nwhitespace = true\n[[replacements]]\npattern = 'SKU:\\w+'\nby = 'SKU'\n"
    )
    messy = [{"role": "user", "content": "Hello  there,\r\nhere is SKU:12345."}]
    tidy = [{"role": "user", "content": "Hello there,\nhere is SKU."}]
    with ostinato.load(folder, kv_cache=4 << 20, canonical=file) as engine, serving(engine) as client:
        expected = engine.chat(tidy, **OPTIONS)
        assert expected.usage.changed == ()
        reply = ask(client, messy)
        assert reply.choices[0].message.content == expected.text
        assert reply.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - 1
        where = {(item["rule"], item["where"]) for item in reply.ostinato["canonical"]}
        assert {place for _, place in where} == {"messages[0]"}
        assert {rule for rule, _ in where} >= {"line_ends", "whitespace"}
        left = ask(client, messy, canonical=False)
        assert "canonical" not in left.ostinato
        assert left.usage.prompt_tokens > reply.usage.prompt_tokens
    rules = CanonicalRules(line_ends=True, whitespace=True, replacements=(Replacement(r"SKU:\w+", "SKU"),))
    assert read_canonical_rules(file) == rules
    with ostinato.load(folder, kv_cache=4 << 20, canonical_rules=rules) as engine:
        assert engine.chat(messy, **OPTIONS).text == expected.text
    for text in ("[", "other = true", "tools = 1", "unicode = 'X'", "replacements = 3", "roles = 'user'",
                 "[[replacements]]\npattern = '('\nby = ''", "[[replacements]]\npattern = 'a'"):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ParameterError, match=re.escape(str(file))):
            ostinato.load(folder, canonical=file)
