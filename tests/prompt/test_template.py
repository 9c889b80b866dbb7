"""Choosing templates, their identities, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import ParameterError, TemplateError
from ostinato.ports import SystemClock
from ostinato.prompt.check import check_template
from ostinato.prompt.conversation import conversation_from_dicts
from ostinato.prompt.template import JinjaTemplate, chatml, format_for, named_template, template_for
from ostinato.prompt.tokens import HFTokenizer
from ostinato.types import Conversation, Message, Segment, ToolCall

from .jinja_sources import GEMMA, LLAMA3, LLAMA31, MISTRAL, PHI3, QWEN
from .talk import conversation
from .vocabularies import NONCE, write_folder

Tokenizers = Callable[[str], HFTokenizer]

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
CALLING = Conversation(
    (
        Message("user", "Look!"),
        Message("assistant", tool_calls=(ToolCall("call00001", "look", '{"a":  1}'),)),
        Message("tool", "42", tool_call_id="call00001"),
    )
)


def jinja(source: str, **more: Any) -> JinjaTemplate:
    given = {"special_tokens": ["<s>", "</s>", "<|im_start|>", "<|im_end|>"], "nonce": NONCE, **more}
    return JinjaTemplate(source, clock=SystemClock(), **given)


def test_chatml_says_which_message_a_segment_comes_from() -> None:
    rendered = chatml(default_system="Be kind.").render(conversation(("user", "hi")))
    assert rendered.segments == (
        Segment("<|im_start|>", True),
        Segment("system\nBe kind."),
        Segment("<|im_end|>", True),
        Segment("\n"),
        Segment("<|im_start|>", True, 0),
        Segment("user\nhi", False, 0),
        Segment("<|im_end|>", True, 0),
        Segment("\n", False, 0),
        Segment("<|im_start|>", True),
        Segment("assistant\n"),
    )


@pytest.mark.parametrize("role", ["system", "developer"])
def test_chatmls_default_system_text_gives_way(role: str) -> None:
    talk = conversation((role, "Be brief."), ("user", "hi"))
    text = chatml(default_system="Be kind.").render(talk, add_generation_prompt=False).text
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"


def test_developer_is_system_to_templates_that_do_not_know_it() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{% endfor %}"
    talk = conversation(("developer", "a"), ("user", "b"))
    assert jinja(source).render(talk).text == "[system][user]"
    assert jinja(source + "{# developer #}").render(talk).text == "[developer][user]"


def test_tools_are_never_dropped_without_a_word() -> None:
    talk = conversation_from_dicts([{"role": "user", "content": "hi"}], [TOOL])
    for template in (jinja(LLAMA3), jinja(GEMMA), jinja(PHI3), chatml()):
        with pytest.raises(TemplateError, match="knows no tools") as caught:
            template.render(talk)
        assert caught.value.param == "tools"
        with pytest.raises(TemplateError, match=r"messages\[1\] (calls|is about) tools") as caught:
            template.render(CALLING)
        assert caught.value.param == "messages[1]"
    for source in (LLAMA31, MISTRAL, QWEN):
        assert (
            '"look"'
            in jinja(source, named_tokens={"bos_token": "<s>", "eos_token": "</s>"}).render(talk).text
        )


def test_a_models_separate_template_for_tools() -> None:
    template = jinja("plain", tool_source="{{ tools | length }} tool")
    assert template.render(conversation(("user", "x"))).text == "plain"
    with_tools = conversation_from_dicts([{"role": "user", "content": "x"}], [TOOL])
    assert template.render(with_tools).text == "1 tool"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # As JSON of the template's own making where it makes JSON …
        ("{{ messages[1].tool_calls[0].function.arguments | tojson }}", '{"a": 1}'),
        ("{{ messages[1].tool_calls[0].function | tojson }}", '{"name": "look", "arguments": {"a": 1}}'),
        # … and as the model wrote it where it takes text.
        ("{% set f = messages[1].tool_calls[0].function %}{{ 'x' + f['arguments'] }}", 'x{"a":  1}'),
        ("{% set f = messages[1].tool_calls[0].function %}{{ 'x' ~ f.arguments }}", 'x{"a":  1}'),
        (
            "{% set f = messages[1].tool_calls[0].function %}"
            "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}",
            '{"a":  1}',
        ),
    ],
)  # fmt: skip
def test_arguments_of_calls(source: str, expected: str) -> None:
    assert jinja(source).render(CALLING).text == expected


def test_arguments_that_are_no_json_are_given_as_they_are() -> None:
    broken = Message("assistant", tool_calls=(ToolCall("c", "look", '{"a": '),))
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert jinja(source).render(Conversation((broken,))).text == '{"a": '
    nested = Message("assistant", tool_calls=(ToolCall("c", "look", "[" * 100_000),))
    assert jinja(source).render(Conversation((nested,))).text == "[" * 100_000


def test_a_call_without_text_is_none_to_templates_that_look_for_it() -> None:
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert jinja(source + "{# tool_calls #}").render(CALLING).text == "[Look!][][42]"
    looking = "{{ messages[1].content is none }}{{ messages[1]['content'] is not none }}{# tool_calls #}"
    assert jinja(looking).render(CALLING).text == "TrueFalse"


def test_identity_is_what_decides_the_rendering() -> None:
    base = {"named_tokens": {"bos_token": "<s>"}}
    identity = jinja(LLAMA3, **base).identity
    assert identity.startswith("b3:")
    assert jinja(LLAMA3, **base, name="other").identity == identity
    assert jinja(LLAMA3, named_tokens={"bos_token": "<s>"}, special_tokens=[
        "<|im_end|>", "</s>", "<s>", "<|im_start|>"]).identity == identity  # fmt: skip
    others = [
        jinja(LLAMA3 + " ", **base),
        jinja(LLAMA3, named_tokens={"bos_token": "</s>"}),
        jinja(LLAMA3, **base, variables={"enable_thinking": False}),
        jinja(LLAMA3, **base, tool_source=QWEN),
        jinja(LLAMA3, **base, special_tokens=["<s>"]),
        chatml(),
        chatml(default_system=""),
        chatml(default_system="Be kind."),
    ]
    assert len({identity, *(template.identity for template in others)}) == 1 + len(others)
    assert chatml().identity == named_template("chatml").identity
    assert (
        JinjaTemplate(LLAMA3, special_tokens=["<s>"], nonce="1" * 20, clock=SystemClock()).identity
        == JinjaTemplate(LLAMA3, special_tokens=["<s>"], nonce="2" * 20, clock=SystemClock()).identity
    )


def test_a_template_is_chosen_by_model_by_name_or_by_file(tmp_path: Path, tokenizers: Tokenizers) -> None:
    def choose(tokenizer: HFTokenizer, choice: str = "auto") -> Any:
        return template_for(tokenizer, choice, clock=SystemClock(), nonce=NONCE)

    without = tokenizers("chatml")
    assert choose(without) is None
    assert choose(without, "chatml").name == "chatml"
    config = {"eos_token": "<|im_end|>"}
    folder = write_folder(tmp_path / "model", "chatml", config=config, template="{{ eos_token }}mine")
    tokenizer = HFTokenizer.from_folder(folder, nonce=NONCE)
    own = choose(tokenizer)
    assert own.name == "model"
    assert own.render(conversation(("user", "x"))).segments == (Segment("<|im_end|>", True), Segment("mine"))
    file = tmp_path / "other.jinja"
    file.write_text("{{ messages[0].content }}", encoding="utf-8")
    assert choose(tokenizer, str(file)).render(conversation(("user", "x"))).text == "x"
    with pytest.raises(ParameterError, match=r"neither a template's name .*chatml.* nor a file") as caught:
        choose(tokenizer, "chatlm")
    assert caught.value.param == "template"
    file.write_text("{% if %}")
    with pytest.raises(TemplateError, match="not valid Jinja"):
        choose(tokenizer, str(file))


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(ParameterError, match="there is no template 'x'"):
        named_template("x")
    with pytest.raises(ParameterError, match="chatml template has no option 'colour'"):
        named_template("chatml", colour="red")


@pytest.mark.parametrize(
    ("kind", "name"),
    [("chatml", "chatml"), ("llama3", "llama3"), ("mistral", "mistral-v3"), ("phi3", "phi3"),
     ("gemma", "gemma"), ("llama2", None), ("wordpiece", None)],
)  # fmt: skip
def test_special_tokens_tell_the_format(tokenizers: Tokenizers, kind: str, name: str | None) -> None:
    assert format_for(tokenizers(kind)) == name
    if name is not None:
        assert check_template(named_template(name), tokenizers(kind)).is_good
