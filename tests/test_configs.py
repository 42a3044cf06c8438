"""Every YAML below configs/ loads, passes all checks and says what it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from preflight import check
from tests.documented_commands import Places, run_dry
from utils.config import dump_config, load_config

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
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


def load_on_digits(path: Path, digits_root: Path, output_dir: Path):
    """The configuration with its dataset replaced by the digits, if it is a TFDS one."""
    config = load_config(["--config", str(path), f"--run.output_dir={output_dir}"])
    changes = {"name": "digits", "root": str(digits_root), "train_split": "train"}
    changes |= {"eval_split": "validation", "label_key": "label", "image_key": "image"}
    if config.data.test_split:
        changes["test_split"] = "test"
    size = min(config.data.global_batch_size, 1024)
    data = config.data.model_copy(update={**changes, "global_batch_size": size})
    return config if data.source != "tfds" else config.model_copy(update={"data": data})


def test_there_are_configurations():
    assert {"digits_teacher.yaml", "digits_student.yaml", "digits_kd.yaml"} <= set(IDS)


@pytest.mark.parametrize("path", CONFIGS, ids=IDS)
def test_a_configuration_loads_and_passes_all_checks(path, digits_root, tmp_path):
    config = load_on_digits(path, digits_root, tmp_path / "runs")
    task = check(config)
    assert task.num_classes >= 10
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("path", CONFIGS, ids=IDS)
def test_a_configuration_reads_back_equal_after_it_is_resolved(path, tmp_path):
    config = load_config(["--config", str(path)])
    resolved = tmp_path / "config_resolved.yaml"
    resolved.write_text(dump_config(config))
    assert load_config(["--config", str(resolved)]) == config


@pytest.mark.parametrize("path", CONFIGS, ids=IDS)
def test_a_header_says_command_hardware_time_and_expected_result(path):
    header = get_header(path)
    assert {"command", "hardware", "dataset", "expected"} <= header.keys()
    assert re.search(r"\d+ ?(s|min|minutes|h|hours)\b", " ".join(header.values()))
    assert path.relative_to(ROOT).as_posix() in header["command"]


@pytest.mark.parametrize("path", CONFIGS, ids=IDS)
def test_the_command_of_a_header_works(path, digits_root, teacher_run, tmp_path):
    header = get_header(path)
    if load_config(["--config", str(path)]).data.name == "digits":
        places = Places(digits_root, teacher_run, tmp_path)
        assert run_dry(header["command"], places)
        assert run_dry(header["dataset"], places)
    else:
        assert re.match(r"(bash run_commands.sh train|python main.py --config) ", header["command"])
