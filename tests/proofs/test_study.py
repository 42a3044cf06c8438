"""Studies: what their files name, and what is refused before the first run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from lab.marked_tables import get_marks
from proofs.kd_table import __main__ as kd_table
from proofs.study import __main__ as study
from proofs.study import frame
from proofs.study.frame import StudyTable
from proofs.tables import (
    distil_table,
    labelfree_table,
    patches_table,
    regression_table,
    rules_table,
)
from proofs.tables.regression_table import RegressionTable
from tests.test_configs import get_header
from utils.config.load import load_config
from utils.programs import get_run_flags

ROOT = Path(__file__).resolve().parents[2]
RECALL = ["--config", str(ROOT / "configs/delta_recall.yaml")]
PATCHED = [
    "--config",
    str(ROOT / "configs/smoke.yaml"),
    "--runtime.device=xla",
    "--data.test_split=test",
]
TEXT = ["--config", str(ROOT / "configs/transformer_distil.yaml")]

STUDIES = sorted((ROOT / "proofs/studies").glob("*.yaml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_describes_itself_and_uses_its_tables_flags(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    header = get_header(path)
    assert header["command"] == f"python -m proofs.study proofs/studies/{path.name}"
    assert {"hardware", "time", "expected"} <= header.keys()
    tables = []
    for table in (StudyTable, RegressionTable):
        monkeypatch.setattr(table, "write", lambda table: tables.append(table))
    assert study.main([str(path)]) == 0
    (table,) = tables
    load_config([*get_run_flags(table.options), "--run.resume="])
    if path.stem in ("delta_recall", "delta_rewrite", "delta_copy"):  # others need their data
        assert table.create_config(table.options.rows[0], 3).train.seed == 3


def test_flags_of_the_command_line_replace_those_of_a_study(capsys):
    path = str(ROOT / "proofs/studies/delta_recall.yaml")
    assert study.main([path, "--seeds", "1", "1"]) == 2
    assert "--seeds contains duplicates" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        study.main([path, "--rows", "no"])


@pytest.mark.parametrize("text", ["", "- 1", "table: nowhere", "config: x", "a: [", None])
def test_a_file_other_than_a_study_is_refused_in_one_line(text, tmp_path, capsys):
    path = tmp_path / "study.yaml"
    if text is not None:
        path.write_text(text)
    assert study.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is not a study" in error


@pytest.fixture
def docs(tmp_path, monkeypatch) -> Path:
    """A document with markers of an unrelated table; no program may start."""
    for program, name in (
        (frame, "train"),
        (StudyTable, "write"),
        (RegressionTable, "write"),
        (kd_table, "fill_table"),
    ):
        monkeypatch.setattr(program, name, lambda *_: pytest.fail("began"))
    path = tmp_path / "page.md"
    path.write_text("\n".join(get_marks("other")))
    return path


def refuse(program: ModuleType, flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that a program ends with."""
    assert program.main(flags) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        (rules_table, RECALL),
        (patches_table, PATCHED),
        (distil_table, TEXT),
        (labelfree_table, []),
        (kd_table, ["--plan"]),
    ],
)
def test_a_document_without_a_place_for_the_table_is_refused(program, flags, docs, capsys):
    assert "lacks the lines" in refuse(program, [*flags, "--docs", str(docs)], capsys)
    docs.unlink()
    text = refuse(program, [*flags, "--docs", str(docs)], capsys)
    assert f"--docs ({str(docs)!r}) cannot be written into: No such file" in text


@pytest.mark.parametrize(
    ("program", "flags", "words"),
    [
        (rules_table, [*RECALL, "--rows", "linear", "linear"], "--rows contains duplicates"),
        (rules_table, [*RECALL, "--seeds", "0", "0"], "--seeds contains duplicates"),
        (patches_table, [*PATCHED, "--seeds", "1", "0", "1"], "--seeds contains duplicates"),
        (distil_table, [*TEXT, "--losses", "kd", "kd"], "--losses contains duplicates"),
        (distil_table, [*TEXT, "--losses", "alone"], "--losses alone: this row is always there"),
        (labelfree_table, ["--seeds", "3", "3"], "--seeds contains duplicates"),
        (labelfree_table, ["--rows", "cosine", "cosine"], "--rows contains duplicates"),
        (regression_table, ["--tables", "linnerud", "linnerud"], "--tables contains duplicates"),
        (regression_table, ["--seeds", "0"], "--seeds (0) must be at least 1"),
    ],
)
def test_rows_and_columns_that_are_named_twice_are_refused(program, flags, words, docs, capsys):
    assert words in refuse(program, flags, capsys)
