"""The sweeps behind the table: teachers, the student alone, the search, and the rows themselves.

Each is one of `tools.sweep`, with its file below `OUTPUT/kd_table/specs`; its name decides what is
trained, so a killed table continues where it stopped, and further seeds, methods or weights are
trained alone.
"""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from proofs.kd_table.entries import STUDENT, TEACHER, Entry, TableSet
from service.jobs.files import JobQueue, open_queue
from service.jobs.starters import ColdStarter
from service.sweeps.control import SweepControl
from service.sweeps.plan import make_trial
from service.sweeps.report import TrialState
from service.sweeps.spec import SweepSpec
from utils.json_types import JsonObject, JsonValue

FOLDER = "kd_table"
CHOSEN_BY = "eval.top1"
MEASURED_BY = "test.top1"
TEACHER_SEEDS = (0, 1)
_LOSSES = "distill.losses"
_SAME = {
    "run.tensorboard": False,
    "runtime.device": "cpu",
    "runtime.num_threads": 1,
    "train.eval_every_epochs": 1000,
    "train.checkpoint_every_epochs": 1000,
}


@dataclass(frozen=True)
class Budget:
    """Limits of a table's cost, and its directories.

    Args:
      seeds: of the rows.
      search_seeds: of the search, other than the rows' seeds.
      multiples: of an entry's own weight that are tried.
      widen: further ones at most, one at a time, where the best is the least or the largest.
      epochs: of every student.
    """

    data_dir: Path
    output_dir: Path
    seeds: tuple[int, ...]
    search_seeds: tuple[int, ...]
    multiples: tuple[float, ...]
    epochs: int
    teacher_epochs: int
    widen: int = 0


@dataclass(frozen=True)
class Workers:
    """Slots of the queue, and how each run is started."""

    slots: Sequence[str]
    starter: ColdStarter


def make_teacher_spec(table_set: TableSet, budget: Budget) -> SweepSpec:
    """Create the sweep of two teachers of two seeds, the same for all students."""
    settings = {"train.epochs": budget.teacher_epochs, **table_set.teacher}
    spec = _make_spec(f"{table_set.name}-teacher", TEACHER, table_set, budget, settings)
    return _change(spec, seeds=list(TEACHER_SEEDS))


def make_alone_spec(table_set: TableSet, budget: Budget) -> SweepSpec:
    """Create the sweep of the student with labels only."""
    settings = {"train.epochs": budget.epochs, **table_set.student}
    spec = _make_spec(f"{table_set.name}-alone", STUDENT, table_set, budget, settings)
    return _change(spec, seeds=list(budget.seeds))


def make_search_spec(
    entry: Entry, table_set: TableSet, budget: Budget, further: float | None = None
) -> SweepSpec:
    """Create the search for a method's weight, on the validation split without the test split.

    Args:
      further: one multiple beyond the budget's; None: the budget's.
    """
    name = f"{entry.name}-search" + ("" if further is None else f"-x{further:g}")
    spec = _make_taught(name, table_set, budget)
    multiples = budget.multiples if further is None else [further]
    return _change(
        spec,
        settings={**spec.settings, "data.test_split": ""},
        axes=_make_axes(entry, table_set, budget, multiples),
        seeds=list(budget.search_seeds),
        metric=CHOSEN_BY,
    )


def make_row_spec(entry: Entry, table_set: TableSet, budget: Budget, multiple: float) -> SweepSpec:
    """Create the sweep of a row, with the chosen weight."""
    spec = _make_taught(f"{entry.name}-x{multiple:g}", table_set, budget)
    axes = _make_axes(entry, table_set, budget, [multiple])
    return _change(spec, axes=axes, seeds=list(budget.seeds))


def _change(spec: SweepSpec, **values: JsonValue) -> SweepSpec:
    """Return a sweep with other values, which are checked."""
    return SweepSpec.model_validate({**spec.model_dump(), **values})


def read_multiple(state: TrialState, entry: Entry) -> float:
    """Return the multiple of the entry's weight that a trial of the search has tried."""
    return state.trial.point[_LOSSES][0]["weight"] / entry.term["weight"]


def open_control(spec: SweepSpec, budget: Budget, queue: JobQueue) -> SweepControl:
    """Open the sweep in the store, and write its file for `tools.sweep status`.

    Raises:
      UserError: a sweep of this name has begun with other values.
    """
    control = SweepControl(queue, spec, getpass.getuser(), tell=_say)
    path = budget.output_dir / FOLDER / "specs" / f"{spec.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(spec.describe(), sort_keys=False), encoding="utf-8")
    return control


def run_all(
    specs: Sequence[SweepSpec], budget: Budget, workers: Workers | None
) -> list[Sequence[TrialState]]:
    """Run sweeps to their end, all in one queue; return the trials of each.

    Without workers nothing is started. Ctrl-C lets running trials save and end.

    Raises:
      UserError: as `open_control`.
    """
    queue = open_queue(str(budget.output_dir))
    controls = [open_control(spec, budget, queue) for spec in specs]
    if workers is None:
        return [control.list() for control in controls]
    for control in controls:
        control.begin()
    try:
        return [control.run(workers.slots, workers.starter) for control in controls]
    except KeyboardInterrupt:
        for control in controls:
            control.stop()
        for control in controls:
            control.run(workers.slots, workers.starter)
        raise


def find_teacher(table_set: TableSet, budget: Budget, seed: int) -> Path:
    """Return the directory of the teacher of a seed."""
    trial = make_trial(make_teacher_spec(table_set, budget), {}, seed)
    return budget.output_dir / Path(TEACHER).stem / trial.run_id


def _make_spec(
    name: str, config: str, table_set: TableSet, budget: Budget, settings: JsonObject
) -> SweepSpec:
    own = {"data.root": str(budget.data_dir), **_SAME, **table_set.data, **settings}
    return SweepSpec.model_validate(
        {"name": name, "config": config, "set": own, "metric": MEASURED_BY}
    )


def _make_taught(name: str, table_set: TableSet, budget: Budget) -> SweepSpec:
    settings = {"train.epochs": budget.epochs, **table_set.student}
    return _make_spec(f"{table_set.name}-{name}", STUDENT, table_set, budget, settings)


def _make_axes(
    entry: Entry, table_set: TableSet, budget: Budget, multiples: Sequence[float]
) -> dict[str, list[JsonValue]]:
    """Create the axes of teachers and losses; all but the losses have one value.

    They cannot be settings of the sweep, which must be valid without its axes: a teacher without a
    loss is refused.
    """
    places = [str(find_teacher(table_set, budget, seed)) for seed in TEACHER_SEEDS]
    teachers: dict[str, list[JsonValue]] = {"distill.teacher_weights": [places[0]]}
    if entry.teachers > 1:
        teachers = {
            "distill.teachers": [[{"weights": place} for place in places]],
            "distill.ensemble": ["separate"],
        }
    losses: list[JsonValue] = [_make_losses(entry, table_set, multiple) for multiple in multiples]
    own = {key: [_fill(value, table_set)] for key, value in entry.settings.items()}
    return {_LOSSES: losses, "distill.alpha": [0.5], **teachers, **own}


def _make_losses(entry: Entry, table_set: TableSet, multiple: float) -> list[JsonObject]:
    """Create `distill.losses` of a method at a multiple of its weight."""
    args = {name: _fill(value, table_set) for name, value in entry.term["args"].items()}
    return [{**entry.term, "args": args, "weight": entry.term["weight"] * multiple}]


def _fill(value: JsonValue, table_set: TableSet) -> JsonValue:
    """Return a value, or the set's own for a name in braces."""
    is_named = isinstance(value, str) and value.startswith("{")
    return getattr(table_set, value.strip("{}")) if is_named else value


def _say(state: TrialState) -> None:
    if state.state == "failed":
        print(f"{state.run}: failed: {state.reason}", flush=True)
