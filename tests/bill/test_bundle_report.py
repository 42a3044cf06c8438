"""A step's bundles by role, module and operation, and the interval of their figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bill import compiled as storing
from bill import compiler, printing
from bill import step_report as tool
from bill.bundle_report import count_step, create_bundle_report
from bill.bundles.counting import BundleCost
from bill.compiled import Compiled, CompilerFacts, read_stored, write_stored
from bill.hlo import list_instructions, read_module
from bill.schema import Interval, Report
from bill.step.tracing import StepExport
from bill.targets import parse_target
from tests.bill.test_compile_for_tpu import create_export
from utils.config.load import RunConfig
from utils.errors import UserError
from utils.generations import GENERATIONS

# A product and a kernel without an estimate of its own, the product's twin in a loop of three, and
# a copy into the chip beside them.
# ruff: noqa: E501
PROGRAM = """HloModule step, is_scheduled=true

%body (p: bf16[64,128]) -> bf16[64,128] {
  %p = bf16[64,128]{1,0} parameter(0)
  ROOT %twin = bf16[64,128]{1,0} fusion(%p), kind=kOutput, calls=%f, metadata={op_name="student|forward|blocks.1.mlp.fc1.9/aten__einsum"}, backend_config={"estimated_cycles":"900"}
}

ENTRY %main (a: bf16[64,128]) -> bf16[64,128] {
  %a = bf16[64,128]{1,0} parameter(0)
  %copy-start.1 = (bf16[64,128]{1,0:S(1)}, bf16[64,128]{1,0}, u32[]{:S(2)}) copy-start(%a)
  %product = bf16[64,128]{1,0} fusion(%a), kind=kOutput, calls=%f, metadata={op_name="student|forward|blocks.0.mlp.fc1.3/aten__einsum"}, backend_config={"estimated_cycles":"900"}
  %kernel = bf16[64,128]{1,0} custom-call(%product), custom_call_target="tpu_custom_call", metadata={op_name="student|forward|blocks.0.attn.4/xla__tpu_custom_call"}
  %lost = bf16[64,128]{1,0} sort(%kernel), dimensions={0}
  ROOT %while.1 = bf16[64,128]{1,0} while(%lost), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""
COSTS = {
    "product": BundleCost(500, 20, 400.0, 30.0, 8000),
    "kernel": BundleCost(700, 100, 300.0, 0.0, 1000),
}
V5E = GENERATIONS["v5e"]


@pytest.fixture
def program():
    return count_step(list_instructions(read_module(PROGRAM)), COSTS, V5E)


def test_bundles_are_summed_by_role_module_and_operation(program):
    found = create_bundle_report(program, V5E)
    roles = {row.name: (row.runs, row.issued_mcycles, row.dma_bytes) for row in found.roles}
    assert roles == {"MLP": (4, 0.002, 32_000), "attention": (1, 0.0007, 1000)}
    modules = {row.name: row.matrix_mcycles for row in found.modules}
    assert modules == {"student blocks.*.mlp.fc1": 0.0016, "student blocks.*.attn": 0.0003}
    sources = {row.name: (row.source, row.runs) for row in found.operations}
    assert sources == {"product": ("own", 1), "twin": ("twin", 3), "kernel": ("own", 1)}
    assert found.waited_mcycles == pytest.approx(4 * 30 / 1e6, abs=1e-4)
    assert (found.async_bytes, found.unestimated_mcycles) == (2 * 64 * 128, 0.0007)
    assert "340 ns" in found.model and "819 GB/s" in found.model


def describe(costs: dict | None) -> Report:
    """The tool's report of the program, as compiled for a v5e chip."""
    memory = dict.fromkeys(
        (f"{n}_size_in_bytes" for n in ("argument", "output", "temp", "alias")), 8
    )
    facts = CompilerFacts(memory=memory, cost={"flops": 1e8}, compile_s=1.0)
    compilation = tool.Compilation(RunConfig(), parse_target("v5e:1x1"), 1, 64)
    return tool.describe(
        compilation, create_export(), Compiled(PROGRAM, facts, costs=costs), "c", []
    )


@pytest.mark.xla
def test_bundles_lie_between_lower_bound_and_estimate(monkeypatch, capsys):
    monkeypatch.setattr(compiler, "require_compiler", lambda *_: {"libtpu": "0"})
    plain, counted = describe(None), describe(COSTS)
    assert (plain.bundles, plain.step_ms.bundles) == (None, None)
    assert plain.estimated_mcycles == counted.estimated_mcycles == 0.0036
    # The kernel has no estimate: its bundles stand in the upper end, not in the estimate.
    assert counted.step_ms.estimate == pytest.approx(plain.step_ms.estimate + 0.0007 / 1.5)
    assert counted.step_ms.lower <= counted.step_ms.bundles <= counted.step_ms.estimate
    assert {one.opcode for one in plain.uncosted} == {"custom-call", "copy-start", "sort"}
    assert {one.opcode for one in counted.uncosted} == {"sort"}
    printing.print_report(counted)
    said = capsys.readouterr().out
    assert "(bound) <= " in said and "(bundles with DMA) <= " in said
    assert "neither estimate nor bundles: 1 sort" in said
    assert "by module" in said and "twin x 3" in said
    assert Report.model_validate_json(counted.model_dump_json()) == counted


def test_a_violated_order_of_figures_is_shown():
    text = printing.order(Interval(lower=2.0, bundles=1.0, estimate=3.0), ".0f", "ms")
    assert text == "2 ms (bound) >= 1 ms (bundles with DMA) <= 3 ms (estimate)"


def test_costs_are_cached_until_the_reader_changes(tmp_path: Path, monkeypatch):
    write_stored(tmp_path, Compiled("HloModule x", costs={**COSTS, "endless": None}))
    found = read_stored(tmp_path, with_bundles=True)
    assert found.costs == {**COSTS, "endless": None} and found.cached
    monkeypatch.setattr(storing, "compute_reader_digest", lambda: "another")
    assert read_stored(tmp_path, with_bundles=True) is None
    assert read_stored(tmp_path, with_bundles=False).hlo == "HloModule x"
    plain = tmp_path / "plain"
    write_stored(plain, Compiled("HloModule x"))
    assert read_stored(plain, with_bundles=True) is None


def test_facts_are_stored_with_the_bytes_of_the_child(tmp_path: Path):
    facts = {
        "topology_devices": 4,
        "device_kind": "TPU v5 lite",
        "memory": {"temp_size_in_bytes": 8},
        "cost": {"flops": 1e8, "bytes accessed": 2e6},
        "versions": {"jax": "0.7.1"},
        "compile_s": 1.5,
        "of_a_later_version": [1],
    }
    for known in (facts, {"message": "Used 20.50G of 15.75G hbm"}, {}):
        write_stored(tmp_path, Compiled("HloModule x", CompilerFacts.model_validate(known)))
        written = (tmp_path / "facts.json").read_text()
        assert written == json.dumps({**known, "needed_bytes": None})
        stored = read_stored(tmp_path, with_bundles=False)
        assert stored.facts.model_dump(exclude_unset=True) == known
    (tmp_path / "facts.json").write_text('{"memory": 3, "needed_bytes": null}')
    assert read_stored(tmp_path, with_bundles=False) is None


CHILD = """
import json, sys
from pathlib import Path
path = Path(sys.argv[1])
request = json.loads(path.read_text())
if "bundles" in request:
    name = "1-product-01-packed-bundles-post-ra.txt"
    Path(request["bundles"], name).write_text("   0x0   :  { %1 = vadd.f32 %v1 }\\n   0x1   :  {}\\n")
(path.parent / "program.hlo").write_text("HloModule x")
(path.parent / "facts.json").write_text("{}")
"""


def test_listings_are_requested_only_with_the_flag(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(compiler, "CHILD", child)
    monkeypatch.setattr(compiler, "require_compiler", lambda *_: {"libtpu": "0"})
    export: StepExport = create_export()

    def compile_it(*, with_bundles: bool) -> Compiled:
        return compiler.compile_step(
            export,
            parse_target("v5e:1x1"),
            devices=1,
            store=tmp_path / "store",
            time_limit_s=60.0,
            with_bundles=with_bundles,
        )

    assert compile_it(with_bundles=False).costs is None
    assert compile_it(with_bundles=False).cached
    counted = compile_it(with_bundles=True)
    assert not counted.cached
    assert counted.costs == {"product": BundleCost(2, 1, 0.0, 0.0, 0)}
    assert compile_it(with_bundles=True).cached
    (stored,) = (tmp_path / "store").iterdir()
    assert json.loads((stored / "bundles.json").read_text())["costs"]["product"]["issued"] == 2
    # A release of libtpu that writes no bundles is refused, and nothing is stored.
    child.write_text(CHILD.replace('"bundles" in request', "False"))
    with pytest.raises(UserError, match=r"^--bundles is not supported by libtpu 0, which"):
        compile_it(with_bundles=True)
    assert list((tmp_path / "store").iterdir()) == [stored]
