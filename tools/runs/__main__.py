"""Queries a store of runs: `python -m tools.runs COMMAND ...`.

    python -m tools.runs list --filter "data.name=digits and eval.top1>70" --sort eval.top1
    python -m tools.runs show digits_kd/student
    python -m tools.runs compare "alone:experiment=digits_student" "taught:experiment=digits_kd"
    python -m tools.runs tag digits_kd/student --add paper

A RUN is a directory, `experiment/name`, a name, or the beginning of an id. The runs' files are the
only source; queries over all runs use an index in the user's cache, which is updated from the files
and may be deleted at any time. Exit code 2: wrong use, nothing was written; 1: a gate failed, runs
differ that --exact requires to be equal, bad runs were found, or a benchmark has become worse;
3: a gate is undecided.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from store.quality.gate_flags import add_gate_flags
from utils.programs import CommandLine, ProgramParser, create_program_parser
from utils.registry import load_object

Commands: TypeAlias = "argparse._SubParsersAction[ProgramParser]"
_RUN_HELP = "directory, experiment/name, name or id"


def create_parser() -> ProgramParser:
    """Create the parser, with one parser for each command."""
    parser = create_program_parser(__doc__, prog="python -m tools.runs")
    _add_store_flags(parser, ["runs", "", False])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_views(commands)
    _add_comparisons(commands)
    _add_costs(commands)
    _add_files(commands)
    _add_changes(commands)
    return parser


def run(options: argparse.Namespace) -> int | None:
    """Import and run the chosen command only: a list must not wait for what a comparison needs."""
    from utils.storage.retry import hurry

    with hurry():
        return load_object(f"tools.runs.{options.function}")(options)


def _add_views(commands: Commands) -> None:
    text = "runs, the most recently started first"
    which = "which runs (docs/store.md)"
    add = _add(commands, "list", "listing:list_runs", text, which=which).add_argument
    add("--show", default="", metavar="KEY,...", help="keys to show, of any kind")
    add("--sort", default="", metavar="KEY", help="the best first, or the highest")
    add("--reverse", action="store_true", help="reverse the order")
    add("--limit", type=int, default=40, help="rows; 0: all")
    add("--archived", action="store_true", help="also runs tagged archived")
    add("--keys", action="store_true", help="list the keys of the runs instead")
    text = "one run with its attempts, curves and numbers"
    add = _add(commands, "show", "showing:show_run", text, runs="?").add_argument
    add("--config", action="store_true", help="with its whole configuration")
    add("--quantiles", action="store_true", help="of throughput, waits, grad_norm")
    add("--modules", action="store_true", help="with the time of each module (docs/inside.md)")
    text = "a run's time line as a file for Perfetto's viewer"
    add = _add(commands, "trace", "tracing:trace_run", text, runs="?").add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    forms = ("perfetto", "chrome")
    add("--format", choices=forms, default="perfetto", help="chrome: JSON for other viewers")


def _add_comparisons(commands: Commands) -> None:
    page = "one page that needs no network"
    text = "compare configurations, metrics with intervals, and where equal runs diverge"
    which = "runs, grouped by configuration without seed; with SIDEs it narrows them"
    add = _add(commands, "compare", "comparing:compare_runs", text, which=which).add_argument
    side = "RUN, several RUNs with commas between, or NAME:FILTER; the first is the base"
    add("sides", nargs="*", metavar="SIDE", help=side)
    add("--metrics", default="", metavar="KEY,...", help="metrics to compare")
    add("--exact", action="store_true", help="exit code 1 if two runs diverge")
    add("--source", action="store_true", help="how the sources differ, by lines")
    add("--html", type=Path, metavar="FILE", help=page)
    text = "what a pull request says of runs: topology, data, variables, deltas"
    which = "narrows all sides"
    add = _add(commands, "report", "reporting:report_runs", text, which=which).add_argument
    add("sides", nargs="+", metavar="SIDE", help=side)
    add("--for", choices=("pr",), default="pr", dest="reader", help="pr: Markdown")
    add("--metrics", default="", metavar="KEY,...", help="metrics to compare")
    text = "check whether new runs are worse than a base by more than is allowed"
    parser = _add(commands, "gate", "quality:gate_runs", text, which="narrows both sides")
    parser.add_argument("base", metavar="BASE", help="a SIDE, as in compare")
    parser.add_argument("new", metavar="NEW", help="a SIDE, as in compare")
    add_gate_flags(parser)
    parser.add_argument("--unfinished", action="store_true", help="accept incomplete runs, too")
    text = "reports and compiler's verdicts over time; exit code 1 if the newest are worse"
    parser = _add(commands, "trend", "quality:show_trends", text, which="keys of configurations")
    parser.add_argument(
        "--add", type=Path, nargs="+", default=[], metavar="FILE", help="reports to keep there"
    )
    add_gate_flags(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help=page)


def _add_costs(commands: Commands) -> None:
    text = "device-hours, money, goodput of runs"
    add = _add(commands, "cost", "costing:show_costs", text, runs="*").add_argument
    add("--prices", type=Path, metavar="FILE", help="prices (docs/store.md)")
    add("--metric", default="", metavar="KEY", help="the metric that was paid for")
    add("--by", default="", metavar="KEY,...", help="one row for each value of keys")
    base = "the run or group whose metric and cost the others are compared with"
    add("--base", default="", metavar="ROW", help=base)
    text = "the compiler's estimate of a step beside measured times"
    which = "which runs (default: all)"
    _add(commands, "calibration", "quality:show_calibration", text, which=which)


def _add_files(commands: Commands) -> None:
    text = "runs and their histories as tables"
    add = _add(commands, "export", "exporting:export", text, runs="*").add_argument
    forms = ("json", "csv", "parquet")
    add("--format", choices=forms, default="parquet", help="of the tables")
    add("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    skip = "leave damaged runs out, and list them in the manifest, instead of refusing"
    add("--skip-bad", action="store_true", help=skip)
    text = "write the JSON Schemas of a run directory's files"
    parser = _create(commands, "schemas", "exporting:write_schemas", text)
    parser.add_argument("--out", type=Path, required=True, help="directory")
    text = "find torn or changed runs and exports; without RUN in the whole store"
    parser = _add(commands, "validate", "validating:validate_runs", text, runs="*")
    strict = "torn ends count, sha256 and all tensors of checkpoints are read"
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--strict", action="store_true", help=strict)
    mode.add_argument("--lenient", action="store_true", help="only lost or changed bytes count")
    parser.add_argument("--quarantine", type=Path, metavar="DIR", help="where bad runs are moved")


def _add_changes(commands: Commands) -> None:
    text = "words on runs, for filters: tag=paper"
    add = _add(commands, "tag", "tagging:tag_runs", text, runs="*").add_argument
    add("--add", nargs="+", default=[], metavar="TAG", help="words to put on")
    add("--remove", nargs="+", default=[], metavar="TAG", help="to take off")
    add("--note", metavar="TEXT", help="a remark; '' removes it")
    text = "repeat a run from its source and configuration; exit code 1 if the two diverge"
    add = _add(commands, "rerun", "rerunning:rerun", text, runs="?").add_argument
    add("--out", default="", metavar="DIR", help="run.output_dir of the new run")
    add("--dry-run", action="store_true", help="print the plan only")
    text = "ask a live run for a trace of its next steps and the time of its modules"
    add = _add(commands, "profile", "profiling:request", text, runs="?").add_argument
    add("--steps", type=int, default=5, metavar="N", help="steps to trace")
    _add(commands, "reindex", "listing:rebuild_index", "rebuild the index")


def _create(commands: Commands, name: str, function: str, text: str) -> ProgramParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(function=function)
    return parser


def _add(
    commands: Commands, name: str, function: str, text: str, *, runs: str = "", which: str = ""
) -> ProgramParser:
    """Create the parser of a command that reads a store.

    Args:
      runs: nargs of its RUNs, for which a filter may stand.
      which: what a filter selects, for a command without RUNs; empty: it has no filter either.
    """
    parser = _create(commands, name, function, text)
    add = parser.add_argument
    if runs == "?":
        add("run", metavar="RUN", nargs="?", default="", help=_RUN_HELP)
    elif runs:
        add("runs", metavar="RUN", nargs="*", help=_RUN_HELP)
    if runs or which:
        which = which or f"runs, instead of RUN{'s' * (runs == '*')}"
        add("--filter", default="", metavar="TEXT", help=which)
    _add_store_flags(parser, [argparse.SUPPRESS] * 3)  # those before the command stay
    return parser


def _add_store_flags(parser: ProgramParser, defaults: Sequence[str | bool]) -> None:
    """Add the flags that may stand before a command or behind it, with their defaults."""
    add = parser.add_argument
    store, index, is_json = defaults
    add("--store", default=store, help="run.output_dir: directory or URL (runs)")
    add("--index", default=index, metavar="URL", help="another database of the index")
    add("--json", action="store_true", default=is_json, help="for programs")


main = CommandLine(create_parser, run)

if __name__ == "__main__":
    sys.exit(main())
