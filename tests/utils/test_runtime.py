"""The runtimes: feeding, deferred reads, seeds, counters, and refusing what is not there."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from datasets import Batch
from tests.support.tiny_parts import (
    DEVICE_CASES,
    RUNTIMES,
    create_batch,
    create_batches,
    create_cpu_runtime,
    create_xla_runtime,
)
from utils.config.execution import RuntimeSection
from utils.errors import UserError
from utils.runtime.base import DTYPES, derive_seed
from utils.runtime.choice import choose_device
from utils.runtime.feeding import Feeder
from utils.runtime.launcher import create_runtime, launch
from utils.runtime.processes.children import ReplicaWork, run_on
from utils.runtime.processes.ranks import Alone, ProcessRanks
from utils.runtime.xla.ranks import ChipRanks, GlooRanks
from utils.runtime.xla.runtime import XlaRuntime


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_batches_arrive_in_order_and_on_the_device(device):
    runtime = RUNTIMES[device]()
    with runtime.prefetch(create_batches(7)) as feeder:
        found = list(feeder)
    assert len(found) == 7
    for seed, batch in enumerate(found):
        assert batch.images.device == runtime.device
        assert torch.equal(batch.images.cpu(), create_batch(seed=seed).images)
        assert torch.equal(batch.mask.cpu(), create_batch(seed=seed).mask)


def test_an_exhausted_feeder_stays_exhausted():
    with Feeder(create_batches(1), lambda tensor: tensor) as feeder:
        next(feeder)
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(feeder)


def test_a_failing_process_does_not_wait_for_the_feeder():
    with Feeder(create_batches(9), lambda tensor: tensor):
        assert [one.daemon for one in threading.enumerate() if one.name == "feeder"] == [True]


def test_an_error_of_the_source_reaches_the_caller_with_its_cause_after_good_batches():
    def source() -> Iterator[Batch]:
        yield create_batch()
        try:
            raise OSError("disk")
        except OSError as error:
            raise ValueError("record 17 is broken") from error

    with Feeder(source(), lambda tensor: tensor) as feeder:
        next(feeder)
        for _ in range(2):
            with pytest.raises(ValueError, match="record 17") as caught:
                next(feeder)
            assert isinstance(caught.value.__cause__, OSError)


def test_an_error_of_the_transfer_reaches_the_caller():
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise MemoryError("device full")

    with Feeder(create_batches(3), refuse) as feeder, pytest.raises(MemoryError):
        next(feeder)


def test_a_feeder_prefetches_at_most_its_depth():
    drawn, third = [], threading.Event()

    def source() -> Iterator[Batch]:
        for number in range(100):
            drawn.append(number)
            if number == 2:
                third.set()
            yield create_batch(2)

    with Feeder(source(), lambda tensor: tensor, depth=2) as feeder:
        assert third.wait(30)
        next(feeder)
    # One is in the caller's hands, two are queued, one waits to be queued; one more may follow.
    assert len(drawn) <= 5


def test_closing_waits_for_a_source_without_a_batch_yet():
    gate = threading.Event()

    def source() -> Iterator[Batch]:
        yield create_batch(2)
        gate.wait(30)

    with Feeder(source(), lambda tensor: tensor) as feeder:
        next(feeder)
        threading.Timer(0.1, gate.set).start()
    assert gate.is_set()


def test_closing_early_ends_the_thread_and_the_source():
    closed = []

    def source() -> Iterator[Batch]:
        try:
            while True:
                yield create_batch(2)
        finally:
            closed.append(True)

    before = threading.active_count()
    iterator = source()
    with Feeder(iterator, lambda tensor: tensor) as feeder:
        next(feeder)
    iterator.close()
    assert threading.active_count() == before
    assert closed == [True]


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_deferred_work_runs_in_order_when_flushed(device):
    runtime, seen = RUNTIMES[device](), []
    for number in range(3):
        scalars = runtime.upload([float(number)])
        runtime.defer(lambda n, host: seen.append((n, host.item())), number, scalars=scalars)
    assert seen == []
    runtime.flush_deferred()
    assert seen == [(0, 0.0), (1, 1.0), (2, 2.0)]
    runtime.flush_deferred()
    assert len(seen) == 3


def test_an_error_in_deferred_work_reaches_the_loop():
    runtime = create_cpu_runtime()

    def fail(host: torch.Tensor) -> None:
        raise RuntimeError("the disk is full")

    runtime.defer(fail, scalars=torch.zeros(1))
    with pytest.raises(RuntimeError, match="the disk is full"):
        runtime.flush_deferred()


@pytest.mark.xla
def test_declared_host_reads_do_not_count_and_others_do():
    runtime = create_xla_runtime()
    vector = runtime.upload([1.0, 2.0]) * 2
    runtime.finish_step()
    before = runtime.counters()["host_reads"]
    assert runtime.fetch(vector).tolist() == [2.0, 4.0]
    assert runtime.fetch_all({"a": vector, "b": vector + 1})["b"].tolist() == [3.0, 5.0]
    assert runtime.counters()["host_reads"] == before
    assert float(vector[0].item()) == 2.0
    assert runtime.counters()["host_reads"] == before + 1


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_fetched_copies_do_not_change_with_the_device(device):
    runtime = RUNTIMES[device]()
    vector = runtime.upload([1.0, 2.0])
    copy = runtime.fetch_all({"a": vector})["a"]
    vector.add_(5)
    runtime.finish_step()
    assert copy.tolist() == [1.0, 2.0]
    assert copy.device.type == "cpu"


@pytest.mark.xla
def test_numbers_are_data_and_not_constants_of_a_graph():
    """Any value, 0 and 1 included, runs through the same graph."""
    runtime = create_xla_runtime()
    weights = runtime.upload([3.0] * 11)
    for value in (0.5, 0.25):
        (weights * runtime.upload([value])[0]).sum()
    results = []
    graphs = []
    for value in (0.3, 0.0, 1.0, -2.0):
        result = (weights * runtime.upload([value])[0]).sum()
        runtime.finish_step()
        graphs.append(runtime.counters()["graphs"])
        results.append(result)
    assert len(set(graphs)) == 1
    assert [runtime.fetch(r).item() for r in results] == pytest.approx([9.9, 0.0, 33.0, -66.0])


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_a_steps_random_numbers_are_a_function_of_seed_and_step(device):
    runtime = RUNTIMES[device]()

    def draw(seed: int, step: int) -> list[float]:
        with runtime.step(seed, step):
            values = torch.rand(4, device=runtime.device)
        return runtime.fetch(values).tolist()

    first = draw(0, 3)
    assert draw(0, 4) != first
    assert draw(1, 3) != first
    assert draw(0, 3) == first


def test_derived_seeds_differ_by_seed_step_and_rank():
    seeds = {derive_seed(s, t, r) for s in range(8) for t in range(64) for r in range(8)}
    assert len(seeds) == 8 * 64 * 8
    assert all(0 <= seed < 2**31 for seed in seeds)
    # The first three numbers of SplitMix64 from state 0, their lowest 31 bits.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [derive_seed(seed, 0, 0) for seed in (1, 2, 3)] == [n % 2**31 for n in published]


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_a_launched_runtime_leaves_its_group_even_if_its_worker_fails(monkeypatch, device):
    left = []
    monkeypatch.setattr(Alone, "leave", lambda self: left.append(self))
    section = RuntimeSection(device=device)
    assert launch(section, lambda runtime, code: code, 7) == 7
    assert launch(section, lambda runtime: None) == 0
    with pytest.raises(OSError, match="disk"):
        launch(section, lambda runtime: (_ for _ in ()).throw(OSError("disk")))
    assert len(left) == len(set(map(id, left))) == 3


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_bf16_autocasts_matmuls_and_keeps_weights_in_float32(device):
    runtime = create_runtime(RuntimeSection(device=device, precision="bf16"))
    layer = runtime.prepare(torch.nn.Linear(4, 4))
    with runtime.autocast():
        output = layer(torch.ones(2, 4, device=runtime.device))
    assert output.dtype == torch.bfloat16
    assert layer.weight.dtype == torch.float32
    with RUNTIMES[device]().autocast():
        assert layer(torch.ones(2, 4, device=runtime.device)).dtype == torch.float32


class _EqualPair:
    """A group of two whose other rank has the same values."""

    rank, size = 0, 2

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.add_(tensor.clone())


def create_chip(section: RuntimeSection, monkeypatch: pytest.MonkeyPatch) -> XlaRuntime:
    """One of two chips, as XLA's collectives see it: a sum over the one that there is."""
    runtime = XlaRuntime(section)
    runtime.finish_step()  # a sum waits for the one before it, of the same step
    monkeypatch.setenv("XLA_ALWAYS_ALLREDUCE", "1")
    monkeypatch.setattr(runtime._xr, "world_size", lambda: 2)
    runtime.ranks = ChipRanks(runtime, _EqualPair(), DTYPES[section.reduce_dtype])
    return runtime


def create_rank(section: RuntimeSection, monkeypatch: pytest.MonkeyPatch) -> XlaRuntime:
    """One of two XLA processes on the CPU."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(
        "utils.runtime.xla.runtime.ProcessGroup", lambda section, backend: _EqualPair()
    )
    runtime = XlaRuntime(section)
    assert isinstance(runtime.ranks, GlooRanks)
    return runtime


@pytest.mark.xla
@pytest.mark.parametrize(("dtype", "mean"), [("fp32", 1 + 2.0**-10), ("bf16", 1.0)])
def test_xla_processes_sum_gradients_in_the_requested_type(monkeypatch, dtype, mean):
    """bfloat16 rounds 1 + 2^-10 to 1."""
    runtime = create_rank(RuntimeSection(device="xla", reduce_dtype=dtype), monkeypatch)
    layer = torch.nn.Linear(1, 1, bias=False).to(runtime.device)
    layer.weight.grad = runtime.tensor_to_device(torch.full((1, 1), 1 + 2.0**-10))
    runtime.ranks.reduce_gradients(torch.optim.SGD(layer.parameters(), lr=1.0))
    assert layer.weight.grad.dtype == torch.float32
    assert runtime.fetch(layer.weight.grad).item() == mean


@pytest.mark.parametrize(("dtype", "mean"), [("fp32", 1 + 2.0**-10), ("bf16", 1.0)])
def test_native_ranks_average_existing_gradients(monkeypatch, dtype, mean):
    ranks = ProcessRanks(create_cpu_runtime(), _EqualPair(), DTYPES[dtype])
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    used.grad = torch.full((2,), 1 + 2.0**-10)
    ranks.reduce_gradients(torch.optim.SGD([unused, used], lr=1.0))
    assert used.grad.tolist() == [mean, mean] and unused.grad is None


@pytest.mark.xla
def test_a_chip_finds_its_rank(monkeypatch):
    runtime = create_xla_runtime()
    alone = torch.ones(1, device=runtime.device)
    assert runtime.ranks.sum(alone) is alone  # and asks nobody
    monkeypatch.setattr(runtime._xr, "world_size", lambda: 8)
    monkeypatch.setattr("utils.runtime.xla.runtime.check_collectives", lambda world_size: None)
    group = SimpleNamespace(rank=3, size=8, gather=lambda value: [value] * 8)
    monkeypatch.setattr("utils.runtime.xla.runtime.join_hosts", lambda section: group)
    ranks = XlaRuntime(RuntimeSection(device="xla")).ranks
    assert isinstance(ranks, ChipRanks)
    assert (ranks.index, ranks.size, ranks.gather("word")) == (3, 8, ["word"] * 8)


@pytest.mark.xla
def test_xla_processes_are_started_with_the_section_and_the_work(monkeypatch):
    told = []
    monkeypatch.setattr(
        "utils.runtime.processes.children.launch_processes", lambda *args: told.append(args) or 4
    )
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    section = RuntimeSection(device="xla", num_processes=2, timeout_s=9)
    assert launch(section, create_batch, "seed") == 4
    assert told == [(2, 9, run_on, XlaRuntime, ReplicaWork(section, create_batch, ("seed",)))]


@pytest.mark.xla
@pytest.mark.parametrize(("dtype", "told"), [("fp32", "f32"), ("bf16", "bf16")])
def test_chips_sum_gradients_in_the_requested_type(monkeypatch, dtype, told):
    """Read from the graph: XLA on the CPU has no sum of bfloat16 to run it with."""
    runtime = create_chip(RuntimeSection(device="xla", reduce_dtype=dtype), monkeypatch)
    layer = torch.nn.Linear(7, 1, bias=False).to(runtime.device)
    layer.weight.grad = runtime.tensor_to_device(torch.ones(1, 7))
    runtime.ranks.reduce_gradients(torch.optim.SGD(layer.parameters(), lr=1.0))
    assert layer.weight.grad.dtype == torch.float32
    text = runtime._xla._XLAC._get_xla_tensors_hlo([layer.weight.grad])
    sums = [line for line in text.splitlines() if " all-reduce(" in line]
    results = [line.partition(" all-reduce(")[0] for line in sums]
    assert [re.findall(r"(\w+)\[1,7\]", result) for result in results] == [[told]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_device_is_refused():
    with pytest.raises(UserError, match="PyTorch sees no NVIDIA GPU"):
        choose_device(RuntimeSection(device="cuda"))


@pytest.mark.xla
def test_auto_uses_xla_if_installed(monkeypatch):
    assert choose_device(RuntimeSection(device="auto")) == "xla"
    monkeypatch.setattr("utils.runtime.xla.start.importlib.util.find_spec", lambda name: None)
    assert choose_device(RuntimeSection(device="auto")) == "cpu"
    with pytest.raises(UserError, match="torch_xla is not installed"):
        choose_device(RuntimeSection(device="xla"))


def test_environment_variables_set_by_the_user_are_kept(monkeypatch):
    from utils.runtime.start import get_start

    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    get_start("xla").prepare_environment()
    import os

    assert (os.environ["PJRT_DEVICE"], os.environ["TF_CPP_MIN_LOG_LEVEL"]) == ("TPU", "0")
    monkeypatch.delenv("PJRT_DEVICE")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    get_start("cpu").prepare_environment()
    assert "PJRT_DEVICE" not in os.environ
    # Warnings of the compiler are none of the run's.
    get_start("xla").prepare_environment()
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "2"
