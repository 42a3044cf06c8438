"""Frozen and slowed parameters, through main.py: what is kept, stored and refused."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import main
from models.freezing import freeze
from optim_factory import create_optimizer, create_schedule
from store.record.history import read_metrics
from tests.support.jax_archives import write_vit
from tests.support.tiny_parts import DEVICE_CASES, TinyConvNet, create_argv, create_vit
from utils.config.sections import OptimSection
from utils.errors import UserError
from utils.weights.opening import open_weights

BODY = '--optim.freeze=["cls_token","pos_embed","patch_embed.*","blocks.*"]'


def run(root: Path, name: str, *flags: str, device: str = "cpu") -> Path:
    argv = create_argv(root, f"--run.run_id={name}", "--warmup_epochs=0", *flags, device=device)
    assert main.main(argv) == 0
    return root / "tiny" / name


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_frozen_blocks_stay_unchanged_without_state_and_resume(tmp_path, device):
    start = write_vit(tmp_path / "Ti.npz", create_vit(seed=5))
    flags = (
        f"--init-from={start}",
        BODY,
        "--train.ema=true",
        "--train.checkpoint_every_steps=2",
        "--train.keep_checkpoints=9",
    )
    whole = run(tmp_path, "whole", *flags, "--train.steps=4", device=device)
    last = whole / "checkpoints" / "step_00000004"
    found = load_file(last / "model.safetensors")
    for name, value in create_vit(seed=5).state_dict().items():
        is_trained = name.startswith(("norm.", "head."))
        assert torch.equal(found[name], value) != is_trained, name
    stored = {name.partition("|")[0] for name in load_file(last / "optimizer.safetensors")}
    assert {name for name in stored if "." in name} == {
        "norm.weight",
        "norm.bias",
        "head.weight",
        "head.bias",
    }
    graphs = [line["graphs_train"] for line in read_metrics(whole) if line["kind"] == "train"]
    assert graphs[-1] == graphs[1]
    half = Path(shutil.copytree(whole, whole.with_name("half")))
    shutil.rmtree(half / "checkpoints" / "step_00000004")
    run(tmp_path, "half", *flags, "--train.steps=4", "--resume=auto", device=device)
    again = load_file(half / "checkpoints" / "step_00000004" / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in found.items())


def test_a_frozen_batch_norm_keeps_its_statistics():
    model = TinyConvNet()
    model.norm.running_mean.fill_(0.5)
    freeze(model, ["conv.*", "norm.*"])
    model.train()
    images = torch.rand(4, 1, 8, 8)
    before = model(images)
    assert (model.norm.running_mean == 0.5).all()
    assert torch.equal(before, model.eval()(images))
    trained = TinyConvNet()
    freeze(trained, ["conv.*", "norm.weight"])
    trained.train()(images)
    assert not (trained.norm.running_mean == 0).all()


WRONG = [
    ('--optim.freeze=["block.*"]', "optim.freeze ('block.*') matches no name"),
    ('--optim.freeze=["*"]', "leaves nothing to train"),
    ('--optim.lr_factors={"haed.*":2}', "optim.lr_factors ('haed.*') matches no name"),
    ('--optim.lr_factors={"head.*":0}', "optim.lr_factors.head.*"),
    ('--optim.decay_factors={"head.*":-1}', "optim.decay_factors.head.*"),
    ('--optim.unfreeze={"head.*":-1}', "optim.unfreeze.head.*"),
    ("--optim.freeze=[blocks", "optim.freeze"),
]


@pytest.mark.parametrize(("flag", "words"), WRONG)
def test_invalid_patterns_are_refused(tmp_path, capsys, flag, words):
    assert main.main(create_argv(tmp_path, "--run.check_only=true", flag)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in error


def test_frozen_parameters_cannot_be_slowed_or_unfrozen(tmp_path, capsys):
    for key in ("lr_factors", "unfreeze"):
        flags = (BODY, f'--optim.{key}={{"blocks.*":1}}')
        assert main.main(create_argv(tmp_path, "--run.check_only=true", *flags)) == 2
        assert f"optim.{key} ('blocks.*') matches no name" in capsys.readouterr().err


def test_groups_use_the_factors_of_the_first_matching_pattern():
    section = OptimSection(
        lr=1.0,
        min_lr=1.0,
        weight_decay=0.5,
        schedule="constant",
        unfreeze={"blocks.*": 2},
        lr_factors={"head.*": 10, "*": 0.1},
        decay_factors={"head.weight": 0, "blocks.*": 0.5},
    )
    model = create_vit()
    optimizer = create_optimizer(section, model)
    schedule = create_schedule(section, total_steps=20, steps_per_epoch=3)
    names = {parameter: name for name, parameter in model.named_parameters()}

    def get_values(step: int) -> dict[str, tuple[float, float]]:
        rows = zip(optimizer.param_groups, *schedule.values(step, optimizer), strict=True)
        return {names[p]: (lr, decay) for group, lr, decay in rows for p in group["params"]}

    before, after = get_values(5), get_values(6)
    assert before.keys() == set(names.values())
    for values in (before, after):
        assert values["head.weight"] == (10.0, 0.0)
        assert values["head.bias"] == (10.0, 0.0)
        assert values["patch_embed.proj.weight"] == (0.1, 0.5)
    assert before["blocks.0.mlp.fc1.weight"] == (1e-12, 0.25)
    assert after["blocks.0.mlp.fc1.weight"] == (0.1, 0.25)
    assert after["blocks.0.mlp.fc1.bias"] == (0.1, 0.0)


@pytest.mark.xla
def test_blocks_start_training_at_their_epoch(tmp_path):
    start = create_vit().state_dict()
    place = run(
        tmp_path,
        "a",
        '--optim.unfreeze={"blocks.*":1}',
        "--train.steps=8",
        "--train.checkpoint_every_steps=6",
        "--train.keep_checkpoints=9",
        '--optim.lr_factors={"head.*":2}',
        device="xla",
    )
    frozen = load_file(place / "checkpoints" / "step_00000006" / "model.safetensors")
    moved = load_file(place / "student.safetensors")
    for name, value in start.items():
        is_held = name.startswith("blocks.")
        assert torch.allclose(frozen[name], value, rtol=0, atol=1e-10) == is_held, name
        assert not torch.allclose(moved[name], value, rtol=0, atol=1e-6), name
    graphs = [line["graphs_train"] for line in read_metrics(place) if line["kind"] == "train"]
    assert graphs[-1] == graphs[1]


@pytest.mark.slow
def test_frozen_blocks_of_an_archive_beat_a_start_from_scratch(tmp_path, digits_root):
    """On 200 digits, three seeds: docs/finetuning.md quotes what this prints."""
    args = {"patch_size": 4, "in_chans": 1, "embed_dim": 32, "depth": 2, "num_heads": 2}
    digits = (
        "--config=configs/digits_student.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={tmp_path}",
        f"--model.args={json.dumps(args)}",
        "--runtime.device=cpu",
        "--run.experiment=digits",
        "--run.tensorboard=false",
        "--train.eval_every_epochs=30",
    )

    def get_top1(name: str, *flags: str) -> float:
        assert main.main([*digits, f"--run.run_id={name}", *flags]) == 0
        return json.loads((tmp_path / "digits" / name / "run.json").read_text())["final"][
            "eval_top1"
        ]

    # The archive's model has learnt from the other digits of the training split.
    get_top1("first", "--data.train_split=train[200:]", "--train.epochs=20")
    model = create_vit(**args)
    model.load_state_dict(open_weights(str(tmp_path / "digits" / "first"), "x").read_tensors())
    archive = write_vit(tmp_path / "first.npz", model)
    few = ("--data.train_split=train[:200]", "--train.epochs=30", "--data.global_batch_size=40")
    tuned = (f"--init-from={archive}", "--model.reset_head=always", BODY)
    scores: dict[str, list[float]] = {"scratch": [], "tuned": []}
    for seed in range(3):
        for kind, flags in (("scratch", ()), ("tuned", tuned)):
            found = get_top1(f"{kind}{seed}", *few, f"--train.seed={seed}", *flags)
            scores[kind].append(found)
    print(json.dumps(scores))
    assert min(scores["tuned"]) > max(scores["scratch"])
    assert statistics.mean(scores["tuned"]) > statistics.mean(scores["scratch"])


def test_an_unmatched_frozen_pattern_suggests_a_similar_one():
    with pytest.raises(UserError, match="did you mean"):
        freeze(create_vit(), ["blocks.0.attn.qk.weight"])
