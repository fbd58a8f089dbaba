"""The keys by which KV blocks are known, at workers and at routers alike.

A full block's key is a chained hash: of the salt, all tokens before it, and its own. Equal keys are equal prefixes, because a
collision of BLAKE2b-256 can't be found.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

_KEY_BYTES = 32
SHORT_BYTES = 8
"""Bytes of a key that routers know. Two keys that share them cost time only."""


def block_keys(token_ids: Sequence[int], block_size: int, salt: str) -> list[bytes]:
    """The key of each full block of these tokens, in order. Prompts with different salts share none."""
    return list(keys_of(token_ids, block_size, salt))


def more_keys(keys: list[bytes], token_ids: Sequence[int], block_size: int, salt: str) -> list[bytes]:
    """The key of each full block of these tokens, where `keys` are those of the first blocks, as far as they are known."""
    known = len(token_ids) // block_size
    if len(keys) >= known:
        return keys[:known]
    return keys + list(_keys(token_ids[len(keys) * block_size :], block_size, keys[-1] if keys else _salted(salt)))


def keys_of(token_ids: Sequence[int], block_size: int, salt: str) -> Iterator[bytes]:
    """The same one after the other, for who has other work in between: a key takes 1 us.

    Salts and blocks are hashed apart (`person`), so that no salt can pass for the hash of another prompt's beginning.
    """
    return _keys(token_ids, block_size, _salted(salt))


def _salted(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=_KEY_BYTES, person=b"salt").digest()


def _keys(token_ids: Sequence[int], block_size: int, key: bytes) -> Iterator[bytes]:
    packed = array("I", token_ids)
    width = block_size * packed.itemsize
    data = memoryview(packed).cast("B")
    for start in range(0, len(data) - width + 1, width):
        block = blake2b(key, digest_size=_KEY_BYTES, person=b"block")
        block.update(data[start : start + width])
        key = block.digest()
        yield key


def tenant_of(salt: str) -> str:
    """The tenant whose salt this is, as routers with API keys make it: the text before its first slash; empty without one."""
    return salt.partition("/")[0] if "/" in salt else ""


def shortened(keys: Iterable[bytes]) -> bytes:
    """Return keys as routers know them, the first eight bytes of each."""
    return b"".join(key[:SHORT_BYTES] for key in keys)
