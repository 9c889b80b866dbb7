"""Linear layers in eight bits against float32: what that does to answers, and what it gains.

Physics. A decode step waits for the weights, and a quarter of their bytes streams in. A prompt waits for
multiplications, and with VNNI or AMX an instruction does several times as many. What stays in float32
(attention, norms, the embedding), and turning rows into bytes, bounds the gain.

Quality: the model's next-token distributions along real texts (Python's language reference, recorded agent
sessions), at every position:

- ``perplexity_ratio``: perplexity of the texts in eight bits / in float32, of all positions together.
- ``kl``: of the one distribution from the other, nats, mean.
- ``agreement``: share of positions at which both would go on with the same token.

Speed: steps of two engines in one process, alternating, above 1 where eight bits are faster.
``prefill_speedup``: a prompt of 1,024 tokens; ``decode_speedup``, ``decode8_speedup``: a token of one answer,
and of eight at once, behind 256. ``weights_ratio``: bytes of weights. The last line is JSON.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common import finish, pairs, ratio, spread
from engine import BLOCK_SIZE, Steps, timed
from ostinato.config import tame_waiting_threads
from prefix import stored_model
from real_texts import SESSIONS, texts

PROMPT_TOKENS = 1024
CONTEXT_TOKENS = 256


def quality(path: Path, sessions: Path) -> dict[str, Any]:
    """transformers' model on all texts, before and after its layers were replaced."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from ostinato.engines.quantized import quantize_linears

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    cases = [(name, tokenizer.encode(text).ids[:length]) for name, text, length in texts(sessions)]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def distributions(tokens: list[int]) -> Any:
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([tokens]), use_cache=False).logits[0, :-1], -1)

    exact = {name: distributions(tokens).half() for name, tokens in cases}
    surprise = {name: _surprise(distributions(tokens), tokens) for name, tokens in cases}
    quantize_linears(model)
    found: dict[str, Any] = {}
    for name, tokens in cases:
        got, want = distributions(tokens), exact[name].float()
        found[name] = {
            "tokens": len(tokens) - 1,
            "perplexity": round(math.exp(surprise[name]), 3),
            "perplexity_int8": round(math.exp(_surprise(got, tokens)), 3),
            "kl": float((want.exp() * (want - got)).sum(-1).mean()),
            "agreement": float((want.argmax(-1) == got.argmax(-1)).double().mean()),
        }
        print(f"  {name}: {found[name]}", flush=True)
    total = sum(case["tokens"] for case in found.values())

    def mean(name: str) -> float:
        return float(sum(case[name] * case["tokens"] for case in found.values()) / total)

    for case in found.values():
        case["nats_more"] = math.log(case["perplexity_int8"] / case["perplexity"])
    return {
        "texts": found,
        "perplexity_ratio": round(math.exp(mean("nats_more")), 4),
        "kl": float(f"{mean('kl'):.3g}"),
        "agreement": round(mean("agreement"), 4),
    }


def _surprise(distributions: Any, tokens: list[int]) -> float:
    import torch

    return float(-distributions.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).mean())


def speed(rounds: int) -> dict[str, Any]:
    """Steps of both, in turn, on the default model; above 1 where eight bits are faster."""
    from ostinato.engines.hf import load_model
    from ostinato.types import Plan, SequencePlan

    loaded = {form: load_model(stored_model(), quantization=form) for form in ("int8", None)}
    steps = {form: Steps(model, 8 * PROMPT_TOKENS) for form, model in loaded.items()}
    places = np.arange(PROMPT_TOKENS, dtype=np.int32)
    blocks = np.arange(PROMPT_TOKENS // BLOCK_SIZE)
    prompt = Plan((SequencePlan(0, places + 1000, places, places, blocks, BLOCK_SIZE, True),))

    def work(kind: str, form: str | None) -> Callable[[], float]:
        if kind == "prefill":
            return lambda: timed(lambda: steps[form].runner.execute(prompt))
        plans = steps[form].plans(8 if kind == "decode8" else 1, CONTEXT_TOKENS)
        return lambda: steps[form].step(plans)

    found: dict[str, Any] = {}
    for kind in ("prefill", "decode", "decode8"):
        times, exact = pairs(work(kind, "int8"), work(kind, None), rounds, f"{kind} int8, float32")
        found[kind] = {
            "int8_ms": spread([1e3 * s for s in times], 2),
            "float32_ms": spread([1e3 * s for s in exact], 2),
            "speedup": ratio(exact, times),
        }
    found["weights_ratio"] = round(loaded["int8"].weight_bytes / loaded[None].weight_bytes, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=Path, default=SESSIONS, help="recorded agent sessions")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    tame_waiting_threads(os.environ)
    found, judged = speed(options.rounds), quality(stored_model(), options.sessions)
    headline = {
        f"{kind}_speedup": found[kind]["speedup"]["median"] for kind in ("prefill", "decode", "decode8")
    }
    headline |= {"weights_ratio": found["weights_ratio"]}
    headline |= {name: judged[name] for name in ("perplexity_ratio", "kl", "agreement")}
    finish("weights", headline, {"speed": found, "quality": judged})


if __name__ == "__main__":
    main()
