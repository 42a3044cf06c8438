"""The proof that a refactoring changed nothing: which differences count."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from proofs.refactoring import (
    CASES,
    RECORD_FILE,
    compare,
    hash_tensors,
    main,
    normalise,
    read_record,
)
from utils.errors import UserError

LINE = {"step": 4, "task": 1.5, "total": 2.0, "img_per_s": 9.0, "graphs": 3, "attempt": 1}


def test_lines_of_old_and_new_runs_are_normalised_before_comparison():
    new = {"step": 4, "kind": "train", "loss/task": 1.5, "loss/total": 2.0, "img_per_s": 7.0}
    assert normalise(LINE) == normalise({**new, "graphs": 3, "attempt": 2})
    assert normalise(LINE) == {
        "step": 4,
        "kind": "train",
        "loss/task": 1.5,
        "loss/total": 2.0,
        "graphs": 3,
    }
    old = {"step": 8, "eval_top1": 50.0, "eval_loss": 1.0, "graphs_eval": 2}
    assert normalise(old) == normalise(
        {"step": 8, "kind": "eval", "top1": 50.0, "loss": 1.0, "graphs_eval": 2}
    )


@pytest.mark.parametrize("planted", ["bit", "line", "graph", "tensor"])
def test_one_bit_of_difference_is_found(tmp_path, planted):
    found = {}
    for tree in ("before", "now"):
        value = np.ones(3, np.float32)
        line = dict(LINE)
        if tree == "now" and planted == "tensor":
            value[1] = np.nextafter(value[1], 2)
        if tree == "now" and planted == "bit":
            line["task"] = float(np.nextafter(1.5, 2))
        if tree == "now" and planted == "graph":
            line["graphs"] = 4
        folder = tmp_path / tree / "checkpoints"
        folder.mkdir(parents=True)
        save_file({"a": value}, folder / "model.safetensors")
        lines = [normalise(json.loads(json.dumps(line)))]
        found[tree] = {"lines": lines, "tensors": hash_tensors(tmp_path / tree)}
    if planted == "line":
        found["now"]["lines"] = []
    assert compare(found["before"], found["before"]) == []
    assert len(compare(found["before"], found["now"])) == 1


def test_an_unknown_revision_gives_a_one_line_error(capsys):
    assert main(["--before", "no-such-revision"]) == 2
    assert "--before ('no-such-revision')" in capsys.readouterr().err


def test_a_record_is_compared_by_its_cases(tmp_path):
    found = {"lines": [normalise(LINE)], "tensors": {"a": "0"}}
    (tmp_path / RECORD_FILE).write_text(json.dumps({"teacher": found}))
    known = read_record(tmp_path, ["teacher"])
    assert compare(known["teacher"], found) == []
    with pytest.raises(UserError, match=r"lacks \['kd'\]"):
        read_record(tmp_path, ["teacher", "kd"])


def test_a_record_is_not_overwritten(tmp_path, capsys):
    (tmp_path / RECORD_FILE).write_text("{}")
    assert main(["--record", str(tmp_path)]) == 2
    assert "holds a record; name a new folder" in capsys.readouterr().err
    assert main(["--against", str(tmp_path / "none")]) == 2
    assert "no record: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["teacher", "kd", "language", "regression", "label_free", "delta"])
def test_each_kind_of_run_is_proven_on_every_device(name):
    flags = {device: CASES[f"{name}{device}"].flags for device in ("", "_xla", "_mesh")}
    assert len({tuple(f for f in one if "--runtime" not in f) for one in flags.values()}) == 1
    assert dict(CASES[f"{name}_mesh"].environment) == {"CPU_NUM_DEVICES": "4"}
