"""How often an answer that comes back as history has other tokens than it was generated in.

Physics. A tokenizer takes one way to write a text in tokens, a model may take another: unlikely ways are
rarely chosen greedily, and more often the higher the temperature. From the first token that differs on, the
KV of the answer's generation cannot be used for the next turn.

200 questions, answers of at most 48 tokens, greedy and at temperatures 1 and 1.5, made by the engine in
batches. An answer counts as different when the conversation with the answer's text in it, assembled anew,
does not begin with the prompt's tokens and the generated ones. `lost_share` is the part of all generated
tokens that stands behind such a place. `kept_different` counts the same where the generated ids are kept
(`ostinato.prompt.kept`). The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
from typing import Any

import ostinato
from common import finish
from ostinato.config import tame_waiting_threads
from ostinato.library import Choice, Engine
from ostinato.prompt.kept import KeptAnswers
from ostinato.types import Conversation, Message

ASKED = ("What is", "Who uses", "Where do I find", "Write a line about", "Explain to a child:")
ABOUT = (
    *("a serpent", "the number 1,024.5", "München", "a while loop in C", "e-mail", "the year 1789", "sushi"),
    *("a URL", "JSON", "the Moon", "an ostinato", "salt", "chess", "DNA", "a palindrome", "the Nile", "tea"),
    *("a regular expression", "Python's print()", "photosynthesis", "the word 'naïve'", "gravity", "wool"),
    *("a haiku", "Euro signs (€)", "COVID-19", "π", "a TODO list", "HTML tags", "emoji", "an SQL query"),
    *("Tokyo", "the verb to be", "ice", "HTTP 404", "bread", "a violin", "prime numbers", "Markdown", "snow"),
)  # fmt: skip
MAX_TOKENS = 48
TEMPERATURES = (0.0, 1.0, 1.5)


async def answers(engine: Engine, questions: list[Message], temperature: float) -> list[Choice]:
    """One answer to every question; the same seeds every time."""
    replies = await asyncio.gather(
        *(
            engine.achat(Conversation((question,)), temperature=temperature, max_tokens=MAX_TOKENS, seed=seed)
            for seed, question in enumerate(questions)
        )
    )
    return [reply.choices[0] for reply in replies]


def num_same(first: list[int], second: list[int]) -> int:
    """How many ids two sequences begin with alike."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def compare(engine: Engine, questions: list[Message], choices: list[Choice]) -> dict[str, Any]:
    """What comes back of the answers, in which tokens."""
    tokenizer: Any = engine.runtime.tokenizer
    template = engine.runtime.template
    assert template is not None
    kept = KeptAnswers(tokenizer)
    special = set(tokenizer.special_tokens.values())
    num_different = num_kept_different = num_tokens = num_lost = 0
    for question, choice in zip(questions, choices, strict=True):
        prompt = template.render(Conversation((question,)))
        ids = list(itertools.takewhile(lambda token: token not in special, choice.token_ids))
        whole = tokenizer.encode_rendered(prompt).tolist() + ids
        kept.keep(tokenizer.tail(prompt.segments), choice.token_ids)
        history = Conversation((question, Message("assistant", tokenizer.decode(ids))))
        rendered = template.render(history, add_generation_prompt=False)
        same = num_same(whole, tokenizer.encode_rendered(rendered).tolist())
        num_tokens += len(ids)
        num_different += same < len(whole)
        num_lost += len(whole) - same
        num_kept_different += num_same(whole, kept.encode(rendered).tolist()) < len(whole)
    return {
        "answers": len(choices),
        "different": num_different,
        "share": round(num_different / len(choices), 3),
        "lost_share": round(num_lost / num_tokens, 3),
        "kept_different": num_kept_different,
        "tokens": num_tokens,
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    tame_waiting_threads(os.environ)
    questions = [Message("user", f"{first} {second}") for first, second in itertools.product(ASKED, ABOUT)]
    details: dict[str, Any] = {}
    with ostinato.load() as engine:
        for temperature in TEMPERATURES:
            choices = asyncio.run(answers(engine, questions, temperature))
            details[f"temperature_{temperature:g}"] = compare(engine, questions, choices)
            print(f"temperature {temperature:g}: {details[f'temperature_{temperature:g}']}", flush=True)
    finish("retokenized", {name: record["share"] for name, record in details.items()}, details)


if __name__ == "__main__":
    main()
