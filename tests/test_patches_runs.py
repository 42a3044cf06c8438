"""Patched runs from end to end: files in PyTorch's order, resume with and without patches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import main
from tests.support.tiny_parts import create_argv

CONV = (
    "--model=cifar_resnet8x4",
    '--model.args={"in_chans": 1}',
    "--optim.name=sgd",
    "--train.ema=true",
    "--train.checkpoint_every_steps=2",
    "--train.eval_every_epochs=100",
    "--train.keep_checkpoints=10",
)


def run(folder: Path, name: str, *flags: str, device: str = "xla") -> Path:
    """A run; its directory."""
    argv = create_argv(folder, f"--run.run_id={name}", *flags, device=device)
    argv = [
        flag for flag in argv if not flag.startswith(("--model=", "--model.args", "--model.im"))
    ]
    argv += CONV
    assert main.main(argv) == 0
    return folder / "tiny" / name


def read_table(run_folder: Path, step: int) -> dict[str, list[object]]:
    """Shape and type of every tensor of a checkpoint."""
    path = run_folder / "checkpoints" / f"step_{step:08d}" / "state.json"
    return {n: e[:2] for n, e in json.loads(path.read_text())["tensors"].items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps with patches, and without by PyTorch itself; checkpoints of steps 2 and 4.

    torch_xla's own BatchNorm keeps the biased variance, so it is no reference.
    """
    target = tmp_path_factory.mktemp("patched")
    run(target, "patched", "--train.steps=4")
    run(target, "plain", "--train.steps=4", device="cpu")
    return target


def get_distance(one: Path, other: Path) -> float:
    """Largest difference between two exports, relative to each tensor's largest value."""
    left, right = (load_file(path / "student.safetensors") for path in (one, other))
    assert left.keys() == right.keys()
    return max(compare(left[name], right[name]) for name in left)


def compare(value: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference relative to the largest value."""
    value, other = value.double(), other.double()
    return ((value - other).abs().max() / other.abs().max().clamp(min=1e-12)).item()


@pytest.mark.xla
def test_checkpoints_hold_every_tensor_in_the_order_of_files(folder):
    tables = [read_table(folder / "tiny" / name, 4) for name in ("patched", "plain")]
    assert tables[0] == tables[1]
    moments = [
        n for n in tables[0] if n.startswith("optimizer/") and n.endswith("|momentum_buffer")
    ]
    kernels = {n: tables[0][n][0] for n in moments if len(tables[0][n][0]) == 4}
    assert [3, 3] in [shape[2:] for shape in kernels.values()]


@pytest.mark.xla
def test_a_patched_run_trains_as_an_unpatched_one(folder):
    assert get_distance(folder / "tiny/patched", folder / "tiny/plain") < 1e-4
    moments = []
    for name in ("patched", "plain"):
        path = folder / "tiny" / name / "checkpoints/step_00000004/optimizer.safetensors"
        moments.append(load_file(path))
    for name, value in moments[0].items():
        assert compare(value, moments[1][name]) < 1e-3, name


@pytest.mark.xla
def test_a_patched_run_resumes_bit_for_bit(folder, tmp_path):
    start = folder / "tiny/patched/checkpoints/step_00000002"
    run(tmp_path, "patched", "--train.steps=4", f"--run.resume={copy(start, tmp_path)}")
    assert get_distance(find_export(tmp_path), folder / "tiny/patched") == 0.0


@pytest.mark.xla
def test_a_patched_checkpoint_resumes_without_patches(folder, tmp_path):
    start = folder / "tiny/patched/checkpoints/step_00000002"
    allowed = '--run.allow_changes=["model.xla_patches", "runtime.device"]'
    place = f"--run.resume={copy(start, tmp_path)}"
    flags = ("--train.steps=4", "--model.xla_patches=false", allowed, place)
    run(tmp_path, "patched", *flags, device="cpu")
    assert get_distance(find_export(tmp_path), folder / "tiny/patched") < 1e-4


def copy(checkpoint: Path, target: Path) -> Path:
    """A run directory that holds this checkpoint alone."""
    source = checkpoint.parent.parent
    place = target / "tiny" / source.name
    shutil.copytree(checkpoint, place / "checkpoints" / checkpoint.name)
    for name in ("run.json", "config_resolved.yaml"):
        shutil.copy(source / name, place / name)
    return place


def find_export(folder: Path) -> Path:
    """The run below a folder that has ended."""
    (found,) = folder.rglob("student.safetensors")
    return found.parent


@pytest.mark.xla
def test_averaged_weights_of_patched_convolutions_are_correct():
    from torch import nn

    from models.patches.table import apply_patches
    from tests.support.tiny_parts import create_xla_runtime
    from utils.ema import create_ema, update_ema

    runtime = create_xla_runtime()
    torch.manual_seed(0)
    model = apply_patches(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)))
    ema = create_ema(model)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    wanted = ema[0].weight + 0.25 * (model[0].weight - ema[0].weight)
    for one in (model, ema):
        runtime.prepare(one)
    update_ema(ema, model, runtime.upload([0.25])[0])
    runtime.finish_step()
    assert torch.allclose(ema[0].weight.cpu(), wanted, atol=1e-6)
    assert ema.state_dict()["0.weight"].shape == (3, 2, 3, 3)
