"""vLLM's free list with an order of its own: same calls, same totals, another block goes first.

Free blocks are blank (they hold nothing that can be hit again; used first) or lie in runs, each the blocks that were
freed together for one owner. Within a run the order is vLLM's: the tail of a prefix goes first. Which run goes
first is asked from `rank`; without it, or when it fails, the oldest run goes first, which is vLLM's own LRU exactly.

Soft by construction: every free block can be popped, so allocation never sees fewer blocks than vLLM counts.

Knows blocks only as objects with a `block_id`; no vLLM import. Invariant: blank + blocks in runs = `num_free_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvsteward.errors import InvariantError


class Block(Protocol):
    block_id: int
    prev_free_block: Any
    next_free_block: Any


@dataclass(eq=False, slots=True)
class Run:
    """Free blocks of one owner, the next to go first. `used`: a later request took some of them. `over`: released, it
    goes before all others."""

    number: int
    owner: str
    blocks: dict[int, Block] = field(default_factory=dict)
    used: bool = False
    over: bool = False


Rank = Callable[[Mapping[int, Run]], Iterable[int]]
"""Numbers of runs, the first to go first. Runs that it leaves out go after those that it names, oldest first."""


class FreeList:
    """In the place of vLLM's `FreeKVCacheBlockQueue`. `on_use(run)` hears of the first reuse of each run."""

    def __init__(self, blocks: Sequence[Block], *, on_use: Callable[[Run], None] | None = None) -> None:
        self._blank: dict[int, Block] = {}
        self._runs: dict[int, Run] = {}
        self._in: dict[int, Run] = {}
        self._owner: dict[int, str] = {}
        self._shared: set[int] = set()
        self._order: list[int] = []
        self._next_number = 0
        self._rank: Rank | None = None
        self._fault: Callable[[Exception], None] | None = None
        self._on_use = on_use
        self.num_free_blocks = 0
        self.prepend_n(blocks)

    # vLLM's calls

    def popleft(self) -> Block:
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks asked, {self.num_free_blocks} are free")
        popped = [self._blank.popitem()[1] for _ in range(min(n, len(self._blank)))]
        if len(popped) < n and not self._order:
            self.refresh()
        while len(popped) < n:
            popped += self._cut(self._first_run(), n - len(popped))
        self.num_free_blocks -= n
        for block in popped:
            self._owner.pop(block.block_id, None)
            self._shared.discard(block.block_id)
        return popped

    def remove(self, block: Block) -> None:
        """The block is used again."""
        run = self._in.pop(block.block_id, None)
        if run is None:
            if self._blank.pop(block.block_id, None) is None:
                raise RuntimeError(f"remove() called on a block that is not free: {block.block_id}")
        else:
            del run.blocks[block.block_id]
            self._used(run)
        self.num_free_blocks -= 1

    def append(self, block: Block) -> None:
        self.append_n([block])

    def append_n(self, blocks: Iterable[Block]) -> None:
        """Blocks that can be hit again, the first to go first; one run for each owner among them."""
        run: Run | None = None
        for block in blocks:
            owner = self._owner.get(block.block_id, "")
            if run is None or run.owner != owner:
                run = self._new_run(owner)
            run.blocks[block.block_id] = block
            self._in[block.block_id] = run
            self.num_free_blocks += 1

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Blocks that hold nothing; the first of them goes first."""
        for block in reversed(blocks):
            block.prev_free_block = block.next_free_block = None
            self._blank[block.block_id] = block
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[Block]:
        return list(self._all())

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        """In the order in which they would go now."""
        blocks = self._all()
        if cursor is not None:
            for block in blocks:
                if block.block_id == cursor.block_id:
                    break
        return blocks

    # ours

    def ranked_by(self, rank: Rank | None) -> None:
        self._rank = rank
        self._order = []

    def on_fault(self, heard: Callable[[Exception], None]) -> None:
        """Who hears of it when ranking or `on_use` fails; the list then runs oldest first."""
        self._fault = heard

    def own(self, block_ids: Iterable[int], owner: str, shared: Callable[[str], str]) -> None:
        """When these blocks become free they are `owner`'s; those that another owner left before are
        `shared(owner)`'s."""
        name = shared(owner)
        for block_id in block_ids:
            before = self._owner.get(block_id)
            if before not in (None, owner, name) or block_id in self._shared:
                self._shared.add(block_id)
                self._owner[block_id] = name
            else:
                self._owner[block_id] = owner

    def release(self, owner: str, *, over: bool = True) -> int:
        """What this owner left goes first from now on, whatever the order says. Returns its blocks. `over` False takes
        that back."""
        runs = [run for run in self._runs.values() if run.owner == owner]
        for run in runs:
            run.over = over
        if runs:
            self.outdate()
        return sum(len(run.blocks) for run in runs)

    @property
    def runs(self) -> Mapping[int, Run]:
        return self._runs

    def outdate(self) -> None:
        """The order is asked for anew when it is next needed."""
        self._order = []

    def refresh(self) -> None:
        """Asks for the order anew."""
        self._drop_empty()
        named = self._ask()
        known = [number for number in named if number in self._runs]
        rest = self._runs.keys() - set(known)
        self._order = sorted([*known, *sorted(rest)], key=lambda number: not self._runs[number].over)
        self._order.reverse()

    def clear(self) -> None:
        """The cache was reset: nothing in any block can be hit again."""
        blocks = [block for run in self._by_age() for block in run.blocks.values()]
        self._runs.clear()
        self._in.clear()
        self._owner.clear()
        self._shared.clear()
        self._order = []
        self.num_free_blocks -= len(blocks)
        self._blank = {b.block_id: b for b in reversed([*reversed(self._blank.values()), *blocks])}
        self.num_free_blocks += len(blocks)

    def check(self) -> None:
        """Raises InvariantError if the totals do not hold."""
        in_runs = sum(len(run.blocks) for run in self._runs.values())
        if len(self._blank) + in_runs != self.num_free_blocks or in_runs != len(self._in):
            raise InvariantError(
                f"{len(self._blank)} blank + {in_runs} in runs, {self.num_free_blocks} free, {len(self._in)} indexed"
            )
        if self._blank.keys() & self._in.keys():
            raise InvariantError("a block is in two places")

    def _ask(self) -> list[int]:
        try:
            return list(dict.fromkeys(self._rank(self._runs))) if self._rank else []
        except Exception as error:  # noqa: BLE001  # an engine must outlive it; `_failed` tells
            self._failed(error)
            return []

    def _failed(self, error: Exception) -> None:
        """Without anybody to hear of it a fault is raised; inside an engine somebody always does."""
        self._rank = self._on_use = None
        if self._fault is None:
            raise error
        self._fault(error)

    def _new_run(self, owner: str) -> Run:
        self._next_number += 1
        run = self._runs[self._next_number] = Run(self._next_number, owner)
        return run

    def _first_run(self) -> Run:
        while True:
            if not self._order:
                self.refresh()
            run = self._runs.get(self._order[-1])
            if run and run.blocks:
                return run
            self._order.pop()

    def _cut(self, run: Run, n: int) -> list[Block]:
        ids = [block_id for block_id, _ in zip(run.blocks, range(n), strict=False)]
        for block_id in ids:
            del self._in[block_id]
        cut = [run.blocks.pop(block_id) for block_id in ids]
        if not run.blocks:
            del self._runs[run.number]
        return cut

    def _used(self, run: Run) -> None:
        if not run.used:
            run.used = True
            self._tell(run)
        if not run.blocks:
            del self._runs[run.number]

    def _tell(self, run: Run) -> None:
        try:
            if self._on_use:
                self._on_use(run)
        except Exception as error:  # noqa: BLE001  # an engine must outlive it; `_failed` tells
            self._failed(error)

    def _drop_empty(self) -> None:
        for number in [n for n, run in self._runs.items() if not run.blocks]:
            del self._runs[number]

    def _by_age(self) -> list[Run]:
        return [self._runs[number] for number in sorted(self._runs)]

    def _all(self) -> Iterator[Block]:
        yield from reversed(self._blank.values())
        self.refresh()
        for number in reversed(list(self._order)):
            yield from self._runs[number].blocks.values()
