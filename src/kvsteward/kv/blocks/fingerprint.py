"""Whose KV a block is: everything that must agree before the bytes of one process mean the same in another.

The digest of all fields is the first part of a block's key and stands again in its header, so a block of another model,
layout, rank or tenant is never even looked for, and is refused if it turns up. Tenants share blocks only where they are
given the same `tenant_salt`.

Pure. Invariant: fingerprints that differ in any field have different digests (BLAKE2b, 128 bits), the same ones have
the same digest in every process.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

DIGEST_BYTES = 16
GROUP_BYTES = 4
MAX_KEY_BYTES = 64
MAX_HASH_BYTES = MAX_KEY_BYTES - DIGEST_BYTES - GROUP_BYTES
SCHEME = "kvsteward-blocks-1"
"""What the digest stands for; another meaning of a field needs another scheme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """`layout` names the order of a block's bytes (not only its shape: two layouts can have the same one), `hashing`
    the algorithm and seed of block hashes, `codec` a lossy codec at rest ("" where blocks come back bit for bit)."""

    model: str
    revision: str
    dtype: str
    layout: str
    block_tokens: int
    block_bytes: int
    layers: int = 0
    kv_heads: int = 0
    head_size: int = 0
    rope: str = ""
    codec: str = ""
    hashing: str = ""
    engine: str = ""
    engine_version: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    tenant_salt: str = ""
    extra: str = ""

    def digest(self) -> bytes:
        """16 bytes: BLAKE2b over the length-prefixed name and value of each field, in order."""
        hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
        parts = [SCHEME]
        for field in fields(self):
            parts += [field.name, repr(getattr(self, field.name))]
        for part in parts:
            data = part.encode("utf-8", "surrogatepass")
            hasher.update(len(data).to_bytes(4, "big") + data)
        return hasher.digest()


def key(fingerprint: Fingerprint | bytes, block_hash: bytes, group: int = 0) -> bytes:
    """Digest, KV group and block hash in one. `fingerprint` may be its digest, so that it is computed once.

    Raises ValueError where a part is too long or too short.
    """
    digest = fingerprint if isinstance(fingerprint, bytes) else fingerprint.digest()
    if len(digest) != DIGEST_BYTES or not 0 < len(block_hash) <= MAX_HASH_BYTES:
        raise ValueError(f"a digest of {len(digest)} and a block hash of {len(block_hash)} bytes make no key")
    return digest + group.to_bytes(GROUP_BYTES, "big") + block_hash


def digest_of(key: bytes) -> bytes:
    """The fingerprint's digest in a key."""
    return key[:DIGEST_BYTES]
