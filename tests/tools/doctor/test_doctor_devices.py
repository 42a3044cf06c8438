"""TPUs and GPUs: every check green and red."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.doctor.machines import (
    add_chip,
    add_torch,
    add_tpu,
    run_unprivileged,
    with_environment,
    with_program,
    with_wishes,
)
from tools.doctor import devices
from tools.doctor.machine import GREEN, RED, YELLOW, Machine
from utils.device_use import find_holders


def test_no_tpu_is_reported_only_after_a_search(machine):
    found = devices.check_tpu(machine)
    assert found.level == GREEN and found.text.startswith("no TPU: 1 PCI devices")


def test_an_unreadable_bus_is_not_reported_as_no_tpu(machine):
    found = devices.check_tpu(replace(machine, root=machine.root / "nothing"))
    assert found.level == YELLOW
    assert "could not look at the PCI bus and /dev" in found.text and "no TPU" not in found.text


@pytest.mark.parametrize(
    ("kind", "folder", "name", "shown"),
    [
        ("0x0063", "dev/vfio", "0", "v5e"),
        ("0x005e", "dev", "accel0", "v4"),
        ("0x0062", "dev/vfio", "0", "v5p"),
        ("0x006f", "dev/vfio", "0", "v6e"),
    ],
)
def test_chips_of_each_generation_are_counted(machine, kind, folder, name, shown):
    add_chip(machine.root, "0000:00:05.0", kind=kind)
    (machine.root / folder).mkdir(exist_ok=True)
    (machine.root / folder / name).touch()
    found = devices.check_tpu(machine)
    assert found.level == GREEN and found.text == f"1 chips ({shown}), 1 device files"


def test_chips_without_device_files_are_red(machine):
    add_chip(machine.root, "0000:00:05.0")
    found = devices.check_tpu(machine)
    assert found.level == RED and "--privileged" in found.hint


def test_an_unopenable_device_file_is_red(shared_machine):
    add_tpu(shared_machine, 1)
    (shared_machine.root / "dev/vfio/0").chmod(0)
    found = run_unprivileged(devices.check_tpu, shared_machine)
    assert found.level == RED and "no permission for /dev/vfio/0" in found.text


def test_a_tpu_vm_without_a_tpu_is_red(machine, metadata):
    assert devices.check_tpu(with_environment(machine, PJRT_DEVICE="TPU")).level == RED
    assert devices.check_tpu(replace(machine, metadata_url=metadata.url)).level == GREEN
    metadata.known["instance/attributes/accelerator-type"] = "v5litepod-8"
    found = devices.check_tpu(replace(machine, metadata_url=metadata.url))
    assert found.level == RED and "accelerator type v5litepod-8" in found.text


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({}, GREEN),
        ({"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}, GREEN),
        ({"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "a,b"}, RED),
        ({"TPU_WORKER_ID": "first"}, RED),
        ({"TPU_VISIBLE_CHIPS": "0"}, YELLOW),
    ],
)
def test_the_topology_is_checked(machine, variables, level):
    assert devices.check_topology(with_environment(machine, **variables)).level == level


def test_the_process_that_holds_a_tpu_is_named(machine):
    add_tpu(machine)
    assert devices.check_busy(machine).level == GREEN
    descriptors = machine.root / "proc/4711/fd"
    descriptors.mkdir(parents=True)
    (descriptors / "3").symlink_to("/dev/null")
    (descriptors.parent / "cmdline").write_bytes(b"python\0main.py\0")
    assert devices.check_busy(machine).level == GREEN
    (descriptors / "4").symlink_to("/dev/vfio/2")
    found = devices.check_busy(machine)
    assert found.level == RED
    assert "process 4711 (python main.py) holds /dev/vfio/2" in found.text
    assert "kill 4711" in found.hint
    (descriptors.parent / "stat").write_text("4711 (py (x)) S 1 4711 4711 0")
    assert "(python main.py, an orphan)" in devices.check_busy(machine).text


def test_a_stale_lock_of_libtpu_is_yellow(machine):
    add_tpu(machine)
    (machine.root / "tmp/libtpu_lockfile").touch()
    assert devices.check_busy(machine).level == YELLOW


def test_unlistable_device_files_are_not_reported_as_missing(shared_machine):
    add_tpu(shared_machine)
    (shared_machine.root / "dev/vfio").chmod(0)
    for check in (devices.check_tpu, devices.check_busy):
        found = run_unprivileged(check, shared_machine)
        assert found.level == YELLOW and "could not look" in found.text


def test_unreadable_processes_are_counted(shared_machine):
    add_tpu(shared_machine)
    (shared_machine.root / "proc/5/fd").mkdir(parents=True)
    (shared_machine.root / "proc/5/fd").chmod(0)
    found = run_unprivileged(devices.check_busy, shared_machine)
    assert found.level == YELLOW and "1 processes of others were not to be read" in found.text


def test_a_real_process_with_an_open_file_is_found_in_the_real_proc(tmp_path):
    """The same scan, on this very process."""
    (tmp_path / "dev/vfio").mkdir(parents=True)
    device = tmp_path / "dev/vfio/0"
    device.touch()
    with device.open() as held:
        name = str(Path(f"/proc/self/fd/{held.fileno()}").readlink())
        found, _ = find_holders({name})
    assert [holder.process for holder in found] == [str(os.getpid())]


def test_a_step_on_this_machine_is_correct_on_every_device():
    found = devices.check_step(Machine())
    assert found.level == GREEN, found.text
    assert "matmul" in found.text and "all-reduce over 1" in found.text


STEP = '{"device": "tpu:0", "world": 4, "correct": %s, "matmul_ms": %s, "all_reduce_ms": 1.0}'


@pytest.mark.parametrize(
    ("program", "level", "text"),
    [
        (f"echo '{STEP % ('true', '0.5')}'", GREEN, "tpu:0 matmul 0.5 ms, all-reduce over 4"),
        (f"echo '{STEP % ('false', '0.5')}'", RED, "computed a wrong value"),
        (f"echo '{STEP % ('true', '9000.0')}'", YELLOW, "slow"),
        ("echo 'TPU initialization failed' >&2; exit 1", RED, "TPU initialization failed"),
        ("exit 0", RED, "failed"),
    ],
)
def test_a_test_step_reports_the_state_of_its_device(machine, program, level, text):
    add_torch(machine)
    found = devices.check_step(with_program(machine, "python", program))
    assert found.level == level and text in found.text


def test_a_tpu_whose_step_ran_on_the_cpu_is_red(machine):
    """torch_xla without libtpu falls back to the CPU in silence."""
    add_torch(machine)
    add_tpu(machine)
    step = STEP.replace("tpu:0", "cpu:0") % ("true", "1.0")
    found = devices.check_step(with_program(machine, "python", f"echo '{step}'"))
    assert found.level == RED and "PJRT gave other devices: cpu:0" in found.text


def test_a_test_step_is_skipped_where_it_would_hang_or_disturb(machine):
    add_torch(machine)
    add_tpu(machine)
    alone = with_environment(machine, TPU_WORKER_HOSTNAMES="a,b", TPU_WORKER_ID="0")
    found = devices.check_step(alone)
    assert found.level == YELLOW and "one worker of 2" in found.text
    ran = with_program(with_wishes(alone, in_pod=True), "python", f"echo '{STEP % ('true', 1)}'")
    assert devices.check_step(ran).level == GREEN
    (machine.root / "proc/1/fd").mkdir(parents=True)
    (machine.root / "proc/1/fd/4").symlink_to("/dev/vfio/2")
    (machine.root / "proc/1/cmdline").write_bytes(b"x")
    found = devices.check_step(machine)
    assert found.level == YELLOW and "holds the TPU" in found.text


def test_a_hanging_program_is_ended_and_reported(machine):
    hanging = with_program(machine, "python", "exec sleep 1000")
    answer = hanging.run([hanging.python], timeout_s=0.2)
    assert answer.code is None and answer.reason == "did not end within 0.2 s"


@pytest.mark.parametrize(
    ("smi", "python", "level", "text"),
    [
        ("echo 'H200, 570.1, 143771 MiB'", "echo 1 12.8 2.27.5", GREEN, "NCCL 2.27.5"),
        ("echo 'H200, 570.1, 143771 MiB'", "echo 0 None none", RED, "PyTorch sees 0"),
        ("echo 'H200, 570.1, 143771 MiB'", "echo no torch >&2; exit 1", RED, "no torch"),
        ("echo 'Driver/library version mismatch'; exit 18", "", RED, "version mismatch"),
    ],
)
def test_gpus_are_checked(machine, smi, python, level, text):
    changed = with_program(with_program(machine, "nvidia-smi", smi), "python", python)
    found = devices.check_cuda(changed)
    assert found.level == level and text in found.text


def test_a_missing_gpu_and_missing_gpu_tools_are_reported(machine):
    bare = with_environment(machine, PATH=str(machine.root))
    assert devices.check_cuda(bare).text.startswith("no GPU")
    (machine.root / "dev/nvidia0").touch()
    found = devices.check_cuda(bare)
    assert found.level == YELLOW and "no nvidia-smi" in found.text
