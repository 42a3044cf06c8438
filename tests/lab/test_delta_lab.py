"""The laboratory of delta rules: what it counts, what it refuses, and a small run of each rule."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab import matmul
from lab.delta import __main__ as tool
from lab.delta import errors as lab_errors
from lab.delta.cases import VARIANTS, LabCase, create_inputs, create_typed
from lab.delta.compiling import export_in_torch
from lab.delta.forms import describe_inputs
from lab.delta.gaps import PACKAGES, leave_out
from lab.delta.report import draw, find_crossings, print_rows, read_rows
from models.delta.kernels.backends import BACKENDS
from models.delta.rules.layout import CoreOptions
from store.quality.trends import find_trends, read_reports
from utils.errors import UserError
from utils.generations import GENERATIONS

ROOT = Path(__file__).resolve().parents[2]
HAS_COMPILER = all(importlib.util.find_spec(name) for name in ("jax", "libtpu"))
CASE = LabCase("gdn", "forward", 16, 32, 1, 8192)
SMALL = [
    "--heads",
    "1/2",
    "--sizes",
    "1x32",
    "1x64",
    "--width",
    "8",
    "--repeats",
    "2",
    "--chunk",
    "16",
    "--decode-batches",
    "2",
]


def test_flops_and_bytes_of_the_usual_case_are_known():
    assert CASE.count_flops() / 1e9 == pytest.approx(47.6, abs=0.1)
    assert CASE.count_reported_flops() == 8 * 128 * 128 * 32 * 8192
    assert CASE.count_bytes() / 1e6 == pytest.approx(203, abs=3)
    # The floors of docs/results_delta.md.
    assert CASE.count_flops() / 197e12 == pytest.approx(242e-6, rel=0.01)
    assert CASE.count_bytes() / 1640e9 == pytest.approx(124e-6, rel=0.02)
    decode = replace(CASE, mode="decode", batch=256)
    assert decode.count_bytes() == 2 * 256 * 32 * 128 * 128 * 4
    both = replace(CASE, mode="both")
    assert both.count_reported_flops() == 3 * CASE.count_reported_flops()
    assert replace(CASE, variant="delta_product").count_flops() == 2 * CASE.count_flops()


def test_a_decoding_step_of_attention_has_one_query_a_head():
    case = LabCase("attention", "decode", 1, 2, batch=3, tokens=100, width=8)
    assert case.count_flops() == 4 * 3 * 2 * 100 * 8
    assert case.count_bytes() == 2 * 2 * 3 * 100 * 8  # keys and values, two bytes a number


def test_inputs_beyond_the_hosts_memory_fail_with_a_reason(capsys, tmp_path):
    path = tmp_path / "r.json"
    flags = ["--variants", "attention", "--modes", "decode", "--heads", "1/2", "--width", "8"]
    assert tool.main([*flags, "--decode-batches", "1000000000", "--json", str(path)]) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert "GiB of the host's memory" in row["failure"] and "--decode-batches" in row["failure"]


@pytest.mark.xla
def test_a_program_larger_than_the_host_is_exported_from_shapes():
    case = LabCase("attention", "decode", 16, 32, batch=1024, tokens=8192)
    assert sum(x.numel() * x.element_size() for x in describe_inputs(case)) > 2**36
    artifact, fallbacks = export_in_torch(case, CoreOptions(), "default")
    assert artifact and not fallbacks


def create_row(variant: str, tokens: int, ms: float, **facts: object) -> dict:
    return {
        "variant": variant,
        "form": "xla",
        "mode": "forward",
        "key_heads": 1,
        "value_heads": 2,
        "batch": 1,
        "tokens": tokens,
        "ms": ms,
        "bytes": 8.0,
        "device": "cpu",
        "tokens_per_s": 9.0,
        "tflops": 1.0,
        "tflops_reported": 1.0,
        "hlo_lines": 0,
        "compile_s": 0.0,
        "fallbacks": {},
        **facts,
    }


def test_a_picture_of_many_curves_marks_where_they_cross(tmp_path):
    rows = [create_row("gdn", 1024, 2.0), create_row("gdn", 4096, 8.0)]
    rows += [create_row("attention", 1024, 1.0), create_row("attention", 4096, 16.0)]
    assert find_crossings(rows) == {"gdn xla forward 1/2": pytest.approx(2048)}
    slow = [*rows[:2], create_row("attention", 1024, 1.0), create_row("attention", 4096, 4.0)]
    assert find_crossings(slow) == {"gdn xla forward 1/2": None}
    for number, one in enumerate((rows[:2], rows[2:])):
        report = json.dumps({"lab": "delta", "rows": one})
        (tmp_path / f"{number}.json").write_text(report, encoding="utf-8")
    assert read_rows([tmp_path / "0.json", tmp_path / "1.json"]) == rows
    draw(rows, tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 1000


def draw_axes(rows: list[dict], monkeypatch: pytest.MonkeyPatch) -> Axes:
    """Return the axes of a picture that is not written."""
    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: kept.extend(figure.axes))
    draw(rows, Path("unused.png"))
    return kept[0]


def test_curves_of_a_picture_differ_by_rule_mode_form_and_heads(monkeypatch):
    rows = [
        create_row(
            variant, tokens, 2.0 - (variant == "attention"), mode=mode, form=form, value_heads=heads
        )
        for variant in VARIANTS
        for mode in ("forward", "both")
        for form in ("xla", "pallas")
        for heads in (1, 2)
        for tokens in (1024, 4096)
    ]
    lines = draw_axes(rows, monkeypatch).lines
    looks = {(one.get_color(), one.get_linestyle(), one.get_marker()) for one in lines}
    assert len(looks) == len(lines) == 2 * 2 * 2 * len(VARIANTS)
    assert [len(set(part)) for part in zip(*looks, strict=True)] == [len(VARIANTS), 2, 4]


def test_a_picture_notes_that_nothing_crosses(monkeypatch):
    slow = [create_row("gdn", 1024, 2.0), create_row("gdn", 4096, 8.0)]
    full = [create_row("attention", 1024, 1.0), create_row("attention", 4096, 4.0)]
    fast = [{**row, "variant": "kda", "ms": row["ms"] / 4} for row in slow]
    assert "nothing crosses" in draw_axes(slow + full, monkeypatch).get_title(loc="left")
    # Nothing stands beside the rule, and a rule that is faster.
    for rows in (slow, slow + full + fast):
        assert draw_axes(rows, monkeypatch).get_title(loc="left") == ""


def test_rules_that_cross_at_one_point_are_listed_below_each_other(monkeypatch):
    fast = [create_row(name, tokens, 0.5) for name in ("gdn", "kda") for tokens in (1024, 4096)]
    full = [create_row("attention", tokens, 1.0) for tokens in (1024, 4096)]
    (text,) = draw_axes(fast + full, monkeypatch).texts
    assert [line.split()[0] for line in text.get_text().splitlines()] == ["gdn", "kda"]


def test_only_attentions_decoding_step_depends_on_the_length(capsys):
    row = create_row("gdn", 8192, 1.0, mode="decode", batch=2)
    print_rows([row, {**row, "variant": "attention"}, {**row, "mode": "forward"}])
    found = [line.split()[4] for line in capsys.readouterr().out.splitlines()[1:]]
    assert found == ["2x1", "2x8192", "2x8192"]


def test_an_empty_picture_is_refused_before_measuring(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tool, "_measure", lambda *_: pytest.fail("measured"))
    picture = ["--picture", str(tmp_path / "p.png")]
    for flags in (["--modes", "decode"], ["--modes", "forward", "--sizes", "2x32"]):
        assert tool.main([*SMALL, *flags, *picture]) == 2
        text = capsys.readouterr().err
        assert "--picture" in text and "--sizes 1xTOKENS" in text and text.count("\n") == 1


def test_a_picture_of_earlier_rows_may_include_steps(tmp_path):
    earlier, picture = tmp_path / "e.json", tmp_path / "p.png"
    rows = [create_row("gdn", 1024, 1.0), {**create_row("gdn", 4096, 4.0), "failure": "full"}]
    earlier.write_text(json.dumps({"lab": "delta", "rows": rows}))
    flags = ["--variants", "gdn", "--modes", "decode", "--earlier", str(earlier)]
    assert tool.main([*SMALL, *flags, "--picture", str(picture)]) == 1
    assert picture.stat().st_size > 1000


def test_help_names_every_tpu_that_is_compiled_for(capsys):
    for program in (tool, matmul):
        with pytest.raises(SystemExit):
            program.main(["--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert f"compile for: {', '.join(GENERATIONS)}" in text


def test_a_rule_with_wrong_values_is_not_timed(monkeypatch):
    monkeypatch.setattr(
        lab_errors, "recur", lambda case, tensors: torch.zeros(1, case.tokens, 2, case.width) + 1
    )
    small = replace(lab_errors.shrink(replace(CASE, width=8)), tokens=16)
    with pytest.raises(UserError, match="gdn forward is wrong on cpu"):
        lab_errors.check_program(small, CoreOptions(chunk=8), torch.device("cpu"))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_rule_stays_finite_on_its_inputs(name):
    case = lab_errors.shrink(LabCase(name, "both", 2, 4, 1, 64, width=4))
    errors = lab_errors.check_program(case, CoreOptions(chunk=16), torch.device("cpu"))
    assert errors.output < 1e-5 and errors.gradients < 1e-4 and errors.rounded < 0.02
    assert all(torch.isfinite(x).all() for x in create_inputs(case, torch.float32))


def test_the_old_script_name_runs_the_lab_and_stores_its_results(tmp_path):
    script = ROOT / "delta_attention_comparison" / "benchmark_script.py"
    places = [
        "--json",
        str(tmp_path / "r.json"),
        "--picture",
        str(tmp_path / "r.png"),
        "--store",
        str(tmp_path / "runs"),
    ]
    done = subprocess.run(
        [sys.executable, str(script), *SMALL, "--variants", "gdn", "attention", *places],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "gdn xla forward 1/2: faster than attention" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert len(report["rows"]) == 2 * (2 + 2 + 1)
    for row in report["rows"]:
        assert row["kind"] == "measured" and row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["error_output"] < 1e-5 and row["tokens_per_s"] > 0
    (kept,) = (tmp_path / "runs" / "benchmarks").glob("*/*.json")
    assert json.loads(kept.read_text()) == report
    trends = [
        one
        for name, found in read_reports(tmp_path / "runs").items()
        for one in find_trends(name, found)
    ]
    assert trends[0].figure == "gdn xla forward 1/2 1x32 x ms"
    assert [one.values for one in trends] == [(row["ms"],) for row in report["rows"]]
    assert (tmp_path / "r.png").stat().st_size > 1000


def test_inputs_have_the_types_that_layers_pass():
    """All inputs of attention have the type of values."""
    wide, narrow = torch.float32, torch.bfloat16
    for variant, types in (("gdn", [wide, wide, narrow]), ("attention", [narrow] * 3)):
        found = create_typed(replace(CASE, variant=variant, tokens=8), "layers")
        assert [x.dtype for x in found[:3]] == types


@pytest.mark.parametrize(
    ("form", "lacks", "has"),
    [
        ("jax_reference", [("kda", "forward"), ("gdn", "decode")], [("gdn", "both")]),
        ("pallas", [("attention", "decode")], [("attention", "both"), ("rwkv7", "decode")]),
        ("fla", [("attention", "forward"), ("gdn", "decode"), ("gdn2", "both")], [("kda", "both")]),
        ("flashinfer", [("kda", "forward"), ("gdn", "both")], [("deltanet", "forward")]),
    ],
)
def test_unsupported_cases_of_a_form_are_left_out_or_refused(form, lacks, has):
    """Cases without a kernel of the form are not timed under its name."""
    cases = [(replace(CASE, variant=name, mode=mode), form) for name, mode in (*lacks, *has)]
    kept, line = leave_out(cases)
    assert kept == cases[len(lacks) :]
    assert line.startswith(f"left out {len(lacks)} of {len(cases)} cases; {form}: it ")
    assert leave_out(kept) == (kept, "")
    with pytest.raises(UserError, match=f"--form {form} has none of the cases asked for: it "):
        leave_out([*cases[: len(lacks)], (CASE, "xla")])


def test_every_backend_package_is_a_form():
    assert tuple(BACKENDS) == PACKAGES


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"rows": "x"},
        {"rows": [{"a": 1}]},
        {"rows": [{"variant": "gdn", "failure": "x"}]},
        {"rows": [{"variant": "gdn", "form": None, "mode": "both", "failure": "x"}]},
    ],
)
def test_a_report_without_rows_or_their_fields_is_refused(report, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"lab": "delta", **report}))
    with pytest.raises(UserError, match="lacks rows, or what each of them says"):
        read_rows([path])


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--heads", "16"], "--heads ('16') must be two numbers"),
        (["--heads", "3/4"], "--heads (3/4)"),
        (["--sizes", "1x"], "--sizes ('1x')"),
        (["--on", "v9"], "--on 'v9'"),
        (["--on", "v5e:9x9"], "--on 'v5e:9x9' is no slice"),
        (["--chunk", "48"], "--chunk (48)"),
        (["--solver", "lu"], "--solver ('lu')"),
        (["--repeats", "0"], "--repeats (0)"),
        (["--form", "jax_reference"], "compiled for TPUs alone"),
        (["--form", "pallas"], "--form pallas runs on XLA, not on cpu"),
        (
            [
                "--form",
                "pallas",
                "xla",
                "--on",
                "xla",
                "--variants",
                "attention",
                "--modes",
                "decode",
            ],
            "--form pallas has none of the cases asked for",
        ),
        (
            ["--form", "pallas", "--on", "xla", "--products", "bfloat16"],
            "--products (bfloat16) asks",
        ),
        (["--earlier", "README.md"], "--earlier (README.md) cannot be read"),
        (
            ["--earlier", "schemas/artifacts.json"],
            "--earlier (schemas/artifacts.json) is no report",
        ),
        (["--form", "fla"], "--form fla runs on NVIDIA GPUs, not on cpu"),
        (["--types", "layers"], "--types layers is for the project's own forms, compiled for TPUs"),
        (["--decode-batches", "0"], "--decode-batches (0)"),
        (["--time-limit", "0"], "--time-limit (0)"),
        (["--time-limit", "nan"], "--time-limit (nan)"),
        (["--picture", "p.txt"], "--picture ('p.txt') must end with one of .png"),
        (["--json", "/proc/nowhere/r.json"], "cannot be created"),
    ],
)
def test_bad_input_gives_one_line(flags, word, capsys):
    assert tool.main([*SMALL, *flags]) == 2
    text = capsys.readouterr().err
    assert word in text and text.count("\n") == 1


@pytest.mark.slow
@pytest.mark.xla
def test_every_rule_runs_on_xla_without_host_fallback(tmp_path):
    path = tmp_path / "r.json"
    assert tool.main(["--on", "xla", *SMALL, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["variant"] for row in rows} == set(VARIANTS)
    assert all(row["fallbacks"] == {} and row["hlo_lines"] > 10 for row in rows)


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.skipif(not HAS_COMPILER, reason="needs jax and libtpu: setup --tpu-compiler")
def test_cycles_are_reported_where_there_is_no_tpu(tmp_path):
    path = tmp_path / "r.json"
    forms = ["xla", "pallas", "jax_reference"]
    flags = [
        "--on",
        "v5e",
        "--variants",
        "gdn",
        "--modes",
        "forward",
        "both",
        "--heads",
        "1/2",
        "--sizes",
        "1x256",
        "--form",
        *forms,
        "--json",
        str(path),
    ]
    assert tool.main(flags) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["form"] for row in rows] == forms * 2
    for row in rows:
        assert row["mcycles_with_dma"] >= row["mcycles_bundles"] > row["mcycles_matrix"] > 0
        assert (row["unknown"], row["kind"]) == (0, "bundles") and row["error_output"] < 1e-5
