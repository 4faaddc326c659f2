"""From a budget in bytes to tokens, for each engine, and back.

Knows the engines by name and hands over to `alloc`. Invariant: what is said to fit does fit; every figure carries the
formula it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvsteward.errors import ConfigError
from kvsteward.ledger.alloc import llamacpp, sglang, transformers, vllm
from kvsteward.ledger.figures import Figure, table
from kvsteward.ledger.spec import FormatChoice, ModelSpec


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of `capacity_tokens`, as the engines' rules take them."""

    max_model_len: int = 8192
    block_tokens: int | None = None
    tp: int = 1
    pp: int = 1
    kv_dtype: FormatChoice = "auto"
    k_dtype: FormatChoice | None = None
    v_dtype: FormatChoice | None = None
    max_num_batched_tokens: int = 8192
    version: tuple[int, int] = (0, 32)
    prefix_caching: bool = True
    draft_tokens: int = 0
    slots: int = 1
    unified: bool = False


@dataclass(frozen=True, slots=True)
class Capacity:
    """`tokens` that fit in requests of `max_model_len`, `requests` of that length, and how both were found."""

    engine: str
    tokens: int
    requests: float
    request_bytes: int
    figures: tuple[Figure, ...] = field(default=())

    def __int__(self) -> int:
        return self.tokens

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Name, value, formula, source: one row a figure."""
        return table(self.figures)

    def to_dict(self) -> dict[str, object]:
        return {
            "engine": self.engine,
            "tokens": self.tokens,
            "requests": round(self.requests, 4),
            "request_bytes": self.request_bytes,
            "figures": [figure.to_dict() for figure in self.figures],
        }


def capacity_tokens(
    spec: ModelSpec,
    kv_bytes: int,
    *,
    engine: str = "vllm",
    max_model_len: int = 8192,
    block_size: int | None = None,
    tp: int = 1,
    pp: int = 1,
    kv_dtype: FormatChoice = "auto",
    k_dtype: FormatChoice | None = None,
    v_dtype: FormatChoice | None = None,
    max_num_batched_tokens: int = 8192,
    version: tuple[int, int] = (0, 32),
    prefix_caching: bool = True,
    draft_tokens: int = 0,
    slots: int = 1,
    unified: bool = False,
) -> Capacity:
    """What `kv_bytes` on one rank hold under the allocation rules of `engine`, in requests of `max_model_len` tokens.

    Engines: vllm, vllm-cpu, sglang, llamacpp, transformers, blocks (equal blocks and nothing else). `slots` and
    `unified` are llama.cpp's, `version` is vLLM's. ConfigError for an unknown engine or sizes it would refuse.
    """
    rule = _ENGINES.get(engine)
    if rule is None:
        raise ConfigError(f"unknown engine {engine!r}", hint=f"Known engines: {', '.join(_ENGINES)}.")
    sizes = (max_model_len, tp, pp, max_num_batched_tokens, slots, 1 if block_size is None else block_size)
    if kv_bytes < 0 or min(sizes) < 1 or draft_tokens < 0:
        raise ConfigError(f"no such cache: {kv_bytes} bytes, sizes {sizes}, {draft_tokens} drafted tokens")
    request = _Request(
        max_model_len, block_size, tp, pp, kv_dtype, k_dtype, v_dtype, max_num_batched_tokens, version,
        prefix_caching, draft_tokens, slots, unified,
    )  # fmt: skip
    return rule(spec, kv_bytes, request)


def _vllm(spec: ModelSpec, kv_bytes: int, request: _Request, *, block: int = vllm.BLOCK_TOKENS) -> Capacity:
    settings = vllm.VLLM(
        version=request.version,
        block_tokens=request.block_tokens or block,
        max_model_len=request.max_model_len,
        max_num_batched_tokens=request.max_num_batched_tokens,
        kv_dtype=request.kv_dtype,
        tp=request.tp,
        pp=request.pp,
        prefix_caching=request.prefix_caching,
        draft_tokens=request.draft_tokens,
    )
    made = vllm.layout(spec, settings)
    blocks, pages = made.blocks(kv_bytes), made.pages(request.max_model_len)
    source = "vllm/v1/core/kv_cache_utils.py"
    simple = made.group_count == 1
    tokens = blocks * made.block_tokens if simple else blocks * request.max_model_len // pages
    per_block = f"{made.page_bytes:,} B a page x {made.group_layers} layers"
    how = f"{blocks:,} x {made.block_tokens}" if simple else f"{blocks:,} / {pages:,} x {request.max_model_len:,}"
    figures = (
        Figure("block", made.block_bytes, "B", per_block, source),
        Figure("blocks", blocks, "blocks", f"floor({kv_bytes:,} / {made.block_bytes:,})", source),
        Figure("pages per request", pages, "blocks", _pages_formula(made, request.max_model_len), source),
        Figure("tokens", tokens, "tokens", how, source),
    )
    return Capacity("vllm", tokens, blocks / pages, pages * made.block_bytes, figures)


def _pages_formula(made: vllm.Layout, tokens: int) -> str:
    parts = [f"{group.count} {group.kind} x {group.pages(tokens, made.settings)}" for group in made.groups]
    return " + ".join(parts)


def _vllm_cpu(spec: ModelSpec, kv_bytes: int, request: _Request) -> Capacity:
    return replace(_vllm(spec, kv_bytes, request, block=vllm.CPU_BLOCK_TOKENS), engine="vllm-cpu")


def _sglang(spec: ModelSpec, kv_bytes: int, request: _Request) -> Capacity:
    settings = sglang.SGLang(
        page_tokens=request.block_tokens or 1,
        kv_dtype=request.kv_dtype,
        tp=request.tp,
        draft_tokens=request.draft_tokens,
    )
    made = sglang.pools(spec, kv_bytes, settings)
    source = "sglang/srt/mem_cache/memory_pool.py"
    figures = (
        Figure("max_total_num_tokens", made.tokens, "tokens", "bytes left / bytes per token, whole pages", source),
        Figure("window tokens", made.window_tokens, "tokens", f"{settings.window_ratio} x tokens", source),
        Figure("state slots", made.state_slots, "slots", "share of the bytes / state, less the sink", source),
    )
    requests = made.tokens / request.max_model_len
    if made.state_slots:
        requests = min(requests, float(made.state_slots))
    size = spec.kv_bytes(request.max_model_len, kv_dtype=request.kv_dtype, tp=request.tp)
    return Capacity("sglang", made.tokens, requests, size, figures)


def _llamacpp(spec: ModelSpec, kv_bytes: int, request: _Request) -> Capacity:
    settings = llamacpp.LlamaCpp(
        slots=request.slots,
        unified=request.unified,
        k_type=_type_name(request.k_dtype or request.kv_dtype),
        v_type=_type_name(request.v_dtype or request.kv_dtype),
    )
    context = llamacpp.context_for(spec, kv_bytes, settings)
    one = llamacpp.buffers(spec, replace(settings, n_ctx=max(1, request.max_model_len), slots=1))
    source = "llama.cpp src/llama-kv-cache.cpp, llama-kv-cache-iswa.cpp"
    how = f"the longest n_ctx whose buffers fit {kv_bytes:,} B, {request.slots} slots"
    per_slot = context if request.unified else context // request.slots
    figures = (
        Figure("n_ctx", context, "tokens", how, source),
        Figure("context of a slot", per_slot, "tokens", "n_ctx / slots, or n_ctx if unified", source),
    )
    return Capacity("llamacpp", context, context / request.max_model_len, one.total_bytes, figures)


def _type_name(choice: FormatChoice) -> str:
    """A cache type's name; `auto` is f16, llama.cpp's default."""
    name = choice if isinstance(choice, str) else choice.name
    return "f16" if name == "auto" else name


def _transformers(spec: ModelSpec, kv_bytes: int, request: _Request) -> Capacity:
    size = transformers.dynamic_bytes(spec, request.max_model_len, kv_dtype=request.kv_dtype)
    if size == 0:
        raise ConfigError("a request of no bytes: give max_model_len")
    requests = kv_bytes // size
    figure = Figure("requests", requests, "requests", f"floor({kv_bytes:,} / {size:,})", "transformers DynamicCache")
    return Capacity("transformers", requests * request.max_model_len, float(requests), size, (figure,))


def _blocks(spec: ModelSpec, kv_bytes: int, request: _Request) -> Capacity:
    budget = tokens_in(
        spec,
        kv_bytes,
        block_tokens=request.block_tokens or 16,
        kv_dtype=request.kv_dtype,
        k_dtype=request.k_dtype,
        v_dtype=request.v_dtype,
        tp=request.tp,
        pp=request.pp,
    )
    how = f"floor({kv_bytes:,} / {budget.block_bytes:,}) x {budget.block_tokens}"
    figure = Figure("tokens", budget.tokens, "tokens", how, "2 x layers x kv_heads x head_dim x bytes")
    size = -(-request.max_model_len // budget.block_tokens) * budget.block_bytes
    return Capacity("blocks", budget.tokens, budget.tokens / request.max_model_len, size, (figure,))


_ENGINES: dict[str, Callable[[ModelSpec, int, _Request], Capacity]] = {
    "vllm": _vllm,
    "vllm-cpu": _vllm_cpu,
    "sglang": _sglang,
    "llamacpp": _llamacpp,
    "transformers": _transformers,
    "blocks": _blocks,
}


@dataclass(frozen=True, slots=True)
class BlockBudget:
    """How many blocks a budget holds. `tokens` is what fits, `left_bytes` what no whole block can use."""

    blocks: int
    block_tokens: int
    block_bytes: int
    left_bytes: int

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens


def tokens_in(
    spec: ModelSpec,
    budget_bytes: int,
    *,
    block_tokens: int = 16,
    kv_dtype: FormatChoice = "auto",
    k_dtype: FormatChoice | None = None,
    v_dtype: FormatChoice | None = None,
    tp: int = 1,
    pp: int = 1,
) -> BlockBudget:
    """`floor(budget / (bytes_per_token x block))` blocks on the fullest rank. ConfigError for a nonsensical budget."""
    if budget_bytes < 0 or block_tokens < 1:
        raise ConfigError(f"no such budget: {budget_bytes} bytes in blocks of {block_tokens} tokens")
    per_token = spec.kv_bytes_per_token(kv_dtype=kv_dtype, k_dtype=k_dtype, v_dtype=v_dtype, tp=tp, pp=pp)
    if per_token == 0:
        raise ConfigError(f"a {spec.architecture} has no cache that grows with its context")
    block = per_token * block_tokens
    return BlockBudget(budget_bytes // block, block_tokens, block, budget_bytes % block)


def budget_for(spec: ModelSpec, tokens: int, *, block_tokens: int = 16, kv_dtype: FormatChoice = "auto") -> int:
    """Bytes of the whole blocks that hold `tokens` on one rank: the inverse of `tokens_in`."""
    if tokens < 0 or block_tokens < 1:
        raise ConfigError(f"no such demand: {tokens} tokens in blocks of {block_tokens}")
    return -(-tokens // block_tokens) * block_tokens * spec.kv_bytes_per_token(kv_dtype=kv_dtype)
