"""A model file on disk as the ledger sees it: `describe_gguf(path)`.

Reads only the header; the format and the arithmetic are `kvsteward.ledger`'s. Invariant: a file
that is not a whole GGUF raises ConfigError that names it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvsteward.errors import ConfigError
from kvsteward.ledger import ModelSpec, parse_header, read_header

_HEADER_BYTES = 128 * 2**20
"""More than any header: a large vocabulary takes some ten MB."""


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """`weight_bytes`: the tensors. `context_tokens`: the model's own limit, None if the file does not say."""

    spec: ModelSpec
    weight_bytes: int

    @property
    def context_tokens(self) -> int | None:
        return self.spec.max_context_tokens

    def kv_bytes_per_token(self, k_type: str, v_type: str) -> int:
        """What one more token costs, over all layers. Raises ConfigError for an unknown cache type."""
        return self.spec.kv_bytes_per_token(k_dtype=k_type, v_dtype=v_type)


def describe_gguf(path: Path) -> GgufFacts:
    """Reads a GGUF header (some tens of milliseconds: call it off the event loop). Raises ConfigError."""
    try:
        with path.open("rb") as file:
            header = parse_header(file.read(_HEADER_BYTES), file_bytes=os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise ConfigError(f"cannot read the model file {path}: {error.strerror or error}", param="model") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param="model", hint="Download the model file again.") from error
    return GgufFacts(read_header(header), header.weight_bytes)
