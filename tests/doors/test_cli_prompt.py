"""``ostinato template`` and ``ostinato prompt`` with the default model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ostinato.cli import main
from ostinato.prompt.formats import FORMATS

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("default_model_path")]


def test_list_names_every_format_and_its_source() -> None:
    result = CliRunner().invoke(main, ["template", "list"])
    assert result.exit_code == 0
    assert all(name in result.output and item.source in result.output for name, item in FORMATS.items())
    listed = json.loads(CliRunner().invoke(main, ["template", "list", "--json"]).output)
    assert {record["name"] for record in listed} == set(FORMATS)


@pytest.mark.parametrize("name", [*FORMATS, "auto"])
def test_show_writes_the_markers(name: str) -> None:
    result = CliRunner().invoke(main, ["template", "show", name])
    assert result.exit_code == 0, result.output
    assert "How many sides has a hexagon?" in result.output
    assert ("⟦" in result.output) == (name != "plain")


def test_check_all() -> None:
    result = CliRunner().invoke(main, ["template", "check", "--all", "--json"])
    assert result.exit_code == 0, result.output
    reports = {record["choice"]: record for record in json.loads(result.output)}
    assert set(reports) == {"auto", *FORMATS}
    assert {name for name, record in reports.items() if record["fits"]} == {
        *("auto", "chatml", "smollm2", "qwen2.5", "qwen3", "plain")
    }
    assert "'<|begin_of_text|>'" in reports["llama3"]["problems"][0]


def test_check_of_one_that_does_not_fit_names_the_marker_and_fails(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["template", "check", "llama3"])
    assert result.exit_code == 1
    assert "'<|begin_of_text|>'" in result.output
    file = tmp_path / "made_up.jinja"
    file.write_text("{% for m in messages %}<|im_begin|>{{ m.content }}{% endfor %}")
    result = CliRunner().invoke(main, ["template", "check", str(file)])
    assert "'<|im_begin|>' looks like a special token, but is text here" in result.output


def test_lint_of_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "guide.txt"
    file.write_text("Today is {{date}}.\n\nYou are a guide in a museum.\n\n{{question}}")
    result = CliRunner().invoke(main, ["prompt", "lint", str(file)])
    assert result.exit_code == 0
    assert "Before stable text: date." in result.output
    assert "You are a guide in a museum.\n\nToday is {{date}}.\n\n{{question}}" in result.output
    (advice,) = json.loads(CliRunner().invoke(main, ["prompt", "lint", str(file), "--json"]).output)
    assert advice["lost_tokens"] > 5


def test_lint_of_named_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.toml"
    file.write_text(
        "[guide]\nmessages = [\n"
        '  {role = "system", content = "It is {{date}}.\\n\\nBe brief and kind."},\n'
        '  {role = "user", content = "{{question}}"},\n]\n\n'
        '[fine]\ntext = "Be brief. {{question}}"\n'
    )
    result = CliRunner().invoke(main, ["prompt", "lint", str(file)])
    assert result.exit_code == 0, result.output
    assert "[system]\nBe brief and kind.\n\n[user]\nIt is {{date}}.\n\n{{question}}" in result.output
    guide, fine = json.loads(CliRunner().invoke(main, ["prompt", "lint", str(file), "--json"]).output)
    assert guide["lost_tokens"] > 0
    assert fine["lost_tokens"] == 0


def test_lint_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    records = [
        {"messages": [{"role": "system", "content": f"It is 2026-11-30 10:{minute}.\n{'Be brief. ' * 20}"}]}
        for minute in (10, 20, 30)
    ]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    for path in (log, tmp_path):
        result = CliRunner().invoke(main, ["prompt", "lint", str(path), "--json"])
        assert result.exit_code == 0, result.output
        (finding,) = json.loads(result.output)
        assert finding["kind"] == "timestamp"
        assert finding["num_requests"] == 2
        assert finding["lost_tokens"] >= 40
    assert "costs" in CliRunner().invoke(main, ["prompt", "lint", str(log)]).output


def test_lint_of_a_log_shows_what_is_found_more_than_once(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    times = [f"It is 10:{minute}." for minute in range(10, 25)]
    texts = [f"{time}\n{'Be brief and kind. ' * 20}\n{'Say no more. ' * 20}" for time in times]
    texts[-1] = texts[-1].replace("\nSay", "\nRequest req_8f3ac91b77\nSay")
    texts[-2] = texts[-2].replace("\nSay", "\nRequest req_01bd88aa31\nSay")
    forms = [
        {"prompt": texts[0]},
        {"body": {"messages": [{"role": "user", "content": texts[1]}]}},
        # As ostinato serve --trace --trace-content writes it, with and without a prompt of ids.
        {"v": 1, "hash_ids": [1], "request": {"messages": [{"role": "user", "content": texts[2]}]}},
        {"v": 1, "hash_ids": [1], "request": {"prompt": [0]}},
        *({"input": text} for text in texts[3:]),
    ]
    log.write_text("".join(json.dumps(form) + "\n" for form in forms))
    arguments = ["prompt", "lint", str(log), "--json"]
    (finding,) = json.loads(CliRunner().invoke(main, arguments).output)
    assert (finding["kind"], finding["num_requests"]) == ("timestamp", 14)
    rare = json.loads(CliRunner().invoke(main, [*arguments, "--min-requests", "1"]).output)
    assert {item["kind"] for item in rare} == {"timestamp", "id"}
    assert "1 more in fewer than 2 of 16 requests" in CliRunner().invoke(main, arguments[:-1]).output
    log.write_text('{"v": 1, "hash_ids": [1, 2]}\n')
    assert "without --trace-content" in CliRunner().invoke(main, arguments).output


@pytest.mark.parametrize("line", ["{", '{"other": 1}', "[]", '{"messages": [3]}'])
def test_a_log_that_is_none_is_named_by_line(tmp_path: Path, line: str) -> None:
    log = tmp_path / "requests.jsonl"
    log.write_text(f'{{"input": "fine"}}\n{line}\n')
    result = CliRunner().invoke(main, ["prompt", "lint", str(log)])
    assert result.exit_code == 2
    assert "line 2" in result.output
