"""Slots: the devices of this machine that jobs hold while they run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from utils.config.devices import DEVICES
from utils.errors import UserError

ANY = "slot"
# A TPU VM of Google Cloud, which `train.tpu_vm` reaches.
TPU_VM = "tpu_vm"
_TPU_VM = re.compile(rf"{TPU_VM}:[a-z][a-z0-9-]{{0,60}}@[a-z0-9-]{{1,40}}")
# Slot's kind -> variables that show a job its devices; {} stands for their numbers.
_SETS = {
    "cpu": {"PJRT_DEVICE": "CPU", "CUDA_VISIBLE_DEVICES": ""},
    "tpu": {"PJRT_DEVICE": "TPU"},
    "cuda": {"CUDA_VISIBLE_DEVICES": "{}"},
}
_SLOT = re.compile(rf"({'|'.join(_SETS)})(?::(\d{{1,3}}))?")
# Kinds of slots that only some devices run on; any job runs on the others.
_KINDS = {kind for row in DEVICES.values() for kind in row.slots}
# Environment variables that a job's programs get: credentials for other services are left out.
_KEPT = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|XDG_\w+|LD_LIBRARY_PATH|VIRTUAL_ENV|"
    r"PJRT_\w+|XLA_\w+|LIBTPU_\w+|TPU_\w+|CUDA_\w+|NVIDIA_\w+|NCCL_\w+|OMP_\w+|MKL_\w+|"
    r"HTTPS?_PROXY|NO_PROXY|https?_proxy|no_proxy|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|"
    r"FSSPEC_\w+|GCSFS_\w+|GCE_METADATA_\w+|STORAGE_EMULATOR_HOST|"
    r"TF_\w+|TORCH_\w+|PYTHON\w*|GOOGLE_APPLICATION_CREDENTIALS|CLOUDSDK_\w+"
)


def parse_slots(text: str) -> list[str]:
    """Parse names of slots: `2`, or `cuda:0,cuda:1,cpu`; UserError for malformed or equal ones."""
    if re.fullmatch(r"\d{1,3}", text):
        if int(text):
            return [f"{ANY}{i}" for i in range(int(text))]
        raise UserError("--slots (0) starts nothing; give at least 1")
    names: list[str] = []
    for part in map(str.strip, text.split(",")):
        if _TPU_VM.fullmatch(part) and part not in names:
            names.append(part)
            continue
        match = _SLOT.fullmatch(part)
        if match is None:
            raise UserError(
                f"--slots ({text!r}): {part!r} is no slot; give a number, or names such as "
                "cuda:0,cuda:1,cpu,tpu, or tpu_vm:NAME@ZONE, each once"
            )
        kind, index = match.groups()
        free = next(i for i in range(1000) if f"{kind}:{i}" not in names)
        name = f"{kind}:{free if index is None else int(index)}"
        if name in names:
            raise UserError(f"--slots ({text!r}): {name} stands twice; take one of them out")
        names.append(name)
    return names


def choose_slots(
    device: str, count: int, slots: Sequence[str], taken: Iterable[str]
) -> list[str] | None:
    """Choose free slots of one kind for a job; empty if no kind has so many, None if it must wait.

    Args:
      device: `runtime.device` of the job.
      slots: of the queue.
    """
    busy = set(taken)
    kinds: dict[str, list[str]] = {}
    # A job of another version may name a device that this one does not have.
    suitable = _KINDS if device == "auto" else DEVICES[device].slots if device in DEVICES else ()
    for name in slots:
        slot = name.partition(":")[0]
        if slot in suitable or slot not in _KINDS:
            kinds.setdefault(slot.rstrip("0123456789"), []).append(name)
    enough = [names for names in kinds.values() if len(names) >= count]
    if not enough:
        return []
    for names in enough:
        free = [name for name in names if name not in busy]
        if len(free) >= count:
            return free[:count]
    return None


def is_elsewhere(slots: Sequence[str]) -> bool:
    """Return whether a job of these slots runs on another machine."""
    return any(name.startswith(f"{TPU_VM}:") for name in slots)


def create_environment(slots: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Create the environment of a job's programs: an allow-list, and the devices of its slots."""
    kept = {name: value for name, value in environment.items() if _KEPT.fullmatch(name)}
    indices = ",".join(name.partition(":")[2] for name in slots)
    for kind in sorted({name.partition(":")[0] for name in slots}):
        kept |= {name: text.format(indices) for name, text in _SETS.get(kind, {}).items()}
    return kept
