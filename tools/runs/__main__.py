"""Asks the run store: `python -m tools.runs COMMAND ...`.

    python -m tools.runs list --filter "data.name=digits and eval.top1>70" --sort eval.top1
    python -m tools.runs show digits_kd/student
    python -m tools.runs compare "alone:experiment=digits_student" "taught:experiment=digits_kd"
    python -m tools.runs tag digits_kd/student --add paper

A RUN is a directory, `experiment/name`, a name, or the beginning of an id. The runs themselves are
the truth; what is asked of all of them is answered by an index in the user's cache, which is kept
in step with the files and may be deleted at any time. Exit code 2: wrong use, nothing was written;
1: a gate has failed, runs part that --exact holds equal, bad runs were found, or a benchmark has
become worse; 3: a gate is undecided.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from store.quality.gate_flags import add_gate_flags
from utils.programs import ProgramParser, create_program_parser, run_program


def main(argv: list[str] | None = None) -> int:
    """Answer; gives the exit code."""
    options = create_parser().parse_args(argv)
    # Only what is asked for is loaded: a list must not wait for what a comparison needs.
    module, _, name = options.function.partition(":")
    function = getattr(importlib.import_module(f"tools.runs.{module}"), name)
    from utils.storage.retry import hurry

    with hurry():
        return run_program(function, options)


def create_parser() -> ProgramParser:
    """The tool's flags."""
    parser = create_program_parser(__doc__, prog="python -m tools.runs")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    return parser


Commands = argparse._SubParsersAction


def _add_list(commands: Commands) -> None:
    text = "runs, that which was begun last first"
    add = _add(
        commands, "list", "listing:list_runs", text, which="which runs (docs/store.md)"
    ).add_argument
    add("--show", default="", metavar="KEY,...", help="keys to show, of any kind")
    add("--sort", default="", metavar="KEY", help="the best first, or the highest")
    add("--reverse", action="store_true", help="the other way round")
    add("--limit", type=int, default=40, help="rows; 0: all")
    add("--archived", action="store_true", help="with runs tagged archived, too")
    add("--keys", action="store_true", help="the keys that runs have, instead")


def _add_show(commands: Commands) -> None:
    add = _add(
        commands, "show", "showing:show_run", "what one run says of itself", runs="?"
    ).add_argument
    add("--config", action="store_true", help="with its whole configuration")
    add("--quantiles", action="store_true", help="of throughput, waits, grad_norm")


def _add_compare(commands: Commands) -> None:
    text = "configuration, numbers with their intervals, and where equal runs part"
    which = "runs, grouped by configuration without seed; with SIDEs it narrows them"
    add = _add(commands, "compare", "comparing:compare_runs", text, which=which).add_argument
    side = "RUN, several RUNs with commas between, or NAME:FILTER; the first is the base"
    add("sides", nargs="*", metavar="SIDE", help=side)
    add("--metrics", default="", metavar="KEY,...", help="numbers to compare")
    add("--exact", action="store_true", help="exit code 1 where two runs part")
    add("--source", action="store_true", help="how the sources differ, by lines")
    add("--html", type=Path, metavar="FILE", help="one page that needs no network")


def _add_gate(commands: Commands) -> None:
    text = "whether new runs are worse than a base by more than is allowed"
    parser = _add(commands, "gate", "gating:gate_runs", text, which="narrows both sides")
    add = parser.add_argument
    add("base", metavar="BASE", help="a SIDE, as in compare")
    add("new", metavar="NEW", help="the same")
    add_gate_flags(parser)
    add("--unfinished", action="store_true", help="judge runs that are not complete, too")


def _add_trend(commands: Commands) -> None:
    text = "reports and compiler's verdicts over time; exit code 1 where the newest are worse"
    parser = _add(commands, "trend", "trending:show_trends", text, which="keys of configurations")
    add = parser.add_argument
    add("--add", type=Path, nargs="+", default=[], metavar="FILE", help="reports to keep there")
    add_gate_flags(parser)
    add("--html", type=Path, metavar="FILE", help="one page that needs no network")


def _add_trace(commands: Commands) -> None:
    text = "a run's whole time as a file for Perfetto's viewer"
    add = _add(commands, "trace", "tracing:trace_run", text, runs="?").add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="where it goes")
    forms = ("perfetto", "chrome")
    add("--format", choices=forms, default="perfetto", help="chrome: JSON for other viewers")


def _add_cost(commands: Commands) -> None:
    text = "device-hours, money, goodput of runs"
    add = _add(commands, "cost", "costing:show_costs", text, runs="*").add_argument
    add("--prices", type=Path, metavar="FILE", help="prices (docs/store.md)")
    add("--metric", default="", metavar="KEY", help="what was got for it")
    add("--by", default="", metavar="KEY,...", help="one row for each value of keys")
    base = "what a better metric costs more than in this run or group"
    add("--base", default="", metavar="ROW", help=base)


def _add_calibration(commands: Commands) -> None:
    text = "the compiler's estimate of a step beside what runs have measured"
    which = "which runs; none: all"
    _add(commands, "calibration", "calibrating:show_calibration", text, which=which)


def _add_export(commands: Commands) -> None:
    text = "runs and their histories as tables"
    add = _add(commands, "export", "exporting:export", text, runs="*").add_argument
    forms = ("json", "csv", "parquet")
    add("--format", choices=forms, default="parquet", help="of the tables")
    add("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    skip = "leave damaged runs out, and say so in the manifest, instead of refusing"
    add("--skip-bad", action="store_true", help=skip)


def _add_validate(commands: Commands) -> None:
    text = "which runs, or exports, are torn or changed; without RUN all of the store"
    parser = _add(commands, "validate", "validating:validate_runs", text, runs="*")
    add = parser.add_argument
    strict = "torn ends count, sha256 and all tensors of checkpoints are read"
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--strict", action="store_true", help=strict)
    mode.add_argument("--lenient", action="store_true", help="only lost or changed bytes count")
    add("--quarantine", type=Path, metavar="DIR", help="where bad runs are moved")


def _add_tag(commands: Commands) -> None:
    text = "words on runs, for filters: tag=paper"
    add = _add(commands, "tag", "tagging:tag_runs", text, runs="*").add_argument
    add("--add", nargs="+", default=[], metavar="TAG", help="words to put on")
    add("--remove", nargs="+", default=[], metavar="TAG", help="to take off")
    add("--note", metavar="TEXT", help="what to remember of it; '' removes it")


def _add_rerun(commands: Commands) -> None:
    text = "make a run again from its source and configuration; exit code 1 where both part"
    add = _add(commands, "rerun", "rerunning:rerun", text, runs="?").add_argument
    add("--out", default="", metavar="DIR", help="run.output_dir of the new run")
    add("--dry-run", action="store_true", help="say what would be done")


def _add_reindex(commands: Commands) -> None:
    _add(commands, "reindex", "listing:rebuild_index", "make the index anew")


def _add_schemas(commands: Commands) -> None:
    text = "write the JSON Schemas of what a run directory holds"
    parser = _create(commands, "schemas", "publishing:write_schemas", text)
    parser.add_argument("--out", type=Path, required=True, help="directory")


def _create(commands: Commands, name: str, function: str, text: str) -> ProgramParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(function=function)
    return parser


def _add(
    commands: Commands, name: str, function: str, text: str, *, runs: str = "", which: str = ""
) -> ProgramParser:
    """Make a command that asks a store; gives its parser.

    Args:
      runs: how many RUNs it takes, as argparse has it; a filter may stand for them.
      which: what a filter chooses where it takes none; empty: it takes no filter either.
    """
    parser = _create(commands, name, function, text)
    add = parser.add_argument
    if runs == "?":
        where = "directory, experiment/name, name or id"
        add("run", metavar="RUN", nargs="?", default="", help=where)
    elif runs:
        add("runs", metavar="RUN", nargs="*", help="directory, name or id")
    if runs or which:
        told = which or f"runs, instead of RUN{'s' * (runs == '*')}"
        add("--filter", default="", metavar="TEXT", help=told)
    add("--store", default="runs", help="run.output_dir: directory or URL")
    add("--index", default="", metavar="URL", help="another database of the index")
    add("--json", action="store_true", help="for programs")
    return parser


_COMMANDS = (
    _add_list, _add_show, _add_compare, _add_gate, _add_trend, _add_trace, _add_cost,
    _add_calibration, _add_export, _add_validate, _add_tag, _add_rerun, _add_reindex,
    _add_schemas,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
