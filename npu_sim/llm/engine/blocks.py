"""`BlockPool`: the blocks of a KV pool, the sequences that hold them, and the cached prefixes in them.

A block is a fixed number of rows for keys and values. A block that is full of known tokens gets a digest: a hash,
chained over the tenant (the client), the adapter and all tokens of the sequence up to the block's end. A prompt with
the same beginning shares the block instead of computing it again. A block that nobody holds stays cached until the pool
needs it; the least recently released one goes first.

Invariants:
1. Every block is either free, cached and held by nobody, or held by one or more sequences.
2. A block with a digest is never written: its holders write to later blocks only, or to a copy of it.
3. Two blocks never have the same digest; a digest covers tenant and adapter, which all holders of a block share.
4. A block is not released before a block that follows it in the same sequence, so its successors leave the cache first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

_DIGEST_BYTES = 16


def first_digest(tenant: str, adapter: str | None = None) -> bytes:
    """The hash with which the chain of a tenant's sequences begins, for one LoRA adapter or (None) for none."""
    digest = hashlib.blake2b(_encoded(tenant), digest_size=_DIGEST_BYTES).digest()
    if adapter is None:
        return digest
    return hashlib.blake2b(_encoded(adapter), digest_size=_DIGEST_BYTES, key=digest, person=b"adapter").digest()


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def next_digest(digest: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block: that of these tokens after the blocks before, whose hash is `digest`."""
    return hashlib.blake2b(np.array(tokens, np.int32).tobytes(), digest_size=_DIGEST_BYTES, key=digest).digest()


class BlockPool:
    """The blocks of one KV pool: which are free, held or cached.

    Args:
        blocks: Number of blocks in the pool.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        self._digests: list[bytes | None] = [None] * blocks
        self._by_digest: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Number of blocks that `allocate` can return: free ones, and cached ones that no sequence holds."""
        return len(self._free) + len(self._cached)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of blocks with a digest that no sequence holds."""
        return len(self._cached)

    def allocate(self) -> int | None:
        """A block for one sequence to hold, with undefined contents; None if all blocks are held."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            return None
        self._holders[block] = 1
        return block

    def find(self, digest: bytes) -> int | None:
        """The block with that digest, now held once more; None if no block has it."""
        block = self._by_digest.get(digest)
        if block is not None:
            self._cached.pop(block, None)
            self._holders[block] += 1
        return block

    def register(self, block: int, digest: bytes) -> None:
        """Let `find` return a full block that is held, unless another block with the same digest is registered."""
        if digest not in self._by_digest:
            self._by_digest[digest] = block
            self._digests[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Give back the blocks of one sequence, in the order of its tokens.

        The last block is released first, because of invariant 4.
        """
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._digests[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def forget(self, blocks: Iterable[int]) -> None:
        """Take blocks out of the prefix cache, since their contents may be wrong.

        Sequences that hold them keep them.
        """
        for block in blocks:
            self._forget(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._by_digest[digest]
            self._digests[block] = None
