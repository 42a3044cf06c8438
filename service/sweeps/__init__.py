"""Sweeps: many runs from one file, each a function of the file and its number.

`spec` is what a person writes, `plan` makes trials of it and keeps it in the store, `study` asks
Optuna, `control` submits and waits, `report` says how trials stand and what their axes tell.
"""

from service.sweeps.control import SweepControl
from service.sweeps.plan import Trial, list_sweeps, plan_trials, read_sweep
from service.sweeps.report import SweepTable, TrialState, list_trials, tabulate_sweep
from service.sweeps.spec import SweepSpec, read_spec

__all__ = [
    "SweepControl", "SweepSpec", "SweepTable", "Trial", "TrialState", "list_sweeps", "list_trials",
    "plan_trials", "read_spec", "read_sweep", "tabulate_sweep",
]  # fmt: skip
