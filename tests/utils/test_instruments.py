"""A device's readings reach the metrics and never block the loop."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import pytest
import torch

import main
from store.record.history import read_metrics
from tests.support.tiny_parts import create_argv, create_config
from utils.config.execution import RuntimeSection
from utils.device_use import DeviceUse, read_nvidia
from utils.runtime.cpu import CpuRuntime
from utils.runtime.instruments import Instruments, UseReading
from utils.runtime.launcher import create_runtime
from utils.runtime.peaks import get_peak_tflops


def read_next(reading: UseReading) -> float | None:
    """Return the next reading after the last request was answered."""
    reading._thread.join(10)
    return reading.take_duty()


def test_a_gpu_is_read_by_its_id_for_the_next_line(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$@" >> "$0.asked"\necho "90, 1024, 2048"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    reading = UseReading(functools.partial(read_nvidia, "GPU-1a2b"))
    assert reading.take_duty() is None
    assert read_next(reading) == read_next(reading) == pytest.approx(0.9)
    assert "--id=GPU-1a2b" in Path(f"{program}.asked").read_text()


def test_an_unresponsive_device_neither_blocks_nor_repeats_old_readings():
    answers, asked = threading.Event(), []

    def read() -> list[DeviceUse]:
        asked.append(1)
        answers.wait(30)
        return [DeviceUse(50.0, 0, 1), DeviceUse(None, 0, 1), DeviceUse(100.0, 0, 1)]

    reading = UseReading(read)
    assert [reading.take_duty() for _ in range(3)] == [None] * 3
    assert len(asked) == 1
    answers.set()
    assert read_next(reading) == pytest.approx(0.75)
    assert UseReading(list).take_duty() is None


class TellingInstruments(Instruments):
    """Instruments of a device with all readings."""

    def get_peak_gib(self) -> float:
        return 1.5

    def _find_reader(self):
        return lambda: [DeviceUse(80.0, 1, 2)]


def test_a_run_writes_its_devices_readings(tmp_path, monkeypatch):
    """Images as well count their FLOPs, where the device's peak is known."""
    monkeypatch.setattr(CpuRuntime, "_create_instruments", lambda self: TellingInstruments(self))
    describe = CpuRuntime.describe
    monkeypatch.setattr(CpuRuntime, "describe", lambda s: {**describe(s), "hardware": "Tesla T4"})
    assert main.main(create_argv(tmp_path, "--train.steps=4", "--run.run_id=a")) == 0
    lines = [one for one in read_metrics(tmp_path / "tiny" / "a") if one["kind"] == "train"]
    assert all(line["hbm_peak_gib"] == 1.5 for line in lines)
    assert {line.get("duty_cycle") for line in lines[1:]} <= {0.8, None}
    per_image = {
        line["mfu"] * get_peak_tflops("Tesla T4", "fp32") * 1e12 / line["img_per_s"]
        for line in lines
    }
    # One block of width 16 on 5 tokens: three passes of its products, and the head's.
    weights = 16 * 16 + 16 * 48 + 16 * 16 + 2 * 16 * 64
    forward = 2 * (4 * 16 * 16 + 5 * (weights - 256) + 2 * 5 * 5 * 16 + 16 * 10)
    assert min(per_image) == pytest.approx(max(per_image))
    assert 2.5 * forward < min(per_image) <= 3 * forward


@pytest.mark.xla
def test_float32_products_have_the_configured_precision():
    import torch_xla
    from torch_xla import backends

    section = create_config(Path("/nowhere"), device="xla").runtime
    try:
        for precision, wanted in (("highest", "{highest,highest}"), ("high", "{high,high}")):
            changed = section.model_copy(update={"matmul_precision": precision})
            runtime = create_runtime(changed)
            one = torch.ones(4, 4, device=runtime.device)
            text = torch_xla._XLAC._get_xla_tensors_hlo([one @ one])
            assert f"operand_precision={wanted}" in text
    finally:
        backends.set_mat_mul_precision("default")


@pytest.mark.cuda
def test_a_gpu_reports_its_peak_memory():
    runtime = create_runtime(RuntimeSection(device="cuda"))
    block = torch.zeros(64, 2**20, dtype=torch.uint8, device=runtime.device)
    assert runtime.instruments.get_peak_gib() >= block.numel() / 2**30
    assert runtime.instruments.read_device()["hbm_peak_gib"] < 64
