"""Two prompts beside each other: the token where they part, its name, and what each layer could have had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from diagnose.conftest import DAY
from diagnose.planted import ANSWERS, QUESTIONS, SYSTEM, TOOLS, Row
from ostinato.cli import main
from ostinato.diagnose.diff import Diff, compare
from ostinato.diagnose.material import Asked, read_one, read_requests
from ostinato.diagnose.writing import Writer
from ostinato.errors import ParameterError, TraceError
from ostinato.prompt.jinja import JinjaTemplate
from ostinato.prompt.template import named_template, template_for
from ostinato.prompt.tokens import HFTokenizer
from ostinato.types import num_common

pytestmark = pytest.mark.model
NONCE = "7" * 20


class Clock:
    def __init__(self, time_s: float) -> None:
        self.time_s = time_s

    def now(self) -> float:
        return self.time_s

    def monotonic(self) -> float:
        return 0.0


def body(*messages: tuple[str, str], **more: Any) -> Row:
    return {"messages": [{"role": role, "content": content} for role, content in messages], **more}


def asked(row: Row, folder: Path) -> Asked:
    path = folder / f"{abs(hash(json.dumps(row)))}.json"
    path.write_text(json.dumps(row))
    return read_one(str(path))


def differ(first: Row, second: Row, writer: Writer, folder: Path) -> Diff:
    return compare(writer.write(asked(first, folder)), writer.write(asked(second, folder)), on=DAY)


def test_the_first_token_and_every_later_resynchronisation(writer: Writer, tmp_path: Path) -> None:
    first = body(("system", f"It is 08:01.\n{SYSTEM}"), ("user", QUESTIONS[0]))
    second = body(("system", f"It is 09:02.\n{SYSTEM}"), ("user", QUESTIONS[1]))
    found = differ(first, second, writer, tmp_path)
    a, b = found.a.tokens, found.b.tokens
    assert found.num_common == num_common(a, b) > 0
    assert found.cause.kind == "timestamp"
    assert found.cause.where == "messages[0] (system)"
    long = max(found.runs, key=lambda run: run.length)
    assert np.array_equal(a[long.a : long.a_end], b[long.b : long.b_end])
    assert "support assistant of Acme" in found.b.text(long.b, long.b_end)
    assert found.num_lost >= long.length > 150
    assert found.differences[-1].causes[0].kind == "new_text"
    layers = {item.layer: item.num_tokens for item in found.potentials}
    assert layers["arena"] == found.num_common
    assert layers["shared"] == found.num_common // 16 * 16
    assert layers["non_prefix"] >= long.length
    assert layers["exact"] == 0


def test_a_conversation_that_goes_on_is_nothing_to_mend(writer: Writer, tmp_path: Path) -> None:
    first = body(("system", SYSTEM), ("user", QUESTIONS[0]))
    second = body(
        ("system", SYSTEM), ("user", QUESTIONS[0]), ("assistant", ANSWERS[0]), ("user", QUESTIONS[1])
    )
    for made in (writer, Writer(writer._words, named_template("chatml"))):
        found = differ(first, second, made, tmp_path)
        assert found.cause.kind == "grows", found.as_dict()
        assert found.num_lost == 0
    same = differ(first, first, writer, tmp_path)
    assert same.cause.kind == "identical"
    assert {item.layer: item.num_tokens for item in same.potentials}["exact"] == len(same.b.tokens)
    other = differ(first, {**first, "temperature": 0.5}, writer, tmp_path)
    assert {item.layer: item.num_tokens for item in other.potentials}["exact"] == 0


CASES = [
    ("uuid", ("id 1b4e28ba-2fa1-11d2-883f-0016d3cca427\n", "id 6fa459ea-ee8a-3ca4-894e-db77e160355e\n")),
    ("id", ("run req_00aa11bb22cc\n", "run req_33dd44ee55ff\n")),
    ("whitespace", ("Be  kind.\n", "Be kind.\n")),
    ("number_format", ("There are 12,000 of us.\n", "There are 12000 of us.\n")),
    ("order", ("Shops: Lyon, Porto, Ghent.\n", "Shops: Ghent, Lyon, Porto.\n")),
    ("key_order", ('{"plan": "gold", "tier": "two"}\n', '{"tier": "two", "plan": "gold"}\n')),
    ("user_data", ("user: jane@example.org\n", "user: joe@example.com\n")),
    ("system_text", ("Be gentle with them.\n", "Sing whenever you can.\n")),
]


@pytest.mark.parametrize(("kind", "texts"), CASES)
def test_a_change_in_the_system_text_is_named(
    kind: str, texts: tuple[str, str], writer: Writer, tmp_path: Path
) -> None:
    first, second = (body(("system", text + SYSTEM), ("user", QUESTIONS[0])) for text in texts)
    found = differ(first, second, writer, tmp_path)
    assert found.cause.kind == kind, found.as_dict()["differences"]
    assert found.cause.fix


def test_tools_are_told_apart_by_order_keys_and_set(writer: Writer, tmp_path: Path) -> None:
    first = body(("system", SYSTEM), ("user", QUESTIONS[0]), tools=TOOLS)
    for kind, tools in (
        ("tool_order", TOOLS[::-1]),
        ("key_order", [{"function": each["function"], "type": "function"} for each in TOOLS]),
        ("tools_changed", TOOLS[1:]),
    ):
        assert differ(first, {**first, "tools": tools}, writer, tmp_path).cause.kind == kind


def test_a_system_text_that_the_template_puts_in(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    template = template_for(tokenizer, clock=Clock(0.0), nonce=NONCE)
    first = body(("system", SYSTEM), ("user", QUESTIONS[0]))
    second = body(("user", QUESTIONS[0]))
    found = differ(first, second, Writer(tokenizer, template), tmp_path)
    assert found.cause.kind == "default_system", found.as_dict()["differences"]


def test_a_date_that_the_template_writes(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    source = (
        "<|im_start|>system\nToday is {{ strftime_now('%Y-%m-%d') }}.\n" + SYSTEM + "<|im_end|>\n"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = asked(body(("user", QUESTIONS[0])), tmp_path)
    written = []
    for day in (1, 9):
        template = JinjaTemplate(
            source, special_tokens=tokenizer.special_tokens, nonce=NONCE, clock=Clock(1.7e9 + day * 86400)
        )
        written.append(Writer(tokenizer, template).write(row))
    found = compare(*written)
    assert found.cause.kind == "template_date"
    assert found.num_lost > 100


def test_reasoning_that_the_template_drops_from_the_history(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    thought = {
        "role": "assistant",
        "content": ANSWERS[0],
        "reasoning_content": "They ask where it is, so I look.",
    }
    talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTIONS[0]}, thought]
    result = [{"role": "user", "content": QUESTIONS[1]}]
    bare = {key: value for key, value in thought.items() if key != "reasoning_content"}
    first = {"messages": [*talk, *result]}
    second = {"messages": [*talk[:2], bare, *result, {"role": "assistant", "content": ANSWERS[1]}, *result]}
    found = differ(first, second, Writer(tokenizer), tmp_path)
    assert found.cause.kind == "reasoning_dropped"


def test_an_answer_in_other_tokens_and_a_second_bos(tokenizer: HFTokenizer, writer: Writer) -> None:
    text = f"{SYSTEM}\nassistant: understanding\n{SYSTEM}"
    ids = tuple(tokenizer.encode(text).tolist())
    cut = text.index("understanding") + 5
    parts = [tokenizer.encode(text[:cut]), tokenizer.encode(text[cut:])]
    other = tuple(np.concatenate(parts).tolist())
    assert ids != other
    found = compare(writer.write(Asked("a", token_ids=ids)), writer.write(Asked("b", token_ids=other)))
    assert found.cause.kind == "retokenised"
    assert found.num_lost > 150
    bos = tokenizer.special_tokens[tokenizer.bos_token or ""]
    found = compare(writer.write(Asked("a", token_ids=ids)), writer.write(Asked("b", token_ids=(bos, *ids))))
    assert found.cause.kind == "bos"


def test_the_command_shows_two_turns_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = [body(("system", f"It is 0{n}:30.\n{SYSTEM}"), ("user", QUESTIONS[n]), id=f"r{n}") for n in (1, 2)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = CliRunner().invoke(main, ["diff", f"{log}:1", f"{log}#r2"])
    assert result.exit_code == 0, result.output
    assert "timestamp" in result.output
    assert "Move the time" in result.output
    result = CliRunner().invoke(main, ["diff", f"{log}:1", f"{log}:2", "--json"])
    told = json.loads(result.output)
    assert told["cause"]["kind"] == "timestamp"
    assert told["resynchronised"]
    assert told["differences"][0]["segment"] == "messages[0] (system)"
    assert {item["layer"] for item in told["reuse"]} >= {"arena", "shared", "non_prefix", "exact", "semantic"}
    text = tmp_path / "a.txt"
    text.write_text("Once upon a time")
    assert CliRunner().invoke(main, ["diff", str(text), str(text)]).exit_code == 0


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"messages": []}\n{"hash_ids": [1], "input_length": 9}\n')
    with pytest.raises(ParameterError, match="no request 7"):
        read_one(f"{log}:7")
    with pytest.raises(ParameterError, match="is not one request"):
        read_one(str(log))
    with pytest.raises(ParameterError, match="no file"):
        read_one("nowhere.jsonl:1")
    result = CliRunner().invoke(main, ["diff", f"{log}:2", f"{log}:2"])
    assert result.exit_code == 2
    assert "--trace-content" in result.output
    log.write_text("{]\n")
    with pytest.raises(TraceError, match="line 1"):
        read_requests(log)
