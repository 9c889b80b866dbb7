"""How often an answer that comes back as history has other tokens than it was generated in.

Physics. A tokenizer takes one way to write a text in tokens, a model may take another: unlikely ways are
rarely chosen greedily, and more often the higher the temperature. From the first token that differs on, the
KV of the answer's generation cannot be used for the next turn.

200 questions, answers of at most 32 tokens, greedy and at temperatures 1 and 1.5, made by transformers in
batches. An answer counts as different when the conversation with the answer's text in it, assembled anew,
does not begin with the prompt's tokens and the generated ones. `lost_share` is the part of all generated
tokens that stands behind such a place. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
from typing import Any

from common import finish
from ostinato.config import Settings
from ostinato.models.fetch import fetch
from ostinato.models.store import ModelStore
from ostinato.ports import SystemClock
from ostinato.prompt.template import template_for
from ostinato.prompt.tokens import HFTokenizer
from ostinato.types import Conversation, Message

ASKED = ("What is", "Who uses", "Where do I find", "Write a line about", "Explain to a child:")
ABOUT = (
    *("a serpent", "the number 1,024.5", "München", "a while loop in C", "e-mail", "the year 1789", "sushi"),
    *("a URL", "JSON", "the Moon", "an ostinato", "salt", "chess", "DNA", "a palindrome", "the Nile", "tea"),
    *("a regular expression", "Python's print()", "photosynthesis", "the word 'naïve'", "gravity", "wool"),
    *("a haiku", "Euro signs (€)", "COVID-19", "π", "a TODO list", "HTML tags", "emoji", "an SQL query"),
    *("Tokyo", "the verb to be", "ice", "HTTP 404", "bread", "a violin", "prime numbers", "Markdown", "snow"),
)  # fmt: skip
MAX_TOKENS = 32
BATCH = 200


def generate(model: Any, prompts: list[list[int]], temperature: float, pad: int) -> list[list[int]]:
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    chance = (
        {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    )
    with torch.inference_mode():
        made = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_TOKENS, pad_token_id=pad, **chance)
    answers: list[list[int]] = made[:, width:].tolist()
    return answers


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    settings = Settings.from_environment(os.environ)
    assert settings.store is not None
    path = fetch(settings.model, ModelStore(settings.store), progress=None).path
    nonce = str(secrets.randbelow(9 * 10**19) + 10**19)
    tokenizer = HFTokenizer.from_folder(path, nonce=nonce)
    template = template_for(tokenizer, clock=SystemClock(), nonce=nonce)
    assert template is not None
    model = AutoModelForCausalLM.from_pretrained(path)
    special = set(tokenizer.special_tokens.values())
    (pad,) = list(tokenizer.eos_token_ids)[:1]
    torch.manual_seed(0)
    questions = [Message("user", f"{first} {second}") for first, second in itertools.product(ASKED, ABOUT)]
    prompts = [
        tokenizer.encode_rendered(template.render(Conversation((question,)))).tolist()
        for question in questions
    ]
    details: dict[str, Any] = {}
    for temperature in (0.0, 1.0, 1.5):
        answers: list[list[int]] = []
        for start in range(0, len(prompts), BATCH):
            answers += generate(model, prompts[start : start + BATCH], temperature, pad)
        num_different = num_tokens = num_lost = 0
        for question, prompt, answer in zip(questions, prompts, answers, strict=True):
            ids = list(itertools.takewhile(lambda token: token not in special, answer))
            history = Conversation((question, Message("assistant", tokenizer.decode(ids))))
            again = tokenizer.encode_rendered(template.render(history, add_generation_prompt=False)).tolist()
            whole = prompt + ids
            same = sum(
                1
                for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(whole, again, strict=False))
            )
            num_tokens += len(ids)
            num_different += same < len(whole)
            num_lost += len(whole) - same
        details[f"temperature_{temperature:g}"] = {
            "answers": len(answers),
            "different": num_different,
            "share": round(num_different / len(answers), 3),
            "lost_share": round(num_lost / num_tokens, 3),
        }
        print(f"temperature {temperature:g}: {details[f'temperature_{temperature:g}']}", flush=True)
    finish("retokenized", {name: record["share"] for name, record in details.items()}, details)


if __name__ == "__main__":
    main()
