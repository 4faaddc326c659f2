"""The KV pool of the scripted engine: blocks, references, and a prefix cache that forgets the least recently used.

Pure: no clock, no event loop. It is what vLLM's block manager does, without tensors. Invariants: each block is either
free, cached (nobody uses it, its content is known) or used; `used + cached + free == blocks`; a block is never
forgotten while somebody uses it. `check_integrity` raises InvariantError if one of these is broken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvsteward.errors import InvariantError


@dataclass(slots=True)
class Table:
    """The blocks of one request, in order. `hashes` name the content of its full blocks."""

    blocks: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    cached_tokens: int = 0


class BlockPool:
    """`blocks` blocks of `block_tokens` tokens each."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the next one to be forgotten comes first
        self._references = [0] * blocks
        self._block_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}

    @property
    def used_blocks(self) -> int:
        return self.blocks - len(self._free) - len(self._cached)

    @property
    def cached_blocks(self) -> int:
        """Blocks that nobody uses and whose content would still be reused."""
        return len(self._cached)

    def match(self, tokens: Sequence[int]) -> int:
        """How many leading tokens are in the cache: whole blocks, and never the last token. Changes nothing."""
        return len(self._known_prefix(self._hashes(tokens), len(tokens))) * self.block_tokens

    def allocate(self, tokens: Sequence[int]) -> Table | None:
        """Blocks for a request's tokens, shared where its prefix is known. None, and nothing done, if too few."""
        hashes = self._hashes(tokens)
        known = self._known_prefix(hashes, len(tokens))
        new = self._blocks_for(len(tokens)) - len(known)
        spare = len(self._free) + len(self._cached) - sum(1 for block in known if block in self._cached)
        if new > spare:
            return None
        for block in known:
            self._use(block)
        table = Table(known + [self._take() for _ in range(new)], cached_tokens=len(known) * self.block_tokens)
        self._name(table, hashes)
        return table

    def grow(self, table: Table, tokens: Sequence[int]) -> bool:
        """Room for one more token than the table has. False, and nothing done, if no block is left."""
        if self._blocks_for(len(tokens)) > len(table.blocks):
            if not self._free and not self._cached:
                return False
            table.blocks.append(self._take())
        if len(tokens) // self.block_tokens > len(table.hashes):
            self._name(table, self._hashes(tokens))
        return True

    def release(self, table: Table) -> None:
        """The request is over: its named blocks stay cached, its tail is forgotten before its head."""
        for block in reversed(table.blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)
        table.blocks.clear()

    def known(self, hashes: Sequence[int]) -> int:
        """Cached blocks of this content that nobody uses."""
        return sum(self._block_of.get(name) in self._cached for name in hashes)

    def forget(self, hashes: Sequence[int]) -> int:
        """Drops cached blocks of this content that nobody uses. Returns how many."""
        blocks = [b for b in (self._block_of.get(h) for h in hashes) if b is not None and b in self._cached]
        for block in blocks:
            del self._cached[block]
            self._unname(block)
            self._free.append(block)
        return len(blocks)

    def check_integrity(self) -> None:
        """Raises InvariantError unless every block is in exactly one state and every name is mutual."""
        used = {block for block, count in enumerate(self._references) if count > 0}
        states = [*used, *self._cached, *self._free]
        if sorted(states) != list(range(self.blocks)):
            raise InvariantError("a block is in two states, or in none")
        if any(self._block_of.get(name) != block for block, name in self._hash_of.items()):
            raise InvariantError("a block's name leads elsewhere")
        if len(self._block_of) != len(self._hash_of) or not set(self._cached) <= set(self._hash_of):
            raise InvariantError("a cached block has no name")

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _hashes(self, tokens: Sequence[int]) -> list[int]:
        hashes, parent, size = [], 0, self.block_tokens
        for end in range(size, len(tokens) + 1, size):
            parent = hash((parent, tuple(tokens[end - size : end])))
            hashes.append(parent)
        return hashes

    def _known_prefix(self, hashes: list[int], count: int) -> list[int]:
        known = []
        for name in hashes[: max(count - 1, 0) // self.block_tokens]:
            block = self._block_of.get(name)
            if block is None:
                break
            known.append(block)
        return known

    def _use(self, block: int) -> None:
        self._cached.pop(block, None)
        self._references[block] += 1

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unname(block)
        self._references[block] = 1
        return block

    def _name(self, table: Table, hashes: list[int]) -> None:
        for block, name in zip(table.blocks, hashes, strict=False):
            if block not in self._hash_of and name not in self._block_of:
                self._hash_of[block] = name
                self._block_of[name] = block
        table.hashes = hashes

    def _unname(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]
