"""The trials of a sweep, and the one file that a sweep keeps in the store beside its runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

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
# What may be another one when a sweep goes on.
_FREE = ("metric", "slots")
_GROW = {"grid": ("axes", "seeds"), "seeds": ("seeds",), "random": ("seeds", "trials"),
         "optuna": ("trials",)}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Trial:
    """One run of a sweep.

    Attributes:
      id: hash of what is its own.
      point: dotted key -> value of each axis.
      seed: none: that of the configuration.
    """

    id: str
    sweep: str
    point: JsonObject
    seed: int | None

    @property
    def run_id(self) -> str:
        """Name of its run."""
        return f"{self.sweep}-{self.id}"

    @property
    def own(self) -> JsonObject:
        """What it sets that other trials do not."""
        return self.point | ({} if self.seed is None else {SEED_KEY: self.seed})

    def describe(self) -> str:
        """Its values, for people."""
        return " ".join(f"{key}={json.dumps(value)}" for key, value in self.own.items()) or "-"


def plan_trials(spec: SweepSpec) -> list[Trial]:
    """All trials of a grid, of seeds or of random draws; each is a function of (spec, number).

    Those of Optuna depend on what has been found: `service.sweeps.study` asks for them.
    """
    if spec.method == "random":
        points = [draw_point(spec, number) for number in range(spec.trials)]
    else:
        values = itertools.product(*spec.axes.values())
        points = [dict(zip(spec.axes, one, strict=True)) for one in values]
    trials = [make_trial(spec, point, seed) for point in points for seed in spec.seeds or [None]]
    return list({trial.id: trial for trial in trials}.values())


def make_trial(spec: SweepSpec, point: JsonObject, seed: int | None) -> Trial:
    """The trial of a point and a seed."""
    own = point | ({} if seed is None else {SEED_KEY: seed})
    text = json.dumps(own, sort_keys=True)
    return Trial(hashlib.sha256(text.encode()).hexdigest()[:10], spec.name, point, seed)


def make_submission(spec: SweepSpec, trial: Trial) -> Submission:
    """What the queue gets of a trial."""
    overrides = {**spec.settings, **trial.own, "run.run_id": trial.run_id}
    return Submission(
        config=spec.config, overrides=overrides, slots=spec.slots, sweep=spec.name
    )  # fmt: skip


def draw_point(spec: SweepSpec, number: int) -> JsonObject:
    """The random point of a number, by Philox keyed with the sweep's seed and the number.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    import numpy as np

    random = np.random.Generator(np.random.Philox(key=[spec.seed, number]))
    drawn = {key: _draw(spec.axes[key], random.random()) for key in sorted(spec.axes)}
    return {key: drawn[key] for key in spec.axes}


def _draw(axis: Sequence[JsonValue] | Range, share: float) -> JsonValue:
    """The value of an axis at a share of its length, 0 <= share < 1."""
    if not isinstance(axis, Range):
        return axis[int(share * len(axis))]
    low, high = axis.low, axis.high + axis.integer  # a whole number holds the place up to the next
    value = low * (high / low) ** share if axis.log else low + (high - low) * share
    return min(int(axis.high), math.floor(value)) if axis.integer else value


def resolve_base(spec: SweepSpec) -> RunConfig:
    """The configuration that all trials start from.

    Raises:
      UserError: as `load_config`.
    """
    return combine_config(spec.config, spec.settings, f"sweep {spec.name}: set")


def check_sweep(store: str, spec: SweepSpec, base: RunConfig) -> SweepSpec | None:
    """The sweep of this name as it has begun, which this one may extend; none: it has not begun.

    Raises:
      UserError: it has begun otherwise; names each difference.
    """
    old = _read_file(store, spec.name)
    if old is None:
        return None
    then = _parse(store, spec.name, old)
    changes = find_changes(old["base"], base.model_dump(mode="json"))
    lost = find_differences(then, spec) + [
        f"{key} was {was!r} in the configuration, now {now!r}"
        for key, (was, now) in changes.items()
    ]
    if lost:
        raise UserError(
            f"sweep {spec.name!r} has begun otherwise: {'; '.join(lost)}; only values and seeds "
            "may be added: give the new sweep another name"
        )
    return then


def keep_sweep(store: str, spec: SweepSpec, base: RunConfig) -> SweepSpec | None:
    """Write a sweep's file, or extend it; gives what stood there before, none if nothing did.

    Raises:
      UserError: as `check_sweep`.
    """
    then = check_sweep(store, spec, base)
    file = {"schema_version": 1, "spec": spec.describe(), "base": base.model_dump(mode="json")}
    text = json.dumps(file, indent=1) + "\n"
    open_sweep_folder(store, spec.name).write_text(SWEEP_FILE, text)
    return then


def read_sweep(store: str, name: str) -> SweepSpec:
    """The sweep of a name, as it has last been begun.

    Raises:
      UserError: there is none, or its file is damaged.
    """
    found = _read_file(store, name)
    if found is None:
        known = list_sweeps(store)
        hint = get_hint(name, known) if known else "it holds none yet"
        raise UserError(f"sweep {name!r} is not in {store!r}; {hint}")
    return _parse(store, name, found)


def list_sweeps(store: str) -> list[str]:
    """Names of the sweeps of a store."""
    folder = open_folder(store).child(FOLDER)
    names = folder.list_names()
    texts = folder.read_texts([f"{name}/{SWEEP_FILE}" for name in names])
    return sorted(text.partition("/")[0] for text in texts)


def find_differences(old: SweepSpec, new: SweepSpec) -> list[str]:
    """What a sweep that goes on may not have changed; empty: it goes on, perhaps with more."""
    then, now = old.describe(), new.describe()
    found = []
    for key in (key for key in then if then[key] != now[key] and key not in _FREE):
        if key not in _GROW[old.method]:
            found.append(_tell(key, then[key], now[key]))
        elif key == "axes" and then[key].keys() == now[key].keys():
            lost = {axis: _subtract(then[key][axis], now[key][axis]) for axis in then[key]}
            found += [f"axes.{axis} lost {_list(those)}" for axis, those in lost.items() if those]
        elif not _has_grown(then[key], now[key]):
            found.append(_tell(key, then[key], now[key]))
    return found


def _tell(key: str, was: JsonValue, is_now: JsonValue) -> str:
    return f"{key} was {json.dumps(was)}, now {json.dumps(is_now)}"


def _has_grown(was: JsonValue, is_now: JsonValue) -> bool:
    """More trials, or more seeds; from none to some would be other trials."""
    if isinstance(was, int):
        return is_now > was
    return isinstance(was, list) and bool(was) and not _subtract(was, is_now)


def _subtract(those: list[JsonValue], these: list[JsonValue]) -> list[JsonValue]:
    kept = {json.dumps(one) for one in these}
    return [one for one in those if json.dumps(one) not in kept]


def _list(values: list[JsonValue]) -> str:
    return ", ".join(json.dumps(one) for one in values)


def open_sweep_folder(store: str, name: str) -> Folder:
    """Where a sweep keeps its file.

    Raises:
      UserError: no name for a directory.
    """
    check_name("name", name)
    return open_folder(store).child(FOLDER).child(name)


def _read_file(store: str, name: str) -> JsonObject | None:
    text = open_sweep_folder(store, name).read_texts([SWEEP_FILE]).get(SWEEP_FILE)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("base"), dict):
        raise UserError(f"{open_sweep_folder(store, name)}/{SWEEP_FILE} is damaged; move it away")
    return found


def _parse(store: str, name: str, found: JsonObject) -> SweepSpec:
    try:
        return SweepSpec.model_validate(found.get("spec"))
    except ValidationError as error:
        raise UserError(
            f"{open_sweep_folder(store, name)}/{SWEEP_FILE} is damaged; move it away"
        ) from error
