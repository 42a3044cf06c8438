"""Files that extend each other, presets, precedence, and the origin of values."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

import main
from job.check import check
from service.places import list_configs
from tests.support.child_runs import ROOT, get_command, get_environment
from tests.support.tiny_parts import SYNTHETIC
from utils.config.keys import get_keys, iterate_keys
from utils.config.layers import PRESETS, list_presets
from utils.config.load import RunConfig, load_config

DATA = {"data": {"source": "synthetic"}}
CONFIGS = sorted(ROOT / path for path in list_configs(ROOT))


def write(path: Path, **sections: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(sections))
    return path


def load(path: Path, *flags: str) -> RunConfig:
    return load_config(["--config", str(path), *flags])


def show(capsys: pytest.CaptureFixture, *flags: str) -> dict[str, str]:
    """`section.key` -> origin, as --print-config shows it."""
    with pytest.raises(SystemExit) as end:
        load_config([*flags, "--print-config"])
    assert end.value.code == 0
    text, place, found = capsys.readouterr().out, [], {}
    for line in text.splitlines():
        head, _, origin = line.partition("  # ")
        depth = (len(head) - len(head.lstrip())) // 2
        place = [*place[:depth], head.strip().partition(":")[0]]
        if origin:
            found[".".join(place)] = origin
    return found


@pytest.fixture
def chain(tmp_path) -> Path:
    """A file that extends two, the first of which extends one more in another folder."""
    write(
        tmp_path / "far" / "ground.yaml",
        **DATA,
        optim={"lr": 1.0, "momentum": 0.1, "betas": [0.1, 0.2]},
        model={"args": {"a": 1, "b": 1}},
    )
    write(
        tmp_path / "first.yaml",
        extends="far/ground.yaml",
        optim={"lr": 2.0, "momentum": 0.2},
        train={"seed": 2},
    )
    write(tmp_path / "second.yaml", optim={"lr": 3.0}, train={"seed": 3, "steps": 99})
    return write(
        tmp_path / "top.yaml",
        extends=["first.yaml", "second.yaml"],
        train={"steps": 77},
        model={"args": {"b": 2, "c": 3}},
    )


def test_the_stronger_layer_wins_key_by_key(chain):
    config = load(chain)
    assert (config.optim.lr, config.optim.momentum, config.optim.betas) == (3.0, 0.2, (0.1, 0.2))
    assert (config.train.seed, config.train.steps) == (3, 77)
    assert config.model.args == {"a": 1, "b": 2, "c": 3}
    assert config.optim.name == "adamw"
    assert config.run.experiment == "top"
    preset = load(chain, "--preset=quick_test")
    assert (preset.train.steps, preset.train.seed) == (20, 3)
    assert load(chain, "--preset", "quick_test", "--train.steps=5").train.steps == 5


def test_each_key_shows_its_origin(chain, capsys):
    found = show(
        capsys,
        "--config",
        str(chain),
        "--preset=quick_test",
        "--lr=0.5",
        "--seed=9",
        "--model.args.d=4",
    )
    folder = chain.parent
    assert found["optim.lr"] == found["train.seed"] == "command line"
    assert found["train.steps"] == "preset quick_test"
    assert found["optim.momentum"] == str(folder / "first.yaml")
    assert found["optim.betas"] == found["model.args.a"] == str(folder / "far" / "ground.yaml")
    assert found["model.args.b"] == str(folder / "top.yaml")
    assert found["model.args.d"] == "command line"
    assert found["optim.weight_decay"] == "default"
    assert found["run.experiment"] == "the config's file name and the preset"
    keys = {".".join(name.split(".")[:2]) for name in found}
    assert keys == set(iterate_keys())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_printed_configuration_loads_back_equal(path, tmp_path, capsys):
    text = path.read_text()
    taught = ["--teacher=resnet18"] if "distill:" in text and "teachers:" not in text else []
    flags = ["--config", str(path), "--preset=quick_test", "--seed=7", *taught]
    with pytest.raises(SystemExit):
        load_config([*flags, "--print-config"])
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load(printed) == load_config(flags)


def test_ambiguous_strings_load_back_as_strings(tmp_path, capsys):
    odd = (
        "--data.name=a: b # c, 'x' \"y\" é",
        "--run.output_dir=1e3",
        "--run.experiment=no",
        "--data.train_pp=" + "value_range(-1, 1)|" * 40,
    )
    with pytest.raises(SystemExit):
        load_config(["--data.source=synthetic", *odd, "--print-config"])
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load(printed) == load_config(["--data.source=synthetic", *odd])


def test_null_resets_a_list_or_mapping_of_a_lower_layer(chain, capsys):
    path = write(
        chain.parent / "reset.yaml",
        extends="top.yaml",
        model={"args": None},
        optim={"betas": None},
        train={"steps": None},
    )
    config = load(path)
    assert (config.model.args, config.optim.betas, config.train.steps) == ({}, None, None)
    assert show(capsys, "--config", str(path))["model.args"] == str(path)
    assert load(chain, "--model.args=", "--model.args.z=1").model.args == {"z": 1}
    assert show(capsys, "--config", str(chain), "--model.args=")["model.args"] == "command line"


def test_runs_with_a_preset_have_their_own_experiment(chain):
    assert load(chain, "--preset=production").run.experiment == "top_production"
    assert load(chain, "--preset=production", "--run.experiment=x").run.experiment == "x"
    assert load_config([*SYNTHETIC[:-1], "--preset=quick_test"]).run.experiment == (
        "vit_tiny_patch16_224_quick_test"
    )


@pytest.mark.parametrize("preset", list_presets())
def test_a_preset_sets_what_it_declares(preset):
    text = (PRESETS / f"{preset}.yaml").read_text()
    config = load(ROOT / "configs" / "smoke.yaml", f"--preset={preset}").model_dump()
    for section, values in yaml.safe_load(text).items():
        assert {key: config[section][key] for key in values} == values
        assert not any(get_keys()[f"{section}.{key}"].tasks for key in values)


TASKS_OF_TODAY = [
    SYNTHETIC[:-1],
    (
        "--train.task=regress",
        "--data.source=sklearn",
        "--data.name=diabetes",
        "--data.train_split=all[:80%]",
        "--data.eval_split=all[80%:]",
        "--model=mlp",
        "--batch_size=32",
    ),
    (
        "--train.task=language",
        "--data.source=sequences",
        "--data.sequence_length=16",
        "--data.name=copy,symbols=8,num_examples=2000,num_held_out=100",
        "--model=transformer",
        "--batch_size=32",
    ),
]


@pytest.mark.parametrize("flags", TASKS_OF_TODAY, ids=["classify", "regress", "language"])
def test_every_preset_accepts_every_task(flags, tmp_path):
    for preset in list_presets():
        words = [*flags, f"--preset={preset}", f"--run.output_dir={tmp_path}"]
        job = check(load_config([*words, "--runtime.device=cpu"]))
        assert (job.total_steps == 20) == (preset == "quick_test")


def test_all_presets_are_documented():
    assert list_presets() == ["development", "distributed", "production", "quick_test"]


WRONG = [
    ({}, ("--preset=quick",), "unknown --preset 'quick'; did you mean 'quick_test'?"),
    ({}, ("--preset=",), "known: development, distributed, production, quick_test"),
    ({}, ("--preset=a", "--preset=b"), "--preset is given twice"),
    ({}, ("--preset",), "--preset: expected one argument"),
    ({}, ("--presets=quick_test",), "unknown flag --presets; did you mean --preset"),
    ({}, ("--print-config", "--train.epoch=3"), "unknown flag --train.epoch; did you mean"),
    ({}, ("--print-config", "train.epochs"), "ignored explicit argument 'train.epochs'"),
    ({"extends": "no.yaml"}, (), "extends in HERE/a.yaml: HERE/no.yaml: No such file"),
    ({"extends": "a.yaml"}, (), "extends goes in a circle: HERE/a.yaml -> HERE/a.yaml; remove"),
    ({"extends": ["b.yaml"]}, (), "in a circle: HERE/a.yaml -> HERE/b.yaml -> HERE/a.yaml; remove"),
    ({"extends": "gone"}, ("--print-config",), "HERE/gone: No such file"),
    ({"extends": {"a": 1}}, (), "extends ({'a': 1}) must name files; write extends: base.yaml"),
    ({"extends": [3]}, (), "extends ([3]) must name files"),
    ({"extends": "."}, (), "Is a directory"),
    ({"extend": "b.yaml"}, (), "unknown key extend; did you mean 'extends'?"),
    ({"extends": "c.yaml"}, (), "unknown key train.epoch; did you mean 'train.epochs'"),
    ({"extends": "c.yaml"}, (), "(in HERE/c.yaml)"),
    ({"train": {"extends": "c.yaml"}}, (), "unknown key train.extends"),
]


@pytest.mark.parametrize(("sections", "flags", "words"), WRONG)
def test_invalid_layers_are_refused_in_one_line(sections, flags, words, tmp_path, capsys):
    write(tmp_path / "b.yaml", extends="a.yaml")
    write(tmp_path / "c.yaml", train={"epoch": 3})
    path = write(tmp_path / "a.yaml", **DATA, **sections)
    assert main.main(["--config", str(path), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words.replace("HERE", str(tmp_path)) in line


def test_a_file_may_be_extended_twice(tmp_path):
    write(tmp_path / "ground.yaml", **DATA, train={"steps": 5})
    for name in ("b", "c"):
        write(tmp_path / f"{name}.yaml", extends="ground.yaml", optim={"lr": 0.5})
    assert load(write(tmp_path / "a.yaml", extends=["b.yaml", "c.yaml"])).train.steps == 5


def test_printing_touches_no_device_and_no_framework():
    words = ["--config", "configs/smoke.yaml", "--preset=distributed", "--print-config"]
    code = (
        "import sys, main\n"
        f"try:\n    main.main({words!r})\n"
        "finally:\n    sys.stderr.write(' '.join(sys.modules))\n"
    )
    done = subprocess.run(
        [get_command(())[0], "-c", code],
        cwd=ROOT,
        env=get_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert not {"torch", "torch_xla", "tensorflow", "timm"} & set(done.stderr.split())
    assert yaml.safe_load(done.stdout)["runtime"]["cpu_processes"] == 4
