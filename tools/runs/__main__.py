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
    parser = _add(commands, "list", "listing:list_runs", "runs, that which was begun last first")
    _add_store(parser)
    _add_json(parser)
    parser.add_argument("--filter", default="", metavar="TEXT", help="which runs (docs/store.md)")
    parser.add_argument("--show", default="", metavar="KEY,...", help="keys to show, of any kind")
    parser.add_argument("--sort", default="", metavar="KEY", help="the best first, or the highest")
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument("--limit", type=int, default=40, help="rows; 0: all")
    parser.add_argument("--archived", action="store_true", help="with runs tagged archived, too")
    parser.add_argument("--keys", action="store_true", help="the keys that runs have, instead")


def _add_show(commands: Commands) -> None:
    parser = _add(commands, "show", "showing:show_run", "what one run says of itself")
    parser.add_argument(
        "run", metavar="RUN", nargs="?", default="", help="directory, experiment/name, name or id"
    )
    parser.add_argument("--filter", default="", metavar="TEXT", help="runs, instead of RUN")
    _add_store(parser)
    _add_json(parser)
    parser.add_argument("--config", action="store_true", help="with its whole configuration")
    parser.add_argument("--quantiles", action="store_true", help="of throughput, waits, grad_norm")


def _add_compare(commands: Commands) -> None:
    text = "configuration, numbers with their intervals, and where equal runs part"
    parser = _add(commands, "compare", "comparing:compare_runs", text)
    parser.add_argument(
        "sides", nargs="*", metavar="SIDE",
        help="RUN, several RUNs with commas between, or NAME:FILTER; the first is the base",
    )  # fmt: skip
    _add_store(parser)
    _add_json(parser)
    parser.add_argument("--filter", default="", help="runs, grouped by configuration "
                        "without seed; with SIDEs it narrows them")  # fmt: skip
    parser.add_argument("--metrics", default="", metavar="KEY,...", help="numbers to compare")
    parser.add_argument("--exact", action="store_true", help="exit code 1 where two runs part")
    parser.add_argument("--source", action="store_true", help="how the sources differ, by lines")
    parser.add_argument("--html", type=Path, metavar="FILE", help="one page that needs no network")


def _add_gate(commands: Commands) -> None:
    text = "whether new runs are worse than a base by more than is allowed"
    parser = _add(commands, "gate", "gating:gate_runs", text)
    parser.add_argument("base", metavar="BASE", help="a SIDE, as in compare")
    parser.add_argument("new", metavar="NEW", help="the same")
    _add_store(parser)
    _add_json(parser)
    parser.add_argument("--filter", default="", metavar="TEXT", help="narrows both sides")
    add_gate_flags(parser)
    parser.add_argument(
        "--unfinished", action="store_true", help="judge runs that are not complete, too"
    )


def _add_trend(commands: Commands) -> None:
    text = "reports and compiler's verdicts over time; exit code 1 where the newest are worse"
    parser = _add(commands, "trend", "trending:show_trends", text)
    _add_store(parser)
    _add_json(parser)
    parser.add_argument("--filter", default="", metavar="TEXT", help="keys of configurations")
    parser.add_argument(
        "--add", type=Path, nargs="+", default=[], metavar="FILE", help="reports to keep there"
    )
    add_gate_flags(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="one page that needs no network")


def _add_trace(commands: Commands) -> None:
    text = "a run's whole time as a file for Perfetto's viewer"
    parser = _add(commands, "trace", "tracing:trace_run", text)
    parser.add_argument(
        "run", metavar="RUN", nargs="?", default="", help="directory, experiment/name, name or id"
    )
    parser.add_argument("--filter", default="", metavar="TEXT", help="runs, instead of RUN")
    _add_store(parser)
    _add_json(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where it goes")
    parser.add_argument(
        "--format", choices=("perfetto", "chrome"), default="perfetto",
        help="chrome: JSON for other viewers",
    )  # fmt: skip


def _add_cost(commands: Commands) -> None:
    parser = _add(commands, "cost", "costing:show_costs", "device-hours, money, goodput of runs")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="directory, name or id")
    _add_store(parser)
    _add_json(parser)
    parser.add_argument("--filter", default="", metavar="TEXT", help="runs, instead of RUNs")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="prices (docs/store.md)")
    parser.add_argument("--metric", default="", metavar="KEY", help="what was got for it")
    parser.add_argument(
        "--by", default="", metavar="KEY,...", help="one row for each value of keys"
    )
    parser.add_argument("--base", default="", metavar="ROW", help="what a better metric costs more "
                        "than in this run or group")  # fmt: skip


def _add_calibration(commands: Commands) -> None:
    text = "the compiler's estimate of a step beside what runs have measured"
    parser = _add(commands, "calibration", "calibrating:show_calibration", text)
    _add_store(parser)
    _add_json(parser)
    parser.add_argument("--filter", default="", metavar="TEXT", help="which runs; none: all")


def _add_export(commands: Commands) -> None:
    parser = _add(commands, "export", "exporting:export", "runs and their histories as tables")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="directory, name or id")
    _add_store(parser)
    _add_json(parser)
    parser.add_argument("--filter", default="", metavar="TEXT", help="runs, instead of RUNs")
    parser.add_argument(
        "--format", choices=("json", "csv", "parquet"), default="parquet", help="of the tables"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    parser.add_argument(
        "--skip-bad", action="store_true",
        help="leave damaged runs out, and say so in the manifest, instead of refusing",
    )  # fmt: skip


def _add_validate(commands: Commands) -> None:
    text = "which runs, or exports, are torn or changed; without RUN all of the store"
    parser = _add(commands, "validate", "validating:validate_runs", text)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="directory, name or id")
    parser.add_argument("--filter", default="", metavar="TEXT", help="runs, instead of RUN")
    _add_store(parser)
    _add_json(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--strict",
        action="store_true",
        help="torn ends count, sha256 and all tensors of checkpoints are read",
    )
    mode.add_argument("--lenient", action="store_true", help="only lost or changed bytes count")
    parser.add_argument("--quarantine", type=Path, metavar="DIR", help="where bad runs are moved")


def _add_tag(commands: Commands) -> None:
    parser = _add(commands, "tag", "tagging:tag_runs", "words on runs, for filters: tag=paper")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="directory, name or id")
    parser.add_argument("--filter", default="", metavar="TEXT", help="runs, instead of RUN")
    _add_store(parser)
    _add_json(parser)
    parser.add_argument("--add", nargs="+", default=[], metavar="TAG", help="words to put on")
    parser.add_argument("--remove", nargs="+", default=[], metavar="TAG", help="to take off")
    parser.add_argument("--note", metavar="TEXT", help="what to remember of it; '' removes it")


def _add_rerun(commands: Commands) -> None:
    text = "make a run again from its source and configuration; exit code 1 where both part"
    parser = _add(commands, "rerun", "rerunning:rerun", text)
    parser.add_argument(
        "run", metavar="RUN", nargs="?", default="", help="directory, experiment/name, name or id"
    )
    parser.add_argument("--filter", default="", metavar="TEXT", help="runs, instead of RUN")
    _add_store(parser)
    _add_json(parser)
    parser.add_argument("--out", default="", metavar="DIR", help="run.output_dir of the new run")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")


def _add_reindex(commands: Commands) -> None:
    parser = _add(commands, "reindex", "listing:rebuild_index", "make the index anew")
    _add_store(parser)
    _add_json(parser)


def _add_schemas(commands: Commands) -> None:
    text = "write the JSON Schemas of what a run directory holds"
    parser = _add(commands, "schemas", "publishing:write_schemas", text)
    parser.add_argument("--out", type=Path, required=True, help="directory")


def _add(commands: Commands, name: str, function: str, text: str) -> ProgramParser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(function=function)
    return parser


def _add_store(parser: ProgramParser) -> None:
    parser.add_argument("--store", default="runs", help="run.output_dir: directory or URL")
    parser.add_argument("--index", default="", metavar="URL", help="another database of the index")


def _add_json(parser: ProgramParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


_COMMANDS = (
    _add_list, _add_show, _add_compare, _add_gate, _add_trend, _add_trace, _add_cost,
    _add_calibration, _add_export, _add_validate, _add_tag, _add_rerun, _add_reindex,
    _add_schemas,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
