"""`report`: runs as the parts of a pull request or an issue, in Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence

from store.compare.differences import compare_sources, find_differences, read_environment_of
from store.compare.report import choose_metrics
from store.compare.rows import COMPARISON_COLUMNS, describe_side, describe_source
from store.compare.sides import Side, compare_sides
from store.formatting import count_runs, format_value
from store.query.config_text import flatten_run_config
from store.query.record import RunRecord
from store.terminal import print_json
from tools.runs.find_runs import read_side, warn_of_damage
from utils.config.keys import get_neutral_keys
from utils.config.sections import RunConfig
from utils.json_types import JsonObject, JsonValue

# Host names and folders are left out: a report is for everybody.
_MACHINE = ("runtime", "device", "world_size", "cores", "git_commit", "python")
_STACK = ("torch", "torch_xla", "torch_tpu", "timm")
_FORM = ("parallel", "num_processes", "mesh_data", "mesh_fsdp", "precision", "compile")
_DATA = (
    *("data.source", "data.name", "data.mix", "data.train_split", "data.eval_split"),
    *("data.test_split", "data.train_pp", "data.eval_pp", "data.global_batch_size"),
    *("train.accumulate_steps", "train.epochs", "train.steps", "train.seed"),
)
_PLACES = ("run.", "data.root", "data.labels_file")
Row = Sequence[str]


def report_runs(options: argparse.Namespace) -> None:
    """Print topology, data, variables and deltas of the sides; the first is the base."""
    sides = [read_side(options, text) for text in options.sides]
    records = [record for side in sides for record in side.records]
    warn_of_damage(records)
    metrics = choose_metrics(options.metrics, sides, "--metrics")
    names = [_name_side(side) for side in sides]
    topology = [f"packages.{name}" for name in _STACK]
    rows = _list_rows(sides, [*_MACHINE, *topology], read_environment_of)
    rows += _list_rows(sides, [f"runtime.{name}" for name in _FORM], _read_config)
    parts = {
        "Topology": [_format_table(["", *names], rows)],
        "Data": [_format_table(["", *names], _list_rows(sides, _DATA, _read_config))],
        "Variables": [_format_table(["", *names], _list_variables(sides)), *_list_sources(sides)],
        "Deltas": _list_deltas(sides, metrics),
    }
    unfinished = [path for side in sides for path in side.unfinished]
    lines = [f"- {path} is not complete: these are its newest numbers" for path in unfinished]
    parts["Deltas"].append("\n".join(lines))
    texts = {title: "\n\n".join(filter(None, blocks)) for title, blocks in parts.items()}
    if options.json:
        print_json(texts)
        return
    for title, text in texts.items():
        print(f"### {title}\n\n{text or 'no difference'}\n")


def _name_side(side: Side) -> str:
    if len(side.records) == 1:
        return side.records[0].path  # what was typed may be a folder of this machine
    return f"{side.name} ({count_runs(len(side.records), side.seeds)})"


def _read_config(record: RunRecord) -> JsonObject:
    return record.config


def _list_rows(
    sides: Sequence[Side], keys: Iterable[str], read: Callable[[RunRecord], JsonObject]
) -> list[Row]:
    """List the keys that some run has a value of, with the values of each side."""
    facts = [[read(record) for record in side.records] for side in sides]
    rows: list[Row] = []
    for key in keys:
        columns = [_join(values.get(key) for values in column) for column in facts]
        if any(column != "-" for column in columns):
            rows.append([f"`{key}`", *columns])
    return rows


def _join(values: Iterable[JsonValue]) -> str:
    shown = ("-" if value in ("", None, [], {}) else format_value(value) for value in values)
    return ", ".join(dict.fromkeys(shown))


def _list_variables(sides: Sequence[Side]) -> list[Row]:
    """List what differs between sides; of one side, what differs from the defaults."""
    ignored = get_neutral_keys()
    if len(sides) > 1:
        rows = [row for row in find_differences(sides, ignored) if row.matters]
        return [[f"`{row.key}`", *row.values] for row in rows if _is_shown(row.key, ignored)]
    defaults = flatten_run_config(RunConfig().model_dump(mode="json"))
    keys = sorted({key for record in sides[0].records for key in record.config})
    changed = [
        key
        for key in keys
        if key not in _DATA
        and _is_shown(key, ignored)
        and any(record.config.get(key) != defaults.get(key) for record in sides[0].records)
    ]
    return _list_rows(sides, changed, _read_config)


def _is_shown(key: str, ignored: Collection[str]) -> bool:
    return key not in ignored and not key.startswith(_PLACES)


def _list_sources(sides: Sequence[Side]) -> list[str]:
    """List how the source of each further side differs, if that is known or uncertain."""
    blocks = []
    for side in sides[1:]:
        lines = describe_source(compare_sources(sides[0].records[0], side.records[0]))
        blocks.append("\n".join(f"- {line}" for line in lines))
    return blocks


def _list_deltas(sides: Sequence[Side], metrics: Collection[str]) -> list[str]:
    """List a table of numbers for each further side; of one side, its numbers alone."""
    base, *rest = sides
    if not rest:
        compared = describe_side(base, base, compare_sides(base, base, metrics))
        return [_format_table(COMPARISON_COLUMNS[:3], [row[:3] for row in compared.rows])]
    blocks = []
    for side in rest:
        compared = describe_side(base, side, compare_sides(base, side, metrics))
        columns = list(COMPARISON_COLUMNS)
        columns[2:4] = f"{_name_side(base)}>", f"{_name_side(side)}>"
        blocks.append(_format_table(columns, compared.rows))
        lines = [*compared.notes, *compared.missing, *([compared.apart] if compared.apart else [])]
        blocks.append("\n".join(f"- {line}" for line in lines))
    return blocks


def _format_table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Format a table in Markdown, empty without rows; a column with `>` is right-aligned."""
    if not rows:
        return ""
    heads = [column.removesuffix(">") for column in columns]
    rule = ["---:" if column.endswith(">") else "---" for column in columns]
    lines = [heads, rule, *rows]
    return "\n".join("| " + " | ".join(_escape(cell) for cell in line) + " |" for line in lines)


def _escape(cell: str) -> str:
    """Escape what would end a cell or begin a tag."""
    return cell.replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")
