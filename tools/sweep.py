"""Runs a sweep from a file: all combinations of its axes, random draws, or trials of Optuna.

    python -m tools.sweep plan depth.yaml
    python -m tools.sweep run depth.yaml --slots 2
    python -m tools.sweep status depth.yaml
    python -m tools.sweep resume depth.yaml

`plan` lists the trials and checks each as `main.py --check` does. `run` submits missing trials to
the store's queue and runs them until every trial has ended; Ctrl-C makes them save and end.
A trial's name is a hash of its values, so `resume` starts only incomplete trials, also after values
or seeds were added to the file.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from service.checker import Checker, Verdict
from service.jobs.files import open_queue
from service.jobs.slots import parse_slots
from service.jobs.starters import ColdStarter, create_starter
from service.sweeps.backends import SkyBackend, SlurmBackend, TrialLaunch
from service.sweeps.control import SweepControl
from service.sweeps.plan import Trial, read_sweep, resolve_base
from service.sweeps.report import MISSING, AxisRow, TrialState, tabulate_sweep
from service.sweeps.spec import SweepSpec, read_spec
from store.formatting import format_value, name_few
from store.terminal import colour_word, create_console, create_table, print_json
from train.execute import Executor
from utils.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError
from utils.json_types import JsonObject
from utils.programs import CommandLine, create_program_parser
from utils.storage.installation import name_commands
from utils.storage.places import to_path
from utils.storage.retry import hurry

if TYPE_CHECKING:
    from rich.table import Table


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the flags."""
    parser = create_program_parser(__doc__, prog="python -m tools.sweep")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (function, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=function)
        command.add_argument("spec", metavar="SPEC", help="YAML file of the sweep")
        command.add_argument("--store", help="root of the runs (run.output_dir of the config)")
        command.add_argument("--json", action="store_true", help="one object for programs")
        if name in ("run", "resume"):
            _add_machines(command)
    return parser


def _add_machines(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--slots", help="trials at once, or devices: cuda:0,cuda:1,tpu_vm:NAME@ZONE (1)")
    text = "start each trial as a new program (default: CPU trials are forked from a warm one)"
    add("--cold", action="store_true", help=text)
    add("--on", choices=("slurm", "sky"), help="submit the trials to the queue of other machines")
    text = "of sbatch: --sbatch='--gpus=1 --time=12:00:00'"
    add("--sbatch", default="", metavar="OPTIONS", help=text)
    add("--accelerator", default="", help="of --on sky, such as v5litepod-8")
    add("--region", default="", help="of --on sky (default: SkyPilot chooses)")
    add("--dry-run", action="store_true", help="show the commands of --on, and run none")


def plan(options: argparse.Namespace) -> int:
    """List the trials and check each."""
    with hurry():
        control = _open(options)
        due = control.list_due()
        bill = sum_bills([verdict.bill for verdict in _check(control, due)])
        states = control.list()
        if not states:  # Optuna chooses one trial after another: this is the first
            states = [TrialState(trial, MISSING, None, "", "", "") for trial in due]
        _show(options, control, states, {"bill": bill})
    if bill is not None and not options.json:
        print(
            f"bill: {bill['trials']} trials, each on its cheapest slice ({bill['slices']}), "
            f"{bill['hours']:.3g} h ({bill['low_hours']:.3g} to {bill['high_hours']:.3g}), "
            f"USD {bill['usd']:,.2f} ({bill['low_usd']:,.2f} to {bill['high_usd']:,.2f}) "
            f"{bill['term'].replace('_', ' ')} ({bill['basis']})"
        )
    return 0


def sum_bills(bills: Sequence[JsonObject | None]) -> JsonObject | None:
    """Sum the bills of trials; None unless all are known."""
    known = [bill for bill in bills if bill is not None]
    if not known or len(known) < len(bills):
        return None
    parts = [f"{bound}{unit}" for unit in ("hours", "usd") for bound in ("", "low_", "high_")]
    sums = {name: math.fsum(bill[name] for bill in known) for name in parts}
    slices = ", ".join(sorted({bill["slice"] for bill in known}))
    words = {key: name_few(sorted({bill[key] for bill in known})) for key in ("term", "basis")}
    return {"trials": len(known), "slices": slices, **sums, **words}


def run(options: argparse.Namespace) -> int:
    """Begin or continue a sweep until every trial has ended."""
    _check_machines(options)
    if options.on or options.dry_run:
        return _launch(options)
    slots = parse_slots(options.slots or "1")
    report: Callable[[TrialState], None] = (lambda state: None) if options.json else _print_state
    with hurry():
        control = _open(options, report, len(slots))
        due = control.list_due()
    if control.spec.slots > len(slots):
        raise UserError(
            f"slots ({control.spec.slots}) of a trial exceed those of --slots ({len(slots)}); "
            "give more, or lower the trial's"
        )
    _check(control, due)
    control.begin()
    with create_starter(is_warm=not options.cold) as starter:
        try:
            states = control.run(slots, starter)
        except KeyboardInterrupt:
            return _end(control, slots, starter)
    _show(options, control, states)
    return 0 if all(state.state == "complete" for state in states) else EXIT_FAILED


def resume(options: argparse.Namespace) -> int:
    """Continue a sweep that has begun."""
    spec = read_spec(to_path(options.spec))
    read_sweep(_choose_store(options, spec), spec.name)  # refused if there is none
    return run(options)


def status(options: argparse.Namespace) -> int:
    """Show the states of the trials, and the results of the axes so far."""
    with hurry():
        control = _open(options)
        _show(options, control, control.list())
    return 0


def _open(
    options: argparse.Namespace,
    report: Callable[[TrialState], None] = lambda state: None,
    width: int = 1,
) -> SweepControl:
    spec = read_spec(to_path(options.spec))
    queue = open_queue(_choose_store(options, spec))
    return SweepControl(queue, spec, getpass.getuser(), tell=report, width=width)


def _choose_store(options: argparse.Namespace, spec: SweepSpec) -> str:
    return options.store or resolve_base(spec).run.output_dir


def _check_machines(options: argparse.Namespace) -> None:
    """Raise a UserError for flags that would be ignored: of other machines than the trials'."""
    if options.on and options.slots:
        raise UserError(
            f"--slots ({options.slots}) are of this machine's queue; remove them with "
            f"--on {options.on}, whose queue decides"
        )
    if options.on and options.cold:
        raise UserError(
            f"--cold is of this machine's queue; remove it with --on {options.on}, where each "
            "trial is a new program"
        )
    for flag, on in (("sbatch", "slurm"), ("accelerator", "sky"), ("region", "sky")):
        value = getattr(options, flag)
        if value and options.on != on:
            raise UserError(f"--{flag} ({value!r}) is of --on {on}; add that, or remove it")


def _create_backend(options: argparse.Namespace) -> SlurmBackend | SkyBackend:
    if options.on == "sky":
        return SkyBackend(options.accelerator.removeprefix("tpu-"), options.region)
    try:
        return SlurmBackend(tuple(shlex.split(options.sbatch)))
    except ValueError as error:
        reason = f"--sbatch ({options.sbatch!r}): {str(error).lower()}"
        raise UserError(f"{reason}; write it as in a shell") from error


def _launch(options: argparse.Namespace) -> int:
    """Submit the trials to other machines; `status` shows their states."""
    if not options.on:
        raise UserError("--dry-run shows what --on would run; add --on, or use `plan`")
    if options.on == "sky" and not options.accelerator:
        raise UserError("--accelerator is missing; --on sky needs one, such as v5litepod-8")
    backend = _create_backend(options)
    executor = Executor(dry_run=options.dry_run)
    with hurry():
        control = _open(options)
        launch = TrialLaunch(control.spec, control.queue.store, backend, executor)
    if not options.dry_run:
        _check(control, launch.list_due())
    for trial, reply in launch.submit():
        if not options.dry_run:
            sys.stdout.write(f"{trial.run_id} {trial.describe()}: {reply}\n")
    return 0


def _check(control: SweepControl, trials: Sequence[Trial]) -> Sequence[Verdict]:
    with contextlib.closing(Checker()) as checker:
        return control.check(checker, trials)


def _end(control: SweepControl, slots: Sequence[str], starter: ColdStarter) -> int:
    sys.stderr.write("interrupted: running trials save and end; Ctrl-C again leaves them\n")
    control.stop()
    try:
        control.run(slots, starter)
    except KeyboardInterrupt:
        sys.stderr.write("left: they end by themselves\n")
    sys.stderr.write(name_commands("`python -m tools.sweep resume` continues\n"))
    return EXIT_INTERRUPTED


def _print_state(state: TrialState) -> None:
    value = "" if state.value is None else f", {format_value(state.value)}"
    reason = f" ({state.reason})" if state.reason else ""
    sys.stderr.write(f"{state.run} {state.trial.describe()}: {state.state}{value}{reason}\n")


def _show(
    options: argparse.Namespace,
    control: SweepControl,
    states: Sequence[TrialState],
    more: JsonObject | None = None,
) -> None:
    table = tabulate_sweep(control.spec, states)
    if options.json:
        record = {"sweep": control.spec.name, "store": control.queue.store, "table": asdict(table)}
        record |= more or {}
        print_json({**record, "trials": [_describe(state) for state in states]})
        return
    console = create_console()
    console.print(_tabulate_trials(control.spec, states))
    if not any(row.interval for row in table.points):
        return
    console.print(_tabulate_rows(f"{table.metric} of each point", table.points))
    if len(table.axes) > 1:
        for key, rows in table.axes.items():
            console.print(_tabulate_rows(f"{table.metric} of each {key}, over all else", rows))


def _tabulate_trials(spec: SweepSpec, states: Sequence[TrialState]) -> Table:
    done = sum(state.state == "complete" for state in states)
    title = f"sweep {spec.name}: {done} of {len(states)} trials are complete"
    shown = create_table("trial", "values", "state", f"{spec.metric}>", title=title)
    for state in states:
        trial, value = state.trial, format_value(state.value)
        shown.add_row(trial.id, trial.describe(), colour_word(state.state), value)
    return shown


def _tabulate_rows(title: str, rows: Sequence[AxisRow]) -> Table:
    shown = create_table("values", "mean>", "sd>", "n>", "95 % interval", title=title)
    for row in rows:
        words = " ".join(f"{key}={format_value(value)}" for key, value in row.values.items()) or "-"
        interval = row.interval
        if interval is None:
            shown.add_row(words, "-", "-", "0", "no seed is complete")
            continue
        span = "needs two seeds"
        if interval.low is not None:
            span = f"{format_value(interval.low)} to {format_value(interval.high)}"
        mean, sd = format_value(interval.mean), format_value(interval.sd)
        shown.add_row(words, mean, sd, str(interval.n), span)
    return shown


def _describe(state: TrialState) -> JsonObject:
    return {
        "id": state.trial.id,
        "run": state.run,
        "values": state.trial.own,
        "state": state.state,
        "value": state.value,
        "job": state.job_id,
        "reason": state.reason,
    }


_COMMANDS = {
    "plan": (plan, "list the trials, and check each of them"),
    "run": (run, "submit missing trials, and work until all have ended"),
    "status": (status, "the states of the trials, and the results of the axes"),
    "resume": (resume, "continue a sweep that has begun"),
}

main = CommandLine(create_parser, logs=True)

if __name__ == "__main__":
    sys.exit(main())
