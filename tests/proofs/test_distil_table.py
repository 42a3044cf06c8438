"""The table of students of text: trained here on small texts, and formatted."""

from __future__ import annotations

from pathlib import Path

from lab.marked_tables import get_marks
from proofs.study.frame import StudyOutcome
from proofs.tables import distil_table
from proofs.tables.distil_table import DistilTable

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--train.steps=3",
    "--runtime.device=cpu",
    "--runtime.num_threads=1",
    "--optim.warmup_steps=1",
    "--data.global_batch_size=4",
    "--data.eval_batch_size=4",
    "--data.sequence_length=32",
    "--distill.allow_weak_teacher",
)


def test_the_document_shows_students_with_and_without_a_teacher(tmp_path, text_root, capsys):
    docs = tmp_path / "docs.md"
    begin, end = get_marks("distil_table")
    docs.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    argv = [
        "--config",
        str(ROOT / "configs/transformer_distil.yaml"),
        "--losses",
        "kd",
        "--seeds",
        "0",
        "1",
        "--docs",
        str(docs),
        f"--teacher_path={text_root}",
        f"--data.root={text_root}",
        f"--run.output_dir={tmp_path}",
        *FLAGS,
    ]
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
        StudyOutcome(row, seed, {"test_bits_per_byte": score, "test_loss": loss}, seconds)
        for row, seed, score, loss, seconds in (
            ("alone", 0, 3.0, 2.0, 5.0),
            ("kd", 0, 2.5, 1.7, 9.0),
            ("alone", 1, 3.2, 2.2, 5.0),
            ("kd", 1, 3.3, 2.3, 9.0),
        )
    ]
    *_, alone, taught = DistilTable.format(outcomes).splitlines()
    assert alone == "| `alone` | 3.0000 | 3.2000 | 3.1000 | 0.1414 |  |  | 2.1000 | 5 |"
    assert taught == "| `kd` | 2.5000 | 3.3000 | 2.9000 | 0.5657 | +0.2000 | 1 of 2 | 2.0000 | 9 |"


def test_runs_without_bits_per_byte_are_refused_before_they_start(tmp_path, text_root, capsys):
    copied = (
        "--train.task=language",
        "--data.source=sequences",
        "--data.name=copy,num_examples=16",
        "--data.sequence_length=8",
        "--model=transformer",
        "--data.test_split=test",
        '--model.args={"depth": 1, "width": 8, "heads": 2}',
        *FLAGS[:5],
    )
    (tmp_path / "config.yaml").write_text("train:\n  task: language\n")
    text = str(ROOT / "configs/transformer_distil.yaml")
    for config, flags in (
        (str(tmp_path / "config.yaml"), copied),
        (text, (f"--data.root={text_root}", "--data.test_split=")),
        (str(ROOT / "configs/digits_kd.yaml"), ("--teacher_path=x",)),
    ):
        argv = ["--config", config, *flags, "--losses", f"--run.output_dir={tmp_path / 'runs'}"]
        assert distil_table.main(argv) == 2
        assert "gives no bits a byte of a test split" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
