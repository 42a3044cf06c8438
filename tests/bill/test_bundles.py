"""The reader of bundles: small listings counted by hand, and products of known size."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

from bill.bundles.chip import HbmTraffic, get_chip_model
from bill.bundles.counting import count_bundles, count_listings, count_program
from bill.bundles.listing import list_listings, read_listing
from bill.bundles.machine import ScalarCore
from bill.children.processes import find_venv, read_versions
from bill.hlo import list_instructions, read_module
from bill.targets import NEWEST, OWN, parse_target
from lab.costing import compile_program, export_in_jax
from tests.support.plain_core import PlainCore
from utils.generations import GENERATIONS

NEEDS_OWN = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("jax", "libtpu")),
    reason="needs jax and libtpu: setup --tpu-compiler",
)
NEEDS_NEWEST = pytest.mark.skipif(
    "libtpu" not in read_versions(find_venv("-compiler")),
    reason="needs libtpu: setup --tpu-compiler --newest",
)
V5E = get_chip_model(GENERATIONS["v5e"])

# A loop of ten turns with four delay slots; a transfer in all turns but the first, whose wait
# stands in the next turn; a comment that quotes a transfer.
LISTING = """
     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: f32[8]] /* operand 0 */  ;;  %s2_s3 = smov 0 /* copy for cssa */ }
   0x1 LB: > { %s5_s3 = sphi %s2_s3, %s9_s3 /* phi copy :: iteration index */  ;;  %p6_p0 = scmp.eq.s32.totalorder %s5_s3, 0 }
   0x2   : > { %s7_s4 = scalar_lea.sflag [#allocation4], 1  ;;  %s9_s3 = sadd.s32 1, %s5_s3 }
   0x3   : > { %11 = dma.hbm_to_vmem [thread:$0]  (!%p6_p0), /*hbm=*/%s1_s0, /*size_in_granules=*/100, /*vmem=*/[#allocation2], /*dst_syncflagno=*/%s7_s4 /*
base_bounds: (8, 16)
 */  ;;  %s12_s5 = smov (%p6_p0, %s9_s3), 7 }
   0x4   :  {}
   0x5   : > { %13 = vmatmul.bf16.gmra.mxu0 %v1  ;;  %14 = vmatmul.f32.gmra.mxu1 %v2  ;;  %15 = vpop.f32.mrf.mxu0 }
   0x6   : > { %16 = dma.done.wait (!%p6_p0), %s7_s4, 100 /* pipeline-emitter-dma-wait */ }
   0x7   : > { %17 = sst [smem:[#allocation9_spill]] %s9_s3  ;;  %20 = shalt.err (!%p6_p0) /* BoundsCheck for %21 = dma.hbm_to_vmem /*hbm=*/%s9, /*size_in_granules=*/%s10
hlo: copy
 */ }
   0x8   : > { %s18_s6 = sld [smem:[#allocation9_spill]]  ;;  %p19_p1 = scmp.ge.s32.totalorder %s9_s3, 10 }
   0x9   : > { %22 = sbr.rel (!%p19_p1) target bundleno = 1 (0x1), region = 3 }
   0xa   :  {}
   0xb   :  {}
   0xc   :  {}
   0xd   :  {}
   0xe   :  { %23 = vsyncpa [#allocation4], 1 }
"""  # noqa: E501


def test_a_loop_is_issued_as_often_as_its_counter_runs():
    cost = count_bundles(read_listing(LISTING), V5E)
    assert cost.issued == 1 + 10 * 13 + 1
    assert cost.empty == 10 * 5
    assert cost.matrix == 10 * 16
    assert (cost.hbm_bytes, cost.unknown) == (9 * 100 * 32, 0)


def test_a_bundle_that_only_joins_values_is_issued_and_does_nothing():
    lines = LISTING.replace("0x4   :  {}", "0x4   : > { %30_s9 = sphi %s2_s3, %s9_s3 }")
    found, wanted = (count_bundles(read_listing(one), V5E) for one in (lines, LISTING))
    assert lines != LISTING and (found.issued, found.hbm_bytes) == (wanted.issued, wanted.hbm_bytes)


def test_a_wait_lasts_from_the_latency_to_the_last_byte():
    cost = count_bundles(read_listing(LISTING), V5E)
    of_one = V5E.latency_cycles + 3200 / V5E.bytes_per_cycle
    # Three bundles stand between the transfer and its wait.
    assert cost.waited == pytest.approx(9 * (of_one - 4), abs=9)
    assert cost.with_dma == cost.issued + cost.waited


def test_transfers_share_the_bandwidth_and_later_ones_slow_earlier_ones():
    memory = HbmTraffic(V5E)
    first, second = memory.issue(0.0, 10_000), memory.issue(0.0, 10_000)
    alone = 320_000 / V5E.bytes_per_cycle
    assert memory.finish(first) == pytest.approx(V5E.latency_cycles + 2 * alone)
    assert memory.finish(second) == pytest.approx(V5E.latency_cycles + 2 * alone)
    third = memory.issue(memory.now, 10_000)
    assert memory.finish(third) - memory.now == 0
    assert third.done == pytest.approx(2 * V5E.latency_cycles + 3 * alone)


def test_transfers_end_after_very_many_cycles():
    """Behind 1e8 cycles a time's last digit stands for more bytes than are left."""
    for cycle in (1e8 + 0.3, 1e9 + 0.7):
        memory = HbmTraffic(V5E)
        transfers = [memory.issue(cycle + 7 * n, size) for n, size in enumerate((911, 77, 4001))]
        last = max(memory.finish(one) for one in transfers) - cycle
        assert last == pytest.approx(V5E.latency_cycles + 32 * 4989 / V5E.bytes_per_cycle, abs=1e-5)


def test_data_dependent_instructions_are_counted_but_not_simulated():
    text = """
   0x0   :  { %s1_s0 = vpop.scalar %v0 }
   0x1   :  { %p2_p0 = scmp.eq.s32.totalorder %s1_s0, 0 }
   0x2   :  { %3 = sbr.rel (%p2_p0) target bundleno = 0 (0x0), region = 1 }
   0x3   :  { %4 = dma.vmem_to_hbm /*vmem=*/%s5_s5, /*size_in_granules=*/%s1_s0, /*hbm=*/%s6_s6 }
"""
    cost = count_bundles(read_listing(text), V5E)
    assert (cost.issued, cost.unknown, cost.hbm_bytes) == (4, 2, 0)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("%s1_s1 = sshrl.u32 4294967295, 28", 15),
        ("%s1_s1 = sshra.s32 4294967295, 28", -1),
        ("%s1_s1 = ssub.s32 3, 5", -2),
        ("%s1_s1 = sand.u32 1, 7 /* smod.u32 w/div 2 */", 1),
        ("%s1_s1 = scalar_select /*predicate=*/%p9_p9, /*on_true=*/3, /*on_false=*/4", 4),
        ("%s1_s1 = smov (!%p9_p9, 5), 6", 6),
        ("%s1_s1 = smov (%p9_p9, 5), 6", 5),
        ("%s1_s1 = sld [smem:[#allocation7]] (!%p9_p9) /* core id */", 0),
        ("%p1_s1 = pnand %p9_p9, %p8_p8", 1),
        ("%p1_s1 = por %p9_p9, %p8_p8", None),
    ],
)
def test_scalar_steps_have_their_values(line, value):
    machine = ScalarCore(read_listing(f"     0   :  {{ {line} }}"), V5E)
    machine.state.registers["p9"] = 0
    machine.run()
    assert machine.state.registers["s1"] == value


DESCRIBED = """
   0x0   :  { %s1_s1 = inlined_call_operand.hbm [shape: bf16[8]]  ;;  %s2_s2 = scalar_lea.sflag [#allocation4], 1 }
   0x1   :  { %3 = sst [smem:[#allocation9 + $0x1]] 1024  ;;  %s4_s4 = sor.u32 7168, %s2_s2 }
   0x2   :  { %5 = sst [smem:[#allocation9 + $0x4]] 512 }
   0x3   :  { %6 = sst [smem:[#allocation9 + $0x6]] 20973568  ;;  %7 = sst [smem:[#allocation9 + $0x7]] %s4_s4 }
   0x4   :  { %8 = dma [#allocation9] /*
base_bounds: (256, 16) */ }
   0x5   :  { %9 = dma.done.wait %s2_s2, 2048 /* pipeline-emitter-dma-wait */ }
"""  # noqa: E501


def test_a_transfer_described_in_memory_is_read_from_memory():
    """As v2 and v3 do what has strides: spaces, size and flag are words of a table."""
    v3 = get_chip_model(GENERATIONS["v3"])
    cost = count_bundles(read_listing(DESCRIBED), v3)
    assert (cost.hbm_bytes, cost.unknown) == (2048 * 1024, 0)
    assert cost.waited == pytest.approx(v3.latency_cycles + 2048 * 1024 / v3.bytes_per_cycle, abs=2)
    inside = count_bundles(read_listing(DESCRIBED.replace("0x4]] 512", "0x4]] 1024")), v3)
    assert (inside.hbm_bytes, inside.waited) == (0, 0)
    unsized = count_bundles(read_listing(DESCRIBED.replace("20973568", "%s99_s9")), v3)
    assert (unsized.hbm_bytes, unsized.unknown) == (0, 1)


def _draw_step(draw: random.Random) -> str:
    """A scalar instruction as listings have them, of few registers, so that steps meet."""

    def number() -> str:
        return f"%t_s{draw.randrange(6)}"

    def bit() -> str:
        return draw.choice(["", "!"]) + f"%t_p{draw.randrange(4)}"

    def value() -> str:
        return draw.choice([number(), number(), str(draw.randrange(-3, 70)), "[#place + $0x8]"])

    guard = draw.choice(["", f"({bit()}), "])
    compared = f"scmp.{draw.choice(['lt.s32', 'ne.u32', 'ge.s32'])}.totalorder"
    names = ["sadd", "ssub", "smul", "sshrl", "sshra", "smin", "sdivrem", "sxor"]
    granules = draw.choice(["9", "40", "%t_s8"])
    size, flag = f"/*size_in_granules=*/{granules}", f"/*dst_syncflagno=*/{draw.randrange(2)}"
    logic = draw.choice(["pnand", "por", "pand", "pxor"])
    sides = f"/*on_true=*/{value()}, /*on_false=*/{value()}"
    return draw.choice(
        [
            f"{number()} = {draw.choice(names)}.s32 {value()}, {value()}",
            f"{number()} = sadd.s32 ({bit()}, {value()}), {value()}, {value()}",
            f"{number()} = smov {guard}{value()}",
            f"%t_p{draw.randrange(4)} = {compared} {value()}, {value()}",
            f"%t_p{draw.randrange(4)} = {logic} {bit()}, {bit()}",
            f"{number()} = scalar_select /*predicate=*/{bit()}, {sides}",
            f"%9 = sst [smem:[#table + {value()}]] {value()}",
            f"{number()} = sld [smem:[#table + {value()}]] {guard.strip(' ,')}",
            f"{number()} = int_to_ptr.{draw.choice(['hbm', 'vmem'])} {number()}",
            f"%9 = dma.hbm_to_vmem {guard}/*hbm=*/%t_s1, {size}, {flag}",
            f"%9 = dma.general {guard}/*src=*/%t_s1, {size}, /*dst=*/%t_s2, {flag}",
            f"%9 = dma.done.wait {guard}{draw.randrange(2)}, {draw.randrange(60)}",
        ]
    )


def _draw_loop(draw: random.Random) -> str:
    """A loop of seven turns over random bundles, some of which branch onward."""
    rows = ["%t_s9 = smov 0"]
    for place in range(1, 41):
        steps = [_draw_step(draw) for _ in range(draw.choice([0, 1, 1, 3]))]
        if draw.random() < 0.15:
            onward = f"target bundleno = {draw.randrange(place + 1, 42)} (0x0), region = 2"
            steps.append(f"%9 = sbr.rel (!%t_p{draw.randrange(4)}) {onward}")
        rows.append("  ;;  ".join(steps))
    rows += [
        "%t_s9 = sadd.s32 1, %t_s9",
        "%t_p9 = scmp.lt.s32.totalorder %t_s9, 7",
        "%9 = sbr.rel (%t_p9) target bundleno = 1 (0x1), region = 1",
        *[""] * 9,
    ]
    return "\n".join(f"0x{place:x}   :  {{ {row} }}" for place, row in enumerate(rows))


def test_compiled_instructions_match_interpreted_ones():
    """Against a core that reads the text anew each time."""
    told = 0
    for seed in range(60):
        bundles = read_listing(_draw_loop(random.Random(seed)))
        fast, plain = ScalarCore(bundles, V5E), PlainCore(bundles, V5E)
        for core in (fast.state, plain):
            core.registers |= {f"s{n}": n for n in range(5)} | {f"p{n}": n % 2 for n in range(3)}
        found = fast.run()
        assert found == plain.run()
        assert {name: fast.state.registers[name] for name in plain.registers} == plain.registers
        assert fast.state.stored == plain.stored
        told += found.transfers > 0 and found.waited > 0 and max(found.counts) == 7
    assert told > 20


PROGRAM = """
HloModule step, is_scheduled=true

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %twin = f32[8]{0} fusion(%p), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"50"}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %work = f32[8]{0} fusion(%a), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"50"}
  %copy-start.1 = (f32[8]{0:T(128)S(1)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%work)
  %other = f32[9]{0} fusion(%a), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"70"}
  %call = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call"
  %place = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %while.1 = f32[8]{0} while(%work), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""  # noqa: E501


def test_a_program_names_the_source_of_each_cost(tmp_path: Path):
    (tmp_path / "17-work-01-packed-bundles-post-ra.txt").write_text(LISTING)
    (tmp_path / "18-TLP-01-packed-bundles-post-ra.txt").write_text(LISTING)
    (tmp_path / "17-work-00-schedule-analysis_packed-bundles-post-ra.txt").write_text("x")
    assert list(list_listings(tmp_path)) == ["work"]
    costs = count_listings(tmp_path, V5E)
    program = count_program(list_instructions(read_module(PROGRAM)), costs, V5E)
    found = {one.instruction.name: (one.source, one.trips) for one in program.operations}
    assert found == {"work": ("own", 1), "other": ("estimate", 1), "twin": ("twin", 3)}
    assert program.estimate == 50 + 70 + 3 * 50
    assert program.issued == 4 * 132 + 70
    assert program.hbm_bytes == 4 * 9 * 3200 + 32
    assert program.unseen == ["custom-call"]


PROGRAMS = [
    {"form": "product", "sizes": [2048, 2048, 2048]},
    {"form": "kernel_product", "sizes": [2048, 2048, 2048], "blocks": [512, 512, 512]},
    {"form": "loop", "size": 512, "trips": 12},
    {"form": "loop", "size": 512, "trips": 24},
    {"form": "sum", "elements": 1 << 26},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "compiler"),
    [
        *(pytest.param(name, OWN, marks=NEEDS_OWN) for name in ("v3", "v4", "v5e", "v5p", "v6e")),
        *(pytest.param(name, NEWEST, marks=NEEDS_NEWEST) for name in ("v5e", "v6e", "tpu7x")),
    ],
)
def test_programs_of_known_size_have_the_expected_cost(name, compiler):
    target = parse_target(name, compiler=compiler)
    model, generation = get_chip_model(target.generation), target.generation
    cores = 2 if name == "v5p" else 1
    # Mosaic compiles no kernels for v3; those of the newest jax are not read.
    has_kernels = name != "v3" and compiler == OWN
    plain = [one for one in PROGRAMS if has_kernels or one["form"] != "kernel_product"]
    artifacts = export_in_jax(plain, target, time_limit_s=300)
    programs = [compile_program(one, target, time_limit_s=300).program for one in artifacts]
    product, *kernels, short, long, added = programs
    peak = 2 * 2048**3 / (generation.peak_tflops * 1e3 / generation.clock_ghz)
    assert product.sum_of("matrix") == pytest.approx(peak, rel=0.03)
    assert peak < product.issued < 1.1 * peak
    # The chip's memory of v3 holds less, so a side is read twice.
    assert 0.95 < product.hbm_bytes * cores / (3 * 2 * 2048**2) < 2.1
    # A kernel is seen as XLA's own operations are; each side is read four times.
    for kernel in kernels:
        ratio = kernel.sum_of("matrix") / peak
        assert ratio == pytest.approx(round(ratio), rel=0.03) and ratio < cores + 0.1
        assert kernel.sum_of("hbm_bytes") == 2 * 2048**2 * (4 + 4 + 1)
    assert long.issued == pytest.approx(2 * short.issued, rel=0.02)
    assert long.sum_of("matrix") == 2 * short.sum_of("matrix")
    traffic = 3 * 4 * (1 << 26) / cores
    assert added.sum_of("hbm_bytes") == traffic
    assert added.with_dma == pytest.approx(traffic / model.bytes_per_cycle, rel=0.15)
    assert all(one.sum_of("unknown") == 0 for one in programs)
