"""A model as the ledger sees it: its layers, and what one sequence of it costs.

Built from a Hugging Face config or a GGUF header; says which values were filled in because the file left them out.
Knows nothing of engines and their blocks (`alloc`) or of hardware (`device`). Invariant: the figures of the ranks and
the layers add up to those of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvsteward.errors import ConfigError
from kvsteward.ledger.formats import Format, resolve
from kvsteward.ledger.layers import Kind, Layer

FormatChoice = Format | str


@dataclass(frozen=True, slots=True)
class Assumption:
    """A value that the file did not give: what was used instead and why."""

    field: str
    value: object
    reason: str

    def to_dict(self) -> dict[str, object]:
        return {"field": self.field, "value": self.value, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters by how a quantised checkpoint stores them. `exact_bytes`: the sum over a file's tensors.

    `active_linear` are the linear ones that one token uses: fewer than `linear` in a mixture of experts;
    `linear_format` is how the checkpoint stores them, None for the model's own dtype.
    """

    linear: int
    embedding: int
    other: int
    exact_bytes: int | None = None
    active_linear: int | None = None
    linear_format: Format | None = None

    @property
    def active(self) -> int:
        """Parameters that one token's arithmetic touches."""
        return self.linear if self.active_linear is None else self.active_linear

    @property
    def total(self) -> int:
        return self.linear + self.embedding + self.other


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model. `layers` are the decoder's; `draft_layers` those of a built-in draft (MTP), loaded only if used."""

    architecture: str
    layers: tuple[Layer, ...]
    hidden_size: int
    attention_heads: int
    vocab_size: int
    max_context_tokens: int | None
    dtype: str
    weights: Weights | None = None
    draft_layers: tuple[Layer, ...] = ()
    encoder_tokens: int = 0
    vision_tokens_per_image: int | None = None
    kv_dtype_hint: str | None = None
    assumed: tuple[Assumption, ...] = field(default=())

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], *, quant: Mapping[str, Any] | None = None) -> ModelSpec:
        """From a `config.json`, and `hf_quant_config.json` where there is one.

        ConfigError names the key that is missing or makes no sense.
        """
        from kvsteward.ledger.hf import read_config  # the readers build specs: they need this module first

        return read_config(config, quant)

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> ModelSpec:
        """From a GGUF file's key-value pairs (see `gguf.parse_header`). ConfigError as above."""
        from kvsteward.ledger.gguf_spec import read_metadata

        return read_metadata(metadata)

    def kv_bytes_per_token(
        self,
        *,
        kv_dtype: FormatChoice = "auto",
        k_dtype: FormatChoice | None = None,
        v_dtype: FormatChoice | None = None,
        tp: int = 1,
        pp: int = 1,
        at_context_tokens: int = 0,
    ) -> int:
        """Bytes that one more token adds on the fullest rank, rounded up to whole bytes.

        Every window still grows at `at_context_tokens` 0; give a longer context to leave full windows out.
        """
        k_fmt, v_fmt = self.formats(kv_dtype, k_dtype, v_dtype)
        return max(
            sum(_layer_rate(layer, k_fmt, v_fmt, tp, at_context_tokens) for layer in stage)
            for stage in self.stages(tp, pp)
        )

    def kv_bytes(
        self,
        context_tokens: int,
        *,
        kv_dtype: FormatChoice = "auto",
        k_dtype: FormatChoice | None = None,
        v_dtype: FormatChoice | None = None,
        tp: int = 1,
        pp: int = 1,
        block_tokens: int = 1,
        encoder_tokens: int | None = None,
    ) -> int:
        """Bytes of one sequence of `context_tokens` on the fullest rank: keys, values, indexes and states.

        Contexts are rounded up to `block_tokens`. This is what the model needs; what an engine charges is in `alloc`.
        """
        if context_tokens < 0 or block_tokens < 1:
            raise ConfigError(f"no such sequence: {context_tokens} tokens in blocks of {block_tokens}")
        k_fmt, v_fmt = self.formats(kv_dtype, k_dtype, v_dtype)
        encoder = self.encoder_tokens if encoder_tokens is None else encoder_tokens
        return max(
            sum(layer_bytes(layer, context_tokens, k_fmt, v_fmt, tp, block_tokens, encoder) for layer in stage)
            for stage in self.stages(tp, pp)
        )

    def state_bytes(self, *, tp: int = 1, pp: int = 1) -> int:
        """Bytes of one sequence that do not grow with it (linear attention, SSM, convolutions), on the fullest rank."""
        return max(sum(layer.state_bytes(tp) for layer in stage) for stage in self.stages(tp, pp))

    def weight_bytes(self, dtype: FormatChoice = "auto") -> int:
        """Bytes of the weights: linear layers in `dtype`, embeddings, norms and output head in the model's own dtype.

        `auto` is how the checkpoint stores them: a GGUF file's own sum, or its config's quantisation. Towers for
        images and sound are not counted. ConfigError if the parameters cannot be counted.
        """
        if self.weights is None:
            raise ConfigError(
                f"the parameters of a {self.architecture} cannot be counted from its config",
                hint="Give the size of the weight files instead.",
            )
        stored = self.weights.exact_bytes
        if dtype == "auto" and stored is not None:
            return stored
        if dtype == "auto" and self.weights.linear_format is not None:
            dtype = self.weights.linear_format
        own = resolve("auto", self.dtype)
        rest = self.weights.embedding + self.weights.other
        return resolve(dtype, self.dtype).size_bytes(self.weights.linear) + own.size_bytes(rest)

    def formats(
        self, kv_dtype: FormatChoice, k_dtype: FormatChoice | None, v_dtype: FormatChoice | None
    ) -> tuple[Format, Format]:
        """The formats of keys and of values: their own if given, else `kv_dtype`; `auto` is the model's dtype."""
        return resolve(k_dtype or kv_dtype, self.dtype), resolve(v_dtype or kv_dtype, self.dtype)

    def stages(self, tp: int, pp: int) -> tuple[tuple[Layer, ...], ...]:
        """The layers of each pipeline stage. A remainder goes to the middle stages from the back, as vLLM does."""
        if tp < 1 or pp < 1:
            raise ConfigError(f"parallel sizes must be 1 or more, not TP {tp} and PP {pp}")
        if pp > len(self.layers):
            raise ConfigError(f"{len(self.layers)} layers cannot be split over {pp} pipeline stages")
        sizes = [len(self.layers) // pp] * pp
        for index in range(len(self.layers) % pp):
            sizes[-(index + 2)] += 1
        starts = [sum(sizes[:index]) for index in range(pp)]
        return tuple(self.layers[start : start + size] for start, size in zip(starts, sizes, strict=True))

    def count(self, kind: Kind) -> int:
        """How many decoder layers are of this kind."""
        return sum(1 for layer in self.layers if layer.kind is kind)

    def with_draft(self, draft: ModelSpec | None = None) -> ModelSpec:
        """The model with the layers of `draft`, or of its built-in one (MTP), as an engine that drafts allocates it."""
        more = self.draft_layers if draft is None else draft.layers
        return replace(self, layers=(*self.layers, *more))


def layer_bytes(
    layer: Layer, context_tokens: int, k_fmt: Format, v_fmt: Format, tp: int, block_tokens: int, encoder_tokens: int
) -> int:
    """What one layer of one sequence holds on one rank, in bytes."""
    padded = -(-context_tokens // block_tokens) * block_tokens
    entries = layer.entries(padded, encoder_tokens)
    kv = entries * (layer.k_bytes(k_fmt, tp) + layer.v_bytes(v_fmt, tp))
    return kv + layer.index_entries(padded) * layer.index_bytes(k_fmt) + layer.state_bytes(tp)


def _layer_rate(layer: Layer, k_fmt: Format, v_fmt: Format, tp: int, at_tokens: int) -> int:
    entry = layer.k_bytes(k_fmt, tp) + layer.v_bytes(v_fmt, tp)
    match layer.kind:
        case Kind.FULL | Kind.LATENT:
            return entry + layer.index_bytes(k_fmt)
        case Kind.SLIDING | Kind.CHUNKED:
            return entry if at_tokens < layer.span_tokens else 0
        case Kind.COMPRESSED:
            compressed = -(-(entry + layer.index_bytes(k_fmt)) // layer.ratio) if layer.ratio else 0
            return compressed + (entry if at_tokens < layer.span_tokens else 0)
        case _:
            return 0
