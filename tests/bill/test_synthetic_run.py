"""The synthetic run of each task; unknown sizes are refused in one sentence."""

from __future__ import annotations

import pytest

from bill import compile_for_tpu, step_report
from bill.step.synthetic_run import create_synthetic_run, get_default_sizes
from tasks import TASKS
from tasks.protocol import RunTask
from tests.support.tiny_parts import create_config
from utils.errors import UserError
from utils.registry import Registry, load_object


def test_sizes_of_a_missing_dataset_are_given_by_name(tmp_path):
    pp = "--data.train_pp=decode|resize(8)|value_range(-1, 1)"
    config = create_config(tmp_path, "--data.source=folder", f"--data.root={tmp_path}", pp)
    made = create_synthetic_run(config, {"num_classes": 7}).replace_data(9, tmp_path)
    assert "num_classes=7" in made.data.name
    with pytest.raises(UserError, match=r"--assume vocab_size is not a size .*: num_classes"):
        create_synthetic_run(config, {"vocab_size": 7})


def test_a_task_without_synthetic_data_is_refused_with_input_real(tmp_path, monkeypatch):
    config = create_config(tmp_path)
    tasks = Registry("train.task")
    tasks.register("classify")(type("Plain", (RunTask,), {}))
    monkeypatch.setattr("bill.step.synthetic_run.TASKS", tasks)
    assert dict(get_default_sizes(config)) == {}
    with pytest.raises(UserError, match=r"train.task=classify makes up no data; .*--input real"):
        create_synthetic_run(config, {})


@pytest.mark.parametrize("name", list(TASKS))
def test_every_built_in_task_has_a_synthetic_run(name):
    assert isinstance(load_object(TASKS.get(name).synthetic), type)


@pytest.mark.parametrize("text", ["num_classes", "num_classes=0", "num_classes=x"])
def test_an_assumption_must_be_a_name_and_a_number(text):
    argv = ["--config", "configs/tpu_step.yaml", "--assume", text]
    options = compile_for_tpu.main.parse(argv)
    with pytest.raises(UserError, match="must be NAME=NUMBER"):
        step_report._read_sizes(options)
