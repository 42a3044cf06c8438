"""The table of what each loss was compared with: complete, true to its sources, and measured."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from lab.marked_tables import get_marks
from losses.table import LOSSES
from tests.losses.reference_table import (
    FORMULA,
    INDEXES,
    format_figure,
    get_evidence,
    list_evidence,
)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/losses.md"
# Of values and gradients: those of the files' format, and of finite differences.
LIMITS = {True: (1e-9, 1e-5), False: (1e-9, 1e-8)}


def read_rows():
    """The cells of the table by the names in its first column."""
    begin, end = get_marks("held against")
    table = DOCUMENT.read_text(encoding="utf-8").split(begin)[1].split(end)[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {tuple(re.findall(r"`(\w+)`", names)): cells for names, *cells in rows}


def test_every_registered_loss_was_compared_with_something():
    names = [name for evidence in list_evidence() for name in evidence.names]
    assert sorted(names) == LOSSES.names()


def test_a_loss_without_reference_values_is_refused():
    with pytest.raises(KeyError, match="no reference values for newcomer"):
        get_evidence(("newcomer",))


def test_the_files_hold_only_registered_losses():
    listed = {loss for index in INDEXES.values() for loss in index["losses"]}
    assert listed <= set(LOSSES)


def test_the_table_matches_the_sources_and_pins_the_defaults():
    wanted = {evidence.names: list(evidence.list_facts()) for evidence in list_evidence()}
    assert {names: row[:4] for names, row in read_rows().items()} == wanted


def test_the_figures_in_the_table_are_within_the_tolerances():
    for names, (_, source, *_, value, gradient) in read_rows().items():
        most = LIMITS[source == FORMULA]
        assert float(value) <= most[0], names
        assert gradient == "-" or float(gradient) <= most[1], names


@pytest.mark.parametrize("name", ["kd", "vid", "lskd", "bv_agree"])
def test_a_figure_in_the_table_equals_its_measurement(name):
    """Up to rounding errors of another machine."""
    evidence = next(e for e in list_evidence() if name in e.names)
    for told, figure in zip(read_rows()[evidence.names][4:], evidence.measure(), strict=True):
        assert (told == "-") == (figure is None)
        if figure is not None:
            assert figure <= max(10 * float(told), 1e-12)


def test_a_figure_has_one_digit_and_a_missing_one_is_a_dash():
    assert [format_figure(figure) for figure in (None, 0.0, 2.34e-16)] == ["-", "0", "2e-16"]
    assert float(format_figure(math.inf)) == math.inf
