"""The client of `benchmarks/peers.py`, against the real server: what it measures must be what was said."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from against.client import Answer, Failed, Run, agreement, run
from against.environments import Unavailable
from against.servers import PEERS, Command, Launch, Peer, free_port, serving
from against.workloads import Author, Conversation, Workload
from peers import Benchmark, headline, missed_bars


def words(text: str) -> int:
    return len(text.split())


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def workload(tokens: int = 6) -> Workload:
    talks = (Conversation("Be brief.", ("first question", "second one")), Conversation("", ("third?",)))
    return Workload("test", "", talks, 2, tokens)


def test_every_turn_is_asked_with_the_servers_own_answers(server_url: str) -> None:
    result = run(workload(), server_url, words, 30.0)
    answers = {(answer.session, answer.turn): answer for answer in result.answers}
    assert sorted(answers) == [(0, 0), (0, 1), (1, 0)]
    assert answers[0, 1].messages[2] == {"role": "assistant", "content": answers[0, 0].text}
    assert [message["role"] for message in answers[1, 0].messages] == ["user"]
    assert all(answer.num_tokens == 6 and answer.ttft_s > 0 for answer in result.answers)
    assert result.figures()["answer_tokens"] == 18


def test_agreement_compares_only_what_was_asked_alike(server_url: str) -> None:
    longer, shorter = (run(workload(tokens), server_url, words, 30.0) for tokens in (6, 5))
    assert agreement(longer, longer) == {"compared": 3, "of": 3, "equal": 3}
    # Answers of another length are other answers, and make another request of the second turn.
    assert agreement(longer, shorter) == {"compared": 2, "of": 3, "equal": 0}


def test_a_server_that_is_not_there_has_failed() -> None:
    with pytest.raises(Failed, match="Connection"):
        run(workload(), f"http://127.0.0.1:{free_port()}", words, 30.0)


def test_a_server_that_ends_at_once_is_unavailable_with_its_last_error(tmp_path: Path) -> None:
    def command(programs: Path, launch: Launch) -> Command:
        return Command([sys.executable, "-c", "raise OSError('no such device')"], {})

    peer = Peer("test-that-ends", "", lambda: tmp_path, command)
    with (
        pytest.raises(Unavailable, match="OSError: no such device"),
        serving(peer, tmp_path, Launch(tmp_path, None, free_port(), 1), "test"),
    ):
        pass


def test_texts_are_long_enough_and_differ_by_seed(tokenizer: Tokenizer) -> None:
    one, again, other = (Author(tokenizer, seed).handbook("a", 200) for seed in ("1", "1", "2"))
    assert one == again
    assert one.split()[1] != other.split()[1]
    assert 200 <= len(tokenizer.encode(one).ids) < 240


def ran(ttft_s: float, wall_s: float) -> Run:
    """One answer of 10 tokens."""
    answer = Answer(0, 0, [], "text", 0.0, (ttft_s, ttft_s + 0.1), 10, 5, 0)
    return Run([answer], wall_s=wall_s)


def test_a_ratio_above_one_says_that_ours_is_better(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = argparse.Namespace(sessions=str(tmp_path), workloads=["short"], minutes=1.0)
    benchmark = Benchmark(options, tmp_path)
    benchmark.whats["short"] = ""
    benchmark.runs["ostinato"]["short"] = {0: ran(1.0, 2.0), 1: ran(2.0, 4.0)}
    benchmark.runs["vllm"]["short"] = {0: ran(3.0, 3.0), 1: ran(1.0, 2.0)}
    # A peer that took part once is compared with ours of that repetition.
    benchmark.runs["kvboost"]["short"] = {0: ran(2.0, 5.0)}
    ratios = headline(benchmark)["short"]
    assert ratios["vllm"] == {"ttft_p50_ratio": 1.75, "ttft_p99_ratio": 1.75, "throughput_ratio": 1.0}
    assert ratios["kvboost"] == {"ttft_p50_ratio": 2.0, "ttft_p99_ratio": 2.0, "throughput_ratio": 2.5}
    assert ratios["best_peer"] == {"ttft_p50_ratio": 1.75, "ttft_p99_ratio": 1.75, "throughput_ratio": 1.0}
    assert missed_bars({"short": {"vllm": ratios["vllm"]}}) == []
    assert len(missed_bars({"short": {"vllm": dict.fromkeys(ratios["vllm"], 0.9)}})) == 3
    assert PEERS["vllm"].is_repeated
    assert not PEERS["kvboost"].is_repeated
