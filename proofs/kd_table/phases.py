"""The sweeps behind the table: teachers, the student alone, the search, and the rows themselves.

Each is one of `tools.sweep`, with its file below `OUTPUT/kd_table/specs`; what a name says decides
what is trained, so a killed table goes on where it stopped, and one that gets more seeds, methods
or weights trains those alone.
"""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from proofs.kd_table.entries import CLASSES, EXAMPLES, STRONG, Entry
from proofs.kd_table.sets import STUDENT, TEACHER, TableSet
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
    "run.tensorboard": False, "runtime.device": "cpu", "runtime.num_threads": 1,
    "train.eval_every_epochs": 1000, "train.checkpoint_every_epochs": 1000,
}  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """What a table may cost, and where it lies.

    Args:
      seeds: of the rows.
      search_seeds: of the search; none of them is one of the rows.
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
    """What works on the queue: how many at once, and how each run is started."""

    slots: Sequence[str]
    starter: ColdStarter


def make_teacher_spec(table_set: TableSet, budget: Budget) -> SweepSpec:
    """Two teachers, of two seeds: the same for all students and for the whole table."""
    settings = {"train.epochs": budget.teacher_epochs, **table_set.teacher}
    spec = _make_spec(f"{table_set.name}-teacher", TEACHER, table_set, budget, settings)
    return _change(spec, seeds=list(TEACHER_SEEDS))


def make_alone_spec(table_set: TableSet, budget: Budget) -> SweepSpec:
    """The student with labels only."""
    settings = {"train.epochs": budget.epochs, **table_set.student}
    spec = _make_spec(f"{table_set.name}-alone", STUDENT, table_set, budget, settings)
    return _change(spec, seeds=list(budget.seeds))


def make_search_spec(
    entry: Entry, table_set: TableSet, budget: Budget, further: float | None = None
) -> SweepSpec:
    """All weights of one method, judged on the validation split; the test split is not read.

    Args:
      further: the one multiple beyond the budget's that is tried; none: the budget's.
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


def make_row_spec(
    entry: Entry, table_set: TableSet, budget: Budget, multiple: float
) -> SweepSpec:  # fmt: skip
    """The row itself, with the weight that was found."""
    spec = _make_taught(f"{entry.name}-x{multiple:g}", table_set, budget)
    axes = _make_axes(entry, table_set, budget, [multiple])
    return _change(spec, axes=axes, seeds=list(budget.seeds))


def _change(spec: SweepSpec, **values: object) -> SweepSpec:
    """A sweep with other values, which are checked."""
    return SweepSpec.model_validate({**spec.model_dump(), **values})


def read_multiple(state: TrialState, entry: Entry) -> float:
    """Which multiple of the entry's weight a trial of the search has tried."""
    return state.trial.point[_LOSSES][0]["weight"] / entry.term["weight"]


def open_control(spec: SweepSpec, budget: Budget, queue: JobQueue) -> SweepControl:
    """The sweep as it stands in the store; its file is written for `tools.sweep status`.

    Raises:
      UserError: a sweep of this name has begun otherwise.
    """
    control = SweepControl(queue, spec, getpass.getuser(), tell=_say)
    path = budget.output_dir / FOLDER / "specs" / f"{spec.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(spec.describe(), sort_keys=False), encoding="utf-8")
    return control


def run_all(
    specs: Sequence[SweepSpec], budget: Budget, workers: Workers | None
) -> list[list[TrialState]]:
    """See sweeps through, all in one queue; gives the trials of each.

    Without workers nothing is started, and the trials are as they stand.

    Ctrl-C asks the trials that run to save and end.

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
    """Where the teacher of a seed lies."""
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
    """Who teaches and by what; all axes but the losses have one value.

    They are no settings of the sweep, which must be whole without its axes: a teacher without a
    loss is refused.
    """
    places = [str(find_teacher(table_set, budget, seed)) for seed in TEACHER_SEEDS]
    teachers: dict[str, list[JsonValue]] = {"distill.teacher_weights": [places[0]]}
    if entry.teachers > 1:
        teachers = {
            "distill.teachers": [[{"weights": place} for place in places]],
            "distill.ensemble": ["separate"],
        }
    losses = [_make_losses(entry, table_set, multiple) for multiple in multiples]
    own = {key: [_fill(value, table_set)] for key, value in entry.settings.items()}
    return {_LOSSES: losses, "distill.alpha": [0.5], **teachers, **own}


def _make_losses(entry: Entry, table_set: TableSet, multiple: float) -> list[JsonObject]:
    """`distill.losses` of a method at a multiple of its weight."""
    args = {name: _fill(value, table_set) for name, value in entry.term["args"].items()}
    return [{**entry.term, "args": args, "weight": entry.term["weight"] * multiple}]


def _fill(value: JsonValue, table_set: TableSet) -> JsonValue:
    """A value, or what the set has in its place."""
    known = {EXAMPLES: table_set.train_examples, CLASSES: table_set.classes,
             STRONG: table_set.strong_pp}  # fmt: skip
    return known.get(value, value) if isinstance(value, str) else value


def _say(one: TrialState) -> None:
    if one.state == "failed":
        print(f"{one.run}: failed: {one.reason}", flush=True)
