"""Limits, memory, disks, clock, run store and dataset: every check green and red."""

from __future__ import annotations

import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.doctor.machines import add_tpu, with_environment, with_wishes
from tools.doctor import host, storage
from tools.doctor.machine import GREEN, RED, YELLOW, Machine, Requirements


@pytest.mark.parametrize(("limit", "level"), [(256, RED), (2048, YELLOW), (8192, GREEN)])
def test_the_limit_of_open_files_is_checked(machine, limit, level):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY,) and hard < limit:
        pytest.skip(f"this machine allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        assert host.check_open_files(machine).level == level
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_processor_with_a_known_fault_is_named_with_the_workaround(machine, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (machine.root / "proc/cpuinfo").write_text("flags\t\t: fpu avx avx2\n")
    found = host.check_processor(machine)
    assert found.level == GREEN and "AVX2" in found.text and "fewer than 8 channels" in found.text
    (machine.root / "proc/cpuinfo").write_text("flags\t\t: fpu sse4_1\n")
    assert "no known fault" in host.check_processor(machine).text


class Sized(Machine):
    """A machine whose file systems have chosen sizes, in GiB."""

    sizes = (100.0, 50.0)

    def get_disk(self, path: Path) -> tuple[float, float]:
        return self.sizes


def with_disk(machine: Machine, total: float, free: float) -> Machine:
    kind = type("Disk", (Sized,), {"sizes": (total, free)})
    return kind(**{name: getattr(machine, name) for name in machine.__dataclass_fields__})


@pytest.mark.parametrize(
    ("total", "free", "level"), [(16, 16, GREEN), (0.06, 0.06, YELLOW), (16, 0.1, RED)]
)
def test_shared_memory_is_checked(machine, total, free, level):
    assert host.check_shm(with_disk(machine, total, free)).level == level


def test_a_machine_without_shared_memory_is_red(machine):
    (machine.root / "dev/shm").rmdir()
    assert host.check_shm(machine).level == RED


@pytest.mark.parametrize(("free", "level"), [(500, GREEN), (10, YELLOW), (0.5, RED)])
def test_disks_for_checkpoints_and_compiled_graphs_are_checked(machine, free, level):
    changed = with_wishes(with_disk(machine, 1000, free), compile_cache="/cache")
    assert host.check_checkpoint_disk(changed).level == level
    assert host.check_cache_disk(changed).level == level
    assert host.check_checkpoint_disk(with_wishes(changed, output="gs://b/r")).level == GREEN
    assert host.check_cache_disk(with_wishes(changed, compile_cache="")).level == GREEN
    auto = with_wishes(changed, compile_cache="auto")
    assert "no TPU" in host.check_cache_disk(auto).text
    add_tpu(machine)
    assert host.check_cache_disk(auto).level == level


def test_the_size_of_a_disk_is_read_at_the_nearest_existing_directory(tmp_path):
    total, free = Machine().get_disk(tmp_path / "not" / "there")
    assert (total, free) == pytest.approx(Machine().get_disk(tmp_path), rel=0.1)
    assert 0 <= free <= total


@pytest.mark.parametrize(
    ("chips", "gib", "level"), [(1, 1.0, GREEN), (4, 1.0, GREEN), (4, 20.0, YELLOW), (8, 90, RED)]
)
def test_memory_is_compared_with_the_shuffle_buffer(machine, chips, gib, level):
    add_tpu(machine, chips)
    found = host.check_memory(with_wishes(machine, shuffle_gib=gib))
    assert found.level == level
    assert level == GREEN or found.hint


def test_unreadable_memory_is_reported(machine):
    (machine.root / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    assert "has no MemAvailable" in host.check_memory(machine).text


@pytest.mark.parametrize(("ahead_s", "level"), [(0, GREEN), (20, YELLOW), (-600, RED)])
def test_the_clock_is_compared_with_the_clouds(machine, metadata, ahead_s, level):
    metadata.ahead_s = ahead_s
    found = host.check_clock(replace(machine, metadata_url=metadata.url))
    assert found.level == level and "metadata server" in found.text


def test_without_a_cloud_the_kernels_clock_status_counts(machine):
    def refuse() -> int:
        raise OSError(1, "not permitted")

    assert host.check_clock(machine, lambda: 0x2001).level == GREEN
    assert host.check_clock(machine, lambda: 0x0040).level == YELLOW
    assert "could not read the status of the kernel" in host.check_clock(machine, refuse).text


def test_the_kernel_reports_its_clock_status():
    assert 0 <= host.read_clock_status() < 0x10000


def test_a_writable_directory_is_green(machine, tmp_path):
    found = storage.check_output(with_wishes(machine, output=str(tmp_path / "new" / "runs")))
    assert found.level == GREEN
    assert list(tmp_path.glob("**/.doctor-*")) == []


def test_a_file_in_place_of_the_run_store_is_red(machine, tmp_path):
    (tmp_path / "file").touch()
    found = storage.check_output(with_wishes(machine, output=str(tmp_path / "file")))
    assert found.level == RED and "is a file" in found.text


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="no file system that refuses root")
def test_an_unwritable_directory_is_red(machine):
    found = storage.check_output(with_wishes(machine, output="/sys/kernel/runs"))
    assert found.level == RED and "cannot be written" in found.text


def test_a_writable_url_is_green_and_others_are_red(machine):
    import fsspec

    memory = fsspec.filesystem("memory")  # one for the whole process
    before = memory.find("/")
    assert storage.check_output(with_wishes(machine, output="memory://runs")).level == GREEN
    assert memory.find("/") == before
    found = storage.check_output(with_wishes(machine, output="nosuch://bucket/runs"))
    assert found.level == RED and "nosuch" in found.text
    found = storage.check_output(with_wishes(machine, output="http://127.0.0.1:9/runs"))
    assert found.level == RED


def test_credentials_are_checked(machine, metadata):
    asked = with_wishes(machine, output="gs://bucket/runs")
    assert storage.check_credentials(machine).level == GREEN
    found = storage.check_credentials(asked)
    assert found.level == RED and "application-default login" in found.hint
    metadata.known["instance/service-accounts/default/email"] = "robot@project"
    served = storage.check_credentials(replace(asked, metadata_url=metadata.url))
    assert served.level == GREEN and "robot@project" in served.text
    named = with_environment(asked, GOOGLE_APPLICATION_CREDENTIALS="/no/key.json")
    assert storage.check_credentials(named).level == RED
    key = machine.root / "key.json"
    key.touch()
    named = with_environment(asked, GOOGLE_APPLICATION_CREDENTIALS=str(key))
    assert storage.check_credentials(named).level == GREEN
    own = machine.root / ".config/gcloud/application_default_credentials.json"
    own.parent.mkdir(parents=True)
    own.touch()
    assert storage.check_credentials(asked).level == GREEN


def test_the_first_record_of_a_dataset_decodes(digits_root):
    found = storage.check_dataset(Machine(requirements=Requirements(data_dir=str(digits_root))))
    assert found.level == GREEN, found.text
    assert "decodes, label" in found.text and found.value.startswith("digits")


def test_a_missing_dataset_is_red(machine, tmp_path):
    assert storage.check_dataset(machine).level == YELLOW
    here = Machine(requirements=Requirements(data_dir=str(tmp_path / "none")))
    found = storage.check_dataset(here)
    assert found.level == RED and str(tmp_path / "none") in found.text


@pytest.mark.slow
def test_an_undecodable_record_is_red(digits_root, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(digits_root, root)
    for path in root.rglob("*.tfrecord*"):
        data = path.read_bytes().replace(b"\x89PNG", b"\x89BAD")
        path.write_bytes(data)
    found = storage.check_dataset(Machine(requirements=Requirements(data_dir=str(root))))
    assert found.level == RED
