"""Which runtime, how many ranks, which cache: decided before a device is touched."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from utils.config.devices import DEVICES
from utils.config.execution import RuntimeSection
from utils.config.metadata import read_key_info
from utils.errors import UserError
from utils.registry import load_object
from utils.runtime import choice as room
from utils.runtime.cuda import CudaRuntime
from utils.runtime.processes.group import ProcessGroup
from utils.runtime.start import get_start
from utils.runtime.xla import start
from utils.runtime.xla.runtime import XlaRuntime, prepare_cache
from utils.runtime.xla.spmd import get_mesh_shape


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch):
    """No chip, no GPU, no word of other processes."""
    for name in ("PJRT_DEVICE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(start, "has_tpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("pjrt", "has_tpu", "words"),
    [
        ("TPU", True, "on TPU"),
        ("CPU", True, "on the CPU"),
        (None, True, "on TPU"),
        (None, False, "on the CPU"),
    ],
)
def test_xla_is_reported_as_a_tpu_where_there_is_one(pjrt, has_tpu, words, monkeypatch):
    monkeypatch.setattr(start, "has_tpu", lambda: has_tpu)
    if pjrt is not None:
        monkeypatch.setenv("PJRT_DEVICE", pjrt)
    assert words in get_start("xla").describe()
    assert get_start("cpu").describe() == "cpu"


def test_a_gpu_is_used_if_present_and_refused_otherwise(monkeypatch):
    with pytest.raises(UserError, match="sees no NVIDIA GPU"):
        room.choose_device(RuntimeSection(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert room.choose_device(RuntimeSection(device="cuda")) == "cuda"


@pytest.mark.parametrize(
    ("keys", "name", "count"),
    [
        ({}, "cpu", 1),
        ({"num_processes": 3}, "cpu", 3),
        ({"num_processes": 2}, "cuda", 2),
        ({}, "cuda", None),
        ({"parallel": "spmd"}, "xla", None),
        ({}, "xla", 1),
    ],
)
def test_ranks_are_known_in_advance_unless_the_device_decides(keys, name, count):
    assert room.find_planned_ranks(RuntimeSection(**keys), name) == count


def test_a_tpu_counts_its_own_chips(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert room.find_planned_ranks(RuntimeSection(), "xla") is None
    assert room.find_planned_ranks(RuntimeSection(), "cpu") == 1


@pytest.mark.parametrize(
    ("rank", "is_silent"), [(None, False), ("", False), ("0", False), ("1", True), ("12", True)]
)
def test_only_rank_zero_logs(rank, is_silent, monkeypatch):
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert room.is_silent_rank() is is_silent


@pytest.mark.parametrize(
    ("name", "pjrt", "has_tpu", "found"),
    [
        ("xla", None, False, "CPU"),
        ("xla", None, True, None),
        ("xla", "TPU", False, "TPU"),
        ("cpu", None, False, None),
    ],
)
def test_pjrt_device_is_set_to_cpu_without_another_device(name, pjrt, has_tpu, found, monkeypatch):
    monkeypatch.setattr(start, "has_tpu", lambda: has_tpu)
    monkeypatch.setenv("PJRT_DEVICE", pjrt or "")
    if pjrt is None:
        monkeypatch.delenv("PJRT_DEVICE")
    get_start(name).prepare_environment()
    assert os.environ.get("PJRT_DEVICE") == found


@pytest.mark.parametrize(
    ("keys", "devices", "shape"),
    [
        ({}, 4, (4, 1)),
        ({"mesh_fsdp": 2}, 8, (4, 2)),
        ({"mesh_data": 2, "mesh_fsdp": 3}, 6, (2, 3)),
        ({"mesh_context": 2, "mesh_fsdp": 2}, 8, (2, 2, 2)),
    ],
)
def test_the_mesh_uses_devices_not_needed_for_fsdp_for_data(keys, devices, shape):
    assert get_mesh_shape(RuntimeSection(parallel="spmd", **keys), devices) == shape


def test_the_automatic_compile_cache_is_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = prepare_cache(RuntimeSection(compile_cache="auto"), "TPU", rank=1)
    assert Path(folder) == tmp_path / ".cache" / "xla_graphs" / "rank_1"


@pytest.mark.xla
def test_a_runtime_with_a_cache_lets_xla_write_it(tmp_path, monkeypatch):
    import torch_xla.runtime as xr

    told = []
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(
        "utils.runtime.xla.runtime.prepare_cache", lambda section, hardware, rank: tmp_path
    )
    monkeypatch.setattr(
        xr, "initialize_cache", lambda path, readonly: told.append((path, readonly))
    )
    XlaRuntime(RuntimeSection(device="xla"))
    assert told == [(str(tmp_path), False)]


def test_a_process_without_its_own_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="this host has 2; lower it"):
        CudaRuntime(RuntimeSection(device="cuda"))
    with pytest.raises(UserError, match=r"num_processes \(3\) exceeds the 2 GPUs"):
        get_start("cuda").count_processes(RuntimeSection(num_processes=3))
    assert get_start("cuda").count_processes(RuntimeSection(num_processes=2)) == 2
    assert get_start("cuda").count_processes(RuntimeSection()) == 2


def test_a_gpu_is_chosen_by_local_rank_and_its_sums_overlap(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", taken.append)
    pair = SimpleNamespace(rank=0, size=2)
    monkeypatch.setattr(ProcessGroup, "join", lambda section, backend: pair)
    monkeypatch.setenv("LOCAL_RANK", "1")  # without WORLD_SIZE of nobody's group
    assert CudaRuntime(RuntimeSection(device="cuda"))._uses_ddp
    assert not CudaRuntime(RuntimeSection(device="cuda", overlap=False))._uses_ddp
    monkeypatch.setenv("WORLD_SIZE", "2")
    CudaRuntime(RuntimeSection(device="cuda", tf32=True))
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert taken == [first, "highest", first, "highest", second, "high"]


def test_every_configurable_device_has_a_runtime():
    known = read_key_info(RuntimeSection.model_fields["device"]).known
    assert known == ("auto", *DEVICES)
    for name, device in DEVICES.items():
        assert load_object(device.runtime).name == get_start(name).name == name
