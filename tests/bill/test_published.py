"""The table of published speeds: the document's and the tool's are one."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path

import pytest
import timm

from bill.published import PRODUCTS, PUBLISHED, describe_calibration, find_range
from bill.step_report import NOTE
from bill.targets import parse_target
from lab.costing import compile_program, export_in_jax
from lab.jax_child import list_residual_shapes

HAS_COMPILER = all(importlib.util.find_spec(name) for name in ("jax", "libtpu"))
ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/results_tpu_compiler.md").read_text(encoding="utf-8")


def test_the_document_shows_the_table_that_the_tool_reads():
    for one in PUBLISHED:
        speed = " to ".join(f"{value:g}" for value in dict.fromkeys(one.per_s))
        shown = [
            " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in one.get_ratios(cycles)))
            for cycles in (one.estimate, one.bundles)
        ]
        device = f"{one.generation} core, {one.examples}"
        row = (one.name, device, speed, f"{one.estimate:.2f}", f"{one.bundles:.2f}", *shown)
        assert f"| {' | '.join(row)} |" in TEXT
        assert f"| {one.name} | {one.program} | {one.source} |" in TEXT
    rows = re.findall(r"^\| [^|]+ \| v\w+ (?:core|chip), \d+ \|", TEXT, re.MULTILINE)
    assert len(rows) == len(PUBLISHED)


def test_the_document_shows_the_products_with_published_times():
    for one in PRODUCTS:
        cells = [
            f"{value:.2f}" if value is not None else "none" for value in (one.estimate, one.bundles)
        ]
        for cycles in (one.estimate, one.bundles):
            cells += [f"{ratio:.2f}" for ratio in one.get_ratios(cycles)] or ["-"]
        assert f"| {one.name} | {one.step_ms:.3f} | {' | '.join(cells)} |" in TEXT
        assert one.source in TEXT


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs jax and libtpu: setup --tpu-compiler")
@pytest.mark.parametrize("one", PRODUCTS, ids=lambda one: one.name)
def test_the_products_have_the_costs_of_the_table(one):
    target = parse_target(one.generation)
    artifacts = export_in_jax([one.describe()], target, time_limit_s=900)
    found = compile_program(artifacts[0], target, time_limit_s=900).program
    assert found.with_dma / 1e6 == pytest.approx(one.bundles, rel=0.02)
    if one.estimate is not None:
        assert found.estimate / 1e6 == pytest.approx(one.estimate, rel=0.02)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs jax and libtpu: setup --tpu-compiler")
@pytest.mark.parametrize("one", [x for x in PUBLISHED if x.request], ids=lambda one: one.name)
def test_the_steps_have_the_costs_of_the_table(one):
    target = parse_target(one.generation)
    artifacts = export_in_jax([one.request], target, time_limit_s=900)
    found = compile_program(artifacts[0], target, time_limit_s=1800).program
    assert found.with_dma / 1e6 == pytest.approx(one.bundles, rel=0.02)
    assert found.estimate / 1e6 == pytest.approx(one.estimate, rel=0.02)


def test_the_residual_step_has_the_weights_of_resnet50():
    """GroupNorm has as many numbers as BatchNorm, its running statistics left out."""
    (one,) = [one for one in PUBLISHED if one.name == "big_vision BiT-R50x1"]
    shapes = list_residual_shapes(one.request["blocks"], one.request["classes"])
    model = timm.create_model("resnet50")
    assert sum(map(math.prod, shapes)) == sum(x.numel() for x in model.parameters())


def test_a_ratio_is_published_time_over_the_time_of_the_cycles():
    """128 images at 1,011 a second are 126.6 ms; 130.30 Mcyc at 0.94 GHz are 138.6."""
    (one,) = [one for one in PUBLISHED if one.name == "flax ResNet-50"]
    assert one.step_ms == pytest.approx((126.607, 126.607), abs=1e-3)
    assert one.get_ratios(one.estimate) == pytest.approx((0.9134, 0.9134), abs=1e-4)
    slow, fast = (one.get_ratios(cycles)[0] for cycles in (100.0, 200.0))
    assert slow == pytest.approx(2 * fast)


def test_the_tool_prints_the_range_of_the_table():
    low, high = find_range("bundles")
    assert low < high and low >= find_range("estimate")[0]
    assert f"{low:.2f} to {high:.2f} times their bundles with DMA" in describe_calibration()
    assert describe_calibration() in NOTE and "not a measurement" in NOTE
