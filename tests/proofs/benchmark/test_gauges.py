"""What a benchmark reads off a device."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from proofs.benchmark.gauges import create_gauge
from tests.support.tiny_parts import create_cpu_runtime
from utils.runtime.cpu import CpuRuntime
from utils.runtime.cuda import CudaRuntime
from utils.runtime.xla.runtime import XlaRuntime
from utils.runtime.xla.spmd import XlaSpmdRuntime


def test_a_clock_gives_each_step_its_share():
    clock = create_gauge(create_cpu_runtime()).create_clock()
    clock.start()
    for _ in range(2):
        time.sleep(0.01)
        clock.stamp()
    assert len(clock) == 3
    first, second, _ = clock.take()  # the last one ends when it is taken
    assert min(first, second) >= 0.01


def test_the_cpu_has_no_device_memory_and_compiles_nothing():
    gauge = create_gauge(create_cpu_runtime())
    assert gauge.get_peak_gib() is None
    assert gauge.count_compiles() == (0, 0.0)


@pytest.mark.parametrize("kind", [CpuRuntime, CudaRuntime, XlaRuntime])
def test_a_runtime_is_measured_like_its_base_class(kind):
    heir = type("Heir", (kind,), {})
    found, inherited = (type(create_gauge(object.__new__(one))) for one in (kind, heir))
    assert found is inherited


def test_a_mesh_is_measured_like_xla_and_devices_differ():
    kinds = (CpuRuntime, CudaRuntime, XlaRuntime, XlaSpmdRuntime)
    cpu, cuda, xla, mesh = (type(create_gauge(object.__new__(kind))) for kind in kinds)
    assert mesh is xla
    assert len({cpu, cuda, xla}) == 3


class StreamEvent:
    """A CUDA event of a stream on which each event comes a second after the one before."""

    times = itertools.count()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.second = next(self.times)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: StreamEvent) -> float:
        return 1e3 * (end.second - self.second)


def test_a_clock_of_a_gpu_counts_its_stamps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", StreamEvent)
    clock = create_gauge(object.__new__(CudaRuntime)).create_clock()
    clock.start()
    clock.stamp()
    assert len(clock) == 2
    assert clock.take() == [1.0, 1.0]
