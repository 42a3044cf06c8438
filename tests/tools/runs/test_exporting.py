"""`export` and `validate`: exit codes, modes, and runs that are moved away."""

from __future__ import annotations

import json

import pytest
import torch

from store.record.artifacts import publish_artifacts
from utils.checkpoint.files import write_checkpoint
from utils.storage.places import open_folder


def test_runs_are_exported_and_validated(ask, root, tmp_path):
    out = tmp_path / "tables"
    code, said, error = ask(
        "export", "--filter", "status=complete", "--out", str(out), "--format", "csv"
    )
    assert (code, error) == (0, "") and "3 rows" in said
    assert sorted(path.name for path in out.iterdir()) == [
        "manifest.json",
        "metrics.csv",
        "runs.csv",
    ]
    assert "not complete" not in said and ask("validate", str(out))[0] == 0
    live = tmp_path / "live"
    said = ask("export", "digits/live", "run0", "--out", str(live), "--format", "csv")[1]
    assert "not complete, exported as of now: digits/live\n" in said
    assert json.loads((live / "manifest.json").read_text())["unfinished"] == ["digits/live"]
    assert ask("validate", str(live))[0] == 0
    (out / "runs.csv").write_text("path\n")
    code, said, _ = ask("validate", str(out), "--json")
    assert code == 1 and json.loads(said)["runs"][0]["faults"][0]["file"] == "runs.csv"


def test_validation_modes_decide_what_counts(ask, root):
    assert ask("validate")[0] == 0
    with (root / "digits" / "live" / "metrics.jsonl").open("a") as file:
        file.write("{")
    modes = {"--lenient": 0, "--strict": 1}
    for mode, code in modes.items():
        assert ask("validate", mode)[0] == code
    code, out, _ = ask("validate")
    assert code == 0 and "its last line is torn" in out and "bad: 0" in out


def test_a_run_without_run_json_is_found(ask, root):
    (root / "digits" / "run0" / "run.json").unlink()
    (root / "digits" / "empty").mkdir()
    code, out, _ = ask("validate", "--json")
    told = json.loads(out)
    assert code == 1 and [row["path"].rpartition("/")[2] for row in told["runs"]] == ["run0"]
    assert told["runs"][0]["faults"][0]["file"] == "run.json"


def test_bad_runs_are_moved_and_others_stay(ask, root, tmp_path):
    folder = root / "digits" / "run1"
    publish_artifacts(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "kind": "train"}\n')
    (root / "digits" / "run0" / "run.json").write_text('{"status": "comp')
    quarantine = tmp_path / "bad"
    code, out, _ = ask("validate", "--quarantine", str(quarantine))
    assert code == 1 and "bad: 2" in out
    assert sorted(path.name for path in (quarantine / "digits").iterdir()) == ["run0", "run1"]
    assert ask("validate")[0] == 0
    assert json.loads(ask("list", "--json")[1])["matched"] == 2


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["export", "--out", "{tmp}/x"], "one of them"),
        (["export", "run0"], "--out"),
        (["export", "run9", "--out", "{tmp}/x"], "RUN 'run9'"),
        (["export", "run0", "--out", "{tmp}"], "exists; give"),
        (["export", "run0", "--out", "/proc/x"], "cannot be created"),
        (["export", "run0", "--filter", "path", "--out", "{tmp}/x"], "one of them"),
        (["export", "run0", "--out", "{tmp}/x", "--format", "xml"], "invalid choice"),
        (["validate", "--strict", "--lenient"], "not allowed with"),
        (["validate", "rn"], "RUN 'rn'"),
    ],
)
def test_wrong_use_gives_one_line_and_code_2(ask, tmp_path, flags, word):
    code, out, error = ask(*(flag.format(tmp=tmp_path) for flag in flags))
    assert (code, out) == (2, "")
    assert word in error and error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_strict_reads_every_tensor_of_the_checkpoints(ask, root):
    for step in (3, 6):
        folder = open_folder(root / "digits" / "run0" / "checkpoints" / f"step_{step:08d}")
        facts = {"step": step, "optimizer": {}}
        write_checkpoint(folder, {"model": {"weight": torch.arange(600.0)}}, facts)
    best = root / "digits" / "run0" / "checkpoints" / "best.json"
    best.write_text('{"step": 3}')
    assert ask("validate", "run0", "--strict")[0] == 0
    path = root / "digits" / "run0" / "checkpoints" / "step_00000003" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert ask("validate", "run0")[0] == 0
    code, out, _ = ask("validate", "run0", "--strict", "--json")
    (fault,) = json.loads(out)["runs"][0]["faults"]
    assert code == 1 and fault["grade"] == "damage" and fault["file"] == "checkpoints/step_00000003"
    path.write_bytes(path.read_bytes()[:-1])
    assert ask("validate", "run0")[0] == 1  # a cut is seen without reading a tensor
    best.write_text('{"step": 4}')
    code, out, _ = ask("validate", "run0", "--strict", "--json")
    files = [one["file"] for one in json.loads(out)["runs"][0]["faults"]]
    assert files == ["checkpoints/best.json", "checkpoints/step_00000003"]
