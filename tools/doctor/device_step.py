"""One matmul and one all-reduce on every device here; a line of JSON for each.

    python -m tools.doctor.device_step

XLA where torch_xla is installed (a process for each chip of a TPU), and every GPU beside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from utils.json_types import JsonObject

SIZE = 256


def main() -> int:
    """Run the program; the exit code."""
    import torch

    if importlib.util.find_spec("torch_xla") is not None:
        step_on_xla()
    else:
        show("cpu", measure(torch.device("cpu"), lambda value: value, wait=lambda: None), world=1)
    if torch.cuda.is_available():
        step_on_gpus(torch.cuda.device_count())
    return 0


def step_on_xla() -> None:
    """Every chip of a TPU, or the CPU."""
    import torch_xla

    in_place = os.environ.get("PJRT_DEVICE") == "CPU"
    torch_xla.launch(_step_on_xla_device, args=(), debug_single_process=in_place)


def step_on_gpus(count: int) -> None:
    """Every GPU, with NCCL between them."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_step_on_gpu, args=(count, f"{folder}/meeting"), nprocs=count)


def measure(
    device: Any, all_reduce: Callable[[Any], Any], *, wait: Callable[[], None]
) -> JsonObject:
    """Times of the second matmul and all-reduce, in milliseconds, and their values.

    The first ones compile and warm up.
    """
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
    return {
        "matmul_ms": times[0][0], "all_reduce_ms": times[1][0],
        "product": times[0][1], "total": times[1][1],
    }  # fmt: skip


def show(device: str, found: JsonObject, *, world: int) -> None:
    """One line, in one piece."""
    correct = found["product"] == SIZE and found["total"] == 2.0 * world
    line = json.dumps({"device": device, "world": world, "correct": correct, **found})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _step_on_xla_device(_: int) -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    def wait() -> None:
        torch_xla.sync()
        xm.wait_device_ops()

    def all_reduce(value: Any) -> Any:
        return xm.all_reduce(xm.REDUCE_SUM, value)

    found = measure(torch_xla.device(), all_reduce, wait=wait)
    show(f"{xr.device_type().lower()}:{xr.global_ordinal()}", found, world=xr.world_size())


def _step_on_gpu(rank: int, count: int, meeting: str) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=count)

    def all_reduce(value: Any) -> Any:
        dist.all_reduce(value)
        return value

    found = measure(torch.device("cuda", rank), all_reduce, wait=torch.cuda.synchronize)
    show(f"cuda:{rank}", found, world=count)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
