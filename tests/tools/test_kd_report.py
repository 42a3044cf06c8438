"""What the report shows of runs, and where a table goes in a document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.marked_tables import get_marks, write_between
from tools import kd_report
from utils.errors import EXIT_USER_ERROR, UserError


def write_run(folder: Path, top1: float, teachers: list[dict], **changes: object) -> Path:
    """The files that a report reads of a run."""
    folder.mkdir(parents=True)
    final = {"eval_top1": top1, "eval_ece": 0.05, "test_top1": top1 - 1}
    if teachers:
        final["agreement"] = 90.0
    facts = {"status": "complete", "teachers": teachers, "final": final, **changes}
    (folder / "run.json").write_text(json.dumps(facts))
    lines = [
        {
            "step": step,
            "kind": "train",
            "loss/task": 2.0 / step,
            "loss/kd": 1.0 / step,
            "loss/total": 1.5 / step,
            "lr": 0.1,
            "tokens_per_s": 1.0,
        }
        for step in (1, 2, 3)
    ]
    lines.append({"step": 3, "kind": "eval", "top1": top1, "loss": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path) -> dict[str, Path]:
    teacher = {"top1": 96.0, "ece": 0.1}
    return {
        "alone": write_run(tmp_path / "digits" / "alone", 90.0, []),
        "taught": write_run(tmp_path / "digits" / "taught", 93.0, [teacher]),
        "two": write_run(tmp_path / "digits" / "two", 96.0, [teacher, {"top1": 80.0, "ece": 0.2}]),
    }


def test_a_report_shows_the_closed_share_of_the_gap(runs, tmp_path, capsys):
    out = tmp_path / "report"
    flags = [str(runs["taught"]), str(runs["two"]), "--student-alone", str(runs["alone"])]
    assert kd_report.main([*flags, "--out", str(out)]) == 0
    first, second = json.loads((out / "kd_report.json").read_text())
    assert first["gap_closed"] == pytest.approx(0.5)
    assert second["gap_closed"] == pytest.approx(1.0)
    assert (first["student"], first["teacher"], first["alone"]) == (93.0, 96.0, 90.0)
    assert second["teacher_2"] == 80.0
    assert (out / "kd_report.png").read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    assert "digits/taught" in printed
    assert "0.50" in printed


def test_a_report_without_an_undistilled_student_has_no_gap(runs, tmp_path, capsys):
    assert kd_report.main([str(runs["taught"]), "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "kd_report.json").read_text())
    assert row["gap_closed"] is None
    assert "-" in capsys.readouterr().out


def test_there_is_no_gap_if_the_teacher_is_worse_than_the_student(runs):
    row = kd_report.read_run(runs["taught"])
    assert kd_report.add_gap(row, 97.0)["gap_closed"] is None
    assert kd_report.add_gap(kd_report.read_run(runs["alone"]), 90.0)["gap_closed"] is None


def test_the_terms_over_time_are_the_parts_of_the_loss(runs):
    terms = kd_report.read_terms(runs["taught"])
    assert list(terms) == ["kd", "task", "total"]
    assert terms["kd"] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]


def test_an_unfinished_run_is_refused(tmp_path, capsys):
    folder = write_run(tmp_path / "digits" / "open", 90.0, [], status="running")
    assert kd_report.main([str(folder), "--out", str(tmp_path)]) == EXIT_USER_ERROR
    assert "no finished run (running)" in capsys.readouterr().err
    assert kd_report.main([str(tmp_path / "none"), "--out", str(tmp_path)]) == EXIT_USER_ERROR


@pytest.mark.parametrize("name", ["kd_table", "distil_table"])
def test_a_table_is_written_only_between_its_markers(name, tmp_path):
    path, (begin, end) = tmp_path / "page.md", get_marks(name)
    path.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    write_between(path, name, "new")
    assert path.read_text() == f"before\n{begin}\nnew\n{end}\nafter\n"
    path.write_text("no marks")
    with pytest.raises(UserError, match="lacks the lines"):
        write_between(path, name, "new")
