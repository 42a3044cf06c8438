"""Weights of classes in the task loss: from counts or names to the loss that a run computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import main
from datasets import load_labels
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from losses.base import LossInputs
from tests.support.photographs import write_digits
from tests.support.tiny_parts import SYNTHETIC, create_config, create_cpu_runtime
from utils.config.load import change, dump_config, load_config

PP = "decode(channels=1)|resize(8)|value_range(-1, 1)"
COUNTS = {"cat": 4, "dog": 8, "emu": 12}


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> tuple[str, ...]:
    """Flags of a folder of three classes of unequal size, 24 images in all."""
    root = tmp_path_factory.mktemp("unequal")
    for split in ("train", "val"):
        for name, count in COUNTS.items():
            write_digits(root / split / name, count)
    return (
        "--data.source=folder",
        f"--data.root={root}",
        "--data.name=",
        "--data.eval_split=val",
        f"--data.train_pp={PP}",
        f"--data.eval_pp={PP}",
        "--data.global_batch_size=8",
    )


def compute_terms(folder: Path, *flags: str) -> tuple[dict[str, float], LossInputs]:
    """The terms of a run's first loss, and the inputs that they were computed from."""
    runtime = create_cpu_runtime()
    parts = build_parts(runtime, check(create_config(folder, *flags)))
    seen = []
    parts.task.losses.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    torch.manual_seed(0)
    output = parts.task.loss(parts.state.model, next(iterate_batches(parts, 0)))
    parts.close()
    return {name: value.item() for name, value in output.terms.items()}, seen[0]


@pytest.mark.parametrize(
    ("given", "weights"),
    [("auto", (2.0, 1.0, 2 / 3)), ("{emu: 0.5, cat: 3}", (3.0, 1.0, 0.5)), ("[1,2,3]", (1, 2, 3))],
)
def test_the_loss_is_pytorchs_with_the_resolved_weights(tmp_path, flags, given, weights):
    terms, inputs = compute_terms(tmp_path, *flags, f"--train.class_weights={given}")
    each = F.cross_entropy(
        inputs.student_logits,
        inputs.labels.long(),
        weight=torch.tensor(weights, dtype=torch.float32),
        reduction="none",
    )
    assert terms["task"] == pytest.approx(each.mean().item(), rel=1e-5)


def test_mixed_targets_weigh_each_class_by_its_own_weight(tmp_path, flags):
    mixed = ("--mixup=0.8", "--smoothing=0.1", "--train.class_weights=auto")
    terms, inputs = compute_terms(tmp_path, *flags, *mixed)
    assert 0.1 < inputs.targets.max(dim=1).values.min() < 0.9
    weighted = inputs.targets * torch.tensor([2.0, 1.0, 2 / 3])
    each = -(weighted * F.log_softmax(inputs.student_logits, dim=1)).sum(dim=1)
    assert terms["task"] == pytest.approx(each.mean().item(), rel=1e-5)


def test_terms_of_distillation_are_not_weighed(tmp_path, flags):
    taught = ("--model_ema", "--teacher=ema", "--kd=kd", "--kd_alpha=0.25")
    plain, _ = compute_terms(tmp_path, *flags, *taught)
    weighed, _ = compute_terms(tmp_path, *flags, *taught, "--train.class_weights=[0, 5, 1]")
    assert weighed["kd"] == plain["kd"]
    assert weighed["task"] != plain["task"]
    total = 0.75 * weighed["task"] + 0.25 * weighed["kd"]
    assert weighed["total"] == pytest.approx(total, rel=1e-5)


def test_a_yaml_of_any_form_is_read_back_equal(tmp_path, flags):
    for given in ("auto", "{emu: 0.5}", "[1, 2, 3]"):
        config = create_config(tmp_path, *flags, f"--train.class_weights={given}")
        path = tmp_path / "again.yaml"
        path.write_text(dump_config(config))
        assert load_config(["--config", str(path)]) == config
        assert change(config) == config


def test_a_synthetic_run_keeps_a_weight_for_each_class(tmp_path, flags):
    from tasks.classify.synthetic import SyntheticClassify

    for given in ("auto", "{emu: 0.5}"):
        config = create_config(tmp_path, *flags, f"--train.class_weights={given}")
        run = SyntheticClassify(config, {}).replace_data(32, tmp_path)
        assert run.train.class_weights == (1.0,) * len(COUNTS)


def test_an_unknown_class_is_refused_in_one_line(tmp_path, flags, capsys):
    run = [*SYNTHETIC, *flags, "--runtime.device=cpu", f"--run.output_dir={tmp_path / 'runs'}"]
    assert main.main([*run, "--train.class_weights={em: 1}"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "WARNING" not in line]
    assert errors == ["error: train.class_weights: unknown class 'em'; did you mean 'emu'?"]
    assert not (tmp_path / "runs").exists()


def test_auto_counts_the_labels_of_the_training_split(tmp_path, flags, caplog):
    caplog.set_level("INFO")
    job = check(create_config(tmp_path, *flags, "--train.class_weights=auto"))
    labels = load_labels(job.config.data, "a.key")
    assert np.bincount(labels).tolist() == [*COUNTS.values()]
    assert job.facts.class_weights == pytest.approx((2.0, 1.0, 2 / 3))
    assert "train.class_weights: from 0.6667 (class emu) to 2 (class cat)" in caplog.text
