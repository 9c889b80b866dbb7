"""Trains the learned decision of the semantic cache, and says what it does on questions it has not seen.

The physics. Vectors alone cannot tell "enable" from "disable": one word of nine moves a sentence's vector by
a few percent, and a paraphrase moves it by more. So the decision looks at what differs: whether a left-over
word has a synonym on the other side, how rare it is, how near the left-over phrases are, what the guards say.

How. Pairs come from the blocks of ``semantic_data/tuning_questions.txt``, each with its own, and those with
one another; besides, for every question: the nearest ones of other blocks, itself with one content word
exchanged (traps of their own making), itself written otherwise (capitals, politeness, a slip of the fingers).
LightGBM grows trees that are monotone where it can be said which way a feature may push. Thresholds are
quantiles of the scores that written traps get from trees that did not see their block (five folds by block).
For a budget of 1 % the threshold is that at which 1 % of the traps would be served.

    pip install lightgbm
    python benchmarks/semantic_training.py --embedder FOLDER   # writes responses/likeness/decision.json
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from ostinato.models.embedder import DEFAULT_EMBEDDER, fetch_embedder
from ostinato.models.store import ModelStore
from ostinato.responses.embed.minilm import MiniLM
from ostinato.responses.likeness.compare import compare, see
from ostinato.responses.likeness.features import MONOTONE, NAMES, features_of
from ostinato.responses.likeness.guards import judge_all
from ostinato.responses.likeness.words import parse
from semantic_pairs import Block, Pair, pairs_of, read_blocks

TARGET = Path(__file__).parents[1] / "src/ostinato/responses/likeness/decision.json"
FOLDS = 5
BUDGETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
POLITE = ("Please tell me: ", "Hi, ", "Quick question: ", "Could you tell me, ", "hey ", "I'd like to know: ")


def written_otherwise(text: str, chance: random.Random) -> str:
    """The same question as other hands would type it."""
    kind = chance.randrange(5)
    if kind == 0:
        return text.lower().rstrip("?.")
    if kind == 1:
        return chance.choice(POLITE) + text
    if kind == 2:
        return text.rstrip("?.") + (" please?" if text.endswith("?") else ", please.")
    if kind == 3:
        return text.replace("What is", "What's").replace("do not", "don't").replace("?", "??")
    words = text.split()
    long = [at for at, word in enumerate(words) if len(word) > 5 and word.isalpha() and word.islower()]
    if long:
        at = chance.choice(long)
        cut = chance.randrange(2, len(words[at]) - 1)
        words[at] = words[at][: cut - 1] + words[at][cut] + words[at][cut - 1] + words[at][cut + 1 :]
    return " ".join(words)


def with_another_word(text: str, words: list[str], chance: random.Random) -> str | None:
    """The question with one content word exchanged for one that stands elsewhere in the data."""
    content = [word for word in parse(text).content if word.text.isalpha() and len(word.text) > 2]
    if not content:
        return None
    old = chance.choice(content)
    return text[: old.start] + chance.choice(words) + text[old.end :]


def more_pairs(blocks: list[Block], vectors: np.ndarray, chance: random.Random) -> list[Pair]:
    """Pairs that are made, not written."""
    words = [w.text for block in blocks for w in parse(block.question).content if w.text.isalpha()]
    similarity = vectors @ vectors.T
    found = []
    for group, block in enumerate(blocks):
        texts = [block.question, *block.same]
        for _ in range(3):
            text = chance.choice(texts)
            found.append(Pair(text, written_otherwise(text, chance), True, "surface", group))
        for text in chance.sample(texts, min(3, len(texts))):
            if (other := with_another_word(text, words, chance)) is not None and other != text:
                found.append(Pair(text, other, False, "made", group))
        near = [at for at in np.argsort(-similarity[group]) if at != group][:3]
        found += [Pair(block.question, blocks[at].question, False, "near", group) for at in near]
    return found


def table(pairs: list[Pair], reader: MiniLM) -> tuple[np.ndarray, np.ndarray]:
    """Features of all pairs, and whether a guard refuses."""
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.one, pair.other)))
    seen = {text: see(parse(text), vectors) for text, vectors in zip(texts, reader.read(texts), strict=True)}
    rows, refused = [], []
    for pair in pairs:
        comparison = compare(seen[pair.one], seen[pair.other])
        verdicts = judge_all(comparison)
        rows.append(features_of(comparison, verdicts))
        refused.append(any(verdict.opinion == "refuses" for verdict in verdicts))
    return np.stack(rows), np.array(refused)


def train(rows: np.ndarray, labels: np.ndarray, weights: np.ndarray, num_trees: int) -> Any:
    import lightgbm

    options = {
        "objective": "binary", "num_leaves": 15, "learning_rate": 0.05, "min_data_in_leaf": 12,
        "feature_fraction": 0.5, "bagging_fraction": 0.7, "bagging_freq": 1, "lambda_l2": 5.0,
        "monotone_constraints": list(MONOTONE), "monotone_constraints_method": "basic",
        "verbosity": -1, "seed": 7, "deterministic": True, "num_threads": 1, "force_col_wise": True,
    }  # fmt: skip
    data = lightgbm.Dataset(rows, labels, weight=weights, feature_name=list(NAMES))
    return lightgbm.train(options, data, num_boost_round=num_trees)


def trees_of(model: Any) -> list[dict[str, list[float]]]:
    """LightGBM's trees as arrays; a leaf is its own child."""
    found = []
    for item in model.dump_model()["tree_info"]:
        tree: dict[str, list[float]] = {
            name: [] for name in ("feature", "threshold", "left", "right", "value")
        }
        _add(tree, item["tree_structure"])
        found.append(tree)
    return found


def _add(tree: dict[str, list[float]], node: dict[str, Any]) -> int:
    at = len(tree["feature"])
    for name in tree:
        tree[name].append(0)
    if "leaf_value" in node and "left_child" not in node:
        tree["left"][at] = tree["right"][at] = at
        tree["value"][at] = round(node["leaf_value"], 5)
        return at
    assert node["decision_type"] == "<=", "a split that is not by size"
    tree["feature"][at] = node["split_feature"]
    tree["threshold"][at] = float(f"{node['threshold']:.6g}")
    tree["left"][at] = _add(tree, node["left_child"])
    tree["right"][at] = _add(tree, node["right_child"])
    return at


def depth_of(tree: dict[str, list[float]], at: int = 0) -> int:
    children = {int(tree["left"][at]), int(tree["right"][at])} - {at}
    return 1 + max((depth_of(tree, child) for child in children), default=-1)


def thresholds(scores: np.ndarray, refused: np.ndarray, is_trap: np.ndarray) -> list[float]:
    """For each budget the score at which that share of the traps is served, refusals counted in."""
    passing = np.where(refused, -np.inf, scores)[is_trap]
    found = []
    for budget in BUDGETS:
        allowed = int(np.floor(budget * len(passing)))
        found.append(round(float(np.sort(passing)[::-1][allowed]) + 1e-6, 5))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--embedder", default=DEFAULT_EMBEDDER)
    parser.add_argument("--store", type=Path, default=Path("~/.cache/ostinato/models").expanduser())
    parser.add_argument("--trees", type=int, default=300)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    chosen = parser.parse_args()
    model = fetch_embedder(chosen.embedder, ModelStore(chosen.store))
    reader = MiniLM(model.path, model.weights_digest)
    blocks = read_blocks("tuning_questions.txt")
    chance = random.Random(20261201)
    vectors = reader.embed([block.question for block in blocks])
    direct = {(pair.one, pair.other) for pair in pairs_of(blocks)}
    pairs = [*pairs_of(blocks, crossed=True), *more_pairs(blocks, vectors, chance)]
    rows, refused = table(pairs, reader)
    labels = np.array([pair.is_same for pair in pairs])
    groups = np.array([pair.group for pair in pairs])
    written = np.array([(pair.one, pair.other) in direct for pair in pairs])
    weights = np.where(written, 1.5, 1.0)
    folds = np.random.default_rng(7).permutation(len(blocks)) % FOLDS
    scores = np.zeros(len(pairs))
    for fold in range(FOLDS):
        inside = folds[groups] == fold
        trained = train(rows[~inside], labels[~inside], weights[~inside], chosen.trees)
        scores[inside] = trained.predict(rows[inside], raw_score=True)
    kinds = np.array([pair.kind for pair in pairs])
    is_trap = ~labels & written
    found = thresholds(scores, refused, is_trap)
    served = ~refused & (scores[None, :] >= np.array(found)[:, None])
    for budget, threshold, row in zip(BUDGETS, found, served, strict=True):
        same, direct_same = row[labels & (kinds == "reworded")], row[labels & written]
        wrong = Counter(kinds[written & ~labels & row].tolist())
        print(
            f"budget {budget:6.2%}: score >= {threshold:6.2f} serves {same.mean():.1%}"
            f" (written {direct_same.mean():.1%})"
            f" surface {row[kinds == 'surface'].mean():.1%}, wrong {row[is_trap].mean():.2%} {dict(wrong)}"
        )
    if chosen.dry:
        return
    final = train(rows, labels, weights, chosen.trees)
    trees = trees_of(final)
    item = {
        "format": 1,
        "version": f"trees-1 {len(pairs)} pairs",
        "features": list(NAMES),
        "budgets": list(BUDGETS),
        "thresholds": found,
        "depth": max(map(depth_of, trees)),
        "trees": trees,
    }
    TARGET.write_bytes(orjson.dumps(item) + b"\n")
    print(f"{TARGET.name}: {TARGET.stat().st_size:,} bytes, {len(trees)} trees of depth {item['depth']}")
    gains = sorted(zip(final.feature_importance("gain"), NAMES, strict=True), reverse=True)[:12]
    print("most telling:", ", ".join(f"{name} {gain:.0f}" for gain, name in gains), file=sys.stderr)


if __name__ == "__main__":
    main()
