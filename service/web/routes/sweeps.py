"""`/api/v1/sweeps`: states of trials, and results by axes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from service.sweeps.plan import list_sweeps, read_sweep, resolve_base
from service.sweeps.report import TrialState, list_trials, tabulate_sweep
from service.sweeps.spec import SweepSpec
from service.web.answers import SweepAnswer, SweepList
from service.web.problems import ServiceProblem, list_problems
from service.web.serving import Parts, Service
from store.record.ids import check_name
from utils.errors import UserError
from utils.json_types import JsonObject, make_finite

router = APIRouter(prefix="/api/v1", tags=["sweeps"])
SweepName = Annotated[str, Path(min_length=1, max_length=128, pattern=r"^[^./\\\x00-\x1f]")]


@router.get("/sweeps", responses=list_problems())
def name_sweeps(parts: Parts) -> SweepList:
    """List the names of the store's sweeps."""
    return SweepList(sweeps=list_sweeps(parts.store))


@router.get("/sweeps/{name}", responses=list_problems(404))
def show_sweep(parts: Parts, name: SweepName) -> SweepAnswer:
    """Return one sweep with its trials and the table of its axes."""
    spec, states = read_trials(parts, name)
    table = tabulate_sweep(spec, states)
    values = {
        "name": spec.name, "config": spec.config, "method": spec.method,
        "metric": table.metric, "direction": table.direction,
        "trials": [_describe(state) for state in states],
    }  # fmt: skip
    return SweepAnswer(**make_finite(values), points=table.points, axes=table.axes)


def read_trials(parts: Service, name: str) -> tuple[SweepSpec, list[TrialState]]:
    """Read a sweep and its trials.

    Raises:
      ServiceProblem: no sweep has this name.
      UserError: its file is damaged, or its configuration no longer exists.
    """
    try:
        check_name("sweep", name)
        if name not in list_sweeps(parts.store):
            raise UserError(f"sweep {name!r} is not in this store; list them first")
    except UserError as error:
        raise ServiceProblem(404, str(error)) from error
    spec = read_sweep(parts.store, name)
    return spec, list_trials(parts.queue, spec, resolve_base(spec).run.experiment)


def _describe(state: TrialState) -> JsonObject:
    trial = state.trial
    return {
        "id": trial.id, "point": trial.point, "seed": trial.seed, "state": state.state,
        "value": state.value, "run": state.run, "job_id": state.job_id, "reason": state.reason,
    }  # fmt: skip
