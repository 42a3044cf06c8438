"""Recipes from end to end: on real images, in one graph on XLA, resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.record.history import read_metrics
from tests.support.child_runs import run_series

pytestmark = pytest.mark.slow
STEPS, HALF = 100, 55
# Keys of a whole modern recipe at once; whatever may clash is in one step.
RECIPE = (
    "--train.task_loss=bce",
    "--train.bce_threshold=0.2",
    "--train.bce_sum",
    "--mixup=0.1",
    "--data.repeats=3",
    "--train.mix_mode=element",
    "--train.mix_off_epoch=3",
    "--optim.max_grad_norm=none",
    "--optim.max_grad_ratio=0.5",
    "--optim.base_lr=0.01",
    "--optim.lr=1e-3",
    "--opt=nadamuon",
    "--model_ema",
    "--model_ema_decay=0.9",
    "--train.ema_more=[0.5]",
    "--train.ema_start_epoch=1",
    "--train.mix_prob=0.5",
    "--cutmix=1",
    "--model.head_init_scale=0.01",
    "--model.head_init_bias=-2.2",
)


def create_flags(digits_root: Path, output_dir: Path, name: str, *flags: str) -> list[str]:
    """A run of the student of the digits by the recipe."""
    return [
        "--config=configs/digits_student.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={output_dir}",
        "--run.experiment=recipe",
        f"--run.run_id={name}",
        "--run.tensorboard=false",
        "--runtime.device=xla",
        "--data.test_split=",
        "--train.log_every_steps=1",
        "--train.eval_every_epochs=100",
        f"--train.steps={STEPS}",
        "--optim.warmup_epochs=0",
        "--train.keep_checkpoints=9",
        *RECIPE,
        *flags,
    ]


@pytest.fixture(scope="module")
def runs(digits_root, tmp_path_factory) -> dict[str, list[dict]]:
    """Metrics of a whole run, and of one that was ended in its middle and went on."""
    folder = tmp_path_factory.mktemp("recipes")
    whole, parts = (create_flags(digits_root, folder, name) for name in ("whole", "parts"))
    parts += [f"--train.checkpoint_every_steps={HALF}", "--runtime.graph_budget=100000"]
    middle = folder / "recipe" / "parts" / "checkpoints" / f"step_{HALF:08d}"
    done = run_series([whole, parts, [*parts, f"--resume={middle}"]])
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{middle}" in done.stdout + done.stderr
    return {name: read_metrics(folder / "recipe" / name) for name in ("whole", "parts")}


def get_losses(lines: list[dict]) -> dict[int, float]:
    return {line["step"]: line["loss/total"] for line in lines if line["kind"] == "train"}


def test_a_recipe_learns_real_digits_in_one_graph(runs):
    losses = get_losses(runs["whole"])
    assert len(losses) == STEPS
    # Ten sigmoids at a bias of -2.2 cost 9 * 0.105 + 2.3 nats at most times the right ones.
    assert 2.5 < losses[1] < 4.5
    assert runs["whole"][-1]["top1"] > 20  # chance is 10
    assert [line for line in runs["whole"] if line["kind"] == "train"][-1]["graphs_train"] == 1


def test_each_average_is_evaluated_every_time(runs):
    """Of averages that are set apart by their memory alone, each has its own numbers."""
    last = runs["whole"][-1]
    assert last["ema2/examples"] == last["examples"]
    assert last["ema2/top1"] > 20
    assert last["ema2/loss"] != last["loss"]
    assert last["graphs_eval"] <= 2


def test_a_resumed_recipe_gives_the_same_bits(runs):
    lines = [line for line in runs["parts"] if line["attempt"] == 2]
    whole, again = get_losses(runs["whole"]), get_losses(lines)
    assert list(again) == list(range(HALF + 1, STEPS + 1))
    assert all(again[step] == whole[step] for step in again)
    for name in ("loss", "ema2/loss"):
        assert lines[-1][name] == runs["whole"][-1][name]
