"""One prompt, many continuations: shared blocks, the best of several, beam search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ostinato
from doors.tiny import save_tiny_chat_model
from ostinato.errors import ParameterError, PromptTooLongError
from ostinato.ranking import BestOf
from ostinato.types import Chunk, TokenLogprob, Usage

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"), max_len=4096)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[ostinato.Engine]:
    with ostinato.load(folder, kv_cache=2 << 20, block_size=4) as loaded:
        yield loaded


def test_sixteen_answers_in_room_for_one_prompt(folder: Path) -> None:
    """A prefix of 3,500 tokens once; of it only the block that each answer goes on in is copied."""
    prompt = [7 + i * i % 200 for i in range(3_500)]
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    with ostinato.load(folder, kv_cache="8MiB", block_size=BLOCK_SIZE) as roomy:
        expected = [roomy.complete(prompt, seed=5 + i, **options).choices[0].token_ids for i in range(16)]
        num_bytes = roomy.runtime.ledger.kv_bytes_per_token * BLOCK_SIZE * (219 + 16 * 10)
    with ostinato.load(folder, kv_cache=num_bytes, block_size=BLOCK_SIZE) as engine:
        batcher: Any = engine.runtime._batcher
        execute, copied, held, most_rows = batcher._runner.execute, [], [], 0

        def watch(plan: Any) -> Any:
            nonlocal most_rows
            copied.extend(copy.length for copy in plan.copies)
            health = engine.runtime.health()
            held.append(health.num_held_blocks)
            most_rows = max(most_rows, sum(sequence.sample for sequence in plan.sequences))
            return execute(plan)

        batcher._runner.execute = watch
        reply = engine.complete(prompt, n=16, seed=5, **options)
        assert [choice.token_ids for choice in reply.choices] == expected
        assert most_rows == 16, "they ran side by side"
        assert max(held) <= 219 + 16 * 10 < 2 * 219, "two prefixes have no room"
        assert copied == [3_499 % BLOCK_SIZE] * 15, "only the beginning of the block that parts"
        assert reply.usage.written_tokens <= 3_500 + 16 * 11
        assert engine.runtime.health().num_held_blocks == 0


# ---------------------------------------------------------------- best_of


def told(index: int, *logprobs: float, reason: str = "stop", usage: Usage | None = None) -> list[Chunk]:
    pieces = [Chunk(index, f"{index}", (1,), (TokenLogprob(1, logprob),)) for logprob in logprobs]
    return [*pieces, Chunk(index, "", finish_reason=reason, usage=usage)]  # type: ignore[arg-type]


def test_the_likeliest_per_token_come_first() -> None:
    usage, out = Usage(completion_tokens=9), []
    best = BestOf(3, out.append, with_logprobs=False)
    answers = [
        told(0, -2.0, -2.0),
        told(1, -0.1, reason="error"),
        told(2, -1.0, -1.0, -1.0, -1.0, -1.0),  # the least likely as a whole
        told(3),
        told(4, -1.5, usage=usage),
    ]
    for answer in answers:
        for chunk in answer:
            assert not out, "nothing before all are there"
            best.take(chunk)
    assert [(chunk.choice_index, chunk.text) for chunk in out if chunk.text] == [
        *[(0, "2")] * 5, (1, "4"), *[(2, "0")] * 2,
    ]  # fmt: skip
    assert [chunk.usage for chunk in out] == [None] * (len(out) - 1) + [usage]
    assert all(chunk.logprobs == () for chunk in out)


def test_best_of_is_the_best_of_as_many_choices(engine: ostinato.Engine) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 6, "seed": 11, "logprobs": 0}
    means, ids = defaultdict(list), defaultdict(tuple)
    for chunk in engine.stream("Tell me", n=7, **options):
        means[chunk.choice_index] += [entry.logprob for entry in chunk.logprobs]
        ids[chunk.choice_index] += chunk.token_ids
    ranked = sorted(means, key=lambda index: -sum(means[index]) / len(means[index]))
    reply = engine.chat("Tell me", n=2, best_of=7, **options)
    assert [choice.token_ids for choice in reply.choices] == [ids[index] for index in ranked[:2]]
    assert reply.usage.completion_tokens == sum(len(tokens) for tokens in ids.values())
    for wrong in (1, 0, 65, True, 2.5, "3"):
        with pytest.raises(ParameterError, match="best_of"):
            engine.chat("Tell me", n=2, best_of=wrong)


# ---------------------------------------------------------------- beam search


def reference(folder: Path, prompt: list[int], width: int, length: int, eos: int) -> list[tuple[int, ...]]:
    """Beam search written down plainly, every step computed anew; ranked by the mean log probability."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[tuple[int, ...], float]] = []
    for _ in range(length):
        found = []
        for tokens, logprob in beams:
            with torch.inference_mode():
                row = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].log_softmax(-1)
            found += [((*tokens, i), logprob + float(row[i])) for i in range(len(row))]
        ended += [beam for beam in found if beam[0][-1] == eos]
        beams = sorted((b for b in found if b[0][-1] != eos), key=lambda b: -b[1])[:width]
    ranked = sorted((*ended, *beams), key=lambda beam: -beam[1] / len(beam[0]))
    return [tokens for tokens, _ in ranked[:width]]


@pytest.mark.parametrize("width", [1, 3])
def test_beam_search_finds_what_a_plain_one_finds(engine: ostinato.Engine, folder: Path, width: int) -> None:
    prompt = [7 + i * i % 200 for i in range(41)]
    (eos,) = engine.runtime.eos_token_ids
    found = engine.beam_search(prompt, beam_width=width, max_tokens=5)
    assert [beam.token_ids for beam in found] == reference(folder, prompt, width, 5, eos)
    assert all(beam.score == pytest.approx(beam.logprob / len(beam.token_ids)) for beam in found)
    assert engine.runtime.health().num_held_blocks == 0


def test_beam_search_of_a_conversation(engine: ostinato.Engine) -> None:
    (best,) = engine.beam_search("Hello", beam_width=1, max_tokens=4, ignore_eos=True)
    assert best.text == engine.chat("Hello", temperature=0.0, max_tokens=4, ignore_eos=True).text
    assert best.finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"beam_width": 0, "max_tokens": 3}, ParameterError),
        ({"beam_width": 11, "max_tokens": 3}, ParameterError),
        ({"beam_width": True, "max_tokens": 3}, ParameterError),
        ({"beam_width": 2, "max_tokens": 0}, ParameterError),
        ({"beam_width": 2, "max_tokens": "x"}, ParameterError),
        ({"beam_width": 2, "max_tokens": 3, "length_penalty": "x"}, ParameterError),
        ({"beam_width": 2, "max_tokens": 5_000}, PromptTooLongError),
    ],
)
def test_what_beam_search_refuses(
    engine: ostinato.Engine, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        engine.beam_search([1, 2, 3], **options)
