"""Blocks whose right content anybody can tell from their key."""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from ostinato.kv.hashing import BlockKey, Namespace, block_keys
from ostinato.kv.terms import Origin

NAMESPACE = Namespace("weights", "tokenizer", "template", "layout", "float32", "rotary")
BLOCK = 4


def chain(seed: int, num_blocks: int, namespace: Namespace = NAMESPACE) -> list[BlockKey]:
    tokens = np.random.default_rng(seed).integers(0, 50_000, num_blocks * BLOCK, dtype=np.int32)
    return block_keys(namespace, tokens, BLOCK, origin=Origin(namespace.tenant))


def payload(key: BlockKey, size: int) -> bytes:
    return blake3(key.hash).digest(length=size)


def pieces(data: bytes) -> list[memoryview]:
    """As two parts of unequal length: payloads come in parts."""
    cut = len(data) // 3
    return [memoryview(data)[:cut], memoryview(data)[cut:]]
