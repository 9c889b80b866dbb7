"""The library's door, on a tiny model in a folder: answers, streams, errors, usage."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ostinato
from doors.tiny import save_tiny_chat_model
from ostinato.errors import EmptyConversationError, ParameterError, PromptTooLongError, TemplateError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[ostinato.Engine]:
    with ostinato.load(folder, kv_cache=1 << 20, block_size=4) as loaded:
        yield loaded


TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there, how are you?"}]
OPTIONS = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


def test_importing_does_not_import_torch() -> None:
    code = "import ostinato, sys; ostinato.Message, ostinato.ClientError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there_and_listed() -> None:
    for name in ostinato.__all__:
        assert getattr(ostinato, name) is not None
    assert set(dir(ostinato)) == set(ostinato.__all__)


def test_chat_and_its_usage(engine: ostinato.Engine) -> None:
    cold = engine.chat(TALK, salt="usage", **OPTIONS)
    warm = engine.chat(TALK, salt="usage", **OPTIONS)
    assert cold.text == warm.text
    assert cold.choices[0].token_ids == warm.choices[0].token_ids
    assert cold.usage.cached_tokens == 0
    assert warm.usage.cached_tokens == warm.usage.prompt_tokens - 1
    # All of the prompt and all generated tokens but the last, whose KV was never computed.
    assert cold.usage.written_tokens == cold.usage.prompt_tokens + cold.usage.completion_tokens - 1
    assert warm.usage.written_tokens == 0
    assert cold.usage.completion_tokens == 12
    assert cold.finish_reason == "length"
    assert 0 < warm.usage.ttft_s <= warm.usage.total_s


def test_stream_is_the_answer_in_pieces(engine: ostinato.Engine) -> None:
    chunks = list(engine.stream(TALK, **OPTIONS))
    assert "".join(chunk.text for chunk in chunks) == engine.chat(TALK, **OPTIONS).text
    assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_leaving_a_stream_cancels_it(engine: ostinato.Engine) -> None:
    stream = engine.stream(TALK, temperature=0.0, max_tokens=200, ignore_eos=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.chat(TALK, **OPTIONS).text
    assert engine.runtime.health().num_held_blocks == 0


async def test_asyncio(engine: ostinato.Engine) -> None:
    expected = engine.chat(TALK, **OPTIONS).text
    replies = await asyncio.gather(*(engine.achat(TALK, **OPTIONS) for _ in range(5)))
    assert [reply.text for reply in replies] == [expected] * 5
    pieces = [chunk.text async for chunk in engine.astream(TALK, **OPTIONS)]
    assert "".join(pieces) == expected


async def test_cancelling_a_task_cancels_the_request(engine: ostinato.Engine) -> None:
    task = asyncio.create_task(engine.achat(TALK, temperature=0.0, max_tokens=220, ignore_eos=True))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.achat(TALK, **OPTIONS)
    assert engine.runtime.health().num_held_blocks == 0


def test_choices_share_their_prompt_and_differ_by_seed(engine: ostinato.Engine) -> None:
    options = {"temperature": 1.0, "max_tokens": 10, "ignore_eos": True, "seed": 3, "n": 4}
    first = engine.chat(TALK, salt="n", **options)
    again = engine.chat(TALK, salt="n again", **options)
    assert [choice.token_ids for choice in first.choices] == [choice.token_ids for choice in again.choices]
    assert len({choice.token_ids for choice in first.choices}) > 1
    assert first.usage.completion_tokens == 40
    assert first.usage.cached_tokens == 0
    # The prompt is written once; each choice adds its own tokens (but those they have in common).
    assert first.usage.written_tokens <= first.usage.prompt_tokens + 4 * 9


def test_stop_strings_and_token_ids(engine: ostinato.Engine) -> None:
    whole = engine.chat(TALK, **OPTIONS)
    middle = whole.text[len(whole.text) // 2 :][:2]
    cut = engine.chat(TALK, stop=middle, **OPTIONS)
    assert cut.finish_reason == "stop"
    assert cut.choices[0].stop_reason == middle
    assert cut.text == whole.text[: whole.text.index(middle)]
    token = whole.choices[0].token_ids[4]
    place = whole.choices[0].token_ids.index(token)
    ended = engine.chat(TALK, stop_token_ids=[token], **OPTIONS)
    assert ended.choices[0].stop_reason == token
    assert ended.choices[0].token_ids == whole.choices[0].token_ids[:place]


def test_raw_prompts(engine: ostinato.Engine) -> None:
    by_text = engine.complete("Hello there", **OPTIONS)
    ids = engine.runtime.tokenizer.encode_prompt("Hello there")
    assert engine.complete(ids.tolist(), **OPTIONS).text == by_text.text


def test_assemble_prompt_holds_what_it_found(engine: ostinato.Engine) -> None:
    from ostinato.prompt.conversation import conversation_from_dicts

    runtime = engine.runtime
    assert runtime.template is not None
    conversation = conversation_from_dicts(TALK)
    engine.chat(TALK, salt="assemble", **OPTIONS)
    cache = runtime.cache("assemble")
    with ostinato.assemble_prompt(conversation, runtime.tokenizer, cache, runtime.template) as prompt:
        assert prompt.prefix_len == len(prompt.input_ids) - 1 == prompt.new_token_start
        assert len(prompt.cache_slots) == prompt.prefix_len
        assert len(set(prompt.cache_slots.tolist())) == prompt.prefix_len
        assert runtime.health().num_held_blocks > 0
    assert runtime.health().num_held_blocks == 0


def test_errors_name_what_is_wrong(engine: ostinato.Engine) -> None:
    with pytest.raises(EmptyConversationError):
        engine.chat([])
    with pytest.raises(ParameterError, match="temperature"):
        engine.chat(TALK, temperature=float("nan"))
    with pytest.raises(ParameterError, match="colour"):
        engine.chat(TALK, colour=1)
    with pytest.raises(PromptTooLongError) as too_long:
        engine.chat([{"role": "user", "content": "word " * 2000}])
    assert too_long.value.num_tokens > too_long.value.max_tokens
    with pytest.raises(PromptTooLongError, match="max_tokens"):
        engine.chat(TALK, max_tokens=10_000)
    with pytest.raises(ParameterError, match="empty"):
        engine.complete([])
    with pytest.raises(ParameterError, match="token ids"):
        engine.complete([10**6])
    with pytest.raises(ParameterError, match="setting"):
        ostinato.load("anything", colour=1)


def test_without_a_template_a_conversation_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_chat_model(tmp_path / "plain", with_template=False)
    with ostinato.load(folder, kv_cache=1 << 20) as engine:
        with pytest.raises(TemplateError, match="template"):
            engine.chat(TALK)
        assert engine.complete("Hello", temperature=0.0, max_tokens=3).usage.completion_tokens <= 3
    with ostinato.load(folder, kv_cache=1 << 20, template="chatml") as engine:
        assert engine.chat(TALK, temperature=0.0, max_tokens=3).usage.completion_tokens <= 3


def test_after_close_requests_are_refused(folder: Path) -> None:
    engine = ostinato.load(folder, kv_cache=1 << 20)
    engine.close()
    with pytest.raises(ostinato.ServerError, match="shutting down"):
        engine.chat(TALK)
