"""What is looked into: requests as they were sent, out of files of many forms.

One request is a body of OpenAI's or Anthropic's (JSON), or a text. Of JSON lines each is a body, bare or
under ``body`` or ``request``; a line of our own trace, with its content or with digests alone; a line of a
recorded session (``input``, ``output``, ``session_id``); or a conversation in ShareGPT's form, which stands
for one request for each of its answers. Reading is lenient: a log that no server would take can still be
looked into.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from ..errors import ParameterError, TraceError
from ..types import Conversation, Message, ToolCall

MAX_REQUESTS: Final = 20_000
_NOT_PARAMETERS: Final = frozenset(
    {
        *(
            "messages",
            "model",
            "tools",
            "prompt",
            "input",
            "system",
            "stream",
            "stream_options",
            "user",
            "metadata",
        ),
        *(
            "cache_salt",
            "prompt_cache_key",
            "session",
            "session_id",
            "pin",
            "trim",
            "canonical",
            "n",
            "store",
        ),
        *("request_id", "conversations", "functions", "cache", "deadline"),
    }
)
# What decides how an answer is drawn, and is nothing that a template could write.
_SAMPLING: Final = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "max_tokens"),
        *("max_completion_tokens", "max_output_tokens", "logprobs", "top_logprobs", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "best_of"),
    }
)
# What vendors and templates are known to write into prompts.
_WRITTEN: Final = frozenset(
    {
        *("tool_choice", "chat_template_kwargs", "reasoning_effort", "thinking", "response_format"),
        *("documents", "add_generation_prompt"),
    }
)
_SHAREGPT: Final = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a log.

    Attributes:
        where: the file and the line.
        conversation: what was asked, if it was a conversation.
        text: the whole prompt, if it was a text.
        token_ids: or ids.
        parameters: what else stood in the request that a template may write down.
        body: the request as it was sent; empty where only digests are known.
        line: the line of the log around it.
        at_s: when it came, in seconds; ``None`` where the log does not say.
        salt: which part of the cache it was asked in, where the log says.
    """

    where: str
    conversation: Conversation | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    line: Mapping[str, Any] = field(default_factory=dict)
    at_s: float | None = None
    salt: str = ""
    session: str = ""

    @property
    def id(self) -> str:
        return str(self.line.get("id") or self.body.get("request_id") or "")

    @property
    def sampling(self) -> Mapping[str, Any]:
        """How the answer was to be drawn."""
        return {name: value for name, value in self.body.items() if name in _SAMPLING}

    @property
    def has_content(self) -> bool:
        """Whether there is more of it than digests."""
        return self.conversation is not None or self.text is not None or self.token_ids is not None

    @property
    def model(self) -> str:
        return str(self.body.get("model") or self.line.get("model") or "")


def read_requests(path: Path) -> list[Asked]:
    """The requests of a file, or of all ``.jsonl`` files of a folder: of each file the last 20,000, in order
    of time where they have one.

    Raises:
        TraceError: there is none, or a line is not JSON.
    """
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    found: list[Asked] = []
    for file in files:
        requests = [request for where, row in _rows(file) for request in _read(where, row)]
        if all(request.at_s is not None for request in requests):
            requests.sort(key=lambda request: request.at_s or 0.0)
        found += requests[-MAX_REQUESTS:]
    if not found:
        raise TraceError(f"there is no request in {path}")
    return found


def read_lines(data: bytes, source: str) -> list[Asked]:
    """The requests of a request log that came from elsewhere than a file.

    Raises:
        TraceError: a line is not JSON.
    """
    return [request for where, row in _lines(data, source) for request in _read(where, row)]


def read_one(given: str) -> Asked:
    """One request: ``FILE`` (JSON, or any text), ``FILE:LINE`` or ``FILE#ID`` of a log.

    Raises:
        ParameterError: there is no such file, line or id.
        TraceError: it cannot be read.
    """
    path = Path(given)
    if path.is_file():
        data = _bytes(path)
        try:
            row = orjson.loads(data)
        except orjson.JSONDecodeError:
            row = None
        if isinstance(row, dict):
            requests = list(_read(given, row))
            if requests:
                return requests[-1]
        if row is None and path.suffix not in (".jsonl", ".json"):
            return Asked(given, text=data.decode("utf-8", "replace"))
        raise ParameterError(
            f"{given} is not one request: name one as {given}:LINE or {given}#ID", param="request"
        )
    file, mark, name = given.rpartition("#") if "#" in given else given.rpartition(":")
    path = Path(file)
    if not mark or not path.is_file():
        raise ParameterError(
            f"there is no file {given}; name a request as FILE:LINE or FILE#ID", param="request"
        )
    for where, row in _rows(path):
        is_it = str(row.get("id")) == name if mark == "#" else where.endswith(f", line {name}")
        if is_it and (requests := list(_read(where, row))):
            return requests[-1]
    raise ParameterError(f"there is no request {name} in {file}", param="request")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    data = _bytes(path)
    try:
        whole = orjson.loads(data)
    except orjson.JSONDecodeError:
        whole = None
    if isinstance(whole, list):
        yield from ((f"{path}, item {n}", row) for n, row in enumerate(whole, 1) if isinstance(row, dict))
        return
    if isinstance(whole, dict):
        yield f"{path}, line 1", whole
        return
    yield from _lines(data, str(path))


def _lines(data: bytes, source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if line.startswith(b'{"v":') and not line.rstrip().endswith(b"}"):
                continue  # a crash cut it short
            raise TraceError(f"{source}, line {number}: not JSON ({error})") from error
        if isinstance(row, dict):
            yield f"{source}, line {number}", row


def _read(where: str, row: Mapping[str, Any]) -> Iterator[Asked]:
    body: Mapping[str, Any] = row
    for name in ("body", "request"):
        if isinstance(row.get(name), dict):
            body = row[name]
    common: dict[str, Any] = {
        "body": body,
        "line": row,
        "at_s": _time_s(row),
        "salt": str(row.get("salt", body.get("cache_salt")) or ""),
        "session": _session(row, body),
        "parameters": {name: body[name] for name in _parameter_names(row, body)},
    }
    if isinstance(body.get("conversations"), list):
        yield from _turns(where, body["conversations"], common)
        return
    given = body.get("messages", body.get("input") if isinstance(body.get("input"), list) else None)
    if isinstance(given, list) and all(isinstance(item, dict) for item in given):
        messages = [*_system(body), *(message for item in given for message in _messages(item))]
        yield Asked(where, Conversation(tuple(messages), _tools(body)), **common)
        return
    for name in ("prompt", "input", "text"):
        value = body.get(name)
        if isinstance(value, str):
            yield Asked(where, text=value, **common)
            return
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            yield Asked(where, token_ids=tuple(value), **common)
            return
    if "hash_ids" in row:
        yield Asked(where, **common | {"body": {}, "parameters": {}})


def _parameter_names(row: Mapping[str, Any], body: Mapping[str, Any]) -> list[str]:
    """Of a bare body only those that are known: beside it may stand what the log says of the request."""
    if body is row:
        return [name for name in body if name in _WRITTEN]
    return [name for name in body if name not in _NOT_PARAMETERS and name not in _SAMPLING]


def _turns(where: str, turns: Sequence[Any], common: Mapping[str, Any]) -> Iterator[Asked]:
    messages: list[Message] = []
    for turn in turns:
        if not isinstance(turn, dict):
            continue
        role = _SHAREGPT.get(str(turn.get("from")), "user")
        if role == "assistant" and messages:
            yield Asked(where, Conversation(tuple(messages)), **{**common, "session": where})
        messages.append(Message(role, _text(turn.get("value"))))
    if messages and messages[-1].role != "assistant":
        yield Asked(where, Conversation(tuple(messages)), **{**common, "session": where})


def marked_messages(asked: Asked) -> list[int]:
    """The messages of a conversation in which a breakpoint of Anthropic's stands, ``cache_control``."""
    body, found = asked.body, list[int]()
    place = sum(1 for _ in _system(body))
    if place and _is_marked(body.get("system")):
        found.append(0)
    for item in body.get("messages") or ():
        if not isinstance(item, dict):
            continue
        place += sum(1 for _ in _messages(item))
        if _is_marked(item.get("content")):
            found.append(place - 1)
    if isinstance(body.get("cache_control"), dict) and place:
        found.append(place - 1)  # the vendor sets it, at the end
    return found


def _is_marked(content: Any) -> bool:
    return isinstance(content, list) and any(isinstance(p, dict) and p.get("cache_control") for p in content)


def _system(body: Mapping[str, Any]) -> Iterator[Message]:
    """Anthropic's and the Responses API's system text stands beside the messages."""
    for name in ("system", "instructions"):
        if body.get(name):
            yield Message("system", _text(body[name]))


def _messages(item: Mapping[str, Any]) -> Iterator[Message]:
    """One message of OpenAI's; of Anthropic's the results of tools are messages of their own."""
    role = str(item.get("role") or ("tool" if "output" in item else "user"))
    content = item.get("content", item.get("output"))
    reasoning = item.get("reasoning_content") or item.get("reasoning") or ""
    given = item.get("tool_calls")
    calls = [_call(call) for call in (given if isinstance(given, list) else ()) if isinstance(call, dict)]
    texts: list[str] = []
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_use":
            calls.append(
                ToolCall(str(part.get("id", "")), str(part.get("name", "")), _json(part.get("input")))
            )
        elif kind == "tool_result":
            yield Message("tool", _text(part.get("content")), tool_call_id=str(part.get("tool_use_id", "")))
        elif kind == "thinking":
            reasoning = str(part.get("thinking", ""))
        else:
            texts.append(_text([part]))
    text = "\n".join(texts) if isinstance(content, list) else _text(content)
    if texts or calls or reasoning or not isinstance(content, list):
        name = item.get("name")
        yield Message(
            role,
            text,
            name=name if isinstance(name, str) else None,
            tool_calls=tuple(calls),
            tool_call_id=item.get("tool_call_id") if role == "tool" else None,
            reasoning=str(reasoning),
        )


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function") if isinstance(call.get("function"), dict) else {}
    assert isinstance(function, dict), "a call without a function"
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = _json(arguments)
    return ToolCall(str(call.get("id", "")), str(function.get("name", "")), arguments)


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """In OpenAI's form, each in the order of keys it came in."""
    given = body.get("tools")
    tools: list[Mapping[str, Any]] = []
    for tool in given if isinstance(given, list) else ():
        if not isinstance(tool, dict):
            continue
        if "function" not in tool and "name" in tool:  # Anthropic's, and the Responses API's
            schema = {"input_schema": "parameters"}
            tool = {
                "type": "function",
                "function": {
                    schema.get(name, name): value
                    for name, value in tool.items()
                    if name not in ("type", "cache_control", "strict")
                },
            }
        if isinstance(tool.get("function"), dict):
            tools.append(tool)
    return tuple(tools)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            str(part["text"]) if isinstance(part, dict) and isinstance(part.get("text"), str) else _json(part)
            for part in content
        )
    return "" if content is None else _json(content)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _session(row: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    for holder in (row, body):
        for name in ("session", "session_id", "conversation_id"):
            value = holder.get(name)
            if isinstance(value, dict):
                value = value.get("id")
            if isinstance(value, str | int) and not isinstance(value, bool):
                return str(value)
    return ""


def _time_s(row: Mapping[str, Any]) -> float | None:
    for name in ("timestamp", "time", "at", "created", "created_at", "ts"):
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) / (1e6 if value > 1e14 else 1e3 if value > 1e11 else 1)
    return None
