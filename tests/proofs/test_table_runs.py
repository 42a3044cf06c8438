"""What would spoil a table behind its last run is refused before the first one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from lab.marked_tables import get_marks
from proofs.kd_table import __main__ as kd_table
from proofs.tables import (
    distil_table,
    labelfree_table,
    patches_table,
    regression_table,
    rules_table,
)

ROOT = Path(__file__).resolve().parents[2]
RECALL = ["--config", str(ROOT / "configs/delta_recall.yaml")]
PATCHED = ["--config", str(ROOT / "configs/smoke.yaml"), "--runtime.device=xla",
           "--data.test_split=test"]  # fmt: skip
TEXT = ["--config", str(ROOT / "configs/transformer_distil.yaml")]


@pytest.fixture
def docs(tmp_path, monkeypatch) -> Path:
    """A document with marks of a table of none of the programs, none of which may begin."""
    for program, name in (
        (rules_table, "train"), (patches_table, "list_rows"), (distil_table, "read_config"),
        (labelfree_table, "make_few_labels"), (kd_table, "fill_table"),
        (regression_table, "list_models"),
    ):  # fmt: skip
        monkeypatch.setattr(program, name, lambda *_: pytest.fail("began"))
    path = tmp_path / "page.md"
    path.write_text("\n".join(get_marks("other")))
    return path


def refuse(program: ModuleType, flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a program ends in."""
    assert program.main(flags) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


@pytest.mark.parametrize(
    ("program", "flags"),
    [(rules_table, RECALL), (patches_table, PATCHED), (distil_table, TEXT), (labelfree_table, []),
     (kd_table, ["--plan"])],
)  # fmt: skip
def test_a_document_without_a_place_for_the_table_is_refused(program, flags, docs, capsys):
    assert "lacks the lines" in refuse(program, [*flags, "--docs", str(docs)], capsys)
    docs.unlink()
    text = refuse(program, [*flags, "--docs", str(docs)], capsys)
    assert f"--docs ({str(docs)!r}) cannot be written into: No such file" in text


@pytest.mark.parametrize(
    ("program", "flags", "words"),
    [
        (rules_table, [*RECALL, "--rows", "linear", "linear"], "--rows says something twice"),
        (rules_table, [*RECALL, "--seeds", "0", "0"], "--seeds says something twice"),
        (patches_table, [*PATCHED, "--seeds", "1", "0", "1"], "--seeds says something twice"),
        (distil_table, [*TEXT, "--losses", "kd", "kd"], "--losses says something twice"),
        (distil_table, [*TEXT, "--losses", "alone"], "--losses alone: this row is always there"),
        (labelfree_table, ["--seeds", "3", "3"], "--seeds says something twice"),
        (labelfree_table, ["--rows", "cosine", "cosine"], "--rows says something twice"),
        (regression_table, ["--tables", "linnerud", "linnerud"], "--tables says something twice"),
        (regression_table, ["--seeds", "0"], "--seeds (0) must be at least 1"),
    ],
)
def test_rows_and_columns_that_are_named_twice_are_refused(program, flags, words, docs, capsys):
    assert words in refuse(program, flags, capsys)
