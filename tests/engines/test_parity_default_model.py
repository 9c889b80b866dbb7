"""Parity on the real default model: text as people write it, whole way through the library."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ostinato
from engines.driver import Flips, reference

pytestmark = [pytest.mark.model, pytest.mark.slow]

SYSTEM = "You are the guide of a small museum of instruments. Answer in one sentence."
QUESTIONS = (
    "What is a serpent?",
    "Which instrument was played at court in 1720, and by whom?",
    "Écris une phrase sur la viole de gambe, s'il te plaît.",
    "List three keyboards: 1)",
)


@pytest.fixture(scope="module")
def engine() -> Iterator[ostinato.Engine]:
    with ostinato.load(kv_cache=64 << 20, max_batch_tokens=48) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def own(default_model_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(default_model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def hf_tokenizer(default_model_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(default_model_path)


def talk(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def prompt_of(hf_tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    encoded = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def test_cold_warm_concurrent_and_salted(
    engine: ostinato.Engine, own: Any, hf_tokenizer: Any, flips: Flips
) -> None:
    wanted = {question: reference(own, prompt_of(hf_tokenizer, talk(question)), 8) for question in QUESTIONS}

    def ask(question: str, salt: str = "") -> int:
        reply = engine.chat(talk(question), temperature=0, max_tokens=8, ignore_eos=True, salt=salt)
        got = list(reply.choices[0].token_ids)
        flips.check(own, prompt_of(hf_tokenizer, talk(question)), wanted[question], got)
        return reply.usage.cached_tokens

    system_len = len(prompt_of(hf_tokenizer, talk("")))
    assert ask(QUESTIONS[0]) == 0
    assert ask(QUESTIONS[0]) == len(prompt_of(hf_tokenizer, talk(QUESTIONS[0]))) - 1
    assert ask(QUESTIONS[1]) >= system_len - 8
    assert ask(QUESTIONS[1], "another tenant") == 0
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, QUESTIONS * 2))


def test_a_conversation_is_the_same_with_and_without_its_history_cached(
    engine: ostinato.Engine, own: Any, hf_tokenizer: Any, flips: Flips
) -> None:
    messages: list[dict[str, str]] = talk("Name two dances and one march.")
    for turn in range(3):
        reply = engine.chat(messages, temperature=0, max_tokens=8)
        fresh = engine.chat(messages, temperature=0, max_tokens=8, salt=f"fresh {turn}")
        assert fresh.usage.cached_tokens == 0
        assert (reply.usage.cached_tokens > 40) == (turn > 0)
        prompt = prompt_of(hf_tokenizer, messages)
        expected = reference(own, prompt, len(reply.choices[0].token_ids))
        flips.check(own, prompt, expected, list(reply.choices[0].token_ids))
        flips.check(own, prompt, expected, list(fresh.choices[0].token_ids))
        messages += [
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": "Go on, please."},
        ]


@torch.inference_mode()
def test_logits_are_the_same_within_rounding(engine: ostinato.Engine, own: Any, hf_tokenizer: Any) -> None:
    prompt = prompt_of(hf_tokenizer, talk(QUESTIONS[1]))
    expected = torch.log_softmax(own(torch.tensor([prompt]), use_cache=False).logits[0, -1], -1)
    for _ in range(2):
        chunks = list(engine.stream(talk(QUESTIONS[1]), temperature=0, max_tokens=1, logprobs=20))
        top = chunks[0].logprobs[0].top
        for token, value in top:
            assert value == pytest.approx(float(expected[token]), abs=1e-4)
