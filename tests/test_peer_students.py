"""Students that are their own teachers or each other's, through main.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import main
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from models.transforms import to_pixels
from store.record.history import read_metrics
from store.record.runs import Run
from tests.losses.references import get_kl, softmax
from tests.support.child_runs import run_series
from tests.support.tiny_parts import create_cpu_runtime
from utils.config.load import load_config
from utils.ema import Averaging
from utils.errors import UserError

NARROW = {"patch_size": 4, "in_chans": 1, "embed_dim": 12, "depth": 2, "num_heads": 2}
PEER = {**NARROW, "embed_dim": 16, "img_size": 8}
# The student of the last epoch from the first step on, and its average from the second epoch on.
SELVES = (
    "--distill.teachers=[{model: past}, {model: ema}]",
    "--distill.ensemble=separate",
    "--model_ema",
    "--distill.alpha_schedule=epochs",
    "--distill.alpha=0.8",
    "--train.ema_start_epoch=1",
    '--distill.losses=[{"name": "multi_avg_prob", "args": {"loss": "kd", "weights": [1000, 1]}},'
    '{"name": "multi_avg_prob", "args": {"loss": "kd", "weights": [1, 1000]}, "start_epoch": 2}]',
)
METHODS = {
    "selves": SELVES,
    "peer": (
        "--distill.peer=vit_tiny_patch16_224",
        f"--distill.peer_args={json.dumps(PEER)}",
        "--kd=kd",
        "--kd_temperature=1",
        "--kd_alpha=0.5",
    ),
    "self": (
        "--distill.peer=self",
        "--drop_path=0.5",
        "--kd=kd",
        "--kd_temperature=1",
        "--kd_alpha=0.5",
    ),
}


def create_flags(digits_root: Path, folder: Path, name: str, device: str = "cpu") -> list[str]:
    """8 steps of 2 an epoch, with a checkpoint after each."""
    return [
        "--config=configs/digits_student.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={folder}",
        "--run.experiment=own",
        f"--run.run_id={name}",
        f"--runtime.device={device}",
        "--run.tensorboard=false",
        "--data.test_split=",
        "--data.train_split=train[:64]",
        "--data.eval_split=validation[:64]",
        "--data.global_batch_size=32",
        f"--model.args={json.dumps(NARROW)}",
        "--train.epochs=4",
        "--optim.warmup_epochs=0",
        "--train.log_every_steps=1",
        "--train.eval_every_epochs=100",
        "--train.checkpoint_every_steps=1",
        "--train.keep_checkpoints=9",
        "--mixup=0.2",
        "--runtime.graph_budget=100000",
    ]


def load(run: Path, step: int, part: str) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step_{step:08d}" / f"{part}.safetensors")


@pytest.mark.parametrize(
    ("method", "device"),
    [
        *((name, "cpu") for name in METHODS),
        *(
            pytest.param(name, "xla", marks=(pytest.mark.slow, pytest.mark.xla))
            for name in ("selves", "peer", "self")
        ),
    ],
)
def test_a_run_takes_one_graph_and_resumes_bit_for_bit(digits_root, tmp_path, method, device):
    whole = tmp_path / "own" / "whole"
    assert main.main([*create_flags(digits_root, tmp_path, "whole", device), *METHODS[method]]) == 0
    lines = [line for line in read_metrics(whole) if line["kind"] == "train"]
    assert [line["graphs_train"] for line in lines] == [device == "xla"] * 8
    {"selves": check_selves, "peer": check_peer, "self": check_self}[method](whole, lines)
    part = Path(shutil.copytree(whole, whole.with_name("part")))
    for step in range(6, 9):
        shutil.rmtree(part / "checkpoints" / f"step_{step:08d}")
    flags = [*create_flags(digits_root, tmp_path, "part", device), *METHODS[method]]
    assert main.main([*flags, "--resume=auto"]) == 0
    for name in (
        "model",
        *(["extra"] if method == "peer" else []),
        *(["past", "ema"] if method == "selves" else []),
    ):
        last, found = load(whole, 8, name), load(part, 8, name)
        assert all(torch.equal(found[key], value) for key, value in last.items()), name


def check_selves(run: Path, lines: list[dict[str, float]]) -> None:
    """The past is the model of the last epoch's end, and the share of distillation grows."""
    for step in (3, 4, 5):
        model, past = load(run, step - step % 2, "model"), load(run, step, "past")
        assert all(torch.allclose(past[key], value, atol=1e-6) for key, value in model.items())
    for step, line in enumerate(lines):
        alpha = 0.8 * (step // 2 + 1) / 4 if step > 1 else 0.0
        taught = line["loss/multi_avg_prob"] + (step >= 4) * line["loss/multi_avg_prob_2"]
        wanted = (1 - alpha) * line["loss/task"] + alpha * taught
        assert line["loss/total"] == pytest.approx(wanted, rel=1e-4)
    # At an epoch's first step the past is the student itself.
    assert [line["loss/multi_avg_prob"] < 1e-6 for line in lines[2:]] == [True, False] * 3


def check_peer(run: Path, lines: list[dict[str, float]]) -> None:
    """The peer learns, and is no part of the export."""
    first, last = (load(run, step, "extra") for step in (1, 8))
    assert all(name.startswith("peer.") for name in last)
    assert not torch.equal(first["peer.head.weight"], last["peer.head.weight"])
    assert lines[-1]["loss/peer"] < lines[0]["loss/peer"]
    assert not any("peer" in name for name in load_file(run / "student.safetensors"))
    assert 0 <= Run(run).read()["final"]["peer_top1"] <= 100


def check_self(run: Path, lines: list[dict[str, float]]) -> None:
    """The two answers differ, as their stochastic depths do."""
    assert all(line["loss/kd"] > 1e-6 for line in lines)
    assert not (run / "checkpoints" / "step_00000008" / "extra.safetensors").exists()


@pytest.mark.slow
def test_a_peers_running_statistics_cover_all_ranks(digits_root, tmp_path):
    """Of the first layer, whose mean over a batch is the mean of its parts' means."""
    flags = [
        "--distill.peer=resnet10t",
        "--distill.peer_args.in_chans=1",
        "--kd=kd",
        "--train.epochs=1",
    ]
    for name, count in (("one", 1), ("two", 2)):
        own = [*create_flags(digits_root, tmp_path, name), f"--runtime.cpu_processes={count}"]
        ended = run_series([[*own, *flags]])
        assert ended.returncode == 0, ended.stderr
    one, two = (load(tmp_path / "own" / name, 1, "extra") for name in ("one", "two"))
    key = "peer.conv1.1.running_mean"
    assert one[key].abs().max() > 1e-3
    torch.testing.assert_close(two[key], one[key], rtol=1e-4, atol=1e-6)


@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_micro_batches_and_xla_train_alike(digits_root, tmp_path, method):
    """Cosub with a stochastic depth that drops nothing in 8 steps: ranks draw their own."""
    more = [*METHODS[method], *(["--drop_path=1e-9"] if method == "self" else [])]

    def say(name: str, *flags: str, device: str = "cpu") -> list[str]:
        return [*create_flags(digits_root, tmp_path, name, device), *more, *flags]

    two = run_series([say("two", "--runtime.cpu_processes=2")])
    others = run_series(
        [say("xla", device="xla"), say("one"), say("parts", "--train.accumulate_steps=2")]
    )
    assert two.returncode == others.returncode == 0, two.stderr + others.stderr
    one, *rest = (
        [
            {key: value for key, value in line.items() if key.startswith("loss/")}
            for line in read_metrics(tmp_path / "own" / name)
            if line["kind"] == "train"
        ]
        for name in ("one", "two", "parts", "xla")
    )
    for other in rest:
        assert len(other) == len(one) == 8
        for mine, theirs in zip(one, other, strict=True):
            assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("method", ["peer", "self"])
def test_each_student_learns_from_the_targets_and_the_other(digits_root, tmp_path, method):
    """Values in NumPy; the gradient of one is that of its own half of the loss alone."""
    config = load_config([*create_flags(digits_root, tmp_path, "one"), *METHODS[method]])
    parts = build_parts(create_cpu_runtime(), check(config))
    task, model = parts.task, parts.state.model
    batch = next(iter(iterate_batches(parts, 0)))
    torch.manual_seed(3)
    found = task.loss(model, batch)
    pixels = task.transform(task.mixing.mix_pixels(to_pixels(batch.images), batch.draws))
    torch.manual_seed(3)
    mine = model(pixels)
    theirs = (task.losses.peer if method == "peer" else model)(pixels)
    targets = task.mixing.mix_targets(batch.labels, 10, batch.draws).double().numpy()
    first, second = (softmax(one.detach().double().numpy()) for one in (mine, theirs))

    def learn(own: np.ndarray, other: np.ndarray) -> float:
        return (-(targets * np.log(own)).sum(1).mean() + get_kl(other, own).mean()) / 2

    both = learn(first, second), learn(second, first)
    wanted = sum(both) if method == "peer" else sum(both) / 2
    assert found.total.item() == pytest.approx(wanted, rel=1e-5)
    assert found.terms["total"].item() == pytest.approx(both[0], rel=1e-5)
    assert found.terms["peer"].item() == pytest.approx(both[1], rel=1e-5)
    if method == "peer":
        found.total.backward()
        # d (CE + KL) / d logits = (p - y) + (p - q), halved, over the batch.
        slope = torch.from_numpy(2 * first - targets - second).float() / (2 * len(batch))
        wanted = torch.autograd.grad(mine, model.head.bias, slope)[0]
        torch.testing.assert_close(model.head.bias.grad, wanted, rtol=1e-4, atol=1e-6)
    parts.close()


def test_the_past_model_is_copied_at_the_end_of_an_epoch():
    plan = Averaging((0.5,), keep_every=3)
    assert [plan.get_weights(step)[1] for step in range(7)] == [0, 0, 1, 0, 0, 1, 0]
    assert Averaging((0.5,)).get_weights(2) == plan.get_weights(2)[:1]


def test_a_peer_sees_the_students_images_and_is_checked_at_their_size(digits_root, tmp_path):
    """8 of 12 pixels: the peer is made for 8, and would not take the crop as it comes."""
    says = ["decode(channels=1)|resize(12)|value_range(-1, 1)", "--train.image_sizes={0: 8}"]
    flags = [*create_flags(digits_root, tmp_path, "sides"), *METHODS["peer"]]
    parts = build_parts(
        create_cpu_runtime(), check(load_config([*flags, f"--data.train_pp={says[0]}", says[1]]))
    )
    batch = next(iter(iterate_batches(parts, 0)))
    assert batch.images.shape[1] == 12
    assert parts.task.loss(parts.state.model, batch).terms["peer"].isfinite()
    parts.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--distill.peer=self", "--kd=kd"], "needs model.drop_path_rate"),
        (["--distill.peer=resnet18"], "is set but no distillation loss"),
        (["--distill.peer=resnet1", "--kd=kd"], "resnet1"),
        (["--distill.peer=resnet18", "--kd=kd"], "set img_size, in_chans or dynamic_img_size in"),
        (
            ["--distill.peer=resnet18", "--kd=kd", "--distill.teacher=past"],
            "and distill.peer exclude each other",
        ),
        (
            [
                "--distill.peer=resnet18",
                "--distill.losses=[{name: ctkd, args: {curriculum_steps: 4}}]",
            ],
            "is not supported with ctkd, which has",
        ),
        (
            [
                *METHODS["peer"],
                "--model.args.dynamic_img_size=true",
                "--data.eval_pp=decode(channels=1)|resize(12)|value_range(-1, 1)",
            ],
            "does not take images of 12 x 12 x 1, as the student sees them",
        ),
        (["--distill.peer_args={depth: 1}"], "needs distill.peer; set it"),
        (["--distill.alpha_schedule=epochs"], "needs distill.loss or distill.losses"),
    ],
)
def test_losses_unusable_between_peers_are_refused(digits_root, tmp_path, flags, words):
    with pytest.raises(UserError) as raised:
        check(load_config([*create_flags(digits_root, tmp_path, "bad"), *flags]))
    assert words in str(raised.value) and "\n" not in str(raised.value)
