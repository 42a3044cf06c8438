"""Gates at the command line, and what they say: for runs, reports and proofs alike."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import yaml

from store.formatting import format_value
from store.quality.gates import EXIT_UNDECIDED, Direction, Gate, GateFinding, make_gate, parse_gate
from store.terminal import colour_word, create_console, create_table
from utils.errors import EXIT_FAILED, UserError
from utils.json_types import JsonObject, JsonValue

_UNDECIDED = ("fail", "pass")


def read_gates(options: argparse.Namespace) -> tuple[list[Gate], str]:
    """The gates of flags and file, none where there are none, and what is said of undecided ones.

    Raises:
      UserError: one with a fault.
    """
    gates, undecided = [parse_gate(text) for text in options.gate or ()], ""
    if options.gates is not None:
        found, undecided = read_file(options.gates)
        gates += found
        if not gates:
            raise UserError(f"--gates {options.gates} holds no gate, so nothing to hold against")
    directions = dict(_read_direction(text) for text in options.direction or ())
    for metric in directions:
        if all(gate.metric != metric for gate in gates):
            raise UserError(f"--direction {metric}: no gate asks for it; give one by --gate")
    gates = [replace(g, direction=directions.get(g.metric, g.direction)) for g in gates]
    return gates, options.undecided or undecided


def read_file(path: Path) -> tuple[list[Gate], str]:
    """The gates of a YAML file: `gates`, a list of texts or mappings, and `undecided`.

    Raises:
      UserError: it cannot be read, or says something else.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--gates {path} cannot be read: {reason}; give a YAML file") from error
    rows = values.get("gates") if isinstance(values, dict) else None
    if not isinstance(rows, list) or set(values) - {"gates", "undecided"}:
        raise UserError(f"--gates {path} holds no list `gates` alone, with `undecided` beside it")
    undecided = values.get("undecided", "")
    if undecided not in ("", *_UNDECIDED):
        raise UserError(f"--gates {path}: undecided ({undecided!r}) is neither fail nor pass")
    return [_make(row) for row in rows], undecided


def publish_findings(findings: Sequence[GateFinding]) -> list[JsonObject]:
    """The same for programs."""
    return [{**asdict(one), "gate": str(one.gate)} for one in findings]


def print_findings(
    findings: Sequence[GateFinding], sides: tuple[str, str], code: int, *, of: str = "seeds"
) -> None:
    """Each gate's verdict with its numbers, for a person.

    Args:
      of: what more of would help where nothing can be decided.
    """
    console = create_console()
    table = create_table("outcome", "gate", f"{sides[0]}>", f"{sides[1]}>", "why")
    for one in findings:
        numbers = (format_value(one.base), format_value(one.new))
        table.add_row(colour_word(one.outcome), str(one.gate), *numbers, one.reason)
    console.print(table)
    words = {0: "passed", EXIT_FAILED: "failed", EXIT_UNDECIDED: f"undecided: more {of} may tell"}
    style = colour_word(("pass", "fail", "", "undecided")[code]).style
    console.print(f"\n{words[code]}", style=style)


def _make(row: JsonValue) -> Gate:
    if isinstance(row, str):
        return parse_gate(row)
    if not isinstance(row, dict):
        raise UserError(f"gate {row!r} is neither a text nor a mapping")
    return make_gate(row, str(row.get("metric", row)))


def _read_direction(text: str) -> tuple[str, Direction]:
    metric, _, direction = text.rpartition("=")
    if not metric or direction not in get_args(Direction):
        raise UserError(f"--direction {text!r} has another form; write METRIC=higher or =lower")
    return metric, direction
