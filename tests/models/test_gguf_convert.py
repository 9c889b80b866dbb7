"""Conversion equals what transformers itself makes of the same GGUF file, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import orjson
import pytest
from recorder import Recorder
from tiny_gguf import ARCHITECTURES, write_gguf

from ostinato.errors import ModelCorruptError, ModelUnsupportedError
from ostinato.models.convert import convert_gguf
from ostinato.models.digest import digest_file


def convert(source: Path, work: Path, progress: Recorder | None = None) -> Path:
    work.mkdir(parents=True, exist_ok=True)
    return convert_gguf(source, work, source_digest=digest_file(source), progress=progress)


def bits(array: np.ndarray) -> np.ndarray:
    """NaN is equal to NaN, and 0 is not -0."""
    return np.ascontiguousarray(array).view(np.int32)


def assert_equal_to_transformers(source: Path, out: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lonely = tmp_path / "reference"
    lonely.mkdir()
    shutil.copy(source, lonely / "model.gguf")
    expected = AutoModelForCausalLM.from_pretrained(str(lonely), gguf_file="model.gguf", dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(str(out), local_files_only=True)
    assert type(ours) is type(expected)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    theirs_state, our_state = expected.state_dict(), ours.state_dict()
    assert our_state.keys() == theirs_state.keys()
    for name, tensor in theirs_state.items():
        assert np.array_equal(bits(our_state[name].numpy()), bits(tensor.numpy())), name
    assert_same_meaning(ours.config.to_dict(), expected.config.to_dict())

    their_tokenizer = AutoTokenizer.from_pretrained(str(lonely), gguf_file="model.gguf")
    their_tokenizer.save_pretrained(str(lonely / "saved"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (lonely / "saved" / name).read_bytes(), name
    our_tokenizer = AutoTokenizer.from_pretrained(str(out), local_files_only=True)
    for text in ("hello world", " hello", "<|im_start|>hello<|im_end|>", "naïve ☃ \n\n x"):
        assert our_tokenizer(text)["input_ids"] == their_tokenizer(text)["input_ids"]
    turn = [{"role": "user", "content": "hello"}]
    ids = our_tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
    assert ids == their_tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]


def assert_same_meaning(ours: dict[str, object], theirs: dict[str, object]) -> None:
    ignored = {"quantization_config", "architectures", "_name_or_path", "_model_name_or_path", "dtype"}
    keys = (ours.keys() | theirs.keys()) - ignored
    assert {k: ours.get(k) for k in keys} == {k: theirs.get(k) for k in keys}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_equals_transformers(architecture: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", architecture, quantisation="Q8_0")
    out = convert(source, tmp_path / "work")
    assert_equal_to_transformers(source, out, tmp_path)


@pytest.mark.parametrize("quantisation", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_quantisation_equals_transformers(quantisation: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", "llama-tied", quantisation=quantisation)
    out = convert(source, tmp_path / "work")
    assert_equal_to_transformers(source, out, tmp_path)


@pytest.mark.parametrize("quantisation", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_quantisations_that_only_unpack(quantisation: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", "llama-wide", quantisation=quantisation)
    out = convert(source, tmp_path / "work")
    assert_equal_to_transformers(source, out, tmp_path)


def test_result_is_complete_and_plain(tiny_gguf: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    progress = Recorder()
    out = convert(tiny_gguf, tmp_path / "work", progress)
    config = orjson.loads((out / "config.json").read_bytes())
    assert config["dtype"] == "float32"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    assert str(tmp_path) not in (out / "config.json").read_text(), "no path of this machine may be stored"
    with safe_open(str(out / "model.safetensors"), "np") as weights:
        assert "lm_head.weight" not in list(weights.keys()), "tied weights are stored once"
        assert weights.metadata() == {"format": "pt"}
        last_start = weights.get_slice("model.norm.weight").get_shape()
    assert last_start == [64]
    steps = {description: (total, done) for description, total, done in progress.steps}
    size_bytes = (out / "model.safetensors").stat().st_size
    assert steps["Converting tiny.gguf"] == (size_bytes, size_bytes), "the bar reaches its end"


def test_turn_end_ends_an_answer_too(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "t.gguf", metadata={"tokenizer.ggml.eot_token_id": 7})
    out = convert(source, tmp_path / "work")
    assert orjson.loads((out / "generation_config.json").read_bytes())["eos_token_id"] == [2, 7]


def test_neighbours_of_the_file_do_not_matter(tmp_path: Path) -> None:
    """A folder often holds other files beside a GGUF; transformers alone would read them."""
    (tmp_path / "busy").mkdir()
    source = write_gguf(tmp_path / "busy" / "tiny.gguf")
    (tmp_path / "busy" / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    (tmp_path / "busy" / "config.json").write_text("{ not JSON")
    out = convert(source, tmp_path / "work")
    assert "T5" not in (out / "tokenizer_config.json").read_text()


# ---------------------------------------------------------------- refusals


def test_unknown_architecture(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "t.gguf")
    data = source.read_bytes()
    source.write_bytes(data.replace(b"llama", b"lxama"))
    with pytest.raises(ModelUnsupportedError, match="cannot read the GGUF architecture 'lxama'"):
        convert(source, tmp_path / "work")


def test_encoder_decoder(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "t5.gguf", "t5")
    for key in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"t5.{key}", 2)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelUnsupportedError, match="encoder-decoder"):
        convert(tmp_path / "t5.gguf", tmp_path / "work")


def test_missing_tensor_is_never_invented(tmp_path: Path) -> None:
    """transformers fills the hole with random numbers and a warning; we refuse."""
    source = write_gguf(tmp_path / "t.gguf", leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ModelUnsupportedError, match=r"lacks 1 .*model\.layers\.1\.mlp\.up_proj\.weight"):
        convert(source, tmp_path / "work")


def test_metadata_that_contradicts_the_tensors(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "t.gguf", metadata={"feed_forward_length": 80})
    with pytest.raises(ModelCorruptError, match=r"has the shape \(.*by the metadata it is"):
        convert(source, tmp_path / "work")


@pytest.mark.parametrize(
    ("key", "value"), [("attention.head_count", 0), ("embedding_length", 7), ("rope.dimension_count", 0)]
)
def test_metadata_that_makes_no_sense(key: str, value: int, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "t.gguf", metadata={key: value})
    with pytest.raises((ModelCorruptError, ModelUnsupportedError)):
        convert(source, tmp_path / "work")


def test_quantisation_nobody_unpacks(tmp_path: Path) -> None:
    import gguf

    source = write_gguf(tmp_path / "t.gguf", "llama-wide", quantisation="Q8_1")
    assert gguf.GGMLQuantizationType.Q8_1.name == "Q8_1"
    with pytest.raises(ModelUnsupportedError, match="of type Q8_1, which the gguf package cannot unpack"):
        convert(source, tmp_path / "work")


def test_tokenizer_of_an_unknown_kind(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "t.gguf")
    data = source.read_bytes()
    at = data.index(b"tokenizer.ggml.model") + len(b"tokenizer.ggml.model") + 12
    assert data[at : at + 4] == b"gpt2"
    source.write_bytes(data[:at] + b"xyz2" + data[at + 4 :])
    with pytest.raises(ModelUnsupportedError, match=r"cannot build the tokenizer .*'xyz2'"):
        convert(source, tmp_path / "work")
