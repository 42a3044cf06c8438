"""Progressive resizing, through main.py: declared graphs, and phases that resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import main
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from job.warmup import ShapeWarmup
from models.transforms import create_resampler
from store.record.history import read_metrics
from tasks.images.resizing import RESAMPLER, Resizing, resize_pixels
from tests.support.child_runs import run_series
from tests.support.tiny_parts import DEVICE_CASES, create_batch, create_config, create_cpu_runtime
from utils.checkpoint.state import collect_state
from utils.config.train import TrainSection

# 12 pixels are 3 x 3 patches, 8 are 2 x 2.
VIT = (
    '--model.args={"patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2, '
    '"dynamic_img_size": true}'
)
DIGITS_PP = "decode(channels=1)|resize(12)|value_range(-1, 1)"


def create_flags(digits_root: Path, folder: Path, name: str, device: str) -> list[str]:
    """4 steps at 8 pixels and 4 at 12, of an epoch of 2 steps."""
    return [
        "--config=configs/digits_student.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={folder}",
        "--run.experiment=sizes",
        f"--run.run_id={name}",
        f"--runtime.device={device}",
        "--run.tensorboard=false",
        "--data.test_split=",
        "--data.train_split=train[:64]",
        "--data.eval_split=validation[:64]",
        "--data.global_batch_size=32",
        f"--data.train_pp={DIGITS_PP}",
        f"--data.eval_pp={DIGITS_PP}",
        "--model.image_size=12",
        VIT,
        "--train.epochs=4",
        "--optim.warmup_epochs=0",
        "--train.log_every_steps=1",
        "--train.eval_every_epochs=100",
        "--train.checkpoint_every_steps=3",
        "--train.keep_checkpoints=9",
        "--model_ema",
        "--mixup=0.2",
        "--train.image_sizes={0: 8, 2: 12}",
        "--runtime.graph_budget=100000",
    ]


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_growing_images_take_one_graph_per_size_and_resume_bit_for_bit(
    digits_root, tmp_path, device
):
    whole = tmp_path / "sizes" / "whole"
    assert main.main(create_flags(digits_root, tmp_path, "whole", device)) == 0
    lines = [line for line in read_metrics(whole) if line["kind"] == "train"]
    assert [line["graphs_train"] for line in lines] == [2 * (device == "xla")] * 8
    last = load_file(whole / "checkpoints" / "step_00000008" / "model.safetensors")
    # In the second phase, and on XLA in the first one, where a graph is still to come.
    for step in (6,) if device == "cpu" else (3, 6):
        part = Path(shutil.copytree(whole, whole.with_name(f"from{step}")))
        for later in range(step + 1, 9):
            shutil.rmtree(part / "checkpoints" / f"step_{later:08d}", ignore_errors=True)
        flags = create_flags(digits_root, tmp_path, part.name, device)
        assert main.main([*flags, "--resume=auto"]) == 0
        found = load_file(part / "checkpoints" / "step_00000008" / "model.safetensors")
        assert all(torch.equal(found[name], value) for name, value in last.items())
        again = [line for line in read_metrics(part) if line["kind"] == "train"]
        assert [line["loss/total"] for line in again] == [line["loss/total"] for line in lines]


@pytest.mark.xla
@pytest.mark.slow
def test_each_further_size_adds_exactly_its_graphs_to_the_budget(digits_root, tmp_path):
    """A budget that is just enough for two sizes, and one less: each in a fresh process."""
    flags = create_flags(digits_root, tmp_path, "free", "xla")
    assert run_series([flags]).returncode == 0
    graphs = read_metrics(tmp_path / "sizes" / "free")[-1]["graphs"]
    for name, budget in (("enough", graphs - 2), ("less", graphs - 3)):
        flags = create_flags(digits_root, tmp_path, name, "xla")
        done = run_series([[*flags, f"--runtime.graph_budget={budget}"]])
        assert (done.returncode == 0) == (name == "enough"), done.stderr[-2000:]
    assert f"graph {graphs} of this run, which exceeds" in done.stdout + done.stderr


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "adafactor"])
def test_warm_up_steps_of_later_sizes_leave_no_trace(tmp_path, optimizer):
    """Whether the optimizer's state is there before its first step or not."""
    config = create_config(
        tmp_path,
        VIT,
        f"--opt={optimizer}",
        "--model_ema",
        "--epochs=3",
        "--train.image_sizes={0: 4, 1: 8, 2: 4}",
    )
    runtime = create_cpu_runtime()
    parts = build_parts(runtime, check(config))
    state = parts.state
    before, facts = collect_state(state, runtime.fetch_all)
    groups = [dict(group) for group in state.optimizer.param_groups]
    ahead, seen = ShapeWarmup(runtime, parts, parts.task), []
    first = next(ahead.watch(iterate_batches(parts, 0)))
    assert tuple(first.values[RESAMPLER].shape) == (4, 8)
    ahead.run(lambda: seen.append(state.step))
    ahead.run(lambda: seen.append(state.step))  # once is enough
    assert seen == [1]
    after, now = collect_state(state, runtime.fetch_all)
    assert now == facts
    assert after.keys() == before.keys()
    for part, tensors in before.items():
        assert all(torch.equal(after[part][name], value) for name, value in tensors.items()), part
    assert [set(group) for group in state.optimizer.param_groups] == [set(one) for one in groups]
    assert parts.plan.graph_budget == config.runtime.graph_budget + 2
    parts.close()


def test_the_image_size_is_a_function_of_the_step():
    section = TrainSection(image_sizes={2: 8, 0: 4, 3.5: 6, 9: 5})
    resizing, batch = Resizing(section, 8, 10), create_batch(4)
    assert [resizing.get_side(step) for step in (0, 19, 20, 34, 35)] == [4, 4, 8, 8, 6]
    assert resizing.get_values(20) == {}

    def list_sides(step: int) -> list[int]:
        forms = resizing.list_future_shapes(step, 90, batch)
        return [len(one.values.get(RESAMPLER, range(8))) for one in forms]

    assert [list_sides(step) for step in (0, 20, 35)] == [[8, 6], [6], []]
    assert Resizing(TrainSection(), 8, 10).get_side(3) == 8


def test_pixels_are_resampled_like_torch():
    pixels = torch.rand(2, 3, 24, 24) * 255
    wanted = functional.interpolate(pixels, size=(16, 16), mode="bilinear", antialias=True)
    found = resize_pixels(pixels, {RESAMPLER: create_resampler(24, 16)})
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)
    assert resize_pixels(pixels, {}) is pixels
