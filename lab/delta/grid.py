"""The laboratory's grid as tables of a document, from the reports of its runs.

    python -m lab.delta.grid forward.json both.json --docs docs/delta_grid.md

A table for each device and mode, a line for each number of heads and size, a column for each rule;
a cell is milliseconds and the share of the roofline that they reach, with gradients also the peak
of memory. Of a case that stands in several reports the last one counts. A table goes between the
marks of its name, such as `delta_grid v5e forward`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from lab.delta.cases import ATTENTION, MODES, VARIANTS
from lab.delta.report import read_rows
from lab.marked_tables import check_document, write_between
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.programs import create_program_parser, run_program

NAME = "delta_grid"
TITLES = {
    "deltanet": "DeltaNet",
    "gdn": "Gated DeltaNet",
    "kda": "KDA",
    "gdn2": "GDN-2",
    "delta_product": "DeltaProduct",
    "rwkv7": "RWKV-7",
    ATTENTION: "attention",
}
# What attention's time is divided by in the last column.
_BESIDE = "gdn"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit code."""
    return run_program(run, create_parser().parse_args(argv))


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_program_parser(__doc__, prog="python -m lab.delta.grid")
    parser.add_argument(
        "reports", nargs="+", type=Path, metavar="REPORT", help="what the laboratory's --json wrote"
    )
    parser.add_argument("--docs", type=Path, help="Markdown file that holds the tables' marks")
    return parser


def run(options: argparse.Namespace) -> None:
    """Print all tables, and put them into the document.

    Raises:
      UserError: reports without a row that counts.
    """
    tables = make_tables(read_rows(options.reports, "REPORT"))
    if not tables:
        raise UserError("the reports hold no row that did not fail; give others")
    check_document(options.docs, *tables)
    for name, table in tables.items():
        print(f"{name}\n\n{table}\n")
    if options.docs:
        for name, table in tables.items():
            write_between(options.docs, name, table)


def make_tables(rows: Iterable[JsonObject]) -> dict[str, str]:
    """Markdown tables of rows that did not fail, by name."""
    tables: dict[tuple[str, str], dict[tuple[int, ...], dict[str, JsonObject]]] = {}
    for row in rows:
        if "failure" in row:
            continue
        tokens = () if row["mode"] == "decode" else (row["tokens"],)
        line = (row["key_heads"], row["value_heads"], row["batch"], *tokens)
        lines = tables.setdefault((row["device"], row["mode"]), {})
        lines.setdefault(line, {})[row["variant"]] = row
    order = sorted(tables, key=lambda key: (key[0], MODES.index(key[1])))
    return {f"{NAME} {' '.join(key)}": _make_table(tables[key]) for key in order}


def _make_table(lines: dict[tuple[int, ...], dict[str, JsonObject]]) -> str:
    shown = [variant for variant in VARIANTS if any(variant in cells for cells in lines.values())]
    is_step = all(len(line) == 3 for line in lines)
    titles = ["heads", "sequences" if is_step else "sequences x tokens"]
    titles += [TITLES[variant] for variant in shown]
    compares = {_BESIDE, ATTENTION} <= set(shown)
    titles += [f"{TITLES[ATTENTION]}, of {TITLES[_BESIDE]}"] if compares else []
    table = [titles, ["---", *["---:"] * (len(titles) - 1)]]
    for line, cells in sorted(lines.items()):
        sizes = " x ".join(f"{size:,}" for size in line[2:])
        texts = [_show(cells[variant]) if variant in cells else "" for variant in shown]
        cells_of_line = [f"{line[0]}/{line[1]}", sizes, *texts]
        if compares:
            pair = [cells.get(variant) for variant in (ATTENTION, _BESIDE)]
            cells_of_line.append(
                f"{pair[0]['ms'] / pair[1]['ms']:.2f}" if pair[0] and pair[1] else ""
            )
        table.append(cells_of_line)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _show(row: JsonObject) -> str:
    """Milliseconds to three digits; in brackets share of the roofline and, if it counts, memory."""
    time = row["ms"]
    text = f"{time:.{1 if time >= 100 else 2 if time >= 1 else 3}f}"
    notes = [f"{row['roofline_share']:.0%}"] if "roofline_share" in row else []
    if row["mode"] == "both" and "peak_bytes" in row:
        notes.append(f"{row['peak_bytes'] / 2**30:.2f} GiB")
    return f"{text} ({', '.join(notes)})" if notes else text


if __name__ == "__main__":
    sys.exit(main())
