"""The devices that a run can name, a row for each: choices, help and checks are made from it.

A module of `run.imports` adds a device by a row: `DEVICES["name"] = DeviceInfo(...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DeviceInfo:
    """What is declared of a device; everything here is read without importing its backend."""

    runtime: str  # `module:Class` of its `Runtime`
    start: str  # `module:Class` of its `DeviceStart`
    compilers: tuple[str, ...]  # backends of torch.compile that work on it; `auto` takes the first
    modes: tuple[str, ...]  # groups of configuration keys that it supports, see `get_devices`
    mesh_runtime: str = ""  # `runtime` under `runtime.parallel: spmd`; empty if it has no mesh
    slots: tuple[str, ...] = ("cpu",)  # kinds of queue slots that can run it
    # Environment variables with which it runs on the host's CPU.
    on_cpu: Mapping[str, str] = field(default_factory=dict)


_NATIVE_COMPILERS = ("inductor", "aot_eager", "eager")
DEVICES = {
    "xla": DeviceInfo(
        runtime="utils.runtime.xla.runtime:XlaRuntime",
        mesh_runtime="utils.runtime.xla.spmd:XlaSpmdRuntime",
        start="utils.runtime.xla.start:XlaStart",
        compilers=("openxla",),
        modes=("mesh", "loop", "pallas", "matmul_precision"),
        slots=("cpu", "tpu", "tpu_vm"),
        on_cpu={"PJRT_DEVICE": "CPU"},
    ),
    "tpu": DeviceInfo(
        runtime="utils.runtime.tpu.runtime:TpuRuntime",
        start="utils.runtime.tpu.start:TpuStart",
        compilers=("tpu",),
        modes=("matmul_precision", "overlap", "fsdp"),
        slots=("cpu", "tpu", "tpu_vm"),
        on_cpu={"TPU_STANDIN": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    ),
    "cpu": DeviceInfo(
        runtime="utils.runtime.cpu:CpuRuntime",
        start="utils.runtime.start:DeviceStart",
        compilers=_NATIVE_COMPILERS,
        modes=("native", "overlap", "fp16", "dynamo"),
    ),
    "cuda": DeviceInfo(
        runtime="utils.runtime.cuda:CudaRuntime",
        start="utils.runtime.cuda:CudaStart",
        compilers=_NATIVE_COMPILERS,
        modes=("native", "overlap", "fp16", "tf32", "dynamo"),
        slots=("cuda",),
    ),
}
# What `auto` takes where no other device is there.
FALLBACK = "cpu"


def get_devices(mode: str) -> tuple[str, ...]:
    """Return the names of the devices that support a group of keys.

    `mode` is native (layouts that XLA decides by itself), overlap (of sums and the backward pass),
    fsdp, fp16, tf32, matmul_precision, mesh, loop (a graph with loops), pallas, or dynamo
    (backends of torch.compile that no row names).
    """
    return tuple(name for name, device in DEVICES.items() if mode in device.modes)
