"""Reads a YAML file of keys, more strictly than YAML requires."""

from __future__ import annotations

from pathlib import Path

import yaml

from utils.errors import UserError
from utils.json_types import JsonObject

UNREADABLE = "config.unreadable_file"


def read_yaml(path: str, reason: str) -> JsonObject:
    """Read the sections of a file; a UserError begins with the `reason`, such as --config."""
    text = _read_text(path, reason)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        _refuse_repeats(node, f"{reason} {path}", "")
        values = loader.construct_document(node)
    except yaml.YAMLError as error:
        problem = _describe_problem(error, text)
        text = f"{reason} {path} is not valid YAML: {problem}"
        raise UserError(text, code=UNREADABLE) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{reason} {path} holds a {type(values).__name__}; write sections of keys")
    return values


def _describe_problem(error: yaml.YAMLError, text: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return " ".join(str(error).split())
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: mark.column + 1]:
        return f"line {mark.line + 1} is indented by a tab, which YAML does not allow; use spaces"
    context = f" {error.context}" if error.context else ""
    return f"{error.problem} in line {mark.line + 1}, column {mark.column + 1}{context}"


def _read_text(path: str, reason: str) -> str:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"{reason} {path}: {error.strerror or error}; use a readable YAML file", code=UNREADABLE
        ) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{reason} {path}: byte 0x{content[error.start]:02x} in line {line} is not UTF-8; save "
            "the file as UTF-8",
            code=UNREADABLE,
        ) from error


def _refuse_repeats(node: yaml.Node, file: str, prefix: str) -> None:
    """Refuse repeated keys: YAML would keep the last, and so drop a whole section."""
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _refuse_repeats(item, file, f"{prefix}{number}.")
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[object, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in lines:
            raise UserError(
                f"{file}: {prefix}{key.value} is set in line {lines[key.value]} and again "
                f"in line {line}; keep one of them"
            )
        lines[key.value] = line
        _refuse_repeats(value, file, f"{prefix}{key.value}.")
