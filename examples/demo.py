"""A three-turn conversation with a real model, through the official ``openai`` client.

Starts ``ostinato serve`` on a free port, asks three questions about a long system text, and asks each a
second time with a fresh ``cache_salt``: that request may share nothing with any other, so it shows what the
same prompt costs cold. Then it stops the server.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI

SYSTEM = """You are the guide of a small museum of musical instruments. Answer in one or two sentences.
The museum has four rooms. The first room shows keyboards: a clavichord of 1720, two harpsichords and a
fortepiano on which visitors may play on Sundays. The second room shows strings: a viola da gamba, a baroque
violin and an arpeggione. The third room shows winds: recorders of all sizes, a serpent and a natural horn.
The fourth room is about rhythm: frame drums, a hurdy-gurdy, and a table on which visitors lay out a short
pattern of stones that a machine then plays again and again, an ostinato. The museum is open from ten to
six, closed on Mondays, and free for children. The café serves coffee and cake. Dogs stay outside."""

QUESTIONS = (
    "What can I see in the fourth room?",
    "And when is the museum open?",
    "Thank you. May I play on one of the keyboards?",
)


@contextmanager
def server() -> Iterator[str]:
    """A server in a process of its own; yields its address."""
    command = [sys.executable, "-m", "ostinato", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                found = re.search(r"Serving \S+ at (http://\S+)", line)
                if found:
                    yield found.group(1)
                    return
            sys.exit("the server did not start; what it said stands above")
        finally:
            process.terminate()


def ask(client: OpenAI, messages: list[Any], **extra: Any) -> tuple[str, float, Any]:
    """The answer, the time to its first piece in seconds, and the usage."""
    started = time.perf_counter()
    first_s = 0.0
    parts: list[str] = []
    usage = None
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=messages,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        **extra,
    )
    for event in stream:
        usage = event.usage or usage
        text = event.choices[0].delta.content if event.choices else None
        if text:
            first_s = first_s or time.perf_counter() - started
            parts.append(text)
    return "".join(parts), first_s, usage


def main() -> None:
    with server() as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        rows = []
        for turn, question in enumerate(QUESTIONS, start=1):
            messages.append({"role": "user", "content": question})
            answer, first_s, usage = ask(client, messages, max_tokens=60)
            print(f"\n{turn}. {question}\n   {answer}")
            _, cold_s, _ = ask(client, messages, max_tokens=1, extra_body={"cache_salt": f"cold-{turn}"})
            messages.append({"role": "assistant", "content": answer})
            reused = usage.prompt_tokens_details.cached_tokens
            rows.append((turn, usage.prompt_tokens, reused, first_s, cold_s))
        print("\nturn  prompt tokens  reused  first token  the same cold  ratio")
        for turn, prompt, reused, first_s, cold_s in rows:
            print(
                f"{turn:>4}  {prompt:>13}  {reused:>6}  {first_s * 1000:>8.0f} ms"
                f"  {cold_s * 1000:>10.0f} ms  {cold_s / first_s:>4.1f}x"
            )


if __name__ == "__main__":
    main()
