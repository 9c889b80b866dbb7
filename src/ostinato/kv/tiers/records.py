"""What the shared tier's index says of a block, as bytes that know when they are damaged."""

from __future__ import annotations

import struct
from typing import NamedTuple

from xxhash import xxh3_64_digest

from ..hashing import BlockKey
from ..terms import ID_BYTES

WRITING, READY = 1, 2
CHECKSUM_BYTES = 16
NEVER_MS = (1 << 64) - 1
_HEAD = struct.Struct(f"<BxHIQQQ16s32s32sQQ{ID_BYTES}s{ID_BYTES}s{ID_BYTES}s")
_SEAL_BYTES = 8


class Record(NamedTuple):
    """One block's entry; a tuple, since several are made for every block that is stored.

    ``generation`` never repeats in a store; ``checksum`` is the payload's XXH3-128.

    ``owner`` is the number of the process that writes it (or wrote it), ``version`` the version of whoever
    made the KV: other versions' entries are never hits. ``stored_ms`` and ``expires_ms`` are milliseconds
    since the Unix epoch; ``tenant``, ``model`` and ``prompt`` are ids as bytes.
    """

    state: int
    owner: int
    version: int
    slot: int
    generation: int
    payload_bytes: int
    checksum: bytes
    namespace: bytes
    parent: bytes
    stored_ms: int
    expires_ms: int
    tenant: bytes
    model: bytes
    prompt: bytes
    tokens: bytes

    def is_of(self, key: BlockKey) -> bool:
        """Whether it says of itself that it is this block."""
        return self.tokens == key.tokens and self.parent == key.parent and self.namespace == key.namespace


def encode(name: bytes, record: Record) -> bytes:
    """A record as bytes, sealed together with the hash it is filed under."""
    body = _HEAD.pack(*record[:-1]) + record.tokens
    return body + xxh3_64_digest(name + body)


def decode(name: bytes, data: bytes, num_slots: int) -> Record | None:
    """The record, or ``None`` when it is not what was written under ``name``."""
    body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if len(body) < _HEAD.size or xxh3_64_digest(name + body) != seal:
        return None
    record = Record._make((*_HEAD.unpack_from(body), body[_HEAD.size :]))
    return record if record.slot < num_slots and record.state in (WRITING, READY) else None
