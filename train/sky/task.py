"""Renders an experiment as a task of SkyPilot, or as a JobSet of GKE that Kueue queues."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml

from train import commands
from train.execute import ROOT
from train.experiments import STORE
from utils.config.programs import ProgramFile
from utils.errors import UserError
from utils.generations import check_stack, find_slice

TEMPLATE = ROOT / "train/sky/tpu_resource.sky.yaml"
JOBSET = ROOT / "train/sky/jobset.yaml"
DISK_GIB = 200
QUEUE = "multislice-queue"  # XPK's
# A task must not carry these from the user's machine.
_PRIVATE = re.compile(r"\.ssh|id_rsa|id_ed25519|google_compute_engine|\.config/gcloud|PRIVATE KEY")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_TRAINING = (
    'main.py --config "$CONFIG" --run.output_dir "$OUTPUT_DIR" '
    '${DATA_ROOT:+--data.root "$DATA_ROOT"} "$@" --run.run_id "$RUN_ID" --resume auto'
)
# TorchTPU tells each of several hosts its part; torchrun starts its processes.
_TORCHRUN = (
    'set -a; eval "$(python -m torch_tpu._internal.distributed.distributed)"; set +a; exec torchrun'
    " --nnodes=$NNODES --node_rank=$NODE_RANK --nproc_per_node=%d --master_addr=$MASTER_ADDR"
    ' --master_port=$MASTER_PORT "$@"'
)


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
    disk_gib: int = DISK_GIB
    max_restarts: int = 3
    stack: str = commands.DEFAULT_STACK
    flags: tuple[str, ...] = ()  # further words for main.py or the program
    program: ProgramFile | None = None  # instead of main.py
    on: str = "gcp"  # SkyPilot's TPU VMs, k8s: SkyPilot's Kubernetes cluster, gke: a JobSet
    image: str = ""  # of the container on gke
    queue: str = QUEUE  # of Kueue on gke


def render(job: SkyJob, template: str) -> str:
    """Fill the template of a task; a task with an unfilled placeholder is never written.

    Raises:
      UserError: a value is missing, the task holds a key of this machine, or no YAML.
    """
    values = {
        "name": job.name,
        **(_describe_pods(job) if job.on == "gke" else _describe_task(job)),
        "max_restarts": str(job.max_restarts),
    }
    text = "\n".join(row for row in template.splitlines() if not row.startswith("#"))
    unknown = sorted(set(_PLACEHOLDER.findall(text)) - set(values))
    if unknown:
        raise UserError(f"the template has an unknown placeholder {unknown[0]!r}; remove it")
    text = _PLACEHOLDER.sub(lambda match: values[match[1]], text)
    _check(text)
    return text + "\n"


def create_job_name(experiment: str) -> str:
    """Create a name that SkyPilot and Google Cloud accept from an experiment's."""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(experiment).stem.lower()).strip("-")
    return f"trainer-{stem}"[:40].rstrip("-")


def _describe_task(job: SkyJob) -> dict[str, str]:
    """Return what a task of SkyPilot says of machine and program; UserError for a lacking slice."""
    generation, stack = check_stack(job.accelerator_type, job.stack), commands.STACKS[job.stack]
    infra, accelerator = "gcp", f"tpu-{job.accelerator_type}"
    arguments = {"runtime_version": generation.runtime_version}
    if job.on == "k8s":
        chips = find_slice(job.accelerator_type).chips
        infra, accelerator = "k8s", f"{generation.gke}:{chips}"
        arguments.clear()
        if chips not in generation.sky_gke:
            known = " or ".join(map(str, generation.sky_gke)) or "none"
            raise UserError(
                f"SkyPilot finds no {job.accelerator_type} on Kubernetes, where it has these chips "
                f"of {generation.name}: {known}; use --on gke"
            )
    elif not generation.has_sky:
        raise UserError(
            f"SkyPilot has no {generation.name} machines; use --on gke, or python -m train.tpu_vm"
        )
    program, flags = _TRAINING, job.flags
    if job.program:
        program = f'-m {job.program.name} "$@" {STORE} "$OUTPUT_DIR"'
        flags = (*job.program.words, *job.flags)
    return {
        "infra": f"{infra}/{job.region}" if job.region else infra,
        "accelerator": accelerator,
        "accelerator_args": json.dumps(arguments),
        "program": program,
        "setup": stack.setup,
        "venv": stack.venv,
        "use_spot": str(job.spot).lower(),
        "disk_gib": str(job.disk_gib),
        "config": job.config,
        "output_dir": job.output_dir,
        "run_id": job.run_id,
        "data_root": job.data_root,
        "flags": json.dumps(shlex.join(flags)),
    }


def _describe_pods(job: SkyJob) -> dict[str, str]:
    """Return what a JobSet says of hosts, chips and program; UserError for a lacking slice."""
    generation, tpu = check_stack(job.accelerator_type, job.stack), find_slice(job.accelerator_type)
    if tpu.chips == 2:
        prefix = generation.prefix
        raise UserError(f"GKE has no slice of 2 chips; use {prefix}-1 or {prefix}-4")
    data = ("--data.root", job.data_root) if job.data_root else ()
    words = ("main.py", "--config", job.config, "--run.output_dir", job.output_dir, *data)
    words = (*words, *job.flags, "--run.run_id", job.run_id, "--resume", "auto")
    if job.program:
        words = ("-m", job.program.name, *job.program.words, *job.flags, STORE, job.output_dir)
    is_xla, command = job.stack == commands.DEFAULT_STACK, ["python"]
    if tpu.hosts > 1 and not is_xla:
        processes = tpu.chips_per_host * generation.seen_per_chip
        command = ["bash", "-c", _TORCHRUN % processes, "torchrun"]
    node = {
        "cloud.google.com/gke-tpu-accelerator": generation.gke,
        "cloud.google.com/gke-tpu-topology": tpu.topology,
    }
    values = {
        "queue": job.queue,
        "hosts": tpu.hosts,
        "chips": tpu.chips_per_host,
        "node": node | ({"cloud.google.com/gke-spot": "true"} if job.spot else {}),
        "image": job.image,
        "command": command,
        "words": words,
        "environment": [{"name": "PJRT_DEVICE", "value": "TPU"}] if is_xla else [],
    }
    return {name: json.dumps(value) for name, value in values.items()}


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
