"""Unsuitable images, models, projections and optimizers are found before a device starts."""

from __future__ import annotations

import json

import pytest

from job.check import check
from tests.support.tiny_parts import CLASSES, VIT_ARGS, create_config, create_vit
from utils.config.load import load_config
from utils.errors import UserError

PP = "decode(channels=1)|resize(8)|value_range(-1, 1)"


def check_digits(digits_root, tmp_path, *flags):
    return check(
        load_config(
            [
                "--config",
                "configs/digits_student.yaml",
                f"--data.root={digits_root}",
                f"--run.output_dir={tmp_path}",
                "--runtime.device=cpu",
                *flags,
            ]
        )
    )


MISFITS = [
    (
        ("--model.image_size=7",),
        "data.train_pp and data.eval_pp gives images of 8 x 8 x 1",
        "Input height (8) doesn't match model (7)",
        "set model.image_size (now 7)",
    ),
    (
        (f"--data.train_pp={PP.replace('8', '9')}",),
        "data.train_pp gives images of 9 x 9 x 1",
        "doesn't match model (8)",
        "change its resize or crop",
    ),
    (
        (f"--data.eval_pp={PP.replace('8', '12')}",),
        "data.eval_pp gives images of 12 x 12 x 1",
        "doesn't match model (8)",
        "change its resize or crop",
    ),
    (
        ("--data.eval_pp=decode|resize(8)|value_range(-1, 1)",),
        "data.eval_pp gives images of 8 x 8 x 3",
        "it takes 1 channels and sees 3",
        "in_chans in model.args to 3",
    ),
    (
        ("--data.train_pp=decode(channels=1)|resize(8)|squeeze_last_dim|value_range(-1, 1)",),
        "data.train_pp yields images of 2 dimensions",
        "[H, W, C]",
        "leave out",
    ),
    (
        ("--model=naflexvit_base_patch16_gap", "--model.args.patch_size=16"),
        "gives images of 8 x 8 x 1",
        "its patches of 16 x 16 are larger",
        "set patch_size in model.args",
    ),
    (
        ("--model=naflexvit_base_patch16_gap", "--model.args.patch_size=3"),
        "gives images of 8 x 8 x 1",
        "its patches of 3 x 3 do not divide them",
        "change its resize or crop",
    ),
    (("--data.image_key=img",), "data.image_key (img)", "no such feature", "'image'"),
]


@pytest.mark.parametrize(("flags", "what", "reason", "way_out"), MISFITS)
def test_images_the_student_cannot_take_are_refused(
    digits_root, tmp_path, flags, what, reason, way_out
):
    with pytest.raises(UserError) as caught:
        check_digits(digits_root, tmp_path, *flags)
    for words in (what, reason, way_out):
        assert words in str(caught.value)


def test_patches_that_divide_the_images_are_accepted(digits_root, tmp_path):
    """The configuration's own patch_size of 4, not the 16 of the model's name."""
    assert check_digits(digits_root, tmp_path, "--model=naflexvit_base_patch16_gap")


def test_the_datasets_channels_are_used(digits_root, tmp_path):
    job = check_digits(
        digits_root, tmp_path, "--data.train_pp=decode(channels=0)|value_range(-1, 1)"
    )
    assert job.facts.image_shapes == {"train": (8, 8, 1), "eval": (8, 8, 1)}


def teach(tmp_path, *flags, **teacher):
    args = {"img_size": 12, **VIT_ARGS}
    view = {"mean": [0], "std": [1]}
    section = {"model": "vit_tiny_patch16_224", "args": args, **view, **teacher}
    return check(create_config(tmp_path, f"--distill.teachers={json.dumps([section])}", *flags))


def test_images_a_teacher_cannot_take_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"data.name .*8 x 8 x 1, which distill.teacher 'vit_ti"):
        teach(tmp_path, "--kd=kd")
    teach(tmp_path, "--kd=kd", size=12)
    for mean in ([0, 0], [0, 0, 0]):
        with pytest.raises(UserError, match=r"give mean and std in distill.teachers .*\(1\), or"):
            teach(tmp_path, "--kd=kd", size=12, mean=mean, std=[1] * len(mean))


def test_evaluation_alone_ignores_training_images(digits_root, tmp_path):
    from models.factory import export_model

    model = {"model": "vit_tiny_patch16_224", "args": {"img_size": 8, **VIT_ARGS}}
    export_model(create_vit().state_dict(), {**model, "num_classes": CLASSES}, tmp_path)
    flags = (f"--data.train_pp={PP.replace('8', '9')}", f"--model.weights={tmp_path}")
    assert check_digits(digits_root, tmp_path, "--eval", *flags)
    with pytest.raises(UserError, match=r"^data\.train_pp"):
        check_digits(digits_root, tmp_path, *flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--optim.args={no_such: 3}",), "no_such"),
        (("--optim.betas=[0.9]",), "'adamw' has 2 of them, by default [0.9, 0.999]"),
        (("--optim.betas=[0.9, 0.99, 0.9]",), "give as many"),
        (("--opt=sgd", "--optim.betas=[0.9, 0.99]"), "'sgd' has no betas"),
        (("--opt=fusedadam",), "CUDA required"),
    ],
)
def test_an_optimizer_that_cannot_be_created_is_refused(tmp_path, flags, words):
    with pytest.raises(UserError, match=r"^optim\.") as caught:
        check(create_config(tmp_path, *flags))
    assert words in str(caught.value)


def test_a_projection_that_cannot_be_created_is_refused(tmp_path):
    term = {"name": "fitnet", "layers": {"blocks.0": "blocks.0"}, "args": {"regressor": "none"}}
    flags = (f"--distill.losses={json.dumps([term])}",)
    wide = {"img_size": 8, **VIT_ARGS, "embed_dim": 24}
    with pytest.raises(UserError, match=r"regressor none cannot turn \(2, 5, 16\)"):
        teach(tmp_path, *flags, args=wide)
    term["args"] = {}
    teach(tmp_path, f"--distill.losses={json.dumps([term])}", args=wide)


@pytest.mark.parametrize(
    ("name", "layer", "words"),
    [
        ("nst", "fc_norm", "an activation of shape (2, 16) has no positions"),
        ("ofd", "patch_embed.proj", "a weight of (16, 1, 4, 4) for activations (2, 16, 2, 2)"),
    ],
)
def test_layers_that_a_loss_cannot_compare_are_refused(tmp_path, name, layer, words):
    term = {"name": name, "layers": {layer: layer}}
    with pytest.raises(UserError, match=r"^distill\.losses: ") as caught:
        teach(
            tmp_path,
            f"--distill.losses={json.dumps([term])}",
            size=8,
            args={"img_size": 8, **VIT_ARGS},
        )
    assert words in str(caught.value)
