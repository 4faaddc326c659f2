"""vLLM's pages for DeepSeek-V4: five kinds of cache beside each other in one block.

Knows the packing of vLLM 0.32 (block-outermost layout). Invariant: a block holds the widest group; every group draws
whole blocks.

A layer of ratio r keeps, in blocks of their own size: a window of 128 latents (blocks of 64); 256 / r compressed
latents in a block of 256 tokens; for r = 4 an 8-bit index key beside each; and the compressors' fp32 states, kept like
a window of 2 r (r = 4, blocks of 4) or r tokens (blocks of 8). Pages are padded to 576 bytes (8-bit latents) or 512.
Caches of one block size and window form a bucket; buckets whose page sizes come in equal numbers set how many layers
share a block, so that padding is least; larger buckets are split to that. Source: vllm/models/deepseek_v4 and
`_get_packed_kv_cache_groups`, compared by tests/ledger/vllm_oracle.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvsteward.errors import ConfigError
from kvsteward.ledger.formats import Format, get
from kvsteward.ledger.layers import MIXED_LATENT, Kind, Layer

SINCE = (0, 30)
WINDOW_BLOCK, MAIN_BLOCK = 64, 256
STATE_BLOCKS = {4: 4, 128: 8}
OVERLAP = {4: 2, 128: 1}
STATE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """Caches with one block table: `pages` are their page sizes in bytes, one a cache."""

    kind: Kind
    block_tokens: int
    span_tokens: int
    pages: tuple[int, ...]

    @property
    def repeats(self) -> int:
        """The most caches that share a page size."""
        return Counter(self.pages).most_common(1)[0][1]

    @property
    def balanced(self) -> bool:
        return len(set(Counter(self.pages).values())) == 1

    @property
    def mixed(self) -> bool:
        return len(set(self.pages)) > 1

    def widest_bytes(self, groups: int) -> int:
        """Bytes of the largest of `groups` that the bucket is split into."""
        return sum(-(-count // groups) * page for page, count in Counter(self.pages).items())


def buckets(layers: Sequence[Layer], k_fmt: Format) -> list[Bucket]:
    """The caches of `layers` by block table. ConfigError for a ratio that vLLM has no kernel for."""
    mixed = k_fmt.bits <= 8
    step = 576 if mixed else 512
    main: list[int] = []
    states: dict[int, list[int]] = {ratio: [] for ratio in STATE_BLOCKS}
    window: list[int] = []
    for layer in layers:
        entry = _entry_bytes(layer, k_fmt)
        window.append(_padded(WINDOW_BLOCK * entry, step))
        if layer.ratio not in {0, *STATE_BLOCKS}:
            raise ConfigError(f"vLLM has no cache for a compression ratio of {layer.ratio}")
        if layer.ratio:
            main.append(_padded(MAIN_BLOCK // layer.ratio * entry, step))
            states[layer.ratio].append(_state_page(layer.ratio, layer.k_dim, step))
        if layer.ratio and layer.index_dim:
            main.append(_padded(MAIN_BLOCK // layer.ratio * (layer.index_dim + 4), step))
            states[layer.ratio].append(_state_page(layer.ratio, layer.index_dim, step))
    span = max(layer.span_tokens for layer in layers)
    made = [Bucket(Kind.FULL, MAIN_BLOCK, 0, tuple(main)), Bucket(Kind.SLIDING, WINDOW_BLOCK, span, tuple(window))]
    made += [
        Bucket(Kind.SLIDING, STATE_BLOCKS[ratio], OVERLAP[ratio] * ratio, tuple(pages))
        for ratio, pages in states.items()
    ]
    return [bucket for bucket in made if bucket.pages]


def split(made: Sequence[Bucket]) -> tuple[list[int], int]:
    """Groups of each bucket, and the bytes of a block."""
    floor = max((bucket.repeats for bucket in made if bucket.balanced and bucket.mixed), default=0)
    if not floor:
        groups = _split_states(made)
    else:
        share = _least_padding([bucket.repeats for bucket in made if bucket.balanced], floor)
        groups = [-(-bucket.repeats // share) if bucket.balanced else 1 for bucket in made]
    widest = max(bucket.widest_bytes(count) for bucket, count in zip(made, groups, strict=True))
    return groups, widest


def _split_states(made: Sequence[Bucket]) -> list[int]:
    """Without a repeating pattern, windows are split until a block need be no wider than the other caches make it."""
    anchor = max(bucket.widest_bytes(len(bucket.pages) if bucket.kind is Kind.SLIDING else 1) for bucket in made)
    return [
        -(-len(bucket.pages) // max(1, anchor // bucket.pages[0])) if bucket.kind is Kind.SLIDING else 1
        for bucket in made
    ]


def _least_padding(counts: Sequence[int], floor: int) -> int:
    """The share in `floor` .. max that wastes the fewest layers; the larger of two equals."""
    shares = range(floor, max(max(counts), floor) + 1)
    return min(shares, key=lambda share: (sum(-count % share for count in counts), -share))


def _entry_bytes(layer: Layer, k_fmt: Format) -> int:
    return layer.k_bytes(get(MIXED_LATENT) if k_fmt.bits <= 8 else k_fmt)


def _state_page(ratio: int, dim: int, step: int) -> int:
    """Values and scores of a compressor in fp32, twice as wide where its groups overlap."""
    return _padded(STATE_BLOCKS[ratio] * 2 * OVERLAP[ratio] * dim * STATE_BYTES, step)


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step
