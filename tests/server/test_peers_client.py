"""The client of `benchmarks/peers.py`, against the real server: what it measures must be what was said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from against.client import Failed, agreement, run
from against.environments import Unavailable
from against.servers import Command, Launch, Peer, free_port, serving
from against.workloads import Author, Conversation, Workload


def words(text: str) -> int:
    return len(text.split())


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


def test_texts_are_long_enough_and_differ_by_seed() -> None:
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    one, again, other = (Author(tokenizer, seed).handbook("a", 200) for seed in ("1", "1", "2"))
    assert one == again
    assert one.split()[1] != other.split()[1]
    assert 200 <= len(tokenizer.encode(one).ids) < 240
