"""The library's door, on a tiny model in a folder: answers, streams, errors, usage."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import ostinato
from doors.tiny import save_tiny_chat_model
from ostinato.errors import EmptyConversationError, ParameterError, PromptTooLongError, TemplateError
from ostinato.library import _conversation


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


def test_an_answer_goes_back_into_the_conversation(engine: ostinato.Engine) -> None:
    reply = engine.chat(TALK, **OPTIONS)
    again = {"role": "user", "content": "And?"}
    by_value = engine.chat([*TALK, reply.message, again], **OPTIONS)
    by_hand = engine.chat([*TALK, {"role": "assistant", "content": reply.text}, again], **OPTIONS)
    assert by_value.text == by_hand.text
    assert by_value.usage.prompt_tokens == by_hand.usage.prompt_tokens
    call = ostinato.ToolCall("c1", "f", "{}")
    calls = ostinato.Message("assistant", tool_calls=(call,), reasoning="hm")
    result = ostinato.Message("tool", "4", tool_call_id="c1")
    assert _conversation([TALK[1], calls, result]).messages[1:] == (calls, result)


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": "hot"}, {"temperature": None}, {"temperature": True}, {"top_p": None},
        {"repetition_penalty": 1e-300}, {"max_tokens": "5"}, {"max_tokens": 2.5}, {"max_tokens": True},
        {"n": "2"}, {"n": 2.0}, {"stop": [1]}, {"stop": 5}, {"stop_token_ids": ["a"]}, {"stop_token_ids": 5},
        {"logit_bias": {"5": 1}}, {"logit_bias": [1]}, {"logprobs": True}, {"seed": 1.5}, {"seed": "x"},
        {"top_k": 1.5}, {"top_k": None}, {"salt": 5}, {"ignore_eos": "yes"},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_types_are_named_before_the_engine_sees_them(
    engine: ostinato.Engine, option: dict[str, object]
) -> None:
    with pytest.raises(ParameterError) as refused:
        engine.chat(TALK, **{"max_tokens": 3} | option)
    assert refused.value.param in option


@pytest.mark.parametrize("prompt", ["half \ud800", [1.5], ["a"], [True, None], 5, None], ids=repr)
def test_wrong_prompts_are_named(engine: ostinato.Engine, prompt: Any) -> None:
    with pytest.raises(ParameterError) as refused:
        engine.complete(prompt, max_tokens=3)
    assert refused.value.param == "prompt"


def test_whole_numbers_do_for_real_ones_and_arrays_for_ids(engine: ostinato.Engine) -> None:
    assert engine.chat(TALK, temperature=2, repetition_penalty=2, max_tokens=3, ignore_eos=True).text
    assert engine.complete(np.array([3, 4, 5]), max_tokens=3).usage.prompt_tokens == 3


@pytest.mark.parametrize(
    "setting",
    [
        {"max_model_len": -5}, {"max_model_len": 1}, {"kv_cache": 2.5}, {"kv_cache": "much"},
        {"kv_cache": 1 << 60}, {"block_size": "x"}, {"device": "nonsense"}, {"port": "x"},
        {"drain_timeout": float("nan")}, {"store": 5}, {"offline": "yes"}, {"dtype": "int8"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_be_are_named(folder: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as refused:
        ostinato.load(folder, **{"kv_cache": 1 << 20} | setting)
    assert refused.value.param in setting


def test_an_observer_that_raises_costs_no_request(folder: Path) -> None:
    def raises(event: object) -> None:
        raise ValueError(type(event).__name__)

    with ostinato.load(folder, kv_cache=1 << 16, block_size=4) as engine:
        expected = engine.chat(TALK, **OPTIONS).text
        engine.runtime.observers.append(raises)
        assert engine.chat(TALK, **OPTIONS).text == expected
        stream = engine.stream(TALK, temperature=0.0, max_tokens=40, ignore_eos=True)
        next(stream)
        del stream  # dropped, not closed: collecting it must cancel it
        assert engine.chat(TALK, salt="other", **OPTIONS).text == expected
        assert engine.runtime.health().num_held_blocks == 0


def test_many_threads_and_event_loops_share_an_engine(engine: ostinato.Engine) -> None:
    expected = engine.chat(TALK, **OPTIONS).text

    async def ask() -> list[str]:
        replies = await asyncio.gather(*(engine.achat(TALK, **OPTIONS) for _ in range(3)))
        async for _ in engine.astream(TALK, temperature=0.0, max_tokens=100, ignore_eos=True):
            break  # left to the loop's end
        return [reply.text for reply in replies]

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(asyncio.run, ask()) for _ in range(4)]
        plain = [pool.submit(lambda: engine.chat(TALK, **OPTIONS).text) for _ in range(8)]
        assert [text for answer in answers for text in answer.result(60)] == [expected] * 12
        assert [answer.result(60) for answer in plain] == [expected] * 8
    assert engine.chat(TALK, **OPTIONS).text == expected
    assert engine.runtime.health().num_held_blocks == 0


def test_closing_ends_what_runs(folder: Path) -> None:
    engine = ostinato.load(folder, kv_cache=1 << 20)
    streams = [engine.stream(TALK, temperature=0.0, max_tokens=200, ignore_eos=True) for _ in range(3)]
    for stream in streams:
        next(stream)
    engine.close()
    for stream in streams:
        assert list(stream)[-1].finish_reason in ("abort", "length")
    engine.close()
    assert engine.runtime.health().num_held_blocks == 0


def test_a_program_that_forgets_to_close_ends(folder: Path) -> None:
    code = f"""
import ostinato
engine = ostinato.load({str(folder)!r}, kv_cache=1 << 20)
stream = engine.stream("Hello", temperature=0.0, max_tokens=200, ignore_eos=True)
next(stream)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_a_token_that_the_weights_do_not_know_is_refused_and_one_without_text_is_nothing(
    folder: Path, tmp_path: Path
) -> None:
    for vocab_size in (200, 300):
        variant = tmp_path / str(vocab_size)
        shutil.copytree(folder, variant)
        config = transformers.AutoConfig.from_pretrained(folder)
        config.vocab_size, config.pad_token_id, config.bos_token_id, config.eos_token_id = vocab_size, 0, 0, 0
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(str(variant))
        (variant / "generation_config.json").unlink()
    with ostinato.load(tmp_path / "200", kv_cache=1 << 20) as engine:
        with pytest.raises(ParameterError, match="tokenizer has more tokens"):
            engine.chat(TALK, max_tokens=3)
        assert engine.complete("!!", max_tokens=3).usage.prompt_tokens == 2
    with ostinato.load(tmp_path / "300", kv_cache=1 << 20) as engine:
        reply = engine.chat(TALK, max_tokens=3, temperature=0.0, logit_bias={299: 100.0}, logprobs=3)
        assert (reply.choices[0].token_ids, reply.text) == ((299, 299, 299), "")
        assert engine.runtime.tokenizer.token_bytes(299) == b""


def test_a_stop_string_in_what_was_held_back_until_the_end(engine: ostinato.Engine) -> None:
    tokenizer = engine.runtime.tokenizer
    half = next(i for i in range(256) if tokenizer.token_bytes(i) == b"\xc3")
    options = {"max_tokens": 1, "temperature": 0.0, "logit_bias": {half: 100.0}}
    assert engine.chat(TALK, **options).text == "\ufffd"
    stopped = engine.chat(TALK, stop="\ufffd", **options).choices[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", "\ufffd")


async def test_a_long_prompt_does_not_hold_up_the_event_loop(
    engine: ostinato.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop_thread = threading.get_ident()
    prepare, threads = engine.runtime.prepare, list[int]()

    def recorded(request: Any) -> Any:
        threads.append(threading.get_ident())
        return prepare(request)

    monkeypatch.setattr(engine.runtime, "prepare", recorded)
    await engine.achat(TALK, **OPTIONS)
    async for _ in engine.astream(TALK, **OPTIONS):
        pass
    assert len(threads) == 2
    assert loop_thread not in threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_in_a_forked_process_the_engine_says_that_it_is_not_there(folder: Path) -> None:
    code = f"""
import os, ostinato
with ostinato.load({str(folder)!r}, kv_cache=1 << 20) as engine:
    engine.chat("Hello", max_tokens=2)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        assert engine.chat("Hello", max_tokens=2).usage.completion_tokens
        raise SystemExit(os.waitstatus_to_exitcode(status))
    try:
        engine.chat("Hello", max_tokens=2)
    except ostinato.ServerError:
        os._exit(7)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7, done.stderr


def test_a_deadline_ends_an_answer_and_is_checked(engine: ostinato.Engine) -> None:
    cut = engine.chat(TALK, temperature=0.0, ignore_eos=True, deadline=0.05, salt="deadline")
    whole = engine.chat(TALK, temperature=0.0, ignore_eos=True, salt="deadline")
    assert cut.finish_reason == "length"
    assert 0 < len(cut.choices[0].token_ids) < len(whole.choices[0].token_ids)
    for wrong in (0, -1.0, "soon"):
        with pytest.raises(ParameterError, match="deadline"):
            engine.chat(TALK, deadline=wrong, **OPTIONS)


def test_the_ledger_says_what_memory_holds(engine: ostinato.Engine) -> None:
    ledger = engine.runtime.ledger
    assert ledger.weight_bytes > 0
    assert ledger.kv_bytes == ledger.kv_tokens * ledger.kv_bytes_per_token <= 1 << 20
    assert f"{ledger.kv_tokens:,} tokens" in str(ledger)
