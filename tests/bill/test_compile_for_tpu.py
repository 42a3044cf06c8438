"""The TPU compiler's tool: what it traces, how it reads programs, what it refuses."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bill import analysis, compiler, step_report
from bill.compile_for_tpu import main
from bill.schema import Interval, Report
from bill.step.batch_search import BatchSearch
from bill.step.tracing import StepExport
from bill.targets import parse_target
from tests.support.tiny_parts import create_config
from utils.errors import UserError
from utils.generations import GENERATIONS

ROOT = Path(__file__).resolve().parents[2]
HAS_COMPILER = all(importlib.util.find_spec(name) for name in ("jax", "libtpu"))
CONFIG = "configs/imagenet/vit_s16_90ep.yaml"


def create_export(**changes: object) -> StepExport:
    """A step with two arguments."""
    values = {
        "bytecode": b"x",
        "digest": "d",
        "arguments": ["model.a", "batch/images"],
        "donations": {0: 0},
        "gradients_alive": [],
        "undonated": [],
    }
    return StepExport(**{**values, **changes})


@pytest.mark.parametrize(
    ("text", "topology", "devices"),
    [
        ("v5e:2x2", "v5e:2x2x1", 4),
        ("v5e", "v5e:2x2x1", 1),
        ("v3:2x2", "v3:2x2x1", 8),
        ("v4:2x2x1", "v4:2x2x1", 8),
        ("v5p:2x2x1", "v5p:2x2x1", 4),
        ("v6e:2x4", "v6e:2x4x1", 8),
    ],
)
def test_targets_name_topologies(text, topology, devices):
    target = parse_target(text)
    assert (target.topology, target.devices) == (topology, devices)


def test_tpu7x_needs_the_newest_compiler():
    with pytest.raises(UserError, match="give --compiler newest"):
        parse_target("tpu7x:2x2x1")
    target = parse_target("tpu7x:2x2x1", compiler="newest")
    assert (target.topology, target.devices) == ("tpu7x:2x2x1", 8)


@pytest.mark.parametrize("text", ["v5litepod-4", "v7", "v5e:", "v5e:2", "v5e:2xa", "v5e:2x2x2", ""])
def test_an_unknown_target_is_refused_with_the_known_ones(text):
    with pytest.raises(UserError, match="v5e:AxB"):
        parse_target(text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("v5e:9x9", "'v5e:9x9' is no slice: sides of v5e are powers of 2 up to 16"),
        ("v6e:8x32", "up to 16"),
        ("v5e:0x1", "powers of 2"),
        ("v5p:3x4x4", "1, 2, or multiples of 4"),
        ("v4:16x16x20", "v4 has at most 4096 chips"),
    ],
)
def test_a_nonexistent_slice_is_refused_with_the_flag(text, rule):
    with pytest.raises(UserError, match=f"^--on .*{rule}"):
        parse_target(text, flag="--on")


def test_more_chips_than_the_slice_has_are_refused_with_the_slice_that_fits():
    with pytest.raises(UserError, match="v5e:4x4"):
        parse_target("v5e:2x2", chips=16)
    assert [parse_target(name).usable_bytes / 2**30 for name in ("v4:2x2x1", "v6e:2x2")] == [
        pytest.approx(15.25),
        pytest.approx(31.25),
    ]
    assert (parse_target("v5e").name, parse_target("v5e").topology) == ("v5e:1x1", "v5e:2x2x1")
    assert parse_target("v5e", chips=16).name == "v5e:4x4"
    assert parse_target("v5e", chips=64).devices == 64


def test_derived_clocks_give_the_known_matrix_unit_widths():
    widths = {
        "v2": 32_768,
        "v3": 65_536,
        "v4": 131_072,
        "v5e": 131_072,
        "v5p": 262_144,
        "v6e": 524_288,
        "tpu7x": 524_288,
    }
    for name, width in widths.items():
        device = GENERATIONS[name]
        assert device.peak_tflops * 1e3 / device.clock_ghz == pytest.approx(width, rel=0.02), name


def test_the_newest_compiler_is_looked_for_in_an_environment_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "find_venv", lambda suffix: tmp_path / f".venv{suffix}")
    with pytest.raises(UserError, match=r"jax, jaxlib, libtpu missing.*--tpu-compiler --newest"):
        compiler.require_compiler("newest")
    versions = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.52"}
    for name, version in versions.items():
        folder = (
            tmp_path / f".venv-compiler/lib/python3.11/site-packages/{name}-{version}.dist-info"
        )
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    assert compiler.require_compiler("newest") == versions


def test_a_missing_compiler_names_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(compiler, "read_versions", lambda venv: {})
    assert main(["--config", CONFIG]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: the TPU compiler is not installed")
    assert "bash run_commands.sh setup --tpu-compiler" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--json", "/proc/nowhere/r.json"], r"--json \('/proc/nowhere'\) cannot be created"),
        (["--json", "."], r"--json \('.'\) is a directory"),
        (["--hlo", "/proc/nowhere"], r"--hlo \('/proc/nowhere'\) cannot be created"),
        (["--limit", "abc"], "argument --limit: invalid float value: 'abc'; see"),
        (["--limit", "-1"], r"--limit \(-1.0\) must be above 0"),
        (["--gate", "36"], "gate '36' has no four parts"),
        (["--gate", "peak_bytes:1:-:major"], "--gate needs an earlier report"),
        (["--store", "/proc/nowhere"], r"--store \('/proc/nowhere/benchmarks'\) cannot be created"),
    ],
)
def test_unreadable_and_unwritable_paths_are_refused_before_compiling(flags, message, capsys):
    try:
        assert main(["--config", CONFIG, *flags]) == 2
    except SystemExit as stop:
        assert stop.code == 2
    text = capsys.readouterr().err
    assert re.match(f"error: {message}", text)
    assert text.count("\n") == 1


def run_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, limit: float = 60.0):
    """compile_step with another program in the child's place."""
    child = tmp_path / "child.py"
    child.write_text(code)
    monkeypatch.setattr(compiler, "CHILD", child)
    monkeypatch.setattr(compiler, "require_compiler", lambda *_: {"libtpu": "0"})
    return compiler.compile_step(
        create_export(),
        parse_target("v5e:2x2"),
        devices=1,
        store=tmp_path / "store",
        time_limit_s=limit,
    )


ABORT = "import os, sys; sys.stderr.write('F0101 Check failed: a strided DMA\\n'); os.abort()"
OUT_OF_MEMORY = (
    "raise SystemExit('RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of "
    "15.75G hbm. Exceeded hbm capacity by 4.75G.')"
)


NEWEST_OUT_OF_MEMORY = (
    "raise SystemExit('RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the "
    "total memory required for HLO temporaries (20.50G) exceeds available HBM (15.75G).')"
)


def test_a_compiler_abort_gives_a_message(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"aborted by signal 6 .*strided DMA"):
        run_child(tmp_path, monkeypatch, ABORT)


def test_a_compilation_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--time-limit"):
        run_child(tmp_path, monkeypatch, "while True: pass", limit=0.5)


@pytest.mark.parametrize("text", [OUT_OF_MEMORY, NEWEST_OUT_OF_MEMORY])
def test_a_program_that_needs_too_much_memory_is_a_result(tmp_path, monkeypatch, text):
    found = run_child(tmp_path, monkeypatch, text)
    assert found.needed_bytes == int(20.5 * 2**30)
    again = run_child(tmp_path, monkeypatch, text)
    assert (again.cached, again.needed_bytes) == (True, found.needed_bytes)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--target", "v5litepod-8"], "--target"),
        (["--chips", "0"], "--chips"),
        (["--num-classes", "0"], "--num-classes (0)"),
        (["--num-classes", "-3"], "must be at least 1"),
        (["--batch", "0"], "--batch"),
        (["--compare", "nowhere.json"], "--compare"),
        (["--target", "v5e:2x2", "--chips", "16"], "v5e:4x4"),
        (["--data.global_batch_size=1022"], "data.global_batch_size"),
        pytest.param(["--model=vit_smal"], "model.name", marks=pytest.mark.xla),
        (["--optim.lr=x"], "optim.lr"),
    ],
)
def test_bad_input_gives_one_line(flags, word, capsys, monkeypatch):
    monkeypatch.setattr(compiler, "require_compiler", lambda *_: {"libtpu": "0"})
    monkeypatch.setattr(compiler, "compile_step", None)
    assert main(["--config", CONFIG, *flags]) == 2
    text = capsys.readouterr().err.splitlines()
    assert word in text[-1]
    assert text[-1].startswith("error: ")


def test_help_describes_the_program():
    done = subprocess.run(
        [sys.executable, "bill/compile_for_tpu.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert "on a machine that has no TPU" in text
    assert "estimates, not measurements" in text


def create_report(cost: float | None) -> Report:
    """A report of that many Mcycles."""
    memory = analysis.Memory(usable_bytes=2, peak_bytes=1)
    bounds = Interval(lower=1.0, estimate=2.0)
    return Report(
        note="n",
        config="c",
        model="m",
        target="v5e:2x2",
        device="d",
        chips=1,
        examples_per_chip=8,
        unit="img",
        example={"images": [8, 8, 3]},
        fits=cost is not None,
        memory=memory,
        estimated_mcycles=cost,
        graph="g",
        versions={},
        made="2026-01-01",
        flops=1.0,
        hbm_bytes=1,
        step_ms=bounds,
        units_per_s=bounds,
        mfu=bounds,
    )


@pytest.mark.parametrize(("cost", "code"), [(10.0, 0), (10.4, 0), (10.6, 1), (None, 1)])
def test_a_regression_above_five_percent_fails(cost, code, tmp_path, capsys, monkeypatch):
    base, told = tmp_path / "base.json", tmp_path / "told.json"
    base.write_text(create_report(10.0).model_dump_json())
    monkeypatch.setattr(compiler, "require_compiler", lambda *_: {"libtpu": "0"})
    monkeypatch.setattr(step_report, "create_report", lambda *_: create_report(cost))
    command = ["--config", CONFIG, "--batch", "8", "--json", str(told)]
    for flags in (["--limit", "10"], ["--compare", str(base)]):
        assert main([*command, *flags]) == code
    said = Report.model_validate_json(told.read_text()).comparison
    assert said["exit_code"] == code
    assert [one["gate"] for one in said["findings"]] == [
        "estimated_mcycles@last:5:-:major",
        "peak_bytes@last:5:-:minor",
    ]
    gates = ["--gate", "estimated_mcycles:-:9:major", "--gate", "peak_bytes:0:-:major"]
    assert main([*command, "--compare", str(base), *gates]) == (1 if cost is None else 0)
    assert main([*command, "--compare", str(base), "--gate", "mcycle:1:-:major"]) == 2
    error = capsys.readouterr().err
    assert "no report has a figure 'mcycle'; did you mean 'bundles_mcycles' or" in error


def test_a_figure_missing_in_an_older_verdict_is_a_finding(tmp_path, capsys, monkeypatch):
    base = tmp_path / "base.json"
    values = json.loads(create_report(10.0).model_dump_json())
    base.write_text(json.dumps({**values, "schema_version": 2, "estimated_mcycles": None}))
    monkeypatch.setattr(compiler, "require_compiler", lambda *_: {"libtpu": "0"})
    monkeypatch.setattr(step_report, "create_report", lambda *_: create_report(10.0))
    assert main(["--config", CONFIG, "--batch", "8", "--compare", str(base)]) == 1
    assert "the earlier report has no estimated_mcycles" in capsys.readouterr().out


def test_only_reports_of_the_same_share_are_compared(tmp_path, capsys):
    base = tmp_path / "base.json"
    base.write_text(create_report(10.0).model_dump_json())
    flags = ["--target", "v6e:2x2", "--batch", "8", "--compare", str(base)]
    assert main(["--config", CONFIG, *flags]) == 2
    assert "target is 'v6e:2x2' now and was 'v5e:2x2'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("base", "slope", "start", "best"),
    [(2_000, 10, 64, 800), (100, 3.3, 8, 3000), (9_000, 100, 64, 8), (5_000, 39.0, 512, 128)],
)
def test_the_largest_batch_is_found_in_a_few_compilations(
    base, slope, start, best, monkeypatch, tmp_path
):
    """Memory is base + slope * batch, of 10,000 usable bytes."""
    compiled = []

    def create(compilation: step_report.Compilation, *_: object) -> Report:
        compiled.append(compilation.batch)
        needed = int(base + slope * compilation.batch)
        memory = analysis.Memory(usable_bytes=10_000, peak_bytes=needed)
        report = create_report(1.0)
        return report.model_copy(
            update={
                "memory": memory,
                "fits": needed <= 10_000,
                "examples_per_chip": compilation.batch,
            }
        )

    monkeypatch.setattr(step_report, "create_report", create)
    options = main.parse(["--config", CONFIG])
    compilation = step_report.Compilation(
        create_config(tmp_path), parse_target("v5e:2x2"), 1, start
    )
    report = create(compilation)
    step_report.find_max_batch(compilation, options, report)
    assert report.max_batch_per_chip == best
    assert report.too_large_batch_per_chip == best + 8
    assert len(compiled) <= 8


def test_a_limit_that_the_compiler_shifts_is_bracketed():
    """Up to 3,400 the compiler makes programs fit that the line would not."""
    search = BatchSearch(8, 15_750, {64: 320})
    search.run(lambda size: min(int(6.1 * size), 15_000) if size <= 3400 else 16_000)
    assert search.largest_fitting <= 3400 < search.smallest_failing
    assert search.smallest_failing - search.largest_fitting < 3400 / 16
    assert len(search.points) <= 9


def test_a_run_of_which_no_batch_size_fits_is_refused(monkeypatch, tmp_path):
    memory = analysis.Memory(usable_bytes=10, peak_bytes=11)
    report = create_report(None).model_copy(update={"memory": memory, "fits": False})
    monkeypatch.setattr(step_report, "create_report", lambda *_: report)
    options = main.parse(["--config", CONFIG])
    compilation = step_report.Compilation(create_config(tmp_path), parse_target("v5e:2x2"), 1, 8)
    with pytest.raises(UserError, match="no batch"):
        step_report.find_max_batch(compilation, options, report)


def test_reports_match_their_json_schema():
    report = create_report(10.0)
    schema = Report.model_json_schema()
    assert {"estimated_mcycles", "flops", "hbm_bytes", "memory"} <= set(schema["properties"])
    assert "peak_bytes" in schema["$defs"]["Memory"]["properties"]
    assert schema["additionalProperties"] is False
    data = json.loads(report.model_dump_json())
    assert Report.model_validate(data) == report
    with pytest.raises(ValueError, match="surprise"):
        Report.model_validate({**data, "surprise": 1})


def compile_by_command(folder: Path, *flags: str) -> tuple[Report, str]:
    """The report of the program on a real step, and what it prints."""
    path = folder / "report.json"
    command = [sys.executable, "bill/compile_for_tpu.py", *flags, f"--json={path}"]
    command.append(f"--cache-dir={folder / 'store'}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Report.model_validate_json(path.read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs jax and libtpu: setup --tpu-compiler")
def test_a_vit_of_two_blocks_passes_its_gate(tmp_path):
    """The real compiler on the real step, by the command line."""
    flags = ("--config=configs/tpu_step.yaml", '--model.args={"depth": 2}', "--limit=6.7")
    report, printed = compile_by_command(tmp_path, *flags)
    assert report.fits
    assert report.top[0].module.startswith("blocks.")
    assert "compiler's estimate, not a measurement" in printed


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs jax and libtpu: setup --tpu-compiler")
def test_a_decoder_of_two_blocks_passes_its_gate(tmp_path):
    """33.5 Mcyc; plain JAX costs 41.6 with scores in bfloat16."""
    flags = ("--target=v5e:1x1", "--config=configs/tpu_decoder_step.yaml", "--limit=34.5")
    depth = '--model.args={"depth": 2, "width": 768, "heads": 12}'
    report, _ = compile_by_command(tmp_path, *flags, depth)
    assert report.fits and report.unit == "tokens" and report.example == {"tokens": [1025]}
    assert not {"undonated state", "gradients alive", "host fallback", "dynamic shapes"} & {
        fault.kind for fault in report.faults
    }


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs jax and libtpu: setup --tpu-compiler")
@pytest.mark.parametrize("target", ["v5e:2x2", "v5e:4x4"])
@pytest.mark.parametrize(
    "name", ["transformer_sequences", "transformer_teacher", "transformer_text"]
)
def test_the_small_decoders_fit_a_slice(name, target, tmp_path):
    """Partitioned over 4 and 16 chips: gradients alone travel, in float32."""
    slices = (f"--target={target}", f"--chips={parse_target(target).devices}")
    flags = [f"--config=configs/{name}.yaml", *slices, "--runtime.precision=bf16"]
    if name != "transformer_sequences":
        flags.append("--assume=vocab_size=257")
    report, _ = compile_by_command(tmp_path, *flags)
    assert report.fits and not report.faults
    assert {one.kind for one in report.collectives} == {"all-reduce"}
    assert {one.dtype for one in report.collectives} == {"f32"}
