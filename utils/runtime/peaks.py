"""The published peak of a device: what a share of it is measured by."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from utils.generations import LAUNCHED, PCI_VENDOR, name_chip
from utils.runtime.start import get_start

if TYPE_CHECKING:
    from utils.runtime.base import Runtime

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_A100 = {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}
_HOPPER = {"bf16": 989.0, "fp16": 989.0, "tf32": 494.0, "fp32": 67.0}
# Dense TFLOP/s of one device by the type that its matmuls compute in, under the name that the
# device gives itself. Sources: the table of TPU generations; NVIDIA's data sheets of T4, V100,
# A100, L4, H100 and H200, halved where a sheet counts structured sparsity. What is not published is
# not here: a TPU's fp32.
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    **{f"TPU {one.name}": {"bf16": one.chip_tflops / one.seen_per_chip} for one in LAUNCHED},
    "Tesla T4": {"fp16": 65.0, "fp32": 8.1},
    "Tesla V100-SXM2-16GB": {"fp16": 125.0, "fp32": 15.7},
    "Tesla V100-SXM2-32GB": {"fp16": 125.0, "fp32": 15.7},
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA L4": {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3},
    "NVIDIA H100 80GB HBM3": _HOPPER,
    "NVIDIA H200": _HOPPER,
}


def find_peak_tflops(runtime: Runtime) -> float | None:
    """Dense TFLOP/s of one of a runtime's devices in its precision; none where it is not known."""
    section = runtime.section
    hardware = name_hardware(runtime.describe().get("hardware", ""))
    return get_peak_tflops(hardware, section.precision, tf32=section.tf32)


def name_chip_of(runtime: Runtime) -> str:
    """The generation of a runtime's TPU, such as v5e; empty: it has none, or none that tells."""
    return _cut(name_hardware(runtime.describe().get("hardware", "")))


def name_planned_chip(device: str) -> str:
    """The same before a device is touched, of the runtime with this name."""
    return _cut(name_hardware("TPU")) if get_start(device).has_chips() else ""


def _cut(hardware: str) -> str:
    kind, _, name = hardware.partition(" ")
    return name if kind == "TPU" else ""


def get_peak_tflops(hardware: str, precision: str, *, tf32: bool = False) -> float | None:
    """Dense TFLOP/s of one device; none where it is not known."""
    kind = "tf32" if tf32 and precision == "fp32" else precision
    return PEAK_TFLOPS.get(hardware, {}).get(kind)


def name_hardware(name: str, pci_devices: Path = _PCI_DEVICES) -> str:
    """A device as the table of peaks names it: a TPU by the generation of this host's chips."""
    if name != "TPU":
        return name
    for vendor in sorted(pci_devices.glob("*/vendor")):
        if vendor.read_text().strip() != PCI_VENDOR:
            continue
        names = name_chip((vendor.parent / "device").read_text().strip())
        if len(names) == 1:
            return f"TPU {names[0]}"
    return name
