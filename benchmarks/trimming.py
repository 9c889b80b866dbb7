"""What trimming to a budget costs the cache: a 60-turn conversation, with each strategy.

Physics. Over budget, a prompt has to lose something, and all tokens behind the first one lost are computed
anew. A strategy that drops one turn per prompt loses the whole history every time; one that drops half the
history at once loses it once, and then has room for many turns.

The conversation: a system text, and 60 turns of question, tool call, result and answer; so 120 prompts. The
cache is the real one (the books of it, without tensors), large enough for everything: what is missed is
missed because of trimming. `hit_rate` is hit tokens by looked-up tokens. The last line is JSON.
"""

from __future__ import annotations

import os
import secrets

import numpy as np

from common import finish
from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.ports import SystemClock
from ostinato.prompt.template import named_template
from ostinato.prompt.tokens import HFTokenizer
from ostinato.prompt.trimming import Trimmer
from ostinato.types import Conversation, Message, ToolCall, TrimRules

BUDGET_TOKENS = 4_096
NUM_TURNS = 60
TEXT = (
    "the museum keeps a serpent of walnut and leather with six holes and a brass crook that nobody has "
    "played since the town band gave it away in a cold winter when coal was dear and the band was small"
)


def prompts() -> list[Conversation]:
    """Every prompt of the conversation, in order; the same at every run."""
    chance = np.random.default_rng(60)
    vocabulary = TEXT.split()

    def words(low: int, high: int) -> str:
        return " ".join(chance.choice(vocabulary, chance.integers(low, high)))

    messages = [Message("system", words(300, 301))]
    given = []
    for turn in range(NUM_TURNS):
        messages.append(Message("user", words(15, 60)))
        given.append(Conversation(tuple(messages)))
        call = ToolCall(f"call{turn:05}", "search", '{"query": "serpent"}')
        messages.append(Message("assistant", "", tool_calls=(call,)))
        messages.append(Message("tool", words(50, 500), tool_call_id=call.id))
        given.append(Conversation(tuple(messages)))
        messages.append(Message("assistant", words(30, 120)))
    return given


def replay(tokenizer: HFTokenizer, rules: TrimRules | None) -> dict[str, float]:
    """All prompts through one cache; ``None`` does not trim."""
    template = named_template("qwen2.5")
    trimmer = Trimmer(template, tokenizer, rules or TrimRules(10**9))
    manager = KVManager(200_000, 16)
    namespace = Namespace("weights", tokenizer.identity, template.identity, "layout", "float32", "rotary")
    clock = SystemClock()
    hit = looked_up = longest = 0
    first_lost, trim_s = 0, list[float]()
    since = None
    for prompt in prompts():
        start_s = clock.monotonic()
        since = trimmer.trim(prompt, since=since)
        trim_s.append(clock.monotonic() - start_s)
        tokens = tokenizer.encode_rendered(template.render(since.conversation))
        with manager.acquire(namespace, tokens) as lease:
            assert lease.reserve(len(tokens)), "the cache is too small for this benchmark"
            lease.take_copies()
            lease.commit(tokens)
            hit += lease.prefix_len
        looked_up += len(tokens)
        longest = max(longest, len(tokens))
        first_lost += bool(since.dropped)
    return {
        "hit_rate": round(hit / looked_up, 4),
        "computed_tokens": looked_up - hit,
        "prompt_tokens": looked_up,
        "longest_prompt": longest,
        "prompts_with_loss": first_lost,
        "trim_ms_median": round(float(np.median(trim_s)) * 1e3, 2),
        "trim_ms_max": round(max(trim_s) * 1e3, 2),
    }


def main() -> None:
    from ostinato.config import Settings
    from ostinato.models.fetch import fetch
    from ostinato.models.store import ModelStore

    settings = Settings.from_environment(os.environ)
    assert settings.store is not None
    local = fetch(settings.model, ModelStore(settings.store), progress=None)
    tokenizer = HFTokenizer.from_folder(local.path, nonce=str(secrets.randbelow(9 * 10**19) + 10**19))
    strategies: dict[str, TrimRules | None] = {
        "no budget": None,
        "drop": TrimRules(BUDGET_TOKENS, "drop"),
        "shorten 1": TrimRules(BUDGET_TOKENS, "shorten", low_water=1.0),
        "shorten 0.5": TrimRules(BUDGET_TOKENS, "shorten", low_water=0.5),
        "sticky 0.75": TrimRules(BUDGET_TOKENS, "sticky", low_water=0.75),
        "sticky 0.5": TrimRules(BUDGET_TOKENS, "sticky", low_water=0.5),
        "sticky 0.25": TrimRules(BUDGET_TOKENS, "sticky", low_water=0.25),
    }
    details = {}
    for name, rules in strategies.items():
        details[name] = replay(tokenizer, rules)
        print(f"{name:>12}: {details[name]}", flush=True)
    headline = {name.replace(" ", "_"): result["hit_rate"] for name, result in details.items()}
    finish("trimming", headline, details)


if __name__ == "__main__":
    main()
