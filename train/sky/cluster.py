"""Runs an experiment on a TPU through SkyPilot or GKE, and stores the name of its job or cluster.

    export OUTPUT_DIR=gs://BUCKET/runs
    python -m train.sky.cluster launch v5litepod-8 kd/deit_s_token
    python -m train.sky.cluster launch v6e-1 matmul_bench
    python -m train.sky.cluster launch v4-8 digits_kd -- --teacher_path gs://BUCKET/runs/RUN
    python -m train.sky.cluster launch v6e-16 kd/deit_s_token --on gke --image URL
    python -m train.sky.cluster exec -- python -m tools.doctor
    python -m train.sky.cluster {sync,status,forget}

Spot machines run as a managed job: after a preemption SkyPilot finds other machines, and the run
continues with --resume auto. --on-demand starts a cluster that stays until `sky down` ends it; exec
copies the tree there and runs a command. --on gke creates a JobSet by kubectl, --on k8s lets
SkyPilot use its Kubernetes cluster. .cluster_name holds the name of the job, cluster or jobset;
while it runs, no other is started and the name is kept. Results go to --output, the experiment's
own run.output_dir if it is a bucket, or OUTPUT_DIR of the environment, whichever comes first. The
words behind -- are passed to main.py, or to the program that the experiment names.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from train import commands
from train.execute import ROOT, Executor
from train.experiments import OUTPUT, expand, find_config, find_output, find_program
from train.fanout import WORKER_SOURCE
from train.provision import ARCHIVE, pack_tree
from train.sky.task import (
    DISK_GIB,
    JOBSET,
    QUEUE,
    TEMPLATE,
    SkyJob,
    create_job_name,
    render,
)
from train.xla_dist import add_stack
from utils.errors import UserError
from utils.generations import find_slice
from utils.json_types import JsonObject
from utils.programs import CommandLine, create_program_parser, require_at_least

NAME_FILE = ROOT / ".cluster_name"
_OLD_NAME_FILE = ROOT / "train/sky/.cluster_name"
RENDERED = ".sync/task.sky.yaml"
# Where SkyPilot keeps the tree on a cluster.
_WORKDIR = "sky_workdir"
_ENDED = ("SUCCEEDED", "CANCELLED", "COMPLETED")  # and every FAILED...
# Kueue, JobSet and GKE append their own parts to a name of at most 63 letters.
_LONGEST = 28
# What a name stands for -> the command that ends it.
_ENDS = {
    "cluster": "sky down {}",
    "job": "sky jobs cancel -n {}",
    "jobset": "kubectl delete jobset {}",
}


def run_verb(arguments: argparse.Namespace) -> int:
    """Run the verb; return the exit code."""
    if arguments.command and arguments.verb not in ("launch", "exec"):
        create_parser().error(
            f"{arguments.verb} takes no words behind --: only launch and exec use them"
        )
    if _OLD_NAME_FILE.exists() and not NAME_FILE.exists() and not arguments.dry_run:
        _OLD_NAME_FILE.rename(NAME_FILE)
    verbs = {
        "launch": launch,
        "exec": execute,
        "sync": sync,
        "status": show_status,
        "forget": forget,
    }
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
        f"of the experiment if it is one, else {OUTPUT} of the environment)",
    )
    add("--data-root", default="", help="where the dataset is, instead of the config's data.root")
    add("--region", default="", help="of Google Cloud (default: SkyPilot looks for one)")
    add("--on-demand", action="store_true", help="a cluster that stays, instead of a spot job")
    text = f"disk of each machine (default {DISK_GIB})"
    add("--disk-gib", type=int, default=DISK_GIB, help=text)
    add("--max-restarts", type=int, default=3, help="after errors; preemptions are not counted")
    add(
        "--on",
        choices=("gcp", "gke", "k8s"),
        default="gcp",
        help="SkyPilot's TPU VMs on Google "
        "Cloud (default), a JobSet on GKE, or SkyPilot on its Kubernetes cluster",
    )
    add("--image", default="", help="--on gke: the container image, in a registry")
    add("--queue", default=QUEUE, help=f"--on gke: Kueue's local queue (default {QUEUE})")
    add_stack(launching)
    executing = verbs.add_parser("exec", help="copy the tree to the cluster, run what follows --")
    add_stack(executing)
    syncing = verbs.add_parser("sync", help="ship the tree to the on-demand cluster")
    syncing.add_argument("--dirty", action="store_true", help="what is not committed, too")
    syncing.add_argument("--hosts", type=int, default=1, help="hosts of the slice (default 1)")
    everything = [launching, executing, syncing]
    everything.append(verbs.add_parser("status", help="whether it still runs"))
    everything.append(verbs.add_parser("forget", help="forget the name of what has ended"))
    for verb in everything:
        verb.add_argument("--dry-run", action="store_true", help="print the commands only")
    return parser


def launch(arguments: argparse.Namespace, executor: Executor) -> int:
    """Start an experiment, unless another job runs; return the exit code of SkyPilot or kubectl."""
    _check_flags(arguments)
    job, origin = _create_job(arguments)
    is_gke, is_cluster = arguments.on == "gke", arguments.on_demand
    template = JOBSET if is_gke else TEMPLATE
    rendered = RENDERED.replace("task.sky", "jobset") if is_gke else RENDERED
    text = render(job, template.read_text(encoding="utf-8"))
    start = commands.sky_launch if is_cluster else commands.sky_launch_managed
    command = commands.kubectl_create(rendered) if is_gke else start(job.name, rendered)
    kind = "jobset" if is_gke else "cluster" if is_cluster else "job"
    if not executor.dry_run:
        # Without this program nothing begins, and no name may be noted.
        executor.find_program(command[0])
    _require_free(kind, job.name, executor=executor)
    if arguments.output is None:
        sys.stderr.write(f"the results go to {job.output_dir}, by {origin}\n")
    if not executor.dry_run:
        (ROOT / rendered).parent.mkdir(exist_ok=True)
        (ROOT / rendered).write_text(text, encoding="utf-8")
        # Before the start: a launch that is cut off may have begun.
        NAME_FILE.write_text(f"{kind} {job.name}\n", encoding="utf-8")
    return executor.call(command)


def _check_flags(arguments: argparse.Namespace) -> None:
    require_at_least(1, arguments, "disk_gib")
    require_at_least(0, arguments, "max_restarts")
    is_gke = arguments.on == "gke"
    if is_gke and not arguments.image:
        raise UserError(
            "--on gke needs --image, which python -m train.container build made and docker pushed "
            "to a registry; give it"
        )
    unused = {
        "--image": arguments.image and not is_gke,
        "--queue": arguments.queue != QUEUE and not is_gke,
        "--region": arguments.region and arguments.on != "gcp",
        "--disk-gib": arguments.disk_gib != DISK_GIB and is_gke,
    }
    for flag in filter(unused.get, unused):
        raise UserError(f"{flag} has no effect with --on {arguments.on}; remove it")


def _create_job(arguments: argparse.Namespace) -> tuple[SkyJob, str]:
    """Create the job that the flags describe; also what names its output."""
    accelerator_type = arguments.accelerator.removeprefix("tpu-")
    config = find_config(arguments.experiment)
    program = find_program(config, hosts=find_slice(accelerator_type).hosts)
    output, origin = find_output(arguments.output, config, arguments.command)
    if program and arguments.data_root:
        raise UserError(f"--data-root is for a run, and {config} runs {program.name}; remove it")
    name, now = create_job_name(arguments.experiment), time.strftime("%m%d%H%M%S")
    if arguments.on == "gke":  # a JobSet stays under its name after its end
        name = f"{name[: _LONGEST - len(now) - 1].rstrip('-')}-{now}"
    job = SkyJob(
        name=name,
        accelerator_type=accelerator_type,
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
        program=program,
        on=arguments.on,
        image=arguments.image,
        queue=arguments.queue,
    )
    return job, origin


def execute(arguments: argparse.Namespace, executor: Executor) -> int:
    """Copy the tree to the on-demand cluster and run a command there; return its exit code."""
    words = expand(arguments.command)
    if not words:
        raise UserError(
            "exec needs a command; write it behind --, such as -- python -m tools.doctor"
        )
    name = _read_cluster(executor)
    venv = commands.STACKS[arguments.stack].venv
    return executor.call(commands.sky_exec(name, words, venv=venv))


def sync(arguments: argparse.Namespace, executor: Executor) -> int:
    """Ship the tree to all hosts of the on-demand cluster, which was started before; return 0."""
    if arguments.hosts < 1:
        raise UserError(f"--hosts ({arguments.hosts}) must be at least 1; raise it")
    name = _read_cluster(executor)
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
    command = commands.kubectl_get_jobset(name) if kind == "jobset" else command
    answer = executor.ask(command, assume="[]")
    if answer.code:
        raise UserError(f"{command[0]} returned no state of {kind} {name}: {answer.reason}")
    if kind == "jobset":
        # kubectl prints nothing of a JobSet that is not there.
        status = json.loads(answer.output or "{}").get("status")
        return status if status is None else (status.get("terminalState") or "running").upper()
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
        way = _ENDS[kind].format(name)
        raise UserError(f"{kind} {name} still runs ({state}); `{way}` ends it")


def _read_cluster(executor: Executor) -> str:
    """Read the name of the on-demand cluster; a UserError if none was started."""
    kind, name = _read_name(executor)
    if kind != "cluster":
        raise UserError(
            f"{name} is a managed job, whose tree was shipped with it, no cluster; launch it "
            "again to change it, or with --on-demand"
        )
    return name


def _read_name(executor: Executor | None = None) -> tuple[str, str]:
    if executor is not None and executor.dry_run:
        return "cluster", "CLUSTER"
    if not NAME_FILE.exists():
        raise UserError("nothing was started from here; launch_tpu.sh starts an experiment")
    words = NAME_FILE.read_text(encoding="utf-8").split()
    if len(words) != 2 or words[0] not in _ENDS:
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


main = CommandLine(create_parser, run_verb, takes_command=True)

if __name__ == "__main__":
    sys.exit(main())
