"""Every command line that leaves this machine, as a list of arguments; nothing here runs one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from utils.generations import find_generation

# Files and directories in the home directory of a worker.
WORKER_SCRIPT = ".xla_dist_worker.py"
TREE_ARCHIVE = ".xla_dist_tree.tar.gz"
WORKDIR = "trainer"
VENV = ".venv"


@dataclass(frozen=True)
class Tpu:
    """A TPU VM or pod slice; empty zone or project: gcloud's own configuration decides."""

    name: str
    zone: str = ""
    project: str = ""


@dataclass(frozen=True)
class CreateOptions:
    """How a TPU VM is asked for.

    Attributes:
      runtime_version: empty: the generation's.
      queued: through a queued resource, which waits until there is capacity.
      valid_until: how long a queued request may wait, such as 6h; empty: for ever.
    """

    accelerator_type: str
    runtime_version: str = ""
    spot: bool = False
    reserved: bool = False
    queued: bool = False
    valid_until: str = ""


@dataclass(frozen=True)
class RemoteCommand:
    """What a worker runs.

    Attributes:
      words: the program and its arguments; never seen by a shell.
      env: variables of the program.
      workdir: relative to the home directory of the worker.
      venv: directory of a virtual environment, relative to workdir; empty: none.
      conda_env: name of a conda environment; empty: none.
      end_others: end what an earlier launch has left on the worker.
    """

    words: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    workdir: str = WORKDIR
    venv: str = ""
    conda_env: str = ""
    end_others: bool = False


def show(command: Sequence[str]) -> str:
    """A command as a person would type it."""
    return shlex.join(command)


def enable_services(project: str) -> list[str]:
    """Switch on what TPU VMs need."""
    services = ["tpu.googleapis.com", "compute.googleapis.com", "storage.googleapis.com"]
    return ["gcloud", "services", "enable", *services, f"--project={project}"]


def describe_bucket(project: str, bucket: str) -> list[str]:
    """Whether a bucket is there."""
    return ["gcloud", "storage", "buckets", "describe", bucket, f"--project={project}"]


def create_bucket(project: str, bucket: str, *, location: str) -> list[str]:
    """Make a bucket in one region, with one kind of permissions."""
    place = [f"--location={location}", f"--project={project}"]
    access = ["--uniform-bucket-level-access", "--public-access-prevention"]
    return ["gcloud", "storage", "buckets", "create", bucket, *place, *access]


def describe(tpu: Tpu) -> list[str]:
    """State, type and hosts of a TPU VM."""
    return [*_tpu_vm("describe", tpu.name, tpu), "--format=json"]


def create(tpu: Tpu, options: CreateOptions) -> list[str]:
    """Ask for a TPU VM now; fails where there is no capacity."""
    if options.queued:
        return _create_queued(tpu, options)
    command = [
        *_tpu_vm("create", tpu.name, tpu),
        f"--accelerator-type={options.accelerator_type}",
        f"--version={_get_runtime_version(options)}",
    ]
    return [*command, *_get_tier(options)]


def start(tpu: Tpu) -> list[str]:
    """Start a stopped TPU VM."""
    return _tpu_vm("start", tpu.name, tpu)


def stop(tpu: Tpu) -> list[str]:
    """Stop a TPU VM; its disk stays and is paid for."""
    return _tpu_vm("stop", tpu.name, tpu)


def delete(tpu: Tpu) -> list[str]:
    """Delete a TPU VM with its disk."""
    return [*_tpu_vm("delete", tpu.name, tpu), "--quiet"]


def describe_queued(tpu: Tpu) -> list[str]:
    """State of the queued resource of a TPU VM."""
    return [*_queued("describe", tpu), "--format=json"]


def delete_queued(tpu: Tpu) -> list[str]:
    """Delete a queued resource and the TPU VM that it holds."""
    return [*_queued("delete", tpu), "--force", "--quiet"]


def login(tpu: Tpu, worker: str) -> list[str]:
    """An interactive shell on one worker."""
    return [*_tpu_vm("ssh", tpu.name, tpu), f"--worker={worker}"]


def run_remote(tpu: Tpu, text: str, *, worker: str = "all") -> list[str]:
    """Run a shell command on workers.

    gcloud splits the text at blanks and gives the parts to ssh, which joins them again: the shell
    of the worker sees it unchanged.
    """
    return [*_tpu_vm("ssh", tpu.name, tpu), f"--worker={worker}", f"--command={text}", "--quiet"]


def copy_to(tpu: Tpu, source: str, *, target: str) -> list[str]:
    """Copy a file into the home directory of every worker."""
    return [*_tpu_vm("scp", source, tpu, f"{tpu.name}:{target}"), "--worker=all", "--quiet"]


def worker_run(run_id: str, remote: RemoteCommand) -> str:
    """The shell command by which a worker runs its part of a launch."""
    words = ["python3", WORKER_SCRIPT, "run", f"--run-id={run_id}", f"--workdir={remote.workdir}"]
    if remote.venv:
        words.append(f"--venv={remote.venv}")
    if remote.conda_env:
        words.append(f"--conda-env={remote.conda_env}")
    if remote.end_others:
        words.append("--end-others")
    words += [f"--env={name}={value}" for name, value in remote.env]
    return shlex.join([*words, "--", *remote.words])


def worker_stop(run_id: str, grace_s: float) -> str:
    """The shell command by which a worker ends a launch: SIGTERM, and SIGKILL after a grace."""
    return shlex.join(["python3", WORKER_SCRIPT, "stop", run_id, f"--grace-s={grace_s:g}"])


def worker_unpack(workdir: str) -> str:
    """The shell command by which a worker takes over a shipped tree."""
    return shlex.join(["python3", WORKER_SCRIPT, "unpack", TREE_ARCHIVE, workdir])


def worker_logs(run_id: str, *, lines: int, follow: bool) -> str:
    """The shell command that shows a worker's own log of a launch; empty run: the newest."""
    words = ["python3", WORKER_SCRIPT, "logs", f"--lines={lines}"]
    if run_id:
        words.append(f"--run-id={run_id}")
    return shlex.join([*words, *(["--follow"] if follow else [])])


def archive_commit(target: str) -> list[str]:
    """Pack the committed tree."""
    return ["git", "archive", "--format=tar.gz", f"--output={target}", "HEAD"]


def list_tree() -> list[str]:
    """Every file that version control does not ignore, changed or new."""
    return ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]


def list_changes() -> list[str]:
    """What differs from the commit."""
    return ["git", "status", "--porcelain", "--untracked-files=normal"]


def get_commit() -> list[str]:
    """The commit that is checked out."""
    return ["git", "rev-parse", "HEAD"]


def torchrun(
    words: Sequence[str], *, gpus: int, nodes: int = 1, node_rank: int = 0, master: str = ""
) -> list[str]:
    """A run on GPUs: a process for each, on one node or on each of several."""
    if nodes == 1:
        return ["torchrun", "--standalone", f"--nproc-per-node={gpus}", *words]
    return [
        "torchrun", f"--nnodes={nodes}", f"--node-rank={node_rank}", f"--nproc-per-node={gpus}",
        f"--master-addr={master}", "--master-port=29500", *words,
    ]  # fmt: skip


def build_image(image: str, *, tpu: bool) -> list[str]:
    """Build the container image, with libtpu or without."""
    return ["docker", "build", f"--build-arg=TPU={int(tpu)}", f"--tag={image}", "."]


def run_image(
    image: str, words: Sequence[str], *, tpu: bool, mounts: Mapping[str, str]
) -> list[str]:
    """Run a program in the container; on a TPU VM with what libtpu needs.

    libtpu opens the devices below /dev and maps pinned memory (`--privileged`), talks to the other
    hosts and to the metadata server (`--net=host`), and the input pipeline shares memory.

    Args:
      mounts: directory of this machine -> directory in the container.
    """
    command = ["docker", "run", "--rm", "--init", "--shm-size=16g"]
    if tpu:
        command += ["--privileged", "--net=host", "--ulimit=memlock=-1", "--env=PJRT_DEVICE=TPU"]
    else:
        command += ["--env=PJRT_DEVICE=CPU"]
    command += [f"--volume={here}:{there}" for here, there in mounts.items()]
    return [*command, image, *words]


def sky_launch(cluster: str, task: str) -> list[str]:
    """Start an on-demand cluster, or run again on the one that is there."""
    return ["sky", "launch", f"--cluster={cluster}", "--detach-run", "--yes", task]


def sky_launch_managed(name: str, task: str) -> list[str]:
    """Start a managed job: on spot machines, and again elsewhere when they are taken away."""
    return ["sky", "jobs", "launch", f"--name={name}", "--detach-run", "--yes", task]


def sky_status(cluster: str) -> list[str]:
    """State of a cluster, asked of the cloud."""
    return ["sky", "status", "--refresh", "--output=json", cluster]


def sky_jobs() -> list[str]:
    """Managed jobs and their states."""
    return ["sky", "jobs", "queue", "--refresh", "--output=json"]


def ssh(host: str, text: str) -> list[str]:
    """Run a shell command on a host of the user's ssh configuration."""
    return ["ssh", "-o", "BatchMode=yes", "-o", "ForwardAgent=no", host, text]


def scp(source: str, *, host: str, target: str) -> list[str]:
    """Copy a file to a host of the user's ssh configuration."""
    return ["scp", "-q", "-o", "BatchMode=yes", source, f"{host}:{target}"]


def _create_queued(tpu: Tpu, options: CreateOptions) -> list[str]:
    command = [
        *_queued("create", tpu),
        f"--node-id={tpu.name}",
        f"--accelerator-type={options.accelerator_type}",
        f"--runtime-version={_get_runtime_version(options)}",
    ]
    if options.valid_until:
        command.append(f"--valid-until-duration={options.valid_until}")
    return [*command, *_get_tier(options)]


def _get_runtime_version(options: CreateOptions) -> str:
    return options.runtime_version or find_generation(options.accelerator_type).runtime_version


def _get_tier(options: CreateOptions) -> list[str]:
    return [*(["--spot"] if options.spot else []), *(["--reserved"] if options.reserved else [])]


def _tpu_vm(verb: str, subject: str, tpu: Tpu, *more: str) -> list[str]:
    return ["gcloud", "compute", "tpus", "tpu-vm", verb, subject, *more, *_get_place(tpu)]


def _queued(verb: str, tpu: Tpu) -> list[str]:
    """The queued resource of a TPU VM bears the same name."""
    return ["gcloud", "compute", "tpus", "queued-resources", verb, tpu.name, *_get_place(tpu)]


def _get_place(tpu: Tpu) -> list[str]:
    zone = [f"--zone={tpu.zone}"] if tpu.zone else []
    return [*zone, *([f"--project={tpu.project}"] if tpu.project else [])]


def sbatch(name: str, options: Sequence[str], words: Sequence[str]) -> list[str]:
    """Queue a run at Slurm; prints the job's number.

    Args:
      options: of sbatch, for the job's resources.
      words: of main.py.
    """
    output = f"--output=.sync/slurm/{name}-%j.txt"
    command = ["sbatch", "--parsable", f"--job-name={name}", output, *options]
    return [*command, "train/slurm/run.sbatch", *words]


def squeue(job: str) -> list[str]:
    """State of a Slurm job; an error, or nothing, where it has ended."""
    return ["squeue", "--noheader", "--format=%T", f"--jobs={job}"]
