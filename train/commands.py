"""Builds every command line that leaves this machine, as a list of arguments; runs none."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from utils.generations import find_generation

# Files and directories in the home directory of a worker.
WORKER_SCRIPT = ".xla_dist_worker.py"
TREE_ARCHIVE = ".xla_dist_tree.tar.gz"
WORKDIR = "trainer"


@dataclass(frozen=True)
class Stack:
    """How a worker is set up with one of the two stacks of a TPU."""

    setup: str  # flag of `run_commands.sh setup`
    venv: str  # its environment, below the tree
    requirements: tuple[str, ...]  # pinned versions; a later file replaces those of an earlier one


STACKS = {
    "torch_xla": Stack("--tpu", ".venv", ("requirements.txt",)),
    "torch_tpu": Stack(
        "--torch-tpu", ".venv-tpu", ("requirements.txt", "requirements-torch-tpu.txt")
    ),
}
DEFAULT_STACK = "torch_xla"


@dataclass(frozen=True)
class Tpu:
    """A TPU VM or pod slice; gcloud's own configuration supplies an empty zone or project."""

    name: str
    zone: str = ""
    project: str = ""


@dataclass(frozen=True)
class CreateOptions:
    """How to request a TPU VM."""

    accelerator_type: str
    runtime_version: str = ""  # the generation's if empty
    spot: bool = False
    reserved: bool = False
    queued: bool = False  # use a queued resource, which waits until there is capacity
    valid_until: str = ""  # how long a queued request may wait, such as 6h; no limit if empty


@dataclass(frozen=True)
class RemoteCommand:
    """The command that a worker runs."""

    words: tuple[str, ...]  # the program and its arguments; no shell interprets them
    env: tuple[tuple[str, str], ...] = ()  # variables of the program
    workdir: str = WORKDIR  # relative to the home directory of the worker
    venv: str = ""  # directory of a virtual environment, relative to workdir, or empty
    conda_env: str = ""  # name of a conda environment, or empty
    end_others: bool = False  # end what an earlier launch left on the worker


def show(command: Sequence[str]) -> str:
    """Format a command as a person would type it."""
    return shlex.join(command)


def enable_services(project: str) -> list[str]:
    """Enable the services that TPU VMs need."""
    services = ["tpu.googleapis.com", "compute.googleapis.com", "storage.googleapis.com"]
    return ["gcloud", "services", "enable", *services, f"--project={project}"]


def describe_bucket(project: str, bucket: str) -> list[str]:
    """Describe a bucket; fails if it does not exist."""
    return ["gcloud", "storage", "buckets", "describe", bucket, f"--project={project}"]


def create_bucket(project: str, bucket: str, *, location: str) -> list[str]:
    """Create a bucket in one region, with one kind of permissions."""
    return [
        *("gcloud", "storage", "buckets", "create", bucket),
        *(f"--location={location}", f"--project={project}"),
        *("--uniform-bucket-level-access", "--public-access-prevention"),
    ]


def describe(tpu: Tpu) -> list[str]:
    """Read state, type and hosts of a TPU VM."""
    return [*_tpu_vm("describe", tpu.name, tpu), "--format=json"]


def create(tpu: Tpu, options: CreateOptions) -> list[str]:
    """Request a TPU VM: now, which fails without capacity, or as a queued resource."""
    version = options.runtime_version or find_generation(options.accelerator_type).runtime_version
    accelerator = f"--accelerator-type={options.accelerator_type}"
    if options.queued:
        command = [*_queued("create", tpu), f"--node-id={tpu.name}", accelerator]
        command.append(f"--runtime-version={version}")
        if options.valid_until:
            command.append(f"--valid-until-duration={options.valid_until}")
    else:
        command = [*_tpu_vm("create", tpu.name, tpu), accelerator, f"--version={version}"]
    tiers = {"--spot": options.spot, "--reserved": options.reserved}
    return [*command, *(flag for flag, is_wanted in tiers.items() if is_wanted)]


def start(tpu: Tpu) -> list[str]:
    """Start a stopped TPU VM."""
    return _tpu_vm("start", tpu.name, tpu)


def stop(tpu: Tpu) -> list[str]:
    """Stop a TPU VM; its disk stays and is billed."""
    return _tpu_vm("stop", tpu.name, tpu)


def delete(tpu: Tpu) -> list[str]:
    """Delete a TPU VM with its disk."""
    return [*_tpu_vm("delete", tpu.name, tpu), "--quiet"]


def describe_queued(tpu: Tpu) -> list[str]:
    """Read the state of the queued resource of a TPU VM."""
    return [*_queued("describe", tpu), "--format=json"]


def delete_queued(tpu: Tpu) -> list[str]:
    """Delete a queued resource and the TPU VM that it holds."""
    return [*_queued("delete", tpu), "--force", "--quiet"]


def login(tpu: Tpu, worker: str) -> list[str]:
    """Open an interactive shell on one worker."""
    return [*_tpu_vm("ssh", tpu.name, tpu), f"--worker={worker}"]


def run_remote(tpu: Tpu, text: str, *, worker: str = "all") -> list[str]:
    """Run a shell command on workers.

    gcloud splits the text at blanks and passes the parts to ssh, which joins them again: the
    worker's shell sees the text unchanged.
    """
    return [*_tpu_vm("ssh", tpu.name, tpu), f"--worker={worker}", f"--command={text}", "--quiet"]


def copy_to(tpu: Tpu, source: str, *, target: str) -> list[str]:
    """Copy a file into the home directory of every worker."""
    return [*_tpu_vm("scp", source, tpu, f"{tpu.name}:{target}"), "--worker=all", "--quiet"]


def worker_run(run_id: str, remote: RemoteCommand) -> str:
    """Format the shell command with which a worker runs its part of a launch."""
    words = ["python3", WORKER_SCRIPT, "run", f"--run-id={run_id}", f"--workdir={remote.workdir}"]
    words += [f"--venv={remote.venv}"] if remote.venv else []
    words += [f"--conda-env={remote.conda_env}"] if remote.conda_env else []
    words += ["--end-others"] if remote.end_others else []
    words += [f"--env={name}={value}" for name, value in remote.env]
    return shlex.join([*words, "--", *remote.words])


def worker_stop(run_id: str, grace_s: float) -> str:
    """Format the shell command that ends a launch: SIGTERM, then SIGKILL after `grace_s`."""
    return shlex.join(["python3", WORKER_SCRIPT, "stop", run_id, f"--grace-s={grace_s:g}"])


def worker_unpack(workdir: str) -> str:
    """Format the shell command that unpacks a shipped tree."""
    return shlex.join(["python3", WORKER_SCRIPT, "unpack", TREE_ARCHIVE, workdir])


def worker_logs(run_id: str, *, lines: int, follow: bool) -> str:
    """Format the shell command that shows a worker's log of a launch; the newest if empty."""
    words = ["python3", WORKER_SCRIPT, "logs", f"--lines={lines}"]
    words += [f"--run-id={run_id}"] if run_id else []
    return shlex.join([*words, *(["--follow"] if follow else [])])


def archive_commit(target: str) -> list[str]:
    """Pack the committed tree."""
    return ["git", "archive", "--format=tar.gz", f"--output={target}", "HEAD"]


def list_tree() -> list[str]:
    """List every file that version control does not ignore, changed or new."""
    return ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]


def list_changes() -> list[str]:
    """List what differs from the commit."""
    return ["git", "status", "--porcelain", "--untracked-files=normal"]


def get_commit() -> list[str]:
    """Read the commit that is checked out."""
    return ["git", "rev-parse", "HEAD"]


def torchrun(
    words: Sequence[str], *, gpus: int, nodes: int = 1, node_rank: int = 0, master: str = ""
) -> list[str]:
    """Start a run on GPUs with one process each, on one node or on one of several."""
    if nodes == 1:
        return ["torchrun", "--standalone", f"--nproc-per-node={gpus}", *words]
    return [
        "torchrun",
        f"--nnodes={nodes}",
        f"--node-rank={node_rank}",
        f"--nproc-per-node={gpus}",
        f"--master-addr={master}",
        "--master-port=29500",
        *words,
    ]


def build_image(image: str, *, tpu: bool, stack: str = DEFAULT_STACK) -> list[str]:
    """Build the container image, with torch_xla with or without libtpu, or with TorchTPU."""
    arguments = [f"--build-arg=TPU={int(tpu)}"]
    arguments += [f"--build-arg=STACK={stack}"] if stack != DEFAULT_STACK else []
    return ["docker", "build", *arguments, f"--tag={image}", "."]


def run_image(
    image: str,
    words: Sequence[str],
    *,
    tpu: bool,
    mounts: Mapping[str, str],
    stack: str = DEFAULT_STACK,
) -> list[str]:
    """Run a program in the container, on a TPU VM with the options that libtpu needs.

    libtpu opens the devices below /dev and maps pinned memory (`--privileged`) and connects to the
    other hosts and the metadata server (`--net=host`); the input pipeline shares memory.

    Args:
      mounts: directory of this machine -> directory in the container.
    """
    command = ["docker", "run", "--rm", "--init", "--shm-size=16g"]
    if tpu:
        command += ["--privileged", "--net=host", "--ulimit=memlock=-1"]
    if stack == DEFAULT_STACK:
        command.append(f"--env=PJRT_DEVICE={'TPU' if tpu else 'CPU'}")
    elif not tpu:
        command.append("--env=TPU_STANDIN=cpu")
    command += [f"--volume={here}:{there}" for here, there in mounts.items()]
    return [*command, image, *words]


def sky_launch(cluster: str, task: str) -> list[str]:
    """Start an on-demand cluster, or run again on an existing one."""
    return ["sky", "launch", f"--cluster={cluster}", "--detach-run", "--yes", task]


def sky_launch_managed(name: str, task: str) -> list[str]:
    """Start a managed job, which SkyPilot restarts on other spot machines after a preemption."""
    return ["sky", "jobs", "launch", f"--name={name}", "--detach-run", "--yes", task]


def sky_exec(cluster: str, words: Sequence[str], *, venv: str) -> list[str]:
    """Copy the tree to a cluster and run a command there, with an environment of packages."""
    text = f'PATH="$PWD/{venv}/bin:$PATH" {shlex.join(words)}'
    return ["sky", "exec", "--workdir=.", cluster, text]


def sky_status(cluster: str) -> list[str]:
    """Query the cloud for the state of a cluster."""
    return ["sky", "status", "--refresh", "--output=json", cluster]


def sky_jobs() -> list[str]:
    """List managed jobs and their states."""
    return ["sky", "jobs", "queue", "--refresh", "--output=json"]


def kubectl_create(manifest: str) -> list[str]:
    """Create what a manifest describes; fails if it exists."""
    return ["kubectl", "create", f"--filename={manifest}"]


def kubectl_get_jobset(name: str) -> list[str]:
    """Read a JobSet; prints nothing if it does not exist."""
    return ["kubectl", "get", "jobset", name, "--ignore-not-found", "--output=json"]


def ssh(host: str, text: str) -> list[str]:
    """Run a shell command on a host of the user's ssh configuration."""
    return ["ssh", "-o", "BatchMode=yes", "-o", "ForwardAgent=no", host, text]


def scp(source: str, *, host: str, target: str) -> list[str]:
    """Copy a file to a host of the user's ssh configuration."""
    return ["scp", "-q", "-o", "BatchMode=yes", source, f"{host}:{target}"]


def _tpu_vm(verb: str, subject: str, tpu: Tpu, *more: str) -> list[str]:
    return ["gcloud", "compute", "tpus", "tpu-vm", verb, subject, *more, *_get_location(tpu)]


def _queued(verb: str, tpu: Tpu) -> list[str]:
    # The queued resource of a TPU VM has the same name.
    return ["gcloud", "compute", "tpus", "queued-resources", verb, tpu.name, *_get_location(tpu)]


def _get_location(tpu: Tpu) -> list[str]:
    flags = {"--zone": tpu.zone, "--project": tpu.project}
    return [f"{flag}={value}" for flag, value in flags.items() if value]


def sbatch(name: str, options: Sequence[str], words: Sequence[str]) -> list[str]:
    """Queue a run with Slurm; prints the job's number.

    Args:
      options: of sbatch, for the job's resources.
      words: of main.py.
    """
    output = f"--output=.sync/slurm/{name}-%j.txt"
    command = ["sbatch", "--parsable", f"--job-name={name}", output, *options]
    return [*command, "train/slurm/run.sbatch", *words]


def squeue(job: str) -> list[str]:
    """Read the state of a Slurm job; fails or prints nothing once it has ended."""
    return ["squeue", "--noheader", "--format=%T", f"--jobs={job}"]
