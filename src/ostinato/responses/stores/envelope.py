"""What an entry looks like at rest: with a checksum, and encrypted where there is a key.

A row that was cut short, changed, or moved to another place does not open. Encrypted (AES-GCM), whoever can
write to the store can neither read an entry nor make one that opens: everything in the row is authenticated
with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from blake3 import blake3

from ...errors import StoreError
from .base import Entry, Kind

_CHECK_CONTEXT: Final = "ostinato response entry v1"
_KEY_CONTEXT: Final = "ostinato response encryption key v1"
_PLAIN, _SEALED = b"\0", b"\1"
_NONCE_BYTES: Final = 12


@dataclass(frozen=True, slots=True)
class Row:
    """An entry as a store keeps it."""

    kind: str
    key: bytes
    space: bytes
    tenant: str
    model: str
    prompt: str
    stored_ms: int
    expires_ms: int | None
    meta: bytes
    vector: bytes | None
    value: bytes
    checksum: bytes


class Envelope:
    """Makes rows of entries and entries of rows.

    Args:
        secret: what entries are encrypted with, of any length; ``None``: they are not.
        entropy: where nonces come from.

    Raises:
        StoreError: the package that encrypts is not installed.
    """

    def __init__(self, secret: str | None = None, *, entropy: Callable[[int], bytes] = os.urandom) -> None:
        self._entropy = entropy
        self._cipher: Any = None
        if secret:
            try:
                from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            except ImportError as error:
                raise StoreError(
                    "encrypting answers needs a package more: pip install 'ostinato[encryption]'"
                ) from error
            self._cipher = AESGCM(blake3(secret.encode(), derive_key_context=_KEY_CONTEXT).digest())

    @property
    def is_sealed(self) -> bool:
        """Whether entries are encrypted."""
        return self._cipher is not None

    def close(self, entry: Entry) -> Row:
        """The row of an entry."""
        head = _head(entry)
        vector = None if entry.vector is None else np.asarray(entry.vector, "<f4").tobytes()
        meta = self._seal(entry.meta, head + b"meta")
        value = self._seal(entry.value, head + b"value")
        if vector is not None:
            vector = self._seal(vector, head + b"vector")
        return Row(
            entry.kind, entry.key, entry.space, entry.tenant, entry.model, entry.prompt, entry.stored_ms,
            entry.expires_ms, meta, vector, value, _check(head, meta, vector, value),
        )  # fmt: skip

    def open(self, row: Row, seq: int) -> Entry | None:
        """The entry of a row; ``None`` where the row is not one that :meth:`close` made with this key."""
        try:
            head = _head(row)
            if _check(head, row.meta, row.vector, row.value) != row.checksum:
                return None
            vector = None
            if row.vector is not None:
                vector = np.frombuffer(self._unseal(row.vector, head + b"vector"), "<f4").astype(np.float32)
            return Entry(
                cast(Kind, row.kind),
                row.key,
                row.space,
                self._unseal(row.value, head + b"value"),
                row.stored_ms,
                row.expires_ms,
                row.tenant,
                row.model,
                row.prompt,
                self._unseal(row.meta, head + b"meta"),
                vector,
                seq,
            )
        except (ValueError, TypeError, AttributeError):  # columns of other types than any row of ours has
            return None

    def _seal(self, data: bytes, label: bytes) -> bytes:
        if self._cipher is None:
            return _PLAIN + data
        nonce = self._entropy(_NONCE_BYTES)
        return _SEALED + nonce + cast(bytes, self._cipher.encrypt(nonce, data, label))

    def _unseal(self, data: bytes, label: bytes) -> bytes:
        form = data[:1]
        if self._cipher is None:
            if form != _PLAIN:
                raise ValueError("encrypted, and there is no key")
            return data[1:]
        if form != _SEALED:
            raise ValueError("not encrypted, where everything has to be")
        from cryptography.exceptions import InvalidTag

        at = 1 + _NONCE_BYTES
        try:
            return cast(bytes, self._cipher.decrypt(data[1:at], data[at:], label))
        except InvalidTag:
            raise ValueError("encrypted with another key, or changed") from None


def _head(of: Entry | Row) -> bytes:
    """All of an entry that is not encrypted, in a form that has one reading."""
    parts = [of.kind.encode(), of.key, of.space, of.tenant.encode(), of.model.encode(), of.prompt.encode()]
    times = (of.stored_ms, -1 if of.expires_ms is None else of.expires_ms)
    parts += [time.to_bytes(8, "little", signed=True) for time in times]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _check(head: bytes, meta: bytes, vector: bytes | None, value: bytes) -> bytes:
    hasher = blake3(head, derive_key_context=_CHECK_CONTEXT)
    for part in (meta, vector, value):
        hasher.update((0 if part is None else 1 + len(part)).to_bytes(8, "little"))
        hasher.update(part or b"")
    return hasher.digest(length=16)
