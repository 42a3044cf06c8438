"""`summary.json`: how a run has ended, and the commit record of every file that it leaves behind.

It is written last, after `run.json` says complete: the record covers the final bytes of `run.json`
itself, so that a digit that turns in it is found. `run.json` names the summary, so a program that
is killed between the two leaves a run that says complete and lacks what it names: `validate` tells,
and going on with the run, which has nothing left to train, writes both anew. Whoever goes on takes
the summary away before it changes anything else; so where one stands it holds for all files.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path

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
_LINES = ".jsonl"
_QUANTILES = (0.01, 0.5, 0.95, 0.99)


def write_summary(folder: Path, artifacts: Sequence[JsonObject], remote: str = "") -> None:
    """Write a run's summary and commit record, on its bucket too, once all else is final.

    Args:
      artifacts: as `publish_artifacts` gave them.
      remote: the run's place on a bucket; empty: it has none.

    Raises:
      OSError: the disk or the store refuses.
    """
    record = RunRecord(folder)
    told: JsonObject = {"schema_version": SCHEMA_VERSION}
    told |= {key: record.facts.get(key) for key in ("id", "status", "reason")}
    told |= {"path": record.path, "counts": _count(record)}
    told["final"], told["nonfinite"] = _tell_final(record)
    told["quantiles"] = _tell_quantiles(record)
    write_atomically(folder / SUMMARY_TABLE, _make_table(told))
    target = open_folder(remote) if remote else None
    if target is not None:
        target.put_file(folder / SUMMARY_TABLE, SUMMARY_TABLE)
    known = {one["path"]: one for one in artifacts}
    names = {*known, RUN_FILE, ATTEMPTS_FILE, ARTIFACTS_FILE, SUMMARY_TABLE}
    told["files"] = [_record(folder, name, known.get(name)) for name in sorted(names)]
    text = format_summary(told)
    write_atomically(folder / SUMMARY_FILE, text)
    if target is not None:
        target.write_text(SUMMARY_FILE, text)


def is_finished(run: Run, config: JsonMapping, ignored: Collection[str]) -> bool:
    """Return whether a run of this very configuration is complete with all that it leaves behind.

    Args:
      ignored: keys in which the configurations may differ.
    """
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
    """Take a summary away: the run is about to change.

    Raises:
      OSError: the disk or the store refuses.
    """
    for place in (*([open_folder(remote)] if remote else []), open_folder(folder)):
        for name in (SUMMARY_FILE, SUMMARY_TABLE):
            place.remove_file(name)


def format_summary(told: JsonObject) -> str:
    """The one text of a summary, its own checksum at the end."""
    told = {key: value for key, value in told.items() if key != "crc32c"}
    body = json.dumps(told, indent=1, allow_nan=False)
    return json.dumps({**told, "crc32c": _sign(body)}, indent=1, allow_nan=False) + "\n"


def read_summary(text: str) -> JsonObject | None:
    """What a summary's text says; none: it is torn, or one bit of it is not as it was written."""
    try:
        told = load_json(text)
        return told if format_summary(told) == text else None
    except (ValueError, AttributeError):
        return None


def _sign(text: str) -> str:
    import google_crc32c

    return f"{google_crc32c.value(text.encode()):08x}"


def _record(folder: Path, name: str, known: JsonObject | None) -> JsonObject:
    """A file's line of the commit record; what has been read once is not read again."""
    path = folder / name
    told = {"path": name, "bytes": path.stat().st_size}
    if name.endswith(_LINES):
        told["lines"] = _count_lines(path)
    return told | {"crc32c": known["crc32c"] if known else f"{compute_crc32c(path):08x}"}


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _count(record: RunRecord) -> JsonObject:
    """What of a run is counted rather than measured, and how long it has taken."""
    attempts, lines = record.attempts, record.lines
    skipped = record.facts.get("skipped_steps")
    # Each time that a run goes back it skips one step more.
    skipped = len(skipped) if isinstance(skipped, list) else 0
    ended = [one for one in attempts if "ended" in one]
    return {
        "steps": lines[-1]["step"] if lines else 0,
        "lines": len(lines),
        "attempts": len(attempts),
        "killed": len(attempts) - len(ended),
        "rollbacks": skipped,
        "skipped_steps": skipped,
        "graphs": int(next((v for v in (one.get("graphs") for one in lines[::-1]) if v), 0)),
        "host_reads": int(sum(one.get("host_reads") or 0 for one in lines)),
        "wall_s": sum_paid(record, list_attempts(record))[0] or 0.0,
    }


def _tell_final(record: RunRecord) -> tuple[JsonObject, dict[str, str]]:
    """The numbers of a run's end as filters name them; those that are not finite by name."""
    numbers = record.values
    found = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return found, {name: str(v) for name, v in numbers.items() if not math.isfinite(v)}


def _tell_quantiles(record: RunRecord) -> JsonObject:
    """Of what the run has kept sketches of, by name."""
    kept = record.sketches
    found: JsonObject = {}
    for name, sketch in (kept.merge() if kept is not None else {}).items():
        values = {f"p{100 * q:g}": sketch.get_quantile(q) for q in _QUANTILES}
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        bad = sum(sketch.special.values())
        found[name] = {**finite, "count": sketch.count, "nonfinite": bad,
                       "epsilon": sketch.epsilon, "from_step": kept.from_step}  # fmt: skip
    return found


def _make_table(told: JsonObject) -> str:
    """A number a row, for spreadsheets."""
    rows: list[tuple[str, JsonValue]] = []
    for name, value in told["final"].items():
        rows.append((name, told["nonfinite"].get(name, value)))
    rows += [(f"count.{name}", value) for name, value in told["counts"].items()]
    for metric, quantiles in told["quantiles"].items():
        rows += [(f"quantile.{metric}.{name}", value) for name, value in quantiles.items()]
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(["number", "value"])
    writer.writerows(rows)
    return target.getvalue()
