"""Every YAML below configs/ loads, passes all checks and states its purpose."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from job.check import check
from service.places import list_configs
from tests.support.documented_commands import Places, need_device, place_flag, run_dry
from utils.config.load import RunConfig, change, dump_config, load_config

ROOT = Path(__file__).resolve().parents[1]
# Without presets, which tests/utils/test_layers.py has, and programs: tests/test_train_programs.py.
CONFIGS = sorted(ROOT / path for path in list_configs(ROOT))
TEACHERS = (
    "runs/digits_teacher/",
    "runs/transformer_teacher/",
    "runs/friedman1_teacher/",
    "runs/delta_text/",
)
IDS = [path.relative_to(ROOT / "configs").as_posix() for path in CONFIGS]


def get_header(path: Path) -> dict[str, str]:
    """`# key: value` lines at the top."""
    header = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        found = re.match(r"# (\w+): +(.+)", line)
        if found:
            header[found[1]] = found[2]
    return header


def get_flags(path: Path) -> list[str]:
    """The flags of the header's command, without what only its own machine holds.

    Weights that the reader must fetch are left out: the teacher's name then stands alone.
    """
    tokens = shlex.split(get_header(path)["command"])[2:]
    if "--teacher_path" in tokens:
        place = tokens.index("--teacher_path")
        if not tokens[place + 1].startswith(TEACHERS):
            del tokens[place : place + 2]
    return tokens


def load_on_digits(flags: list[str], digits_root: Path, output_dir: Path) -> RunConfig:
    """A configuration with its dataset replaced by the digits, if it is another one."""
    config = load_config([*flags, f"--run.output_dir={output_dir}"])
    changes = {"root": str(digits_root)}
    if config.data.name != "digits":
        changes |= {"name": "digits", "train_split": "train", "eval_split": "validation"}
        changes |= {"label_key": "label", "image_key": "image", "global_batch_size": 1024}
        changes["test_split"] = "test" if config.data.test_split else ""
    if config.data.source != "tfds":
        return config
    if config.train.steps is None:  # so few examples leave no room for a warm-up in steps
        config = change(config, optim={"warmup_steps": None})
    return change(config, data=changes)


@pytest.fixture
def places(digits_root, teacher_run, digits_teacher, text_root, rows_teacher, tmp_path) -> Places:
    return Places(digits_root, teacher_run, digits_teacher, text_root, rows_teacher, tmp_path)


def test_there_are_configurations():
    assert {"digits_teacher.yaml", "digits_student.yaml", "digits_kd.yaml"} <= set(IDS)


@pytest.mark.parametrize("path", CONFIGS, ids=IDS)
def test_a_configuration_loads_and_passes_all_checks(path, digits_root, places, tmp_path):
    flags = [place_flag(flag, places) for flag in get_flags(path)]
    config = load_on_digits(flags, digits_root, tmp_path / "runs")
    if config.data.source == "tokens":
        config = change(config, data={"root": str(places.text)})
    need_device(config)
    job = check(config)
    if job.config.train.task == "classify":
        assert job.facts.num_classes >= 10
    assert job.facts.model_arguments and job.total_steps > 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("path", CONFIGS, ids=IDS)
def test_a_configuration_reads_back_equal_after_it_is_resolved(path, tmp_path):
    config = load_config(get_flags(path))
    resolved = tmp_path / "config_resolved.yaml"
    resolved.write_text(dump_config(config))
    assert load_config(["--config", str(resolved)]) == config


@pytest.mark.parametrize("path", CONFIGS, ids=IDS)
def test_a_header_has_command_hardware_time_and_expected_result(path):
    header = get_header(path)
    assert {"command", "hardware", "dataset", "expected"} <= header.keys()
    measured = re.search(r"\d+ (s|min|minutes|h|hours)\b", header["hardware"])
    assert measured or "not measured" in header["hardware"]
    assert path.relative_to(ROOT).as_posix() in header["command"]


@pytest.mark.parametrize("path", CONFIGS, ids=IDS)
def test_the_commands_of_a_header_work(path, places):
    header = get_header(path)
    if load_config(get_flags(path)).data.name == "digits":
        assert run_dry(header["command"], places)
        assert run_dry(header["dataset"], places)
    else:
        assert re.match(r"(bash run_commands.sh train|python main.py --config) ", header["command"])
