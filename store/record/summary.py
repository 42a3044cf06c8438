"""`summary.json`: the end of a run, and the commit record of every file that it leaves.

It is written last, after `run.json` says complete, because the record covers its final bytes, too:
any changed bit is found. `run.json` names the summary: after a kill between the two, `validate`
reports that the summary is missing, and resuming the run, which has nothing left to train, writes
both again. A resumed run first deletes the summary, so an existing one is valid for all files.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from store.query.changes import find_changes
from store.query.config_text import parse_config
from store.query.record import RunRecord
from store.query.timeline import list_attempts, sum_paid
from store.record.artifacts import ARTIFACTS_FILE
from store.record.attempts import ATTEMPTS_FILE
from store.record.ids import CONFIG_FILE, RUN_FILE
from store.record.runs import Run
from utils.json_types import JsonMapping, JsonObject, JsonValue, load_json
from utils.storage.local import compute_crc32c, write_atomically
from utils.storage.places import open_folder

SUMMARY_FILE = "summary.json"
SUMMARY_TABLE = "summary.csv"
SCHEMA_VERSION = 2
_QUANTILES = (0.01, 0.5, 0.95, 0.99)


def write_summary(folder: Path, artifacts: Sequence[JsonObject], remote: str = "") -> None:
    """Write a run's summary and commit record, on its bucket too, once all else is final."""
    record = RunRecord(folder)
    summary: JsonObject = {"schema_version": SCHEMA_VERSION}
    facts = record.facts
    summary |= {"id": facts.id, "status": facts.status, "reason": facts.reason}
    summary |= {"path": record.path, "counts": _count(record)}
    values = record.values.items()
    summary["final"] = {name: v if math.isfinite(v) else None for name, v in values}
    summary["nonfinite"] = {name: str(v) for name, v in values if not math.isfinite(v)}
    summary["quantiles"] = _list_quantiles(record)
    write_atomically(folder / SUMMARY_TABLE, _make_table(summary))
    target = open_folder(remote) if remote else None
    if target is not None:
        target.put_file(folder / SUMMARY_TABLE, SUMMARY_TABLE)
    known = {entry["path"]: entry for entry in artifacts}
    names = {*known, RUN_FILE, ATTEMPTS_FILE, ARTIFACTS_FILE, SUMMARY_TABLE}
    summary["files"] = [_make_entry(folder, name, known.get(name)) for name in sorted(names)]
    text = format_summary(summary)
    write_atomically(folder / SUMMARY_FILE, text)
    if target is not None:
        target.write_text(SUMMARY_FILE, text)


def is_finished(run: Run, config: JsonMapping, ignored: Collection[str]) -> bool:
    """Return whether a run of this configuration (but ignored keys) is complete with all files."""
    if run.read().get("status") != "complete":
        return False
    try:
        then = parse_config((run.path / CONFIG_FILE).read_text(encoding="utf-8"))
        files = json.loads((run.path / SUMMARY_FILE).read_text(encoding="utf-8"))["files"]
        is_whole = all((run.path / entry["path"]).is_file() for entry in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return is_whole and bool(then) and not find_changes(then, config).keys() - set(ignored)


def withdraw_summary(folder: Path, remote: str = "") -> None:
    """Delete a summary because the run is about to change."""
    for target in (*([open_folder(remote)] if remote else []), open_folder(folder)):
        for name in (SUMMARY_FILE, SUMMARY_TABLE):
            target.remove_file(name)


def format_summary(summary: JsonObject) -> str:
    """Format a summary with its own checksum at the end; equal summaries give equal text."""
    import google_crc32c

    content = {key: value for key, value in summary.items() if key != "crc32c"}
    body = json.dumps(content, indent=1, allow_nan=False)
    content["crc32c"] = f"{google_crc32c.value(body.encode()):08x}"
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def read_summary(text: str) -> JsonObject | None:
    """Parse a summary; None if it is torn or any bit of it has changed."""
    try:
        summary: Any = load_json(text)
        return summary if format_summary(summary) == text else None
    except (ValueError, AttributeError):
        return None


def _make_entry(folder: Path, name: str, known: JsonObject | None) -> JsonObject:
    """Create a file's entry of the commit record; a known checksum is not computed again."""
    path = folder / name
    entry = {"path": name, "bytes": path.stat().st_size}
    if name.endswith(".jsonl"):
        with path.open("rb") as file:
            chunks = iter(lambda: file.read(1 << 20), b"")
            entry["lines"] = sum(chunk.count(b"\n") for chunk in chunks)
    return entry | {"crc32c": known["crc32c"] if known else f"{compute_crc32c(path):08x}"}


def _count(record: RunRecord) -> JsonObject:
    """Return the counts of a run and its duration."""
    attempts, lines = record.attempts, record.lines
    skipped = len(record.facts.skipped_steps)  # each rollback skips one more step
    ended = [attempt for attempt in attempts if "ended" in attempt]
    graphs = (line["graphs"] for line in reversed(lines) if line.get("graphs"))
    return {
        "steps": lines[-1]["step"] if lines else 0,
        "lines": len(lines),
        "attempts": len(attempts),
        "killed": len(attempts) - len(ended),
        "rollbacks": skipped,
        "skipped_steps": skipped,
        "graphs": int(next(graphs, 0)),
        "host_reads": int(sum(line.get("host_reads") or 0 for line in lines)),
        "wall_s": sum_paid(record, list_attempts(record))[0] or 0.0,
    }


def _list_quantiles(record: RunRecord) -> JsonObject:
    quantiles: JsonObject = {}
    if (sketches := record.sketches) is None:
        return quantiles
    for name, sketch in sketches.merge().items():
        values = {f"p{100 * q:g}": sketch.get_quantile(q) for q in _QUANTILES}
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        bad = sum(sketch.special.values())
        quantiles[name] = {
            **finite,
            "count": sketch.count,
            "nonfinite": bad,
            "epsilon": sketch.epsilon,
            "from_step": sketches.from_step,
        }
    return quantiles


def _make_table(summary: JsonObject) -> str:
    """Format a table with one number per row, for spreadsheets."""
    rows: list[tuple[str, JsonValue]] = []
    for name, value in summary["final"].items():
        rows.append((name, summary["nonfinite"].get(name, value)))
    rows += [(f"count.{name}", value) for name, value in summary["counts"].items()]
    for metric, quantiles in summary["quantiles"].items():
        rows += [(f"quantile.{metric}.{name}", value) for name, value in quantiles.items()]
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(["number", "value"])
    writer.writerows(rows)
    return target.getvalue()
