"""Texts about the configuration: its errors, and the help of a key."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pydantic import ValidationError

from utils.config.foreign_flags import AMP
from utils.config.keys import Key, find_keys, iterate_keys
from utils.errors import UserError, get_hint, get_near_names

# Error type of pydantic -> rule; pydantic's numbers and choices are filled in.
_RULES = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "give true or false"),
    "dict_type": "write a mapping, as {{name: value}}",
    "finite_number": "give a finite number",
    **dict.fromkeys(("float_parsing", "float_type"), "give a number"),
    "greater_than": "it must be greater than {gt}",
    "greater_than_equal": "it must be at least {ge}",
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), "give a whole number"),
    "int_parsing_size": "it is too large; give a smaller whole number",
    "less_than": "it must be less than {lt}",
    "less_than_equal": "it must be at most {le}",
    **dict.fromkeys(("list_type", "tuple_type"), "write a list, as [a, b]"),
    "literal_error": "choose {expected}",
    "model_type": "write keys and values, as {{name: value}}",
    "string_type": "give a word; quote numbers, true and false",
}
_COMMA = re.compile(r"-?\d+,\d+")
_POINT = "decimals are written with a point, as 0.003, and not with a comma"
# Rules of single keys that are more precise than the error type's.
_OWN_RULES = {"profile.steps": "write FIRST-LAST, as 20-25"}
# Rules of single values, which other trainers have.
_VALUE_RULES = {("runtime.precision", "amp"): f"choose {AMP}"}


def explain(error: ValidationError) -> tuple[UserError, tuple[str | int, ...]]:
    """Return the first error of a validation, in one line, and its location."""
    problems = error.errors()
    # A misspelled key explains a missing one.
    misspelled = [item for item in problems if item["type"] in ("extra_forbidden", "invalid_key")]
    problem = (misspelled or problems)[0]
    place = problem["loc"]
    key = ".".join(str(part) for part in place)
    if problem["type"] == "extra_forbidden":
        text = f"unknown key {key}; {_hint_key(place, problem['input'])}"
        return UserError(text, code="config.unknown_key", key=key), place
    if problem["type"] == "invalid_key":
        section = ".".join(str(part) for part in place[:-1])
        text = f"{section} has the number {place[-1]} for a key; {_POINT}"
        return UserError(text, code="config.unknown_key", key=section), place
    if problem["type"] == "missing":
        text = f"{key} is missing; set it"
        return UserError(text, code="config.missing_key", key=key), place
    rule = _VALUE_RULES.get((key, str(problem["input"]).lower()), _OWN_RULES.get(key))
    if rule is None and problem["type"] in _RULES:
        # 1 for 1.0
        limits = {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in problem.get("ctx", {}).items()
        }
        rule = _RULES[problem["type"]].format(**limits)
    rule = rule or problem["msg"][0].lower() + problem["msg"][1:]
    if _COMMA.fullmatch(str(problem["input"])):
        rule = f"{rule}; {_POINT}"
    more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
    text = f"{key} ({problem['input']!r}): {rule}; see python main.py --help{more}"
    return UserError(text, code="config.invalid_value", key=key, value=problem["input"]), place


def describe_key(key: Key) -> str:
    """Return further rules of a key in brackets, for the help; empty without any."""
    parts = []
    if key.resume != "refused":
        parts.append("resume: " + key.resume.replace("_", " "))
    if key.devices:
        value = f"{key.devices.value}: " if key.devices.value else ""
        parts.append(f"{value}{' and '.join(key.devices.names)} only")
    if key.known:
        parts.append(f"known: {', '.join(key.known)}; run.imports may add others")
    return f"[{'; '.join(parts)}]" if parts else ""


def get_near_keys(name: str, known: Iterable[str]) -> str:
    """Return a hint by similarity with the whole key, else with its last word."""
    known = list(known)
    hint = get_hint(name, known)
    if hint.startswith("did you mean"):
        return hint
    last = name.rpartition(".")[2]
    same = [key for key in known if key.rpartition(".")[2] == last]
    if same:
        return "did you mean " + " or ".join(repr(key) for key in same) + "?"
    section = name.partition(".")[0]
    in_section = [key for key in known if key.startswith(f"{section}.")]
    if in_section:
        return f"keys of {section}: " + ", ".join(k.partition(".")[2] for k in in_section)
    return "see python main.py --help"


def _hint_key(place: tuple[str | int, ...], value: object) -> str:
    """Suggest a known key in place of an unknown one; a section if its value is a mapping."""
    key = ".".join(str(part) for part in place)
    if len(place) == 1 and key in set(iterate_keys()):
        section, _, name = key.partition(".")
        return f"write it as {section}: {{{name}: VALUE}}"
    if any(isinstance(part, int) for part in place):
        return get_hint(str(place[-1]), find_keys(place[:-1]))
    sections = {name.partition(".")[0] for name in iterate_keys()}
    near = get_near_names(key, sections) if len(place) == 1 and isinstance(value, dict) else []
    if near:
        return f"did you mean {near[0]!r}?"
    return get_near_keys(key, [*iterate_keys(), *(["extends"] if len(place) == 1 else [])])
