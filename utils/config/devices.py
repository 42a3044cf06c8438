"""The devices that a run can name, a row for each: choices, help and checks are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal


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
        modes=("native", "overlap", "fp16"),
    ),
    "cuda": DeviceInfo(
        runtime="utils.runtime.cuda:CudaRuntime",
        start="utils.runtime.cuda:CudaStart",
        compilers=_NATIVE_COMPILERS,
        modes=("native", "overlap", "fp16", "tf32"),
        slots=("cuda",),
    ),
}
# What `auto` takes where no other device is there.
FALLBACK = "cpu"

if TYPE_CHECKING:
    DeviceName = str
    CompilerName = str
else:
    DeviceName = Literal[("auto", *DEVICES)]
    CompilerName = Literal[
        ("auto", *dict.fromkeys(name for row in DEVICES.values() for name in row.compilers))
    ]


def get_devices(mode: str) -> tuple[str, ...]:
    """Return the names of the devices that support a group of keys.

    `mode` is native (layouts that XLA decides by itself), overlap (of sums and the backward pass),
    fsdp, fp16, tf32, matmul_precision, mesh, loop (a graph with loops) or pallas.
    """
    return tuple(name for name, device in DEVICES.items() if mode in device.modes)
