"""From YAML and flags to one frozen configuration, and every refusal in one sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from big_vision.pp.checks import check_spec
from tests.test_floors import list_sources
from utils.config.command_line import ALIASES, find_foreign_hint, is_key
from utils.config.foreign_flags import FOREIGN_FLAGS
from utils.config.keys import iterate_keys
from utils.config.load import RunConfig, change, dump_config, load_config
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
DATA = ("--data.root=data", "--data.name=digits")
_SHORT_FLAGS = (
    "model epochs batch_size batch-size lr opt weight_decay data_set data_path tfds_data_dir "
    "tfds_train_split tfds_eval_split output_dir seed resume eval teacher teacher_path kd kd_alpha "
    "kd_temperature clip_grad warmup_epochs min_lr smoothing mixup cutmix drop_path model_ema "
    "model_ema_decay layer_decay update_freq init_from init-from check"
)
SHORT_FLAGS = _SHORT_FLAGS.split()
CALL = r"\w+\((?:[^()]|\([^()]*\))*\)"  # of an op, with a tuple among its arguments


def load(*flags: str) -> RunConfig:
    return load_config([*DATA, *flags])


def get(config: RunConfig, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def write_yaml(path: Path, **sections: object) -> Path:
    path.write_text(yaml.safe_dump({"data": {"name": "digits", "root": "data"}, **sections}))
    return path


@pytest.fixture(scope="module")
def help_run() -> subprocess.CompletedProcess:
    """`python main.py --help` in a process that then lists its modules on stderr."""
    code = (
        "import sys, main\n"
        "try:\n    main.main(['--help'])\n"
        "finally:\n    sys.stderr.write(' '.join(sys.modules))\n"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_help_lists_every_key_with_its_meaning_and_every_alias(help_run):
    assert help_run.returncode == 0
    text = " ".join(help_run.stdout.split())
    for key in [*iterate_keys(), "config", *SHORT_FLAGS]:
        assert f"--{key}" in text, key
    for section in RunConfig.model_fields.values():
        for name, field in section.annotation.model_fields.items():
            assert field.description, name
            assert " ".join(field.description.split()) in text, name


def test_help_shows_defaults(help_run):
    text = " ".join(help_run.stdout.split())
    assert "(default: adamw)" in text
    assert "(default: 0.9998)" in text


def test_help_imports_no_framework(help_run):
    modules = set(help_run.stderr.split())
    assert "pydantic_settings" in modules
    heavy = {"torch", "torch_xla", "tensorflow", "tensorflow_datasets", "timm", "jax", "numpy"}
    assert not heavy & modules


def test_every_short_flag_of_the_family_is_an_alias():
    assert sorted(SHORT_FLAGS) == sorted(alias for names in ALIASES.values() for alias in names)
    assert set(ALIASES) <= set(iterate_keys())


def test_hints_name_keys_that_exist_and_no_flag_that_works():
    sections = "|".join(RunConfig.model_fields)
    for flag, hint in FOREIGN_FLAGS.items():
        named = re.findall(rf"\b(?:{sections})\.[a-z_]+", hint)
        assert is_key(hint) or named or "leave it out" in hint or "tools.mirror" in hint, flag
        assert set(named) <= set(iterate_keys()), flag
    assert not FOREIGN_FLAGS.keys() & set(SHORT_FLAGS)


def test_hints_for_preprocessing_are_ops_that_parse():
    calls = [call for hint in FOREIGN_FLAGS.values() for call in re.findall(CALL, hint)]
    assert len(calls) > 10
    for call in calls:
        check_spec(call)


FOREIGN = {
    "aa": "data.train_pp: timm_randaug(2, 9",
    "hflip": "data.train_pp: flip_lr",
    "recount": "one rectangle",
    "log-wandb": "python -m tools.mirror --to wandb",
    "enable_wandb": "python -m tools.mirror --to wandb",
    "tpu": "use --runtime.device=xla",
    "finetune": "use --init_from",
    "big_vision_pp_train": "use --data.train_pp",
    "scale": "scale=(0.08, 1)",
    "color-jitter": "color_jitter(0.4",
    "crop-pct": "data.eval_pp: center_crop_pct(224, 0.95)",
    "train-interpolation": "method='bicubic'",
    "remode": "use --data.erasing_mode=const or pixel",
    "layer_scale_init_value": "use --model.args='{init_values: 1e-6}'",
    "save_ckpt_freq": "use --train.checkpoint_every_epochs",
    "num_workers": "use --data.threads",
    "dist_eval": "split over all ranks",
    "disable_eval": "use --train.eval_every_epochs",
    "input_size": "--data.train_pp and --data.eval_pp",
    "training.epochs": "use --train.epochs",
    "training.batch_size": "use --data.global_batch_size",
    "training.steps": "use --train.steps",
    "training.precision": "use --runtime.precision",
    "training.num-workers": "use --data.threads",
    "training.label_smoothing": "use --train.label_smoothing",
    "training.epcohs": "did you mean --train.epochs",
    "amp": "use --runtime.precision=bf16, or fp16 with a scaled loss on cuda",
}


@pytest.mark.parametrize("flag", FOREIGN)
def test_a_flag_of_another_trainer_is_refused_with_what_to_use(flag):
    with pytest.raises(UserError) as error:
        load(f"--{flag}", "1")
    assert str(error.value).startswith(f"unknown flag --{flag}; ")
    assert FOREIGN[flag] in str(error.value)
    assert FOREIGN_FLAGS.keys() >= {name.replace("-", "_") for name in FOREIGN if "." not in name}
    assert find_foreign_hint("no_such_flag") == ""


@pytest.mark.parametrize("value", ["amp", "AMP"])
def test_amp_as_a_precision_is_refused_with_its_meaning(value, tmp_path):
    path = write_yaml(tmp_path / "x.yaml", runtime={"precision": value})
    for flags in ([f"--runtime.precision={value}"], ["--config", str(path)]):
        with pytest.raises(UserError, match=r"choose bf16, or fp16 .* over float32 weights"):
            load_config(flags)


VALUES = {
    "model": "resnet18",
    "epochs": "7",
    "batch_size": "32",
    "batch-size": "32",
    "lr": "0.5",
    "opt": "sgd",
    "weight_decay": "0.25",
    "data_set": "mnist",
    "data_path": "/d",
    "tfds_data_dir": "/d",
    "tfds_train_split": "train[:9]",
    "tfds_eval_split": "test",
    "output_dir": "/o",
    "seed": "3",
    "resume": "auto",
    "eval": "true",
    "teacher": "resnet34",
    "teacher_path": "/t.pth",
    "kd": "kd",
    "kd_alpha": "0.25",
    "kd_temperature": "2.0",
    "clip_grad": "2.0",
    "warmup_epochs": "1.5",
    "min_lr": "1e-7",
    "smoothing": "0.1",
    "mixup": "0.8",
    "cutmix": "1.0",
    "drop_path": "0.1",
    "model_ema": "true",
    "model_ema_decay": "0.99",
    "layer_decay": "0.75",
    "update_freq": "4",
    "init_from": "runs/x",
    "init-from": "runs/x",
    "check": "true",
}
# What must stand beside a flag for the configuration to be free of contradictions.
COMPANIONS = {
    "eval": ("--resume=auto",),
    "teacher": ("--kd=kd",),
    "teacher_path": ("--kd=kd",),
    "kd": ("--teacher=resnet34",),
}


@pytest.mark.parametrize("flag", SHORT_FLAGS)
@pytest.mark.parametrize("form", ["equals", "space"])
def test_a_short_flag_sets_its_key(flag, form):
    value = VALUES[flag]
    tokens = [f"--{flag}={value}"] if form == "equals" else [f"--{flag}", value]
    config = load(*tokens, *COMPANIONS.get(flag, ()))
    (key,) = [key for key, aliases in ALIASES.items() if flag in aliases]
    wanted = get(config, key)
    assert str(wanted).lower() == value or wanted == yaml.safe_load(value) or wanted == float(value)
    assert wanted != get(load(), key)


@pytest.mark.parametrize("flag", ["--model_ema", "--train.ema"])
def test_a_switch_needs_no_value(flag):
    assert load(flag).train.ema
    assert load(flag, "--epochs=3").train.ema
    assert not load(flag, "false").train.ema


def test_flags_override_the_file_and_the_file_defaults(tmp_path):
    path = write_yaml(tmp_path / "my_run.yaml", optim={"lr": 0.5, "momentum": 0.8})
    config = load_config(["--config", str(path), "--optim.lr=0.25", "--train.epochs", "5"])
    assert (config.optim.lr, config.optim.momentum, config.train.epochs) == (0.25, 0.8, 5)
    assert config.optim.name == "adamw"
    assert config.run.experiment == "my_run"


def test_nested_values_come_from_flags_and_files_alike(tmp_path):
    term = {"name": "kd", "args": {"temperature": 2.0}, "weight": 0.5}
    path = write_yaml(
        tmp_path / "a.yaml",
        model={"args": {"depth": 2}},
        distill={"teacher": "resnet18", "losses": [term]},
    )
    config = load_config(["--config", str(path), "--optim.betas=[0.9, 0.95]"])
    assert config.model.args == {"depth": 2}
    assert config.distill.losses[0].args == {"temperature": 2.0}
    assert config.optim.betas == (0.9, 0.95)
    flagged = load('--model.args={"depth": 3, "patch_size": 4}')
    assert flagged.model.args == {"depth": 3, "patch_size": 4}


def test_a_configuration_is_frozen():
    with pytest.raises(ValidationError):
        load().optim.lr = 1.0


def test_a_dumped_configuration_reads_back_equal(tmp_path):
    config = load(
        "--mixup=0.8",
        "--optim.betas=[0.9, 0.99]",
        "--clip_grad=1.0",
        '--model.args={"depth": 2}',
        '--distill.losses=[{"name": "kd", "weight": 0.5}]',
        "--teacher=resnet18",
    )
    path = tmp_path / "config_resolved.yaml"
    path.write_text(dump_config(config))
    assert load_config(["--config", str(path)]) == config


REFUSED = [
    (("--train.epoch=3",), r"unknown flag --train.epoch; did you mean --train.epochs"),
    (("--optim.momentun=3",), r"unknown flag --optim.momentun; did you mean --optim.momentum"),
    (("--opt-betas=0.9",), r"unknown flag --opt-betas; use --optim.betas$"),
    (("--sched=cosine",), r"unknown flag --sched; use --optim.schedule$"),
    (("--epoch=3",), r"unknown flag --epoch; did you mean --epochs"),
    (("--qqq=3",), r"unknown flag --qqq; see python main.py --help"),
    (("train.epochs=3",), r"'train.epochs=3' follows no flag; write --KEY VALUE"),
    (("--epochs=many",), r"train.epochs \('many'\): give a whole number"),
    (("--epochs=0",), r"train.epochs \('?0'?\): it must be at least 1"),
    (("--lr=-1",), r"optim.lr \('?-1'?\): it must be greater than 0"),
    (("--smoothing=1.0",), r"train.label_smoothing \('?1.0'?\): it must be less than 1"),
    (("--run.imports=a",), r"run.imports"),
    (("--runtime.timeout_s=inf",), r"runtime.timeout_s \('?inf'?\)"),
    (("--runtime.timeout_s=1e9",), r"runtime.timeout_s \('?1e9'?\): it must be at most"),
    (("--runtime.device=gpu",), r"unknown runtime.device 'gpu' without run.imports; did you mean"),
    (("--kd=kd",), r"distill.loss is set but distill.teacher is empty"),
    (
        ("--kd=kd", '--distill.teachers=[{"model": "resnet10t", "num_classes": 0}]'),
        r"num_classes \(0\) is a teacher without a classifier",
    ),
    (("--teacher=resnet18",), r"distill.teacher is set but no distillation loss; set distill.loss"),
    (
        ("--kd=kd", "--teacher=resnet18", '--distill.losses=[{"name": "kd"}]'),
        r"distill.loss \('kd'\) and distill.losses exclude each other; keep",
    ),
    (("--lr=1e-3", "--min_lr=1e-2"), r"optim.min_lr \(0.01\) exceeds optim.lr \(0.001\)"),
    (("--epochs=3", "--warmup_epochs=4"), r"optim.warmup_epochs \(4\) exceeds train.epochs \(3\)"),
    (
        ("--train.steps=20", "--optim.warmup_steps=99"),
        r"optim.warmup_steps \(99\) exceeds the run's 20 steps; lower it or raise train.epochs",
    ),
    (("--optim.schedule=step",), r"optim.schedule=step needs optim.decay_epochs"),
    (("--eval",), r"run.eval_only \(True\) needs run.resume or model.weights; set it or rem"),
    (("--config=nowhere.yaml",), r"--config nowhere.yaml: No such file"),
    (("--config=a.yaml", "--config", "b.yaml"), r"--config is given twice"),
    (("--seed=99999999999999999999",), r"train.seed .*it must be less than 4294967296"),
    (("--seed", "-5"), r"train.seed \('-5'\): it must be at least 0"),
    (("--seed=" + "9" * 5000,), r"train.seed .*it is too large"),
    (("--optim.betas=[0.9, 1.5]",), r"optim.betas.1 \(1.5\): it must be less than 1"),
    (("--train.eval_every_epochs=inf",), r"train.eval_every_epochs .*give a finite number"),
    (("--runtime.timeout_s=inf",), r"runtime.timeout_s .*give a finite number"),
    (("--lr=nan",), r"optim.lr .*give a finite number"),
    (("--train.ema", "maybe"), r"train.ema \('maybe'\): give true or false"),
    (("--profile.steps=5",), r"profile.steps \('5'\): write FIRST-LAST, as 20-25"),
    (("--model.args={num_classes: 3}",), r"model.args.num_classes \(3\) would be overridden by "),
    (("--model.args={img_size: 32}", "--model.image_size=8"), r"overridden by model.image_size"),
    (("--model.args={drop_path_rate: 0.1}", "--drop_path=0.2"), r"by model.drop_path_rate"),
    (("--model.args=depth",), r"--model.args \('depth'\) is not a mapping; write '\{name: "),
    (
        ("--kd=kd", "--distill.teachers=[{model: a, args: {num_classes: 3}}]"),
        r"distill.teachers args.num_classes \(3\) would be overridden",
    ),
    (("--warmup-epoch=3",), r"unknown flag --warmup-epoch; did you mean --warmup_epochs"),
    (("--lr=none",), r"optim.lr \('none'\): give a number"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_invalid_values_are_refused_in_one_sentence(flags, message):
    with pytest.raises(UserError, match=message) as caught:
        load(*flags)
    assert "\n" not in str(caught.value)


FILES = [
    ("optim: {lr: fast}", r"optim.lr \('fast'\): give a number"),
    ("optim: {learning_rate: 1}", r"unknown key optim.learning_rate; "),
    ("optin: {lr: 1}", r"unknown key optin; did you mean 'optim'\?$"),
    ("trian: {epochs: 3}", r"unknown key trian; did you mean 'train'\?$"),
    ("optim:\n\tlr: 1", r"^--config \S*a.yaml is not valid YAML: line 2 is indented by a t[^<]*s$"),
    ("optim: {lr: 0,003}", r"^optim has the number 3 for a key; decimals are written with a point"),
    ("optim: {betas: [0.9, 0.99], lr: '0,003'}", r"optim.lr .*give a number; decimals are written"),
    ("model: {drop_path: 0.1}", r"unknown key model.drop_path; did you mean .*drop_path_rate"),
    ("optim: 3", r"optim \(3\)"),
    ("[1, 2]", r"holds a list; write sections of keys"),
    ("optim: {lr: 1", r"YAML: expected ',' or '}', but got '<stream end>' in line 1, column 14 "),
    ("distill: {teacher: a, losses: [{weight: 2}]}", r"distill.losses.0.name is missing"),
    (
        "optim: {lr: 1}\ntrain: {epochs: 1}\noptim: {name: sgd}",
        r"a.yaml: optim is set in line 1 and again in line 3; keep one of them",
    ),
    ("optim:\n  lr: 1\n  momentum: 0\n  lr: 2", r"optim.lr is set in line 2 and again in line 4"),
    (
        "distill:\n  losses:\n  - {name: kd, args: {a: 1, a: 2}}",
        r"distill.losses.0.args.a is set in line 3",
    ),
    ("optim.lr: 0.1", r"unknown key optim.lr; write it as optim: \{lr: VALUE\}"),
    (
        "distill: {teachers: [{lable_map: x}]}",
        r"unknown key distill.teachers.0.lable_map; did you mean 'label_map'",
    ),
    ("distill: {losses: [{nam: x}]}", r"unknown key distill.losses.0.nam; did you mean 'name'"),
    ("model: 3", r"model \(3\): write keys and values, as \{name: value\}"),
    ("optim: {betas: 0.9}", r"optim.betas \(0.9\): write a list, as \[a, b\]"),
    ("optim: {args: 3}", r"optim.args \(3\): write a mapping, as \{name: value\}"),
    ("run: {experiment: 3}", r"run.experiment \(3\): give a word"),
    ("train: {stall_timeout_s: .inf}", r"train.stall_timeout_s \(inf\): give a finite number"),
    ("runtime: {overlap: maybe}", r"runtime.overlap \('maybe'\): give true or false"),
]


@pytest.mark.parametrize(("text", "message"), FILES)
def test_an_invalid_file_is_refused_in_one_sentence(tmp_path, text, message):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load("--config", str(path))
    assert "\n" not in str(caught.value)


def test_an_empty_file_gives_the_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    config = load("--config", str(path))
    assert config.optim == load().optim
    assert config.run.experiment == "empty"


@pytest.mark.parametrize(
    ("flag", "key", "value"),
    [
        ("--model.args={depth: 1}", "model.args", {"depth": 1}),
        ('--model.args={"depth": 1}', "model.args", {"depth": 1}),
        ("--model.skip_patches=[gelu, linear]", "model.skip_patches", ["gelu", "linear"]),
        ("--optim.betas=[0.9, 0.99]", "optim.betas", (0.9, 0.99)),
        ("--optim.betas=0.9,0.99", "optim.betas", (0.9, 0.99)),
    ],
)
def test_lists_and_mappings_are_written_as_in_yaml(flag, key, value):
    assert get(load(flag), key) == value
    assert get(load(*flag.split("=", 1)), key) == value


def test_a_list_of_mappings_on_the_command_line_is_read():
    terms = load(
        "--distill.losses=[{name: kd, weight: 0.5}]", "--distill.teacher=vit"
    ).distill.losses
    assert [(term.name, term.weight) for term in terms] == [("kd", 0.5)]


@pytest.mark.parametrize(
    "flag", ["--model.args={depth: 1", "--model.args=3", "--optim.betas=[", "--model.args=[1]"]
)
def test_a_value_other_than_a_list_or_mapping_is_refused_with_its_key(flag):
    with pytest.raises(UserError, match=rf"{flag[2:].partition('=')[0]}.* mapping"):
        load(flag)


def test_a_file_that_is_not_utf8_is_refused_with_the_line(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes("optim: {lr: 1}\n# d\u00e9j\u00e0 vu\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"byte 0xe9 in line 2 is not UTF-8; save the file"):
        load("--config", str(path))


def test_a_config_name_unusable_as_a_directory_is_refused(tmp_path):
    path = write_yaml(tmp_path / "my run.yaml")
    with pytest.raises(UserError, match=r"the config's file name \('my run'\) .*--run.experiment"):
        load_config(["--config", str(path)])
    assert load_config(["--config", str(path), "--run.experiment=a"]).run.experiment == "a"


def test_an_empty_command_line_points_to_help():
    with pytest.raises(UserError, match=r"--config configs/NAME.yaml, --help lists all keys"):
        load_config([])


NONE_WORDS = ["none", "null", "~", "None", ""]


@pytest.mark.parametrize("word", NONE_WORDS)
@pytest.mark.parametrize("form", ["equals", "space"])
def test_an_optional_key_is_reset_to_none(tmp_path, word, form):
    path = write_yaml(
        tmp_path / "a.yaml",
        optim={"max_grad_norm": 1.0, "betas": [0.9, 0.99], "decay_epochs": [3]},
        model={"args": {"patch_size": 4}, "image_size": 8},
    )
    keys = ("clip_grad", "optim.betas", "model.image_size", "model.args", "optim.decay_epochs")
    flags = [[f"--{key}={word}"] if form == "equals" else [f"--{key}", word] for key in keys]
    config = load_config(["--config", str(path), *(token for pair in flags for token in pair)])
    assert (config.optim.max_grad_norm, config.optim.betas, config.model.image_size) == (None,) * 3
    assert (config.model.args, config.optim.decay_epochs) == ({}, ())


def test_help_explains_how_to_set_a_key_to_none(help_run):
    assert "none, null, ~ or nothing (--a.b=) sets an optional key" in help_run.stdout


def test_an_empty_string_stays_empty():
    assert load("--run.resume=").run.resume == ""
    assert load("--data.test_split=none").data.test_split == "none"


@pytest.mark.parametrize(
    ("flag", "key", "value"),
    [
        ("--weight-decay", "optim.weight_decay", "0.25"),
        ("--warmup-epochs", "optim.warmup_epochs", "1.5"),
        ("--clip-grad", "optim.max_grad_norm", "2.0"),
        ("--model-ema", "train.ema", "True"),
        ("--output-dir", "run.output_dir", "x"),
        ("--optim.warmup-lr", "optim.warmup_lr", "0.5"),
    ],
)
def test_dashes_are_read_as_underscores(flag, key, value):
    assert str(get(load(f"{flag}={value}"), key)) == value
    assert str(get(load(flag, value), key)) == value


@pytest.mark.parametrize(
    "flags", [("--model.args", "depth=2"), ("--model.args.depth=2",), ("--model.args.depth", "2")]
)
def test_a_single_entry_of_a_mapping_can_be_set(tmp_path, flags):
    path = write_yaml(tmp_path / "a.yaml", model={"args": {"patch_size": 4}})
    config = load_config(["--config", str(path), *flags])
    assert config.model.args == {"patch_size": 4, "depth": 2}


def test_no_program_bypasses_the_checks_of_a_configuration():
    """`model_copy` and `model_construct` take any value: `change` validates."""
    files = list_sources(ROOT)
    found = [path for path in files if re.search(r"model_(copy|construct)\(", path.read_text())]
    assert len(files) > 100
    assert [str(path) for path in found if "tests" not in path.relative_to(ROOT).parts] == []


def test_a_changed_configuration_is_checked_again():
    config = load("--model.args={depth: 2}")
    changed = change(config, model={"args": {"width": 1}}, run={"run_id": "a"})
    assert (changed.model.args, changed.run.run_id) == ({"width": 1}, "a")
    assert changed.optim == config.optim
    with pytest.raises(UserError, match=r"train.epochs \(0\): it must be at least 1"):
        change(config, train={"epochs": 0})
    with pytest.raises(UserError, match=r"distill.loss is set but"):
        change(config, distill={"loss": "kd"})
