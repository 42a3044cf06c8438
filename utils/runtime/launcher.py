"""Starts a run on its runtime: in this process, or in several that find each other."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from utils.errors import UserError
from utils.runtime.choice import (
    choose_device,
    count_processes,
    get_planned_size,
    has_chips,
    prepare_environment,
)
from utils.runtime.processes.children import launch_processes, run_on

if TYPE_CHECKING:
    from utils.config.execution import RuntimeSection
    from utils.runtime.base import Runtime

_RUNTIMES = {
    "cpu": ("utils.runtime.cpu", "CpuRuntime"),
    "cuda": ("utils.runtime.cuda", "CudaRuntime"),
    "xla": ("utils.runtime.xla.runtime", "XlaRuntime"),
}
_SPMD = ("utils.runtime.xla.spmd", "XlaSpmdRuntime")


def launch(
    section: RuntimeSection, worker: Callable[..., int | None], *args: object, device: str = ""
) -> int:
    """Run `worker(runtime, *args)` on every replica; gives the exit code.

    `worker` must be a module-level function: replicas may be processes of their own. It gives its
    exit code, or none for 0.

    Args:
      device: that has been chosen already; empty: it is chosen here.
    """
    name = device or choose_device(section)
    prepare_environment(name)
    try:
        return _start(name, section, worker, args)
    except Exception as error:
        if "RANK" in os.environ and not isinstance(error, UserError):
            # Started by torchrun, which shows the ranks' outputs mixed.
            rank, kind = os.environ["RANK"], type(error).__name__
            sys.stderr.write(f"rank {rank} failed: {kind}: {error}\n")
        raise


def create_runtime(section: RuntimeSection) -> Runtime:
    """The runtime of this process, for tests and tools that run one replica in place."""
    return find_runtime_class(section)(section)


def find_runtime_class(section: RuntimeSection) -> type[Runtime]:
    """The class of runtime that a section asks for, the environment prepared for it."""
    name = choose_device(section)
    prepare_environment(name)
    return _find_class(name, section)


def _start(
    name: str, section: RuntimeSection, worker: Callable[..., int | None], args: tuple[object, ...]
) -> int:
    if has_chips(name) and section.parallel == "process":
        from utils.runtime.xla.chips import launch_on_chips

        return launch_on_chips(section, worker, args)
    kind = _find_class(name, section)
    # Of a group that somebody else has started this process is one rank.
    count = 1 if get_planned_size() > 1 else count_processes(section, name)
    work = (kind, section, worker, args)
    if count == 1:
        return run_on(*work)
    return launch_processes(count, section.timeout_s, run_on, *work)


def _find_class(name: str, section: RuntimeSection) -> type[Runtime]:
    """The class of a runtime; the others' libraries need not be installed."""
    module, class_name = _SPMD if section.parallel == "spmd" else _RUNTIMES[name]
    return getattr(importlib.import_module(module), class_name)
