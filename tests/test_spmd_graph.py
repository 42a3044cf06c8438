"""Communication between the devices of a mesh in one step, read from the partitioned graph."""

from __future__ import annotations

import math
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.support.child_runs import ROOT, get_command, get_environment
from tests.support.tiny_parts import SYNTHETIC, create_argv

DEVICES = 4
SIZES = {"f32": 4, "bf16": 2, "s64": 8, "s32": 4, "u32": 4, "pred": 1, "u8": 1}
KINDS = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
# Scalars of the loss, the norm's clipping, the check for finite numbers.
SCALARS = 256


CONVNET = (
    "--model=resnet18",
    '--model.args={"in_chans": 1, "layers": [1, 1, 1, 1], "channels": [4, 8, 8, 8]}',
    "--data.name=image_size=32,channels=1,num_classes=10,num_examples=96",
)


def run_and_read(folder: Path, *flags: str) -> tuple[dict[tuple[str, str], int], int]:
    """Bytes of the train step's collectives by (kind, type), and the number of parameters."""
    found, sizes = run_and_size(folder, *flags)
    return found, sum(sizes.values())


def run_and_size(folder: Path, *flags: str) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
    """Bytes of the train step's collectives by (kind, type), and the size of each tensor."""
    argv = create_argv(
        folder,
        "--runtime.parallel=spmd",
        "--train.steps=1",
        "--run.run_id=mesh",
        "--train.mixup_alpha=0.8",
        "--train.cutmix_alpha=1.0",
        "--train.ema",
        "--optim.max_grad_norm=1.0",
        "--data.global_batch_size=32",
        *flags,
        device="xla",
    )
    if any(flag.startswith("--model=") for flag in flags):
        argv = [flag for flag in argv if not (flag in SYNTHETIC and flag.startswith("--model"))]
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
    sizes = {n: math.prod(export.get_slice(n).get_shape()) for n in export.keys()}  # noqa: SIM118
    return count_bytes(max(graphs, key=len)), sizes


def count_bytes(graph: str) -> dict[tuple[str, str], int]:
    """Bytes of results of all collectives in a graph's text, by (kind, type)."""
    found: Counter[tuple[str, str]] = Counter()
    for line in re.finditer(rf"= (\S.*?) ({KINDS})(?:-start)?\(", graph):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", line[1]):
            numbers = math.prod(int(size) for size in shape.split(",") if size)
            found[line[2], dtype] += numbers * SIZES[dtype]
    return dict(found)


@pytest.mark.xla
def test_devices_sum_gradients_and_gather_nothing(tmp_path):
    found, parameters = run_and_read(tmp_path)
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert 4 * parameters <= found["all-reduce", "f32"] <= 4 * parameters + SCALARS


@pytest.mark.xla
@pytest.mark.slow
def test_gradients_are_summed_in_float32_under_bf16_too(tmp_path):
    found, parameters = run_and_read(tmp_path, "--runtime.precision=bf16")
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert ("all-reduce", "bf16") not in found
    assert 4 * parameters <= found["all-reduce", "f32"] <= 4 * parameters + SCALARS


@pytest.mark.xla
@pytest.mark.slow
def test_gradients_are_summed_in_bf16_on_request(tmp_path):
    flags = ("--runtime.precision=bf16", "--runtime.reduce_dtype=bf16")
    found, parameters = run_and_read(tmp_path, *flags)
    total = found["all-reduce", "bf16"] + found["all-reduce", "f32"]
    assert found["all-reduce", "bf16"] > parameters
    assert total < 4 * parameters


@pytest.mark.xla
@pytest.mark.slow
def test_accumulation_sums_gradients_over_devices_once(tmp_path):
    found, parameters = run_and_read(tmp_path, "--train.accumulate_steps=2")
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert 4 * parameters <= found["all-reduce", "f32"] <= 4 * parameters + SCALARS


@pytest.mark.xla
@pytest.mark.slow
def test_accumulation_sums_gradients_of_convolutions_once(tmp_path):
    found, sizes = run_and_size(tmp_path, *CONVNET, "--train.accumulate_steps=2")
    assert {kind for kind, _ in found} == {"all-reduce"}
    channels = sum(size for name, size in sizes.items() if name.endswith("running_mean"))
    norms = [name.rpartition(".")[0] for name in sizes if name.endswith("running_mean")]
    others = sum(size for name, size in sizes.items() if name.rpartition(".")[0] not in norms)
    # A BatchNorm needs two sums forward and two backward to go on in each micro-batch.
    wanted = 4 * (others + 2 * 4 * channels)
    assert wanted <= found["all-reduce", "f32"] <= wanted + SCALARS


@pytest.mark.parametrize("shape", ["f32[2,3]{1,0}", "(f32[2]{0}, f32[4]{0})"])
def test_counting_reads_plain_and_tuple_results(shape):
    graph = f"  %x.1 = {shape} all-reduce(%a, %b), channel_id=1\n  %y = f32[9] add(%x.1, %c)"
    assert count_bytes(graph) == {("all-reduce", "f32"): 24}
