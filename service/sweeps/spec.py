"""`SweepSpec`: the file of a sweep.

config: configs/digits_student.yaml
set: {train.epochs: 5}
axes:
  optim.lr: [0.002, 0.005]
  model.args.depth: [1, 2]
seeds: [0, 1, 2]
metric: eval.top1
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationError,
    model_validator,
)

from store.record.catalogue import Direction, find_entry
from store.record.ids import check_name
from utils.config.command_line import get_kinds
from utils.config.yaml_file import read_yaml
from utils.errors import UserError, get_hint
from utils.json_types import JsonObject

SEED_KEY = "train.seed"
# Keys that the sweep sets itself.
_OWN = ("run.run_id", "run.output_dir", "run.resume", "run.experiment")
_MOST_TRIALS = 10_000


class Range(BaseModel):
    """An axis of numbers between two ends, for `random` and `optuna`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    low: float
    high: float
    log: bool = False  # draw evenly in the logarithm
    integer: bool = False  # whole numbers, both ends among them

    @model_validator(mode="after")
    def _check(self) -> Range:
        if not self.low < self.high:
            raise ValueError(f"low ({self.low:g}) must lie below high ({self.high:g})")
        if self.log and self.low <= 0:
            raise ValueError(f"low ({self.low:g}) must be above 0 where log is true")
        if self.integer and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError("low and high must be whole numbers where integer is true")
        return self


_Axis = Annotated[
    Annotated[list[JsonValue], Field(min_length=1), Tag("values")] | Annotated[Range, Tag("range")],
    Discriminator(lambda told: "range" if isinstance(told, dict | Range) else "values"),
]


class SweepSpec(BaseModel):
    """The fields of a sweep's file.

    Methods: `grid` for all combinations, `random` and `optuna` for `trials` of them, `seeds`
    without axes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    name: str  # the file's name by default
    config: str = Field(min_length=1)  # a YAML file, as `--config` takes it
    settings: dict[str, JsonValue] = Field(default_factory=dict, alias="set")  # of every trial
    axes: dict[str, _Axis] = Field(default_factory=dict)  # dotted key -> its values, or a range
    seeds: list[int] = Field(default_factory=list)  # of each point; that of the file if empty
    method: Literal["grid", "random", "optuna", "seeds"] = "grid"
    trials: int = Field(0, ge=0, le=_MOST_TRIALS)
    seed: int = Field(0, ge=0)  # of random and optuna
    metric: str = "eval.top1"  # to tabulate, and to improve with optuna
    # Which way a metric of the user's own code is better; else the catalogue has it
    better: Literal["", "higher", "lower"] = Field("", alias="direction")
    slots: int = Field(1, ge=1, le=64)  # of the queue that a trial holds

    @model_validator(mode="before")
    @classmethod
    def _read_numbers(cls, fields: Any) -> Any:
        """Convert texts of numbers: YAML reads `2e-2` as a text, which must equal 0.02."""
        if not isinstance(fields, dict) or not isinstance(fields.get("axes"), dict):
            return fields
        axes = dict(fields["axes"])
        for key, axis in axes.items():
            if isinstance(axis, list):
                axes[key] = [_read_number(str(key), value) for value in axis]
        return {**fields, "axes": axes}

    @property
    def direction(self) -> Direction:
        """Which way the metric is better, according to the catalogue or to the file."""
        entry = find_entry(self.metric)
        return (self.better or "none") if entry is None else entry.direction

    def describe(self) -> JsonObject:
        """Return the sweep as JSON, as it is stored."""
        return self.model_dump(mode="json", by_alias=True)


def read_spec(path: Path) -> SweepSpec:
    """Read a sweep from a YAML file; UserError with the key if a value is invalid."""
    values = {"name": path.stem, **read_yaml(str(path), "SPEC")}
    try:
        spec = SweepSpec.model_validate(values)
        _check(spec)
    except (ValidationError, UserError) as error:
        reason = _explain(error) if isinstance(error, ValidationError) else error
        raise UserError(f"SPEC {path}: {reason}") from error
    return spec


def _read_number(key: str, value: JsonValue) -> JsonValue:
    """Convert a value to the number that its key takes; return other values unchanged."""
    kinds = get_kinds(key) & {int, float}
    if not kinds or isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if int in kinds and number.is_integer() else number


def _check(spec: SweepSpec) -> None:
    check_name("name", spec.name)
    for key in (*spec.settings, *spec.axes):
        if key in _OWN:
            raise UserError(f"{key} is set by the sweep itself; remove it")
    for key in spec.axes.keys() & spec.settings.keys():
        raise UserError(f"{key} is both in set and in axes; remove it from one of them")
    if SEED_KEY in spec.axes or (spec.seeds and SEED_KEY in spec.settings):
        raise UserError(f"{SEED_KEY} is what seeds is for: write seeds: [0, 1, 2]")
    for name, values in {"seeds": spec.seeds, **spec.axes}.items():
        texts = [] if isinstance(values, Range) else list(map(json.dumps, values))
        if len(set(texts)) < len(texts):
            again = next(text for text in texts if texts.count(text) > 1)
            raise UserError(f"{name} says {again} twice; leave one of them out")
    _check_method(spec)
    if spec.better not in ("", spec.direction):
        raise UserError(
            f"direction ({spec.better}) contradicts the catalogue of metrics, where {spec.metric} "
            f"is {spec.direction}; remove it"
        )
    if spec.direction == "none":
        raise UserError(
            f"metric {spec.metric!r} has no better direction in the catalogue of metrics; name one "
            "such as eval.top1 or eval.loss, or for a metric of your own set direction: lower or "
            "higher"
        )


def _check_method(spec: SweepSpec) -> None:
    ranges = [key for key, values in spec.axes.items() if isinstance(values, Range)]
    if spec.method in ("grid", "seeds"):
        if ranges:
            raise UserError(
                f"axes.{ranges[0]} is a range, which method={spec.method} cannot count through; "
                "list its values, or choose method: random"
            )
        if spec.trials:
            raise UserError(f"trials has no effect with method={spec.method}; remove it")
    elif not spec.trials:
        raise UserError(f"trials is missing; say how many method={spec.method} may try")
    if spec.method == "seeds" and (spec.axes or not spec.seeds):
        raise UserError("method=seeds takes seeds and no axes; choose grid for axes")
    if spec.method != "seeds" and not (spec.axes or spec.seeds):
        raise UserError("axes and seeds are both missing; say what differs between trials")
    if spec.method in ("random", "optuna") and not spec.axes:
        raise UserError(f"axes is missing; method={spec.method} draws from them")
    lists = [axis for axis in spec.axes.values() if not isinstance(axis, Range)]
    if spec.trials and len(lists) == len(spec.axes):
        known = math.prod(len(values) for values in lists)
        if spec.trials > known:
            raise UserError(
                f"trials ({spec.trials}) exceeds the {known} points that the axes have; lower it, "
                "or choose method: grid"
            )
    points = spec.trials or math.prod(map(len, lists))
    if points * max(1, len(spec.seeds)) > _MOST_TRIALS:
        raise UserError(f"it has more than {_MOST_TRIALS:,} trials; leave some values out")


def _explain(error: ValidationError) -> str:
    """Format the first problem in one line."""
    problems = error.errors(include_url=False)
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    key = ".".join(str(part) for part in problem["loc"] if part not in ("values", "range"))
    key = key or "the file"
    if problem["type"] == "extra_forbidden":
        owner = SweepSpec if len(problem["loc"]) == 1 else Range
        known = [field.alias or name for name, field in owner.model_fields.items()]
        return f"unknown key {key}; {get_hint(str(problem['loc'][-1]), known)}"
    if problem["type"] == "missing":
        return f"{key} is missing; give it a value"
    text = problem["msg"].removeprefix("Value error, ")
    return f"{key}: {text[:1].lower()}{text[1:]}"
