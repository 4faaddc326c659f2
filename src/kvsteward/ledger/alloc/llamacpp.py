"""llama.cpp's KV cache: cells, streams, the window cache, recurrent states.

Knows `llama_kv_cache`, `llama_kv_cache_iswa` and `llama_memory_recurrent`. Everything is allocated at start, for all
slots. Invariant: a cell holds one token of one stream; the window cache never has more cells than the full one.

- cells = n_ctx, padded to 256; split into one stream per slot unless the cache is unified;
- window cells = pad256(min(n_ctx, window x (slots if unified else 1) + n_ubatch)), or all cells with --swa-full;
- a row of a layer is `heads x head_dim` numbers in the cache type, whole blocks;
- a latent is kept once (no V buffer), or unfolded by builds and files without MLA;
- a state is f32: `slots x (draft depth + 1)` of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvsteward.errors import ConfigError
from kvsteward.ledger.formats import Format, get
from kvsteward.ledger.layers import Kind, Layer
from kvsteward.ledger.spec import ModelSpec

CELL_STEP = 256
LONGEST_CONTEXT = 2**31
STATE_DTYPE = "f32"


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """`-c`, `-np`, `-kvu`, `-ub`, `-ctk`, `-ctv`, `--swa-full`; `mla`: latent, latent+v (a second copy), expanded."""

    n_ctx: int = 4096
    slots: int = 1
    unified: bool = False
    n_ubatch: int = 512
    k_type: str = "f16"
    v_type: str = "f16"
    swa_full: bool = False
    draft_depth: int = 0
    mla: str = "latent"


@dataclass(frozen=True, slots=True)
class Buffers:
    """Cells per stream and bytes of each cache, over all streams."""

    streams: int
    cells: int
    window_cells: int
    k_bytes: int
    v_bytes: int
    window_k_bytes: int
    window_v_bytes: int
    state_bytes: int
    slot_tokens: int

    @property
    def kv_bytes(self) -> int:
        """The full-attention cache: `llama_kv_cache: size`."""
        return self.k_bytes + self.v_bytes

    @property
    def window_bytes(self) -> int:
        """The window cache."""
        return self.window_k_bytes + self.window_v_bytes

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.window_bytes + self.state_bytes


def pad(cells: int) -> int:
    """The next multiple of 256."""
    return -(-cells // CELL_STEP) * CELL_STEP


def buffers(spec: ModelSpec, settings: LlamaCpp) -> Buffers:
    """What llama-server allocates. ConfigError for sizes that it would refuse."""
    if settings.n_ctx < 1 or settings.slots < 1 or settings.n_ubatch < 1 or settings.draft_depth < 0:
        raise ConfigError("n_ctx, slots and n_ubatch must be 1 or more")
    streams = 1 if settings.unified else settings.slots
    slot_tokens = settings.n_ctx if settings.unified else settings.n_ctx // settings.slots
    cells = pad(slot_tokens)
    window_cells = _window_cells(spec, settings, cells)
    full = [layer for layer in spec.layers if layer.kind in {Kind.FULL, Kind.LATENT}]
    windowed = [layer for layer in spec.layers if layer.kind in {Kind.SLIDING, Kind.CHUNKED}]
    if any(layer.kind is Kind.COMPRESSED for layer in spec.layers):
        raise ConfigError(f"llama.cpp's cache for the compressed layers of a {spec.architecture} is not known here")
    k_fmt, v_fmt = get(settings.k_type), get(settings.v_type)
    return Buffers(
        streams=streams,
        cells=cells,
        window_cells=window_cells,
        k_bytes=streams * cells * sum(_k_row(layer, k_fmt, settings.mla) for layer in full),
        v_bytes=streams * cells * sum(_v_row(layer, v_fmt, settings.mla) for layer in full),
        window_k_bytes=streams * window_cells * sum(_k_row(layer, k_fmt, settings.mla) for layer in windowed),
        window_v_bytes=streams * window_cells * sum(_v_row(layer, v_fmt, settings.mla) for layer in windowed),
        state_bytes=settings.slots * (settings.draft_depth + 1) * _state(spec),
        slot_tokens=slot_tokens,
    )


def context_for(spec: ModelSpec, kv_bytes: int, settings: LlamaCpp) -> int:
    """The longest `n_ctx`, in steps of 256 per stream, whose buffers fit `kv_bytes`; 0 if none does."""
    step = CELL_STEP * (1 if settings.unified else settings.slots)
    low, high = 0, LONGEST_CONTEXT // step
    while low < high:
        middle = (low + high + 1) // 2
        fits = buffers(spec, replace(settings, n_ctx=middle * step)).total_bytes <= kv_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * step


def _window_cells(spec: ModelSpec, settings: LlamaCpp, cells: int) -> int:
    spans = {layer.span_tokens for layer in spec.layers if layer.kind in {Kind.SLIDING, Kind.CHUNKED}}
    if not spans:
        return 0
    if settings.swa_full:
        return cells
    window = max(spans) * (settings.slots if settings.unified else 1)
    return min(cells, pad(window + settings.n_ubatch))


def _k_row(layer: Layer, fmt: Format, mla: str) -> int:
    if layer.kind is Kind.LATENT and mla == "expanded":
        heads, k_dim, _ = _expanded(layer)
        return fmt.size_bytes(heads * k_dim)
    return fmt.size_bytes(layer.kv_heads * layer.k_dim)


def _v_row(layer: Layer, fmt: Format, mla: str) -> int:
    if layer.kind is not Kind.LATENT:
        return fmt.size_bytes(layer.kv_heads * layer.v_dim)
    if mla == "expanded":
        heads, _, v_dim = _expanded(layer)
        return fmt.size_bytes(heads * v_dim)
    return fmt.size_bytes(layer.k_dim - layer.rope_dim) if mla == "latent+v" else 0


def _expanded(layer: Layer) -> tuple[int, int, int]:
    if layer.expanded is None:
        raise ConfigError("the config does not say what the latent unfolds to (qk_nope_head_dim, v_head_dim)")
    return layer.expanded


def _state(spec: ModelSpec) -> int:
    return sum(tensor.size_bytes(1, STATE_DTYPE) for layer in spec.layers for tensor in layer.state)
