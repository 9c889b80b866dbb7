"""One prompt, many continuations: shared blocks, the best of several, beam search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
import transformers

import ostinato
from doors.tiny import save_tiny_chat_model
from ostinato.errors import ParameterError, PromptTooLongError
from ostinato.prompt.conversation import conversation_from_dicts
from ostinato.ranking import BestOf
from ostinato.types import Chunk, GenerationRequest, TokenLogprob, Usage

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"), max_len=4096)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[ostinato.Engine]:
    with ostinato.load(folder, kv_cache=2 << 20, block_size=4) as loaded:
        yield loaded


PROMPT = [7 + i * i % 200 for i in range(3_500)]
PROMPT_BLOCKS = 219  # the last of them holds 12 tokens
DRAWN: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}


class Watched:
    """What an engine's steps copy, hold and compute."""

    def __init__(self, engine: ostinato.Engine) -> None:
        self.copied: list[int] = []
        self.held: list[int] = []
        self.num_rows = 0
        self.most_at_once = 0
        batcher: Any = engine.runtime._batcher
        execute = batcher._runner.execute

        def watch(plan: Any) -> Any:
            self.copied += [copy.length for copy in plan.copies]
            self.held.append(engine.runtime.health().num_held_blocks)
            self.num_rows += sum(len(sequence.tokens) for sequence in plan.sequences)
            self.most_at_once = max(self.most_at_once, sum(sequence.sample for sequence in plan.sequences))
            return execute(plan)

        batcher._runner.execute = watch


@contextmanager
def tight(folder: Path, num_blocks: int) -> Iterator[tuple[ostinato.Engine, Watched]]:
    """An engine with an arena in which two prompts have no room; nothing is held in the end."""
    assert num_blocks < 2 * PROMPT_BLOCKS
    block_bytes = 2 * 2 * 2 * 8 * 4 * BLOCK_SIZE
    with ostinato.load(folder, kv_cache=num_blocks * block_bytes, block_size=BLOCK_SIZE) as engine:
        watched = Watched(engine)
        assert engine.runtime.health().num_blocks == num_blocks
        yield engine, watched
        assert engine.runtime.health().num_held_blocks == 0
        engine.runtime._manager.check_integrity()


@pytest.fixture(scope="module")
def roomy(folder: Path) -> Iterator[ostinato.Engine]:
    with ostinato.load(folder, kv_cache="8MiB", block_size=BLOCK_SIZE) as loaded:
        yield loaded


def test_sixteen_answers_in_room_for_one_prompt(folder: Path, roomy: ostinato.Engine) -> None:
    """A prefix of 3,500 tokens once; of it only the block that each answer goes on in is copied."""
    expected = [roomy.complete(PROMPT, seed=5 + i, **DRAWN).choices[0].token_ids for i in range(16)]
    with tight(folder, PROMPT_BLOCKS + 16 * 10) as (engine, watched):
        reply = engine.complete(PROMPT, n=16, seed=5, **DRAWN)
        assert [choice.token_ids for choice in reply.choices] == expected
        assert watched.most_at_once == 16, "they ran side by side"
        assert max(watched.held) <= PROMPT_BLOCKS + 16 * 10
        assert watched.copied == [3_499 % BLOCK_SIZE] * 15, "only the beginning of the block that parts"
        assert watched.num_rows <= 3_500 + 16 * 12
        assert reply.usage.written_tokens <= 3_500 + 16 * 11


def test_the_best_of_sixteen_in_room_for_one_prompt(folder: Path, roomy: ostinato.Engine) -> None:
    expected = roomy.complete(PROMPT, n=2, best_of=16, seed=5, **DRAWN)
    with tight(folder, PROMPT_BLOCKS + 16 * 10) as (engine, watched):
        reply = engine.complete(PROMPT, n=2, best_of=16, seed=5, **DRAWN)
        assert [c.token_ids for c in reply.choices] == [c.token_ids for c in expected.choices]
        assert watched.copied == [3_499 % BLOCK_SIZE] * 15
        assert watched.num_rows <= 3_500 + 16 * 12


def test_beams_in_room_for_one_prompt(folder: Path, roomy: ostinato.Engine) -> None:
    """Four beams of six tokens: the prompt is computed once, and then one row for each beam and round."""
    expected = roomy.beam_search(PROMPT, beam_width=4, max_tokens=6, ignore_eos=True)
    with tight(folder, PROMPT_BLOCKS + 40) as (engine, watched):
        found = engine.beam_search(PROMPT, beam_width=4, max_tokens=6, ignore_eos=True)
        assert [beam.token_ids for beam in found] == [beam.token_ids for beam in expected]
        assert watched.most_at_once == 4
        assert max(watched.held) <= PROMPT_BLOCKS + 40
        assert watched.num_rows == 3_500 + 5 * 4
        assert all(length < BLOCK_SIZE for length in watched.copied), "a block was copied as a whole"


def test_agents_that_branch_share_what_they_have_in_common(folder: Path, roomy: ostinato.Engine) -> None:
    """One history, two plans tried at once, each for two turns; and each branches again."""
    history: list[Any] = [
        {"role": "system", "content": "You are a careful planner. " * 100},
        {"role": "user", "content": "Here is the task. " * 30},
    ]
    plans = ["Try it with a hammer.", "Try it with patience."]
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}

    def branch(engine: ostinato.Engine, plan: str, together: Barrier) -> list[str]:
        talk, answers = [*history, {"role": "assistant", "content": "Yes."}], []
        for words in (plan, "And then?"):
            talk.append({"role": "user", "content": words})
            together.wait(60)
            reply = engine.chat(talk, n=2, **options)
            answers += [choice.text for choice in reply.choices]
            talk.append(reply.message)
        return answers

    expected = [branch(roomy, plan, Barrier(1)) for plan in plans]
    num_common = len(roomy.runtime.prepare(GenerationRequest(conversation_from_dicts(history))).tokens)
    common_blocks = num_common // BLOCK_SIZE
    with tight(folder, common_blocks + 4 * 30) as (engine, watched):
        engine.chat(history, **{**options, "max_tokens": 1})
        barrier = Barrier(2)
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda plan: branch(engine, plan, barrier), plans))
        assert found == expected
        assert watched.most_at_once == 4, "both branches of both ran side by side"
        assert max(watched.held) <= common_blocks + 4 * 30 < 2 * common_blocks
        assert watched.num_rows < 2 * num_common, "what they have in common was computed again"


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
