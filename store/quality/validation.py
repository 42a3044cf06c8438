"""Checks a run directory against schemas, order and checksums: what is torn or changed.

The summary's commit record covers every file of a complete run but the tags, which people write
later and which have a checksum of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError
from pydantic_core import from_json

from store.query.config_text import parse_config
from store.query.modules import MODULES_FILE
from store.query.record import NEWEST_SCHEMA, RunRecord
from store.query.schemas import MODELS
from store.query.tags import TAGS_FILE, is_whole
from store.record.artifacts import ARTIFACTS_FILE
from store.record.attempts import ATTEMPTS_FILE, merge_attempts
from store.record.environment import ENVIRONMENT_FILE
from store.record.history import METRICS_FILE
from store.record.hits import HITS_FILE, parse_hits, read_header
from store.record.ids import CONFIG_FILE, RUN_FILE
from store.record.run_file import RunFacts, fit
from store.record.source import DIFF_FILE, unpack_diff
from store.record.spans import SPANS_FILE
from store.record.summary import SUMMARY_FILE, read_summary
from store.record.windows import SKETCHES_FILE
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue, is_count
from utils.storage.folder import COMMIT_FILE, Folder

# damage: bytes are lost or changed; torn: an unfinished end, which readers leave out;
# odd: readable, but against a schema or the order of lines.
Grade = Literal["damage", "torn", "odd"]
_MOST_LINES = 5
_CHECKPOINTS, _STATE_FILE, _BEST_FILE = "checkpoints", "state.json", "best.json"
# Files of one JSON object -> their model.
_WHOLE = {
    ARTIFACTS_FILE: "artifacts",
    TAGS_FILE: "tags",
    ENVIRONMENT_FILE: "environment",
    SUMMARY_FILE: "summary",
    SKETCHES_FILE: "sketches",
    MODULES_FILE: "modules",
}
_NAMES = (RUN_FILE, METRICS_FILE, ATTEMPTS_FILE, SPANS_FILE, CONFIG_FILE, *_WHOLE)
# Files that comparisons, gates, traces and costs read.
READ_FILES = (RUN_FILE, METRICS_FILE, SPANS_FILE, CONFIG_FILE)
_BAD_SUM = "has other bytes than its checksum says"


@dataclass(frozen=True)
class RunFault:
    """A fault of a run: `file` below its directory, `text` with the line number if any."""

    grade: Grade
    file: str
    text: str


def check_run(
    folder: Folder, *, is_alive: bool = False, is_thorough: bool = False
) -> list[RunFault]:
    """Find all faults of a run; `is_thorough` compares sha256, a live run's files may be torn."""
    texts = folder.read_texts(_NAMES)
    faults = list(_check_file(texts, RUN_FILE, "run"))
    facts = fit(RunFacts, _parse(texts.get(RUN_FILE, "")) or {})
    is_complete = facts.status == "complete"
    # Where a commit record covers the bytes, a torn line was already torn when the run ended.
    is_last_word = is_complete and SUMMARY_FILE not in texts
    faults += _check_lines(texts, METRICS_FILE, "metric_line", is_complete=is_last_word)
    faults += _check_steps(texts.get(METRICS_FILE, ""), facts)
    faults += _check_lines(texts, ATTEMPTS_FILE, "attempt_line", is_complete=is_last_word)
    faults += _check_lines(texts, SPANS_FILE, "span_line", is_complete=is_last_word)
    for file, model in _WHOLE.items():
        if file in texts:
            faults += _check_file(texts, file, model)
    if TAGS_FILE in texts and not is_whole(texts[TAGS_FILE]):
        faults.append(RunFault("damage", TAGS_FILE, _BAD_SUM))
    if CONFIG_FILE in texts and not parse_config(texts[CONFIG_FILE]):
        faults.append(RunFault("damage", CONFIG_FILE, "is no YAML of sections"))
    if is_complete:
        faults += _check_end(texts, facts)
        faults += _check_artifacts(folder, texts, is_thorough=is_thorough)
    faults += _check_hits(folder)
    if not is_alive:
        # A thorough check of all tensors reads these markers and tables elsewhere.
        faults += [] if is_thorough else _check_markers(folder.child(_CHECKPOINTS))
        faults += _check_best(folder.child(_CHECKPOINTS))
    faults += _check_commit(folder, texts, facts)
    if is_thorough and not is_alive:
        faults += _check_source(folder, texts)
    return [fault for fault in faults if not (is_alive and fault.grade == "torn")]


def find_damaged_files(
    record: RunRecord, files: Collection[str] = READ_FILES
) -> Iterator[tuple[str, str]]:
    """Yield files of a complete run that do not match its summary, if it has one, and why."""
    if not record.is_complete:
        return
    text = record.folder.read_texts([SUMMARY_FILE]).get(SUMMARY_FILE)
    if text is None:
        if record.facts.summary == SUMMARY_FILE:
            yield SUMMARY_FILE, f"is not there, but {RUN_FILE} names it"
        return
    summary = read_summary(text)
    if summary is None:
        yield SUMMARY_FILE, _BAD_SUM
        return
    for entry in summary.get("files", []):
        if entry["path"] in files:
            faults = check_bytes(record.folder, entry)
            yield from ((fault.file, fault.text) for fault in faults)


def _check_file(texts: dict[str, str], file: str, model: str) -> Iterator[RunFault]:
    """Check that a JSON file is whole and fits its schema."""
    if file not in texts:
        yield RunFault("damage", file, "is not there")
        return
    value = _parse(texts[file])
    if value is None or not texts[file].endswith("\n"):
        yield RunFault("damage", file, "is torn: no whole JSON object and newline")
        return
    yield from (RunFault("odd", file, text) for text in _validate(model, value))


def _check_lines(
    texts: dict[str, str], file: str, model: str, *, is_complete: bool
) -> Iterator[RunFault]:
    """Check that lines are whole and fit their schema."""
    grade: Grade = "damage" if is_complete else "torn"
    text = texts.get(file, "")
    if text and not text.endswith("\n"):
        yield RunFault(grade, file, "its last line is torn")
        text = text[: text.rfind("\n") + 1]
    bad_lines = 0
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        value = _parse(line)
        if value is None:
            # The next writer begins a new line after one that a kill has torn.
            faults = [RunFault(grade, file, f"line {number} is damaged")]
        else:
            words = (f"line {number}: {text}" for text in _validate(model, value))
            faults = [RunFault("odd", file, text) for text in words]
        bad_lines += bool(faults)
        if bad_lines > _MOST_LINES:
            yield RunFault("damage", file, f"and more from line {number} on")
            return
        yield from faults


def _check_steps(text: str, facts: RunFacts) -> Iterator[RunFault]:
    """Check that steps rise within a kind, and that no line is of a later attempt than the last."""
    last: dict[str, int] = {}
    attempts = facts.attempts
    for number, line in enumerate(text.split("\n"), start=1):
        value = _parse(line)
        if value is None or not is_count(value.get("step")):
            continue  # the schema reports it
        is_eval = any(name.startswith("eval_") for name in value)  # version 1 had no kinds
        kind = str(value.get("kind", "eval" if is_eval else "train"))
        if value["step"] <= last.get(kind, -1):
            words = f"step {value['step']} of {kind} after step {last[kind]}"
            yield RunFault("odd", METRICS_FILE, f"line {number}: {words}")
            return
        last[kind] = value["step"]
        attempt = value.get("attempt", 0)
        if attempts is not None and isinstance(attempt, int) and attempt > attempts:
            words = f"attempt {attempt}, but {RUN_FILE} has {attempts}"
            yield RunFault("odd", METRICS_FILE, f"line {number}: {words}")
            return


def _check_end(texts: dict[str, str], facts: RunFacts) -> Iterator[RunFault]:
    """Check that a complete run has a history, and attempts of which the last is complete."""
    if METRICS_FILE not in texts:
        yield RunFault("damage", METRICS_FILE, "is not there, but the run is complete")
    if facts.schema_version < NEWEST_SCHEMA:
        return
    attempts = merge_attempts(texts.get(ATTEMPTS_FILE, ""))
    if not attempts or attempts[-1].get("status") != "complete":
        yield RunFault("damage", ATTEMPTS_FILE, "records no end, but the run is complete")
    if facts.attempts is not None and len(attempts) != facts.attempts:
        text = f"records {len(attempts)} attempts, {RUN_FILE} {facts.attempts}"
        yield RunFault("damage", ATTEMPTS_FILE, text)


def _check_hits(folder: Folder) -> Iterator[RunFault]:
    try:
        with folder.open_local(HITS_FILE) as path:
            content = path.read_bytes()
    except OSError:  # not every run has the file
        return
    if parse_hits(content) is None:
        yield RunFault("damage", HITS_FILE, "is torn, or has other bytes than its checksums say")
        return
    for text in _validate("hits", read_header(content)):
        yield RunFault("odd", HITS_FILE, text)


def _check_commit(folder: Folder, texts: dict[str, str], facts: RunFacts) -> Iterator[RunFault]:
    """Check every file against the summary, and that a summary named by `run.json` exists."""
    if SUMMARY_FILE not in texts:
        if facts.status == "complete" and facts.summary == SUMMARY_FILE:
            words = f"is not there, but {RUN_FILE} says complete: resume the run to write it"
            yield RunFault("damage", SUMMARY_FILE, words)
        return
    summary = read_summary(texts[SUMMARY_FILE])
    if summary is None:
        yield RunFault("damage", SUMMARY_FILE, _BAD_SUM)
        return
    for entry in _list_entries(summary.get("files")):
        yield from check_bytes(folder, entry)


def _check_markers(folder: Folder) -> Iterator[RunFault]:
    """Check the small files of checkpoints; only `tools.checkpoint` reads tensors."""
    names = [name for name in folder.list_names() if name.startswith("step_")]
    texts = folder.read_texts(
        f"{name}/{file}" for name in names for file in (COMMIT_FILE, _STATE_FILE)
    )
    for name in names:
        marker = texts.get(f"{name}/{COMMIT_FILE}")
        if marker is None:
            continue  # never complete: readers skip it
        text = texts.get(f"{name}/{_STATE_FILE}", "")
        digest = (_parse(marker) or {}).get("state_sha256")
        if digest != hashlib.sha256(text.encode()).hexdigest():
            words = f"{_STATE_FILE} and {COMMIT_FILE} do not fit each other"
            yield RunFault("damage", f"{_CHECKPOINTS}/{name}", words)
            continue
        yield from _check_sizes(folder.child(name), _parse(text) or {})


def _check_sizes(checkpoint: Folder, state: JsonObject) -> Iterator[RunFault]:
    """Check the sizes of tensor files against the state; their content would take much longer."""
    files = state.get("files")
    for name, size in (files if isinstance(files, dict) else {}).items():
        try:
            actual = checkpoint.get_size(name)
        except OSError:
            if COMMIT_FILE not in checkpoint.list_names():
                return  # a running program has deleted the checkpoint since
            words = "is not there"
        else:
            if actual == size:
                continue
            words = f"has {actual} bytes, not {size}"
        yield RunFault("damage", f"{_CHECKPOINTS}/{checkpoint.name}/{name}", words)


def _check_best(folder: Folder) -> Iterator[RunFault]:
    """Check the file that names the best checkpoint; it has no checksum, but a fixed form."""
    text = folder.read_texts([_BEST_FILE]).get(_BEST_FILE)
    if text is None:
        return
    step = (_parse(text) or {}).get("step")
    words = ""
    if type(step) is not int or f"step_{step:08d}" not in folder.list_names():
        words = "names no checkpoint that is there"
    elif text not in (json.dumps({"step": step}), json.dumps({"schema_version": 2, "step": step})):
        words = "has another text than a program writes"
    if words:
        yield RunFault("damage", f"{_CHECKPOINTS}/{_BEST_FILE}", words)


def _check_source(folder: Folder, texts: dict[str, str]) -> Iterator[RunFault]:
    source = (_parse(texts.get(ENVIRONMENT_FILE, "")) or {}).get("source")
    if not isinstance(source, dict) or source.get("diff") != "whole":
        return
    try:
        with folder.open_local(DIFF_FILE) as path:
            text = unpack_diff(path.read_bytes())
    except OSError:
        yield RunFault("damage", DIFF_FILE, "is not there")
    except UserError as error:
        yield RunFault("damage", DIFF_FILE, str(error))
    else:
        if hashlib.sha256(text.encode()).hexdigest() != source.get("sha256"):
            yield RunFault("damage", DIFF_FILE, f"is not the patch that {ENVIRONMENT_FILE} names")


def _check_artifacts(
    folder: Folder, texts: dict[str, str], *, is_thorough: bool
) -> Iterator[RunFault]:
    if SUMMARY_FILE in texts and not is_thorough:
        return  # the commit record covers them
    for entry in _list_entries((_parse(texts.get(ARTIFACTS_FILE, "")) or {}).get("artifacts")):
        faults = list(check_bytes(folder, entry, ARTIFACTS_FILE))
        yield from faults
        if is_thorough and not faults:
            with folder.open_local(entry["path"]) as path, path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != entry.get("sha256"):
                yield RunFault("damage", entry["path"], "has another sha256")


def _list_entries(value: JsonValue) -> list[JsonObject]:
    entries = value if isinstance(value, list) else []
    return [one for one in entries if isinstance(one, dict) and isinstance(one.get("path"), str)]


def check_bytes(
    folder: Folder, entry: JsonObject, source: str = SUMMARY_FILE
) -> Iterator[RunFault]:
    """Check that a file has the size and the checksum that an entry of `source` states."""
    path = entry["path"]
    if ".." in path.split("/") or path.startswith("/") or "\0" in path:
        yield RunFault("odd", source, f"{path!r} is no path below the run")
        return
    parent, _, name = path.rpartition("/")
    folder = folder.child(parent) if parent else folder
    try:
        if (size := folder.get_size(name)) != entry.get("bytes"):
            yield RunFault("damage", path, f"has {size} bytes, not {entry.get('bytes')}")
        elif f"{folder.get_checksum(name):08x}" != entry.get("crc32c"):
            yield RunFault("damage", path, _BAD_SUM)
    except (OSError, ValueError):  # a name that no file system takes is not there either
        yield RunFault("damage", path, "is not there")


def _parse(text: str) -> JsonObject | None:
    """Parse strict JSON; None if the text is not an object."""
    try:
        value = from_json(text, allow_inf_nan=True)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _validate(model: str, value: JsonValue) -> list[str]:
    """Return the first violation of a schema, in words; empty if the value fits."""
    try:
        MODELS[model].model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        shown = json.dumps(first["input"], default=str)
        return [f"{key or 'it'}: {first['msg'].lower()} ({shown[:40]})"]
    return []
