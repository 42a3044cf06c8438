"""`RunFacts`: `run.json` as readers see it; its writer is `store.record.runs.Run.update`.

The file decides what a run is, so a wrong type in one of its first fields is damage.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainValidator, Strict, ValidationError

from utils.json_types import JsonObject, JsonValue, is_count, is_time


def _require(words: str, fits: Callable[[JsonValue], bool]) -> PlainValidator:
    def check(value: JsonValue) -> JsonValue:
        if value is None or fits(value):
            return value
        raise ValueError(f"({json.dumps(value)[:40]}) is not {words}")

    return PlainValidator(check)


Text = Annotated[str | None, _require("a text", lambda value: isinstance(value, str))]
Time = Annotated[float | None, _require("a time", is_time)]
Count = Annotated[int | None, _require("a count", is_count)]
Table = Annotated[
    JsonObject,
    _require("an object", lambda value: isinstance(value, dict)),
    AfterValidator(lambda value: value or {}),
]
# Empty if missing or of another type.
Items = Annotated[
    list[JsonValue], PlainValidator(lambda value: value if isinstance(value, list) else [])
]


class RunFacts(BaseModel):
    """The fields of a `run.json` that programs read; None or empty if missing or null."""

    model_config = ConfigDict(frozen=True)

    id: Text = None
    experiment: Text = None
    name: Text = None
    status: Text = None
    summary: Text = None
    started: Time = None
    ended: Time = None
    attempts: Count = None
    final_up_to_step: Count = None
    environment: Table = {}
    final: Table = {}
    nonfinite: Table = {}
    schema_version: Annotated[int, Strict()] = 1
    reason: Annotated[str | None, PlainValidator(lambda x: x if x is None else str(x))] = None
    lineage: Items = []
    skipped_steps: Items = []
    teachers: Items = []
    # of runs of version 1, instead of an id
    number: Annotated[int, PlainValidator(lambda x: x if isinstance(x, int) else 0)] = 0


def fit_facts(facts: JsonObject) -> RunFacts:
    """Return the facts of a file that may be damaged: fields of wrong types count as missing."""
    try:
        return RunFacts.model_validate(facts)
    except ValidationError as error:
        wrong = {fault["loc"][0] for fault in error.errors()}
        return RunFacts.model_validate({k: v for k, v in facts.items() if k not in wrong})


def describe_fault(error: ValidationError) -> str:
    """Describe the first wrong field: `started ("x") is not a time`."""
    fault = error.errors()[0]
    return f"{fault['loc'][0]} {fault['ctx']['error']}"
