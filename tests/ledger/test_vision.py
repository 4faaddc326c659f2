"""Image tokens of the models' own processors."""

from __future__ import annotations

from typing import Any

import pytest

from kvsteward.errors import ConfigError
from kvsteward.ledger.vision import image_tokens

QWEN = {"vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
LLAVA = {"vision_config": {"patch_size": 14, "image_size": 336}}
INTERN = {
    "downsample_ratio": 0.5, "min_dynamic_patch": 1, "max_dynamic_patch": 12,
    "vision_config": {"patch_size": 14, "image_size": 448},
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "width", "height", "tokens"),
    [
        ({"mm_tokens_per_image": 256}, 4_000, 300, 256),
        ({"vision_soft_tokens_per_image": 280}, 64, 64, 280),
        (QWEN, 1_024, 1_024, 1_024),
        (QWEN, 640, 480, 300),
        (QWEN, 1, 1, 1),
        ({"vision_config": {"patch_size": 14, "merge_kernel_size": [2, 2]}}, 280, 280, 100),
        (LLAVA, 1_920, 1_080, 576),
        (INTERN, 448, 448, 256),
        (INTERN, 896, 448, 3 * 256),
        (INTERN, 896, 896, 5 * 256),
    ],
)
def test_tokens(config: dict[str, Any], width: int, height: int, tokens: int) -> None:
    assert image_tokens(config, width, height) == tokens


@pytest.mark.parametrize(("width", "height"), [(0, 10), (10, -1), (10**6, 10)])
def test_sizes_are_bounded(width: int, height: int) -> None:
    with pytest.raises(ConfigError):
        image_tokens(QWEN, width, height)


@pytest.mark.parametrize("config", [{}, {"vision_config": {}}, {"vision_config": {"patch_size": 14}}])
def test_what_is_missing_is_named(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"vision_config|patch_size|image_size"):
        image_tokens(config, 100, 100)
