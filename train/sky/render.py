"""Fills the task template; a task with a hole in it is never written."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from train.execute import ROOT
from utils.errors import UserError
from utils.generations import find_generation

TEMPLATE = ROOT / "train/sky/tpu_resource.sky.yaml"
# What must not leave the user's machine by way of a task.
_PRIVATE = re.compile(r"\.ssh|id_rsa|id_ed25519|google_compute_engine|\.config/gcloud|PRIVATE KEY")
_HOLE = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class SkyJob:
    """What to run where.

    Attributes:
      accelerator_type: as Cloud TPU spells it, such as v5litepod-8.
      config: path of a YAML below the repository's root.
      run_id: of the run in it.
      output_dir: gs:// URL of the run store: a machine's disk goes with it.
      region: of Google Cloud; empty: SkyPilot looks for one.
      flags: further words for main.py.
    """

    name: str
    accelerator_type: str
    config: str
    output_dir: str
    run_id: str
    data_root: str = ""
    region: str = ""
    spot: bool = True
    disk_gib: int = 200
    max_restarts: int = 3
    flags: tuple[str, ...] = ()


def render(job: SkyJob, template: str) -> str:
    """The task as SkyPilot reads it.

    Raises:
      UserError: a value that is missing, a key of this machine in it, or no YAML.
    """
    _check_numbers(job)
    values = {
        "name": job.name,
        "infra": f"gcp/{job.region}" if job.region else "gcp",
        "accelerator": f"tpu-{job.accelerator_type}",
        "runtime_version": find_generation(job.accelerator_type).runtime_version,
        "use_spot": str(job.spot).lower(),
        "disk_gib": str(job.disk_gib),
        "max_restarts": str(job.max_restarts),
        "config": job.config,
        "output_dir": job.output_dir,
        "run_id": job.run_id,
        "data_root": job.data_root,
        "flags": json.dumps(shlex.join(job.flags)),
    }
    text = _fill("\n".join(row for row in template.splitlines() if not row.startswith("#")), values)
    _check(text)
    return text + "\n"


def create_job_name(experiment: str) -> str:
    """A name that SkyPilot and Google Cloud accept, from an experiment's."""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(experiment).stem.lower()).strip("-")
    return f"trainer-{stem}"[:40].rstrip("-")


def find_config(experiment: str) -> str:
    """The YAML of an experiment, relative to the repository's root.

    Raises:
      UserError: there is none.
    """
    for path in (experiment, f"configs/{experiment}.yaml", f"configs/{experiment}"):
        if path.endswith(".yaml") and (ROOT / path).is_file():
            return path
    raise UserError(f"experiment {experiment!r} is no file configs/{experiment}.yaml; see configs/")


def _fill(template: str, values: Mapping[str, str]) -> str:
    unknown = sorted(set(_HOLE.findall(template)) - set(values))
    if unknown:
        raise UserError(f"{TEMPLATE.name} has a hole {unknown[0]!r} that nothing fills")
    return _HOLE.sub(lambda found: values[found[1]], template)


def _check_numbers(job: SkyJob) -> None:
    least = {"--disk-gib": (job.disk_gib, 1), "--max-restarts": (job.max_restarts, 0)}
    for flag, (value, lowest) in least.items():
        if value < lowest:
            raise UserError(f"{flag} ({value}) must be at least {lowest}; raise it")


def _check(text: str) -> None:
    if "{{" in text or "}}" in text:
        raise UserError("a value of the task holds {{ or }}; leave them out")
    private = _PRIVATE.search(text)
    if private:
        raise UserError(f"the task names {private[0]!r}: keys stay on this machine")
    try:
        task = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"the task is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(task, dict) or "file_mounts" in task:
        raise UserError("the task mounts files of this machine; only the tree goes along")
