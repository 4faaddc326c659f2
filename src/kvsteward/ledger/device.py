"""GPUs as a planner needs them: memory, bandwidth, arithmetic, links, each from its data sheet.

Knows no driver and measures nothing. Invariant: arithmetic is dense (no sparsity), bandwidth is the sheet's peak,
memory is the sheet's capacity in GiB; `usable_gib` is what CUDA or ROCm reports of it, a little less.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kvsteward.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `link_gb_s` is the total of one device to its peers, both ways, `link` what it is."""

    name: str
    memory_gib: float
    usable_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float
    fp8_tflops: float | None
    link: str
    link_gb_s: float
    source: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


_NVLINK4, _NVLINK5, _NVLINK3 = "NVLink 4", "NVLink 5", "NVLink 3"
_PCIE3, _PCIE4, _PCIE5, _FABRIC = "PCIe 3 x16", "PCIe 4 x16", "PCIe 5 x16", "Infinity Fabric"
_SHEET = "NVIDIA {} data sheet"

_DEVICES: tuple[Device, ...] = (
    Device("H100 SXM", 80, 79.2, 3350, 989, 1979, _NVLINK4, 900, "NVIDIA H100 Tensor Core GPU data sheet"),
    Device("H100 PCIe", 80, 79.1, 2000, 756, 1513, _PCIE5, 128, "NVIDIA H100 PCIe product brief PB-11133"),
    Device("H100 NVL", 94, 93.1, 3900, 835, 1671, _NVLINK4, 600, "NVIDIA H100 Tensor Core GPU data sheet"),
    Device("H200 SXM", 141, 139.8, 4800, 989, 1979, _NVLINK4, 900, "NVIDIA H200 Tensor Core GPU data sheet"),
    Device("H20", 96, 95.0, 4000, 148, 296, _NVLINK4, 900, "NVIDIA H20 data sheet"),
    Device("B200", 180, 178.3, 8000, 2250, 4500, _NVLINK5, 1800, "NVIDIA DGX B200 data sheet (per GPU)"),
    Device("GB200", 186, 184.0, 8000, 2500, 5000, _NVLINK5, 1800, "NVIDIA GB200 NVL72 data sheet (per GPU)"),
    Device("A100 SXM 40GB", 40, 39.4, 1555, 312, None, _NVLINK3, 600, "NVIDIA A100 Tensor Core GPU data sheet"),
    Device("A100 SXM 80GB", 80, 79.1, 2039, 312, None, _NVLINK3, 600, "NVIDIA A100 Tensor Core GPU data sheet"),
    Device("A100 PCIe 80GB", 80, 79.1, 1935, 312, None, _PCIE4, 64, "NVIDIA A100 Tensor Core GPU data sheet"),
    Device("A30", 24, 23.5, 933, 165, None, _PCIE4, 64, _SHEET.format("A30")),
    Device("A40", 48, 44.4, 696, 149.7, None, _PCIE4, 64, _SHEET.format("A40")),
    Device("A10", 24, 22.0, 600, 125, None, _PCIE4, 64, _SHEET.format("A10")),
    Device("A10G", 24, 22.1, 600, 70, None, _PCIE4, 64, "AWS EC2 G5 instance page; NVIDIA A10 data sheet"),
    Device("L4", 24, 22.0, 300, 121, 242, _PCIE4, 64, "NVIDIA L4 Tensor Core GPU data sheet"),
    Device("L40S", 48, 44.4, 864, 362, 733, _PCIE4, 64, _SHEET.format("L40S")),
    Device("L40", 48, 44.4, 864, 181, 362, _PCIE4, 64, _SHEET.format("L40")),
    Device("T4", 16, 14.6, 320, 65, None, _PCIE3, 32, "NVIDIA T4 data sheet (FP16; no BF16)"),
    Device("V100 32GB", 32, 31.7, 900, 125, None, "NVLink 2", 300, "NVIDIA V100 data sheet (FP16; no BF16)"),
    Device("RTX 3090", 24, 23.6, 936, 71, None, _PCIE4, 64, "NVIDIA Ampere GA102 whitepaper (FP32 accumulate)"),
    Device("RTX A6000", 48, 47.4, 768, 154.8, None, _PCIE4, 64, "NVIDIA RTX A6000 data sheet"),
    Device("RTX 6000 Ada", 48, 47.4, 960, 364, 728, _PCIE4, 64, "NVIDIA RTX 6000 Ada data sheet"),
    Device("RTX 4090", 24, 23.5, 1008, 165.2, 330.3, _PCIE4, 64, "NVIDIA Ada whitepaper (FP32 accumulate)"),
    Device("RTX 5090", 32, 31.4, 1792, 209.5, 419, _PCIE5, 128, "NVIDIA RTX Blackwell whitepaper (FP32 accumulate)"),
    Device("RTX PRO 6000", 96, 95.0, 1792, 503.8, 1007.6, _PCIE5, 128, "NVIDIA RTX Blackwell PRO whitepaper"),
    Device("GB10", 128, 119.7, 273, 125, 250, "ConnectX-7", 50, "NVIDIA DGX Spark data sheet (unified memory)"),
    Device("Jetson Thor", 128, 122.8, 273, 258, 517, "PCIe 5 x8", 64, "NVIDIA Jetson Thor data sheet (unified memory)"),
    Device("MI250X", 128, 127.5, 3277, 383, None, _FABRIC, 800, "AMD Instinct MI250X data sheet (two dies)"),
    Device("MI300X", 192, 191.5, 5300, 1307.4, 2614.9, _FABRIC, 896, "AMD Instinct MI300X data sheet"),
    Device("MI325X", 256, 255.5, 6000, 1307.4, 2614.9, _FABRIC, 896, "AMD Instinct MI325X data sheet"),
    Device("MI355X", 288, 287.5, 8000, 2516.6, 5033.2, _FABRIC, 1075, "AMD Instinct MI355X data sheet"),
    Device("Gaudi 3", 128, 126.5, 3700, 1835, 1835, "RoCE 24 x 200 GbE", 1200, "Intel Gaudi 3 white paper"),
)  # fmt: skip


def devices() -> tuple[Device, ...]:
    """The whole table."""
    return _DEVICES


def find(name: str) -> Device:
    """The device of that name: case, blanks and hyphens do not matter, nor do `NVIDIA`, `GeForce`, a unique part.

    ConfigError lists the candidates when there is none or more than one.
    """
    wanted = _key(name)
    exact = [device for device in _DEVICES if _key(device.name) == wanted]
    if exact:
        return exact[0]
    part = [device for device in _DEVICES if wanted and wanted in _key(device.name)]
    if not part:
        part = sorted((d for d in _DEVICES if _key(d.name) in wanted), key=lambda d: -len(_key(d.name)))[:1]
    if len(part) == 1:
        return part[0]
    known = ", ".join(device.name for device in part or _DEVICES)
    raise ConfigError(
        f"{'several devices match' if part else 'no device matches'} {name!r}", hint=f"Name one of: {known}."
    )


def _key(name: str) -> str:
    kept = "".join(letter for letter in name.lower() if letter.isalnum())
    for word in ("nvidia", "geforce", "amd", "instinct", "tensorcoregpu"):
        kept = kept.replace(word, "")
    return kept
