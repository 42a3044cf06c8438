"""What is decided of TorchTPU before it is imported; torch_tpu need not be installed."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace

import pytest

from utils.config.execution import RuntimeSection
from utils.device_use import list_device_files
from utils.errors import UserError
from utils.runtime.tpu import standin, start
from utils.runtime.xla import start as xla_start

SECTION = RuntimeSection(device="tpu")


@pytest.fixture
def machine(monkeypatch):
    """A machine with torch_tpu, a torch that fits it and one chip; a test takes parts away."""
    packages = {"torch": "2.13.0+cu130"}
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.delenv(standin.VARIABLE, raising=False)
    monkeypatch.setattr(start, "is_installed", lambda: True)
    monkeypatch.setattr(start, "list_chips", lambda: ["/dev/vfio/0"])
    monkeypatch.setattr(start, "check_holders", lambda: None)
    monkeypatch.setattr(start.importlib.metadata, "version", packages.__getitem__)
    monkeypatch.setattr(start.importlib.util, "find_spec", packages.get)
    return packages


def check() -> None:
    start.TpuStart("tpu").check(SECTION)


def test_a_machine_with_a_chip_may_use_it(machine):
    check()
    assert start.TpuStart("tpu").is_available()
    assert start.TpuStart("tpu").describe() == "tpu"


def test_without_torch_tpu_the_setup_is_named(machine, monkeypatch):
    monkeypatch.setattr(start, "is_installed", lambda: False)
    with pytest.raises(UserError, match=r"torch_tpu is not installed; run bash run_commands\.sh"):
        check()


def test_both_stacks_in_one_environment_are_refused(machine):
    machine["torch_xla"] = "2.9.0"
    with pytest.raises(UserError, match="torch_xla is installed beside torch_tpu"):
        check()


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "3.0.0+cpu"])
def test_another_torch_is_refused(version, machine):
    machine["torch"] = version
    with pytest.raises(UserError, match=r"is not one of 2\.11 to 2\.15"):
        check()


def test_without_a_chip_the_stand_in_is_offered(machine, monkeypatch):
    monkeypatch.setattr(start, "list_chips", list)
    assert not start.TpuStart("tpu").is_available()
    with pytest.raises(UserError, match="or set TPU_STANDIN=cpu to try it on the CPU"):
        check()


def test_an_unknown_stand_in_is_refused(machine, monkeypatch):
    monkeypatch.setenv(standin.VARIABLE, "gpu")
    with pytest.raises(UserError, match=r"TPU_STANDIN \('gpu'\)"):
        check()


def test_a_stand_in_without_its_package_is_refused(machine, monkeypatch):
    monkeypatch.setenv(standin.VARIABLE, "cpu")
    monkeypatch.setattr(standin.importlib.util, "find_spec", lambda name: None)
    standin.find_plugin.cache_clear()
    with pytest.raises(UserError, match="needs the package lammps-jax-pjrt-cpu"):
        start.TpuStart("tpu").check(SECTION)


def test_a_held_chip_is_refused_with_its_holder(tmp_path, monkeypatch):
    chip = tmp_path / "0"
    chip.touch()
    monkeypatch.setattr(start, "list_chips", lambda: [str(chip)])
    start.check_holders()
    with chip.open():
        monkeypatch.setattr(start.os, "getpid", lambda: 0)  # as seen by another process
        with pytest.raises(UserError, match=rf"process \d+ \(.+\) holds {chip}"):
            start.check_holders()


def test_chips_are_those_below_vfio_for_torchtpu_and_all_for_xla(tmp_path, monkeypatch):
    list_files = functools.partial(list_device_files, tmp_path)
    for module in (start, xla_start):
        monkeypatch.setattr(module, "list_device_files", list_files)
    assert (start.list_chips(), xla_start.has_tpu()) == ([], False)
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/vfio").touch()
    (tmp_path / "dev/accel0").touch()
    assert (start.list_chips(), xla_start.has_tpu()) == ([], True)
    (tmp_path / "dev/vfio/3").touch()
    assert start.list_chips() == [f"{tmp_path}/dev/vfio/3"]


@pytest.fixture
def no_cache(monkeypatch):
    """An environment that names no cache; set_compile_cache's own change is undone."""
    monkeypatch.setenv(start._CACHE, "")
    monkeypatch.delenv(start._CACHE)
    monkeypatch.setenv(standin.VARIABLE, "cpu")


@pytest.mark.parametrize(("key", "is_set"), [("auto", False), ("", False), ("here", True)])
def test_the_compile_cache_is_set_before_torch_tpu_is_loaded(key, is_set, tmp_path, no_cache):
    place = key and key.replace("here", str(tmp_path / "new"))
    start.set_compile_cache(RuntimeSection(device="tpu", compile_cache=place))
    assert os.environ.get(start._CACHE) == (f"{tmp_path}/new/torch_tpu" if is_set else None)


def test_a_cache_of_the_environment_stays(tmp_path, no_cache, monkeypatch):
    monkeypatch.setenv(start._CACHE, "/theirs")
    start.set_compile_cache(RuntimeSection(device="tpu", compile_cache=str(tmp_path)))
    assert os.environ[start._CACHE] == "/theirs"


@pytest.mark.parametrize("place", ["s3://bucket/cache", "FILE"])
def test_a_cache_that_would_end_the_process_is_refused(place, tmp_path, no_cache):
    (tmp_path / "FILE").touch()
    section = RuntimeSection(device="tpu", compile_cache=place.replace("FILE", f"{tmp_path}/FILE"))
    with pytest.raises(UserError, match=r"runtime\.compile_cache"):
        start.set_compile_cache(section)


def test_a_url_that_torch_tpu_cannot_write_is_refused_before_the_device(machine):
    section = RuntimeSection(device="tpu", compile_cache="s3://bucket/cache")
    with pytest.raises(UserError, match="use a directory or a gs:// URL"):
        start.TpuStart("tpu").check(section)


def test_the_stand_in_is_described_as_the_cpu(monkeypatch):
    monkeypatch.setenv(standin.VARIABLE, "cpu")
    assert "no TPU is used" in start.TpuStart("tpu").describe()
    assert not start.TpuStart("tpu").has_chips()


def test_processes_of_torchrun_need_the_addresses_of_all(machine, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("TORCH_TPU_SLICEBUILDER_ADDRESSES", raising=False)
    with pytest.raises(UserError, match="but TORCH_TPU_SLICEBUILDER_ADDRESSES is not set"):
        check()
    monkeypatch.setenv("TORCH_TPU_SLICEBUILDER_ADDRESSES", "localhost:1,localhost:2")
    monkeypatch.setattr(start, "check_holders", None)  # the other process holds a chip
    check()


def test_hosts_of_a_slice_are_left_to_torchrun(machine, monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "worker")
    check()
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "one,other")
    with pytest.raises(UserError, match=r"names 2 hosts, .*use torchrun on each"):
        check()


def test_a_process_for_each_device_of_the_host(machine, monkeypatch):
    found = SimpleNamespace(get_tpu_device_count=lambda: 4)
    monkeypatch.setattr(start, "_get_hardware", lambda: found)
    chips = start.TpuStart("tpu")
    assert chips.decides_ranks(SECTION)
    assert chips.count_processes(SECTION) == 4
    assert chips.count_processes(RuntimeSection(device="tpu", num_processes=2)) == 2
    with pytest.raises(UserError, match=r"num_processes \(5\) exceeds the 4 devices"):
        chips.count_processes(RuntimeSection(device="tpu", num_processes=5))


@pytest.mark.tpu
def test_torch_tpu_is_told_which_processes_have_which_chips(machine, monkeypatch):
    """By its own function, on a machine of four chips that the kernel does not show."""
    hardware = start._get_hardware()
    monkeypatch.setattr(hardware, "_scan_pci_tpus", lambda: (4, {1: "1,1,1", 4: "2,2,1"}))
    monkeypatch.setattr(hardware, "get_tpu_device_count", lambda: 4)
    names = ("TORCH_TPU_TOPOLOGY", "TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_XPROF_SESSION_ID")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is unset again
        monkeypatch.delenv(name)
    chips = start.TpuStart("tpu")
    with pytest.raises(UserError, match=r"num_processes \(3\) is not a part of this host"):
        chips._set_launch_environment(RuntimeSection(device="tpu", num_processes=3))
    chips._set_launch_environment(SECTION)
    assert start.os.environ[names[0]] == "2,2,1"
    assert len(start.os.environ[names[1]].split(",")) == 4
