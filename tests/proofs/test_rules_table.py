"""The table of rules: trained here for a few steps, equal in size, and formatted."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.marked_tables import get_marks
from proofs.study.frame import StudyOutcome
from proofs.tables import rules_table
from proofs.tables.rules_table import ATTENTION, ROWS, RulesTable, count_parameters

ROOT = Path(__file__).resolve().parents[2]
RECALL = str(ROOT / "configs/delta_recall.yaml")
FLAGS = (
    "--train.steps=2",
    "--runtime.device=cpu",
    "--runtime.num_threads=1",
    "--optim.warmup_steps=1",
    "--data.name=recall,symbols=4,answers=1,num_examples=64,num_held_out=16",
    "--data.global_batch_size=4",
    "--data.eval_batch_size=8",
    "--data.sequence_length=16",
    "--run.tensorboard=false",
)


def test_all_rows_have_as_many_parameters():
    table = RulesTable(rules_table.main.parse(["--config", RECALL]))
    wanted = count_parameters(table.base)
    for row in ROWS:
        config = table.create_config(row, 0)
        assert count_parameters(config) == pytest.approx(wanted, rel=0.01), row
        own = {**table.base.model_dump(), "model": {}, "train": {}, "run": {}}
        assert own == {**config.model_dump(), "model": {}, "train": {}, "run": {}}


def test_rows_are_trained_once_and_written_into_the_document(tmp_path, capsys):
    docs = tmp_path / "docs.md"
    begin, end = get_marks("delta_recall")
    docs.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    argv = [
        "--config",
        RECALL,
        "--rows",
        "linear",
        "delta_net",
        "--seeds",
        "0",
        "1",
        "--docs",
        str(docs),
        f"--run.output_dir={tmp_path}",
        *FLAGS,
    ]
    assert rules_table.main(argv) == 0
    text = docs.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    assert [row[1].strip() for row in rows] == ["`linear`", "`delta_net`"]
    times = [path.stat().st_mtime_ns for path in tmp_path.rglob("student.safetensors")]
    assert len(times) == 4
    assert rules_table.main(argv) == 0
    assert [path.stat().st_mtime_ns for path in tmp_path.rglob("student.safetensors")] == times
    capsys.readouterr()
    assert rules_table.main(["--config", str(ROOT / "configs/smoke.yaml")]) == 2
    assert "must be a run of model.name=delta_rules" in capsys.readouterr().err


def test_text_is_compared_in_bits_per_byte():
    outcomes = [
        StudyOutcome(
            row, seed, {"parameters": size, "test_bits_per_byte": bits, "test_loss": loss}, s
        )
        for row, seed, size, bits, loss, s in (
            (ATTENTION, 0, 1000, 2.5, 1.7, 9.0),
            (ATTENTION, 1, 1000, 2.7, 1.9, 9.0),
            ("gated_delta_net", 0, 1001, 2.6, 1.8, 11.0),
        )
    ]
    *_, full, hybrid = RulesTable.format(outcomes).splitlines()
    assert full == "| `attention` | 1,000 | 2.5000 | 2.7000 | 2.6000 | 0.1414 | 1.8000 | 9 |"
    assert hybrid == "| `gated_delta_net` | 1,001 | 2.6000 | 2.6000 |  | 1.8000 | 11 |"
