"""Time on a device that is here: the CPU, a GPU, or XLA on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from lab.delta.cases import LabCase, create_inputs
from lab.delta.forms import add_extra, create_program, describe_inputs
from utils.config.execution import RuntimeSection
from utils.errors import UserError
from utils.registry import load_object
from utils.runtime.start import get_start

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from models.delta.rules.layout import CoreOptions

_WARM_UP = 2


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one execution, by the host's clock around a fence.

    Attributes:
      median, low, high: over `repeats`.
    """

    median: float
    low: float
    high: float
    repeats: int
    first_s: float  # the first execution, compilation included
    hlo_lines: int | None  # of the program on XLA, before it is optimised; else none
    fallbacks: dict[str, int]  # operators that ran on the host instead, of how many executions


def open_device(name: str) -> torch.device:
    """Return the device of `--on`.

    Raises:
      UserError: it is not here.
    """
    import torch

    if name == "xla":
        import torch_xla

        return torch_xla.device()
    if name == "tpu":
        get_start(name).check(RuntimeSection(device=name))
        load_object("utils.runtime.tpu.runtime:open_device")()
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--on cuda: there is no GPU here; use --on cpu, xla or a TPU such as v5e")
    return torch.device(name)


def time_program(
    case: LabCase, options: CoreOptions, device: torch.device, *, repeats: int
) -> Timing:
    """Median and range of a case's time with bfloat16 inputs.

    Raises:
      UserError: the host's memory does not hold what the inputs are drawn of.
    """
    import torch

    _require_memory(case)
    program = create_program(case, options)
    given = [x.to(device) for x in add_extra(case, create_inputs(case, torch.bfloat16))]
    fence = create_fence(device)
    # Elsewhere there is no graph, and the program would run before its first time is taken.
    lines = _count_lines(program(given)) if device.type == "xla" else None
    fence()
    _clear_fallbacks(device)
    times = []
    with torch.set_grad_enabled(case.mode == "both"):
        for _ in range(_WARM_UP + repeats):
            began = time.perf_counter()
            outputs = program(given)
            fence()
            times.append(time.perf_counter() - began)
            del outputs
    kept = [1e3 * seconds for seconds in times[_WARM_UP:]]
    fallbacks = _read_fallbacks(device)
    return Timing(
        statistics.median(kept), min(kept), max(kept), repeats, times[0], lines, fallbacks
    )


def _require_memory(case: LabCase) -> None:
    """Check that inputs fit, each beside the float32 that it is drawn as.

    Raises:
      UserError: they do not.
    """
    given = describe_inputs(case)
    kept = sum(x.numel() * x.element_size() for x in given)
    needed, free = kept + 4 * max(x.numel() for x in given), psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"inputs of {case.batch}x{case.tokens} need {needed / 2**30:.1f} GiB of the host's "
            f"memory, of which {free / 2**30:.1f} are free; leave them out of "
            f"{'--decode-batches' if case.mode == 'decode' else '--sizes'}"
        )


def create_fence(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until a device has finished its work."""
    if device.type == "xla":
        import torch_xla
        import torch_xla.core.xla_model as xm

        def wait() -> None:
            torch_xla.sync()
            xm.wait_device_ops()

        return wait
    if device.type in ("cuda", "tpu"):
        import torch

        return torch.accelerator.synchronize
    return lambda: None


def _count_lines(outputs: list[Tensor]) -> int:
    import torch_xla

    return torch_xla._XLAC._get_xla_tensors_hlo(outputs).count("\n")


def _clear_fallbacks(device: torch.device) -> None:
    if device.type == "xla":
        from torch_xla.debug import metrics

        metrics.clear_all()


def _read_fallbacks(device: torch.device) -> dict[str, int]:
    """Counters of operators that have no lowering."""
    if device.type != "xla":
        return {}
    from torch_xla.debug import metrics

    names = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return {name: int(metrics.counter_value(name)) for name in names}
