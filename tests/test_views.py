"""The strong second view, through main.py: the same examples twice, seen by all models."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import main
from datasets import create_loader
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from losses.base import LossInputs
from models.transforms import to_pixels
from store.record.history import read_metrics
from tasks.classify.views import STRONG_IMAGES, list_streams
from tests.support.child_runs import read_losses, run_series
from tests.support.tiny_parts import create_cpu_runtime
from utils.config.load import load_config
from utils.errors import UserError

WEAK = "decode(channels=1)|resize(10)|random_crop(8)|value_range(-1, 1)"
STRONG = "decode(channels=1)|resize(12)|random_crop(8)|value_range(-1, 1)"
CRLD = {"name": "crld", "args": {"weak_confidence": 0.3, "strong_confidence": 0.2}}


def create_flags(
    digits_root: Path, folder: Path, teacher: Path, name: str, device: str = "cpu"
) -> list[str]:
    """6 steps of 3 an epoch; a checkpoint in the middle of the second one."""
    return [
        "--config=configs/digits_student.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={folder}",
        "--run.experiment=views",
        f"--run.run_id={name}",
        f"--runtime.device={device}",
        "--run.tensorboard=false",
        "--data.test_split=",
        "--data.train_split=train[:96]",
        "--data.eval_split=validation[:64]",
        "--data.global_batch_size=32",
        f"--data.train_pp={WEAK}",
        f"--data.strong_pp={STRONG}",
        "--train.steps=6",
        "--optim.warmup_epochs=0",
        "--train.log_every_steps=1",
        "--train.eval_every_epochs=100",
        "--train.checkpoint_every_steps=4",
        "--train.keep_checkpoints=9",
        "--mixup=0.2",
        "--cutmix=1",
        "--data.random_erasing=0.5",
        "--runtime.graph_budget=100000",
        f"--teacher_path={teacher}",
        "--distill.group_size=8",
        "--distill.views=weak_strong",
        f"--distill.losses={json.dumps([{'name': 'mlkd', 'weight': 0.01}, CRLD])}",
    ]


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("xla", marks=(pytest.mark.slow, pytest.mark.xla))]
)
def test_two_views_train_in_one_graph_and_resume_bit_for_bit(
    digits_root, teacher_run, tmp_path, device
):
    whole = tmp_path / "views" / "whole"
    arguments = (digits_root, tmp_path, teacher_run)
    assert main.main(create_flags(*arguments, "whole", device)) == 0
    lines = [line for line in read_metrics(whole) if line["kind"] == "train"]
    assert [line["graphs_train"] for line in lines] == [device == "xla"] * 6
    assert all(line["loss/mlkd"] > 0 and line["loss/crld"] > 0 for line in lines)
    part = Path(shutil.copytree(whole, whole.with_name("part")))
    shutil.rmtree(part / "checkpoints" / "step_00000006")
    assert main.main([*create_flags(*arguments, "part", device), "--resume=auto"]) == 0
    last, found = (
        load_file(one / "checkpoints" / "step_00000006" / "model.safetensors")
        for one in (whole, part)
    )
    assert all(torch.equal(found[name], value) for name, value in last.items())


def test_both_views_show_the_same_examples_and_crops(digits_root, teacher_run, tmp_path):
    """The step's loss is that of answers which are asked for here, one view after the other."""
    config = load_config(create_flags(digits_root, tmp_path, teacher_run, "one"))
    parts = build_parts(create_cpu_runtime(), check(config))
    task, model = parts.task, parts.state.model.eval()
    batch = next(iter(iterate_batches(parts, 0)))
    strong = batch.draws[STRONG_IMAGES]
    assert (strong != batch.images).flatten(1).any(dim=1).float().mean() > 0.8
    plain = [
        create_loader(data, "train", seed=config.train.seed, augmentation=number)
        for number, data in enumerate(list_streams(config))
    ]
    first, second = (next(iter(one.batches())) for one in plain)
    assert torch.equal(first.indices, second.indices)
    assert torch.equal(batch.images, first.images) and torch.equal(strong, second.images)
    sides = []
    for images in (batch.images, strong):
        pixels = task.erasing.erase_pixels(
            to_pixels(images), batch.draws, task.transform.mean, task.transform.std
        )
        mixed = task.mixing.mix_pixels(pixels, batch.draws)
        sides.append((model(task.transform(mixed)), task.teachers[0](mixed)))
    (weak, weak_teacher), (hard, hard_teacher) = sides
    targets = task.mixing.mix_targets(batch.labels, 10, batch.draws)
    found = task.loss(model, batch)
    inputs = LossInputs(
        weak,
        targets,
        batch.labels,
        batch.mask,
        (weak_teacher,),
        strong_student_logits=hard,
        strong_teacher_logits=(hard_teacher,),
    )
    task_loss = sum(-(targets * one.log_softmax(-1)).sum(-1).mean() / 2 for one in (weak, hard))
    torch.testing.assert_close(found.terms["task"], task_loss)
    mlkd, crld = (loss(inputs) for loss in task.losses.losses)
    alpha = config.distill.alpha
    wanted = (1 - alpha) * task_loss + alpha * (0.01 * mlkd + crld)
    torch.testing.assert_close(found.total, wanted)
    parts.close()


def test_shards_read_their_parts_of_both_views(digits_root, teacher_run, tmp_path):
    config = load_config(create_flags(digits_root, tmp_path, teacher_run, "one"))
    strong = list_streams(config)[1]
    whole, *halves = (
        next(iter(create_loader(strong, "train", seed=0, augmentation=1, shard=shard).batches()))
        for shard in ((0, 1), (0, 2), (1, 2))
    )
    assert torch.equal(torch.cat([one.images for one in halves]), whole.images)


@pytest.mark.xla
@pytest.mark.slow
def test_two_processes_micro_batches_and_xla_train_alike(digits_root, teacher_run, tmp_path):
    flags = partial(create_flags, digits_root, tmp_path, teacher_run)
    two = run_series([[*flags("two"), "--runtime.cpu_processes=2"]])
    others = run_series(
        [flags("xla", "xla"), flags("one"), [*flags("parts"), "--train.accumulate_steps=2"]]
    )
    assert two.returncode == others.returncode == 0, two.stderr + others.stderr
    one, *rest = (read_losses(tmp_path / "views" / name) for name in ("one", "two", "parts", "xla"))
    assert all(one == pytest.approx(other, rel=1e-3) for other in rest)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--distill.views=consistent"], "data.strong_pp"),
        (["--data.strong_pp="], "needs data.strong_pp"),
        (["--kd=kd"], "needs a loss that reads the second view"),
        (["--distill.views=consistent", "--data.strong_pp="], "set distill.views=weak_strong"),
        (
            ["--data.strong_pp=decode(channels=1)|resize(9)|value_range(-1, 1)"],
            "data.strong_pp gives images of 9 x 9 x 1 and data.train_pp of 8 x 8 x 1",
        ),
        (
            ["--data.strong_pp=decode(channels=1)|resize(8)|value_range(0, 1)"],
            "data.strong_pp ends with value_range(0, 1)",
        ),
        (["--data.strong_pp=decod(channels=1)|value_range(-1, 1)"], "data.strong_pp: "),
        (
            ["--data.strong_pp=decode(channels=1)|resize(8)|randaug(2, 10)|value_range(-1, 1)"],
            "data.strong_pp cannot run randaug(2, 10)",
        ),
        (["--distill.teacher_cache=somewhere"], "and distill.views exclude each other"),
    ],
)
def test_incompatible_views_are_refused_in_one_line(
    digits_root, teacher_run, tmp_path, change, words
):
    with pytest.raises(UserError) as raised:
        flags = [*create_flags(digits_root, tmp_path, teacher_run, "bad"), *change]
        if "--kd=kd" in flags:
            flags = [flag for flag in flags if not flag.startswith("--distill.losses")]
        build_parts(create_cpu_runtime(), check(load_config(flags)))
    assert words in str(raised.value) and "\n" not in str(raised.value)
