"""Counters of a layout's costs, by numbers that can be computed by hand."""

from __future__ import annotations

import copy
import gzip
import json
import re
from pathlib import Path

import pytest

from bill.hlo import read_arrays
from bill.layout import count_layout
from store.quality.gates import parse_gate
from store.quality.report_gates import check_reports
from store.quality.reports import read_figures
from store.quality.trends import keep_report
from tests.store.test_calibration import make_tpu_run, make_verdict
from tests.support.stored_runs import make_config
from tools.runs.__main__ import main as runs

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "v5e_step.hlo.gz"
# ruff: noqa: E501
PROGRAM = """HloModule step, is_scheduled=true

%product (p.1: bf16[8,128], p.2: f32[128,128]) -> f32[8,128] {
  %p.1 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p.2 = f32[128,128]{1,0:T(8,128)} parameter(1)
  ROOT %dot.1 = f32[8,128]{1,0:T(8,128)} convolution(%p.1, %p.2), dim_labels=bf_io->bf
}

%narrow (p.3: bf16[8,128], p.4: bf16[128,128]) -> bf16[8,128] {
  %p.3 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p.4 = bf16[128,128]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %dot.2 = bf16[8,128]{1,0:T(8,128)(2,1)} convolution(%p.3, %p.4), dim_labels=bf_io->bf
}

%body (s: s32[]) -> s32[] {
  %s = s32[] parameter(0)
  ROOT %copy.1 = f32[4,128]{1,0:T(8,128)} copy(%s), metadata={op_name="student|forward|blocks.1.attn.3/aten__permute"}, backend_config={"estimated_cycles":"100"}
}

ENTRY %main (a: bf16[8,128], b: f32[128,128]) -> f32[8,128] {
  %a = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %b = f32[128,128]{1,0:T(8,128)} parameter(1)
  %fusion.2 = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%a, %b), kind=kOutput, calls=%narrow, metadata={op_name="student|forward|head.2/aten__mm"}
  %fusion.1 = f32[8,128]{1,0:T(8,128)} fusion(%a, %b), kind=kOutput, calls=%product, metadata={op_name="student|forward|blocks.0.mlp.fc1.2/aten__mm"}
  %while.1 = s32[] while(%fusion.1), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %near = f32[8,128]{1,0:T(8,128)S(1)} add(%fusion.1, %fusion.1)
  ROOT %out = f32[8,128]{1,0:T(8,128)} transpose(%near), dimensions={0,1}, backend_config={"estimated_cycles":"50"}
}
"""


def test_sizes_are_rounded_up_to_the_tiles_of_the_layout():
    tiled = {
        "f32[4,100]{1,0:T(8,128)}": (8, 128),
        "f32[4,100]{0,1:T(8,128)}": (128, 104),
        "bf16[2,197,384]{2,1,0:T(8,128)(2,1)}": (2, 200, 384),
        "f32[5]{0:T(256)}": (256,),
        "f32[4,100]{1,0}": (4, 100),
        "f32[]{:T(128)}": (),
    }
    for text, sizes in tiled.items():
        (array,) = read_arrays(text)
        assert array.tiled == sizes, text
    assert read_arrays("f32[4,100]{1,0:T(8,128)}")[0].padded_bytes == 8 * 128 * 4


def test_counters_name_their_first_module():
    layout = count_layout(PROGRAM, ["aten::nonzero", "aten::unique"])
    found = {name: (counter.value, counter.first) for name, counter in layout}
    # Two copies: one runs three times in a loop. The loop's result has half of its rows as padding.
    assert found["layout_copies"] == (4, "student blocks.1.attn")
    assert found["layout_mcycles"] == (
        pytest.approx((3 * 100 + 50) / 1e6, abs=1e-4),
        "student blocks.1.attn",
    )
    assert found["float32_products"] == (1, "student blocks.0.mlp.fc1")
    assert found["host_ops"] == (2, "aten::nonzero")
    stored = 8 * 128 * (2 + 4 + 4) + 8 * 128 * 4
    assert found["padded_share"] == (
        pytest.approx(4 * 128 * 4 / stored, abs=1e-4),
        "student blocks.1.attn",
    )


def read_real_program() -> str:
    """A program of libtpu 0.0.52 for v5e: a step of a ViT of one block, 8 examples, AdamW.

    `tools.compile_for_tpu --compiler newest --target v5e:1x1 --batch 8 --hlo DIR` wrote it; its
    table of source files is left out.
    """
    with gzip.open(FIXTURE, "rt", encoding="utf-8") as file:
        return file.read()


def test_a_real_program_is_counted_line_by_line():
    """Every expected number is counted from the text by other means than the reader's."""
    text = read_real_program()
    layout = count_layout(text, [])
    entry = text[text.index("\nENTRY ") :]
    assert " while(" not in text and " transpose(" not in entry
    types = dict(re.findall(r"^ *(?:ROOT )?%?([\w.-]+) = ([^( ]\S*) [a-z]", entry, re.MULTILINE))
    copies = re.findall(r"^ *%?([\w.-]+) = \S+ copy\(%?([\w.-]+)\)(.*)$", entry, re.MULTILINE)
    moved = [
        (name, rest)
        for name, source, rest in copies
        if re.sub(r"S\(\d\)", "", types[name]) != re.sub(r"S\(\d\)", "", types[source])
    ]
    assert 0 < len(moved) < len(copies)  # scalars that go to another memory keep their layout
    assert layout.layout_copies.value == len(moved) == 15
    cycles = sum(int(re.search(r'"estimated_cycles":"(\d+)"', rest)[1]) for _, rest in moved)
    assert layout.layout_mcycles.value == pytest.approx(cycles / 1e6, abs=5e-5)
    assert layout.float32_products.first == "student patch_embed"
    assert layout.layout_copies.first == "loss"  # the images of the batch
    assert 0.5 < layout.padded_share.value < 1.0  # its width of 16 fills an eighth of a tile
    assert layout.padded_share.first == "input"


def test_a_program_without_them_has_zeros_and_no_module():
    layout = count_layout("HloModule step\n\nENTRY %main () -> f32[] {\n}\n", [])
    assert {(counter.value, counter.first) for _, counter in layout} == {(0.0, "")}


def make_layout(copies: int) -> dict:
    layout = count_layout(PROGRAM, []).model_dump()
    return {**layout, "layout_copies": {"value": copies, "first": "student blocks.1.attn"}}


@pytest.mark.parametrize(("copies", "outcome"), [(4, "pass"), (5, "fail")])
def test_gates_work_on_the_counters(copies, outcome):
    config = make_config()
    base, new = (make_verdict(config, layout=make_layout(count)) for count in (4, copies))
    assert read_figures(new)["layout_copies"] == copies
    (finding,) = check_reports([parse_gate("layout_copies:-:0:blocker")], base, new)
    assert finding.outcome == outcome


def test_the_counters_stand_beside_the_run_of_the_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = make_config(**{"data.global_batch_size": 8})
    make_tpu_run(tmp_path, "a", copy.deepcopy(config), step_s=0.05)
    keep_report(tmp_path, make_verdict(config, layout=make_layout(7)))
    show = ["show", "digits/a", "--store", str(tmp_path)]
    assert runs(show) == 0
    assert "7, first at student blocks.1.attn" in capsys.readouterr().out
    assert runs([*show, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == make_layout(7)
