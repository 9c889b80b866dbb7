"""Request logs, in the forms they come in, as requests to be made tokens of.

One JSON object a line, told apart line by line: a body of OpenAI's chat or completion requests, bare or under
``body`` or ``request``; a line of a recorded agent session (``input`` is a whole prompt); a line of our own
request log that was written with its content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from ostinato.assembly import Assembler
from ostinato.errors import ClientError, TraceError
from ostinato.kv.hashing import Namespace
from ostinato.prompt.template import Template
from ostinato.prompt.tokens import HFTokenizer
from ostinato.server.chat import ChatRequest
from ostinato.server.completions import CompletionRequest
from ostinato.server.fields import validate
from ostinato.sim.traces import is_torn
from ostinato.types import Conversation, GenerationRequest, Message, TokenArray

MAX_REQUESTS: Final = 20_000
MAX_TOKENS: Final = 64 << 20
_CHAT_FIELDS: Final = (
    *("messages", "tools", "tool_choice", "cache_salt"),
    *("prompt", "trim", "continue_final_message"),  # ours: a named prompt, for one
)

Encode = Callable[[GenerationRequest], TokenArray]


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """One prompt of a log. ``time_s`` is since the Unix epoch, or since anything; the order where none is
    given.

    ``salt`` is that of the namespace it was asked in. ``cache_salt`` is what a client has to send to get
    there, ``None`` where that is not known.
    """

    time_s: float
    tokens: TokenArray
    salt: str
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class PromptLog:
    """Prompts in order of time. ``num_unusable`` lines had none, ``reason`` says why of the first of them."""

    prompts: tuple[LoggedPrompt, ...]
    num_unusable: int = 0
    reason: str = ""


def read_log(path: Path, encode: Encode) -> PromptLog:
    """Reads a file, or all ``.jsonl`` files of a folder; at most the last 20,000 requests of each file.

    ``encode`` makes a request's tokens, and may refuse with a ``ClientError``. Requests that cannot be used
    are counted. Raises ``TraceError``: no file, not JSON, or not one request that can be used.
    """
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    prompts: list[LoggedPrompt] = []
    faults: list[str] = []
    num_tokens = 0
    for file in files:
        for number, line in _lines(file):
            try:
                read = _read_line(line, encode, float(len(prompts)))
            except (ClientError, KeyError, TypeError, ValueError) as error:
                faults.append(f"{file.name}, line {number}: {error}")
                continue
            num_tokens += sum(len(each.tokens) for each in read)
            if num_tokens > MAX_TOKENS:
                raise TraceError(f"{path} has more than {MAX_TOKENS:,} tokens: give less of it")
            prompts += read
    if not prompts:
        why = f" (the first: {faults[0]})" if faults else ""
        raise TraceError(f"{path} has no request with a prompt{why}")
    prompts.sort(key=lambda each: each.time_s)
    return PromptLog(tuple(prompts), len(faults), faults[0] if faults else "")


def encoder(tokenizer: HFTokenizer, template: Template | None, max_model_len: int) -> Encode:
    """Makes tokens as a runtime with these and nothing else set would."""
    assembler = Assembler(tokenizer, template, Namespace("", tokenizer.identity, "", "", "", ""))
    return lambda request: assembler.assemble(request, max_model_len).tokens


def _lines(file: Path) -> Sequence[tuple[int, bytes]]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise TraceError(f"cannot read the log {file}: {error.strerror}") from error
    kept = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not is_torn(line)]
    return kept[-MAX_REQUESTS:]


def _read_line(line: bytes, encode: Encode, place: float) -> list[LoggedPrompt]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise TypeError("not an object")
    requests = _requests(row)
    time_s = _time(row, place)
    found: list[LoggedPrompt] = []
    for request in requests:
        if "salt" in row:
            request = replace(request, salt=str(row["salt"]))
            cache_salt = None if request.salt else ""
        else:
            cache_salt = _body(row).get("cache_salt") or ""
        tokens = encode(request)
        if len(tokens) > 1:
            found.append(LoggedPrompt(time_s, np.asarray(tokens, np.int32), request.salt, cache_salt))
    return found


def _body(row: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("body", "request"):
        if isinstance(row.get(name), dict):
            body: Mapping[str, Any] = row[name]
            return body
    return row


def _requests(row: Mapping[str, Any]) -> Sequence[GenerationRequest]:
    if isinstance(row.get("input"), str):
        return [GenerationRequest(Conversation((Message("user", row["input"]),)))]
    body = _body(row)
    if "messages" in body:
        chat = {name: body[name] for name in _CHAT_FIELDS if name in body}
        return [validate(ChatRequest, chat | {"model": ""}).generation(request_id="", key_salt="")]
    if "prompt" in body:
        given = {name: body[name] for name in ("prompt", "cache_salt") if name in body}
        return validate(CompletionRequest, given | {"model": ""}).generations(request_id="", key_salt="")
    if "hash_ids" in row:
        raise ValueError("digests, no prompt: log with --trace-content")
    raise ValueError("neither messages nor a prompt")


def _time(row: Mapping[str, Any], place: float) -> float:
    """Seconds out of ``timestamp`` or ``created``, in seconds, milliseconds or microseconds of our days."""
    for name in ("timestamp", "created", "created_at"):
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value / (1e6 if value > 1e14 else 1e3 if value > 1e11 else 1)
    return place
