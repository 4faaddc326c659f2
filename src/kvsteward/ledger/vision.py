"""How many tokens an image puts into the context (or, for cross-attention, into the encoder's cache).

Knows the four ways of current models: a fixed number, a grid of merged patches, tiles, or all patches. Knows nothing of
the limits that a processor's own file sets (min and max pixels): give the size after its resize.
Invariant: at least one token, or a ConfigError.

Sources: the processors of Gemma 3 and 4 (fixed), Qwen-VL, GLM-V, Kimi and Ministral (grid), InternVL (tiles), LLaVA and
Llama 3.2 Vision (all patches) in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsteward.errors import ConfigError
from kvsteward.ledger.reading import Reader, whole

_FIXED = ("vision_soft_tokens_per_image", "mm_tokens_per_image")
LARGEST_SIDE = 65_536


def image_tokens(config: Mapping[str, Any], width: int, height: int) -> int:
    """Tokens of an image of `width` x `height` pixels. ConfigError if the config does not tell how it is cut."""
    if not (0 < width <= LARGEST_SIDE and 0 < height <= LARGEST_SIDE):
        raise ConfigError(f"an image cannot be {width} x {height} pixels")
    outer = Reader(config)
    fixed = outer.optional_count(*_FIXED, least=1)
    if fixed is not None:
        return fixed
    vision = outer.sub("vision_config") or _thinker(outer)
    if vision is None:
        raise ConfigError("no vision_config: the model takes no images, or its config is not whole")
    patch = vision.count("patch_size", "spatial_patch_size")
    merge = _merge(outer, vision)
    if merge is not None:
        return _grid(width, height, patch * merge)
    side = vision.count("image_size")
    if outer.has("downsample_ratio"):
        return _tiled(outer, width, height, side, patch)
    return (side // patch) ** 2


def _thinker(outer: Reader) -> Reader | None:
    thinker = outer.sub("thinker_config")
    return thinker.sub("vision_config") if thinker is not None else None


def _merge(outer: Reader, vision: Reader) -> int | None:
    """Patches a side that become one token, or None for models that do not merge by a grid."""
    for reader in (vision, outer):
        found = reader.optional_count("spatial_merge_size", least=1)
        if found is not None:
            return found
    kernel = vision.sequence("merge_kernel_size")
    return whole(kernel[0], vision.name("merge_kernel_size"), 1) if kernel else None


def _grid(width: int, height: int, step: int) -> int:
    """Sides rounded to whole merged patches, at least one."""
    return max(1, round(width / step)) * max(1, round(height / step))


def _tiled(outer: Reader, width: int, height: int, side: int, patch: int) -> int:
    """InternVL: the tiling nearest to the image's shape, and a thumbnail when there is more than one tile."""
    ratio = outer.raw("downsample_ratio")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ConfigError(f"{outer.name('downsample_ratio')} must be between 0 and 1, not {ratio!r}")
    least = outer.optional_count("min_dynamic_patch", least=1) or 1
    most = min(outer.optional_count("max_dynamic_patch", least=1) or 1, 256)
    shapes = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if least <= x * y <= most]
    best = min(shapes, key=lambda shape: (abs(width / height - shape[0] / shape[1]), shape[0] * shape[1]))
    tiles = _filled(shapes, best, width * height, side)
    return (tiles + (tiles > 1)) * int(side // patch * ratio) ** 2


def _filled(shapes: list[tuple[int, int]], best: tuple[int, int], pixels: int, side: int) -> int:
    """Among tilings of the same shape, the largest that the image fills by half."""
    same = [x * y for x, y in shapes if x * best[1] == y * best[0]]
    filled = [tiles for tiles in same if pixels > 0.5 * side * side * tiles]
    return max(filled, default=min(same))
