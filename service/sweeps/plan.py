"""The trials of a sweep, and the file that a sweep keeps in the store beside its runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from service.jobs.submission import Submission
from service.sweeps.spec import SEED_KEY, Range, SweepSpec
from store.query.changes import find_changes
from store.record.ids import check_name
from utils.config.load import RunConfig, combine_config
from utils.errors import UserError, get_hint
from utils.json_types import JsonObject, JsonValue
from utils.storage.folder import Folder
from utils.storage.places import open_folder

FOLDER = "sweeps"
SWEEP_FILE = "sweep.json"
# Fields that may change when a sweep goes on.
_FREE = ("metric", "direction", "slots")
_GROW = {
    "grid": ("axes", "seeds"),
    "seeds": ("seeds",),
    "random": ("seeds", "trials"),
    "optuna": ("trials",),
}


@dataclass(frozen=True, eq=False)
class Trial:
    """One run of a sweep."""

    id: str  # hash of its own values
    sweep: str
    point: JsonObject  # dotted key -> value of each axis
    seed: int | None  # None to use that of the configuration

    @property
    def run_id(self) -> str:
        """Name of its run."""
        return f"{self.sweep}-{self.id}"

    @property
    def own(self) -> JsonObject:
        """The values that distinguish it from other trials."""
        return self.point if self.seed is None else {**self.point, SEED_KEY: self.seed}

    def describe(self) -> str:
        """Format its values for people."""
        return " ".join(f"{key}={json.dumps(value)}" for key, value in self.own.items()) or "-"


def plan_trials(spec: SweepSpec) -> list[Trial]:
    """Create all trials of a grid, seeds or random draws, each a function of (spec, number).

    Optuna's trials depend on earlier results: `service.sweeps.study` samples them.
    """
    if spec.method == "random":
        points = [draw_point(spec, number) for number in range(spec.trials)]
    else:
        values = itertools.product(*spec.axes.values())
        points = [dict(zip(spec.axes, point, strict=True)) for point in values]
    trials = [make_trial(spec, point, seed) for point in points for seed in spec.seeds or [None]]
    return list({trial.id: trial for trial in trials}.values())


def make_trial(spec: SweepSpec, point: JsonObject, seed: int | None) -> Trial:
    """Create the trial of a point and a seed."""
    text = json.dumps(point | ({} if seed is None else {SEED_KEY: seed}), sort_keys=True)
    return Trial(hashlib.sha256(text.encode()).hexdigest()[:10], spec.name, point, seed)


def make_submission(spec: SweepSpec, trial: Trial) -> Submission:
    """Create the submission of a trial."""
    overrides = {**spec.settings, **trial.own, "run.run_id": trial.run_id}
    return Submission(config=spec.config, overrides=overrides, slots=spec.slots, sweep=spec.name)


def draw_point(spec: SweepSpec, number: int) -> JsonObject:
    """Draw the random point of a number, by Philox keyed with the sweep's seed and the number.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    import numpy as np

    random = np.random.Generator(np.random.Philox(key=[spec.seed, number]))
    drawn = {key: _draw(spec.axes[key], random.random()) for key in sorted(spec.axes)}
    return {key: drawn[key] for key in spec.axes}


def _draw(axis: Sequence[JsonValue] | Range, share: float) -> JsonValue:
    """Return the value of an axis at a share of its length, 0 <= share < 1."""
    if not isinstance(axis, Range):
        return axis[int(share * len(axis))]
    low, high = axis.low, axis.high + axis.integer  # an integer covers the range up to the next
    value = low * (high / low) ** share if axis.log else low + (high - low) * share
    return min(int(axis.high), math.floor(value)) if axis.integer else value


def resolve_base(spec: SweepSpec) -> RunConfig:
    """Resolve the configuration that all trials start from; errors as of `load_config`."""
    return combine_config(spec.config, spec.settings, f"sweep {spec.name}: set")


def check_sweep(store: str, spec: SweepSpec, base: RunConfig) -> SweepSpec | None:
    """Return the stored sweep of this name; UserError if the new one does not only extend it."""
    stored = _read_file(store, spec.name)
    if stored is None:
        return None
    then, old_base = stored
    changes = find_changes(old_base, base.model_dump(mode="json"))
    lost = find_differences(then, spec) + [
        f"{key} was {was!r} in the configuration, now {now!r}"
        for key, (was, now) in changes.items()
    ]
    if lost:
        raise UserError(
            f"sweep {spec.name!r} has begun with other values: {'; '.join(lost)}; only values and "
            "seeds may be added: give the new sweep another name"
        )
    return then


def keep_sweep(store: str, spec: SweepSpec, base: RunConfig) -> SweepSpec | None:
    """Write or extend a checked sweep; return the stored sweep before, None if it is new."""
    then = check_sweep(store, spec, base)
    file = {"schema_version": 1, "spec": spec.describe(), "base": base.model_dump(mode="json")}
    text = json.dumps(file, indent=1) + "\n"
    open_sweep_folder(store, spec.name).write_text(SWEEP_FILE, text)
    return then


def read_sweep(store: str, name: str) -> SweepSpec:
    """Read a sweep as it was last started; UserError if it is unknown or damaged."""
    stored = _read_file(store, name)
    if stored is None:
        known = list_sweeps(store)
        hint = get_hint(name, known) if known else "it holds none yet"
        raise UserError(f"sweep {name!r} is not in {store!r}; {hint}")
    return stored[0]


def list_sweeps(store: str) -> list[str]:
    """List the names of a store's sweeps."""
    folder = open_folder(store).child(FOLDER)
    names = folder.list_names()
    texts = folder.read_texts([f"{name}/{SWEEP_FILE}" for name in names])
    return sorted(text.partition("/")[0] for text in texts)


def find_differences(old: SweepSpec, new: SweepSpec) -> list[str]:
    """List changes that a continued sweep may not have; empty if it only grows."""
    then, now = old.describe(), new.describe()
    differences: list[str] = []
    for key in (key for key in then if then[key] != now[key] and key not in _FREE):
        can_grow = key in _GROW[old.method]
        if can_grow and key == "axes" and then[key].keys() == now[key].keys():
            lost = {axis: _subtract(then[key][axis], now[key][axis]) for axis in then[key]}
            differences += [
                f"axes.{axis} lost {', '.join(map(json.dumps, values))}"
                for axis, values in lost.items()
                if values
            ]
        elif not can_grow or not _has_grown(then[key], now[key]):
            differences.append(f"{key} was {json.dumps(then[key])}, now {json.dumps(now[key])}")
    return differences


def _has_grown(was: JsonValue, is_now: Any) -> bool:
    """Return whether there are more trials or seeds; the first seeds would make other trials."""
    if isinstance(was, int):
        return is_now > was
    return isinstance(was, list) and bool(was) and not _subtract(was, is_now)


def _subtract(before: list[JsonValue], after: list[JsonValue]) -> list[JsonValue]:
    kept = {json.dumps(value) for value in after}
    return [value for value in before if json.dumps(value) not in kept]


def open_sweep_folder(store: str, name: str) -> Folder:
    """Open the folder of a sweep's file; a malformed name is a `UserError`."""
    check_name("name", name)
    return open_folder(store).child(FOLDER).child(name)


def _read_file(store: str, name: str) -> tuple[SweepSpec, JsonObject] | None:
    """Read a sweep and its base configuration; None if it is new."""
    folder = open_sweep_folder(store, name)
    text = folder.read_texts([SWEEP_FILE]).get(SWEEP_FILE)
    if text is None:
        return None
    try:
        record = json.loads(text)
        spec = SweepSpec.model_validate(record["spec"])
        if not isinstance(record["base"], dict):
            raise ValueError("no base")
        return spec, record["base"]
    except (ValueError, KeyError, TypeError) as error:  # pydantic's errors are ValueErrors
        raise UserError(f"{folder}/{SWEEP_FILE} is damaged; move it away") from error
