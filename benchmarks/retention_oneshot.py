"""What a part of the KV keeps if all of a prompt is computed first; and what uneven budgets would gain.

How. Plain transformers computes a document with eight facts of one kind once; then each fact is asked for,
and every method chooses from all of the KV at the end, as published methods are usually compared. (Within a
budget Ostinato drops tokens while it computes, which is harder: ``retention.py``.) The answer is generated
with masks that hide from each head what it has dropped, all methods in one batch, so that a hundred cases
take minutes. The rows that ask (the question and what the template puts behind it) are the window, and always
stay, and so does system text. No memory is saved here, so the same total can be spread

- ``even``: every head of every layer keeps the same number, as in Ostinato;
- ``heads``: within a layer the highest scores of all its heads stay, each head has at least a fifth of an
  even share (AdaKV, Feng et al., arXiv 2407.11550);
- ``all``: likewise over the heads of all layers together.

Only cases that full KV answers count. Every case is a line of ``--records``, and a run goes on where the last
one ended. The last line is JSON: the share of answers that each keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from common import finish
from ostinato.config import DEFAULT_MODEL, Settings
from ostinato.engines.expected import NUM_LEFT_OUT, QueryStatistics
from ostinato.models.fetch import fetch
from ostinato.models.store import ModelStore
from ostinato.retention.choice import choose, highest_of, smooth
from ostinato.retention.protection import entity_spans
from ostinato.reuse.rope import Rotation
from retention_report import wilson
from retention_tasks import CITIES, SYSTEM, Prose

NUM_FACTS = 8
ANSWER_TOKENS = 16
FLOOR_SHARE = 0.2
RECORDS = Path(__file__).parents[1] / "build" / "retention_oneshot.jsonl"
EVEN = ("summary", "summary-plain", "snapkv", "expected", "h2o", "tova", "sinks")
UNEVEN = ("summary-plain", "snapkv")


class State:
    """KV and evidence of one document and the question behind it, layer by layer."""

    def __init__(self, rotations: list[Rotation]) -> None:
        self.mode = "document"
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.total: list[Any] = []  # what all rows gave to each token
        self.window: list[Any] = []  # and what those that ask did, row by row
        self.statistics = QueryStatistics(rotations)
        self.queries: list[Any] = []
        self.kept: Any = None  # flags [variants, layers, heads, tokens]
        self.new: list[Any] = []

    def ask(self) -> State:
        """For one question: the document's part is shared."""
        other = State([])
        other.mode, other.statistics = "question", self.statistics
        other.keys, other.values, other.total = list(self.keys), list(self.values), list(self.total)
        return other

    def attend(self, layer: int, query: Any, key: Any, value: Any, scale: float) -> Any:
        if self.mode == "answer":
            return self._answer(layer, query, key, value, scale)
        heads, group = key.shape[1], query.shape[1] // key.shape[1]
        if self.mode == "document":
            self.keys.append(key[0])
            self.values.append(value[0])
            self.queries.append(query[0])
        else:
            self.keys[layer] = torch.cat([self.keys[layer], key[0]], 1)
            self.values[layer] = torch.cat([self.values[layer], value[0]], 1)
        keys, values = self.keys[layer], self.values[layer]
        rows, length = query.shape[2], keys.shape[1]
        asked = query[0].unflatten(0, (heads, group))
        scores = asked @ keys.unsqueeze(1).transpose(-1, -2) * scale
        future = torch.ones(rows, length, dtype=torch.bool).tril(length - rows).logical_not()
        weights = scores.masked_fill_(future, -torch.inf).softmax(-1)
        given = weights.sum(1)
        if self.mode == "document":
            self.total.append(given.sum(1))
        else:
            self.window.append(given)
            self.total[layer] = torch.nn.functional.pad(self.total[layer], (0, rows)) + given.sum(1)
        return (weights @ values.unsqueeze(1)).flatten(0, 1).transpose(0, 1).unsqueeze(0)

    def _answer(self, layer: int, query: Any, key: Any, value: Any, scale: float) -> Any:
        """One row of every variant."""
        heads, group = key.shape[1], query.shape[1] // key.shape[1]
        if len(self.new) <= layer:
            self.new.append((key, value))
        else:
            self.new[layer] = tuple(
                torch.cat(pair, 2) for pair in zip(self.new[layer], (key, value), strict=True)
            )
        new_keys, new_values = self.new[layer]
        asked = query[:, :, 0].unflatten(1, (heads, group))
        past = torch.einsum("vhgd,hnd->vhgn", asked, self.keys[layer]) * scale
        past.masked_fill_(~self.kept[:, layer, :, None], -torch.inf)
        own = torch.einsum("vhgd,vhnd->vhgn", asked, new_keys) * scale
        weights = torch.cat([past, own], -1).softmax(-1)
        split = past.shape[-1]
        output = torch.einsum("vhgn,hnd->vhgd", weights[..., :split], self.values[layer])
        output += torch.einsum("vhgn,vhnd->vhgd", weights[..., split:], new_values)
        return output.flatten(1, 2).unsqueeze(1)


def _attend(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, state: Any = None, **rest: Any
) -> tuple[Any, None]:
    return state.attend(module.layer_idx, query, key, value, rest["scaling"]), None


AttentionInterface.register("one-shot", _attend)


# ---------------------------------------------------------------- what stays


def scores_of(state: State, scaling: float) -> dict[str, Any]:
    """Of each method ``[layers, heads, tokens]``."""
    window = torch.stack([given.sum(1) for given in state.window]).numpy()
    total = torch.stack(state.total).numpy()
    last = torch.stack([given[:, -1] for given in state.window]).numpy()
    places = np.broadcast_to(np.arange(total.shape[2], dtype=np.float32), total.shape)
    ours = smooth(window, 15)
    expected = [
        state.statistics.expect(layer, keys, values, keys.shape[1], scaling, NUM_LEFT_OUT).numpy()
        for layer, (keys, values) in enumerate(zip(state.keys, state.values, strict=True))
    ]
    return {
        "summary": ours / ours.mean(axis=2, keepdims=True),
        "summary-plain": ours / ours.mean(axis=2, keepdims=True),
        "snapkv": highest_of(window, 7),
        "expected": np.stack(expected),
        "h2o": total,
        "tova": np.broadcast_to(last.mean(axis=1, keepdims=True), last.shape),
        "sinks": places,
    }


def kept_of(scores: Any, protected: Any, num_kept: int, spread: str, preferred: Any) -> Any:
    """Flags ``[layers, heads, tokens]``; ``protected`` and ``preferred`` are flags over the tokens."""
    num_layers, num_heads, length = scores.shape
    always, first = (
        np.broadcast_to(flags, scores.shape) if flags is not None else None
        for flags in (protected, preferred)
    )
    flags = np.zeros(scores.shape, np.bool_)
    least = num_kept if spread == "even" else max(int(protected.sum()), int(FLOOR_SHARE * num_kept))
    np.put_along_axis(flags, choose(scores, always, least, first), True, axis=2)
    together = num_heads if spread == "heads" else num_layers * num_heads
    rows, values = flags.reshape(-1, length), scores.reshape(-1, length)
    for start in range(0, num_layers * num_heads, together):
        own = rows[start : start + together].ravel()
        value = values[start : start + together].ravel()
        open_places = np.flatnonzero(~own)
        best = open_places[np.argsort(value[open_places], kind="stable")]
        own[best[len(best) - (together * num_kept - int(own.sum())) :]] = True
        rows[start : start + together] = own.reshape(together, length)
    assert rows.sum() == num_layers * num_heads * num_kept, "not the same total"
    return torch.from_numpy(rows.reshape(scores.shape))


def variants(
    state: State, scaling: float, protected: Any, entities: Any, shares: list[float]
) -> tuple[list[str], Any]:
    """Names, and what each keeps; the first keeps everything."""
    scores = scores_of(state, scaling)
    shape, length = scores["sinks"].shape, scores["sinks"].shape[2]
    names, kept = ["full"], [torch.ones(shape, dtype=torch.bool)]
    for share in shares:
        num_kept = int(share * length)
        if num_kept <= protected.sum():
            continue
        for method in EVEN:
            always = protected.copy()
            if method == "h2o":  # the newest half of the budget
                always[-max(int(protected.sum()), num_kept // 2) :] = True
                always = always if always.sum() <= num_kept else protected
            preferred = entities if method == "summary" else None
            names.append(f"{method} {share:.0%} even")
            kept.append(kept_of(scores[method], always, num_kept, "even", preferred))
        for method in UNEVEN:
            for spread in ("heads", "all"):
                names.append(f"{method} {share:.0%} {spread}")
                kept.append(kept_of(scores[method], protected, num_kept, spread, None))
    return names, torch.stack(kept)


# ---------------------------------------------------------------- cases


@torch.inference_mode()
def generate(
    model: Any, state: State, kept: Any, token: int, length: int, stops: set[int]
) -> list[list[int]]:
    """Greedy answers of all variants behind a prompt whose last token is ``token``."""
    state.mode, state.kept, state.new = "answer", kept, []
    tokens = torch.full((len(kept), 1), token)
    answers: list[list[int]] = [[] for _ in range(len(kept))]
    is_open = [True] * len(kept)
    for place in range(ANSWER_TOKENS):
        positions = torch.full((len(kept), 1), length - 1 + place)
        output = model(input_ids=tokens, position_ids=positions, use_cache=False, state=state)
        tokens = output.logits[:, -1].argmax(-1, keepdim=True)
        for i, chosen in enumerate(tokens[:, 0].tolist()):
            is_open[i] = is_open[i] and chosen not in stops
            if is_open[i]:
                answers[i].append(chosen)
        if not any(is_open):
            break
    return answers


@torch.inference_mode()
def document(model: Any, tokenizer: Any, prose: Prose, length: int, index: int, options: Any) -> list[Any]:
    """The cases of one document: for each question, by variant, whether its answer has the number."""
    chance = random.Random(f"one shot {length} {index}")
    facts = list(
        zip(chance.sample(CITIES, NUM_FACTS), chance.sample(range(10_000, 99_999), NUM_FACTS), strict=True)
    )
    sentences = prose.take(chance, length)
    depths = [(place + chance.random()) / NUM_FACTS for place in range(NUM_FACTS)]
    for (city, number), depth in reversed(list(zip(facts, depths, strict=True))):
        sentences.insert(int(depth * len(sentences)), f"The secret number of {city} is {number}.")
    prompts = []
    for city, _ in facts:
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{' '.join(sentences)}\n\nWhat is the secret number of {city}?"},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append((text, tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)))
    ids = [found["input_ids"] for _, found in prompts]
    common = next(i for i, column in enumerate(zip(*ids, strict=False)) if len(set(column)) > 1)
    rotation = rotation_of(model.config)
    state = State([rotation] * model.config.num_hidden_layers)
    model(
        input_ids=torch.tensor([ids[0][:common]]), position_ids=torch.arange(common)[None], use_cache=False,
        logits_to_keep=1, state=state,
    )  # fmt: skip
    state.statistics.add(np.arange(common, dtype=np.int32), state.queries)
    scaling = model.config.head_dim**-0.5
    stops = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    rows = []
    for (text, found), (_, number) in zip(prompts, facts, strict=True):
        tokens, offsets = found["input_ids"], found["offset_mapping"]
        question = state.ask()
        model(
            input_ids=torch.tensor([tokens[common:-1]]), use_cache=False, logits_to_keep=1, state=question,
            position_ids=torch.arange(common, len(tokens) - 1)[None],
        )  # fmt: skip
        offsets = offsets[:-1]
        protected = np.array([end <= text.index(SYSTEM) + len(SYSTEM) for _, end in offsets])
        protected[common:] = True
        entities = np.zeros(len(offsets), np.bool_)
        starts = np.array([start for start, _ in offsets])
        for start, end in entity_spans(text):
            entities[max(0, np.searchsorted(starts, start, "right") - 1) : np.searchsorted(starts, end)] = (
                True
            )
        names, kept = variants(question, scaling, protected, entities, options.shares)
        answers = generate(model, question, kept, tokens[-1], len(tokens), stops)
        said = [str(number) in tokenizer.decode(answer) for answer in answers]
        rows.append({"document": index, "said": dict(zip(names, said, strict=True))})
    return rows


def rotation_of(config: Any) -> Rotation:
    """Of a model with plain rotary positions, in halves."""
    parameters, dim = config.rope_parameters, config.head_dim
    assert parameters["rope_type"] == "default", "frequencies of another kind"
    half = range(dim // 2)
    frequencies = tuple(float(parameters["rope_theta"]) ** (-2 * i / dim) for i in half)
    return Rotation(tuple(half), tuple(i + dim // 2 for i in half), frequencies)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--length", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.1])
    parser.add_argument("--records", type=Path, default=RECORDS)
    options = parser.parse_args()
    settings = Settings.from_environment(os.environ)
    assert settings.store is not None
    path = fetch(options.model, ModelStore(settings.store), progress=None).path
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="one-shot"
    ).eval()
    prose = Prose.load(lambda text: len(tokenizer.encode(text)))
    stamp = [options.model, options.length, options.shares]
    lines = (
        [json.loads(line) for line in options.records.read_text().splitlines()]
        if options.records.exists()
        else []
    )
    lines = [line for line in lines if line["stamp"] == stamp]
    index = 1 + max((line["document"] for line in lines), default=-1)
    end_s = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end_s:
        rows = document(model, tokenizer, prose, options.length, index, options)
        options.records.parent.mkdir(parents=True, exist_ok=True)
        with options.records.open("a") as file:
            file.writelines(json.dumps(row | {"stamp": stamp}) + "\n" for row in rows)
        lines += rows
        print(f"  document {index}: {sum(row['said']['full'] for row in rows)} of {len(rows)}", flush=True)
        index += 1
    found: dict[str, list[bool]] = defaultdict(list)
    for line in lines:
        if line["said"]["full"]:
            for name, said in line["said"].items():
                found[name].append(said)
    headline = {name: round(float(np.mean(said)), 3) for name, said in found.items() if name != "full"}
    details = {
        "length": options.length,
        "asked": len(lines),
        "answered_by_full": len(found["full"]),
        "kept": {
            name: {"share": share, "interval": wilson(share, len(found[name])), "cases": len(found[name])}
            for name, share in headline.items()
        },
    }
    finish("retention_oneshot", headline, details)


if __name__ == "__main__":
    main()
