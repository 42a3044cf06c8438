"""What is decided of TorchTPU before it is imported; torch_tpu need not be installed."""

from __future__ import annotations

import functools
import os

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
