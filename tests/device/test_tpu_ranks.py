"""Ranks of TorchTPU: `tpu_dist` in a group of one, which is all that the stand-in's driver has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.tiny_parts import create_batches, create_vit
from utils.config.execution import RuntimeSection
from utils.runtime.launcher import create_runtime
from utils.runtime.native import overlap_sums
from utils.runtime.processes.group import ProcessGroup
from utils.runtime.processes.shards import copy_whole, is_split, join, split
from utils.runtime.step_numbers import StepNumbers

pytestmark = pytest.mark.tpu

SECTION = RuntimeSection(device="tpu", compile=True)


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """A runtime whose ranks are those of chips, with one of them."""
    from utils.runtime.tpu.ranks import CHIPS, TpuRanks

    runtime = create_runtime(SECTION)
    monkeypatch.setenv("TORCH_TPU_TOPOLOGY", "1,1,1")
    monkeypatch.setenv("TORCH_TPU_SLICEBUILDER_ADDRESSES", "localhost:8471")
    group = ProcessGroup(SECTION, CHIPS, init_method=f"file://{tmp_path}/store", size=1)
    runtime.ranks = TpuRanks(runtime, group, torch.float32)
    yield runtime
    runtime.ranks.leave()


def test_sums_copies_and_host_objects_of_one_chip(runtime):
    ranks, values = runtime.ranks, torch.tensor([1.5, 2.5], device="tpu")
    assert dist.get_backend_config() == "cpu:gloo,tpu:tpu_dist"
    assert ranks.sum(values).tolist() == ranks.mean(values).tolist() == [1.5, 2.5]
    ranks.broadcast([values])
    assert ranks.gather({"a": 1}) == [{"a": 1}]
    ranks.barrier("end")
    layer = nn.Linear(2, 1).to("tpu")
    layer(values).sum().backward()
    ranks.reduce_gradients(torch.optim.SGD(layer.parameters(), lr=0.1))
    assert layer.weight.grad.tolist() == [[1.5, 2.5]]


def test_a_sum_is_an_operation_of_the_program_of_a_step(runtime):
    batch = runtime.to_device(next(create_batches(1)))

    def add(batch, numbers):
        return runtime.ranks.mean(batch.images.float().sum().reshape(1)) + numbers.step

    numbers = StepNumbers(step=torch.ones(1, device="tpu"))
    total = runtime.compile_step(add, 1)(batch, numbers)
    assert total.item() == batch.images.float().sum().item() + 1
    assert runtime.counters()["graphs"] == 0  # outside of a step nothing is counted


def test_ddp_sums_in_the_backward_pass(runtime):
    class Task:
        def loss(self, model, batch):
            return model(batch.images.float().permute(0, 3, 1, 2) / 255).square().mean()

    batch = runtime.to_device(next(create_batches(1)))
    model = create_vit().to("tpu")
    found = []
    for task in (
        Task(),
        overlap_sums(Task(), model, nn.Module(), torch.float32, finds_unused=False),
    ):
        model.zero_grad()
        task.loss(model, batch).backward()
        found.append([p.grad.cpu() for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1])


def test_fsdp_splits_weights_that_are_read_and_written_whole(runtime):
    model = create_vit().to("tpu")
    whole = {name: value.cpu() for name, value in model.state_dict().items()}
    images = torch.rand(2, 1, 8, 8).to("tpu")
    wanted = model(images).detach()
    split(model, torch.float32)
    model(images).square().sum().backward()
    torch.testing.assert_close(model(images).detach(), wanted)
    assert all(is_split(p) and is_split(p.grad) for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(join(value).cpu(), whole[name])
        with torch.no_grad():
            copy_whole(value, whole[name] + 1)
        assert torch.equal(join(value).cpu(), whole[name] + 1)
