"""What the devices of a mesh say to each other in one step, read from the partitioned graph."""

from __future__ import annotations

import math
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.child_runs import ROOT, get_command, get_environment
from tests.tiny_parts import create_argv

DEVICES = 4
SIZES = {"f32": 4, "bf16": 2, "s64": 8, "s32": 4, "u32": 4, "pred": 1, "u8": 1}
KINDS = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
# Scalars of the loss, the norm's clipping, the check for finite numbers.
SCALARS = 256


def run_and_read(folder: Path, *flags: str) -> tuple[dict[tuple[str, str], int], int]:
    """Bytes of the train step's collectives by (kind, type), and the number of parameters."""
    argv = create_argv(
        folder, "--runtime.parallel=spmd", "--train.steps=1", "--run.run_id=mesh",
        "--train.mixup_alpha=0.8", "--train.cutmix_alpha=1.0", "--train.ema",
        "--optim.max_grad_norm=1.0", "--data.global_batch_size=32", *flags, device="xla",
    )  # fmt: skip
    dump = folder / "dump"
    environment = {
        **get_environment(),
        "CPU_NUM_DEVICES": str(DEVICES),
        "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=spmd",
    }
    done = subprocess.run(
        get_command(argv), cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # The train step is the largest graph.
    graphs = [path.read_text() for path in dump.glob("*after_spmd-partitioning*.txt")]
    export = safe_open(folder / "tiny" / "mesh" / "student.safetensors", "pt")
    count = sum(math.prod(export.get_slice(name).get_shape()) for name in export.keys())  # noqa: SIM118
    return count_bytes(max(graphs, key=len)), count


def count_bytes(graph: str) -> dict[tuple[str, str], int]:
    """Bytes of results of all collectives in a graph's text, by (kind, type)."""
    found: Counter[tuple[str, str]] = Counter()
    for line in re.finditer(rf"= (\S.*?) ({KINDS})(?:-start)?\(", graph):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", line[1]):
            numbers = math.prod(int(size) for size in shape.split(",") if size)
            found[line[2], dtype] += numbers * SIZES[dtype]
    return dict(found)


def test_devices_add_up_gradients_and_gather_nothing(tmp_path):
    found, parameters = run_and_read(tmp_path)
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert 4 * parameters <= found["all-reduce", "f32"] <= 4 * parameters + SCALARS


def test_gradients_are_added_up_in_float32_under_bf16_too(tmp_path):
    found, parameters = run_and_read(tmp_path, "--runtime.precision=bf16")
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert ("all-reduce", "bf16") not in found
    assert 4 * parameters <= found["all-reduce", "f32"] <= 4 * parameters + SCALARS


def test_bf16_sums_are_there_for_who_asks(tmp_path):
    flags = ("--runtime.precision=bf16", "--runtime.reduce_dtype=bf16")
    found, parameters = run_and_read(tmp_path, *flags)
    total = found["all-reduce", "bf16"] + found["all-reduce", "f32"]
    assert found["all-reduce", "bf16"] > parameters
    assert total < 4 * parameters


def test_accumulation_adds_gradients_up_over_devices_once(tmp_path):
    found, parameters = run_and_read(tmp_path, "--train.accumulate_steps=2")
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert 4 * parameters <= found["all-reduce", "f32"] <= 4 * parameters + SCALARS


@pytest.mark.parametrize("shape", ["f32[2,3]{1,0}", "(f32[2]{0}, f32[4]{0})"])
def test_counting_reads_plain_and_tuple_results(shape):
    graph = f"  %x.1 = {shape} all-reduce(%a, %b), channel_id=1\n  %y = f32[9] add(%x.1, %c)"
    assert count_bytes(graph) == {("all-reduce", "f32"): 24}
