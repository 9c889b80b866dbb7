"""How often the semantic cache serves what it should, and how often what it should not.

The physics. A cache of meanings has two errors: a question computed for nothing, which costs what it would
have cost without the cache, and a wrong answer with status 200, which costs trust. One number moves both. A
cosine threshold cannot part them: one word that changes everything moves a sentence's vector less than other
words for the same do. And a cache with many entries gives every trap many chances: the nearest of 20,000 is
nearer than one.

How. Thresholds were fixed beforehand, on the tuning files; this reads the test files (other topics, other
ways of asking; nothing was tuned on them) and, where the folder is there, public pairs: sentences and their
negation (traps), paraphrases. *Pairs*: both questions are put to the decision. *Retrieval*: a cache is filled
with the questions of the test file among 20,000 others; each paraphrase should get its own question's answer,
a trap none. *Conversations*: with the default key (everything before the last message equal), and with the
opt-in guard. Beside it stand plain cosine with the same vectors, and the rules of GPTCache (by default an L2
distance of at most 0.8 of 4, which is cosine 0.6) and RedisVL (distance 0.1, cosine 0.9) on the same vectors:
their default embedders come from a model hub. Intervals are Wilson's, 95 %.

The last line is JSON, as shares: ``served`` of the same-answer pairs, ``paraphrase_served`` of those in other
words, ``wrong`` of the traps, ``worst_category``, ``conversation_served`` and ``conversation_wrong`` with the
guard, ``conversation_wrong_default``, ``retrieval_served``, ``retrieval_wrong``; the peers beside.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from common import finish
from ostinato.models.embedder import DEFAULT_EMBEDDER, fetch_embedder
from ostinato.models.store import ModelStore
from ostinato.responses.embed.minilm import MiniLM
from ostinato.responses.likeness.conversation import judge_chats
from ostinato.responses.likeness.judge import Judge
from ostinato.responses.nearby import Nearby
from semantic_pairs import REWORDED, Pair, chats_of, pairs_of, read_blocks
from semantic_training import written_otherwise

BUDGET = 0.01
BUDGETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
COSINES = (0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97)
PEERS = {"gptcache": 0.6, "redisvl": 0.9}
NUM_ENTRIES = 20_000
NUM_CANDIDATES = 5
PUBLIC = Path(__file__).parents[2] / "shared/data/semantic"


def share(num: int, of: int) -> dict[str, Any]:
    """A share with Wilson's interval at 95 %."""
    if of == 0:
        return {"share": None, "of": 0}
    z, p = 1.96, num / of
    middle, spread = p + z * z / (2 * of), z * sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    low, high = ((middle + sign * spread) / (1 + z * z / of) for sign in (-1, 1))
    return {"share": round(p, 4), "low": round(low, 4), "high": round(high, 4), "of": of}


def outcome(pairs: Sequence[Pair], serves: Callable[[Pair], bool]) -> dict[str, Any]:
    """Shares of a method: served, served in other words, wrong, and wrong by category."""
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for pair in pairs:
        is_served = serves(pair)
        names = ["same", pair.kind] if pair.is_same else ["trap", f"trap {pair.kind}"]
        for name in names:
            counts[name][0] += is_served
            counts[name][1] += 1
    shares = {name: share(*counts[name]) for name in counts}
    return {
        "served": shares["same"],
        "paraphrase_served": shares.get(REWORDED),
        "wrong": shares["trap"],
        "by_category": {
            name[5:]: found for name, found in sorted(shares.items()) if name.startswith("trap ")
        },
    }


def own_pairs(name: str) -> list[Pair]:
    """The pairs of a file, and every question written otherwise (same answer, nearly the same words)."""
    blocks, chance = read_blocks(name), random.Random(1)
    surface = [
        Pair(block.question, written_otherwise(block.question, chance), True, "surface", group)
        for group, block in enumerate(blocks)
        for _ in range(2)
    ]
    return [*pairs_of(blocks), *(pair for pair in surface if pair.one != pair.other)]


def public_pairs() -> list[Pair]:
    """Paraphrases and negations that others wrote; empty where the folder is absent."""
    if not PUBLIC.is_dir():
        return []
    found = []
    for item in orjson.loads((PUBLIC / "gptcache_mock_data.json").read_bytes()):
        found.append(Pair(item["origin"], item["similar"], True, REWORDED, 0))
    for name in ("glue_diagnostic", "nan_nli", "sentiment_labelled_sentences", "wikifactcheck_english_1"):
        for line in (PUBLIC / f"{name}.tsv").read_text("utf-8").splitlines()[1:]:
            one, _, other = line.partition("\t")
            if other and one != other:
                found.append(Pair(one, other.strip(), False, "negation", 0))
    chance = random.Random(2)
    traps = [pair for pair in found if not pair.is_same]
    return [pair for pair in found if pair.is_same] + chance.sample(traps, min(1000, len(traps)))


def fillers(num: int) -> list[str]:
    """Questions about other things, of many kinds and close to one another: what a full cache looks like."""
    verbs = [
        "update",
        "delete",
        "create",
        "rename",
        "share",
        "print",
        "archive",
        "move",
        "copy",
        "test",
        "install",
        "repair",
        "paint",
        "clean",
        "sell",
        "rent",
    ]
    things = [
        "invoice",
        "calendar",
        "report",
        "playlist",
        "garden",
        "fence",
        "budget",
        "logo",
        "kitchen",
        "shelf",
        "blog",
        "poster",
        "roof",
        "newsletter",
        "survey",
        "tent",
        "canoe",
        "quilt",
        "drone",
        "guitar",
        "saddle",
        "lamp",
        "aquarium",
        "backpack",
        "mattress",
        "keyboard",
        "router",
        "ticket",
        "parcel",
    ]
    wheres = [
        "in Oslo",
        "in Lima",
        "at work",
        "for a school",
        "in the basement",
        "on a Sunday",
        "for free",
        "with a friend",
        "by myself",
        "in winter",
        "for a customer",
        "on a boat",
        "in a hurry",
        "without tools",
        "for a party",
        "in the dark",
        "for my aunt",
        "at night",
        "from abroad",
    ]
    forms = (
        "How do I {v} a {t} {w}?", "Can I {v} the {t} {w}?", "What does it cost to {v} a {t} {w}?",
        "Who may {v} a {t} {w}?", "When should I {v} my {t} {w}?", "Why can nobody {v} the {t} {w}?",
        "How long does it take to {v} a {t} {w}?",
    )  # fmt: skip
    every = [f.format(v=v, t=t, w=w) for f in forms for v in verbs for t in things for w in wheres]
    return random.Random(3).sample(every, num)


def retrieval(
    reader: MiniLM, judge: Judge, pairs: Sequence[Pair], num_entries: int
) -> dict[str, dict[str, Any]]:
    """The same pairs put to a full cache: ``other`` asks, ``one`` is in there among others."""
    questions = list(dict.fromkeys(pair.one for pair in pairs))
    texts = [*questions, *fillers(num_entries - len(questions))]
    index = Nearby()
    vectors = reader.embed(texts)
    index.add(range(1, len(texts) + 1), [at.to_bytes(32, "big") for at in range(len(texts))], vectors)
    asked = reader.embed([pair.other for pair in pairs])
    near = [index.search(vector, NUM_CANDIDATES) for vector in asked]

    def by_judge(at: int, pair: Pair) -> str | None:
        best: tuple[float, str] | None = None
        for seq, _, similarity in near[at]:
            if similarity >= 0.5:
                found = judge.judge(pair.other, texts[seq - 1])
                if found.is_same and (best is None or found.margin > best[0]):
                    best = found.margin, texts[seq - 1]
        return None if best is None else best[1]

    def by_cosine(threshold: float) -> Callable[[int, Pair], str | None]:
        def ask(at: int, pair: Pair) -> str | None:
            seq, _, similarity = near[at][0]
            return texts[seq - 1] if similarity >= threshold else None

        return ask

    methods = {"ours": by_judge} | {f"cosine {t}": by_cosine(t) for t in sorted(set(PEERS.values()))}
    results = {}
    for name, ask in methods.items():
        right, wrong_same, wrong = 0, 0, 0
        for at, pair in enumerate(pairs):
            matched = ask(at, pair)
            if pair.is_same:
                right += matched == pair.one
                wrong_same += matched is not None and matched != pair.one
            else:
                wrong += matched is not None
        num_same = sum(pair.is_same for pair in pairs)
        results[name] = {
            "served": share(right, num_same),
            "wrong_of_paraphrases": share(wrong_same, num_same),
            "wrong": share(wrong, len(pairs) - num_same),
        }
    return results


def conversations(judge: Judge, name: str) -> dict[str, dict[str, Any]]:
    """With the default key, and with the guard that judges every turn."""
    chats = list(chats_of(read_blocks(name)))
    results = {}
    for mode in ("default", "guarded"):
        counts = [[0, 0], [0, 0]]
        for chat in chats:
            is_served = mode == "guarded" or chat.one[:-1] == chat.other[:-1]
            is_served = is_served and judge_chats(judge, chat.other, chat.one).is_same
            counts[chat.is_same][0] += is_served
            counts[chat.is_same][1] += 1
        results[mode] = {"served": share(*counts[1]), "wrong": share(*counts[0])}
    last_only = [judge.judge(chat.other[-1], chat.one[-1]).is_same for chat in chats]
    same = np.array([chat.is_same for chat in chats])
    served = np.array(last_only)
    results["last message only"] = {
        "served": share(int(served[same].sum()), int(same.sum())),
        "wrong": share(int(served[~same].sum()), int((~same).sum())),
    }
    return results


def tell(name: str, found: dict[str, Any]) -> None:
    def percent(item: dict[str, Any] | None) -> str:
        if not item or item["share"] is None:
            return "none"
        return f"{item['share']:.1%} [{item['low']:.1%}, {item['high']:.1%}]"

    told = "  ".join(f"{key} {percent(found[key])}" for key in found if key != "by_category")
    print(f"{name:28} {told}", flush=True)


def worst(found: dict[str, Any]) -> float:
    """The highest share of wrong answers in a category with at least 20 traps."""
    shares = [item["share"] for item in found["by_category"].values() if item["of"] >= 20]
    return float(max(shares, default=found["wrong"]["share"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--embedder", default=DEFAULT_EMBEDDER)
    parser.add_argument("--store", type=Path, default=Path("~/.cache/ostinato/models").expanduser())
    parser.add_argument("--entries", type=int, default=NUM_ENTRIES)
    parser.add_argument("--questions", default="test_questions.txt")
    parser.add_argument("--conversations", default="test_conversations.txt")
    parser.add_argument("--show", action="store_true", help="print the traps that were served")
    chosen = parser.parse_args()
    model = fetch_embedder(chosen.embedder, ModelStore(chosen.store))
    reader = MiniLM(model.path, model.weights_digest)
    pairs = own_pairs(chosen.questions)
    judges = {budget: Judge(reader, budget=budget) for budget in BUDGETS}
    curve = {}
    for budget, judge in judges.items():
        curve[f"budget {budget}"] = outcome(
            pairs, lambda pair, j=judge: j.judge(pair.other, pair.one).is_same
        )
        tell(f"ours, budget {budget:.2%}", curve[f"budget {budget}"])
    vectors = vectors_of(reader, pairs)
    for cosine in COSINES:
        found = outcome(pairs, lambda p, c=cosine: bool(vectors[p.one] @ vectors[p.other] >= c))
        curve[f"cosine {cosine}"] = found
        tell(f"cosine {cosine}", found)
    ours, judge = curve[f"budget {BUDGET}"], judges[BUDGET]
    for kind, item in ours["by_category"].items():
        print(f"    wrong in {kind:10} {item['share']:.1%} of {item['of']}")
    if chosen.show:
        for pair in pairs:
            found = judge.judge(pair.other, pair.one)
            if found.is_same != pair.is_same and pair.kind != "surface":
                print(f"  {pair.kind}: {pair.one} | {pair.other} | {found.score:.2f} {found.refused_by}")
    full = retrieval(reader, judge, pairs, chosen.entries)
    for name, found in full.items():
        tell(f"among {chosen.entries:,}, {name}", found)
    chats = conversations(judge, chosen.conversations)
    for name, found in chats.items():
        tell(f"conversations, {name}", found)
    public: dict[str, Any] = {}
    if others := public_pairs():
        public["ours"] = outcome(others, lambda pair: judge.judge(pair.other, pair.one).is_same)
        tell("public pairs, ours", public["ours"])
        vectors = vectors_of(reader, others)
        for name, cosine in PEERS.items():
            public[name] = outcome(others, lambda p, c=cosine: bool(vectors[p.one] @ vectors[p.other] >= c))
            tell(f"public pairs, {name}'s rule", public[name])
    else:
        print("public pairs: left out, the folder with them is not here")
    headline = {
        "served": ours["served"]["share"],
        "paraphrase_served": ours["paraphrase_served"]["share"],
        "wrong": ours["wrong"]["share"],
        "worst_category": worst(ours),
        "retrieval_served": full["ours"]["served"]["share"],
        "retrieval_wrong": full["ours"]["wrong"]["share"],
        "conversation_served": chats["guarded"]["served"]["share"],
        "conversation_wrong": chats["guarded"]["wrong"]["share"],
        "conversation_wrong_default": chats["default"]["wrong"]["share"],
        "peers": {
            name: {
                "served": curve[f"cosine {cosine}"]["served"]["share"],
                "wrong": curve[f"cosine {cosine}"]["wrong"]["share"],
            }
            for name, cosine in PEERS.items()
        },
        "pairs": len(pairs),
        "entries": chosen.entries,
    }
    details = {"curve": curve, "retrieval": full, "conversations": chats, "public": public}
    finish("semantic", headline, details)


def vectors_of(reader: MiniLM, pairs: Sequence[Pair]) -> dict[str, np.ndarray]:
    """The vector of every text in the pairs."""
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.one, pair.other)))
    return dict(zip(texts, reader.embed(texts), strict=True))


if __name__ == "__main__":
    main()
