"""What is installed and set: every check green and red."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from tests.tools.doctor.machines import (
    add_chip,
    add_package,
    add_torch,
    add_tpu,
    with_environment,
    with_program,
)
from tools.doctor import software
from tools.doctor.machine import GREEN, RED, YELLOW
from tools.doctor.torch_tpu import UNPROVEN, check_torch_tpu


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ((3, 11, 7, "final", 0), GREEN),
        ((3, 11, 0, "candidate", 1), YELLOW),
        ((3, 10, 12, "final", 0), RED),
        ((3, 13, 1, "final", 0), GREEN),
        ((3, 14, 0, "final", 0), RED),
    ],
)
def test_the_python_version_is_checked(machine, version, level):
    assert software.check_python(replace(machine, python_version=version)).level == level


def test_a_matching_torch_set_is_green(machine):
    add_torch(machine)
    found = software.check_torch(machine)
    assert found.level == GREEN and "torch_xla 2.9.0" in found.text


@pytest.mark.parametrize(
    ("torch", "xla", "hint"),
    [("2.15.0", "2.9.0", "torch==2.9.0 torch_xla==2.9.0"), ("2.9.0", "2.8.0+libtpu", "2.8.0")],
)
def test_a_torch_that_does_not_match_torch_xla_is_red_with_the_pair(machine, torch, xla, hint):
    add_torch(machine, torch, xla)
    found = software.check_torch(machine)
    assert found.level == RED and hint in found.hint


def test_a_torchvision_for_another_torch_is_red(machine):
    add_package(machine, "torch", "2.9.1")
    add_package(machine, "torchvision", "0.24.0", "torch==2.9.0")
    add_package(machine, "torch_xla", "2.9.0")
    found = software.check_torch(machine)
    assert found.level == RED and "torchvision 0.24.0 is built against torch 2.9.0" in found.text


def test_no_torch_is_red_and_no_torch_xla_is_yellow_without_a_tpu(machine):
    assert software.check_torch(machine).level == RED
    add_package(machine, "torch", "2.9.0")
    assert software.check_torch(machine).level == YELLOW
    add_tpu(machine)
    assert software.check_torch(machine).level == RED


def add_torch_tpu(machine, torch: str = "2.13.0+cu130") -> None:
    add_package(machine, "torch_tpu", "0.2.0")
    add_package(machine, "torch", torch)
    add_package(machine, "libtpu", "0.0.52")


def test_torchtpu_is_reported_with_what_no_chip_has_run(machine):
    assert check_torch_tpu(machine).level == GREEN  # not installed
    add_torch_tpu(machine)
    add_tpu(machine)
    found = check_torch_tpu(machine)
    assert found.level == YELLOW and "torch_tpu 0.2.0, torch 2.13.0+cu130" in found.text
    assert all(part in found.text for part in UNPROVEN)
    assert software.check_torch(machine).level == GREEN


def test_another_torch_or_both_stacks_are_red(machine):
    add_torch_tpu(machine, "2.10.0")
    found = check_torch_tpu(machine)
    assert found.level == RED and "torch 2.10.0 is not one of 2.11 to 2.15" in found.text
    add_package(machine, "torch_xla", "2.9.0")
    assert "torch_xla is installed beside torch_tpu" in check_torch_tpu(machine).text


def test_torchtpu_without_its_libtpu_is_red_and_another_release_is_yellow(machine):
    add_package(machine, "torch_tpu", "0.2.0")
    add_package(machine, "torch", "2.14.1")
    assert check_torch_tpu(machine).level == RED
    add_package(machine, "libtpu", "0.0.52")
    found = check_torch_tpu(machine)
    assert found.level == YELLOW and "tests were run with torch 2.13.0" in found.text


@pytest.mark.parametrize(
    ("kind", "words"),
    [("0x005e", "below /dev/vfio alone, and there are none"), ("0x0027", "no support of v2 or v3")],
)
def test_chips_that_torchtpu_cannot_open_are_red(machine, kind, words):
    add_torch_tpu(machine)
    add_chip(machine.root, "0000:00:05.0", kind=kind)
    (machine.root / "dev/accel0").touch()
    found = check_torch_tpu(machine)
    assert found.level == RED and words in found.text and "setup --tpu" in found.hint


def test_a_tpu_without_libtpu_is_red_and_another_libtpu_is_yellow(machine):
    add_torch(machine)
    add_tpu(machine)
    found = software.check_torch(machine)
    assert found.level == RED and found.hint == "bash run_commands.sh setup --tpu"
    add_package(machine, "libtpu", "0.0.51")
    found = software.check_torch(machine)
    assert found.level == YELLOW and "made with libtpu 0.0.21" in found.text


def test_tensorflow_after_torch_xla_is_tested_in_a_child_process(machine):
    add_torch(machine)
    assert software.check_imports(machine).level == RED  # not installed
    add_package(machine, "tensorflow-cpu", "2.21.0")
    assert software.check_imports(with_program(machine, "python", "exit 0")).level == GREEN
    aborts = with_program(machine, "python", "echo 'LLVM ERROR: inconsistency' >&2; kill -ABRT $$")
    found = software.check_imports(aborts)
    assert found.level == RED and "ended by signal 6" in found.text


@pytest.mark.xla
def test_the_import_test_loads_both_libraries_as_a_run_does(machine):
    add_torch(machine)
    add_package(machine, "tensorflow-cpu", "2.21.0")
    see = "import sys; print([n for n in sys.argv[1].split() if n in sys.modules])"
    names = "_XLAC tensorflow torch_xla keras scipy sklearn pandas"
    real = with_program(
        machine,
        "python",
        f"""exec {sys.executable} -c "$2; {see}" '{names}' | tee {machine.root}/out""",
    )
    assert software.check_imports(real).level == GREEN
    assert (machine.root / "out").read_text().strip() == "['_XLAC', 'tensorflow']"


def test_harmful_builds_of_tensorflow_are_reported(machine):
    add_torch(machine)
    add_package(machine, "tensorflow", "2.21.0")
    fits = with_program(machine, "python", "exit 0")
    assert software.check_imports(fits).level == YELLOW
    add_package(machine, "tensorflow-cpu", "2.21.0")
    found = software.check_imports(fits)
    assert found.level == RED and "overwrite each other" in found.text


def test_requirements_on_numpy_and_protobuf_are_checked(machine):
    assert software.check_clashes(machine).level == RED  # no NumPy
    add_package(machine, "numpy", "2.4.6")
    add_package(machine, "fits", "1.0", "numpy>=1.26", 'numpy<2; python_version < "3.9"')
    assert software.check_clashes(machine).level == GREEN
    add_package(machine, "old", "1.0", "numpy<2")
    found = software.check_clashes(machine)
    assert found.level == RED and "old 1.0 demands numpy <2" in found.text


def test_the_allocator_is_green_only_if_loaded(machine):
    found = software.check_allocator(machine)
    assert found.level == YELLOW and "apt-get install" in found.hint
    library = machine.root / "usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
    library.parent.mkdir(parents=True)
    library.touch()
    assert "export LD_PRELOAD=" in software.check_allocator(machine).hint
    named = with_environment(machine, LD_PRELOAD="/no/libtcmalloc.so")
    assert "was not loaded" in software.check_allocator(named).text
    (machine.root / "proc/self/maps").write_text("7f00 r-xp /usr/lib/libtcmalloc_minimal.so.4\n")
    assert software.check_allocator(named).level == GREEN


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("XLA_USE_BF16", "1", RED),
        ("XLA_USE_BF16", "0", GREEN),
        ("XLA_IR_DEBUG", "1", YELLOW),
        ("XLA_MAX_ASYNC_QUEUE", "4", RED),
        ("XRT_TPU_CONFIG", "localservice;0;localhost:51011", YELLOW),
        ("HDF5_USE_FILE_LOCKING", "TRUE", YELLOW),
        ("HDF5_USE_FILE_LOCKING", "FALSE", GREEN),
        ("PJRT_DEVICE", "TPU", RED),
        ("PJRT_DEVICE", "GPU", RED),
        ("PJRT_DEVICE", "CPU", GREEN),
        ("LANG", "C", GREEN),
    ],
)
def test_harmful_environment_variables_are_reported(machine, name, value, level):
    found = software.check_variables(with_environment(machine, **{name: value}))
    assert found.level == level
    assert level == GREEN or name in found.hint


def test_a_tpu_unused_because_of_pjrt_device_is_reported(machine):
    add_tpu(machine)
    assert software.check_variables(with_environment(machine, PJRT_DEVICE="TPU")).level == GREEN
    found = software.check_variables(with_environment(machine, PJRT_DEVICE="CPU"))
    assert found.level == YELLOW and "4 TPU chips unused" in found.text
