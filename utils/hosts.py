"""Hosts of TPU slices: their processors, and what an image costs one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TpuVm:
    """A TPU VM."""

    chips: int  # those of the virtual machine, not of the slice
    vcpus: int
    machine: str  # Google Cloud's machine type


# vCPUs: Google's machine types of the TPU families, as its documentation of v5e ("VM types"), the
# table of GKE's autoscaler, and for tpu7x its page "TPU7x (Ironwood)" ("Number of vCPUs (4-chip
# VM)": docs.cloud.google.com/tpu/docs/tpu7x) have them, read in November 2026.
HOSTS = {
    "v3-8": TpuVm(4, 96, "ct3-hightpu-4t"),
    "v4-8": TpuVm(4, 240, "ct4p-hightpu-4t"),
    "v5e-1": TpuVm(1, 24, "ct5lp-hightpu-1t"),
    "v5e-4": TpuVm(4, 112, "ct5lp-hightpu-4t"),
    "v5e-8": TpuVm(8, 224, "ct5lp-hightpu-8t"),
    "v5p-8": TpuVm(4, 208, "ct5p-hightpu-4t"),
    "v6e-1": TpuVm(1, 44, "ct6e-standard-1t"),
    "v6e-4": TpuVm(4, 180, "ct6e-standard-4t"),
    "v6e-8": TpuVm(8, 180, "ct6e-standard-8t"),
    "tpu7x-8": TpuVm(4, 224, "tpu7x-standard-4t"),
}
# CPU milliseconds of one core of an AMD EPYC an image of 224 pixels, cropped and flipped, on a
# quiet machine (docs/data.md, 24 November 2026). Other operations cost more.
CPU_MS = {"JPEG": 0.918, "JPEG of 256 pixels": 0.462, "pixels": 0.291}
_CHIPS_OF_A_HOST = 4  # of slices of several hosts


def count_vcpus(generation: str, chips: int) -> int | None:
    """Count the vCPUs of all hosts of a slice; None for hosts that are not known."""
    own = {host.chips: host for name, host in HOSTS.items() if name.split("-")[0] == generation}
    if chips in own:
        return own[chips].vcpus
    host = own.get(_CHIPS_OF_A_HOST)
    return None if host is None or chips % host.chips else host.vcpus * (chips // host.chips)
