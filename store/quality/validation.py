"""Holds a run directory against schemas, order and checksums: what is torn or changed.

Where a run has a summary its commit record covers every file but the tags, which people write later
and which have a checksum of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError
from pydantic_core import from_json

from store.query.config_text import parse_config
from store.query.record import NEWEST_SCHEMA
from store.query.schemas import MODELS
from store.query.tags import TAGS_FILE, is_whole
from store.record.artifacts import ARTIFACTS_FILE
from store.record.attempts import ATTEMPTS_FILE, merge_attempts
from store.record.environment import ENVIRONMENT_FILE
from store.record.history import METRICS_FILE
from store.record.hits import HITS_FILE, parse_hits, read_header
from store.record.ids import CONFIG_FILE, RUN_FILE
from store.record.source import DIFF_FILE, unpack_diff
from store.record.spans import SPANS_FILE
from store.record.summary import SUMMARY_FILE, read_summary
from store.record.windows import SKETCHES_FILE
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue, is_count
from utils.storage.folder import COMMIT_FILE, Folder

# damage: bytes are lost or changed; torn: an end that was being written, which readers leave out;
# odd: readable, but against a schema or the order of lines.
Grade = Literal["damage", "torn", "odd"]
_MOST_LINES = 5
_CHECKPOINTS, _STATE_FILE, _BEST_FILE = "checkpoints", "state.json", "best.json"
# Files of one JSON object -> the model that they fit.
_WHOLE = {ARTIFACTS_FILE: "artifacts", TAGS_FILE: "tags", ENVIRONMENT_FILE: "environment",
          SUMMARY_FILE: "summary", SKETCHES_FILE: "sketches"}  # fmt: skip
_NAMES = (RUN_FILE, METRICS_FILE, ATTEMPTS_FILE, SPANS_FILE, CONFIG_FILE, *_WHOLE)


@dataclass(frozen=True)
class RunFault:
    """One thing that is wrong with a run.

    Attributes:
      file: below the run's directory.
      text: what is wrong, with the line's number where there are lines.
    """

    grade: Grade
    file: str
    text: str


def check_run(
    folder: Folder, *, is_alive: bool = False, is_thorough: bool = False
) -> list[RunFault]:
    """Everything that is wrong with a run.

    Args:
      is_alive: a program is writing it, so that its files may end anywhere.
      is_thorough: look at sha256 beside crc32c and the size.
    """
    texts = folder.read_texts(_NAMES)
    faults = list(_check_file(texts, RUN_FILE, "run"))
    facts = _parse(texts.get(RUN_FILE, ""))
    facts = facts if isinstance(facts, dict) else {}
    is_complete = facts.get("status") == "complete"
    # Where a record covers the bytes, a line that is torn was so when the run ended: by a kill.
    is_last_word = is_complete and SUMMARY_FILE not in texts
    faults += _check_lines(texts, METRICS_FILE, "metric_line", is_complete=is_last_word)
    faults += _check_steps(texts.get(METRICS_FILE, ""), facts)
    faults += _check_lines(texts, ATTEMPTS_FILE, "attempt_line", is_complete=is_last_word)
    faults += _check_lines(texts, SPANS_FILE, "span_line", is_complete=is_last_word)
    for file, model in _WHOLE.items():
        if file in texts:
            faults += _check_file(texts, file, model)
    if TAGS_FILE in texts and not is_whole(texts[TAGS_FILE]):
        faults.append(RunFault("damage", TAGS_FILE, "has other bytes than its checksum says"))
    if CONFIG_FILE in texts and not parse_config(texts[CONFIG_FILE]):
        faults.append(RunFault("damage", CONFIG_FILE, "is no YAML of sections"))
    if is_complete:
        faults += _check_end(texts, facts)
        faults += _check_artifacts(folder, texts, is_thorough=is_thorough)
    faults += _check_hits(folder)
    if not is_alive:
        # Whoever reads all tensors reads markers and tables, too.
        faults += [] if is_thorough else _check_markers(folder.child(_CHECKPOINTS))
        faults += _check_best(folder.child(_CHECKPOINTS))
    faults += _check_commit(folder, texts, facts)
    if is_thorough and not is_alive:
        faults += _check_source(folder, texts)
    return [fault for fault in faults if not (is_alive and fault.grade == "torn")]


def _check_file(texts: dict[str, str], file: str, model: str) -> Iterator[RunFault]:
    """A whole JSON file that fits its schema."""
    if file not in texts:
        yield RunFault("damage", file, "is not there")
        return
    value = _parse(texts[file])
    if value is None or not texts[file].endswith("\n"):
        yield RunFault("damage", file, "is torn: no whole JSON object and newline")
        return
    yield from (RunFault("odd", file, text) for text in _hold(model, value))


def _check_lines(
    texts: dict[str, str], file: str, model: str, *, is_complete: bool
) -> Iterator[RunFault]:
    """Lines that are whole and fit their schema."""
    text = texts.get(file, "")
    if text and not text.endswith("\n"):
        grade: Grade = "damage" if is_complete else "torn"
        yield RunFault(grade, file, "its last line is torn")
        text = text[: text.rfind("\n") + 1]
    found = 0
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        value = _parse(line)
        if value is None:
            # The next writer begins a new line behind one that a kill has torn.
            faults = [
                RunFault("damage" if is_complete else "torn", file, f"line {number} is damaged")
            ]
        else:
            told = _hold(model, value)
            faults = [RunFault("odd", file, f"line {number}: {text}") for text in told]
        found += bool(faults)
        if found > _MOST_LINES:
            yield RunFault("damage", file, f"and more from line {number} on")
            return
        yield from faults


def _check_steps(text: str, facts: JsonObject) -> Iterator[RunFault]:
    """Steps rise within a kind, and no line is of an attempt that nobody has begun."""
    last: dict[str, int] = {}
    attempts = facts.get("attempts")
    for number, line in enumerate(text.split("\n"), start=1):
        value = _parse(line)
        if not isinstance(value, dict) or not is_count(value.get("step")):
            continue  # the schema has said so
        is_eval = any(name.startswith("eval_") for name in value)  # a line of before kinds
        kind = str(value.get("kind", "eval" if is_eval else "train"))
        if value["step"] <= last.get(kind, -1):
            words = f"step {value['step']} of {kind} after step {last[kind]}"
            yield RunFault("odd", METRICS_FILE, f"line {number}: {words}")
            return
        last[kind] = value["step"]
        attempt = value.get("attempt", 0)
        if isinstance(attempts, int) and isinstance(attempt, int) and attempt > attempts:
            words = f"attempt {attempt}, but {RUN_FILE} knows {attempts}"
            yield RunFault("odd", METRICS_FILE, f"line {number}: {words}")
            return


def _check_end(texts: dict[str, str], facts: JsonObject) -> Iterator[RunFault]:
    """A run that says complete has an end in its attempts, and a history."""
    if METRICS_FILE not in texts:
        yield RunFault("damage", METRICS_FILE, "is not there, but the run is complete")
    version = facts.get("schema_version", 1)
    if not isinstance(version, int) or version < NEWEST_SCHEMA:
        return
    attempts = merge_attempts(texts.get(ATTEMPTS_FILE, ""))
    if not attempts or attempts[-1].get("status") != "complete":
        yield RunFault("damage", ATTEMPTS_FILE, "tells no end, but the run is complete")
    if isinstance(facts.get("attempts"), int) and len(attempts) != facts["attempts"]:
        text = f"tells of {len(attempts)} attempts, {RUN_FILE} of {facts['attempts']}"
        yield RunFault("damage", ATTEMPTS_FILE, text)


def _check_hits(folder: Folder) -> Iterator[RunFault]:
    """The answers to single examples, where a run keeps them."""
    try:
        with folder.open_local(HITS_FILE) as path:
            content = path.read_bytes()
    except OSError:
        return
    if parse_hits(content) is None:
        yield RunFault("damage", HITS_FILE, "is torn, or has other bytes than its checksums say")
        return
    yield from (RunFault("odd", HITS_FILE, text) for text in _hold("hits", read_header(content)))


def _check_commit(folder: Folder, texts: dict[str, str], facts: JsonObject) -> Iterator[RunFault]:
    """Every file is as the summary says; a summary that `run.json` names is there."""
    if SUMMARY_FILE not in texts:
        if facts.get("status") == "complete" and facts.get("summary") == SUMMARY_FILE:
            words = f"is not there, but {RUN_FILE} says complete: go on with the run to write it"
            yield RunFault("damage", SUMMARY_FILE, words)
        return
    told = read_summary(texts[SUMMARY_FILE])
    if told is None:
        yield RunFault("damage", SUMMARY_FILE, "has other bytes than its checksum says")
        return
    files = told.get("files")
    for one in files if isinstance(files, list) else []:
        if isinstance(one, dict) and isinstance(one.get("path"), str):
            yield from check_bytes(folder, one)


def _check_markers(place: Folder) -> Iterator[RunFault]:
    """The small files of checkpoints in the run; tensors take a program that knows them."""
    names = [name for name in place.list_names() if name.startswith("step_")]
    texts = place.read_texts(
        f"{name}/{file}" for name in names for file in (COMMIT_FILE, _STATE_FILE)
    )
    for name in names:
        marker = texts.get(f"{name}/{COMMIT_FILE}")
        if marker is None:
            continue  # it was never whole: readers pass it over
        text = texts.get(f"{name}/{_STATE_FILE}", "")
        told = (_parse(marker) or {}).get("state_sha256")
        if told != hashlib.sha256(text.encode()).hexdigest():
            words = f"{_STATE_FILE} and {COMMIT_FILE} do not fit each other"
            yield RunFault("damage", f"{_CHECKPOINTS}/{name}", words)
            continue
        yield from _check_sizes(place.child(name), _parse(text) or {})


def _check_sizes(checkpoint: Folder, state: JsonObject) -> Iterator[RunFault]:
    """The files of tensors are as long as the state says; what is in them takes much longer."""
    files = state.get("files")
    for name, size in (files if isinstance(files, dict) else {}).items():
        try:
            found = checkpoint.get_size(name)
        except OSError:
            if COMMIT_FILE not in checkpoint.list_names():
                return  # a program at work has deleted the checkpoint since
            words = "is not there"
        else:
            if found == size:
                continue
            words = f"has {found} bytes, not {size}"
        yield RunFault("damage", f"{_CHECKPOINTS}/{checkpoint.name}/{name}", words)


def _check_best(place: Folder) -> Iterator[RunFault]:
    """The file that names the best checkpoint has no checksum, but one text alone."""
    text = place.read_texts([_BEST_FILE]).get(_BEST_FILE)
    if text is None:
        return
    step = (_parse(text) or {}).get("step")
    words = ""
    if type(step) is not int or f"step_{step:08d}" not in place.list_names():
        words = "names no checkpoint that is there"
    elif text not in (json.dumps({**head, "step": step}) for head in ({}, {"schema_version": 2})):
        words = "has another text than a program writes"
    if words:
        yield RunFault("damage", f"{_CHECKPOINTS}/{_BEST_FILE}", words)


def _check_source(folder: Folder, texts: dict[str, str]) -> Iterator[RunFault]:
    """The source's patch is the one that the environment tells of."""
    told = (_parse(texts.get(ENVIRONMENT_FILE, "")) or {}).get("source")
    if not isinstance(told, dict) or told.get("diff") != "whole":
        return
    try:
        with folder.open_local(DIFF_FILE) as path:
            text = unpack_diff(path.read_bytes())
    except OSError:
        yield RunFault("damage", DIFF_FILE, "is not there")
    except UserError as error:
        yield RunFault("damage", DIFF_FILE, str(error))
    else:
        if hashlib.sha256(text.encode()).hexdigest() != told.get("sha256"):
            yield RunFault("damage", DIFF_FILE, f"is not the patch that {ENVIRONMENT_FILE} names")


def _check_artifacts(
    folder: Folder, texts: dict[str, str], *, is_thorough: bool
) -> Iterator[RunFault]:
    value = _parse(texts.get(ARTIFACTS_FILE, ""))
    # What the commit record covers is not read twice.
    if SUMMARY_FILE in texts and not is_thorough:
        return
    found = value.get("artifacts") if isinstance(value, dict) else None
    for one in found if isinstance(found, list) else []:
        if isinstance(one, dict) and isinstance(one.get("path"), str):
            yield from _check_artifact(folder, one, is_thorough=is_thorough)


def _check_artifact(folder: Folder, told: JsonObject, *, is_thorough: bool) -> Iterator[RunFault]:
    faults = list(check_bytes(folder, told, ARTIFACTS_FILE))
    yield from faults
    if is_thorough and not faults:
        parent, _, name = told["path"].rpartition("/")
        if _hash(folder.child(parent) if parent else folder, name) != told.get("sha256"):
            yield RunFault("damage", told["path"], "has another sha256")


def check_bytes(folder: Folder, told: JsonObject, source: str = SUMMARY_FILE) -> Iterator[RunFault]:
    """A file has the size and the checksum that another file tells."""
    path = told["path"]
    parent, _, name = path.rpartition("/")
    if ".." in path.split("/") or path.startswith("/") or "\0" in path:
        yield RunFault("odd", source, f"{path!r} is no path below the run")
        return
    place = folder.child(parent) if parent else folder
    try:
        if place.get_size(name) != told.get("bytes"):
            words = f"has {place.get_size(name)} bytes, not {told.get('bytes')}"
            yield RunFault("damage", path, words)
        elif f"{place.get_checksum(name):08x}" != told.get("crc32c"):
            yield RunFault("damage", path, "has other bytes than its checksum says")
    except (OSError, ValueError):  # a name that no file system takes is not there either
        yield RunFault("damage", path, "is not there")


def _hash(folder: Folder, name: str) -> str:
    with folder.open_local(name) as path, path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parse(text: str) -> JsonValue:
    """An object of strict JSON; none: it is none."""
    try:
        value = from_json(text, allow_inf_nan=True)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _hold(model: str, value: JsonValue) -> list[str]:
    """What of a value does not fit a schema, in a line each."""
    try:
        MODELS[model].model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        found = json.dumps(first["input"], default=str)
        return [f"{place or 'it'}: {first['msg'].lower()} ({found[:40]})"]
    return []
