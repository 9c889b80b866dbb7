"""What finding runs that came back costs: `RunIndex.find()` for 8k-token prompts over ten million tokens.

Physics. Every n-gram of the prompt is hashed (four passes over 8k numbers in the processor's cache: some tens
of microseconds) and looked up in a table too large for the caches: two buckets of one cache line each, 16k
lines from memory that do not depend on one another, so about as fast as memory gives them (some 20 ns each:
0.3 ms). What is proposed is compared at memory's speed. So about a millisecond in numpy, whatever is stored;
a prefill of the same prompt takes half a minute.

Stored: conversations of 8,000 tokens behind one of 50 system texts, and 2,000 documents of 500 tokens, each
behind a system text. Prompts:

- miss: nothing of it is stored;
- changed head: a stored conversation behind 40 other tokens;
- documents: six stored documents in an order of their own, behind a new head;
- many copies: a text of which there are 64 copies in other prompts, each behind another head;
- periodic: the prompt is one token again and again, and so are ten stored texts.

Also what storing an 8k-token prompt costs in a full index, where others have to give way. Memory is counted
by `tracemalloc`. The last line is one JSON object: the median over the prompts of each kind, in milliseconds.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc

import numpy as np

from common import finish, spread
from ostinato.reuse.match import RunIndex
from ostinato.types import TokenArray

NAMESPACE = "b3:bench"
PROMPT_TOKENS = 8_000
NUM_SYSTEMS, SYSTEM_TOKENS = 50, 1_000
DOCUMENT_TOKENS = 500
NUM_COPIES, NUM_PERIODIC = 64, 10


def draw(chance: np.random.Generator, num_tokens: int) -> TokenArray:
    return chance.integers(0, 49_152, num_tokens, dtype=np.int32)


def join(*parts: TokenArray) -> TokenArray:
    return np.concatenate(parts)


class Texts:
    """What is stored, and prompts made of it."""

    def __init__(self, index: RunIndex, num_tokens: int, chance: np.random.Generator) -> None:
        self.chance = chance
        systems = [draw(chance, SYSTEM_TOKENS) for _ in range(NUM_SYSTEMS)]
        self.documents = [draw(chance, DOCUMENT_TOKENS) for _ in range(num_tokens // 5_000)]
        self.copied = draw(chance, 4_000)
        self.conversations: list[TokenArray] = []
        for number, document in enumerate(self.documents):
            index.add(
                NAMESPACE,
                join(systems[number % NUM_SYSTEMS], document),
                [(SYSTEM_TOKENS, SYSTEM_TOKENS + 500)],
            )
        for _ in range(NUM_COPIES):
            index.add(NAMESPACE, join(draw(chance, int(chance.integers(20, 60))), self.copied))
        for token in range(NUM_PERIODIC):
            index.add(NAMESPACE, join(draw(chance, 30), np.full(PROMPT_TOKENS, token, np.int32)))
        while index.num_tokens + PROMPT_TOKENS < num_tokens:
            own = draw(chance, PROMPT_TOKENS - SYSTEM_TOKENS)
            conversation = join(systems[len(self.conversations) % NUM_SYSTEMS], own)
            index.add(NAMESPACE, conversation)
            self.conversations.append(conversation)

    def miss(self) -> tuple[TokenArray, int]:
        return draw(self.chance, PROMPT_TOKENS), 0

    def changed_head(self) -> tuple[TokenArray, int]:
        conversation = self.conversations[int(self.chance.integers(len(self.conversations)))]
        return join(draw(self.chance, 40), conversation[:-40]), PROMPT_TOKENS - 40

    def six_documents(self) -> tuple[TokenArray, int]:
        chosen = [self.documents[i] for i in self.chance.choice(len(self.documents), 6, replace=False)]
        rest = PROMPT_TOKENS - 6 * DOCUMENT_TOKENS
        return join(draw(self.chance, rest - 50), *chosen, draw(self.chance, 50)), 6 * DOCUMENT_TOKENS

    def many_copies(self) -> tuple[TokenArray, int]:
        return join(draw(self.chance, 4_000), self.copied), 4_000

    def periodic(self) -> tuple[TokenArray, int]:
        return np.full(PROMPT_TOKENS, int(self.chance.integers(NUM_PERIODIC)), np.int32), PROMPT_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=10_000_000, help="how many tokens are stored")
    parser.add_argument("--rounds", type=int, default=100, help="prompts of each kind")
    options = parser.parse_args()
    chance = np.random.default_rng(0)
    tracemalloc.start()
    index = RunIndex(options.tokens)
    texts = Texts(index, options.tokens, chance)
    texts.documents = [document.copy() for document in texts.documents]
    kept = sum(c.nbytes for c in texts.conversations) + sum(d.nbytes for d in texts.documents)
    num_bytes = tracemalloc.get_traced_memory()[0] - kept
    tracemalloc.stop()
    per_token = num_bytes / index.num_tokens
    print(f"{index.num_tokens:,} tokens in {index.num_pieces:,} pieces, {per_token:.2f} bytes a token")

    details: dict[str, dict[str, float]] = {}
    for kind in (texts.miss, texts.changed_head, texts.six_documents, texts.many_copies, texts.periodic):
        times_ms = []
        for _ in range(options.rounds + 3):
            prompt, num_shared = kind()
            started = time.perf_counter()
            found = index.find(NAMESPACE, prompt)
            times_ms.append((time.perf_counter() - started) * 1e3)
            num_found = sum(run.length for run in found)
            assert num_found >= num_shared, f"{kind.__name__}: {num_found} of {num_shared} tokens found"
        details[kind.__name__] = spread(times_ms[3:])
        print(f"{kind.__name__:>14}: {details[kind.__name__]} ms")
    times_ms = []
    for _ in range(options.rounds):
        prompt, _ = texts.miss()
        started = time.perf_counter()
        index.add(NAMESPACE, prompt)
        times_ms.append((time.perf_counter() - started) * 1e3)
    details["store"] = spread(times_ms)
    print(f"{'store':>14}: {details['store']} ms")
    headline = {f"{name}_ms": values["median"] for name, values in details.items()}
    shape = {"tokens": index.num_tokens, "bytes_per_token": round(per_token, 2)}
    finish("matching", shape | headline, details)


if __name__ == "__main__":
    main()
