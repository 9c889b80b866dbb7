"""The one client for all peers: the official `openai` package, streaming, greedy, lengths fixed."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai

from .workloads import Message, Session, Workload

# As fast as the slowest of the peers, 32 in a row behind it; what takes longer hangs.
REQUEST_TIMEOUT_S = 600.0


class Failed(Exception):
    """A peer did not get through a workload; the message says why."""


# What comes of a peer that refuses, goes away, or sends what is not JSON in UTF-8.
_THEIRS = (Failed, openai.OpenAIError, httpx2.HTTPError, json.JSONDecodeError, UnicodeDecodeError)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's answer: when it was sent (on the workload's own clock), and when its pieces came."""

    session: int
    turn: int
    messages: list[Message]
    text: str
    sent_s: float
    pieces_s: tuple[float, ...]
    num_tokens: int
    prompt_tokens: int
    cached_tokens: int | None

    @property
    def ttft_s(self) -> float:
        return self.pieces_s[0] - self.sent_s


@dataclass(slots=True)
class Run:
    """A workload against one peer, once."""

    answers: list[Answer] = field(default_factory=list)
    wall_s: float = 0.0
    client_s: float = 0.0

    def figures(self) -> dict[str, Any]:
        ttfts = [answer.ttft_s for answer in self.answers]
        gaps = [b - a for x in self.answers for a, b in zip(x.pieces_s, x.pieces_s[1:], strict=False)]
        cached = [answer.cached_tokens for answer in self.answers]
        prompts = sum(answer.prompt_tokens for answer in self.answers)
        return {
            "ttft_p50_s": round(quantile(ttfts, 50), 4),
            "ttft_p99_s": round(quantile(ttfts, 99), 4),
            "itl_p50_s": round(quantile(gaps, 50), 4),
            "itl_p99_s": round(quantile(gaps, 99), 4),
            "tokens_per_s": round(sum(answer.num_tokens for answer in self.answers) / self.wall_s, 3),
            "wall_s": round(self.wall_s, 2),
            "num_requests": len(self.answers),
            "answer_tokens": sum(answer.num_tokens for answer in self.answers),
            "prompt_tokens": prompts,
            "cached_share": None if None in cached or not prompts else round(sum(cached) / prompts, 3),  # type: ignore[arg-type]
            "client_cpu_share": round(self.client_s / self.wall_s, 3),
        }


def quantile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def run(
    workload: Workload,
    url: str,
    count_tokens: Callable[[str], int],
    limit_s: float,
    temperature: float = 0.0,
) -> Run:
    """All sessions of a workload against the server at ``url``.

    Raises:
        Failed: it took longer than ``limit_s``; or the server refused, went away, or said nothing.
    """
    try:
        return asyncio.run(_run(workload, url, count_tokens, limit_s, temperature))
    except TimeoutError:
        raise Failed(f"took longer than {limit_s:.0f} s") from None
    except (*_THEIRS, ExceptionGroup) as error:
        first: Exception = error
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        if not isinstance(first, _THEIRS):
            raise  # a mistake of this benchmark, not of a peer
        raise Failed(f"{type(first).__name__}: {first}") from error


async def _run(
    workload: Workload, url: str, count_tokens: Callable[[str], int], limit_s: float, temperature: float
) -> Run:
    result = Run()
    async with (
        asyncio.timeout(limit_s),
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S
        ) as client,
    ):
        model = (await client.models.list()).data[0].id
        talker = _Talker(client, model, workload.answer_tokens, temperature, count_tokens, result.answers)
        seats = asyncio.Semaphore(workload.concurrency)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for number, session in enumerate(workload.sessions):
                group.create_task(talker.talk(number, session, seats))
        result.wall_s = time.perf_counter() - began_s
        result.client_s = time.process_time() - began_cpu_s
    return result


@dataclass(frozen=True, slots=True)
class _Talker:
    client: openai.AsyncOpenAI
    model: str
    answer_tokens: int
    temperature: float
    count_tokens: Callable[[str], int]
    answers: list[Answer]

    async def talk(self, number: int, session: Session, seats: asyncio.Semaphore) -> None:
        async with seats:
            told: list[str] = []
            for turn in range(session.num_requests):
                answer = await self._ask(number, turn, session.messages(turn, told))
                self.answers.append(answer)
                told.append(answer.text)

    async def _ask(self, number: int, turn: int, messages: list[Message]) -> Answer:
        pieces: list[str] = []
        pieces_s: list[float] = []
        usage = None
        sent_s = time.perf_counter()
        stream = await self.client.chat.completions.create(
            model=self.model,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=self.answer_tokens,
            temperature=self.temperature,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].delta.content:
                pieces.append(chunk.choices[0].delta.content)
                pieces_s.append(time.perf_counter())
        text = "".join(pieces)
        if not pieces:
            raise Failed(f"no text in the answer of turn {turn} of session {number}")
        details = usage.prompt_tokens_details if usage is not None else None
        return Answer(
            session=number,
            turn=turn,
            messages=messages,
            text=text,
            sent_s=sent_s,
            pieces_s=tuple(pieces_s),
            # A peer that counts nothing in streams is counted for, by the same tokenizer.
            num_tokens=usage.completion_tokens if usage is not None else self.count_tokens(text),
            prompt_tokens=usage.prompt_tokens if usage is not None else 0,
            cached_tokens=details.cached_tokens if details is not None else None,
        )


def agreement(ours: Run, theirs: Run) -> dict[str, Any]:
    """Of the requests that were word for word the same on both sides, the share answered the same.

    Later turns contain a server's own earlier answers: where those differ, so do the requests.
    """
    known = {(answer.session, answer.turn): answer for answer in ours.answers}
    same = [
        (known[key], answer)
        for answer in theirs.answers
        if (key := (answer.session, answer.turn)) in known and known[key].messages == answer.messages
    ]
    equal = sum(a.text == b.text for a, b in same)
    return {"compared": len(same), "of": len(theirs.answers), "equal": equal}
