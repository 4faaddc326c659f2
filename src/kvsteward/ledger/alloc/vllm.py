"""vLLM's KV cache: how layers become page groups, what a pool holds, what one request is charged.

Knows the rules of versions 0.4 to 0.32. Invariant: `blocks` never exceed the bytes given, and a request is charged at
least what its layers logically hold.

Sources (vllm/v1/core/kv_cache_utils.py, single_type_kv_cache_manager.py, model_executor/models/config.py), checked
against the start-up logs in tests/ledger/data:
- layers of one kind form groups; the group size is the smallest count, or the largest if that is below 1.25 (later
  1.5) times the smallest; short groups are padded with empty layers; all groups share one page size;
- a kind with fewer bytes per token gets a larger block, so that its page is as large, or a padded page;
- full: ceil(L / b) pages; sliding: ceil(min(W - 1 + flight, L) / b) + 1; chunked: ceil(min(C + flight, L) / b), where
  flight is max_num_batched_tokens, later times the batches that asynchronous scheduling has under way (2);
- a recurrent layer's page is its state; attention blocks grow, in steps of 16 (latents: 128), until theirs is as
  large. A request holds 1 state page (2 with prefix caching, mode `align`) and one more per drafted token;
- a pool keeps one null block for itself (V1), or a watermark of 1 % (V0);
- tokens printed: `blocks // groups x block` up to 0.20, `int(concurrency x max_model_len)` from 0.21 on.
The rules of 0.32 were compared with its own code (tests/ledger/vllm_oracle.py). Two of them changed between 0.21 and
0.32, not before the first log that shows them: here both count from 0.22 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvsteward.errors import ConfigError
from kvsteward.ledger.alloc import vllm_compressed
from kvsteward.ledger.formats import Format
from kvsteward.ledger.layers import MIXED_LATENT, Kind, Layer
from kvsteward.ledger.spec import FormatChoice, ModelSpec

BLOCK_TOKENS = 16
CPU_BLOCK_TOKENS = 128
CONCURRENCY_LINE_SINCE = (0, 21)
STATE_BLOCK_STEP = 16
LATENT_BLOCK_STEP = 128
IN_FLIGHT_SINCE = (0, 22)
GROUP_SLACK, LATER_GROUP_SLACK = 1.25, 1.5
V1_SINCE = (0, 9)
V0_WATERMARK = 0.01


@dataclass(frozen=True, slots=True)
class VLLM:
    """The settings that change what vLLM allocates. `attention_block_tokens` is the block that its log announces."""

    version: tuple[int, int] = (0, 32)
    block_tokens: int = BLOCK_TOKENS
    max_model_len: int = 8192
    max_num_batched_tokens: int = 8192
    kv_dtype: FormatChoice = "auto"
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    prefix_caching: bool = True
    draft_tokens: int = 0
    state_mode: str = "auto"
    attention_block_tokens: int | None = None
    hybrid_manager: bool = True
    concurrent_batches: int | None = None

    @property
    def in_flight_tokens(self) -> int:
        """Tokens scheduled and not yet settled: windows are charged for them. One batch, later one per stage or two."""
        if self.version < IN_FLIGHT_SINCE:
            return self.max_num_batched_tokens
        batches = self.concurrent_batches or (2 if self.pp == 1 else self.pp)
        return batches * self.max_num_batched_tokens

    @property
    def resolved_state_mode(self) -> str:
        """`none`, `align` or `all`: `auto` follows prefix caching, as `--mamba-cache-mode` does."""
        if self.state_mode == "auto":
            return "align" if self.prefix_caching else "none"
        if self.state_mode not in {"none", "align", "all"}:
            raise ConfigError(f"mamba cache mode must be none, align or all, not {self.state_mode!r}")
        return self.state_mode


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block tables: `count` groups of the layout's size; a page holds `block_tokens`."""

    kind: Kind
    count: int
    layers: int
    block_tokens: int
    span_tokens: int = 0

    def pages(self, tokens: int, settings: VLLM) -> int:
        """Pages of one group for a request of `tokens`, the most it ever holds."""
        match self.kind:
            case Kind.SLIDING:
                reach = min(self.span_tokens - 1 + settings.in_flight_tokens, tokens)
                return -(-reach // self.block_tokens) + 1
            case Kind.CHUNKED:
                return -(-min(self.span_tokens + settings.in_flight_tokens, tokens) // self.block_tokens)
            case Kind.STATE:
                return self._state_pages(tokens, settings)
            case _:
                return -(-tokens // (self.block_tokens * settings.dcp))

    def _state_pages(self, tokens: int, settings: VLLM) -> int:
        match settings.resolved_state_mode:
            case "all":
                return -(-tokens // self.block_tokens) + settings.draft_tokens
            case "align":
                return 2 + settings.draft_tokens
            case _:
                return 1 + settings.draft_tokens


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's pool: `groups`, each page `page_bytes`, `group_layers` pages to a block."""

    settings: VLLM
    groups: tuple[Group, ...]
    page_bytes: int
    group_layers: int
    padding_layers: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block id on this rank: a page in each layer of a group."""
        return self.page_bytes * self.group_layers

    @property
    def group_count(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def block_tokens(self) -> int:
        """The block of the full attention layers: what the log calls block size."""
        full = next((group for group in self.groups if group.kind in {Kind.FULL, Kind.LATENT}), self.groups[0])
        return full.block_tokens

    def blocks(self, available_bytes: int) -> int:
        """`num_gpu_blocks`; one of them is the null block and never given out."""
        if available_bytes < 0:
            raise ConfigError(
                f"vLLM would have {available_bytes} bytes for its KV cache",
                hint="Weights and activations already exceed gpu_memory_utilization x memory.",
            )
        return available_bytes // self.block_bytes

    def usable_blocks(self, blocks: int) -> int:
        """Blocks that requests can get: all but the null block (V1), or but the watermark of 1 % (V0, before 0.9)."""
        if self.settings.version < V1_SINCE:
            return blocks - int(V0_WATERMARK * blocks)
        return max(0, blocks - 1)

    def pages(self, tokens: int) -> int:
        """Blocks that one request of `tokens` is charged, over all groups."""
        return sum(group.count * group.pages(tokens, self.settings) for group in self.groups)

    def request_bytes(self, tokens: int) -> int:
        """Bytes of those blocks on one rank."""
        return self.pages(tokens) * self.block_bytes

    def concurrency(self, blocks: int, tokens: int | None = None) -> float:
        """Requests of `tokens` (default `max_model_len`) that `blocks` hold: the log's "Maximum concurrency"."""
        return blocks / self.pages(tokens or self.settings.max_model_len)

    def printed_tokens(self, blocks: int) -> int:
        """The log's "GPU KV cache size", whose meaning changed in 0.21. A capacity only for uniform layers."""
        settings = self.settings
        if settings.version >= CONCURRENCY_LINE_SINCE:
            return blocks * settings.max_model_len // self.pages(settings.max_model_len)
        return blocks // self.group_count * self.block_tokens * settings.dcp


def layout(spec: ModelSpec, settings: VLLM) -> Layout:
    """The pool layout of the fullest rank. ConfigError if vLLM would refuse the parallel sizes."""
    _check_heads(spec, settings.tp)
    source = spec.with_draft() if settings.draft_tokens else spec
    stages = source.stages(settings.tp, settings.pp)
    return max((_rank_layout(spec, stage, settings) for stage in stages), key=lambda made: made.block_bytes)


def blocks_over_ranks(made: Layout, available_bytes: Sequence[int]) -> int:
    """The pool of a deployment: every rank gets the blocks of the poorest."""
    if not available_bytes:
        raise ConfigError("no rank to take the minimum over")
    return min(made.blocks(available) for available in available_bytes)


def _check_heads(spec: ModelSpec, tp: int) -> None:
    for layer in spec.layers:
        heads = layer.kv_heads
        if layer.kind in {Kind.FULL, Kind.SLIDING, Kind.CHUNKED} and heads % tp and tp % heads:
            raise ConfigError(
                f"vLLM cannot split {heads} KV heads over {tp} ranks",
                hint=f"Choose a tensor-parallel size that divides {heads} or is a multiple of it.",
            )


def _rank_layout(spec: ModelSpec, stage: Sequence[Layer], settings: VLLM) -> Layout:
    k_fmt, v_fmt = spec.formats(_kv_dtype(stage, settings), None, None)
    kept = [layer for layer in stage if layer.kind not in {Kind.NONE, Kind.SHARED, Kind.CROSS}]
    if not kept:
        raise ConfigError("a pipeline stage without any cache: choose fewer stages")
    if any(layer.kind is Kind.COMPRESSED for layer in kept):
        return _compressed(spec, kept, k_fmt, settings)
    if not settings.hybrid_manager:
        kept = [replace(layer, kind=Kind.FULL, span_tokens=0) if layer.kind in _WINDOWED else layer for layer in kept]
    return _grouped(kept, k_fmt, v_fmt, settings)


def _compressed(spec: ModelSpec, kept: list[Layer], k_fmt: Format, settings: VLLM) -> Layout:
    if settings.version < vllm_compressed.SINCE:
        raise ConfigError(
            f"the pages of a {spec.architecture} are only known for vLLM {vllm_compressed.SINCE[0]}."
            f"{vllm_compressed.SINCE[1]} and later",
            hint="Use kv_bytes for what the model itself needs.",
        )
    made = vllm_compressed.buckets(kept, k_fmt)
    counts, block_bytes = vllm_compressed.split(made)
    groups = tuple(
        Group(bucket.kind, count, len(bucket.pages), bucket.block_tokens, bucket.span_tokens)
        for bucket, count in zip(made, counts, strict=True)
    )
    return Layout(settings, groups, block_bytes, 1, 0)


def _kv_dtype(stage: Sequence[Layer], settings: VLLM) -> FormatChoice:
    """vLLM turns fp8 into its mixed format for latents with a sparse index."""
    indexed = any(layer.kind is Kind.LATENT and layer.index_dim for layer in stage)
    return MIXED_LATENT if indexed and settings.kv_dtype == "fp8" else settings.kv_dtype


_WINDOWED = frozenset({Kind.SLIDING, Kind.CHUNKED})


def token_bytes(layer: Layer, k_fmt: Format, v_fmt: Format, tp: int) -> int:
    """Bytes of one token of one attention layer on one rank, its index included."""
    return layer.k_bytes(k_fmt, tp) + layer.v_bytes(v_fmt, tp) + layer.index_bytes(k_fmt)


def _grouped(layers: list[Layer], k_fmt: Format, v_fmt: Format, settings: VLLM) -> Layout:
    kinds: dict[tuple[Kind, int], list[Layer]] = {}
    for layer in layers:
        kind = Kind.FULL if layer.kind is Kind.LATENT else layer.kind
        kinds.setdefault((kind, layer.span_tokens), []).append(layer)
    if len(kinds) == 1 and (Kind.STATE, 0) not in kinds:
        return _uniform(layers, k_fmt, v_fmt, settings)
    counts = [len(members) for members in kinds.values()]
    slack = GROUP_SLACK if settings.version < IN_FLIGHT_SINCE else LATER_GROUP_SLACK
    size = max(counts) if max(counts) < min(counts) * slack else min(counts)
    page, blocks = _unified_page(kinds, k_fmt, v_fmt, settings)
    groups = tuple(
        Group(kind, -(-len(members) // size), len(members), blocks[kind, span], span)
        for (kind, span), members in kinds.items()
    )
    padding = sum(group.count * size - group.layers for group in groups)
    return Layout(settings, groups, page, size, padding)


def _uniform(layers: list[Layer], k_fmt: Format, v_fmt: Format, settings: VLLM) -> Layout:
    """One group: a block has a page in every layer, and pages may differ in size (an index beside a latent)."""
    block = settings.attention_block_tokens or settings.block_tokens
    total = sum(token_bytes(layer, k_fmt, v_fmt, settings.tp) for layer in layers) * block
    first = layers[0]
    return Layout(settings, (Group(first.kind, 1, len(layers), block, first.span_tokens),), total, 1, 0)


def _unified_page(
    kinds: dict[tuple[Kind, int], list[Layer]], k_fmt: Format, v_fmt: Format, settings: VLLM
) -> tuple[int, dict[tuple[Kind, int], int]]:
    """One page size for all kinds, and the block of each kind in tokens."""
    rates = {
        key: max(token_bytes(layer, k_fmt, v_fmt, settings.tp) for layer in members)
        for key, members in kinds.items()
        if key[0] is not Kind.STATE
    }
    base = settings.attention_block_tokens or settings.block_tokens
    states = [layer for (kind, _), members in kinds.items() if kind is Kind.STATE for layer in members]
    if states and settings.attention_block_tokens is None and rates:
        base = _block_for_states(kinds, states, max(rates.values()), settings)
    if not rates:
        return max(state_page_bytes(layer, settings) for layer in states), dict.fromkeys(kinds, settings.max_model_len)
    page = base * max(rates.values())
    fits = {key: page % (base * rate) == 0 for key, rate in rates.items()}
    if not all(fits.values()) and settings.version < IN_FLIGHT_SINCE:
        raise ConfigError(f"this vLLM cannot give layers of {sorted(rates.values())} bytes a token one page size")
    blocks = {key: page // rates[key] if fits.get(key) else base for key in kinds}
    return page, blocks


def _block_for_states(
    kinds: dict[tuple[Kind, int], list[Layer]], states: list[Layer], rate: int, settings: VLLM
) -> int:
    """The attention block whose page holds the largest state, in whole steps."""
    latent = any(layer.kind is Kind.LATENT for members in kinds.values() for layer in members)
    step = max(settings.block_tokens, LATENT_BLOCK_STEP if latent else STATE_BLOCK_STEP)
    state = max(state_page_bytes(layer, settings) for layer in states)
    return step * -(-state // (step * rate))


def state_page_bytes(layer: Layer, settings: VLLM) -> int:
    """A recurrent layer's page. With drafted tokens the convolution keeps their inputs too."""
    total = 0
    for tensor in layer.state:
        size = tensor.size_bytes(settings.tp)
        if tensor.name.startswith("conv") and settings.draft_tokens and tensor.window:
            size = size // tensor.window * (tensor.window + settings.draft_tokens)
        total += size
    return total


def available_bytes(
    total: float, utilization: float, *, weights: float, non_torch: float, activation: float, graphs: float = 0.0
) -> float:
    """`utilization x total - weights - non_torch - activation [- graphs, profiled by default from 0.21 on]`."""
    if not 0 < utilization <= 1:
        raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, not {utilization}")
    return utilization * total - weights - non_torch - activation - graphs
