"""One checkpoint: a folder `step_00001000/` of plain CPU tensors and JSON, whole or absent.

It holds a .safetensors file for each part (model, ema, optimizer, extra), `state.json` with shape,
dtype and checksum of every tensor, and `COMMITTED` with the checksum of `state.json`, which is
written last, after everything was read back and verified.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, StrictInt, StringConstraints, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from utils.checkpoint.fit import Entry, Table
from utils.endings import Stagnation
from utils.json_types import JsonMapping, JsonObject
from utils.storage.folder import COMMIT_FILE, Folder
from utils.storage.local import LocalFolder, apply_umask
from utils.storage.places import open_folder

# Version 1 has no COMMITTED, configuration and data position; it can still be read.
_SCHEMA_VERSION = 2
_READABLE = (1, 2)
STATE_FILE = "state.json"
# part -> name -> tensor
Tensors = dict[str, dict[str, Tensor]]
Location = str | Path | Folder


class CheckpointError(RuntimeError):
    """A checkpoint is broken or cannot be written; the text names the file and the fault."""


class StateFacts(BaseModel, frozen=True):
    """Facts of a train state beside its tensors; those with a default are not in old files."""

    step: StrictInt
    best_metric: float | None = None
    waited: Stagnation = Stagnation()
    input_processes: int = 0
    skipped_steps: tuple[int, ...] = ()
    optimizer: JsonObject  # numbers by `parameter|key` or `groupN|key`
    scaler: JsonObject | None = None  # state of the loss scale


class CheckpointFacts(StateFacts):
    """`state.json`, with what resuming compares; other entries are for people."""

    schema_version: int
    data: JsonObject = {}  # position: epoch, and examples of it
    stream: JsonObject | None = None
    model: JsonObject = {}  # how to create the model, as in files of weights
    teachers: list[str] | None = None  # their hashes
    config: JsonObject | None = None
    environment: JsonObject = {}
    batches: list[JsonObject] = []  # of a kept bad step: class and names, for each rank
    parts: list[Annotated[str, StringConstraints(pattern=r"^[^\W\d]\w*$")]]
    files: dict[str, int]  # sizes in bytes
    tensors: Table


def write_checkpoint(folder: Folder, parts: Tensors, facts: JsonMapping) -> None:
    """Write, read back and publish a checkpoint whole; CheckpointError or OSError if it fails."""
    described = {
        f"{part}/{name}": describe_tensor(tensor)
        for part, tensors in parts.items()
        for name, tensor in tensors.items()
    }

    def fill(staged: Path) -> None:
        for part, tensors in parts.items():
            plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(plain, staged / _get_file(part))
            apply_umask(staged / _get_file(part))
        sizes = {_get_file(part): (staged / _get_file(part)).stat().st_size for part in parts}
        head = {"schema_version": _SCHEMA_VERSION, **facts, "parts": list(parts), "files": sizes}
        text = json.dumps({**head, "tensors": described}, indent=1)
        (staged / STATE_FILE).write_text(text, encoding="utf-8")

    def commit(written: Folder) -> str:
        state = _read_state(written)
        _check_files(written, state)
        if state.tensors != described:
            raise CheckpointError(f"{written}: {STATE_FILE} reads back different")
        for part in parts:
            with written.open_local(_get_file(part)) as path:
                _check_part(written, part, _load(written, path, "mmap"), state.tensors)
        return json.dumps({"state_sha256": _hash_text(written.read_text(STATE_FILE))}) + "\n"

    folder.publish(fill, commit)


def load_checkpoint(location: Location) -> tuple[Tensors, CheckpointFacts]:
    """Load tensors by part and facts, all checked against the table; else a CheckpointError."""
    folder = open_folder(location)
    facts = inspect_checkpoint(folder)
    parts = {part: _read_part(folder, part, facts.tensors, "pread") for part in facts.parts}
    _check_names(folder, parts, facts.tensors)
    return parts, facts


def load_part(location: Location, part: str) -> dict[str, Tensor]:
    """Load the tensors of one part, each checked against the table; CheckpointError if broken."""
    folder = open_folder(location)
    table = inspect_checkpoint(folder).tensors
    tensors = _read_part(folder, part, table, "pread")
    wanted = {name for name in table if name.startswith(f"{part}/")}
    if {f"{part}/{name}" for name in tensors} != wanted:
        raise CheckpointError(f"{folder}: tensors differ from the table of {STATE_FILE}")
    return tensors


def verify_checkpoint(location: Location) -> CheckpointFacts:
    """Check every tensor, one file at a time, and return the facts; a CheckpointError if broken."""
    folder = open_folder(location)
    facts = inspect_checkpoint(folder)
    names = {part: list(_read_part(folder, part, facts.tensors, "mmap")) for part in facts.parts}
    _check_names(folder, names, facts.tensors)
    return facts


def inspect_checkpoint(location: Location) -> CheckpointFacts:
    """Check marker, table and file sizes, and return the facts; a CheckpointError if broken."""
    folder = open_folder(location)
    facts = _read_state(folder)
    _check_marker(folder, facts)
    _check_files(folder, facts)
    return facts


def describe_tensor(tensor: Tensor) -> Entry:
    """Return shape, dtype and the first 16 digits of the SHA-256 of the bytes."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(data.data).hexdigest()[:16]
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch."), digest


def _get_file(part: str) -> str:
    return f"{part}.safetensors"


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_state(folder: Folder) -> CheckpointFacts:
    """Read state.json and check its form."""
    try:
        state = json.loads(folder.read_text(STATE_FILE))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {STATE_FILE}: {_explain(error)}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{folder}: {STATE_FILE} is not a JSON object")
    # Earlier programs wrote format_version.
    version = state.get("schema_version", state.get("format_version"))
    if version not in _READABLE:
        readable = " and ".join(map(str, _READABLE))
        raise CheckpointError(f"{folder}: schema_version {version}, this program reads {readable}")
    if version == 1:
        state.setdefault("files", {})
    try:
        return CheckpointFacts.model_validate({**state, "schema_version": version})
    except ValidationError as error:
        text = f"{folder}: {STATE_FILE} lacks a field or has a wrong type"
        raise CheckpointError(text) from error


def _check_marker(folder: Folder, facts: CheckpointFacts) -> None:
    if facts.schema_version == 1 and isinstance(folder, LocalFolder):
        return
    try:
        wanted = json.loads(folder.read_text(COMMIT_FILE))["state_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: {COMMIT_FILE}: {_explain(error)}") from error
    if wanted != _hash_text(folder.read_text(STATE_FILE)):
        raise CheckpointError(f"{folder}: {STATE_FILE} fails its checksum")


def _check_files(folder: Folder, facts: CheckpointFacts) -> None:
    for name, size in facts.files.items():
        try:
            written = folder.get_size(name)
        except OSError as error:
            raise CheckpointError(f"{folder}: {name}: {_explain(error)}") from error
        if written != size:
            raise CheckpointError(f"{folder}: {name} is incomplete: {written} of {size} bytes")


def _read_part(folder: Folder, part: str, table: Table, backend: str) -> dict[str, Tensor]:
    try:
        with folder.open_local(_get_file(part)) as path:
            tensors = _load(folder, path, backend)
            _check_part(folder, part, tensors, table)
            return tensors
    except OSError as error:
        raise CheckpointError(f"{folder}: {_get_file(part)}: {_explain(error)}") from error


def _load(folder: Folder, path: Path, backend: str) -> dict[str, Tensor]:
    """Load the tensors of a file; `mmap` reads on use and leaves other threads free."""
    try:
        return load_file(path, backend=backend)
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{folder}: {path.name}: {_explain(error)}") from error


def _check_part(folder: Folder, part: str, tensors: Mapping[str, Tensor], table: Table) -> None:
    for name, tensor in tensors.items():
        entry = table.get(f"{part}/{name}")
        if entry is None:
            raise CheckpointError(f"{folder}: tensors differ from the table of {STATE_FILE}")
        if describe_tensor(tensor) != entry:
            raise CheckpointError(f"{folder}: tensor {part}/{name} fails its checksum")


def _check_names(folder: Folder, parts: Mapping[str, Iterable[str]], table: Table) -> None:
    names = {f"{part}/{name}" for part, tensors in parts.items() for name in tensors}
    if names != set(table):
        raise CheckpointError(f"{folder}: tensors differ from the table of {STATE_FILE}")


def _explain(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
