"""The worker's half: copies whole blocks between vLLM's KV tensors and the slots of the host pool.

A slot holds one block: for each rank its part, in it layer after layer the block's values in the logical order of
vLLM's per-layer view ([block, head, token, channel]), whatever the strides of the tensors are. So a block of one
layout of strides can be loaded into another; what a backend packs inside of that view is part of the fingerprint.

Copies are synchronous, on the current stream where there is a GPU: a load is done before the step's forward, a save
before the step's result is given back, so no block can change while it is copied. A GPU waits for the copies that way.

Knows torch's tensors and nothing else of vLLM. Invariant: a save followed by a load restores every byte of a block.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsteward.errors import ConfigError
from kvsteward.kv.vllm.segment import Segment, SegmentName

Pairs = Sequence[tuple[int, int]]
"""(slot, block) each."""
STAGING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's parts lie: at `offset_bytes` + slot x `slot_bytes` of the segment."""

    segment: SegmentName
    slots: int
    slot_bytes: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What a worker says of its tensors. `digest` covers names, shapes and dtypes of all layers; `backends` how each
    packs its values; `row` values lie side by side (those of a token and a head, keys and values)."""

    part_bytes: int
    layers: int
    heads: int
    row: int
    dtype: str
    value_bytes: int
    digest: str
    backends: str


@dataclass(frozen=True, slots=True)
class _Layer:
    """`rows` of a tensor make one block; `view` has whole numbers of the element's size, which copy any dtype. Where a
    block's bytes lie side by side, block n is at `address` + n x `step_bytes`; else `step_bytes` is 0."""

    view: Any
    rows: int
    start: int
    end: int
    address: int
    step_bytes: int


class Copies:
    """`caches`: vLLM's tensors by layer; dimension 0 counts blocks, or equal parts of them. `staged`: by way of a
    tensor on the device, as where there is one. Raises ConfigError where a tensor is not of that kind."""

    def __init__(
        self, torch: Any, caches: Mapping[str, Any], blocks: int, *, backends: str = "", staged: bool | None = None
    ) -> None:
        self._torch = torch
        self._layers: list[_Layer] = []
        self._slots: Any = None
        self._address = self._slot_bytes = 0
        self._count = blocks
        self._segment: Segment | None = None
        seen, described, end = set(), [], 0
        for name, cache in caches.items():
            where = (cache.data_ptr(), tuple(cache.shape), tuple(cache.stride()))
            if where in seen:  # layers that share their cache
                continue
            seen.add(where)
            if cache.dim() < 2 or cache.shape[0] % blocks:
                raise ConfigError(f"the KV of {name} has the shape {tuple(cache.shape)}, not {blocks} blocks")
            whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(cache.element_size())
            if whole is None:
                raise ConfigError(f"the KV of {name} has values of {cache.element_size()} bytes")
            start, end = end, end + cache.numel() // blocks * cache.element_size()
            rows = cache.shape[0] // blocks
            step = cache.stride(0) * rows * cache.element_size() if _dense(cache, rows) else 0
            self._layers.append(_Layer(cache.view(whole), rows, start, end, cache.data_ptr(), step))
            described.append([name, list(cache.shape[1:]), cache.shape[0] // blocks, str(cache.dtype)])
        if not self._layers:
            raise ConfigError("this worker has no KV tensors")
        first = next(iter(caches.values()))
        digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]
        self.shape = Shape(
            part_bytes=end,
            layers=len(described),
            heads=int(first.shape[1]),
            row=int(first.shape[-1]),
            dtype=str(first.dtype),
            value_bytes=first.element_size(),
            digest=digest,
            backends=backends,
        )
        self._device = first.device
        self._staged = self._device.type != "cpu" if staged is None else staged
        self._batch = max(1, STAGING_BYTES // end)

    def attach(self, place: Place) -> None:
        """Maps the host pool; a second call does nothing. Raises ConfigError where it cannot be."""
        if self._segment is not None:
            return
        segment = Segment.attach(place.segment)
        flat = self._torch.frombuffer(segment.view, dtype=self._torch.uint8)
        if self._device.type == "cuda":
            status = self._torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), 0)
            if int(status):
                raise ConfigError(f"the host pool cannot be pinned: CUDA error {int(status)}")
        self._address, self._slot_bytes = flat.data_ptr() + place.offset_bytes, place.slot_bytes
        self._slots = flat.as_strided(
            (place.slots, self.shape.part_bytes), (place.slot_bytes, 1), storage_offset=place.offset_bytes
        )
        self._segment = segment

    def load(self, pairs: Pairs) -> None:
        """Slots to blocks."""
        if not self._staged:
            self._move(pairs, into_blocks=True)
            return
        for batch in self._batches(pairs):
            blocks = self._blocks(batch)
            parts = self._up(batch)
            for layer in self._layers:
                values = parts[:, layer.start : layer.end].contiguous().view(layer.view.dtype)
                shape = (len(batch) * layer.rows, *layer.view.shape[1:])
                layer.view.index_copy_(0, self._rows(blocks, layer.rows), values.view(shape))
            self._wait()

    def save(self, pairs: Pairs) -> None:
        """Blocks to slots."""
        if not self._staged:
            self._move(pairs, into_blocks=False)
            return
        for batch in self._batches(pairs):
            blocks = self._blocks(batch)
            self._down(batch, [self._gather(layer, blocks, batch) for layer in self._layers])

    def _move(self, pairs: Pairs, *, into_blocks: bool) -> None:
        """In the CPU's memory, piece by piece: torch's indexed copies took 30 times as long here."""
        for slot, block in pairs:
            if not (0 <= slot < len(self._slots) and 0 <= block < self._count):
                raise IndexError(f"slot {slot} or block {block} is out of range")
            address = self._address + slot * self._slot_bytes
            for layer in self._layers:
                if layer.step_bytes:
                    here, there = layer.address + block * layer.step_bytes, address + layer.start
                    to, source = (here, there) if into_blocks else (there, here)
                    ctypes.memmove(to, source, layer.end - layer.start)
                    continue
                part = layer.view[block * layer.rows : (block + 1) * layer.rows]
                stored = self._slots[slot, layer.start : layer.end].view(layer.view.dtype).view(part.shape)
                if into_blocks:
                    part.copy_(stored)
                else:
                    stored.copy_(part)

    def _up(self, batch: Pairs) -> Any:
        """The slots' parts on the device, copied straight from pinned memory."""
        parts = self._torch.empty((len(batch), self.shape.part_bytes), dtype=self._torch.uint8, device=self._device)
        for row, (slot, _) in enumerate(batch):
            parts[row].copy_(self._slots[slot], non_blocking=True)
        return parts

    def _down(self, batch: Pairs, layers: Sequence[Any]) -> None:
        parts = self._torch.cat(layers, dim=1)
        for row, (slot, _) in enumerate(batch):
            self._slots[slot].copy_(parts[row], non_blocking=True)
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.current_stream(self._device).synchronize()

    def _gather(self, layer: _Layer, blocks: Any, batch: Pairs) -> Any:
        values = layer.view.index_select(0, self._rows(blocks, layer.rows))
        return values.reshape(len(batch), -1).view(self._torch.uint8)

    def _batches(self, pairs: Pairs) -> list[Pairs]:
        return [pairs[i : i + self._batch] for i in range(0, len(pairs), self._batch)]

    def _blocks(self, batch: Pairs) -> Any:
        return self._torch.tensor([block for _, block in batch], dtype=self._torch.int64).to(self._device)

    def _rows(self, blocks: Any, rows: int) -> Any:
        if rows == 1:
            return blocks
        return (blocks[:, None] * rows + self._torch.arange(rows, device=blocks.device)).flatten()


def _dense(cache: Any, rows: int) -> bool:
    """A block's bytes lie side by side, in the order of its values."""
    expected = 1
    for size, stride in zip(reversed(cache.shape[1:]), reversed(cache.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return rows == 1 or cache.stride(0) == expected
