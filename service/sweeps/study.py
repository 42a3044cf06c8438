"""Optuna as a sampler: its study is rebuilt from the runs for every point and never stored."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from service.sweeps.report import TrialState
from service.sweeps.spec import Range, SweepSpec
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

# Known points that Optuna may propose before the axes count as used up.
_MOST_ASKED = 200


def check_optuna() -> None:
    """Raise a UserError if the package optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise UserError(
            "method=optuna needs the package optuna; install it by `pip install -r "
            "requirements-service.txt`"
        ) from error


def suggest_point(spec: SweepSpec, states: Sequence[TrialState]) -> JsonObject | None:
    """Sample the next new point, given all trials so far; None if no new one comes.

    Equal trials lead to an equal point. Points with running trials count as running, so that the
    next one keeps away from them.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    groups: dict[tuple[str, ...], list[TrialState]] = {}
    for state in states:
        groups.setdefault(tuple(map(str, state.trial.point.values())), []).append(state)
    text = f"{spec.seed} {len(groups)}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    direction = "maximize" if spec.direction == "higher" else "minimize"
    study = optuna.create_study(sampler=sampler, direction=direction)
    distributions = {key: _create_distribution(key, axis) for key, axis in spec.axes.items()}
    for group in groups.values():
        study.add_trial(_create_trial(spec, group, distributions))
    known = [group[0].trial.point for group in groups.values()]
    for _ in range(_MOST_ASKED):
        asked = study.ask(distributions)
        point = {
            key: asked.params[key] if isinstance(axis, Range) else axis[asked.params[key]]
            for key, axis in spec.axes.items()
        }
        if point not in known:
            return point
        study.tell(asked, state=optuna.trial.TrialState.FAIL)
    return None


def _create_trial(
    spec: SweepSpec, group: Sequence[TrialState], distributions: dict[str, BaseDistribution]
) -> FrozenTrial:
    from optuna.trial import TrialState as Outcome
    from optuna.trial import create_trial

    point = group[0].trial.point
    parameters = {
        key: point[key] if isinstance(axis, Range) else list(axis).index(point[key])
        for key, axis in spec.axes.items()
    }
    values = [trial.value for trial in group if trial.state == "complete"]
    values = [value for value in values if value is not None]
    finite = [value for value in values if math.isfinite(value)]
    state, value = Outcome.RUNNING, None
    if any(trial.state == "failed" for trial in group) or len(finite) < len(values):
        state = Outcome.FAIL
    elif len(finite) == max(1, len(spec.seeds)):
        state, value = Outcome.COMPLETE, math.fsum(finite) / len(finite)
    return create_trial(state=state, value=value, params=parameters, distributions=distributions)


def _create_distribution(key: str, axis: Sequence[JsonValue] | Range) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(axis, Range):
        return CategoricalDistribution(range(len(axis)))  # any JSON value may stand in a list
    if axis.integer:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)
