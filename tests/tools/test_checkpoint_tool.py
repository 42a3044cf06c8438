"""tools.checkpoint: shows, verifies, compares, exports and prunes what runs have saved."""

from __future__ import annotations

import json
import uuid

import pytest
import timm
import torch
from safetensors.torch import load_file

from tools.checkpoint.__main__ import main
from utils.checkpoint.files import load_checkpoint
from utils.checkpoint.manager import CheckpointManager
from utils.weights.opening import open_weights


def create_parts(step: int) -> dict:
    return {
        "model": {"a.weight": torch.full((4, 4), float(step)), "a.bias": torch.zeros(4)},
        "optimizer": {"a.weight|exp_avg": torch.arange(16.0).reshape(4, 4)},
    }


def save(manager: CheckpointManager, step: int, *, best: bool = False) -> None:
    manager.save(
        step, create_parts(step), {"step": step, "optimizer": {}, "best_metric": 50.0}, best=best
    )


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints 1 to 5, of which 2 is the best and 4 is broken."""
    manager = CheckpointManager(tmp_path / "checkpoints", keep=9)
    for step in range(1, 6):
        save(manager, step, best=step == 2)
    file = tmp_path / "checkpoints" / "step_00000004" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 4
    file.write_bytes(bytes(content))
    return tmp_path


def list_names(run) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").glob("step_*"))


def test_list_shows_steps_sizes_and_the_best(run, capsys):
    (run / "checkpoints" / "step_00000001" / "state.json").write_text("{")
    assert main(["list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list_names(run)
    assert "broken: state.json" in lines[1]
    assert lines[2].endswith("50.00  best")
    assert lines[5].split() == ["step_00000005", "0.0", "3", "50.00"]


def test_list_shows_checkpoints_moved_aside(run, capsys):
    (run / "checkpoints" / "step_00000005").rename(run / "checkpoints" / "aside_step_00000005")
    assert main(["list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and "step_00000004" in lines[4]
    assert lines[5].startswith("aside_step_00000005") and "set aside" in lines[5]


def test_verify_reads_every_tensor_and_names_broken_ones(run, capsys):
    assert main(["verify", str(run)]) == 1
    out = capsys.readouterr().out
    assert out.count(": whole") == 4
    assert "step_00000004: broken: tensor model/a." in out
    assert main(["verify", str(run / "checkpoints" / "step_00000005")]) == 0


def test_diff_names_the_tensors_that_differ_and_by_how_much(run, capsys):
    one, five = (str(run / "checkpoints" / f"step_0000000{n}") for n in (1, 5))
    assert main(["diff", one, five]) == 1
    out = capsys.readouterr().out
    assert "model/a.weight: max difference 4.000e+00 (4.0e+00 of the largest value)" in out
    assert "16 of 16 elements" in out
    assert "1 of 3 tensors differ" in out
    assert main(["diff", one, five, "--parts=optimizer"]) == 0
    assert "1 tensors are equal" in capsys.readouterr().out
    assert main(["diff", one, one]) == 0
    assert main(["diff", one, five, "--parts=nothing"]) == 2


def test_diff_distinguishes_equal_values_with_other_bits_and_shapes(tmp_path, capsys):
    """-0.0 == 0.0, and NaN is not itself; bits decide."""
    values = {
        "a": {"x": torch.tensor([0.0]), "y": torch.tensor([float("nan")]), "z": torch.zeros(2)},
        "b": {"x": torch.tensor([-0.0]), "y": torch.tensor([float("nan")]), "z": torch.zeros(3)},
    }
    for name, tensors in values.items():
        manager = CheckpointManager(tmp_path / name)
        manager.save(1, {"model": tensors}, {"step": 1, "optimizer": {}}, best=False)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert "model/x: max difference 0" in out
    assert "model/z: (2,) float32 in A, (3,) float32 in B" in out
    assert "model/y" not in out


def test_an_export_loads_into_plain_timm(tmp_path, capsys):
    name, args = "vit_tiny_patch16_224", {"img_size": 8, "patch_size": 4, "embed_dim": 24}
    model = timm.create_model(name, num_classes=5, **args)
    facts = {"step": 7, "optimizer": {}, "model": {"model": name, "args": args, "num_classes": 5}}
    average = {key: value + 1 for key, value in model.state_dict().items()}
    manager = CheckpointManager(tmp_path / "checkpoints")
    manager.save(7, {"model": model.state_dict(), "ema": average}, facts, best=False)
    target = tmp_path / "out" / "weights.safetensors"
    assert main(["export", str(tmp_path), f"--out={target}"]) == 0
    told = json.loads(target.with_suffix(".json").read_text())
    other = timm.create_model(told["model"], num_classes=told["num_classes"], **told["args"])
    other.load_state_dict(load_file(target), strict=True)
    assert torch.equal(other.head.weight, average["head.weight"])
    assert open_weights(str(target), "x").facts == told
    single = tmp_path / "weights.pth"
    assert main(["export", str(tmp_path), f"--out={single}", "--weights=model"]) == 0
    again = timm.create_model(name, num_classes=5, checkpoint_path=str(single), **args)
    assert torch.equal(again.head.weight, model.head.weight)
    assert torch.load(single, weights_only=True)["step"] == 7
    assert open_weights(str(single), "x").facts == told
    assert main(["export", str(tmp_path), "--out=weights.onnx"]) == 2
    assert "end it with .safetensors or .pth" in capsys.readouterr().err


def test_prune_keeps_the_newest_complete_the_best_and_multiples(run, capsys):
    """Step 4 is broken: it is none of the newest whole ones, and goes only if asked."""
    assert main(["prune", str(run), "--keep=1", "--keep-every=3", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"would delete {run}/checkpoints/step_00000001"]
    assert len(list_names(run)) == 5
    assert main(["prune", str(run), "--keep=1", "--keep-every=3", "--broken"]) == 0
    assert list_names(run) == ["step_00000002", "step_00000003", "step_00000005"]


def test_prune_never_deletes_the_last_complete_checkpoint(run, capsys):
    for name in ("step_00000002", "step_00000003", "step_00000005"):
        (run / "checkpoints" / name / "COMMITTED").unlink()
    assert main(["prune", str(run), "--keep=0", "--broken"]) == 0
    assert list_names(run) == ["step_00000001"]
    (run / "checkpoints" / "step_00000001" / "COMMITTED").unlink()
    assert main(["prune", str(run), "--broken"]) == 2
    assert list_names(run) == ["step_00000001"]
    assert "none of 1 checkpoints is whole; kept all" in capsys.readouterr().err


def test_the_commands_work_on_a_url(capsys):
    place = f"memory://{uuid.uuid4().hex}/a"
    manager = CheckpointManager(place, keep=9)
    for step in (1, 2, 3):
        save(manager, step)
    assert main(["verify", place]) == 0
    assert main(["prune", place, "--keep=1"]) == 0
    assert manager.list_steps() == [3]
    assert load_checkpoint(f"{place}/step_00000003")[1].step == 3


@pytest.mark.parametrize("command", ["list", "verify", "prune"])
def test_a_directory_without_checkpoints_is_refused_in_one_line(tmp_path, capsys, command):
    assert main([command, str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: no checkpoint there")
