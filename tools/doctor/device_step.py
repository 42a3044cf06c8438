"""Runs a matmul and an all-reduce on every device here; prints a line of JSON for each.

    python -m tools.doctor.device_step

XLA if torch_xla is installed (a process for each chip of a TPU), else one chip or the stand-in
by TorchTPU if that is installed, and every GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

from utils.json_types import JsonObject

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SIZE = 256


class DeviceStep(TypedDict):
    """A printed line."""

    device: str  # kind and number, such as tpu:0
    world: int  # devices of the all-reduce
    correct: bool
    matmul_ms: float
    all_reduce_ms: float
    product: float
    total: float


def main() -> int:
    """Run the program; return the exit code."""
    import torch

    from utils.runtime.start import get_start
    from utils.runtime.tpu import standin

    if importlib.util.find_spec("torch_xla") is not None:
        step_on_xla()
    elif get_start("tpu").is_available() or standin.is_requested():
        step_on_tpu()
    else:
        show("cpu", measure(torch.device("cpu"), lambda value: value, wait=lambda: None), world=1)
    if torch.cuda.is_available():
        step_on_gpus(torch.cuda.device_count())
    return 0


def step_on_xla() -> None:
    """Run on every chip of a TPU, or on the CPU."""
    import torch_xla

    in_place = os.environ.get("PJRT_DEVICE") == "CPU"
    torch_xla.launch(_step_on_xla_device, args=(), debug_single_process=in_place)


def step_on_tpu() -> None:
    """Run on one chip by TorchTPU, or on its stand-in on the CPU."""
    import torch

    from utils.runtime.tpu import standin
    from utils.runtime.tpu.runtime import open_device

    open_device()
    wait = torch.accelerator.synchronize
    result = measure(torch.device("tpu"), lambda value: value, wait=wait)
    show("stand-in on the CPU" if standin.is_requested() else "tpu:0", result, world=1)


def step_on_gpus(count: int) -> None:
    """Run on every GPU, with NCCL between them."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_step_on_gpu, args=(count, f"{folder}/meeting"), nprocs=count)


def measure(
    device: torch.device, all_reduce: Callable[[Tensor], Tensor], *, wait: Callable[[], None]
) -> JsonObject:
    """Return times in ms and values of the second matmul and all-reduce; the first compile."""
    import torch

    ones = torch.ones(SIZE, SIZE, device=device)
    times = []
    for step in (lambda: ones @ ones, lambda: all_reduce(ones * 2.0)):
        for _ in range(2):
            wait()
            start = time.perf_counter()
            value = step()
            wait()
            elapsed = time.perf_counter() - start
        times.append((elapsed * 1000, float(value[0, 0].cpu())))
    (matmul_ms, product), (reduce_ms, total) = times
    return {"matmul_ms": matmul_ms, "all_reduce_ms": reduce_ms, "product": product, "total": total}


def show(device: str, result: JsonObject, *, world: int) -> None:
    """Print a line, in one write."""
    correct = result["product"] == SIZE and result["total"] == 2.0 * world
    line = json.dumps({"device": device, "world": world, "correct": correct, **result})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _step_on_xla_device(_: int) -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    def wait() -> None:
        torch_xla.sync()
        xm.wait_device_ops()

    def all_reduce(value: Tensor) -> Tensor:
        reduced = xm.all_reduce(xm.REDUCE_SUM, value)
        return reduced[0] if isinstance(reduced, list) else reduced

    result = measure(torch_xla.device(), all_reduce, wait=wait)
    show(f"{str(xr.device_type()).lower()}:{xr.global_ordinal()}", result, world=xr.world_size())


def _step_on_gpu(rank: int, count: int, meeting: str) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=count)

    def all_reduce(value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value

    result = measure(torch.device("cuda", rank), all_reduce, wait=torch.cuda.synchronize)
    show(f"cuda:{rank}", result, world=count)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
