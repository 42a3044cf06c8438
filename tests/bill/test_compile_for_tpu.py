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
from bill.compiled import Compiled
from bill.hlo import get_hbm_bytes, list_instructions, read_arrays, read_module
from bill.schema import Interval, Report
from bill.step.batch_search import BatchSearch
from bill.step.scopes import Origin, read_origin
from bill.step.tracing import StepExport
from bill.targets import parse_target
from tests.support.tiny_parts import create_config
from utils.errors import UserError
from utils.generations import GENERATIONS

ROOT = Path(__file__).resolve().parents[2]
HAS_COMPILER = all(importlib.util.find_spec(name) for name in ("jax", "libtpu"))
CONFIG = "configs/imagenet/vit_s16_90ep.yaml"
# ruff: noqa: E501
PROGRAM = """HloModule step, is_scheduled=true

%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%p), index=1
  ROOT %y = f32[8,128]{1,0:T(8,128)} add(%x, %x), backend_config={"estimated_cycles":"10"}
}

%cond (p: (s32[], f32[8,128])) -> pred[] {
  %c = s32[] constant(5)
  ROOT %lt = pred[] compare(%c, %c), direction=LT
}

ENTRY %main (a: f32[8,128], b: bf16[64,197,384]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0), metadata={op_name="loss|forward|.2/xla__device_data"}
  %b = bf16[64,197,384]{2,1,0:T(8,128)(2,1)} parameter(1)
  %fusion.1 = bf16[64,197,384]{2,1,0:T(8,128)(2,1)S(1)} fusion(%b), kind=kLoop, calls=%f, metadata={op_name="step.1/student|forward|blocks.3.attn.qkv.7/aten__einsum"}, backend_config={"estimated_cycles":"1000"}
  %copy.2 = bf16[64,197,384]{1,2,0:T(8,128)(2,1)} copy(%fusion.1), metadata={op_name="student|backward|blocks.3.attn.9/aten__permute"}, backend_config={"estimated_cycles":"250"}
  %wide = f32[64,197,384]{2,1,0:T(8,128)} fusion(%copy.2), kind=kLoop, calls=%f, metadata={op_name="student|backward|blocks.3.norm1.4/aten__mul"}, backend_config={"estimated_cycles":"500"}
  %copy-start.1 = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %copy-done.1 = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%copy-start.1)
  %one = f32[]{:T(128)} constant(1)
  %two = f32[]{:T(128)S(6)} add(%one, %one)
  %all-reduce.1 = f32[8,128]{1,0:T(8,128)} all-reduce(%a), replica_groups={}, to_apply=%cond
  %while.1 = (s32[], f32[8,128]{1,0:T(8,128)}) while(%all-reduce.1), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  ROOT %select-and-scatter.1 = f32[8,128]{1,0:T(8,128)} select-and-scatter(%a, %a, %one)
}
"""


@pytest.fixture(scope="module")
def instructions():
    return list_instructions(read_module(PROGRAM))


def create_export(**changes: object) -> StepExport:
    """A step with two arguments."""
    values = {"bytecode": b"x", "digest": "d", "arguments": ["model.a", "batch/images"], "donations": {0: 0},
              "gradients_alive": [], "undonated": []}  # fmt: skip
    return StepExport(**{**values, **changes})


# ---------------------------------------------------------------- reading programs


def test_the_bodies_of_loops_count_as_often_as_they_run(instructions):
    assert analysis.sum_mcycles(instructions) * 1e6 == 1000 + 250 + 500 + 12 * 10


def test_a_loop_without_a_count_runs_up_to_what_its_condition_compares_with():
    unknown = PROGRAM.replace('backend_config={"known_trip_count":{"n":"12"}}', "metadata={}")
    total = analysis.sum_mcycles(list_instructions(read_module(unknown))) * 1e6
    assert total == 1750 + 5 * 10


def test_arrays_know_their_bytes_and_their_memory():
    wide, narrow, token = read_arrays(
        "(f32[8,128]{1,0}, bf16[4,2]{1,0:T(8,128)S(1)}, u32[]{:S(2)})"
    )
    assert (wide.bytes, wide.in_hbm) == (4096, True)
    assert (narrow.bytes, narrow.in_hbm) == (16, False)
    assert (token.bytes, token.in_hbm) == (4, False)


def test_hbm_bytes_are_those_of_arrays_outside_the_chip(instructions):
    activation, small = 2 * 64 * 197 * 384, 4 * 8 * 128
    fusion = activation  # its result stays on the chip
    copy = activation
    wide = activation + 2 * activation
    start = small
    all_reduce = 2 * small
    loop = 12 * 2 * small
    scatter = 2 * small
    constant = 2 * 4
    parts = fusion + copy + wide + start + all_reduce + loop + scatter + constant
    assert get_hbm_bytes(instructions) == parts


def test_an_operation_knows_the_module_that_it_comes_from():
    name = "step.2/student|backward|blocks.11.attn.proj.27/aten__einsum"
    assert read_origin(name) == Origin("student", "backward", "blocks.11.attn.proj")
    assert read_origin("optimizer|forward|.113/aten__sqrt") == Origin("optimizer", "forward", "")
    assert read_origin("jit(f)/dot") == Origin("", "", "")
    # Behind a residual branch: its last layer's gradient.
    name = "student|backward|blocks.3.drop_path2.8/aten__einsum"
    assert read_origin(name) == Origin("student", "backward", "blocks.3.mlp")
    name = "student|forward|blocks.3.drop_path2.8/aten__add"
    assert read_origin(name) == Origin("student", "forward", "blocks.3.drop_path2")


def test_arrays_that_the_chip_writes_back_are_among_the_largest_buffers():
    """Kept on the chip first, then copied out: the copy's place in HBM has its maker's name."""
    program = PROGRAM.replace(
        "  %copy-start.1 =",
        "  %copy-start.9 = (bf16[64,197,384]{2,1,0:T(8,128)(2,1)}, "
        "bf16[64,197,384]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) copy-start(%fusion.1)\n"
        "  %copy-start.1 =",
    )
    places = [
        [
            one.name
            for one in analysis._list_buffers(create_export(), list_instructions(read_module(text)))
        ]
        for text in (PROGRAM, program)
    ]
    assert "student blocks.3.attn.qkv" not in places[0]
    assert "student blocks.3.attn.qkv" in places[1]


def test_costs_are_grouped_by_role_and_sorted(instructions):
    groups = {group.role: group.mcycles for group in analysis.list_groups(instructions)}
    assert groups == {"attention": 0.001, "layout copies": 0.0003, "norm": 0.0005, "other": 0.0001}
    top = analysis.list_top(instructions)
    assert (top[0].module, top[0].mcycles) == ("blocks.3.attn.qkv", 0.001)
    assert [cost.mcycles for cost in top] == sorted((c.mcycles for c in top), reverse=True)


def test_what_carries_no_estimate_is_counted_and_named(instructions):
    uncosted, scalars = analysis.list_uncosted(instructions)
    kinds = {one.opcode: one.count for one in uncosted}
    assert kinds == {"copy-start": 1, "all-reduce": 1, "select-and-scatter": 1}
    assert scalars == 1


def test_collectives_tell_what_they_carry(instructions):
    (found,) = analysis.list_collectives(instructions)
    assert (found.kind, found.dtype, found.bytes) == ("all-reduce", "f32", 4 * 8 * 128)


def test_known_faults_are_found(instructions):
    export = create_export(undonated=["model.a"], gradients_alive=["head.weight"],
                           host_ops=["aten::addmm"])  # fmt: skip
    compiled = Compiled(PROGRAM + "  %d = s32[<=8]{0} parameter(3)")
    faults = analysis.find_faults(instructions, export, compiled, 64, is_bf16=True)
    found = {fault.kind: fault.count for fault in faults}
    assert found == {"layout copies": 1, "float32 activations": 1, "undonated state": 1,
                     "gradients alive": 1, "host fallback": 1, "dynamic shapes": 1}  # fmt: skip


def test_float32_runs_have_no_fault_of_float32(instructions):
    faults = analysis.find_faults(
        instructions, create_export(), Compiled(PROGRAM), 64, is_bf16=False
    )
    assert [fault.kind for fault in faults] == ["layout copies"]


def test_the_interval_runs_from_the_devices_limits_to_the_estimate():
    target = parse_target("v5e:2x2")
    step, rate, mfu = analysis.get_bounds(1.97e12, 4095 * 10**6, (None, 30.0), target, 64)
    assert (step.lower, step.estimate) == (pytest.approx(10.0), pytest.approx(20.0))
    assert (rate.lower, rate.estimate) == (pytest.approx(6400), pytest.approx(3200))
    assert (mfu.lower, mfu.estimate) == (pytest.approx(1.0), pytest.approx(0.5))


# ---------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("text", "topology", "devices"),
    [("v5e:2x2", "v5e:2x2x1", 4), ("v5e", "v5e:2x2x1", 1), ("v3:2x2", "v3:2x2x1", 8),
     ("v4:2x2x1", "v4:2x2x1", 8), ("v5p:2x2x1", "v5p:2x2x1", 4), ("v6e:2x4", "v6e:2x4x1", 8)],
)  # fmt: skip
def test_targets_name_topologies(text, topology, devices):
    target = parse_target(text)
    assert (target.topology, target.devices) == (topology, devices)


@pytest.mark.parametrize("text", ["v5litepod-4", "v7", "v5e:", "v5e:2", "v5e:2xa", "v5e:2x2x2", ""])
def test_an_unknown_target_gets_the_list(text):
    with pytest.raises(UserError, match="v5e:AxB"):
        parse_target(text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [("v5e:9x9", "'v5e:9x9' is no slice: sides of v5e are powers of 2 up to 16"),
     ("v6e:8x32", "up to 16"), ("v5e:0x1", "powers of 2"), ("v5p:3x4x4", "1, 2, or multiples of 4"),
     ("v4:16x16x20", "v4 has at most 4096 chips")],
)  # fmt: skip
def test_a_slice_that_does_not_exist_is_refused_by_the_name_of_the_flag(text, rule):
    with pytest.raises(UserError, match=f"^--on .*{rule}"):
        parse_target(text, flag="--on")


def test_more_chips_than_the_slice_has_are_refused_with_the_slice_that_fits():
    with pytest.raises(UserError, match="v5e:4x4"):
        parse_target("v5e:2x2", chips=16)
    assert [parse_target(name).usable_bytes / 2**30 for name in ("v4:2x2x1", "v6e:2x2")] == [
        pytest.approx(15.25), pytest.approx(31.25)
    ]  # fmt: skip
    assert (parse_target("v5e").name, parse_target("v5e").topology) == ("v5e:1x1", "v5e:2x2x1")
    assert parse_target("v5e", chips=16).name == "v5e:4x4"
    assert parse_target("v5e", chips=64).devices == 64


def test_the_derived_clock_makes_the_matrix_unit_as_wide_as_the_peak():
    widths = {"v2": 32_768, "v3": 65_536, "v4": 131_072, "v5e": 131_072, "v5p": 262_144,
              "v6e": 524_288}  # fmt: skip
    for name, width in widths.items():
        device = GENERATIONS[name]
        assert device.peak_tflops * 1e3 / device.clock_ghz == pytest.approx(width, rel=0.02), name


# ---------------------------------------------------------------- the child process


def test_a_missing_compiler_names_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
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
def test_what_cannot_be_written_or_read_is_found_before_anything_compiles(flags, message, capsys):
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
    monkeypatch.setattr(compiler, "require_compiler", lambda: {"libtpu": "0"})
    return compiler.compile_step(
        create_export(), parse_target("v5e:2x2"), devices=1, store=tmp_path / "store",
        time_limit_s=limit,
    )  # fmt: skip


ABORT = "import os, sys; sys.stderr.write('F0101 Check failed: a strided DMA\\n'); os.abort()"
OUT_OF_MEMORY = (
    "raise SystemExit('RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of "
    "15.75G hbm. Exceeded hbm capacity by 4.75G.')"
)


def test_an_abort_becomes_a_message(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"aborted by signal 6 .*strided DMA"):
        run_child(tmp_path, monkeypatch, ABORT)


def test_a_compilation_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--time-limit"):
        run_child(tmp_path, monkeypatch, "while True: pass", limit=0.5)


def test_a_program_that_needs_too_much_memory_is_a_result(tmp_path, monkeypatch):
    found = run_child(tmp_path, monkeypatch, OUT_OF_MEMORY)
    assert found.needed_bytes == int(20.5 * 2**30)
    again = run_child(tmp_path, monkeypatch, OUT_OF_MEMORY)
    assert (again.cached, again.needed_bytes) == (True, found.needed_bytes)


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("flags", "word"),
    [(["--target", "v5litepod-8"], "--target"), (["--chips", "0"], "--chips"),
     (["--num-classes", "0"], "--num-classes (0)"), (["--num-classes", "-3"], "must be at least 1"),
     (["--batch", "0"], "--batch"), (["--compare", "nowhere.json"], "--compare"),
     (["--target", "v5e:2x2", "--chips", "16"], "v5e:4x4"),
     (["--data.global_batch_size=1022"], "data.global_batch_size"),
     (["--model=vit_smal"], "model.name"), (["--optim.lr=x"], "optim.lr")],
)  # fmt: skip
def test_bad_input_gives_one_line(flags, word, capsys, monkeypatch):
    monkeypatch.setattr(compiler, "require_compiler", lambda: {"libtpu": "0"})
    monkeypatch.setattr(compiler, "compile_step", None)
    assert main(["--config", CONFIG, *flags]) == 2
    text = capsys.readouterr().err.splitlines()
    assert word in text[-1]
    assert text[-1].startswith("error: ")


def test_help_says_what_this_is():
    done = subprocess.run([sys.executable, "bill/compile_for_tpu.py", "--help"], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert "on a machine that has no TPU" in text
    assert "estimates, not measurements" in text


def create_report(cost: float | None) -> Report:
    """A report of that many Mcycles."""
    memory = analysis.Memory(usable_bytes=2, peak_bytes=1)
    bounds = Interval(lower=1.0, estimate=2.0)
    return Report(note="n", config="c", model="m", target="v5e:2x2", device="d", chips=1,
                  examples_per_chip=8, unit="img", example={"images": [8, 8, 3]},
                  fits=cost is not None, memory=memory, estimated_mcycles=cost, graph="g",
                  versions={}, made="2026-01-01", flops=1.0, hbm_bytes=1, step_ms=bounds,
                  units_per_s=bounds, mfu=bounds)  # fmt: skip


@pytest.mark.parametrize(("cost", "code"), [(10.0, 0), (10.4, 0), (10.6, 1), (None, 1)])
def test_a_regression_above_five_percent_fails(cost, code, tmp_path, capsys, monkeypatch):
    base, told = tmp_path / "base.json", tmp_path / "told.json"
    base.write_text(create_report(10.0).model_dump_json())
    monkeypatch.setattr(compiler, "require_compiler", lambda: {"libtpu": "0"})
    monkeypatch.setattr(step_report, "create_report", lambda *_: create_report(cost))
    command = ["--config", CONFIG, "--batch", "8", "--json", str(told)]
    for flags in (["--limit", "10"], ["--compare", str(base)]):
        assert main([*command, *flags]) == code
    said = Report.model_validate_json(told.read_text()).comparison
    assert said["exit_code"] == code
    assert [one["gate"] for one in said["findings"]] == [
        "estimated_mcycles@last:5:-:major", "peak_bytes@last:5:-:minor",
    ]  # fmt: skip
    gates = ["--gate", "estimated_mcycles:-:9:major", "--gate", "peak_bytes:0:-:major"]
    assert main([*command, "--compare", str(base), *gates]) == (1 if cost is None else 0)
    assert main([*command, "--compare", str(base), "--gate", "mcycle:1:-:major"]) == 2
    error = capsys.readouterr().err
    assert "no report has a figure 'mcycle'; did you mean 'bundles_mcycles' or" in error


def test_an_older_verdict_without_a_figure_is_a_finding(tmp_path, capsys, monkeypatch):
    base = tmp_path / "base.json"
    values = json.loads(create_report(10.0).model_dump_json())
    base.write_text(json.dumps({**values, "schema_version": 2, "estimated_mcycles": None}))
    monkeypatch.setattr(compiler, "require_compiler", lambda: {"libtpu": "0"})
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
        return report.model_copy(update={"memory": memory, "fits": needed <= 10_000,
                                         "examples_per_chip": compilation.batch})  # fmt: skip

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


def test_a_run_of_which_no_batch_fits_is_refused(monkeypatch, tmp_path):
    memory = analysis.Memory(usable_bytes=10, peak_bytes=11)
    report = create_report(None).model_copy(update={"memory": memory, "fits": False})
    monkeypatch.setattr(step_report, "create_report", lambda *_: report)
    options = main.parse(["--config", CONFIG])
    compilation = step_report.Compilation(create_config(tmp_path), parse_target("v5e:2x2"), 1, 8)
    with pytest.raises(UserError, match="no batch"):
        step_report.find_max_batch(compilation, options, report)


def test_the_json_has_a_schema_that_its_reports_keep():
    report = create_report(10.0)
    schema = Report.model_json_schema()
    assert {"estimated_mcycles", "flops", "hbm_bytes", "memory"} <= set(schema["properties"])
    assert "peak_bytes" in schema["$defs"]["Memory"]["properties"]
    assert schema["additionalProperties"] is False
    data = json.loads(report.model_dump_json())
    assert Report.model_validate(data) == report
    with pytest.raises(ValueError, match="surprise"):
        Report.model_validate({**data, "surprise": 1})


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs jax and libtpu: setup --tpu-compiler")
def test_the_gate_of_a_vit_of_two_blocks(tmp_path):
    """The real compiler on the real step, by the command line."""
    target = tmp_path / "report.json"
    command = [sys.executable, "bill/compile_for_tpu.py", "--config", "configs/tpu_step.yaml",
               '--model.args={"depth": 2}', "--limit", "6.7", "--json", str(target),
               "--cache-dir", str(tmp_path / "store")]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = Report.model_validate_json(target.read_text())
    assert report.fits
    assert report.top[0].module.startswith("blocks.")
    assert "compiler's estimate, not a measurement" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs jax and libtpu: setup --tpu-compiler")
def test_the_gate_of_a_decoder_of_two_blocks(tmp_path):
    """33.5 Mcyc; plain JAX costs 41.6 with scores in bfloat16."""
    target = tmp_path / "report.json"
    command = [sys.executable, "bill/compile_for_tpu.py", "--target", "v5e:1x1",
               "--config", "configs/tpu_decoder_step.yaml", "--limit", "34.5",
               '--model.args={"depth": 2, "width": 768, "heads": 12}', "--json", str(target),
               "--cache-dir", str(tmp_path / "store")]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = Report.model_validate_json(target.read_text())
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
    report_file = tmp_path / "report.json"
    chips = parse_target(target).devices
    command = [sys.executable, "bill/compile_for_tpu.py", "--config", f"configs/{name}.yaml",
               "--target", target, "--chips", str(chips), "--runtime.precision=bf16",
               "--json", str(report_file), "--cache-dir", str(tmp_path / "store")]  # fmt: skip
    if name != "transformer_sequences":
        command += ["--assume", "vocab_size=257"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = Report.model_validate_json(report_file.read_text())
    assert report.fits and not report.faults
    assert {one.kind for one in report.collectives} == {"all-reduce"}
    assert {one.dtype for one in report.collectives} == {"f32"}
