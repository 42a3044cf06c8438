"""Communication between the processes of a run, by each kind of transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.tiny_parts import create_cpu_runtime, create_xla_runtime
from utils.runtime.processes.ranks import Alone, ProcessRanks, Ranks, ReplicaError
from utils.runtime.xla.ranks import GlooRanks, MeshRanks


class Pair:
    """A group seen from rank 1: rank 0 has half of every tensor, and a host object of its own.

    Args:
      other: rank 0's object, whatever is gathered.
    """

    rank, size = 1, 2

    def __init__(self, other: Any = None) -> None:
        self.other, self.calls = other, []

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(1.5)

    def broadcast_from_first(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            tensor.detach().mul_(0.5)

    def gather(self, value: Any) -> list[Any]:
        return [self.other, value]

    def barrier(self) -> None:
        self.calls.append("barrier")

    def leave(self) -> None:
        self.calls.append("leave")


def create_norm() -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(2)
    norm.running_mean.fill_(4.0)
    norm.running_var.fill_(8.0)
    return norm


RANKS = {
    "alone": lambda group: Alone(),
    "processes": lambda group: ProcessRanks(create_cpu_runtime(), group, torch.float32),
    "mesh": lambda group: MeshRanks(create_xla_runtime(), group, None),
}


@pytest.mark.parametrize(
    ("name", "factor"),
    [("alone", 1.0), ("processes", 1.5), pytest.param("mesh", 1.0, marks=pytest.mark.xla)],
)
def test_sums_and_gradients_run_over_ranks_with_different_tensors(name, factor):
    ranks = RANKS[name](Pair())
    size = 2 if name == "processes" else 1
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    assert ranks.sum(values.detach()).tolist() == [factor, 2 * factor]
    assert ranks.mean(values.detach()).tolist() == [factor / size, 2 * factor / size]
    assert values.tolist() == [1.0, 2.0]  # a sum leaves what it is given
    total = ranks.sum_with_gradient(values)
    total.sum().backward()
    assert total.tolist() == [factor, 2 * factor]
    assert values.grad.tolist() == [factor, factor]


@pytest.mark.parametrize(
    ("name", "mean"),
    [("alone", 4.0), ("processes", 3.0), pytest.param("mesh", 4.0, marks=pytest.mark.xla)],
)
def test_per_rank_buffers_are_averaged(name, mean):
    norm = create_norm()
    RANKS[name](Pair()).average_buffers(norm)
    assert norm.running_mean.tolist() == [mean, mean]
    assert norm.running_var.tolist() == [2 * mean, 2 * mean]
    assert norm.num_batches_tracked == 0


def test_only_named_buffers_of_some_modules_are_averaged():
    norm, queue = create_norm(), torch.nn.Module()
    queue.register_buffer("rows", torch.full((2,), 4.0))
    both = torch.nn.ModuleList([norm, queue])
    RANKS["processes"](Pair()).average_buffers(both, "running_")
    assert norm.running_mean.tolist() == [3.0, 3.0]
    assert queue.rows.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("name", ["processes", pytest.param("mesh", marks=pytest.mark.xla)])
def test_host_objects_are_exchanged_if_there_are_other_processes(name):
    group = Pair(other=True)
    ranks = RANKS[name](group)
    assert (ranks.index, ranks.size, ranks.is_writer) == (1, 2, False)
    assert ranks.gather("mine") == [True, "mine"]
    assert ranks.broadcast_value("mine") is True
    assert ranks.any(False)
    ranks.barrier("here")
    ranks.leave()
    assert group.calls == ["barrier", "leave"]


@pytest.mark.parametrize("ranks", [Alone(), MeshRanks(create_cpu_runtime(), None, None)])
def test_a_single_process_communicates_with_no_other(ranks):
    assert (ranks.index, ranks.size, ranks.is_writer) == (0, 1, True)
    assert ranks.gather("mine") == ["mine"]
    assert not ranks.any(False)
    ranks.barrier("here")
    ranks.check_replicas({"weight": torch.ones(1)}, "at the start")
    ranks.leave()


@pytest.mark.parametrize("name", ["processes", pytest.param("mesh", marks=pytest.mark.xla)])
def test_replicas_are_compared_by_checksum(name):
    mine = {"weight": torch.ones(2), "bias": torch.zeros(1)}
    checksums = {}
    group = Pair()
    group.gather = lambda value: [checksums or value, value]
    ranks = RANKS[name](group)
    ranks.check_replicas(mine, "at the start")
    checksums.update(weight=0, bias=0)
    with pytest.raises(ReplicaError, match=r"rank 1 differ from the others' at the end.*weight"):
        ranks.check_replicas(mine, "at the end")


@pytest.mark.xla
def test_tensors_copied_by_gloo_arrive_on_the_xla_device():
    runtime = create_xla_runtime()
    ranks = GlooRanks(runtime, Pair(), torch.float32)
    weight = nn.Parameter(runtime.tensor_to_device(torch.tensor([2.0, 4.0])))
    ranks.broadcast([weight])
    assert runtime.fetch(weight).tolist() == [1.0, 2.0]
    assert runtime.fetch(ranks.sum(weight)).tolist() == [1.5, 3.0]


def test_ranks_without_a_sum_cannot_be_instantiated():
    class Forgetful(Ranks):
        broadcast = gather = barrier = reduce_gradients = Alone.gather

    with pytest.raises(TypeError, match=r"abstract method '?sum"):
        Forgetful(0, 2)
