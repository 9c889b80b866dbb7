"""Names that cannot collide: versioned BLAKE3 digests, and the namespace KV is exchangeable in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from blake3 import blake3

from ostinato.types import TokenArray

from .terms import NO_ORIGIN, Origin, tenant_of

DIGEST_PREFIX = "b3:"
_NAMESPACE_CONTEXT = "ostinato kv namespace v1"


def digest_bytes(*parts: bytes, context: str) -> str:
    """Digest of a tuple of byte strings, as ``b3:`` and 64 hex digits.

    Every part goes in behind its length, so ``(b"ab", b"c")`` and ``(b"a", b"bc")`` differ. ``context``
    says what is named and in which version (BLAKE3's key derivation): two contexts never share a digest.
    """
    assert context, "a digest needs a context that says what it names"
    hasher = blake3(derive_key_context=context)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return DIGEST_PREFIX + hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class Namespace:
    """All that must be equal for two requests to exchange KV.

    ``weights``, ``tokenizer`` and ``template`` are digests of content; ``kv_layout``, ``kv_dtype`` and
    ``rotary`` describe the stored bytes; ``adapter`` names a fine-tuning adapter and ``salt`` keeps callers
    apart, both empty for none. Any text is allowed in any field. ``tenant`` is the id of whoever quota, TTL
    and purges are for: the salt says who.
    """

    weights: str
    tokenizer: str
    template: str
    kv_layout: str
    kv_dtype: str
    rotary: str
    adapter: str = ""
    salt: str = ""
    tenant: str = field(init=False, repr=False, compare=False)
    digest: str = field(init=False, repr=False, compare=False)
    """Versioned digest of all fields: the form in which the index keys its trees."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tenant", tenant_of(self.salt))
        fields = (
            self.weights,
            self.tokenizer,
            self.template,
            self.kv_layout,
            self.kv_dtype,
            self.rotary,
            self.adapter,
            self.salt,
        )
        # A salt may come off the wire with a lone surrogate in it: it must still have exactly one encoding.
        encoded = (text.encode("utf-8", "surrogatepass") for text in fields)
        object.__setattr__(self, "digest", digest_bytes(*encoded, context=_NAMESPACE_CONTEXT))

    def with_salt(self, salt: str) -> Namespace:
        """The same namespace for another salt."""
        return replace(self, salt=salt)


# ---------------------------------------------------------------- blocks

_BLOCK_CONTEXT = "ostinato kv block v1"
KEY_VERSION = 2
"""Goes up whenever keys, or what they name, come to mean something else; a tier lets go of lower ones."""
NO_PARENT = bytes(32)
"""The parent of a sequence's first block."""


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Names one block's KV: everything before it, and its own tokens, in one namespace.

    ``hash``, ``parent`` and ``namespace`` are 32 raw bytes each; ``tokens`` are little-endian int32. The hash
    alone is the name; the rest goes along so that whoever finds it can compare what was meant. ``origin``
    says whose it is and how long it may stay, and is no part of what it is.
    """

    hash: bytes
    parent: bytes
    namespace: bytes
    tokens: bytes
    origin: Origin = field(default=NO_ORIGIN, compare=False)


def block_keys(
    namespace: Namespace,
    tokens: TokenArray,
    block_size: int,
    origin: Origin = NO_ORIGIN,
    *,
    parent: bytes = NO_PARENT,
) -> list[BlockKey]:
    """The chain of keys of every *full* block of ``tokens``, first to last, behind the block ``parent``.

    A hash is the versioned BLAKE3 digest of parent and tokens, keyed by the namespace: equal hashes mean
    equal prefixes in equal namespaces.
    """
    assert block_size >= 1, f"block size {block_size}"
    space = bytes.fromhex(namespace.digest.removeprefix(DIGEST_PREFIX))
    key = blake3(space, derive_key_context=_BLOCK_CONTEXT).digest()
    data = tokens.astype("<i4", copy=False).tobytes()
    step = 4 * block_size
    keys: list[BlockKey] = []
    for at in range(0, len(data) - step + 1, step):
        piece = data[at : at + step]
        name = blake3(parent + piece, key=key).digest()
        keys.append(BlockKey(name, parent, space, piece, origin))
        parent = name
    return keys
