"""The device table: sane figures, a source for each, and names as people write them."""

from __future__ import annotations

import pytest

from kvsteward.errors import ConfigError
from kvsteward.ledger.device import devices, find


def test_every_figure_is_sane_and_sourced() -> None:
    table = devices()
    assert len({device.name for device in table}) == len(table)
    for device in table:
        assert device.source
        assert 0 < device.usable_gib < device.memory_gib
        assert 100 < device.bandwidth_gb_s < 20_000
        assert device.fp8_tflops is None or device.fp8_tflops >= device.bf16_tflops


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("rtx-5090", "RTX 5090"), ("h200", "H200 SXM"), ("MI300X", "MI300X"),
        ("NVIDIA L40S", "L40S"), ("l4", "L4"), ("B200", "B200"), ("A100 SXM 80GB", "A100 SXM 80GB"), ("A10", "A10"),
    ],
)  # fmt: skip
def test_names(written: str, name: str) -> None:
    assert find(written).name == name


@pytest.mark.parametrize("written", ["", "A100", "TPU v9"])
def test_no_name_is_guessed(written: str) -> None:
    with pytest.raises(ConfigError):
        find(written)


@pytest.mark.parametrize(
    ("name", "memory_gib", "bandwidth"),
    [("H100 SXM", 80, 3350), ("H200 SXM", 141, 4800), ("RTX 4090", 24, 1008), ("MI300X", 192, 5300), ("L4", 24, 300)],
)
def test_sheet_values(name: str, memory_gib: float, bandwidth: float) -> None:
    device = find(name)
    assert (device.memory_gib, device.bandwidth_gb_s) == (memory_gib, bandwidth)
