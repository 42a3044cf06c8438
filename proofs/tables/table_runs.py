"""What the programs share that train the rows of a table and write it into a document."""

from __future__ import annotations

import argparse
from pathlib import Path

import job
from lab.marked_tables import check_document
from store.record.ids import CONFIG_FILE
from store.record.runs import Run
from utils.config.load import RunConfig
from utils.errors import UserError
from utils.programs import create_program_parser


def create_table_parser(doc: str | None, name: str, config_help: str) -> argparse.ArgumentParser:
    """The flags that all of them have; the rest are keys of every run.

    Args:
      doc: the program's docstring.
      name: of its module below `proofs`.
      config_help: what --config is to be a run of.
    """
    parser = create_program_parser(
        doc,
        prog=f"python -m proofs.tables.{name}",
        epilog="All other flags are keys of the runs' configuration, as for main.py.",
    )
    parser.add_argument("--config", required=True, help=config_help)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--docs", type=Path, help="Markdown file that holds the table's marks")
    return parser


def check_table(options: argparse.Namespace, marks: str, *flags: str) -> None:
    """Refuse, before the first run, what would spoil the table behind the last one.

    Args:
      marks: the name of the table's marks in the document.
      flags: whose values are rows or columns, beside --seeds, as `options` has them.

    Raises:
      UserError: names the flag.
    """
    require_distinct(options, "seeds", *flags)
    check_document(options.docs, marks)


def require_distinct(options: argparse.Namespace, *flags: str) -> None:
    """Refuse flags that say something twice; those that were not given pass.

    Raises:
      UserError: names the flag.
    """
    for flag in flags:
        given = getattr(options, flag) or []
        if len(set(given)) < len(given):
            raise UserError(f"--{flag.replace('_', '-')} says something twice; name each once")


def start(config: RunConfig) -> None:
    """One run in this process."""
    if job.start(config):
        raise RuntimeError("the run was stopped; its last lines say why")


def is_finished(run: Run, config_text: str) -> bool:
    """Whether a complete run of this very configuration is there."""
    if run.read().get("status") != "complete":
        return False
    return (run.path / CONFIG_FILE).read_text(encoding="utf-8") == config_text
