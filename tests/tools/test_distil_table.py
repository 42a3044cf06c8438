"""The table of students of text: trained here on small texts, and formatted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import distil_table
from tools.distil_table import BEGIN, END, TextOutcome, format_table
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--train.steps=3", "--runtime.device=cpu", "--runtime.num_threads=1", "--optim.warmup_steps=1",
    "--data.global_batch_size=4", "--data.eval_batch_size=4", "--data.sequence_length=32",
    "--distill.allow_weak_teacher",
)  # fmt: skip


def test_students_alone_and_taught_stand_side_by_side_in_the_document(tmp_path, text_root, capsys):
    docs = tmp_path / "docs.md"
    docs.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    argv = [
        "--config", str(ROOT / "configs/transformer_distil.yaml"), "--losses", "kd",
        "--seeds", "0", "1", "--docs", str(docs), f"--teacher_path={text_root}",
        f"--data.root={text_root}", f"--run.output_dir={tmp_path}", *FLAGS,
    ]  # fmt: skip
    assert distil_table.main(argv) == 0
    text = docs.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    alone, taught = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    assert (alone[1].strip(), taught[1].strip()) == ("`alone`", "`kd`")
    assert alone[2] != alone[3] and alone[2] != taught[2]
    times = [path.stat().st_mtime_ns for path in tmp_path.rglob("student.safetensors")]
    assert len(times) == 4
    assert distil_table.main(argv) == 0
    assert [path.stat().st_mtime_ns for path in tmp_path.rglob("student.safetensors")] == times
    docs.write_text("no marks")
    assert distil_table.main(argv) == 2
    assert "lacks the lines" in capsys.readouterr().err


def test_a_gain_is_counted_seed_by_seed():
    outcomes = [
        TextOutcome("alone", 0, 3.0, 2.0, 5.0), TextOutcome("kd", 0, 2.5, 1.7, 9.0),
        TextOutcome("alone", 1, 3.2, 2.2, 5.0), TextOutcome("kd", 1, 3.3, 2.3, 9.0),
    ]  # fmt: skip
    *_, alone, taught = format_table(outcomes, [0, 1]).splitlines()
    assert alone == "| `alone` | 3.0000 | 3.2000 | 3.1000 | 0.1414 |  |  | 2.1000 | 5 |"
    assert taught == "| `kd` | 2.5000 | 3.3000 | 2.9000 | 0.5657 | +0.2000 | 1 of 2 | 2.0000 | 9 |"


def test_a_run_without_text_is_refused(tmp_path):
    flags = [
        "--train.task=language", "--data.source=sequences", "--data.name=copy,num_examples=16",
        "--data.sequence_length=8", "--model=transformer", f"--run.output_dir={tmp_path}",
        '--model.args={"depth": 1, "width": 8, "heads": 2}', *FLAGS[:6],
    ]  # fmt: skip
    config = tmp_path / "config.yaml"
    config.write_text("train:\n  task: language\n")
    with pytest.raises(UserError, match="gives no bits a byte of a test split"):
        distil_table.train("alone", 0, str(config), flags)
