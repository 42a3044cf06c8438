"""Errors for programs: each has a code, and its sentence is taken apart."""

from __future__ import annotations

import ast
import re
import traceback
from dataclasses import dataclass

from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue


@dataclass(frozen=True)
class ErrorCode:
    """What a code says; `rooms` are packages and modules whose errors without a code get it."""

    text: str
    rooms: tuple[str, ...] = ()


ERROR_CODES = {
    "checkpoint.refused": ErrorCode("a checkpoint is broken or not fit", ("utils.checkpoint",)),
    "compiler.refused": ErrorCode("the TPU compiler, or what it is asked", ("bill", "lab")),
    "config.conflict": ErrorCode("keys exclude each other, or one needs another"),
    "config.invalid_value": ErrorCode("a value of the wrong type, or out of its range or choices"),
    "config.missing_key": ErrorCode("a key that must be set is not"),
    "config.refused": ErrorCode("another fault of the configuration", ("utils.config",)),
    "config.unknown_flag": ErrorCode("a flag of the command line that does not exist"),
    "config.unknown_key": ErrorCode("a key of a YAML file that does not exist"),
    "config.unknown_name": ErrorCode(
        "a name that no registry has: of a source, a loss, an optimizer", ("utils.registry",)
    ),
    "config.unreadable_file": ErrorCode("a YAML file that is missing or not valid"),
    "config.unsupported": ErrorCode("a key or value that the device does not support"),
    "data.refused": ErrorCode("a dataset, its files or its examples", ("big_vision", "datasets")),
    "data.unknown_split": ErrorCode("a split that the dataset does not have"),
    "imports.refused": ErrorCode("a module of run.imports", ("utils.own_code",)),
    "launch.refused": ErrorCode("a machine, a cloud or its programs", ("train",)),
    "loss.refused": ErrorCode("a loss or its arguments", ("losses",)),
    "model.refused": ErrorCode("a model, its arguments or its layers", ("models",)),
    "optimizer.refused": ErrorCode("an optimizer, a schedule or groups", ("optim_factory",)),
    "preprocessing.refused": ErrorCode("a preprocessing string", ("big_vision.pp",)),
    "proof.refused": ErrorCode("a program of proofs/", ("proofs",)),
    "resume.changed_key": ErrorCode("a key that may not change when a run continues"),
    "resume.refused": ErrorCode("a run cannot be continued", ("job.resume",)),
    "run.busy": ErrorCode("another program is writing the run"),
    "run.refused": ErrorCode("a run cannot be made as it is asked for", ("job", "engine", "main")),
    "runtime.refused": ErrorCode("the device, its processes or their group", ("utils.runtime",)),
    "service.busy": ErrorCode("too many requests; try again later (429, 503)"),
    "service.conflict": ErrorCode("the state of a job or run does not allow it (409)"),
    "service.failed": ErrorCode("the service itself has failed (500)"),
    "service.forbidden": ErrorCode("the caller's role does not allow it (403)"),
    "service.invalid_request": ErrorCode("a request that is malformed or too large (4xx)"),
    "service.not_found": ErrorCode("a run, job or page that does not exist (404)"),
    "service.not_signed_in": ErrorCode("no valid token or session (401)"),
    "service.refused": ErrorCode("a submission, a sweep or a setting", ("service",)),
    "storage.failed": ErrorCode("a disk or a bucket does not answer or refuses"),
    "storage.refused": ErrorCode("a path or a URL", ("utils.storage",)),
    "store.refused": ErrorCode("a run, a filter, a gate or a report of a store", ("store",)),
    "task.refused": ErrorCode("what is learnt, its teachers or its sets", ("tasks",)),
    "tool.refused": ErrorCode("what a program is asked to do", ("tools", "utils")),
    "usage.invalid": ErrorCode("a flag of a program, its value, or a command it does not have"),
    "weights.refused": ErrorCode("weights that are missing or do not fit", ("utils.weights",)),
}
_ROOMS = {room: code for code, entry in ERROR_CODES.items() for room in entry.rooms}
# What JSON has; another value stays text.
_READ = (bool, int, float, str, list, dict, type(None))
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
# `KEY (VALUE) rule`, `unknown KEY 'VALUE'`, `unknown key KEY`.
_SUBJECT = re.compile(
    r"(?P<kind>unknown (?:key |flag )?)?(?P<key>--[\w.-]+|[a-z_]+(?:\.[\w\[\]]+)+)"
    rf"(?: ?\((?P<value>{_QUOTED}|(?:[^()]|\([^()]*\))*)\)| (?P<name>{_QUOTED}))?(?P<rest>.*)"
)


def describe_error(error: BaseException, code: str = "") -> JsonObject:
    """Return code, key, value, rule and way out of an error, and its whole sentence.

    Key and value are null where the sentence names none.
    """
    sentence = " ".join(str(error).split())
    key: JsonValue = getattr(error, "key", "") or None
    value = getattr(error, "value", None)
    match = _SUBJECT.fullmatch(sentence)
    rest = sentence
    if match:
        rest = (match["kind"] or "") + match["rest"]
        if key is None:
            key, text = match["key"], match["value"] or match["name"]
            value = None if text is None else _read(text)
    rule, _, way_out = rest.partition("; ")
    return {
        "code": code or find_code(error),
        "key": key,
        "value": value,
        "rule": rule.strip(" :"),
        "way_out": way_out,
        "message": sentence,
    }


def find_code(error: BaseException) -> str:
    """Return an error's own code, or else that of the room that raised it."""
    if not isinstance(error, UserError):
        return "storage.failed" if isinstance(error, OSError) else "tool.refused"
    if error.code:
        return error.code
    frames = traceback.walk_tb(error.__traceback__)
    modules = [_name_module(frame.f_globals) for frame, _ in frames]
    for module in reversed(modules):  # the innermost room that has a code
        parts = module.split(".")
        for length in range(len(parts), 0, -1):
            if code := _ROOMS.get(".".join(parts[:length])):
                return code
    return "tool.refused"


def _name_module(names: JsonObject) -> str:
    spec = names.get("__spec__")  # of a program that runs as __main__, too
    return spec.name if spec is not None else str(names.get("__name__", ""))


def _read(text: str) -> JsonValue:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, _READ) else text
