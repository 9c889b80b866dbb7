"""Going on from an earlier prompt gives what rendering and tokenizing everything gives, or is not done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConversationError, OstinatoError, TemplateError
from ostinato.prompt.base import Growth, Template
from ostinato.prompt.conversation import conversation_from_dicts
from ostinato.prompt.formats import FORMATS
from ostinato.prompt.growing import GrowingPrompts
from ostinato.prompt.kept import KeptAnswers
from ostinato.prompt.rules import MessageRules, RuledTemplate
from ostinato.prompt.template import JinjaTemplate, Limits, chatml, named_template
from ostinato.prompt.tokens import HFTokenizer
from ostinato.types import Conversation, Message, Rendered, ToolCall

from .jinja_sources import PAIRS
from .talk import TEXT, alternating, conversation, free, with_tools
from .test_trust import hostile
from .vocabularies import NONCE

Tokenizers = Callable[[str], HFTokenizer]

MARKERS = ("<|im_start|>", "<|im_end|>")


class StoppedClock:
    """Stands still, so that two renderings can be compared, and none is out of time."""

    def now(self) -> float:
        return 1.75e9

    def monotonic(self) -> float:
        return 0.0


class Noting(JinjaTemplate):
    """Notes for every rendering whether it went on from an earlier one."""

    def __init__(self, source: str, tokenizer: HFTokenizer, **more: Any) -> None:
        super().__init__(
            source,
            special_tokens=tokenizer.special_tokens,
            nonce=NONCE,
            clock=more.pop("clock", StoppedClock()),
            named_tokens=tokenizer.named_tokens,
            **more,
        )
        self.went_on: list[bool] = []

    def render_on(self, conversation: Conversation, state: object | None) -> Growth:
        growth = super().render_on(conversation, state)
        self.went_on.append(growth.goes_on)
        return growth


def whole(template: Template, tokenizer: HFTokenizer, talk: Conversation) -> list[int]:
    return tokenizer.encode_rendered(template.render(talk)).tolist()


def outcome(make: Callable[[], Any]) -> Any:
    """What comes out: ids, or the error."""
    try:
        return make()
    except OstinatoError as error:
        return type(error), str(error)


def check_growing(template: Template, tokenizer: HFTokenizer, talks: list[Conversation]) -> None:
    prompts = GrowingPrompts(template, tokenizer)
    for talk in talks:
        expected = outcome(lambda talk=talk: whole(template, tokenizer, talk))
        assert outcome(lambda talk=talk: prompts.tokens(talk).tolist()) == expected


def beginnings(messages: list[Any], tools: list[Any] | None = None) -> list[Conversation]:
    """The conversation as it grew, and its middle once more with another end."""
    talks = []
    for end in range(1, len(messages) + 1):
        talks.append(conversation_from_dicts(messages[:end], tools))
        if end > 1 and messages[end - 1]["role"] != "tool":
            other = {"role": messages[end - 1]["role"], "content": "another end"}
            talks.append(conversation_from_dicts([*messages[: end - 1], other], tools))
    return [*talks, *talks[::-1]]


@pytest.fixture(scope="module")
def templates(model_folders: Callable[[str], Path]) -> dict[str, tuple[Noting, HFTokenizer]]:
    made = {}
    for name in PAIRS:
        tokenizer = HFTokenizer.from_folder(model_folders(name), nonce=NONCE)
        assert tokenizer.chat_template is not None
        made[name] = Noting(tokenizer.chat_template, tokenizer), tokenizer
    return made


RULES = (
    None,
    MessageRules(repeats="merge"),
    MessageRules(late_system="lead"),
    MessageRules(late_system="user", repeats="refuse"),
)


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_models_templates(
    templates: dict[str, tuple[Noting, HFTokenizer]], name: str, data: st.DataObject
) -> None:
    template, tokenizer = templates[name]
    texts = TEXT | hostile(sorted(tokenizer.special_tokens))
    strategy = alternating(system=name != "gemma", texts=texts) | free(texts=texts)
    rules = data.draw(st.sampled_from(RULES))
    ruled = template if rules is None else RuledTemplate(template, rules)
    check_growing(ruled, tokenizer, beginnings(data.draw(strategy)))


@pytest.mark.parametrize("name", ["llama31", "mistral", "qwen"])
@settings(max_examples=25, deadline=None)
@given(talk=with_tools())
def test_with_tools(
    templates: dict[str, tuple[Noting, HFTokenizer]], name: str, talk: tuple[list[Any], list[Any]]
) -> None:
    template, tokenizer = templates[name]
    messages, tools = talk
    check_growing(template, tokenizer, [*beginnings(messages, tools), *beginnings(messages, tools[:1])])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_functions(tokenizers: Tokenizers, name: str, data: st.DataObject) -> None:
    tokenizer = tokenizers("chatml")
    template = named_template(name)
    talks = beginnings(data.draw(alternating()))
    ruled = RuledTemplate(template, MessageRules(repeats="merge"))
    for each in (template, ruled):
        check_growing(each, tokenizer, talks)


GROWING = {"llama3", "llama31", "llama2", "gemma", "phi3", "vicuna"}


@pytest.mark.parametrize("name", PAIRS)
def test_which_go_on(model_folders: Callable[[str], Path], name: str) -> None:
    tokenizer = HFTokenizer.from_folder(model_folders(name), nonce=NONCE)
    assert tokenizer.chat_template is not None
    template = Noting(tokenizer.chat_template, tokenizer)
    prompts = GrowingPrompts(template, tokenizer)
    messages = [Message("user" if turn % 2 == 0 else "assistant", f"turn {turn}") for turn in range(9)]
    for end in range(1, 10, 2):
        prompts.tokens(Conversation(tuple(messages[:end])))
    assert template.went_on == [False] + [name in GROWING] * 4


@pytest.mark.model
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_default_model(default_model_path: Path, data: st.DataObject) -> None:
    tokenizer = HFTokenizer.from_folder(default_model_path, nonce=NONCE)
    assert tokenizer.chat_template is not None
    template = Noting(tokenizer.chat_template, tokenizer)
    texts = TEXT | hostile(sorted(tokenizer.special_tokens))
    check_growing(template, tokenizer, beginnings(data.draw(free(texts=texts))))


# ---------------------------------------------------------------- templates made to mislead

HEADS = (
    "",
    "{{ bos_token }}",
    "{% set ns = namespace(n=0, seen='') %}",
    "{% set last = messages[-1].content %}",
    "{% set count = messages | length %}",
    "{% set rest = messages[1:] %}",
    "{% set messages = messages[1:] %}",
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}",
    "{% macro say(text) %}[{{ text }}{{ tail }}]{% endmacro %}{% set tail = messages[-1].role %}",
    "{% macro say(text) %}{{ text | upper }}{% endmacro %}",
    "{% set ns = namespace(n=0, seen='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}",
    "{% set ns = namespace(n=0, seen='') %}{% set alias = ns %}",
    "{% set j = joiner(',') %}",
    "{% set c = cycler('a', 'b') %}",
    "{% set users = messages | selectattr('role', 'equalto', 'user') %}",
    "{% set first = messages | first %}{{ first.role }}",
    "{{ messages | length }}|",
    "{% if tools %}{{ tools | tojson }}{% endif %}",
    "{% set f = messages[-1].content.strip %}",
    "{% set ns = namespace(inner=namespace(n=0), n=0, seen='') %}",
)
LOOPS = (
    "{% for message in messages %}BODY{% endfor %}",
    "{% for message in messages[1:] %}BODY{% endfor %}",
    "{% for message in rest %}BODY{% endfor %}",
    "{% for message in users %}BODY{% endfor %}",
    "{% for message in messages | reverse %}BODY{% endfor %}",
    "{% for message in messages if message.role != 'system' %}BODY{% endfor %}",
    "{% for message in messages %}BODY{% else %}none{% endfor %}",
    "{% if messages | length > 2 %}{% for message in messages %}BODY{% endfor %}{% else %}short"
    "{% for message in messages %}({{ message.content }}){% endfor %}{% endif %}",
    "{% set text %}{% for message in messages %}BODY{% endfor %}{% endset %}{{ text | trim }}",
    "{% filter upper %}{% for message in messages %}BODY{% endfor %}{% endfilter %}",
    "{% for message in messages %}{% if loop.index0 > 3 %}{% break %}{% endif %}BODY{% endfor %}",
    "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}BODY{% endfor %}",
    "{% for message in messages %}x{% endfor %}{% for message in messages %}BODY{% endfor %}",
    "{% for message in messages %}BODY{% endfor %}{% for t in tools or [] %}{{ t.type }}{% endfor %}",
    "{% for message in messages recursive %}BODY{% endfor %}",
    "{% for message in messages[::-1] %}BODY{% endfor %}",
    "{% for message in messages[:-1] %}BODY{% endfor %}",
    "{% generation %}{% for message in messages %}BODY{% endfor %}{% endgeneration %}",
)
BODIES = (
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n",
    "<|im_start|>{{ message.content }}",
    "{{ message.content }}<|im_",
    "end|>{{ message.content }}",
    "{% if loop.first %}first {% endif %}",
    "{% if loop.last %}last {% endif %}",
    "{% if not loop.last %}, {% endif %}",
    "{{ loop.index }}/{{ loop.index0 }}",
    "{{ loop.length }}",
    "{{ loop.revindex }}",
    "{{ loop.previtem.content }}",
    "{% if loop.nextitem is defined %}{{ loop.nextitem.role }}{% endif %}",
    "{{ loop.cycle('a', 'b') }}",
    "{% if loop.changed(message.role) %}*{% endif %}",
    "{{ messages[0].role }}",
    "{{ messages[1].role }}",
    "{{ (messages[1] or messages[0]).content }}",
    "{{ messages[-1].role }}",
    "{{ messages[loop.index0].role }}",
    "{{ messages[loop.index0 - 1].role }}",
    "{{ (messages[loop.index0 + 1] or messages[0]).role }}",
    "{{ (messages[loop.index0 + 2] or messages[0]).role }}",
    "{{ (messages[loop.index] or messages[0]).content }}",
    "{{ messages | length }}",
    "{{ rest[loop.index0].content }}",
    "{{ (messages | last).content }}",
    "{{ messages[1:] | length }}",
    "{% set ns.n = ns.n + 1 %}{{ ns.n }}",
    "{% set ns.seen = ns.seen + message.role[0] %}{{ ns.seen }}",
    "{% set alias.n = alias.n + 2 %}{{ ns.n }}",
    "{% set inner = ns.inner %}{% set inner.n = inner.n + 1 %}{{ inner.n }}",
    "{% set ns.held = namespace(n=1) %}",
    "{% set ns.list = [message.role] %}{{ ns.list | join }}",
    "{{ count }}",
    "{{ last }}",
    "{{ system }}",
    "{{ say(message.content) }}",
    "{{ j() }}",
    "{{ c.next() }}",
    "{{ users | list | length }}",
    "{{ strftime_now('%S%f') }}",
    "{{ add_generation_prompt }}",
    "{% if tools %}{{ tools | length }}{% endif %}",
    "{% if message.role == 'assistant' %}{% set tools = 'mine' %}{% endif %}{{ tools }}",
    "{% if message.role == 'assistant' %}{% set count = 'mine' %}{% endif %}{{ count }}",
    "{% for part in message.content %}{{ loop.index }}{{ loop.last }}{% endfor %}",
    "{% for part in [1, 2] %}{% if loop.index == 2 %}{% break %}{% endif %}{{ part }}{% endfor %}",
    "{% for loopy in [loop.index0] %}{{ loopy }}{% endfor %}",
    "{% generation %}{{ loop.index0 }}{{ message.content }}{% endgeneration %}",
    "{% with x = loop.index %}{{ x }}{% endwith %}",
    "{% if message.role == 'system' and loop.index0 > 2 %}{{ raise_exception('late ' ~ count) }}{% endif %}",
    "{{ f() }}",
    "{{ first.content }}",
    "{{ self }}",
)
ENDS = (
    "",
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{{ ns.n }}{{ ns.seen }}",
    "{{ messages[-1].role }}",
    "{{ loop }}",
    "end|>",
)


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_templates_made_to_mislead(tokenizers: Tokenizers, data: st.DataObject) -> None:
    tokenizer = tokenizers("chatml")
    heads = "".join(data.draw(st.lists(st.sampled_from(HEADS), max_size=2)))
    body = "".join(data.draw(st.lists(st.sampled_from(BODIES), min_size=1, max_size=3)))
    loop = data.draw(st.sampled_from(LOOPS[:3]) | st.sampled_from(LOOPS)).replace("BODY", body)
    source = heads + loop + data.draw(st.sampled_from(ENDS))
    template = Noting(source, tokenizer, clock=StoppedClock())
    texts = st.sampled_from(["", "a", "word", " x ", *MARKERS, "im_end", "end|>", "<|im_", "\n"])
    check_growing(template, tokenizer, beginnings(data.draw(free(texts=texts))))


class TickingClock(StoppedClock):
    """Every look is a day later."""

    def __init__(self) -> None:
        self.days = 0

    def now(self) -> float:
        self.days += 1
        return 1.75e9 + 86_400 * self.days


PLAIN_BODY = BODIES[0]
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("body", "goes_on"),
    [
        (PLAIN_BODY, True),
        (PLAIN_BODY + "{% if loop.first %}first{% endif %}{{ loop.index }}", True),
        (PLAIN_BODY + "{% if loop.last %}last{% endif %}", True),
        (PLAIN_BODY + "{% if messages[loop.index0 + 1] is defined %}more{% endif %}", True),
        (PLAIN_BODY + "{% set ns.n = ns.n + 1 %}{{ ns.n }}", True),
        (PLAIN_BODY + "{% if messages[loop.index0 + 2] is defined %}more{% endif %}", False),
        (PLAIN_BODY + "{{ messages | length }}", False),
        (PLAIN_BODY + "{{ count }}", False),
    ],
)
def test_what_is_gone_on_from(tokenizers: Tokenizers, body: str, goes_on: bool) -> None:
    """The property above would hold, too, if nothing ever went on."""
    head = "{% set ns = namespace(n=0) %}{% set count = messages | length %}"
    template = Noting(
        head + "{% for message in messages %}" + body + "{% endfor %}{{ ns.n }}", tokenizers("chatml")
    )
    talks = [
        conversation(*[("user", "hello"), ("assistant", "hello"), ("user", "why"), ("user", "yes")][:end])
        for end in range(1, 5)
    ]
    check_growing(template, tokenizers("chatml"), talks)
    assert template.went_on[2:] == [goes_on] * 2


def test_rules_that_leave_earlier_messages_alone(tokenizers: Tokenizers) -> None:
    template = Noting("{% for message in messages %}" + PLAIN_BODY + "{% endfor %}", tokenizers("chatml"))
    ruled = RuledTemplate(template, MessageRules(repeats="merge", late_system="lead"))
    talk = [
        ("user", "hello"),
        ("assistant", "hello"),
        ("user", "why"),
        ("user", "yes"),
        ("system", "be brief"),
    ]
    check_growing(ruled, tokenizers("chatml"), [conversation(*talk[:end]) for end in range(1, 6)])
    assert template.went_on == [False, True, True, False, False]


def test_the_day_may_change(tokenizers: Tokenizers) -> None:
    template = Noting(
        "{{ strftime_now('%d %b %Y') }}{% for message in messages %}" + PLAIN_BODY + "{% endfor %}",
        tokenizers("chatml"),
        clock=TickingClock(),
    )
    prompts = GrowingPrompts(template, tokenizers("chatml"))
    beginnings = [
        tokenizers("chatml").decode(prompts.tokens(talk_of(count)).tolist())[:11] for count in (1, 2)
    ]
    assert beginnings == ["16 Jun 2025", "18 Jun 2025"]  # one was spent on the attempt
    assert template.went_on == [False, False]


def test_a_marker_that_two_turns_make_together(tokenizers: Tokenizers) -> None:
    template = Noting(
        "{% for message in messages %}end|>{{ message.role }}<|im_end|>\n<|im_{% endfor %}end|>",
        tokenizers("chatml"),
    )
    talks = [Conversation((Message("user", "hello"),) * count) for count in range(1, 5)]
    check_growing(template, tokenizers("chatml"), talks)
    assert template.went_on[1:] == [True] * 3


def test_limits_are_those_of_the_whole(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers("chatml")
    for max_chars in range(60, 400, 17):
        template = Noting(
            "{% for message in messages %}" + PLAIN_BODY + "{% endfor %}",
            tokenizer,
            limits=Limits(max_chars=max_chars),
        )
        check_growing(
            template,
            tokenizer,
            [Conversation((Message("user", "hello" * 4),) * count) for count in range(1, 9)],
        )


# ---------------------------------------------------------------- memory


def talk_of(count: int, text: str = "hello") -> Conversation:
    return Conversation(tuple(Message("user", f"{text} {number}") for number in range(count)))


@pytest.fixture
def noting(tokenizers: Tokenizers) -> Noting:
    return Noting(
        "{% for message in messages %}" + PLAIN_BODY + "{% endfor %}" + PROMPT, tokenizers("chatml")
    )


def test_scopes_share_nothing(tokenizers: Tokenizers, noting: Noting) -> None:
    prompts = GrowingPrompts(noting, tokenizers("chatml"))
    prompts.tokens(talk_of(3), scope="a")
    prompts.tokens(talk_of(4), scope="b")
    prompts.tokens(talk_of(4))
    prompts.tokens(talk_of(4), scope="a")
    assert noting.went_on == [False, False, False, True]


def test_keys_that_collide_are_told_apart(
    tokenizers: Tokenizers, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ostinato.prompt.growing as module

    monkeypatch.setattr(module, "_keys", lambda root, messages: iter([1] * len(messages)))
    prompts = GrowingPrompts(noting, tokenizers("chatml"))
    for talk in (talk_of(2), talk_of(2, "other"), talk_of(3), talk_of(3, "other")):
        assert prompts.tokens(talk).tolist() == whole(noting, tokenizers("chatml"), talk)


def test_memory_is_bounded(tokenizers: Tokenizers, noting: Noting) -> None:
    prompts = GrowingPrompts(noting, tokenizers("chatml"), capacity_bytes=50_000)
    for number in range(200):
        prompts.tokens(talk_of(3, f"conversation {number}"))
        assert prompts.size_bytes <= 50_000
    assert 5 < len(prompts) < 30
    prompts.tokens(talk_of(3, "x" * 20_000))
    assert 5 < len(prompts) < 30
    nothing = GrowingPrompts(noting, tokenizers("chatml"), capacity_bytes=0)
    nothing.tokens(talk_of(3))
    assert len(nothing) == nothing.size_bytes == 0


def test_a_growing_conversation_is_kept_once_or_twice(tokenizers: Tokenizers, noting: Noting) -> None:
    prompts = GrowingPrompts(noting, tokenizers("chatml"))
    for count in range(1, 30):
        prompts.tokens(talk_of(count))
    assert len(prompts) == 2
    assert noting.went_on == [False] + [True] * 28


def test_tools_are_compared_by_content(tokenizers: Tokenizers) -> None:
    source = "{{ tools | tojson }}{% for message in messages %}" + PLAIN_BODY + "{% endfor %}"
    template = Noting(source, tokenizers("chatml"))
    prompts = GrowingPrompts(template, tokenizers("chatml"))
    parameters: dict[str, Any] = {"type": "object", "limit": 1}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": parameters}}
    for change in (1, 1, 1.0, True, "1", {"low": 1, "high": 2}, {"high": 2, "low": 1}, 2**70, 2**70):
        parameters["limit"] = change
        talk = Conversation((Message("user", "hello"),) * (1 + len(template.went_on)), (tool,))
        assert prompts.tokens(talk).tolist() == whole(template, tokenizers("chatml"), talk)
    assert template.went_on == [False, True, False, False, False, False, False, False, False]


def test_what_is_checked_stays_checked(tokenizers: Tokenizers, noting: Noting) -> None:
    prompts = GrowingPrompts(noting, tokenizers("chatml"))
    prompts.tokens(talk_of(3))
    orphan = Message("tool", "42", tool_call_id="nobody")
    with pytest.raises(ConversationError, match=r"messages\[3\]"):
        prompts.tokens(Conversation((*talk_of(3).messages, orphan)))
    call = Message("assistant", "", tool_calls=(ToolCall("1", "f", "{}"),))
    with pytest.raises(TemplateError, match=r"messages\[3\] calls tools"):
        prompts.tokens(Conversation((*talk_of(3).messages, call)))


def test_ids_are_the_callers_own(tokenizers: Tokenizers, noting: Noting) -> None:
    prompts = GrowingPrompts(noting, tokenizers("chatml"))
    first = prompts.tokens(talk_of(3))
    expected = first.tolist()
    first[:] = 0
    assert prompts.tokens(talk_of(3)).tolist() == expected


@pytest.mark.parametrize("is_jinja", [True, False])
def test_kept_answers(tokenizers: Tokenizers, noting: Noting, is_jinja: bool) -> None:
    tokenizer = tokenizers("chatml")
    template: Template = noting if is_jinja else chatml()
    kept = KeptAnswers(tokenizer)
    prompts = GrowingPrompts(template, tokenizer, kept=kept)
    messages = [Message("user", "Which animal jumps?")]
    num_kept = 0
    for turn in range(4):
        talk = Conversation(tuple(messages))
        made = prompts.prompt(talk, scope="tenant")
        assert made.ids.tolist() == kept.encode(template.render(talk), scope="tenant").tolist()
        assert made.num_kept == num_kept
        assert made.tail is not None
        answer = f"The fox, as in turn {turn}."
        spelled = [number for char in answer for number in tokenizer.encode(char).tolist()]
        if turn != 2:  # this one's answer comes from elsewhere
            assert kept.keep(made.tail, spelled, scope="tenant")
            num_kept += len(made.tail.ids) + len(spelled)
        messages += [Message("assistant", answer), Message("user", "And then?")]
    assert prompts.prompt(Conversation(tuple(messages)), scope="other").num_kept == 0


def test_a_format_as_function_tokenizes_only_what_is_new(
    tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizers("chatml")
    prompts = GrowingPrompts(chatml(), tokenizer)
    prompts.tokens(talk_of(20))
    counts: list[int] = []
    encode_after = tokenizer.encode_after
    monkeypatch.setattr(
        tokenizer,
        "encode_after",
        lambda left, segments, **more: (
            counts.append(len(segments)) or encode_after(left, segments, **more)  # type: ignore[func-returns-value]
        ),
    )
    expected = tokenizer.encode_rendered(Rendered(chatml().render(talk_of(21)).segments)).tolist()
    counts.clear()
    assert prompts.tokens(talk_of(21)).tolist() == expected
    assert counts == [5]  # the old generation prompt's text, which goes on otherwise, and what is new
