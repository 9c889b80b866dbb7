"""What a KV budget would gain if heads and layers did not all keep the same number of tokens.

How. Plain transformers computes a prompt of ``retention_tasks.py`` with all of its KV and records what its
last 32 rows give to every token, by layer and key head. Then the answer is generated with a mask that hides
what a head would have dropped: no memory is saved, only the answer is had. Scores are ours (mean of 15
neighbours) or SnapKV's (highest of 7); the same total is spread

- ``even``: every head of every layer keeps the same number (what Ostinato does);
- ``heads``: within a layer the highest scores of all its heads stay, each head has at least a fifth of an
  even share (AdaKV, Feng et al., arXiv 2407.11550);
- ``all``: likewise over the heads of all layers together.

Only cases that full KV answers count. The last line is JSON: the share of them that each keeps.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

from common import finish
from ostinato.config import DEFAULT_MODEL, Settings
from ostinato.models.fetch import fetch
from ostinato.models.store import ModelStore
from ostinato.retention.choice import choose, highest_of, smooth
from retention_report import wilson
from retention_tasks import TASKS, Prose, cases

WINDOW = 32
ANSWER_TOKENS = 24
FLOOR_SHARE = 0.2
SPREADS = ("even", "heads", "all")


def _attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    *,
    window: Any = None,
    kept: Any = None,
    **rest: Any,
) -> tuple[Any, None]:
    """SDPA; records the window's weights, or hides from each head what it has not kept."""
    group = query.shape[1] // key.shape[1]
    if window is not None:
        asked = query[0, :, -WINDOW:].unflatten(0, (key.shape[1], group))
        scores = asked @ key[0].unsqueeze(1).transpose(-1, -2) * rest["scaling"]
        future = torch.ones(WINDOW, key.shape[2], dtype=torch.bool).tril(key.shape[2] - WINDOW).logical_not()
        window[module.layer_idx] = scores.masked_fill(future, -torch.inf).softmax(-1).sum((1, 2))
    if kept is None:
        return AttentionInterface()["sdpa"](module, query, key, value, mask, **rest)
    seen = torch.ones(key.shape[1], key.shape[2], dtype=torch.bool)
    seen[:, : kept.shape[2]] = kept[module.layer_idx]
    keys, values = (t.repeat_interleave(group, dim=1) for t in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, seen.repeat_interleave(group, 0)[None, :, None], scale=rest["scaling"]
    )
    return output.transpose(1, 2), None


AttentionInterface.register("uneven", _attend)


def kept_of(scores: Any, num_kept: int, spread: str) -> Any:
    """Flags ``[layers, heads, tokens]``: the first 4 and the last 32 stay, and what ``spread`` chooses."""
    num_layers, num_heads, length = scores.shape
    protected = np.zeros(scores.shape, np.bool_)
    protected[:, :, :4] = protected[:, :, -WINDOW:] = True
    flags = np.zeros(scores.shape, np.bool_)
    least = num_kept if spread == "even" else max(4 + WINDOW, int(FLOOR_SHARE * num_kept))
    np.put_along_axis(flags, choose(scores, protected, least), True, axis=2)
    together = num_heads if spread == "heads" else num_layers * num_heads
    for part in np.split(np.arange(num_layers * num_heads), num_layers * num_heads // together):
        own, score = flags.reshape(-1, length)[part], scores.reshape(-1, length)[part]
        open_places = np.flatnonzero(~own.ravel())
        best = open_places[np.argsort(score.ravel()[open_places], kind="stable")]
        own.ravel()[best[len(best) - (together * num_kept - int(own.sum())) :]] = True
        flags.reshape(-1, length)[part] = own
    assert flags.sum() == num_layers * num_heads * num_kept, "not the same total"
    return torch.from_numpy(flags)


@torch.inference_mode()
def answer(model: Any, cache: Any, last: int, length: int, stops: set[int], kept: Any) -> list[int]:
    """Greedy; the cache has all but the prompt's last token, and is as before afterwards."""
    tokens: list[int] = []
    token = last
    while len(tokens) < ANSWER_TOKENS:
        output = model(
            input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True,
            position_ids=torch.tensor([[length - 1 + len(tokens)]]), kept=kept,
        )  # fmt: skip
        token = int(output.logits[0, -1].argmax())
        if token in stops:
            break
        tokens.append(token)
    cache.crop(length - 1)
    return tokens


@torch.inference_mode()
def prefill(model: Any, ids: list[int]) -> tuple[Any, Any]:
    """All KV but the last token's, and what the last rows give: ``[layers, heads, tokens]``."""
    cache, window = DynamicCache(), {}
    model(
        input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1, window=window
    )
    cache.crop(len(ids) - 1)
    return cache, torch.stack([window[layer] for layer in sorted(window)]).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.1])
    options = parser.parse_args()
    settings = Settings.from_environment(os.environ)
    assert settings.store is not None
    path = fetch(options.model, ModelStore(settings.store), progress=None).path
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="uneven"
    ).eval()
    stops = {tokenizer.eos_token_id, *tokenizer.encode("<|im_end|>", add_special_tokens=False)[:1]}
    prose = Prose.load(lambda text: len(tokenizer.encode(text)))
    found: dict[str, list[float]] = defaultdict(list)
    end_s = time.monotonic() + 60 * options.minutes
    asked = zip(*(islice(cases(task, prose, options.length), 200) for task in TASKS), strict=True)
    for case in (case for row in asked for case in row):
        if time.monotonic() > end_s:
            break
        text = tokenizer.apply_chat_template(case.messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        cache, mass = prefill(model, ids)

        def score(kept: Any, ids: list[int] = ids, cache: Any = cache, case: Any = case) -> float:
            return case.score(tokenizer.decode(answer(model, cache, ids[-1], len(ids), stops, kept)))

        if score(None) < 1:
            continue
        ours = smooth(mass, 15)
        ours = ours / ours.mean(axis=2, keepdims=True)
        for name, scores in (("ours", ours), ("snapkv", highest_of(mass, 7))):
            for share in options.shares:
                for spread in SPREADS:
                    kept = kept_of(scores, int(share * len(ids)), spread)
                    found[f"{name} {share:.0%} {spread}"].append(score(kept))
        shown = {name: f"{np.mean(values):.2f}" for name, values in found.items()}
        print(f"  {case.task} {case.index}, {len(next(iter(found.values())))} cases: {shown}", flush=True)
    headline = {name: round(float(np.mean(values)), 3) for name, values in found.items()}
    details = {
        name: {"interval": wilson(headline[name], len(values)), "cases": len(values)}
        for name, values in found.items()
    }
    finish("retention_uneven", headline, {"length": options.length, "by": details})


if __name__ == "__main__":
    main()
