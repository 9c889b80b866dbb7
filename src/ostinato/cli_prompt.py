"""The command line for what comes before the model: ``ostinato template …``, ``ostinato prompt …``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson

from .cli_model import json_option, model_option, offline_option, store_option, template_of, tokenizer_of
from .errors import ParameterError

if TYPE_CHECKING:
    from .prompt.template import Template


_SMALL_LOG = 10
"""In a log of so few requests, what is found once may be found in all there will be."""


@click.group()
def template() -> None:
    """Chat templates: what there is, what they write, whether they fit a model."""


@template.command("list")
@json_option
def template_list(as_json: bool) -> None:
    """List the chat formats that are written as code, with the source of each."""
    from .prompt.formats import FORMATS

    if as_json:
        records = [
            {"name": item.name, "version": item.version, "options": dict(item.options), "source": item.source}
            for item in FORMATS.values()
        ]
        click.echo(json.dumps(records))
        return
    for item in FORMATS.values():
        click.echo(f"{item.name:20} {item.source}")
    click.echo("Any other model: its own Jinja template (auto), or a file with one.")


@template.command("show")
@click.argument("name")
@model_option
@store_option
@offline_option
def template_show(name: str, model: str | None, store: Path | None, offline: bool | None) -> None:
    """Show what template NAME (auto, a format, or a file) makes of a small conversation, and what it leaves
    out of others.

    Markers stand between ⟦ and ⟧. A model is only needed for auto and for files.
    """
    from .errors import ClientError
    from .prompt.check import SAMPLES
    from .prompt.formats import FORMATS
    from .prompt.template import named_template
    from .types import Conversation

    if name in FORMATS:
        chosen: Template = named_template(name)
        click.echo(f"{name}, as documented at {FORMATS[name].source}")
        for option, value in FORMATS[name].options.items():
            click.echo(f"option {option} = {value!r}")
    else:
        chosen = template_of(*tokenizer_of(model, store, offline), name)
        click.echo(chosen.name)
    click.echo(f"identity {chosen.identity}")
    click.echo(_what_it_knows(chosen) + "\n")
    for messages in SAMPLES[1:]:
        try:
            rendered = chosen.render(Conversation(messages))
        except ClientError as error:
            click.echo(f"({', '.join(message.role for message in messages)}: {error})\n")
            continue
        shown = (f"⟦{part.text}⟧" if part.is_marker else part.text for part in rendered.segments)
        click.echo("".join(shown) + "\n")


@template.command("check")
@click.argument("name", required=False)
@click.option("--all", "check_all", is_flag=True, help="The model's own template and every format.")
@model_option
@store_option
@offline_option
@json_option
@click.pass_context
def template_check(
    ctx: click.Context,
    name: str | None,
    check_all: bool,
    model: str | None,
    store: Path | None,
    offline: bool | None,
    as_json: bool,
) -> None:
    """Render, tokenize, decode and compare: does template NAME (auto, a format, a file) fit the model?

    Names the first marker that did not become one token. With --all, formats of other models' families are
    expected not to fit; only the model's own template decides the exit status.
    """
    from .prompt.check import check_template
    from .prompt.formats import FORMATS
    from .prompt.unrendered import knowledge

    tokenizer, nonce = tokenizer_of(model, store, offline)
    own = ["auto"] if tokenizer.chat_template is not None else []
    choices = [*own, *FORMATS] if check_all else [name or "auto"]
    reports = [
        (choice, check_template(template_of(tokenizer, nonce, choice), tokenizer)) for choice in choices
    ]
    if as_json:
        records = [
            {
                "choice": choice,
                "fits": report.is_good,
                **asdict(report),
                "knows": {**asdict(knowledge(made)), "calls_in_answers": _calls_of(made)},
            }
            for choice, report in reports
            for made in [template_of(tokenizer, nonce, choice)]
        ]
        click.echo(json.dumps(records, ensure_ascii=False))
    else:
        for choice, report in reports:
            found = report.problems[0] if report.problems else " ".join(report.markers) or "no markers"
            click.echo(f"{'fits    ' if report.is_good else 'does not'}  {choice:18} {found}")
            if not check_all:
                click.echo(_what_it_knows(template_of(tokenizer, nonce, choice)))
            for note in report.notes if not check_all or choice == "auto" else ():
                click.echo(f"          note: {note}")
    deciding = [report for choice, report in reports if not check_all or choice == "auto"]
    ctx.exit(0 if all(report.is_good for report in deciding) else 1)


def _what_it_knows(chosen: Template) -> str:
    """What a template does with the parts of conversations that not every format has a place for."""
    from .prompt.unrendered import knowledge

    known = {**asdict(knowledge(chosen)), "calls_in_answers": _calls_of(chosen)}
    return "\n".join(f"{part.replace('_', ' '):18} {what}" for part, what in known.items())


def _calls_of(chosen: Template) -> str:
    from .prompt.calls import call_syntax

    syntax = call_syntax(chosen)
    return "not read" if syntax is None else f"read ({syntax.name})"


@click.group()
def prompt() -> None:
    """Prompts: what keeps them out of the cache."""


@prompt.command("lint")
@click.argument("file", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--min-requests",
    type=click.IntRange(1),
    help=f"Show of a log what is found in so many requests. [default: 2, of {_SMALL_LOG} or fewer 1]",
)
@model_option
@store_option
@offline_option
@json_option
def prompt_lint(
    file: Path,
    min_requests: int | None,
    model: str | None,
    store: Path | None,
    offline: bool | None,
    as_json: bool,
) -> None:
    """Find what makes prompts differ that need not.

    FILE is a prompt with {{variables}}, or a .toml file of named prompts: says what the places of the
    variables cost per call, and proposes an order. Or it is a log of requests (.jsonl with "messages",
    "prompt" or "input" in every line or its "body" or "request", such as ostinato serve writes with --trace
    and --trace-content; or a folder of such files): finds what changes in text that stays: times, ids,
    numbers, lists, content.
    """
    from .prompt.lint import lint_requests

    tokenizer, _ = tokenizer_of(model, store, offline)

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    if file.is_file() and file.suffix != ".jsonl":
        _lint_prompts(file, count, as_json=as_json)
        return
    files = sorted(file.rglob("*.jsonl")) if file.is_dir() else [file]
    requests = [text for one in files for text in _requests(one, tokenizer.decode)]
    findings = lint_requests(requests, count)
    least = min_requests if min_requests is not None else 2 if len(requests) > _SMALL_LOG else 1
    findings, rare = (
        tuple(item for item in findings if item.num_requests >= least),
        sum(item.num_requests < least for item in findings),
    )
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False))
        return
    for finding in findings:
        click.echo(
            f"{finding.kind}: costs {finding.lost_tokens} tokens in each of {finding.num_requests} requests, "
            f"behind {finding.before!r}: {', '.join(repr(text[:60]) for text in finding.examples)}"
        )
    if not findings:
        click.echo("Nothing changes in what stays.")
    if rare:
        click.echo(
            f"{rare} more in fewer than {least} of {len(requests)} requests: --min-requests 1 shows them."
        )


def _lint_prompts(file: Path, count: Callable[[str], int], *, as_json: bool) -> None:
    from .prompt.lint import lint_prompt
    from .prompt.registry import NamedPrompt, read_prompts
    from .types import Message

    if file.suffix == ".toml":
        prompts = read_prompts(file)
    else:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ParameterError(f"{file} is not UTF-8 text", param="file") from error
        prompts = (NamedPrompt(file.stem, (Message("user", text),)),)
    all_advice = [lint_prompt(prompt, count) for prompt in prompts]
    if as_json:
        records = [
            {
                **asdict(advice),
                "proposal": [{"role": item.role, "content": item.content} for item in advice.proposal],
            }
            for advice in all_advice
        ]
        click.echo(json.dumps(records, ensure_ascii=False))
        return
    for advice in all_advice:
        click.echo(
            f"{advice.prompt}: {advice.shared_tokens} of {advice.stable_tokens} stable tokens are shared by "
            "all calls."
        )
        if advice.lost_tokens:
            names = ", ".join(advice.variables)
            click.echo(f"Before stable text: {names}. This costs {advice.lost_tokens} tokens per call.")
            click.echo("Proposed order:\n")
            for item in advice.proposal:
                click.echo(item.content if len(advice.proposal) == 1 else f"[{item.role}]\n{item.content}\n")


def _requests(file: Path, decode: Callable[[list[int]], str]) -> Iterator[str]:
    """The prompts of a log, in order, as text."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise ParameterError(f"{file}, line {number}: {error}", param="file") from error
            given = record if isinstance(record, dict) else {}
            given = next(
                (given[key] for key in ("body", "request") if isinstance(given.get(key), dict)), given
            )
            yield _text(given, decode, f"{file}, line {number}")


def _text(given: dict[str, Any], decode: Callable[[list[int]], str], where: str) -> str:
    for key in ("prompt", "input"):
        if isinstance(given.get(key), str):
            return str(given[key])
        if isinstance(given.get(key), list) and all(type(item) is int and item >= 0 for item in given[key]):
            return decode(given[key])
    messages = given.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        hint = ": was it written without --trace-content?" if "hash_ids" in given else ""
        raise ParameterError(
            f'{where}: no "messages", "prompt" or "input" in this request{hint}', param="file"
        )
    lines = [json.dumps(given["tools"])] if given.get("tools") else []
    for message in messages:
        content = message.get("content") or ""
        lines.append(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
    return "\n".join(lines)
