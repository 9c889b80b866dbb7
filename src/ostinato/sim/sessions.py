"""Recorded agent sessions: prompts as text, which assembly and a tokenizer turn into what the cache sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson

from ostinato.errors import TraceError
from ostinato.kv.policy import Outlook
from ostinato.kv.sessions import outlook_of
from ostinato.ports import Clock
from ostinato.prompt.calls import ListReader, TaggedReader
from ostinato.prompt.template import named_template, template_for
from ostinato.prompt.tokens import HFTokenizer
from ostinato.types import Conversation, Message, TokenArray

from .traces import Trace, TraceRequest


def read_session(path: Path, encode: Callable[[str], TokenArray]) -> Trace:
    """Reads one session: JSON lines with ``timestamp`` (µs), ``input`` and ``output`` text, ``session_id``.

    ``encode`` makes tokens of a whole prompt's text. The lines need not be in order of time. Raises
    ``TraceError`` naming the line that does not have this form.
    """
    requests: list[TraceRequest] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TraceError(f"cannot read the session {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
            time_s, text, output = float(row["timestamp"]) / 1e6, row["input"], row["output"]
            session = str(row.get("session_id", path.stem))
            if not (isinstance(text, str) and isinstance(output, str)):
                raise TypeError("input and output have to be text")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TraceError(f"{path}, line {number}: not a request of a session ({error})") from error
        units = encode(text)
        if len(units):
            num_output = len(encode(output)) if output else 0
            outlook = Outlook.SOON if calls_tools(output) else Outlook.UNKNOWN
            requests.append(
                TraceRequest(time_s, units, len(units), num_output, session=session, outlook=outlook)
            )
    if not requests:
        raise TraceError(f"{path} has no requests")
    if any(
        request.outlook is Outlook.SOON for request in requests
    ):  # it has tools: to call none says something
        requests = [
            replace(request, outlook=outlook_of("stop", offers_tools=True))
            if request.outlook is Outlook.UNKNOWN
            else request
            for request in requests
        ]
    requests.sort(key=lambda request: request.time_s)
    return Trace(path.stem, 1, tuple(requests))


def calls_tools(output: str) -> bool:
    """Whether a recorded answer ends in tool calls: in a known format, or not recorded itself (no text)."""
    text = output.strip()
    if not text:
        return True
    for reader in (TaggedReader((), ()), ListReader((), ())):
        if reader.push(text).calls or reader.finish(is_whole=True).calls:
            return True
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return isinstance(call, dict) and isinstance(call.get("name"), str) and "parameters" in call


def prompt_encoder(model_folder: Path, clock: Clock) -> Callable[[str], TokenArray]:
    """Text to the tokens of a prompt with it as the one user message, as the model in this folder sees it."""
    nonce = "0" * 20  # recorded text, rendered and thrown away: nothing is there to be protected
    tokenizer = HFTokenizer.from_folder(model_folder, nonce=nonce)
    template = template_for(tokenizer, clock=clock, nonce=nonce) or named_template("chatml")

    def encode(text: str) -> TokenArray:
        return tokenizer.encode_rendered(template.render(Conversation((Message("user", text),))))

    return encode


def encode_bytes(text: str) -> TokenArray:
    """Four bytes of UTF-8 a token, the last filled up: about as many as a tokenizer makes of English."""
    data = text.encode("utf-8", "surrogatepass")
    return np.frombuffer(data + b"\0" * (-len(data) % 4), np.int32)
