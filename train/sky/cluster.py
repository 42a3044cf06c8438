"""Runs an experiment on a TPU through SkyPilot, and stores the name of its job or cluster.

    export OUTPUT_DIR=gs://BUCKET/runs
    python -m train.sky.cluster launch v5litepod-8 kd/deit_s_token
    python -m train.sky.cluster launch v4-8 digits_kd -- --teacher_path gs://BUCKET/runs/RUN
    python -m train.sky.cluster {sync,status,forget}

Spot machines run as a managed job: after a preemption SkyPilot finds other machines, and the run
continues with --resume auto. --on-demand starts a cluster that stays until `sky down` ends it.
train/sky/.cluster_name holds the name of the job or cluster; while it runs, no other is started and
the name is kept. Runs go to --output, the experiment's own run.output_dir if it is a bucket, or
OUTPUT_DIR of the environment, whichever comes first. The words behind -- are passed to main.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from train import commands
from train.execute import ROOT, Executor
from train.fanout import WORKER_SOURCE
from train.provision import ARCHIVE, pack_tree
from train.xla_dist import add_stack
from utils.config.load import load_config
from utils.errors import UserError
from utils.generations import check_stack
from utils.json_types import JsonObject
from utils.programs import CommandLine, create_program_parser

TEMPLATE = ROOT / "train/sky/tpu_resource.sky.yaml"
# A task must not carry these from the user's machine.
_PRIVATE = re.compile(r"\.ssh|id_rsa|id_ed25519|google_compute_engine|\.config/gcloud|PRIVATE KEY")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
NAME_FILE = ROOT / "train/sky/.cluster_name"
RENDERED = ".sync/task.sky.yaml"
_BUCKET = re.compile(r"gs://[^\s/]+(/\S*)?")
# The task uses the same name for the root of the run store.
_OUTPUT = "OUTPUT_DIR"
# Where SkyPilot keeps the tree on a cluster.
_WORKDIR = "sky_workdir"
_ENDED = ("SUCCEEDED", "CANCELLED")  # and every FAILED...


@dataclass(frozen=True)
class SkyJob:
    """An experiment and its machines."""

    name: str
    accelerator_type: str  # as Cloud TPU spells it, such as v5litepod-8
    config: str  # path of a YAML below the repository's root
    output_dir: str  # gs:// URL of the run store: a machine's disk goes with it
    run_id: str
    data_root: str = ""
    region: str = ""  # of Google Cloud; SkyPilot chooses one if empty
    spot: bool = True
    disk_gib: int = 200
    max_restarts: int = 3
    stack: str = commands.DEFAULT_STACK
    flags: tuple[str, ...] = ()  # further words for main.py


def render(job: SkyJob, template: str) -> str:
    """Fill the template of a task; a task with an unfilled placeholder is never written.

    Raises:
      UserError: a value is missing or too small, the task holds a key of this machine, or no YAML.
    """
    least = {"--disk-gib": (job.disk_gib, 1), "--max-restarts": (job.max_restarts, 0)}
    for flag, (value, lowest) in least.items():
        if value < lowest:
            raise UserError(f"{flag} ({value}) must be at least {lowest}; raise it")
    stack = commands.STACKS[job.stack]
    values = {
        "name": job.name,
        "infra": f"gcp/{job.region}" if job.region else "gcp",
        "accelerator": f"tpu-{job.accelerator_type}",
        "runtime_version": check_stack(job.accelerator_type, job.stack).runtime_version,
        "setup": stack.setup,
        "venv": stack.venv,
        "use_spot": str(job.spot).lower(),
        "disk_gib": str(job.disk_gib),
        "max_restarts": str(job.max_restarts),
        "config": job.config,
        "output_dir": job.output_dir,
        "run_id": job.run_id,
        "data_root": job.data_root,
        "flags": json.dumps(shlex.join(job.flags)),
    }
    text = "\n".join(row for row in template.splitlines() if not row.startswith("#"))
    unknown = sorted(set(_PLACEHOLDER.findall(text)) - set(values))
    if unknown:
        raise UserError(f"{TEMPLATE.name} has an unknown placeholder {unknown[0]!r}; remove it")
    text = _PLACEHOLDER.sub(lambda match: values[match[1]], text)
    _check(text)
    return text + "\n"


def create_job_name(experiment: str) -> str:
    """Create a name that SkyPilot and Google Cloud accept from an experiment's."""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(experiment).stem.lower()).strip("-")
    return f"trainer-{stem}"[:40].rstrip("-")


def find_config(experiment: str) -> str:
    """Find an experiment's YAML, relative to the repository's root; a UserError if missing."""
    for path in (experiment, f"configs/{experiment}.yaml", f"configs/{experiment}"):
        if path.endswith(".yaml") and (ROOT / path).is_file():
            return path
    raise UserError(f"experiment {experiment!r} is no file configs/{experiment}.yaml; see configs/")


def run_verb(arguments: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    if arguments.command and arguments.verb != "launch":
        create_parser().error(
            f"{arguments.verb} takes no words behind --: only launch passes them to main.py"
        )
    verbs = {"launch": launch, "sync": sync, "status": show_status, "forget": forget}
    return verbs[arguments.verb](arguments, Executor(dry_run=arguments.dry_run))


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the command line."""
    parser = create_program_parser(__doc__, prog="python -m train.sky.cluster")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    launching = verbs.add_parser("launch", help="start an experiment")
    add = launching.add_argument
    add("accelerator", help="such as v5litepod-8 or v4-8")
    add("experiment", help="a YAML below configs/, such as kd/deit_s_token")
    add(
        "--output",
        metavar="URL",
        help="gs:// directory of the run store (default: run.output_dir "
        f"of the experiment if it is one, else {_OUTPUT} of the environment)",
    )
    add("--data-root", default="", help="where the dataset is, instead of the config's data.root")
    add("--region", default="", help="of Google Cloud (default: SkyPilot looks for one)")
    add("--on-demand", action="store_true", help="a cluster that stays, instead of a spot job")
    add("--disk-gib", type=int, default=200, help="disk of each machine (default 200)")
    add("--max-restarts", type=int, default=3, help="after errors; preemptions are not counted")
    add_stack(launching)
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
    """Start an experiment, unless another job runs; return the exit code of SkyPilot."""
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
        stack=arguments.stack,
        flags=tuple(arguments.command),
    )
    text = render(job, TEMPLATE.read_text(encoding="utf-8"))
    kind = "cluster" if arguments.on_demand else "job"
    start = commands.sky_launch if arguments.on_demand else commands.sky_launch_managed
    command = start(job.name, RENDERED)
    if not executor.dry_run:
        # Without this program nothing begins, and no name may be noted.
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
    """Find the run's store and its origin: the flag, the config's bucket, or the environment.

    The configuration is read with its flags, so that an invalid one is refused here.

    Raises:
      UserError: the store is no bucket, or the configuration cannot be read.
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
    """Ship the tree to all hosts of the on-demand cluster, which was started before; return 0."""
    if arguments.hosts < 1:
        raise UserError(f"--hosts ({arguments.hosts}) must be at least 1; raise it")
    kind, name = _read_name(executor)
    if kind != "cluster":
        raise UserError(
            f"{name} is a managed job: SkyPilot ships the tree itself; launch it again to change it"
        )
    pack_tree(executor, dirty=arguments.dirty)
    for host in [name, *(f"{name}-worker{number}" for number in range(1, arguments.hosts))]:
        executor.require(commands.scp(WORKER_SOURCE, host=host, target=commands.WORKER_SCRIPT))
        executor.require(commands.scp(ARCHIVE, host=host, target=commands.TREE_ARCHIVE))
        output = executor.require(commands.ssh(host, commands.worker_unpack(_WORKDIR)))
        if not executor.dry_run:
            print(f"{host}: {output.strip()}")
    return 0


def show_status(arguments: argparse.Namespace, executor: Executor) -> int:
    """Print the state of the job or cluster; return 0 while it runs, 1 after its end."""
    kind, name = _read_name(executor)
    state = get_state(kind, name, executor=executor)
    if not executor.dry_run:
        print(f"{kind} {name}: {state or 'not there'}")
    return 0 if is_running(state) else 1


def forget(arguments: argparse.Namespace, executor: Executor) -> int:
    """Forget the name of a job or cluster whose end is known; return 0."""
    kind, name = _read_name(executor)
    state = get_state(kind, name, executor=executor)
    if executor.dry_run:
        return 0
    _require_ended(kind, name, state=state)
    NAME_FILE.unlink()
    print(f"{kind} {name} is forgotten: {state or 'not there'}")
    return 0


def get_state(kind: str, name: str, *, executor: Executor) -> str | None:
    """Read SkyPilot's state of a cluster or job; None if it has none of this name.

    Raises:
      UserError: SkyPilot returns no states, which does not mean that nothing runs.
    """
    command = commands.sky_status(name) if kind == "cluster" else commands.sky_jobs()
    answer = executor.ask(command, assume="[]")
    if answer.code:
        raise UserError(f"SkyPilot returned no state of {kind} {name}: {answer.reason}")
    key = "name" if kind == "cluster" else "job_name"
    states = [str(row.get("status")) for row in _read_rows(answer.output) if row.get(key) == name]
    running = [state for state in states if is_running(state)]
    return (running or states or [None])[0]


def is_running(state: str | None) -> bool:
    """Return whether a cluster or job of this state may cost money."""
    return state is not None and state not in _ENDED and not state.startswith("FAILED")


def _require_free(kind: str, name: str, *, executor: Executor) -> None:
    """Refuse a second job; starting a cluster again under its own name is a new run on it."""
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


def _read_name(executor: Executor | None = None) -> tuple[str, str]:
    if executor is not None and executor.dry_run:
        return "cluster", "CLUSTER"
    if not NAME_FILE.exists():
        raise UserError("nothing was started from here; launch_tpu.sh starts an experiment")
    words = NAME_FILE.read_text(encoding="utf-8").split()
    if len(words) != 2 or words[0] not in ("job", "cluster"):
        raise UserError(f"{NAME_FILE} holds {' '.join(words)!r}, not `cluster NAME`; correct it")
    return words[0], words[1]


def _read_rows(text: str) -> list[JsonObject]:
    """Parse the JSON list in SkyPilot's output, after any other lines."""
    start = text.find("[")
    try:
        rows = json.loads(text[start:]) if start >= 0 else None
    except json.JSONDecodeError:
        rows = None
    if not isinstance(rows, list):
        raise UserError(f"SkyPilot returned no JSON list: {text.strip()[:80]!r}")
    return rows


def _check(text: str) -> None:
    if "{{" in text or "}}" in text:
        raise UserError("a value of the task contains {{ or }}; remove them")
    private = _PRIVATE.search(text)
    if private:
        raise UserError(f"the task names {private[0]!r}: keys stay on this machine")
    try:
        task = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"the task is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(task, dict) or "file_mounts" in task:
        raise UserError("remove file_mounts from the task: only the project's tree is uploaded")


main = CommandLine(create_parser, run_verb, takes_command=True)

if __name__ == "__main__":
    sys.exit(main())
