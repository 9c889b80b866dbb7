"""Calls are found where they stand, however the answer is cut; what is no call stays text."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import TemplateError
from ostinato.ports import SystemClock
from ostinato.prompt.calls import CallSyntax, Piece, ReadCall, call_syntax
from ostinato.prompt.formats import FORMATS
from ostinato.prompt.formats.common import as_json
from ostinato.prompt.template import JinjaTemplate, named_template
from ostinato.prompt.tokens import HFTokenizer
from ostinato.types import Conversation, Message, ToolCall

from . import jinja_sources
from .test_template import TOOL
from .vocabularies import NONCE

Tokenizers = Callable[[str], HFTokenizer]

LOOK = '{"name": "look", "arguments": {"at": "sky", "n": [1, 2.50]}}'
ARGUMENTS = '{"at": "sky", "n": [1, 2.50]}'
CALL = ReadCall("look", ARGUMENTS)


def syntax_of(name: str) -> CallSyntax:
    syntax = call_syntax(named_template(name))
    assert syntax is not None
    return syntax


TAGGED, JSON, LIST, CHANNELS = map(syntax_of, ("qwen2.5", "llama3.1", "mistral-v3", "harmony"))


def read(
    syntax: CallSyntax, pieces: list[str], *, special: tuple[str, ...] = (), is_whole: bool = True
) -> Piece:
    """All of an answer; of ``pieces`` those in ``special`` are special tokens."""
    reader = syntax.read(("look",), special)
    found = [reader.push("", piece) if piece in special else reader.push(piece) for piece in pieces]
    found.append(reader.finish(is_whole=is_whole))
    return Piece(
        "".join(piece.content for piece in found),
        "".join(piece.reasoning for piece in found),
        tuple(call for piece in found for call in piece.calls),
    )


@st.composite
def cuts(draw: st.DrawFn, text: st.SearchStrategy[str]) -> tuple[str, list[str]]:
    whole = draw(text)
    places = sorted(draw(st.sets(st.integers(0, len(whole)), max_size=8)) | {0, len(whole)})
    return whole, [whole[a:b] for a, b in pairwise(places)]


def test_which_families_write_calls_how() -> None:
    found = {name: syntax.name for name in FORMATS if (syntax := call_syntax(named_template(name)))}
    assert found == {
        "qwen2.5": "tagged",
        "qwen3": "tagged",
        "llama3.1": "json",
        "mistral-v3": "list",
        "mistral-v3-tekken": "list",
        "harmony": "channels",
    }


@pytest.mark.parametrize(
    ("source", "name"),
    [("QWEN", "tagged"), ("LLAMA31", "json"), ("MISTRAL", "list"), ("GEMMA", None)],
)
def test_jinja_templates_tell_by_what_they_write(source: str, name: str | None) -> None:
    special = ("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<s>", "</s>", "<|eot_id|>")
    template = JinjaTemplate(
        getattr(jinja_sources, source),
        special_tokens=special,
        nonce=NONCE,
        clock=SystemClock(),
        named_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )
    syntax = call_syntax(template)
    assert (syntax and syntax.name) == name


# ---------------------------------------------------------------- tagged


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


PARTS = st.sampled_from(
    [
        "Hm.",
        "\n",
        " ",
        "<",
        "<tool_call>",
        "</tool_call>",
        tagged("{}"),
        tagged("no"),
        tagged('{"name": 3}'),
        "ä",
    ]
)


@given(cuts(st.lists(PARTS, max_size=6).map("".join)))
def test_what_is_no_call_stays_text(answer: tuple[str, list[str]]) -> None:
    whole, pieces = answer
    for syntax in (TAGGED, JSON, LIST):
        assert read(syntax, pieces) == Piece(whole)
        assert read(syntax, pieces, is_whole=False) == Piece(whole)


@given(
    cuts(
        st.tuples(
            st.sampled_from(["", "Let me look.", "a < b\n"]),
            st.sampled_from([tagged(LOOK), f"<tool_call>{LOOK}</tool_call>", f"\n{tagged(LOOK)}"]),
            st.sampled_from(["", "\n", f"\n{tagged(LOOK)}", f"\n{tagged('no')}", "\nMore."]),
        ).map("".join)
    )
)
def test_tagged_calls_do_not_depend_on_how_the_answer_is_cut(answer: tuple[str, list[str]]) -> None:
    whole, pieces = answer
    found = read(TAGGED, pieces)
    assert found == read(TAGGED, [whole])
    assert found.calls == (CALL,) * whole.count(LOOK)
    assert "arguments" not in found.content


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (f"Let me look.\n{tagged(LOOK)}", "Let me look."),
        (f"Two lines.\n\n{tagged(LOOK)}", "Two lines.\n"),
        (f"{tagged(LOOK)}\n{tagged(LOOK)}\n", ""),
        (f"{tagged(LOOK)}\nMore.", "\nMore."),
        (f"{tagged(LOOK)}\n<tool_call>\n{{", "\n<tool_call>\n{"),
        (f"A\n{tagged('no')}{tagged(LOOK)}", f"A\n{tagged('no')}"),
    ],
)
def test_one_line_break_belongs_to_the_tag(answer: str, content: str) -> None:
    found = read(TAGGED, list(answer))
    assert found.content == content
    assert found.calls == (CALL,) * answer.count(LOOK)


def test_text_before_a_call_is_not_held_back() -> None:
    reader = TAGGED.read(("look",), ())
    assert reader.push("a < b").content == "a < b"
    assert reader.push("<tool").content == ""
    assert reader.push("box>").content == "<toolbox>"


def test_where_tags_are_special_tokens_text_is_no_tag() -> None:
    special = ("<tool_call>", "</tool_call>")
    forged = tagged(LOOK)
    assert read(TAGGED, list(forged), special=special) == Piece(forged)
    assert read(TAGGED, ["A\n", "<tool_call>", LOOK, "</tool_call>"], special=special) == Piece(
        "A", calls=(CALL,)
    )
    inside = '{"name": "look", "arguments": {"at": "</tool_call>"}}'
    found = read(TAGGED, ["<tool_call>", inside, "</tool_call>"], special=special)
    assert found.calls == (ReadCall("look", '{"at": "</tool_call>"}'),)


@pytest.mark.parametrize(
    "body",
    [
        "", "[]", "null", "{}", '{"name": ""}', '{"name": "a\\n"}', '{"name": "\\ud800"}', '{"name": null}',
        '{"name": "look", "arguments": "{}"}', '{"name": "look", "arguments": [1]}',
        '{"name": "look", "arguments": {}', '{"name": "look", "arguments": {}} and more',
        '{"name": "look", "name": "other", "arguments": {}}', '{"name": "look", "arguments": {"n": NaN}}',
        '{"name": "look", "arguments": {"n": ' + "[" * 100_000 + "]" * 100_000 + "}}",
        '{"name": "look", "arguments": {"n": ' + "9" * 5_000 + "}}", '{"name": "look",, "arguments": {}}',
        '{name: "look", "arguments": {}}', "{'name': 'look'}", '{"name": "' + "a" * 300 + '"}',
    ],
)  # fmt: skip
def test_malformed_calls_stay_text(body: str) -> None:
    for answer in (tagged(body), f"\n{tagged(body)} "):
        assert read(TAGGED, [answer]) == Piece(answer)
    assert read(LIST, [f"[TOOL_CALLS] [{body}]"]).calls == ()


def test_a_call_without_arguments_has_none() -> None:
    assert read(TAGGED, [tagged('{"name": "look"}')]).calls == (ReadCall("look", "{}"),)


# ---------------------------------------------------------------- the others


@given(cuts(st.just('\n {"name": "look", "parameters": {"at": "sky"}} \n')))
def test_json(answer: tuple[str, list[str]]) -> None:
    whole, pieces = answer
    assert read(JSON, pieces).calls == (ReadCall("look", '{"at": "sky"}'),)
    assert read(JSON, pieces, is_whole=False) == Piece(whole)


@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "other", "parameters": {}}',
        '{"name": "look", "parameters": {}}; {"name": "look", "parameters": {}}',
        'Sure: {"name": "look", "parameters": {}}',
        '{"sides": 6}',
    ],
)
def test_json_that_is_an_answer_stays_one(answer: str) -> None:
    assert read(JSON, list(answer)) == Piece(answer)


@given(cuts(st.just(f'Hm. [TOOL_CALLS] [{LOOK}, {LOOK[:-1]}, "id": "abc123XYZ"}}]')))
def test_list(answer: tuple[str, list[str]]) -> None:
    assert read(LIST, answer[1]) == Piece("Hm. ", calls=(CALL, ReadCall("look", ARGUMENTS, "abc123XYZ")))


def test_list_after_a_special_token() -> None:
    special = ("[TOOL_CALLS]",)
    assert read(LIST, ["[TOOL_CALLS]", f" [{LOOK}]"], special=special).calls == (CALL,)
    forged = f"[TOOL_CALLS] [{LOOK}]"
    assert read(LIST, [forged], special=special) == Piece(forged)
    assert read(LIST, ["A", "[TOOL_CALLS]", f" [{LOOK}"], special=special) == Piece(f"A [{LOOK}")


HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")


def harmony(text: str) -> list[str]:
    pieces = [text]
    for token in HARMONY:
        pieces = [part for piece in pieces for part in _split(piece, token)]
    return pieces


def _split(text: str, token: str) -> list[str]:
    parts = text.split(token)
    return [piece for part in parts for piece in (token, part)][1:] if text not in HARMONY else [text]


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.look <|constrain|>json",
        " to=functions.look<|channel|>commentary json",
    ],
)
def test_channels(header: str) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    answer = harmony(f'{thought}{said}{header}<|message|>{{"at": "sky"}}')
    assert read(CHANNELS, answer, special=HARMONY) == Piece(
        "I look.", "Hm.", (ReadCall("look", '{"at": "sky"}'),)
    )
    cut = harmony(f"{header}<|message|>{{")
    assert read(CHANNELS, cut, special=HARMONY, is_whole=False) == Piece("{")
    final = harmony(f"{thought}<|channel|>final<|message|>Blue.")
    assert read(CHANNELS, final, special=HARMONY) == Piece("Blue.", "Hm.")
    assert read(CHANNELS, ["no header"], special=HARMONY) == Piece("no header")


# ---------------------------------------------------------------- and back


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(alphabet='aä"\\\n<{}/ 你', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab ", max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.sampled_from(
        [("qwen2.5", "chatml"), ("qwen3", "chatml"), ("llama3.1", "llama3"), ("mistral-v3", "mistral")]
    ),
    st.lists(st.dictionaries(st.text("ab ", max_size=3), JSON_VALUES, max_size=3), min_size=1, max_size=2),
    st.sampled_from(["", "Let me look.", "a\n\nb <x>"]),
)
def test_what_a_template_writes_is_read_back_and_written_alike(
    tokenizers: Tokenizers, pair: tuple[str, str], arguments: list[dict[str, object]], content: str
) -> None:
    """The answer as the model was taught to write it: what the history holds of it, after the prompt."""
    template = named_template(pair[0])
    syntax = call_syntax(template)
    assert syntax is not None
    if pair[0] == "llama3.1":
        arguments, content = arguments[:1], ""  # room for no more
    if pair[0] == "mistral-v3":
        content = ""
    calls = tuple(
        ToolCall(f"abcdefg{number:02}", "look", as_json(given)) for number, given in enumerate(arguments)
    )
    asked = Conversation((Message("user", "Look!"),), (TOOL,))
    history = Conversation((*asked.messages, Message("assistant", content, tool_calls=calls)), (TOOL,))
    prompt = template.render(asked).text
    whole = template.render(history, add_generation_prompt=False).text
    assert whole.startswith(prompt)
    answer = whole[len(prompt) :]
    for end in ("<|im_end|>\n", "<|eot_id|>", "</s>"):
        answer = answer.removesuffix(end)
    special = ("[TOOL_CALLS]",)
    found = read(syntax, [piece for piece in _split(answer, special[0]) if piece], special=special)
    assert [(call.name, call.arguments) for call in found.calls] == [(c.name, c.arguments) for c in calls]
    assert found.content.removeprefix("<think>\n\n</think>\n").removeprefix("\n") == content
    again = tuple(ToolCall(c.id, r.name, r.arguments) for c, r in zip(calls, found.calls, strict=True))
    back = Conversation((*asked.messages, Message("assistant", found.content, tool_calls=again)), (TOOL,))
    tokenizer = tokenizers(pair[1])
    assert (
        tokenizer.encode_rendered(template.render(back, add_generation_prompt=False)).tolist()
        == tokenizer.encode_rendered(template.render(history, add_generation_prompt=False)).tolist()
    )


@pytest.mark.parametrize("template", [*(named_template(name) for name in FORMATS), "QWEN", "LLAMA31"])
@pytest.mark.parametrize(
    "arguments", ['{"at": "\\ud800"}', '{"\\uDC00": 1}', '{"n": 1e999}', "\\ud800", '{"at": "\\u00e4"}']
)
def test_whatever_a_model_wrote_can_be_history(tokenizers: Tokenizers, template: Any, arguments: str) -> None:
    if isinstance(template, str):
        special = tuple(tokenizers("qwen" if template == "QWEN" else "llama3").special_tokens)
        template = JinjaTemplate(
            getattr(jinja_sources, template),
            special_tokens=special,
            nonce=NONCE,
            clock=SystemClock(),
            named_tokens={"bos_token": "<|begin_of_text|>"},
        )
    call = ToolCall("abcdefghi", "look", arguments)
    messages = (
        Message("user", "Look!"),
        Message("assistant", tool_calls=(call,)),
        Message("tool", "Blue.", tool_call_id=call.id),
    )
    try:
        rendered = template.render(Conversation(messages, (TOOL,)))
    except TemplateError:
        assert call_syntax(template) is None  # it knows no tools at all
        return
    rendered.text.encode()
