"""TPU generations, in one table: what launchers, compiler and benchmarks know of a chip.

Peak and bandwidth are a chip's public figures. The clock is derived: it makes the width of the
matrix unit equal to the peak. docs/tpu_compiler.md says how far to trust it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from utils.errors import UserError


@dataclass(frozen=True)
class Generation:
    """One row of the table.

    A device is what the compiler compiles for: a chip of v5e, v5p and v6e, a core of the others.
    """

    name: str
    chip_tflops: float  # public peak of a chip, bfloat16
    chip_gb_per_s: float  # public bandwidth of a chip's HBM
    # HBM of a device that a program may use, as the compiler says where one needs more.
    usable_gib: float
    clock_ghz: float  # derived, see above
    pci_device: str  # the chip's PCI device id; the vendor is 0x1ae0
    devices_per_chip: int = 1  # devices that the compiler sees in one chip
    unit_width: int = 128  # side of the matrix unit
    dimensions: int = 2  # of its topologies, 2 or 3
    # Of accelerator types, such as `v5litepod` in `v5litepod-8`; empty: none is launched.
    prefix: str = ""
    runtime_version: str = ""  # the image of its TPU VMs for PyTorch and JAX
    counts: str = ""  # what the number in an accelerator type counts, cores or chips
    one_host: int = 0  # largest number of an accelerator type that is a single host
    numbers: tuple[int, ...] = ()  # those that an accelerator type may have
    stacks: tuple[str, ...] = ("torch_xla", "torch_tpu")  # packages that run on it
    seen_per_chip: int = 1  # devices that a run sees in one chip
    gke: str = ""  # its nodes' label cloud.google.com/gke-tpu-accelerator
    sky_gke: tuple[int, ...] = ()  # chips of the slices that SkyPilot finds on GKE
    has_sky: bool = True  # whether SkyPilot has its TPU VMs
    spoken: str = ""  # another name that people use

    @property
    def peak_tflops(self) -> float:
        """Of a device, bfloat16."""
        return self.chip_tflops / self.devices_per_chip

    @property
    def hbm_gb_per_s(self) -> float:
        return self.chip_gb_per_s / self.devices_per_chip


@dataclass(frozen=True)
class TpuSlice:
    """The chips behind an accelerator type, and how they lie on hosts."""

    generation: Generation
    chips: int
    hosts: int

    @property
    def chips_per_host(self) -> int:
        return self.chips // self.hosts

    @property
    def topology(self) -> str:
        """Return its sides, such as 2x4 or 2x2x1."""
        return "x".join(map(str, get_sides(self.chips, self.generation.dimensions)))


# Slices of v4, v5p and tpu7x are parts of a cube of 64 chips, 128 cores, or whole cubes.
_PARTS_OF_CUBE, _CUBE = (8, 16, 32, 64), 128
_SIDES_OF_PARTS = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
_CHIPS_OF_CUBE, _SIDE_OF_CUBE = 64, 4
# Of each host of a slice that has several.
_CHIPS_OF_HOST = 4
_CHIPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# Peaks and bandwidths: Cloud TPU's pages on each generation, "Peak compute per chip (bf16)".
# Runtime versions: its page "TPU software versions", as it stood in August 2025; for tpu7x, which
# is not on it, Ironwood's page of AI-Hypercomputer/accelerator-microbenchmarks. PCI ids:
# torch_xla 2.9.0, torch_xla/_internal/tpu.py, for v5p jax's hardware_utils.py, and for tpu7x
# torch_tpu 0.2.0, torch_tpu/_internal/utils/hardware.py. Names on GKE: its page "Plan TPUs in GKE"
# and XPK's core/system_characteristics.py; what SkyPilot finds there: skypilot 0.14.1,
# sky/provision/kubernetes/utils.py.
GENERATIONS = {
    one.name: one
    for one in (
        Generation(
            name="v2", chip_tflops=45.0, chip_gb_per_s=700, devices_per_chip=2, usable_gib=7.48,
            clock_ghz=0.70, pci_device="0x0027", stacks=("torch_xla",),
        ),
        Generation(
            name="v3", chip_tflops=123.0, chip_gb_per_s=900, devices_per_chip=2, usable_gib=15.48,
            clock_ghz=0.94, pci_device="0x0027", stacks=("torch_xla",),
        ),
        Generation(
            name="v4", chip_tflops=275.0, chip_gb_per_s=1228, devices_per_chip=2, usable_gib=15.25,
            clock_ghz=1.05, dimensions=3, pci_device="0x005e",
            prefix="v4", runtime_version="tpu-ubuntu2204-base", counts="cores", one_host=8,
            numbers=(*_PARTS_OF_CUBE, *range(_CUBE, 8193, _CUBE)), gke="tpu-v4-podslice",
        ),
        Generation(
            name="v5e", chip_tflops=197.0, chip_gb_per_s=819, usable_gib=15.75,
            clock_ghz=1.50, pci_device="0x0063",
            prefix="v5litepod", runtime_version="v2-alpha-tpuv5-lite", counts="chips", one_host=8,
            numbers=_CHIPS, gke="tpu-v5-lite-podslice", sky_gke=(1, 4, 8),
        ),
        Generation(
            name="v5p", chip_tflops=459.0, chip_gb_per_s=2765, usable_gib=95.74,
            clock_ghz=1.75, dimensions=3, pci_device="0x0062",
            prefix="v5p", runtime_version="v2-alpha-tpuv5", counts="cores", one_host=8,
            numbers=(*_PARTS_OF_CUBE, *range(_CUBE, 12289, _CUBE)), gke="tpu-v5p-slice",
            sky_gke=(4,),
        ),
        Generation(
            name="v6e", chip_tflops=918.0, chip_gb_per_s=1640, usable_gib=31.25,
            clock_ghz=1.75, unit_width=256, pci_device="0x006f",
            prefix="v6e", runtime_version="v2-alpha-tpuv6e", counts="chips", one_host=8,
            numbers=_CHIPS, gke="tpu-v6e-slice", sky_gke=(1, 4, 8),
        ),
        # Ironwood. HBM by libtpu 0.0.52. The libtpu that torch_xla names does not know it.
        Generation(
            name="tpu7x", chip_tflops=2307.0, chip_gb_per_s=7380, devices_per_chip=2,
            usable_gib=94.74, clock_ghz=2.20, unit_width=256, dimensions=3, pci_device="0x0076",
            prefix="tpu7x", runtime_version="v2-alpha-tpu7-ubuntu2404", counts="cores", one_host=8,
            numbers=(*_PARTS_OF_CUBE, *range(_CUBE, 18433, _CUBE)), stacks=("torch_tpu",),
            seen_per_chip=2, gke="tpu7x", has_sky=False, spoken="v7x",
        ),
    )
}  # fmt: skip
LAUNCHED = tuple(one for one in GENERATIONS.values() if one.prefix)
PCI_VENDOR = "0x1ae0"


def find_generation(accelerator_type: str) -> Generation:
    """Return the row of an accelerator type; UserError if there is no such type or slice."""
    found = re.fullmatch(r"([a-z0-9]+)-(\d+)", accelerator_type)
    prefix, number = (found[1], int(found[2])) if found else ("", 0)
    for generation in LAUNCHED:
        names = (generation.prefix, generation.name, generation.spoken)
        if prefix in names and number > 0:
            _check_number(accelerator_type, number, generation)
            if prefix == generation.prefix:
                return generation
            raise UserError(
                f"accelerator type {accelerator_type!r} is spelled {generation.prefix}-{number} "
                "by Cloud TPU"
            )
    known = ", ".join(f"{generation.prefix}-N" for generation in LAUNCHED)
    raise UserError(
        f"accelerator type {accelerator_type!r} is not known; use {known}, such as v5litepod-8"
    )


def find_slice(accelerator_type: str) -> TpuSlice:
    """Return the slice of an accelerator type; UserError if there is no such type or slice."""
    generation = find_generation(accelerator_type)
    per_chip = 2 if generation.counts == "cores" else 1
    chips = int(accelerator_type.rpartition("-")[2]) // per_chip
    is_single = chips * per_chip <= generation.one_host
    return TpuSlice(generation, chips, 1 if is_single else chips // _CHIPS_OF_HOST)


def get_sides(chips: int, dimensions: int) -> tuple[int, ...]:
    """Return the sides of a slice, as even as they can be, the shortest first."""
    if dimensions == 2:  # powers of 2
        side = 2 ** ((chips.bit_length() - 1) // 2)
        return side, chips // side
    if chips in _SIDES_OF_PARTS:
        return _SIDES_OF_PARTS[chips]
    cubes = chips // _CHIPS_OF_CUBE
    first = _find_divisor(cubes, 3)
    second = _find_divisor(cubes // first, 2)
    sides = sorted((first, second, cubes // first // second))
    return tuple(_SIDE_OF_CUBE * side for side in sides)


def _find_divisor(number: int, power: int) -> int:
    """Return the largest divisor whose power does not exceed the number."""
    return max(n for n in range(1, number + 1) if n**power <= number and number % n == 0)


def check_stack(accelerator_type: str, stack: str) -> Generation:
    """Return the row of an accelerator type; UserError if a stack does not run on it."""
    generation = find_generation(accelerator_type)
    if stack not in generation.stacks:
        raise UserError(
            f"accelerator type {accelerator_type!r} does not run {stack}; use --stack "
            f"{generation.stacks[0]}"
        )
    return generation


def _check_number(accelerator_type: str, number: int, generation: Generation) -> None:
    """Refuse a slice that no generation has, and name those next to it."""
    if number in generation.numbers:
        return
    below = [one for one in generation.numbers if one < number][-1:]
    above = [one for one in generation.numbers if one > number][:1]
    near = " or ".join(f"{generation.prefix}-{one}" for one in (*below, *above))
    raise UserError(
        f"accelerator type {accelerator_type!r} does not exist: {generation.name} has no slice of "
        f"{number} {generation.counts}; use {near}"
    )


def name_chip(pci_device: str) -> list[str]:
    """The generations whose chips carry a PCI device id; v2 and v3 share one."""
    return [one.name for one in GENERATIONS.values() if one.pci_device == pci_device]
