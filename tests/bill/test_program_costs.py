"""Costs, roles and known faults of a compiled program's instructions."""

from __future__ import annotations

import pytest

from bill import analysis
from bill.compiled import Compiled
from bill.hlo import get_hbm_bytes, list_instructions, read_arrays, read_module
from bill.targets import parse_target
from tests.bill.test_compile_for_tpu import create_export
from utils.runtime.xla.scopes import Origin, read_origin

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


def test_the_bodies_of_loops_count_as_often_as_they_run(instructions):
    assert analysis.sum_mcycles(instructions) * 1e6 == 1000 + 250 + 500 + 12 * 10


def test_a_loop_without_a_count_runs_up_to_its_conditions_constant():
    unknown = PROGRAM.replace('backend_config={"known_trip_count":{"n":"12"}}', "metadata={}")
    total = analysis.sum_mcycles(list_instructions(read_module(unknown))) * 1e6
    assert total == 1750 + 5 * 10


def test_arrays_have_their_bytes_and_memory_space():
    wide, narrow, token = read_arrays(
        "(f32[8,128]{1,0}, bf16[4,2]{1,0:T(8,128)S(1)}, u32[]{:S(2)})"
    )
    assert (wide.bytes, wide.in_hbm) == (4096, True)
    assert (narrow.bytes, narrow.in_hbm) == (16, False)
    assert (token.bytes, token.in_hbm) == (4, False)


def test_hbm_bytes_count_arrays_outside_the_chip(instructions):
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


def test_an_operation_names_its_module():
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


def test_instructions_without_an_estimate_are_counted_and_named(instructions):
    uncosted, scalars = analysis.list_uncosted(instructions)
    kinds = {one.opcode: one.count for one in uncosted}
    assert kinds == {"copy-start": 1, "all-reduce": 1, "select-and-scatter": 1}
    assert scalars == 1


def test_collectives_list_type_and_bytes(instructions):
    (found,) = analysis.list_collectives(instructions)
    assert (found.kind, found.dtype, found.bytes) == ("all-reduce", "f32", 4 * 8 * 128)


def test_known_faults_are_found(instructions):
    export = create_export(
        undonated=["model.a"], gradients_alive=["head.weight"], host_ops=["aten::addmm"]
    )
    compiled = Compiled(PROGRAM + "  %d = s32[<=8]{0} parameter(3)")
    faults = analysis.find_faults(instructions, export, compiled, 64, is_bf16=True)
    found = {fault.kind: fault.count for fault in faults}
    assert found == {
        "layout copies": 1,
        "float32 activations": 1,
        "undonated state": 1,
        "gradients alive": 1,
        "host fallback": 1,
        "dynamic shapes": 1,
    }


def test_float32_runs_have_no_float32_fault(instructions):
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
