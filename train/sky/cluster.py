"""Runs an experiment on a TPU through SkyPilot, and remembers what was started.

    export OUTPUT_DIR=gs://BUCKET/runs
    python -m train.sky.cluster launch v5litepod-8 kd/deit_s_token
    python -m train.sky.cluster launch v4-8 digits_kd -- --teacher_path gs://BUCKET/runs/RUN
    python -m train.sky.cluster {sync,status,forget}

Spot machines run as a managed job: SkyPilot finds others when they are taken away, and the run goes
on with --resume auto. --on-demand starts a cluster that stays until `sky down` ends it. The name of
what was started stands in train/sky/.cluster_name; while it runs, nothing else is started and the
name is not forgotten. Runs go to --output, the experiment's own run.output_dir if it is a bucket,
or OUTPUT_DIR of the environment, whichever comes first. What stands behind -- is for main.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence

from train import commands
from train.execute import ROOT, Executor
from train.fanout import WORKER_SOURCE
from train.sky.render import TEMPLATE, SkyJob, create_job_name, find_config, render
from train.tree import pack_tree
from utils.config.load import load_config
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.programs import CommandLine, create_program_parser

NAME_FILE = ROOT / "train/sky/.cluster_name"
RENDERED = ".sync/task.sky.yaml"
_BUCKET = re.compile(r"gs://[^\s/]+(/\S*)?")
# The name that the task has for the root of the run store, too.
_OUTPUT = "OUTPUT_DIR"
# Where SkyPilot keeps the tree on a cluster.
_WORKDIR = "sky_workdir"
_ENDED = ("SUCCEEDED", "CANCELLED")  # and every FAILED...


def run_verb(arguments: argparse.Namespace) -> int:
    """Do what the verb says; the exit code."""
    if arguments.command and arguments.verb != "launch":
        create_parser().error(
            f"{arguments.verb} takes no words behind --: they are for main.py of a launch"
        )
    verbs = {"launch": launch, "sync": sync, "status": show_status, "forget": forget}
    return verbs[arguments.verb](arguments, Executor(dry_run=arguments.dry_run))


def create_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = create_program_parser(__doc__, prog="python -m train.sky.cluster")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    launching = verbs.add_parser("launch", help="start an experiment")
    add = launching.add_argument
    add("accelerator", help="such as v5litepod-8 or v4-8")
    add("experiment", help="a YAML below configs/, such as kd/deit_s_token")
    add("--output", metavar="URL", help="gs:// directory of the run store (default: run.output_dir "
        f"of the experiment if it is one, else {_OUTPUT} of the environment)")  # fmt: skip
    add("--data-root", default="", help="where the dataset is, instead of the config's data.root")
    add("--region", default="", help="of Google Cloud (default: SkyPilot looks for one)")
    add("--on-demand", action="store_true", help="a cluster that stays, instead of a spot job")
    add("--disk-gib", type=int, default=200, help="disk of each machine (default 200)")
    add("--max-restarts", type=int, default=3, help="after errors; preemptions are not counted")
    syncing = verbs.add_parser("sync", help="ship the tree to the on-demand cluster")
    syncing.add_argument("--dirty", action="store_true", help="what is not committed, too")
    syncing.add_argument("--hosts", type=int, default=1, help="hosts of the slice (default 1)")
    everything = [launching, syncing]
    everything.append(verbs.add_parser("status", help="whether it still runs"))
    everything.append(verbs.add_parser("forget", help="forget the name of what has ended"))
    for verb in everything:
        verb.add_argument("--dry-run", action="store_true", help="print the commands only")
    return parser


def launch(arguments: argparse.Namespace, executor: Executor) -> int:
    """launch: the exit code of SkyPilot.

    Raises:
      UserError: something else still runs, or the job cannot be described.
    """
    config = find_config(arguments.experiment)
    output, origin = find_output(arguments.output, config, arguments.command)
    job = SkyJob(
        name=create_job_name(arguments.experiment),
        accelerator_type=arguments.accelerator.removeprefix("tpu-"),
        config=config,
        output_dir=output,
        run_id=time.strftime("sky-%Y%m%d-%H%M%S"),
        data_root=arguments.data_root,
        region=arguments.region,
        spot=not arguments.on_demand,
        disk_gib=arguments.disk_gib,
        max_restarts=arguments.max_restarts,
        flags=tuple(arguments.command),
    )
    text = render(job, TEMPLATE.read_text(encoding="utf-8"))
    kind = "cluster" if arguments.on_demand else "job"
    start = commands.sky_launch if arguments.on_demand else commands.sky_launch_managed
    command = start(job.name, RENDERED)
    if not executor.dry_run:
        # Without it nothing begins, and there is nothing to remember.
        executor.find_program(command[0])
    _require_free(kind, job.name, executor=executor)
    if arguments.output is None:
        sys.stderr.write(f"the run goes to {output}, by {origin}\n")
    if not executor.dry_run:
        (ROOT / RENDERED).parent.mkdir(exist_ok=True)
        (ROOT / RENDERED).write_text(text, encoding="utf-8")
        # Before the start: a launch that is cut off may have begun.
        NAME_FILE.write_text(f"{kind} {job.name}\n", encoding="utf-8")
    return executor.call(command)


def find_output(flag: str | None, config: str, flags: Sequence[str] = ()) -> tuple[str, str]:
    """Where the run goes and what says so: the flag, the config's own bucket, or the environment.

    The configuration is read with its flags, so that one that no machine could run is refused here.

    Raises:
      UserError: none of them is a bucket, or the configuration cannot be read.
    """
    own = load_config(["--config", str(ROOT / config), *flags]).run.output_dir
    key, value = f"run.output_dir of {config}", own
    if flag is not None:
        key, value = "--output", flag
    elif "://" not in own and os.environ.get(_OUTPUT):
        key, value = _OUTPUT, os.environ[_OUTPUT]
    if not _BUCKET.fullmatch(value):
        raise UserError(
            f"{key} ({value}) is no gs:// URL, and a machine's disk goes with the machine; give "
            f"--output gs://BUCKET/runs, or once for all `export {_OUTPUT}=gs://BUCKET/runs`"
        )
    return value, key


def sync(arguments: argparse.Namespace, executor: Executor) -> int:
    """sync: 0, or an error.

    Raises:
      UserError: no on-demand cluster was started, a host cannot be reached, or there is none.
    """
    if arguments.hosts < 1:
        raise UserError(f"--hosts ({arguments.hosts}) must be at least 1; raise it")
    kind, name = _read_name() if not executor.dry_run else ("cluster", "CLUSTER")
    if kind != "cluster":
        raise UserError(
            f"{name} is a managed job: SkyPilot ships the tree itself; launch it again to change it"
        )
    tree = pack_tree(executor, dirty=arguments.dirty)
    for host in [name, *(f"{name}-worker{number}" for number in range(1, arguments.hosts))]:
        executor.require(commands.scp(WORKER_SOURCE, host=host, target=commands.WORKER_SCRIPT))
        executor.require(commands.scp(tree.archive, host=host, target=commands.TREE_ARCHIVE))
        output = executor.require(commands.ssh(host, commands.worker_unpack(_WORKDIR)))
        if not executor.dry_run:
            print(f"{host}: {output.strip()}")
    return 0


def show_status(arguments: argparse.Namespace, executor: Executor) -> int:
    """status: 0 while it runs, 1 when it has ended."""
    kind, name = _read_name() if not executor.dry_run else ("cluster", "CLUSTER")
    state = get_state(kind, name, executor=executor)
    if not executor.dry_run:
        print(f"{kind} {name}: {state or 'not there'}")
    return 0 if is_running(state) else 1


def forget(arguments: argparse.Namespace, executor: Executor) -> int:
    """forget: 0, or an error while it runs.

    Raises:
      UserError: it still runs, or could not be asked about.
    """
    kind, name = _read_name() if not executor.dry_run else ("cluster", "CLUSTER")
    state = get_state(kind, name, executor=executor)
    if executor.dry_run:
        return 0
    _require_ended(kind, name, state=state)
    NAME_FILE.unlink()
    print(f"{kind} {name} is forgotten: {state or 'not there'}")
    return 0


def get_state(kind: str, name: str, *, executor: Executor) -> str | None:
    """SkyPilot's word for a cluster or job; none: it knows of none.

    Raises:
      UserError: SkyPilot could not be asked: that is no sign that nothing runs.
    """
    command = commands.sky_status(name) if kind == "cluster" else commands.sky_jobs()
    answer = executor.ask(command, assume="[]")
    if answer.code:
        raise UserError(f"SkyPilot could not be asked about {kind} {name}: {answer.reason}")
    key = "name" if kind == "cluster" else "job_name"
    states = [str(row.get("status")) for row in _read_rows(answer.output) if row.get(key) == name]
    running = [state for state in states if is_running(state)]
    return (running or states or [None])[0]


def is_running(state: str | None) -> bool:
    """Whether something of this state may cost money."""
    return state is not None and state not in _ENDED and not state.startswith("FAILED")


def _require_free(kind: str, name: str, *, executor: Executor) -> None:
    """Nothing else runs; starting a cluster again under its own name is a new run on it."""
    if not NAME_FILE.exists():
        return
    old_kind, old_name = _read_name()
    if (old_kind, old_name) == (kind, name) and kind == "cluster":
        return
    state = get_state(old_kind, old_name, executor=executor)
    if not executor.dry_run:
        _require_ended(old_kind, old_name, state=state)


def _require_ended(kind: str, name: str, *, state: str | None) -> None:
    if is_running(state):
        way = f"sky down {name}" if kind == "cluster" else f"sky jobs cancel -n {name}"
        raise UserError(f"{kind} {name} still runs ({state}); `{way}` ends it")


def _read_name() -> tuple[str, str]:
    if not NAME_FILE.exists():
        raise UserError("nothing was started from here; launch_tpu.sh starts an experiment")
    words = NAME_FILE.read_text(encoding="utf-8").split()
    if len(words) != 2 or words[0] not in ("job", "cluster"):
        raise UserError(f"{NAME_FILE} holds {' '.join(words)!r}, not `cluster NAME`; mend it")
    return words[0], words[1]


def _read_rows(text: str) -> list[JsonObject]:
    """The JSON list in SkyPilot's output, whatever it says before."""
    start = text.find("[")
    try:
        rows = json.loads(text[start:]) if start >= 0 else None
    except json.JSONDecodeError:
        rows = None
    if not isinstance(rows, list):
        raise UserError(f"SkyPilot's answer is no JSON list: {text.strip()[:80]!r}")
    return rows


main = CommandLine(create_parser, run_verb, takes_command=True)

if __name__ == "__main__":
    sys.exit(main())
