"""The benchmark runs the engine's loop and reports everything needed to check it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import engine
from big_vision.input.synthetic import parse_synthetic_name
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from proofs.benchmark import __main__ as benchmark
from proofs.benchmark import loop
from proofs.benchmark.bare import BareLoop
from proofs.benchmark.configuration import create_measured_config
from service.places import list_configs
from store.quality.reports import get_identity
from tests.support.child_runs import get_environment
from tests.support.language import create_language_argv
from tests.support.rows import create_regression_argv
from tests.support.tiny_parts import (
    DEVICE_CASES,
    SYNTHETIC,
    VIT_ARGS,
    create_config,
    create_cpu_runtime,
    create_vit,
)
from utils.config.load import load_config
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted(ROOT / path for path in list_configs(ROOT))


def names_task(path: Path) -> bool:
    """Return whether a configuration, or the one that it extends, sets the task."""
    values = yaml.safe_load(path.read_text())
    base = values.get("extends")
    return "task" in (values.get("train") or {}) or bool(base and names_task(path.parent / base))


# What a run of images reads; tests/bill/test_synthetic_run.py holds those of other tasks.
OF_IMAGES = [path for path in CONFIGS if not names_task(path)]
FEW = ("--steps=2", "--repeats=3", "--warmup-steps=1")
# Of one token of tests.support.language: two blocks of width 32 with two heads of keys and values,
# attention to 8 places, a head of 5 tokens; the embedding is no product.
LANGUAGE_FLOPS = 3 * 2 * (2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96 + 2 * 8 * 32) + 5 * 32)
# Every figure that a report promises, and what it may be.
FIGURES = {
    "img_per_s": float,
    "img_per_s_repeats": list,
    "step_p50_s": float,
    "step_p95_s": float,
    "input_stall_share": float,
    "warmup_steps": int,
    "graphs": int,
    "graphs_measured": int,
    "host_reads_measured": int,
    "compile_s": float,
    "peak_host_gib": float,
    "peak_device_gib": (float, type(None)),
    "flops_per_example": dict,
    "mfu": (float, type(None)),
    "processes": int,
    "devices": int,
    "global_batch_size": int,
}


def measure(tmp_path: Path, *flags: str, device: str = "cpu") -> dict:
    """The report of a small run in this process."""
    path = tmp_path / "report.json"
    place = (f"--runtime.device={device}", f"--json={path}")
    assert benchmark.main([*SYNTHETIC, *FEW, *place, *flags]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_a_report_holds_figures_environment_and_configuration(tmp_path, device, capsys):
    table = tmp_path / "report.csv"
    report = measure(tmp_path, "--train.mixup_alpha=0.8", f"--csv={table}", device=device)
    (result,) = report["results"]
    for name, kind in FIGURES.items():
        assert isinstance(result[name], kind), name
    assert result["img_per_s"] > 0 and 0 < result["step_p50_s"] <= result["step_p95_s"]
    assert len(result["img_per_s_repeats"]) == result["repeats"] == 3
    assert 0 <= result["input_stall_share"] <= 1
    assert result["graphs_measured"] == 0
    assert (result["graphs"] > 0) == (result["compile_s"] > 0) == (device == "xla")
    assert result["peak_host_gib"] > 0.05 and result["mfu"] is None
    environment = report["environment"]
    assert environment["git_commit"] and environment["packages"]["torch"]
    assert environment["runtime"] == device
    assert report["config"]["train"]["mixup_alpha"] == 0.8
    assert report["config"]["model"]["name"] == "vit_tiny_patch16_224"
    (row,) = csv.DictReader(table.open())
    assert float(row["img_per_s"]) == result["img_per_s"]
    assert row["git_commit"] == environment["git_commit"]
    assert json.loads(row["config"]) == report["config"]
    assert "img/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("create", "unit", "per_example", "flops"),
    [
        (create_language_argv, "tokens", 8, 8 * LANGUAGE_FLOPS),
        (create_regression_argv, "rows", 1, 3 * 2 * 16 + 2 * 2 * 10 * 16),
    ],
    ids=["language", "regress"],
)
def test_every_task_is_measured_in_its_unit(tmp_path, capsys, create, unit, per_example, flops):
    path = tmp_path / "report.json"
    argv = create(tmp_path / "runs")
    for more in ((), ("--input=synthetic", f"--compare={path}", "--tolerance=0.9")):
        code = benchmark.main([*argv, *FEW, *(more or (f"--json={path}",))])
        # The input is part of what is compared.
        assert code == (2 if more else 0)
    (result,) = json.loads(path.read_text())["results"]
    assert (result["unit"], result["units_per_example"]) == (unit, per_example)
    rate, size = result[f"{unit}_per_s"], result["global_batch_size"]
    assert rate == sorted(result[f"{unit}_per_s_repeats"])[1]
    assert rate * result["step_p50_s"] == pytest.approx(size * per_example, rel=0.8)
    assert result["flops_per_example"]["total"] == flops
    assert f"{unit}/s" in capsys.readouterr().out


def test_the_benchmark_measures_the_engines_step(tmp_path, monkeypatch):
    steps = []
    own = engine.train_step

    def spy(state, *args):
        steps.append(state.step)
        return own(state, *args)

    monkeypatch.setattr(engine, "train_step", spy)
    (result,) = measure(tmp_path)["results"]
    assert steps == list(range(result["warmup_steps"] + 2 * 3))


def test_no_files_are_left_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    measure(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_never_stable_graphs_end_the_measurement(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "MAX_WARMUP_STEPS", 1)
    flags = [*SYNTHETIC, *FEW, "--runtime.device=cpu", f"--json={tmp_path}/report.json"]
    assert benchmark.main(flags) == 1
    assert "graphs are not stable after 2 steps" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICE_CASES)
def test_one_and_two_processes_are_measured_alternately(tmp_path, device):
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "tools.benchmark", *SYNTHETIC, *FEW, "--processes=1,2"]
    command += [f"--runtime.device={device}", f"--json={path}"]
    done = subprocess.run(command, cwd=ROOT, env=get_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two = json.loads(path.read_text())["results"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["global_batch_size"] == two["global_batch_size"] == 16
    assert one["scaling_efficiency"] == 1.0
    ratio = two["img_per_s"] / one["img_per_s"] / 2
    assert two["scaling_efficiency"] == pytest.approx(ratio)
    assert "scaling efficiency" in done.stdout


def test_a_planted_regression_sets_the_exit_code(tmp_path, capsys):
    report = measure(tmp_path)
    planted, told = tmp_path / "base.json", tmp_path / "told.json"
    flags = [*SYNTHETIC, *FEW, "--runtime.device=cpu", "--compare", str(planted)]
    flags += ["--json", str(told), "--store", str(tmp_path / "runs")]
    for factor, code in ((1e6, 1), (1e-6, 0)):
        base = json.loads(json.dumps(report))
        result = base["results"][0]
        result["img_per_s"] *= factor
        result["img_per_s_repeats"] = 3 * [result["img_per_s"]]
        planted.write_text(json.dumps(base))
        more = ["--tolerance=0.5"] if code else ["--gate=img_per_s@median:50:-:major"]
        assert benchmark.main([*flags, *more]) == code
        assert ("failed" in capsys.readouterr().out) == (code == 1)
        said = json.loads(told.read_text())["comparison"]
        assert said["exit_code"] == code and said["base"] == str(planted)
    folder = tmp_path / "runs" / "benchmarks" / get_identity(report)
    assert 1 <= len(list(folder.iterdir())) <= 2


def test_incomparable_reports_are_refused_before_measuring(tmp_path, capsys, monkeypatch):
    measure(tmp_path)
    flags = [*SYNTHETIC, *FEW, "--runtime.device=cpu", "--compare", str(tmp_path / "report.json")]

    def refuse(*_: object) -> None:
        raise AssertionError("it was measured")

    for name in ("measure_once", "measure_scaling"):
        monkeypatch.setattr(benchmark, name, refuse)
    for more, words in (
        ("--train.label_smoothing=0.1", "train.label_smoothing is 0.1 now and was 0.0"),
        ("--input=synthetic", "--input is 'synthetic' now"),
        ("--processes=3,4", "has [1] processes, this one has [3, 4]"),
        ("--gate=nokey:5:-:major", "no report has a figure 'nokey'"),
        ("--gate=parameters:5:-:major", "no report has a figure 'parameters'"),
    ):
        assert benchmark.main([*flags, more]) == 2, more
        assert words in capsys.readouterr().err


def test_the_bare_loop_is_measured_beside_the_engine(tmp_path):
    (result,) = measure(tmp_path, "--bare")["results"]
    assert len(result["engine_over_bare_repeats"]) == 3
    assert result["engine_over_bare"] == sorted(result["engine_over_bare_repeats"])[1]
    assert result["bare_step_s"] > 0 and result["engine_over_bare_cpu"] > 0


def test_the_bare_loop_trains_the_same_model_with_the_same_optimizer(tmp_path):
    flags = ("--optim.schedule=constant", "--optim.lr=1e-2")
    config = create_config(tmp_path, *flags)
    job, runtime = check(config), create_cpu_runtime()
    parts = build_parts(runtime, job)
    batches = [batch for batch, _ in zip(iterate_batches(parts, 0), range(2), strict=False)]
    bare = BareLoop(runtime, job, parts, batches)
    start = {n: v.clone() for n, v in parts.state.model.state_dict().items()}
    bare.run(4)
    steps = engine.run_steps(parts.state, 2 * batches, parts.task, runtime, parts.plan)
    assert [result.step for result in steps] == [1, 2, 3, 4]
    for name, value in parts.state.model.state_dict().items():
        torch.testing.assert_close(bare.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
        assert not torch.equal(value, start[name]), name


@pytest.mark.parametrize("path", OF_IMAGES, ids=lambda path: path.stem)
def test_synthetic_input_has_the_shape_of_the_run(path, tmp_path):
    values = yaml.safe_load(path.read_text())
    distill = values.get("distill", {})
    is_taught = "teacher" in distill or "teachers" in distill or not distill
    config = load_config(["--config", str(path), *([] if is_taught else ["--teacher_path=unread"])])
    if config.distill.teacher_cache:
        pytest.skip("its stored answers belong to the dataset")
    measured = create_measured_config(config, tmp_path, synthetic=True, random_teachers=False)
    if config.data.source == "synthetic":
        assert measured.data == config.data
        return
    shape = parse_synthetic_name(measured.data.name)
    sides = {
        "digits": 8,
        "mnist": 28,
        "cifar100": 32,
        "imagenet2012": 224,
        "cifar10": 384,
        "oxford_iiit_pet": 128,
    }
    trained_at = {"deit3_b": 192, "resnet50_a3": 160}
    assert shape.image_size == trained_at.get(path.stem, sides[config.data.name])
    grey = 1 if config.data.name == "mnist" else 3
    assert shape.channels == config.model.args.get("in_chans", grey)
    assert measured.data.global_batch_size == config.data.global_batch_size
    assert measured.run.resume == "" and measured.run.output_dir == str(tmp_path)


def test_random_teachers_cost_what_real_ones_do(tmp_path):
    args = json.dumps({**VIT_ARGS, "embed_dim": 24, "img_size": 8})
    teacher = f'[{{"model": "vit_tiny_patch16_224", "args": {args}}}]'
    flags = (f"--distill.teachers={teacher}", "--distill.loss=kd", "--random-teachers")
    (result,) = measure(tmp_path, *flags)["results"]
    flops = result["flops_per_example"]
    assert flops["teachers"] > 0 and flops["total"] == flops["student"] + flops["teachers"]
    # A matrix product takes two FLOPs for each weight and token: at least the 4 patches.
    for name, width, passes in (("student", 16, 3), ("teachers", 24, 1)):
        blocks = create_vit(embed_dim=width).blocks
        weights = sum(p.numel() for p in blocks.parameters() if p.dim() > 1)
        assert flops[name] > passes * 2 * 4 * weights


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps=0"], "--steps (0) must be at least 1"),
        (["--repeats=0"], "--repeats (0) must be at least 1"),
        (["--steps=x"], "--steps: invalid int value"),
        (["--tolerance=1.5"], "--tolerance (1.5)"),
        (["--processes=1,0"], "--processes ('1,0')"),
        (["--processes=1,2", "--runtime.num_processes=2"], "say the same"),
        (["--processes=1,2", "--bare"], "drop --processes"),
        (["--bare", "--input=real"], "--bare has no input pipeline"),
        (["--bare", "--train.remat=true"], "which has no train.remat"),
        (["--bare", "--runtime.num_processes=2"], "which has no runtime.num_processes"),
        (["--compare=no/such.json"], "cannot be read"),
        (["--gate=img_per_s:5:-:major"], "give one by --compare"),
        (["--compare=x.json", "--gate=img_per_s"], "four parts"),
        (["--compare=x.json", "--gate=img_per_s:5:-:major", "--tolerance=0.1"], "remove it or"),
        (["--compare=x.json", "--gates=no.yaml"], "cannot be read"),
        (["--store=/proc/nowhere"], "cannot be created"),
        (["--json=no/such/place.json"], "there is no directory"),
        (["--random-teachers"], "needs a teacher"),
        (["--train.epoch=3"], "did you mean --train.epochs"),
        (["--runtime.device=cpu", "--runtime.tf32=true"], "runtime.tf32"),
    ],
)
def test_bad_input_gives_one_line(tmp_path, capsys, flags, words):
    try:
        code = benchmark.main([*SYNTHETIC, "--runtime.device=cpu", *flags])
    except SystemExit as end:  # argparse's own
        code = end.code
    assert code == 2
    output = capsys.readouterr()
    line = output.err.strip().splitlines()[-1]
    assert line.startswith("error: ") and words in line
    assert output.out == ""


def test_a_store_in_no_bucket_gives_one_line(gs, capsys):
    assert benchmark.main([*SYNTHETIC, "--runtime.device=cpu", "--store=gs://nobody/runs"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("error: ") and "--store ('gs://nobody/runs')" in line


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ("decode|inception_crop(area_min=8, size=96)", 96),
        ("decode|resize(64)|inception_crop(area_min=20, size=48)", 48),
    ],
)
def test_synthetic_images_have_the_size_of_the_preprocessing(tmp_path, spec, size):
    flags = ["--data.source=folder", f"--data.root={tmp_path}", "--model.num_classes=3"]
    flags += [f"--data.train_pp={spec}|value_range(-1, 1)", "--model=resnet18"]
    measured = create_measured_config(
        load_config(flags), tmp_path, synthetic=True, random_teachers=False
    )
    shape = parse_synthetic_name(measured.data.name)
    assert (shape.image_size, shape.channels) == (size, 3)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("decode", "gives none"),
        ("decode|resize(64)|inception_crop(area_min=20)", "gives none"),
        ("decode|resize((64, 32))", "gives images of 64 x 32"),
    ],
)
def test_synthetic_input_needs_an_image_size(tmp_path, spec, reason):
    flags = ["--data.source=folder", f"--data.root={tmp_path}", f"--data.train_pp={spec}"]
    flags += ["--model.num_classes=3"]
    with pytest.raises(UserError, match=reason):
        create_measured_config(load_config(flags), tmp_path, synthetic=True, random_teachers=False)
