"""TPU generations: what an accelerator type means and which runtime version its VMs boot."""

from __future__ import annotations

import re
from dataclasses import dataclass

from utils.errors import UserError


@dataclass(frozen=True)
class Generation:
    """One row of the table.

    Attributes:
      prefix: of accelerator types, such as `v5litepod` in `v5litepod-8`.
      runtime_version: the image of its TPU VMs for PyTorch and JAX.
      unit: what the number in an accelerator type counts.
      one_host: largest number of an accelerator type that is a single host.
      pci_device: the chip's PCI device id; the vendor is 0x1ae0.
    """

    name: str
    prefix: str
    runtime_version: str
    unit: str
    one_host: int
    pci_device: str


# Runtime versions: the page "TPU software versions" of Cloud TPU's documentation, as it stood in
# August 2025. PCI ids: torch_xla 2.9.0, torch_xla/_internal/tpu.py, and for v5p jax's
# hardware_utils.py.
GENERATIONS = (
    Generation("v4", "v4", "tpu-ubuntu2204-base", "cores", 8, "0x005e"),
    Generation("v5e", "v5litepod", "v2-alpha-tpuv5-lite", "chips", 8, "0x0063"),
    Generation("v5p", "v5p", "v2-alpha-tpuv5", "cores", 8, "0x0062"),
    Generation("v6e", "v6e", "v2-alpha-tpuv6e", "chips", 8, "0x006f"),
)
PCI_VENDOR = "0x1ae0"


def find_generation(accelerator_type: str) -> Generation:
    """The row of an accelerator type.

    Raises:
      UserError: no such type.
    """
    found = re.fullmatch(r"([a-z0-9]+)-(\d+)", accelerator_type)
    for generation in GENERATIONS:
        if found and found[1] == generation.prefix and int(found[2]) > 0:
            return generation
    if found and found[1] == "v5e":
        raise UserError(
            f"accelerator type {accelerator_type!r} is spelled v5litepod-{found[2]} by Cloud TPU"
        )
    known = ", ".join(f"{generation.prefix}-N" for generation in GENERATIONS)
    raise UserError(
        f"accelerator type {accelerator_type!r} is not known; use {known}, such as v5litepod-8"
    )


def is_pod(accelerator_type: str) -> bool:
    """Whether a slice spans several hosts."""
    generation = find_generation(accelerator_type)
    return int(accelerator_type.rpartition("-")[2]) > generation.one_host
