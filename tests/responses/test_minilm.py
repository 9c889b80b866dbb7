"""MiniLM in numpy against transformers, which computes the same in torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ostinato.errors import ModelCorruptError, ModelUnavailableError
from ostinato.models.embedder import fetch_embedder
from ostinato.models.store import ModelStore
from ostinato.responses.embed.minilm import MiniLM

TEXTS = [
    "How do I enable two-factor authentication?",
    "",
    "Ünïcödé, 漢字 and emoji 🎉 in one line",
    "word " * 400,  # more than the model reads
    "How do I disable two-factor authentication?",
    "x",
]

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def minilm(embedder_path: Path) -> MiniLM:
    return MiniLM(embedder_path, "b3:test")


def reference(folder: Path, texts: list[str]) -> np.ndarray:
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    rows = []
    for text in texts:
        inputs = tokenizer(text or " ", return_tensors="pt", truncation=True, max_length=256)
        with torch.no_grad():
            hidden = model(**inputs).last_hidden_state[0].mean(dim=0)
        rows.append((hidden / hidden.norm()).numpy())
    return np.stack(rows)


def test_vectors_are_those_of_transformers(minilm: MiniLM, embedder_path: Path) -> None:
    ours = minilm.embed(TEXTS)
    theirs = reference(embedder_path, TEXTS)
    assert not ours[1].any()  # a text without words is near nothing
    for at in (0, 2, 3, 4, 5):
        assert np.abs(ours[at] - theirs[at]).max() < 2e-5


def test_a_vector_does_not_depend_on_its_neighbours(minilm: MiniLM) -> None:
    together = minilm.embed(TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(minilm.embed([text])[0], vector, atol=1e-5)
    assert minilm.embed([]).shape == (0, 384)


def test_tokens_stand_where_they_are_in_the_text(minilm: MiniLM) -> None:
    text = "Reset my passwörd"
    (read,) = minilm.read([text])
    words = [text[piece.start : piece.end].lower() for piece in read.pieces]
    assert words[:2] == ["reset", "my"]
    assert "".join(words[2:]) == "passwörd"
    assert read.inner.shape == read.bare.shape == (len(read.pieces), 384)
    np.testing.assert_allclose(read.vector, minilm.embed([text])[0], atol=1e-5)
    assert minilm.read([text])[0] is read  # it is remembered


def test_a_folder_that_is_no_embedder_is_refused(tmp_path: Path, embedder_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match=r"config\.json"):
        fetch_embedder(str(tmp_path), ModelStore(tmp_path / "store"))
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((embedder_path / name).read_bytes())
    weights = (embedder_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ModelCorruptError, match="fetch the embedder again"):
        MiniLM(tmp_path, "b3:test")
    with pytest.raises(ModelUnavailableError, match="offline"):
        fetch_embedder("all-minilm-l6-v2", ModelStore(tmp_path / "store"), offline=True)
