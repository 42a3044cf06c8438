"""Rotated copies of a batch, through main.py: SSKD's student and teacher."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import main
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from losses.base import LossInputs, Turned
from losses.weighted import WeightedLoss
from models.transforms import to_pixels
from store.record.history import read_metrics
from tasks.classify.rotations import check_rotations, turn_pixels
from tasks.teachers.taught import count_flops
from tests.losses.examples import create_example_loss, create_inputs
from tests.support.child_runs import read_losses, run_series
from tests.support.tiny_parts import create_argv, create_cpu_runtime
from tests.test_teachers import export
from utils.config.load import change as change_config
from utils.config.load import load_config
from utils.errors import UserError

SSKD, KD = {"name": "sskd", "layers": {"fc_norm": "fc_norm"}}, {"name": "kd"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """A ViT of random weights."""
    return export(tmp_path_factory.mktemp("turned") / "teacher", 1)


def create_flags(
    folder: Path, teacher: Path, name: str, *more: str, device: str = "cpu", head_steps: int = 5
) -> list[str]:
    """6 steps; a checkpoint while the teacher's head still learns."""
    sskd = {**SSKD, "args": {"head_steps": head_steps}}
    return create_argv(
        folder,
        f"--run.run_id={name}",
        "--train.steps=6",
        "--optim.warmup_epochs=0",
        "--train.eval_every_epochs=100",
        "--train.checkpoint_every_steps=4",
        "--train.keep_checkpoints=9",
        "--data.random_erasing=0.5",
        f"--teacher_path={teacher}",
        "--distill.allow_weak_teacher=true",
        "--distill.group_size=8",
        "--distill.views=rotations",
        f"--distill.losses={json.dumps([sskd, KD])}",
        *more,
        device=device,
    )


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("xla", marks=(pytest.mark.slow, pytest.mark.xla))]
)
def test_a_student_of_rotated_images_resumes_bit_for_bit_in_one_graph(teacher, tmp_path, device):
    whole = tmp_path / "tiny" / "whole"
    flags = partial(create_flags, tmp_path, teacher, device=device)
    assert main.main(flags("whole")) == 0
    lines = [line for line in read_metrics(whole) if line["kind"] == "train"]
    assert [line["graphs_train"] for line in lines] == [device == "xla"] * 6
    assert all(line["loss/sskd"] > 0 and line["loss/kd"] > 0 for line in lines)
    part = Path(shutil.copytree(whole, whole.with_name("part")))
    shutil.rmtree(part / "checkpoints" / "step_00000006")
    assert main.main(flags("part", "--resume=auto")) == 0
    for file in ("model", "extra"):
        last, found = (
            load_file(one / "checkpoints" / "step_00000006" / f"{file}.safetensors")
            for one in (whole, part)
        )
        assert last.keys() == found.keys()
        assert all(torch.equal(found[name], value) for name, value in last.items())


def test_a_step_passes_four_rotations_through_both_models_in_one_batch(teacher, tmp_path):
    """The step's loss is that of answers which are asked for here, turn by turn."""
    config = load_config(create_flags(tmp_path, teacher, "one"))
    parts = build_parts(create_cpu_runtime(), check(config))
    task, model = parts.task, parts.state.model.eval()
    batch = next(iter(iterate_batches(parts, 0)))
    pixels = task.erasing.erase_pixels(
        to_pixels(batch.images), batch.draws, task.transform.mean, task.transform.std
    )
    sides = []
    for ask, net in ((lambda x: model(task.transform(x)), model), (task.teachers[0],) * 2):
        net, seen = getattr(net, "model", net), []
        hook = net.fc_norm.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out))
        logits = [ask(torch.rot90(pixels, turn, (2, 3))) for turn in range(4)]
        hook.remove()
        sides.append((logits, seen))
    (own, own_seen), (theirs, their_seen) = sides
    paths = [{"fc_norm": one} for one in (own_seen[0], their_seen[0])]
    targets = functional.one_hot(batch.labels.long(), 10).float()
    turned = Turned(
        torch.stack(own[1:], 1),
        (torch.stack(theirs[1:], 1),),
        {"fc_norm": torch.stack(own_seen[1:], 1)},
        {"fc_norm": torch.stack(their_seen[1:], 1)},
    )
    inputs = LossInputs(
        own[0], targets, batch.labels, batch.mask, (theirs[0],), None, None, *paths, turned=turned
    )
    found = task.loss(model, batch)
    with torch.no_grad():  # so that the call is not counted
        sskd, kd = (loss(inputs) for loss in task.losses.losses)
    task.losses.losses[0].calls.zero_()
    task_loss = -(targets * own[0].log_softmax(-1)).sum(-1).mean()
    alpha = config.distill.alpha
    torch.testing.assert_close(found.total, (1 - alpha) * task_loss + alpha * (sskd + kd))
    turned_flops = count_flops(config, task.facts, task)
    task.config = config.model_copy(
        update={"distill": config.distill.model_copy(update={"views": "consistent"})}
    )
    plain = count_flops(task.config, task.facts, task)
    assert {key: value / 4 for key, value in turned_flops.items()} == plain
    parts.close()


def test_rotated_copies_follow_their_image():
    pixels = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4)
    wanted = [torch.rot90(image, turn, (1, 2)) for image in pixels for turn in range(4)]
    assert torch.equal(turn_pixels(pixels), torch.stack(wanted))


def test_the_teachers_head_trains_for_its_steps_only():
    """The student learns which copy belongs to which from then on, and needs no labels for it."""
    loss, inputs = create_example_loss("sskd", head_steps=3, weights=[0, 0, 1]), create_inputs("")
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.5, weight_decay=0.1)
    values, heads, slopes = [], [], []
    for _ in range(6):
        optimizer.zero_grad()
        heads.append([one.detach().clone() for one in loss.teacher_head.parameters()])
        value = loss(inputs)
        slopes.append(
            torch.autograd.grad(
                value, inputs.turned.student_features["stage.0"], retain_graph=True
            )[0]
            .abs()
            .sum()
        )
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[0] > values[1] > values[2]
    settled = [loss.get_buffer(f"settled_{number}") for number in range(4)]
    assert all(torch.equal(*pair) for pair in zip(settled, heads[3], strict=True))
    assert not torch.equal(heads[2][0], heads[3][0])
    assert [bool(slope > 0) for slope in slopes] == [False] * 3 + [True] * 3
    state = {key: one.clone() for key, one in loss.state_dict().items()}
    others = loss(replace(inputs, targets=inputs.targets.roll(1, 0), labels=None))
    loss.load_state_dict(state)
    assert torch.equal(others, loss(inputs))


@pytest.mark.xla
@pytest.mark.slow
def test_two_processes_micro_batches_and_xla_train_alike(teacher, tmp_path):
    flags = partial(create_flags, tmp_path, teacher)
    two = run_series([flags("two", "--runtime.cpu_processes=2")])
    # A part of a step is a call: the head learns for as many steps with twice the calls.
    parts = flags("parts", "--train.accumulate_steps=2", head_steps=10)
    others = run_series([flags("xla", device="xla"), flags("one"), parts])
    assert two.returncode == others.returncode == 0, two.stderr + others.stderr
    one, *rest = (read_losses(tmp_path / "tiny" / name) for name in ("one", "two", "parts", "xla"))
    assert all(one == pytest.approx(other, rel=1e-3) for other in rest)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"distill": {"views": "consistent"}}, "sskd is not supported with distill.views"),
        ({"distill": {"losses": [KD]}}, "needs a loss that reads the rotated images; add sskd"),
        ({"distill": {"losses": [SSKD]}}, "sskd needs args.head_steps"),
        ({"distill": {"group_size": 5}}, "distill.group_size (5) does not divide the micro-batch"),
        ({"distill": {"teacher_cache": "x"}}, "('x') and distill.views exclude each"),
        ({"train": {"mixup_alpha": 0.2}}, "train.mixup_alpha (0.2) is not supported with"),
        ({"train": {"cutmix_alpha": 1.0}}, "train.cutmix_alpha (1.0) is not supported with"),
        (
            {
                "train": {"task": "distil"},
                "distill": {"group_size": 16, "allow_weak_teacher": False},
            },
            "distill.views ('rotations') is not supported with train.task=distil",
        ),
        (
            {"distill": {"teachers": [{}, {}], "teacher_weights": "", "ensemble": "separate"}},
            "takes one teacher and got 2",
        ),
    ],
)
def test_unsupported_rotations_are_refused_in_one_line(teacher, tmp_path, change, words):
    config = load_config(create_flags(tmp_path, teacher, "bad"))
    for section in change.get("distill", {}).get("teachers", ()):
        section["weights"] = str(teacher)
    with pytest.raises(UserError) as raised:
        check(change_config(config, **change))
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_non_square_images_are_refused_once_their_shape_is_known(teacher, tmp_path):
    config = load_config(create_flags(tmp_path, teacher, "one"))
    losses = WeightedLoss([("sskd", create_example_loss("sskd"), 1.0)])
    check_rotations(config, losses, {"train": None})
    with pytest.raises(UserError, match="gives 8 x 12; end it with a resize"):
        check_rotations(config, losses, {"train": (8, 12, 1)})
