"""Drives an engine by tokens, and knows what transformers itself would answer."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ostinato.engines.batching import Batcher, BatchingSettings
from ostinato.engines.blending import Blender
from ostinato.engines.rotations import observe_movement
from ostinato.engines.runners import LoadedModel, PagedRunner, StatefulRunner
from ostinato.engines.sequence import Sequence, SequenceStats
from ostinato.events import Observer
from ostinato.kv.approximate import ApproximateSlots
from ostinato.kv.archive import Archives
from ostinato.kv.codecs.layered import make_codec
from ostinato.kv.hashing import Namespace
from ostinato.kv.manager import KVManager
from ostinato.kv.tiers.shared import SharedTier
from ostinato.kv.transfer import TierLink
from ostinato.ports import SystemClock
from ostinato.retention.keeping import Keeping
from ostinato.reuse.blend import Repair
from ostinato.types import FinishReason, SamplingParams, TokenLogprob

GREEDY = SamplingParams(temperature=0.0)
NAMESPACE = Namespace(weights="w", tokenizer="t", template="", kv_layout="l", kv_dtype="f32", rotary="r")


@dataclass
class Collected:
    """A sink that keeps everything; ``stop_after`` cancels from inside by returning true."""

    stop_after: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_token: int | None = None
    stats: SequenceStats | None = None
    error: Exception | None = None
    num_finishes: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    first: threading.Event = field(default_factory=threading.Event)

    def on_token(self, token_id: int, logprob: TokenLogprob | None) -> bool:
        assert self.num_finishes == 0, "a token after the end"
        self.tokens.append(token_id)
        self.logprobs.append(logprob)
        self.first.set()
        return self.stop_after is not None and len(self.tokens) >= self.stop_after

    def on_finish(
        self, reason: FinishReason, stop_token: int | None, stats: SequenceStats, error: Exception | None
    ) -> FinishReason:
        self.num_finishes += 1
        self.reason, self.stop_token, self.stats, self.error = reason, stop_token, stats, error
        self.done.set()
        return reason

    def wait(self) -> list[int]:
        assert self.done.wait(120), "the engine did not finish"
        assert self.num_finishes == 1
        if self.error is not None:
            raise self.error
        return self.tokens


class Harness:
    """An engine on a loaded model, with its books in reach."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        max_batch_tokens: int = 64,
        max_waiting: int = 1000,
        folder: Path | None = None,
        slots: int = 1000,
        buffers: int = 1000,
        tier_type: type[SharedTier] = SharedTier,
        codec: str = "exact",
        observer: Observer | None = None,
        max_sequences: int = 8,
        itl_target_s: float | None = 60.0,
        recall_bytes: int = 0,
        recall_every: int | None = None,
        moving: bool = False,
    ) -> None:
        """``moving``: sequences may be answered with moved KV. ``folder``: of a lower tier with ``slots``
        blocks; ``buffers`` of them may be on their way.

        Its slots are of one size whatever ``codec`` is, so that engines with different ones can share it.
        """
        self.manager = KVManager(num_blocks, block_size)
        if moving:
            loaded.movement = observe_movement(loaded)
        self.loaded = loaded
        self.runner = (
            PagedRunner(loaded, num_blocks * block_size)
            if loaded.reuse_reason is None
            else StatefulRunner(loaded)
        )
        self.archives: Archives | None = None
        if recall_bytes:
            assert isinstance(self.runner, PagedRunner)
            self.archives = Archives(self.runner.arena, recall_bytes)
            archives = self.archives
            self.manager.on_purge.append(lambda selection: archives.clear())
        self.link: TierLink | None = None
        if folder is not None:
            assert isinstance(self.runner, PagedRunner)
            arena = self.runner.arena
            stored = make_codec(arena, block_size, codec)
            size = make_codec(arena, block_size, "exact").payload_bytes
            tier = tier_type.open(folder, slot_bytes=size, capacity_bytes=size * slots)
            self.link = TierLink(
                tier,
                stored,
                block_size,
                SystemClock(),
                max_buffered_bytes=size * buffers,
                approximate=None if stored.is_exact else ApproximateSlots(arena.num_slots),
            )
        self.blender: Blender | None = None
        if moving:
            self.blender = Blender(self.manager, self.runner, self.link, 100_000)
            blender = self.blender
            self.manager.on_purge.append(lambda selection: blender.clear())
        self.batcher = Batcher(
            self.runner,
            self.manager,
            SystemClock(),
            BatchingSettings(
                max_batch_tokens=max_batch_tokens,
                max_sequences=max_sequences,
                max_waiting=max_waiting,
                growth_tokens=8,
                itl_target_s=itl_target_s,
                recall_every=recall_every,
            ),
            observer=observer,
            tier_link=self.link,
            archives=self.archives,
            blender=self.blender,
        )

    def submit(
        self,
        prompt: list[int],
        max_new: int,
        *,
        params: SamplingParams = GREEDY,
        namespace: Namespace = NAMESPACE,
        stop_after: int | None = None,
        stop_tokens: frozenset[int] = frozenset(),
        deadline_s: float = math.inf,
        keeping: Keeping | None = None,
        repair: Repair | None = None,
        wants_distribution: bool = False,
    ) -> tuple[Sequence, Collected]:
        sink = Collected(stop_after)
        sequence = Sequence(
            np.array(prompt, dtype=np.int32),
            params,
            namespace,
            sink,
            max_new_tokens=max_new,
            stop_token_ids=stop_tokens,
            deadline_s=deadline_s,
            keeping=keeping,
            repair=repair,
            wants_distribution=wants_distribution,
        )
        self.batcher.submit([sequence])
        return sequence, sink

    def generate(self, prompt: list[int], max_new: int, **options: Any) -> Collected:
        _, sink = self.submit(prompt, max_new, **options)
        sink.wait()
        return sink

    def close(self) -> None:
        self.batcher.close()
        self.manager.check_integrity()
        assert self.manager.num_held_blocks == 0, "blocks are still held after the engine has stopped"


@contextmanager
def harness(loaded: LoadedModel, **options: Any) -> Iterator[Harness]:
    engine = Harness(loaded, **options)
    try:
        yield engine
    finally:
        engine.close()


@torch.inference_mode()
def reference(model: Any, prompt: list[int], max_new: int, *, use_cache: bool = False) -> list[int]:
    """What transformers' ``generate`` answers, greedily and (by default) without any cache."""
    tokens = torch.tensor([prompt])
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=max_new,
        do_sample=False,
        use_cache=use_cache,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@dataclass
class Flips:
    """Near ties met so far: places where two logits are closer than 1e-5 and the answers part."""

    count: int = 0

    def check(self, model: Any, prompt: list[int], expected: list[int], got: list[int]) -> None:
        """Fail unless ``got`` is ``expected``, or parts from it at a near tie, which is counted."""
        if got == expected:
            return
        place = next(
            (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
            min(len(expected), len(got)),
        )
        assert place < min(len(expected), len(got)), f"lengths differ: {expected} and {got}"
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + expected[:place]]), use_cache=False).logits[0, -1]
        gap = float((logits[expected[place]] - logits[got[place]]).abs())
        assert gap < 1e-5, (
            f"token {place} is {got[place]}, not {expected[place]} (logits differ by {gap:.3g})"
        )
        self.count += 1
