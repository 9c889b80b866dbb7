"""What storing KV in fewer bits saves, costs, and does to answers.

``bytes_per_token`` of SmolLM2-135M in float32, blocks of 16 tokens. ``encode`` and ``decode``: bytes of the
arena that go through the codec in a second, in one thread, out of and into an arena that is larger than the
processor's caches, in turn with the exact codec, which is a copy. Reading and storing come on top
(``benchmarks/tiers.py``).

Answers. Texts of 512 to 1,500 tokens: the standard library's own documentation (``pydoc_data``), and, where
the folder is there, prompts of recorded agent sessions. Their KV is computed by transformers, goes through
the real codec block by block, and the next 64 tokens, which the model generates greedily from exact KV, are
scored on what came back. As in the tier, what stands behind the last block that is read (or inside the
codec's window) is computed anew, on that.

- ``kl``: KL divergence of the next-token distribution from the exact one, in nats, mean over 64 positions
  and all texts; ``kl_worst_text``: the mean of the text where it is largest.
- ``agreement``: how often the likeliest token is the same. ``same_answers``: texts in which all 64 are, that
  is, in which greedy decoding gives the same answer.
- ``kl_in_turns``: the same when the text was computed in pieces of 256 tokens, each on what had been stored
  and read of those before, as in a conversation with a restart at every turn.

Text that the model wrote by itself is likelier than any other; the first token after a surprising one would
show larger differences. ``--quick`` measures the speed only, and leaves the published results as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import finish, pairs, spread
from ostinato.config import Settings, tame_waiting_threads
from real_texts import SESSIONS, texts

SPECS = (
    *("exact", "fp16", "bf16", "int8", "int8/int4", "int4"),
    *("0-14:int8,15-:fp16", "0-14:int4,15-:int8", "0-14:int4,15-:int8/int4"),
)
IN_TURNS = ("int8", "int4", "0-14:int4,15-:int8")
BLOCK_TOKENS = 16
TURN_TOKENS = 256
NUM_SCORED = 64
SPEED_BLOCKS = 192


@dataclass(frozen=True)
class Case:
    name: str
    tokens: list[int]


# ---------------------------------------------------------------- speed


def speed(arena: Any, rounds: int) -> dict[str, dict[str, Any]]:
    """Every codec against the exact one, on the same blocks."""
    from ostinato.kv.codecs.layered import make_codec

    exact = make_codec(arena, BLOCK_TOKENS, "exact")
    total_gb = SPEED_BLOCKS * exact.payload_bytes / 1e9
    slots = [place * BLOCK_TOKENS for place in range(SPEED_BLOCKS)]

    def ways(codec: Any) -> tuple[Callable[[], float], Callable[[], float]]:
        buffer = memoryview(bytearray(codec.payload_bytes))
        assert codec.encode(0, buffer), "the blocks were refused"

        def timed(work: Callable[[int], Any]) -> Callable[[], float]:
            def run() -> float:
                started = time.perf_counter()
                for slot in slots:
                    work(slot)
                return time.perf_counter() - started

            return run

        return timed(lambda slot: codec.encode(slot, buffer)), timed(lambda slot: codec.decode(buffer, slot))

    found: dict[str, dict[str, Any]] = {}
    for spec in SPECS:
        codec = make_codec(arena, BLOCK_TOKENS, spec)
        details: dict[str, Any] = {
            "bytes_per_token": codec.payload_bytes // BLOCK_TOKENS,
            "part_of_float32": round(codec.payload_bytes / exact.payload_bytes, 4),
        }
        for name, ours, theirs in zip(("encode", "decode"), ways(codec), ways(exact), strict=True):
            times, copies = pairs(ours, theirs, rounds, f"{spec} {name}, exact")
            details[f"{name}_gb_s"] = spread([total_gb / s for s in times], 2)
            details[f"{name}_exact_gb_s"] = spread([total_gb / s for s in copies], 2)
        found[spec] = details
    return found


# ---------------------------------------------------------------- answers


class Scorer:
    """transformers' model, its KV in an arena, and codecs that move blocks about in that."""

    def __init__(self, model: Any, arena: Any, room: int) -> None:
        self._model = model
        self._arena = arena
        self._room = room

    def cache(self, num_tokens: int, start: int) -> Any:
        """transformers' cache of the tokens whose KV lies in the arena from slot ``start`` on."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        if num_tokens:
            part = slice(start, start + num_tokens)
            for layer in range(len(self._arena.layers)):
                keys, values = self._arena.keys[layer][:, part], self._arena.values[layer][:, part]
                cache.update(keys.clone().unsqueeze(0), values.clone().unsqueeze(0), layer)
        return cache

    def compute(self, tokens: list[int], num_before: int, start: int) -> Any:
        """Computes ``tokens`` behind ``num_before`` others, keeps their KV, and returns all their logits."""
        import torch

        cache = self.cache(num_before, start)
        ids = torch.tensor([tokens])
        output = self._model(input_ids=ids, cache=cache, use_cache=True)
        part = slice(start + num_before, start + num_before + len(tokens))
        for layer, kept in enumerate(cache.layers):
            self._arena.keys[layer][:, part] = kept.keys[0, :, num_before:]
            self._arena.values[layer][:, part] = kept.values[0, :, num_before:]
        return output.logits[0]

    def through(self, codec: Any, first: int, end: int, source: int, target: int) -> None:
        """Blocks ``[first, end)`` of a sequence, from one place through the codec to another."""
        buffer = memoryview(bytearray(codec.payload_bytes))
        for place in range(first, end):
            assert codec.encode(source + place * BLOCK_TOKENS, buffer), "a block was refused"
            codec.decode(buffer, target + place * BLOCK_TOKENS)

    def restored(self, codec: Any, prompt: list[int], num_read: int) -> None:
        """Beside the exact KV (at 0): all but the last token's, of which ``num_read`` have been read."""
        self.through(codec, 0, num_read // BLOCK_TOKENS, 0, self._room)
        if rest := prompt[num_read:-1]:
            self.compute(rest, num_read, self._room)

    def restored_in_turns(self, codec: Any, prompt: list[int], num_read: int) -> None:
        """The same, computed in pieces, each on what was read of those before."""
        for start in range(0, num_read, TURN_TOKENS):
            end = min(start + TURN_TOKENS, num_read)
            self.compute(prompt[start:end], start, self._room)
            first, last = start // BLOCK_TOKENS, end // BLOCK_TOKENS
            self.through(codec, first, last, self._room, self._room)
        if rest := prompt[num_read:-1]:
            self.compute(rest, num_read, self._room)


def score(scorer: Scorer, case: Case, codecs: dict[str, Any], room: int) -> dict[str, dict[str, Any]]:
    """One text: KL and agreement for every codec, on the model's own greedy continuation."""
    import torch

    prompt, num_known = case.tokens, len(case.tokens) - 1
    scorer.compute(prompt[:-1], 0, 0)
    rows = prompt[-1:]
    for place in range(NUM_SCORED - 1):
        rows.append(int(scorer.compute(rows[place:], num_known + place, 0)[-1].argmax()))
    exact = torch.log_softmax(scorer.compute(rows, num_known, 0).double(), -1)
    results: dict[str, dict[str, Any]] = {}

    def judge(name: str, restore: Callable[[Any, list[int], int], None], codec: Any) -> None:
        usable = min(num_known, len(prompt) - codec.window_tokens)
        restore(codec, prompt, usable // BLOCK_TOKENS * BLOCK_TOKENS)
        got = torch.log_softmax(scorer.compute(rows, num_known, room).double(), -1)
        kl = (exact.exp() * (exact - got)).sum(-1)
        agrees = got.argmax(-1) == exact.argmax(-1)
        results[name] = {
            "kl": float(kl.mean()),
            "agreement": float(agrees.double().mean()),
            "same": bool(agrees.all()),
        }

    for spec, codec in codecs.items():
        judge(spec, scorer.restored, codec)
        if spec in IN_TURNS:
            judge(f"{spec} in turns", scorer.restored_in_turns, codec)
    return results


def answers(model: Any, cases: list[Case], layers: Any) -> dict[str, dict[str, Any]]:
    import torch

    from ostinato.kv.arena import Arena
    from ostinato.kv.codecs.layered import make_codec

    room = -(-(max(len(case.tokens) for case in cases) + NUM_SCORED) // BLOCK_TOKENS) * BLOCK_TOKENS
    arena = Arena(layers, 2 * room, dtype=torch.float32, device=torch.device("cpu"))
    codecs = {spec: make_codec(arena, BLOCK_TOKENS, spec) for spec in SPECS}
    scorer = Scorer(model, arena, room)
    by_case = []
    for case in cases:
        started = time.perf_counter()
        with torch.inference_mode():
            by_case.append(score(scorer, case, codecs, room))
        duration = time.perf_counter() - started
        print(f"  {case.name}, {len(case.tokens)} tokens: {duration:.0f} s", flush=True)
    assert all(result["exact"]["kl"] < 1e-9 for result in by_case), "exact is not exact"
    found: dict[str, dict[str, Any]] = {}
    for spec in SPECS:
        results = [result[spec] for result in by_case]
        found[spec] = {
            "kl": float(f"{statistics.mean(r['kl'] for r in results):.3g}"),
            "kl_worst_text": float(f"{max(r['kl'] for r in results):.3g}"),
            "agreement": round(statistics.mean(r["agreement"] for r in results), 4),
            "same_answers": sum(r["same"] for r in results),
        }
        if spec in IN_TURNS:
            turns = [result[f"{spec} in turns"]["kl"] for result in by_case]
            found[spec]["kl_in_turns"] = float(f"{statistics.mean(turns):.3g}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=Path, default=SESSIONS, help="recorded agent sessions")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="leave out what needs the default model")
    options = parser.parse_args()
    tame_waiting_threads(os.environ)
    import torch

    from ostinato.kv.arena import Arena, LayerShape

    layers = [LayerShape(3, 64, 64)] * 30  # SmolLM2-135M's
    arena = Arena(layers, SPEED_BLOCKS * BLOCK_TOKENS, dtype=torch.float32, device=torch.device("cpu"))
    for group in arena.groups:
        group.normal_()
    codecs = speed(arena, options.rounds)
    del arena
    details: dict[str, Any] = {"codecs": codecs}
    headline: dict[str, Any] = {f"{spec}_part": codecs[spec]["part_of_float32"] for spec in ("int8", "int4")}
    if options.quick:
        print(json.dumps(headline))
        return
    from transformers import AutoModelForCausalLM

    from ostinato.models.fetch import fetch
    from ostinato.models.store import ModelStore
    from ostinato.prompt.tokens import HFTokenizer

    settings = Settings.from_environment(os.environ)
    assert settings.store is not None
    path = fetch(settings.model, ModelStore(settings.store), progress=None).path
    tokenizer = HFTokenizer.from_folder(path, nonce="0" * 32)
    cases = [
        Case(name, tokenizer.encode(text)[:length].tolist()) for name, text, length in texts(options.sessions)
    ]
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    details["texts"] = {case.name: len(case.tokens) for case in cases}
    for spec, found in answers(model, cases, layers).items():
        codecs[spec] |= found
    for spec in ("int8", "int4"):
        headline |= {f"{spec}_kl": codecs[spec]["kl"], f"{spec}_agreement": codecs[spec]["agreement"]}
    finish("codecs", headline, details)


if __name__ == "__main__":
    main()
