"""Many runs from one file: all combinations of its axes, random draws, or what Optuna asks for.

    python -m tools.sweep plan docs/depth.yaml
    python -m tools.sweep run docs/depth.yaml --slots 2
    python -m tools.sweep status docs/depth.yaml
    python -m tools.sweep resume docs/depth.yaml

`plan` lists the trials and asks of each what `main.py --check` would say. `run` puts what is
missing into the queue of the store and works on it until every trial has ended; Ctrl-C asks them to
save and end. A trial's name is a hash of its values, so `resume` starts only what no file calls
complete, after values or seeds were added to the file, too.
"""

from __future__ import annotations

import argparse
import getpass
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from service.checker import Checker
from service.jobs.files import open_queue
from service.jobs.slots import parse_slots
from service.jobs.starters import ColdStarter, create_starter
from service.sweeps.control import SweepControl
from service.sweeps.elsewhere import SkyBackend, SlurmBackend, TrialLaunch
from service.sweeps.plan import Trial, read_sweep, resolve_base
from service.sweeps.report import MISSING, AxisRow, SweepTable, TrialState, tabulate_sweep
from service.sweeps.spec import SweepSpec, read_spec
from store.formatting import format_value
from store.terminal import colour_word, create_console, create_table, print_json
from train.execute import Executor
from utils.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError
from utils.programs import CommandLine, create_program_parser
from utils.storage.places import to_path
from utils.storage.retry import hurry


def create_parser() -> argparse.ArgumentParser:
    """The tool's flags."""
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
    add("--slots",
        help="trials at once, or devices: cuda:0,cuda:1,tpu_vm:NAME@ZONE (1)")  # fmt: skip
    add("--cold", action="store_true",
        help="start each trial as a program of its own (those on the CPU are forked from one that "
        "has imported all)")  # fmt: skip
    add("--on", choices=("slurm", "sky"), help="give the trials to the queue of other machines")
    add(
        "--sbatch",
        default="",
        metavar="OPTIONS",
        help="of sbatch: --sbatch='--gpus=1 --time=12:00:00'",
    )
    add("--accelerator", default="", help="of --on sky, such as v5litepod-8")
    add("--region", default="", help="of --on sky (SkyPilot looks for one)")
    add("--dry-run", action="store_true", help="show the commands of --on, and run none")


def plan(options: argparse.Namespace) -> int:
    """List the trials and check each."""
    with hurry():
        control = _open(options)
        due = control.list_due()
        _check(control, due)
        states = control.list()
        if not states:  # Optuna chooses as it goes: this is the first one
            states = [TrialState(one, MISSING, None, "", "", "") for one in due]
        _show(options, control, states)
    return 0


def run(options: argparse.Namespace) -> int:
    """Begin a sweep, or go on with it, until every trial has ended."""
    _check_machines(options)
    if options.on or options.dry_run:
        return _launch(options)
    slots = parse_slots(options.slots or "1")
    say = _say if not options.json else (lambda one: None)
    with hurry():
        control = _open(options, tell=say, width=len(slots))
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
    return 0 if all(one.state == "complete" for one in states) else EXIT_FAILED


def resume(options: argparse.Namespace) -> int:
    """The same for a sweep that has begun."""
    spec = read_spec(to_path(options.spec))
    read_sweep(_choose_store(options, spec), spec.name)  # refused where there is none
    return run(options)


def status(options: argparse.Namespace) -> int:
    """How the trials stand, and what the axes tell so far."""
    with hurry():
        control = _open(options)
        _show(options, control, control.list())
    return 0


def _open(
    options: argparse.Namespace, *, tell: Callable[[TrialState], None] = lambda one: None,
    width: int = 1,
) -> SweepControl:  # fmt: skip
    spec = read_spec(to_path(options.spec))
    queue = open_queue(_choose_store(options, spec))
    return SweepControl(queue, spec, getpass.getuser(), tell=tell, width=width)


def _choose_store(options: argparse.Namespace, spec: SweepSpec) -> str:
    return options.store or resolve_base(spec).run.output_dir


def _check_machines(options: argparse.Namespace) -> None:
    """Refuse what would be ignored.

    Raises:
      UserError: a flag of other machines than the trials are given to.
    """
    if options.on and options.slots:
        raise UserError(
            f"--slots ({options.slots}) are of this machine's queue; leave them out with "
            f"--on {options.on}, whose queue decides"
        )
    if options.on and options.cold:
        raise UserError(
            f"--cold is of this machine's queue; leave it out with --on {options.on}, where each "
            "trial is a program of its own"
        )
    for flag, on in (("sbatch", "slurm"), ("accelerator", "sky"), ("region", "sky")):
        told = getattr(options, flag)
        if told and options.on != on:
            raise UserError(f"--{flag} ({told!r}) is of --on {on}; add that, or leave it out")


def _split_words(text: str) -> tuple[str, ...]:
    """The words of --sbatch as a shell would split them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        reason = str(error).lower()
        raise UserError(f"--sbatch ({text!r}): {reason}; write it as in a shell") from error


def _launch(options: argparse.Namespace) -> int:
    """Give the trials to other machines; `status` tells how they stand."""
    if not options.on:
        raise UserError("--dry-run shows what --on would run; add --on, or use `plan`")
    if options.on == "sky" and not options.accelerator:
        raise UserError("--accelerator is missing; --on sky needs one, such as v5litepod-8")
    backend = SlurmBackend(_split_words(options.sbatch)) if options.on == "slurm" else (
        SkyBackend(options.accelerator.removeprefix("tpu-"), options.region)
    )  # fmt: skip
    executor = Executor(dry_run=options.dry_run)
    with hurry():
        control = _open(options)
        launch = TrialLaunch(control.spec, control.queue.store, backend, executor)
    if not options.dry_run:
        _check(control, launch.list_due())
    for trial, what in launch.submit():
        if not options.dry_run:
            sys.stdout.write(f"{trial.run_id} {trial.describe()}: {what}\n")
    return 0


def _check(control: SweepControl, trials: Sequence[Trial]) -> None:
    checker = Checker()
    try:
        control.check(checker, trials)
    finally:
        checker.close()


def _end(control: SweepControl, slots: Sequence[str], starter: ColdStarter) -> int:
    sys.stderr.write("interrupted: the trials that run save and end; Ctrl-C again leaves them\n")
    control.stop()
    try:
        control.run(slots, starter)
    except KeyboardInterrupt:
        sys.stderr.write("left: they end by themselves\n")
    sys.stderr.write("`python -m tools.sweep resume` goes on\n")
    return EXIT_INTERRUPTED


def _say(one: TrialState) -> None:
    value = "" if one.value is None else f", {format_value(one.value)}"
    reason = f" ({one.reason})" if one.reason else ""
    sys.stderr.write(f"{one.run} {one.trial.describe()}: {one.state}{value}{reason}\n")


def _show(options: argparse.Namespace, control: SweepControl, states: Sequence[TrialState]) -> None:
    table = tabulate_sweep(control.spec, states)
    if options.json:
        print_json({
            "sweep": control.spec.name, "store": control.queue.store,
            "trials": [_describe(one) for one in states], "table": asdict(table),
        })  # fmt: skip
        return
    console = create_console()
    console.print(_tabulate_trials(control.spec, states))
    if any(row.interval for row in table.points):
        for rows in _list_tables(table):
            console.print(rows)


def _tabulate_trials(spec: SweepSpec, states: Sequence[TrialState]):
    done = sum(one.state == "complete" for one in states)
    title = f"sweep {spec.name}: {done} of {len(states)} trials are complete"
    shown = create_table("trial", "values", "state", f"{spec.metric}>", title=title)
    for one in states:
        shown.add_row(
            one.trial.id, one.trial.describe(), colour_word(one.state), format_value(one.value)
        )
    return shown


def _list_tables(table: SweepTable):
    """The points, the best first, and each axis over all else."""
    yield _tabulate_rows(f"{table.metric} of each point", table.points)
    if len(table.axes) > 1:
        for key, rows in table.axes.items():
            yield _tabulate_rows(f"{table.metric} of each {key}, over all else", rows)


def _tabulate_rows(title: str, rows: Sequence[AxisRow]):
    shown = create_table("values", "mean>", "sd>", "n>", "95 % interval", title=title)
    for row in rows:
        words = " ".join(f"{key}={format_value(value)}" for key, value in row.values.items()) or "-"
        found = row.interval
        if found is None:
            shown.add_row(words, "-", "-", "0", "no seed is complete")
            continue
        span = "one seed tells none"
        if found.low is not None:
            span = f"{format_value(found.low)} to {format_value(found.high)}"
        shown.add_row(words, format_value(found.mean), format_value(found.sd), str(found.n), span)
    return shown


def _describe(one: TrialState) -> dict[str, object]:
    return {
        "id": one.trial.id, "run": one.run, "values": one.trial.own, "state": one.state,
        "value": one.value, "job": one.job_id, "reason": one.reason,
    }  # fmt: skip


_COMMANDS = {
    "plan": (plan, "list the trials, and check each of them"),
    "run": (run, "submit what is missing, and work until all have ended"),
    "status": (status, "how the trials stand, and what the axes tell"),
    "resume": (resume, "go on with a sweep that has begun"),
}

main = CommandLine(create_parser, logs=True)

if __name__ == "__main__":
    sys.exit(main())
