"""Bad input: one line that names key, value, rule and way out, code 2, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import main
from datasets import create_loader
from models.factory import export_model
from tests.support.child_runs import run_main
from tests.support.tiny_parts import CLASSES, VIT_ARGS, create_argv, create_config, create_vit
from utils.errors import UserError


@pytest.fixture(scope="module")
def earlier_run(tmp_path_factory) -> Path:
    """A finished tiny run of the usual student."""
    output_dir = tmp_path_factory.mktemp("earlier")
    assert main.main(create_argv(output_dir, "--train.steps=2", "--run.run_id=a")) == 0
    return output_dir / "tiny" / "a"


@pytest.fixture(scope="module")
def seven_classes(tmp_path_factory) -> Path:
    """An exported model with seven classes."""
    folder = tmp_path_factory.mktemp("seven")
    args = {**VIT_ARGS, "img_size": 8}
    facts = {"model": "vit_tiny_patch16_224", "args": args, "num_classes": 7}
    tensors = create_vit().state_dict()
    tensors["head.weight"], tensors["head.bias"] = (
        tensors["head.weight"][:7],
        tensors["head.bias"][:7],
    )
    export_model(tensors, facts, folder)
    return folder


def get_digits_flags(root: Path, output_dir: Path) -> list[str]:
    """The flags of a run on the digits."""
    places = (f"--data.root={root}", f"--run.output_dir={output_dir}", "--runtime.device=cpu")
    return ["--config", "configs/digits_student.yaml", *places]


def refuse_digits(capsys, root: Path, tmp_path: Path, *flags: str) -> str:
    """Run main on the digits with wrong flags; gives its one line."""
    output_dir = tmp_path / "runs"
    return refuse(capsys, [*get_digits_flags(root, output_dir), *flags], output_dir)


def refuse(capsys, flags: list[str], forbidden: Path) -> str:
    """Run main with wrong flags; gives its one line."""
    assert main.main(flags) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if "WARNING" not in line]
    errors = [line for line in lines if line.startswith("error: ")]
    assert captured.out == ""
    assert len(errors) == 1
    assert lines[-1] == errors[0]
    assert "Traceback" not in captured.err
    assert not forbidden.exists()
    return errors[0].removeprefix("error: ")


ANY_SIDE = ("--model.args.dynamic_img_size=true",)
BY_LAYERS = (
    '--distill.teachers=[{"model": "vit_tiny_patch16_224", "args": {"patch_size": 4, '
    '"in_chans": 1, "img_size": 8, "depth": 1}, "mean": [127.5], "std": [127.5]}]',
    '--distill.losses=[{"name": "fitnet", "layers": {"blocks.0": "blocks.0"}}]',
)
WRONG = [
    (
        ("--model=vit_tinny_patch16_224",),
        r"model.name 'vit_tinny_patch16_224' is no model",
        "vit_tiny_patch16_224",
    ),
    (("--model=resnet18.no_such_tag",), "model.name 'resnet18.no_such_tag'", "known:"),
    (("--opt=adamww",), "unknown optim.name 'adamww'", "did you mean 'adamw'"),
    (("--data.train_pp=value_rnage(-1, 1)",), "data.train_pp", "value_range"),
    (("--data.eval_pp=decode|flip_lrr|value_range(-1, 1)",), "data.eval_pp", "flip_lr"),
    (("--data.train_pp=resize(8)|value_range(-1, 1",), "data.train_pp", ""),
    (
        ("--data.train_pp=resize(8)",),
        "data.train_pp ('resize(8)') does not end with a value range",
        "value_range(0, 255)",
    ),
    (
        ("--data.eval_pp=value_range(0, 1)",),
        "data.eval_pp ends with value_range(0, 1) but",
        "end both alike",
    ),
    (("--data.train_pp=value_range(1, 1)",), "vmin and vmax are both 1", "at character 1"),
    (("--batch_size=128",), "data.global_batch_size (128) exceeds the 96 examples", "lower it"),
    (
        ("--batch_size=12", "--update_freq=5"),
        "data.global_batch_size (12) does not divide into 5",
        "make it a multiple of 5",
    ),
    (("--batch_size=12", "--update_freq=4", "--mixup=1"), "leaves 3 examples", "cutmix_alpha to 0"),
    (
        ("--epochs=2", "--optim.warmup_steps=13"),
        "optim.warmup_steps (13) exceeds the run's 12",
        "raise train.epochs",
    ),
    (
        ("--epochs=2", "--profile.steps=11-12"),
        "profile.steps ('11-12') lies beyond the run's 12",
        "0 to 11",
    ),
    (
        ("--model.num_classes=5",),
        "model.num_classes (5) is less than the 10 classes",
        "leave it out",
    ),
    (("--kd=kdd", "--teacher=vit_tiny_patch16_224"), "unknown loss 'kdd'", "kd"),
    (
        ("--kd=kd", "--teacher=vit_tinny_patch16_224"),
        "'vit_tinny_patch16_224' is no model",
        "vit_tiny_patch16_224",
    ),
    (
        ("--kd=kd", "--teacher_path=nowhere.pth", "--teacher=vit_tiny_patch16_224"),
        "nowhere.pth",
        "no such file or directory",
    ),
    (
        ("--model.weights=nowhere.safetensors",),
        "model.weights ('nowhere.safetensors')",
        "no such file or directory",
    ),
    (('--model.args={"no_such_thing": 1}',), "no_such_thing", "model.args"),
    (("--resume=nowhere",), "run.resume ('nowhere')", "no whole checkpoint"),
    (("--eval", "--resume=auto"), "run.resume 'auto' finds no checkpoint", "train first"),
    (("--run.experiment=a/b",), "run.experiment ('a/b')", "letters, digits"),
    (("--runtime.device=cuda",), "PyTorch sees no NVIDIA GPU", ""),
    (
        ("--train.task_loss=bcee",),
        "unknown train.task_loss 'bcee' for train.task=classify",
        "did you mean 'bce'",
    ),
    (
        ("--train.bce_threshold=0.2",),
        "train.bce_threshold (0.2) has no effect on train.task_loss=",
        "set train.task_loss=bce",
    ),
    (("--train.task_loss=bce", "--train.bce_threshold=1"), "train.bce_threshold", "less than 1"),
    (
        ("--train.class_weights=[1, 2]",),
        "train.class_weights has 2 numbers, 3 in all, for 10",
        "one number for each class",
    ),
    (
        ("--train.class_weights=[0,0,0,0,0,0,0,0,0,0]",),
        "train.class_weights has 10 numbers, 0 in",
        "some of them above 0",
    ),
    (("--train.class_weights=[-1]",), "train.class_weights", "at least 0"),
    (("--train.class_weights=[.nan]",), "train.class_weights ([nan])", "must be finite"),
    (("--train.class_weights=aut",), "train.class_weights ('aut')", "write auto, a list"),
    (("--train.class_weights={a: -1}",), "train.class_weights", "{class name: number}"),
    (("--train.class_weights={cat: 2}",), "train.class_weights names classes", "a list of 10"),
    (("--data.sample_weights=[1, 2]",), "data.sample_weights has 2 numbers", "for each class"),
    (("--data.sample_weights=[-1]",), "data.sample_weights ([-1])", "at least 0"),
    (("--data.sample_weights={cat: .inf}",), "data.sample_weights", "must be finite"),
    (("--data.sample_weights={cat: 1}",), "data.sample_weights names classes", "a list of 10"),
    (("--data.repeats=9",), "data.repeats (9) leaves fewer than two different", "lower it"),
    (
        ("--train.mix_off_epoch=1",),
        "train.mix_off_epoch (1.0) needs train.mixup_alpha",
        "or train.cutmix_alpha; set it",
    ),
    (
        ("--mixup=1", "--epochs=3", "--train.mix_off_epoch=3"),
        "is not before the end of the run's 3",
        "lower it",
    ),
    (("--train.image_sizes={1: 4}",), "train.image_sizes begins at epoch 1", "a side for epoch 0"),
    (
        ("--train.image_sizes={0: 12}",),
        "train.image_sizes (12 from epoch 0) exceeds model.image_s",
        "lower it",
    ),
    (
        ("--train.image_sizes={0: 4, 9: 8}", "--epochs=3"),
        "train.image_sizes (9) is not before",
        "lower it",
    ),
    (
        ("--train.image_sizes={0: 4}",),
        "train.image_sizes (4 from epoch 0): model.name 'vit_tiny",
        "model.args.dynamic_img_size=true",
    ),
    (
        ("--train.image_sizes={0: 6}", "--model.args.dynamic_img_size=true"),
        "train.image_sizes (6 ",
        "divisible by patch size",
    ),
    (
        ("--train.image_sizes={0: 4, 1: 8}", "--train.scan_layers=true", "--runtime.device=xla"),
        " and train.scan_layers exclude each other",
        "keep one",
    ),
    (
        ("--train.image_sizes={0: 4, 0.01: 8}", *ANY_SIDE),
        "train.image_sizes (epoch 0.01, which is step 0) begins at the same step as epoch 0",
        "further apart",
    ),
    (
        ("--train.image_sizes={0: 4, 2: 8}", "--train.steps=5", *ANY_SIDE),
        "exceeds the run's 5 steps",
        "lower it",
    ),
    (
        ("--train.image_sizes={0: 4, 2: 8}", *ANY_SIDE, *BY_LAYERS),
        "train.image_sizes is not supported with layers in distill.losses",
        "remove one",
    ),
    (("--train.image_sizes={0: 0}",), "train.image_sizes", "at least 1"),
    (("--train.image_sizes={-1: 8}",), "train.image_sizes", "at least 0"),
    (("--train.ema_more=[0.9]",), "train.ema_more ((0.9,)) needs train.ema; ", "set it"),
    (
        ("--model_ema", "--epochs=3", "--train.ema_start_epoch=3"),
        "train.ema_start_epoch (3) is not",
        "lower it",
    ),
    (
        ("--model_ema", "--model_ema_decay=0.5", "--train.ema_more=[0.9, 0.5]"),
        "train.ema_more (0.9, 0.5) repeats a decay",
        "give each once",
    ),
    (
        ("--optim.plateau_patience=2",),
        "optim.plateau_patience (2) needs optim.schedule=plateau;",
        "set it",
    ),
    (
        ("--optim.schedule=wsd", "--optim.cycles=2"),
        "optim.cycles (2) needs optim.schedule=cosine",
        "optim.schedule=linear or",
    ),
    (("--optim.cycle_decay=0.5",), "optim.cycle_decay (0.5) needs optim.cycles;", "set it"),
    (("--optim.cycles=0",), "optim.cycles", "at least 1"),
    (("--train.mix_mode=elem",), "train.mix_mode", "element"),
    (
        ("--optim.max_grad_norm=1", "--optim.max_grad_ratio=0.01"),
        "optim.max_grad_norm (1.0) and",
        "keep one of them",
    ),
    (
        ("--optim.base_lr=0.1", "--lr=0.2"),
        "optim.lr (0.2) and optim.base_lr (0.1) are both set",
        "remove one of them",
    ),
    (("--optim.base_lr=1e-5", "--opt=sgd"), "gives a learning rate of 6.25e-07", "lower min_lr"),
    (
        (
            "--model.head_init_bias=-7",
            "--model=mnist_cnn",
            "--model.image_size=28",
            "--model.args=",
        ),
        "model.head_init_bias (-7) needs a classifier",
        "remove it",
    ),
    (
        (
            '--distill.losses=[{"name": "kd", "args": {"temprature": 2}}]',
            "--teacher=vit_tiny_patch16_224",
        ),
        "no argument 'temprature'",
        "did you mean 'temperature'",
    ),
]


@pytest.mark.parametrize(("flags", "what", "way_out"), WRONG)
def test_an_invalid_flag_is_refused_in_one_line(tmp_path, capsys, flags, what, way_out):
    line = refuse(capsys, create_argv(tmp_path / "runs", *flags), tmp_path / "runs")
    assert what in line
    assert way_out in line


def test_a_missing_dataset_root_names_the_flag(tmp_path, capsys):
    line = refuse_digits(capsys, tmp_path / "gone", tmp_path)
    assert str(tmp_path / "gone") in line
    assert "data.root" in line
    assert "--data_path" in line or "--tfds_data_dir" in line


def test_a_relative_root_is_reported_as_an_absolute_path(tmp_path, capsys, monkeypatch):
    config = Path("configs/digits_student.yaml").absolute()
    monkeypatch.chdir(tmp_path)
    flags = [f"--config={config}", "--data.root=gone", "--run.output_dir=runs"]
    flags = [*flags, "--runtime.device=cpu"]
    line = refuse(capsys, flags, tmp_path / "runs")
    assert f"data.root (gone) does not exist: it is {tmp_path / 'gone'} from here; set" in line


@pytest.mark.parametrize("key", ["train_split", "eval_split", "test_split"])
def test_an_unknown_split_is_refused_with_the_existing_ones(tmp_path, capsys, digits_root, key):
    line = refuse_digits(capsys, digits_root, tmp_path, f"--data.{key}=validaton")
    assert f"data.{key}" in line
    assert "'validaton'" in line or "(validaton)" in line
    assert "validation" in line


def test_an_unknown_dataset_is_refused(tmp_path, capsys, digits_root):
    line = refuse_digits(capsys, digits_root, tmp_path, "--data.name=digit")
    assert "data.name" in line
    assert "digits" in line


def test_an_unknown_op_is_named_with_its_position(tmp_path, capsys, digits_root):
    line = refuse_digits(
        capsys,
        digits_root,
        tmp_path,
        "--data.train_pp=decode(channels=1)|rezise(8)|value_range(-1, 1)",
    )
    assert "data.train_pp" in line
    assert "rezise" in line
    assert "resize" in line
    assert "20" in line or "op 2" in line or "position" in line


def test_a_checkpoint_of_another_model_is_refused(tmp_path, capsys, earlier_run):
    other = json.dumps({**VIT_ARGS, "embed_dim": 24})
    flags = create_argv(tmp_path / "runs", f"--model.args={other}", f"--resume={earlier_run}")
    line = refuse(capsys, flags, tmp_path / "runs")
    assert f"run.resume ('{earlier_run}" in line
    assert "a checkpoint of another model" in line
    assert "resume with the model that wrote it" in line


def test_weights_of_another_model_are_refused(tmp_path, capsys, earlier_run):
    other = json.dumps({**VIT_ARGS, "depth": 2})
    flags = create_argv(
        tmp_path / "runs", f"--model.args={other}", f"--model.weights={earlier_run}"
    )
    line = refuse(capsys, flags, tmp_path / "runs")
    assert "model.weights" in line
    assert "is of another model: 12 missing: blocks.1." in line


def test_a_teacher_of_other_classes_is_refused(tmp_path, capsys, seven_classes):
    flags = create_argv(tmp_path / "runs", "--kd=kd", f"--teacher_path={seven_classes}")
    line = refuse(capsys, flags, tmp_path / "runs")
    assert "7 classes" in line
    assert str(CLASSES) in line


def test_a_teacher_of_another_model_than_its_weights_is_refused(tmp_path, capsys, seven_classes):
    flags = create_argv(
        tmp_path / "runs", "--kd=kd", f"--teacher_path={seven_classes}", "--teacher=resnet18"
    )
    line = refuse(capsys, flags, tmp_path / "runs")
    assert "resnet18" in line
    assert "vit_tiny_patch16_224" in line


def test_an_existing_run_id_is_refused_and_unchanged(capsys, earlier_run):
    before = {path: path.stat().st_mtime_ns for path in earlier_run.rglob("*")}
    flags = create_argv(earlier_run.parent.parent, "--train.steps=2", "--run.run_id=a")
    assert main.main(flags) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: run.run_id: ")
    assert "--run.overwrite" in line
    assert {path: path.stat().st_mtime_ns for path in earlier_run.rglob("*")} == before


def test_a_batch_indivisible_by_the_ranks_is_refused(tmp_path):
    config = create_config(tmp_path)
    with pytest.raises(UserError, match=r"data.global_batch_size \(16\) is not divisible by the 3"):
        create_loader(config.data, "train", seed=0, shard=(0, 3))
    with pytest.raises(UserError, match=r"data.eval_batch_size \(40\) is not divisible by the 3"):
        create_loader(config.data, "eval", seed=0, shard=(0, 3))


def test_a_run_id_together_with_resume_is_refused(tmp_path, capsys, earlier_run):
    flags = create_argv(tmp_path / "runs", f"--resume={earlier_run}", "--run.run_id=b")
    line = refuse(capsys, flags, tmp_path / "runs")
    assert "run.run_id ('b') is not supported with run.resume of 'a'" in line


CHILDREN = [
    (("--train.epoch=3",), "unknown flag --train.epoch; did you mean --train.epochs"),
    (("--data.root=/no/such/place",), "data.root"),
    (("--model=vit_tinny_patch16_224",), "is no model of timm"),
]


@pytest.mark.parametrize(("flags", "what"), CHILDREN)
def test_the_command_line_ends_with_code_2_and_one_line(tmp_path, digits_root, flags, what):
    """A real process: nothing but the line, no traceback, no directory."""
    output_dir = tmp_path / "runs"
    done = run_main([*get_digits_flags(digits_root, output_dir), *flags])
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert what in line
    assert not output_dir.exists()
