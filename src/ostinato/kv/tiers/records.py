"""What the shared tier's index says of a block, as bytes that know when they are damaged."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh3_64_digest

from ..hashing import BlockKey

WRITING, READY = 1, 2
CHECKSUM_BYTES = 16
_HEAD = struct.Struct("<BxHIQQQ16s32s32s")
_SEAL_BYTES = 8


@dataclass(frozen=True, slots=True)
class Record:
    """One block's entry. ``generation`` never repeats in a store; ``checksum`` is the payload's XXH3-128.

    ``owner`` is the number of the process that writes it (or wrote it), ``version`` the version of whoever
    made the KV: other versions' entries are never hits.
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
    tokens: bytes

    def is_of(self, key: BlockKey) -> bool:
        """Whether it says of itself that it is this block."""
        return self.tokens == key.tokens and self.parent == key.parent and self.namespace == key.namespace


def encode(name: bytes, record: Record) -> bytes:
    """A record as bytes, sealed together with the hash it is filed under."""
    body = (
        _HEAD.pack(
            record.state,
            record.owner,
            record.version,
            record.slot,
            record.generation,
            record.payload_bytes,
            record.checksum,
            record.namespace,
            record.parent,
        )
        + record.tokens
    )
    return body + xxh3_64_digest(name + body)


def decode(name: bytes, data: bytes, num_slots: int) -> Record | None:
    """The record, or ``None`` when it is not what was written under ``name``."""
    body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if len(body) < _HEAD.size or xxh3_64_digest(name + body) != seal:
        return None
    head: tuple[int, int, int, int, int, int, bytes, bytes, bytes] = _HEAD.unpack_from(body)
    record = Record(*head, body[_HEAD.size :])
    return record if record.slot < num_slots and record.state in (WRITING, READY) else None
