"""The input benchmark measures all three modes and reports which ratios are met."""

from __future__ import annotations

import io
import json

import pytest
from PIL import Image

from proofs import benchmark_input


def test_synthetic_jpegs_cost_a_decoder_as_much_as_imagenet():
    sizes = []
    for number in range(4):
        data = benchmark_input.create_jpeg(number)
        image = Image.open(io.BytesIO(data))
        assert image.size == (500, 375) and image.mode == "RGB"
        sizes.append(len(data))
    assert 95_000 < sum(sizes) / 4 < 125_000
    assert benchmark_input.create_jpeg(1) == benchmark_input.create_jpeg(1)


@pytest.mark.slow
def test_a_small_run_writes_ratios_of_all_modes(tmp_path, capsys):
    path = tmp_path / "result.json"
    arguments = ["--num-images", "32", "--batch", "8", "--size", "32", "--rounds", "2"]
    assert benchmark_input.main([*arguments, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    cpu = result["cpu_ms_per_image"]
    assert set(cpu) == set(benchmark_input.MODES)
    assert all(mode["min"] <= mode["median"] <= mode["max"] for mode in cpu.values())
    ratio = cpu["timm"]["median"] / cpu["pipeline"]["median"]
    assert result["pipeline_over_timm"] == pytest.approx(ratio)
    assert "timm's CPU time / pipeline's" in capsys.readouterr().out


def test_a_missed_ratio_is_reported(capsys):
    modes = {mode: benchmark_input.summarise([1.0, 2.0, 4.0]) for mode in benchmark_input.MODES}
    assert modes["timm"] == {"min": 1, "median": 2, "max": 4, "images_per_core_s": 500}
    result = {
        "machine": {"cpu": "x", "cores": 1},
        "images": {"count": 1, "mean_kb": 1},
        "size": 8,
        "rounds": 3,
        "cpu_ms_per_image": modes,
        "pipeline_over_timm": 2.6,
        "pipeline_over_timm_lean": 1.9,
        "pipeline_of_decode": 0.5,
        "required": {"pipeline_over_timm": 2.5, "pipeline_of_decode": 0.55},
    }
    benchmark_input.print_result(result)
    output = capsys.readouterr().out
    assert "2.60 (at least 2.5: reached)" in output and "0.50 (at least 0.55: MISSED)" in output


def test_a_folder_without_jpegs_is_refused(tmp_path, capsys):
    assert benchmark_input.main(["--images", str(tmp_path)]) == 2
    assert "holds no .jpg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-images", "0"], "--num-images (0) must be at least 1"),
        (["--size", "0"], "--size (0) must be at least 1"),
        (["--batch", "0"], "--batch (0) must be at least 1"),
        (["--rounds", "0"], "--rounds (0) must be at least 1"),
        (
            ["--num-images", "4", "--batch", "8"],
            "--num-images (4) must fill a batch of --batch (8)",
        ),
        (["--startup", "--startup-records", "9"], "--startup-records (9) must fill a batch of"),
        (["--json", "/proc/x.json"], "--json ('/proc/x.json') cannot be written"),
        (["--json", "."], "--json ('.') is a directory"),
    ],
)
def test_invalid_flags_are_refused_before_any_file_is_written(flags, words, monkeypatch, capsys):
    monkeypatch.setattr(benchmark_input, "run_benchmark", lambda *_: pytest.fail("measured"))
    assert benchmark_input.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {words}")


def test_one_batch_of_images_is_enough(monkeypatch):
    asked = []
    monkeypatch.setattr(benchmark_input, "run_benchmark", lambda one, _: asked.append(one) or {})
    monkeypatch.setattr(benchmark_input, "print_result", lambda _: None)
    assert (
        benchmark_input.main(["--num-images", "8", "--batch", "8", "--startup-records", "1"]) == 0
    )
    assert asked[0].num_images == 8
