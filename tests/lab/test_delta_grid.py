"""The grid as tables of a document: where each row goes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.delta import grid
from lab.delta.__main__ import HEADS
from lab.delta.cases import LabCase
from lab.delta.report import describe_case
from lab.marked_tables import get_marks
from utils.errors import EXIT_USER_ERROR


def describe(variant: str, mode: str, tokens: int, **facts: float | str) -> dict:
    """A row as the laboratory writes it, of one sequence."""
    rest = {
        "device": "v5e",
        "ms": 1.0,
        "tokens_per_s": 1.0,
        "tflops": 1.0,
        "tflops_reported": 1.0,
        "hlo_lines": 1,
        "compile_s": 1.0,
        "fallbacks": {},
    }
    return describe_case(LabCase(variant, mode, 16, 32, 1, tokens), "pallas") | rest | facts


def test_a_cell_shows_time_share_and_memory_of_the_last_measurement():
    rows = [
        describe("attention", "both", 2048, ms=3.0, roofline_share=0.26, peak_bytes=2**30),
        describe("gdn", "both", 8192, ms=120.04),
        describe("gdn", "both", 2048, ms=9.0),
        describe("gdn", "both", 2048, ms=1.5),
        {**describe("kda", "both", 2048), "failure": "does not fit"},
    ]
    assert grid.make_tables(rows) == {
        "delta_grid v5e both": "| heads | sequences x tokens | Gated DeltaNet | attention | "
        "attention, of Gated DeltaNet |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| 16/32 | 1 x 2,048 | 1.50 | 3.00 (26%, 1.00 GiB) | 2.00 |\n"
        "| 16/32 | 1 x 8,192 | 120.0 |  |  |"
    }


def test_each_mode_and_device_has_its_own_table():
    rows = [
        describe("gdn", "decode", 8192, ms=0.0113, roofline_share=0.5),
        describe("gdn", "forward", 2048, device="v6e"),
        describe("gdn", "forward", 2048),
    ]
    tables = grid.make_tables(rows)
    assert list(tables) == [
        "delta_grid v5e forward",
        "delta_grid v5e decode",
        "delta_grid v6e forward",
    ]
    assert (
        tables["delta_grid v5e decode"].splitlines()[0] == "| heads | sequences | Gated DeltaNet |"
    )
    assert tables["delta_grid v5e decode"].splitlines()[2] == "| 16/32 | 1 | 0.011 (50%) |"


def test_a_document_without_a_tables_markers_is_unchanged(tmp_path, capsys):
    report, page = tmp_path / "report.json", tmp_path / "page.md"
    rows = [describe("gdn", mode, 2048) for mode in ("forward", "both")]
    report.write_text(json.dumps({"lab": "delta", "rows": rows}))
    text = "\n".join(get_marks("delta_grid v5e forward"))
    page.write_text(text)
    assert grid.main([str(report), "--docs", str(page)]) == EXIT_USER_ERROR
    assert "lacks the lines <!-- delta_grid v5e both: begin" in capsys.readouterr().err
    assert page.read_text() == text
    assert grid.main([str(report), "--docs", str(tmp_path / "none.md")]) == EXIT_USER_ERROR
    assert "cannot be written into: No such file" in capsys.readouterr().err


def test_tables_are_written_into_a_document_and_bad_reports_are_refused(tmp_path, capsys):
    report, page = tmp_path / "report.json", tmp_path / "page.md"
    report.write_text(json.dumps({"lab": "delta", "rows": [describe("gdn", "forward", 2048)]}))
    begin, end = get_marks("delta_grid v5e forward")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    assert grid.main([str(report), "--docs", str(page)]) == 0
    assert "| 16/32 | 1 x 2,048 | 1.00 |" in page.read_text() and "old" not in page.read_text()
    for text, wanted in (
        ("no JSON", "REPORT"),
        (json.dumps({"lab": "delta", "rows": []}), "no row that did not fail"),
    ):
        report.write_text(text)
        capsys.readouterr()
        assert grid.main([str(report)]) == EXIT_USER_ERROR
        assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["forward", "both", "decode"])
def test_the_document_has_a_table_of_each_mode(mode):
    begin, end = get_marks(f"delta_grid v5e {mode}")
    text = (Path(__file__).resolve().parents[2] / "docs/delta_grid.md").read_text(encoding="utf-8")
    table = text.split(begin)[1].split(end)[0]
    assert all(f"| {heads} |" in table for heads in HEADS) and "| Gated DeltaNet |" in table
