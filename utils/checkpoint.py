"""Checkpoints: plain CPU tensors and JSON, whole or not there.

A checkpoint is a directory `step_00001000/` with one .safetensors file for each part (model, ema,
optimizer, extra) and `state.json`, which lists every tensor with shape, dtype and checksum. It is
written under a temporary name, read back, verified and renamed; only then is it announced.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from utils.errors import UserError
from utils.log import get_logger

FORMAT_VERSION = 1
STATE_FILE = "state.json"
BEST_FILE = "best.json"
Parts = dict[str, dict[str, Tensor]]


class CheckpointError(RuntimeError):
    """A checkpoint is broken; the text names the file and what is wrong with it."""


class CheckpointManager:
    """Saves and finds the checkpoints of one run.

    Args:
      folder: `checkpoints/` of the run.
      keep: newest checkpoints to keep beside the best one.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, step: int, parts: Parts, facts: Mapping[str, Any], *, best: bool) -> Path:
        """Write, read back, verify, rename; then drop what is too old. Gives the directory."""
        target = self.folder / f"step_{step:08d}"
        if not target.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = self.folder / f".writing_{step:08d}"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            _write_parts(temporary, parts, facts)
            load_checkpoint(temporary)
            temporary.rename(target)
            _sync_directory(self.folder)
            get_logger().info("checkpoint %s saved and read back", target)
        if best:
            _write_atomically(self.folder / BEST_FILE, json.dumps({"step": step}))
        self._prune()
        return target

    def list_steps(self) -> list[int]:
        """Steps of the checkpoints that were renamed into place, ascending."""
        return sorted(int(path.name[5:]) for path in self.folder.glob("step_" + "[0-9]" * 8))

    def _prune(self) -> None:
        best = None
        if (self.folder / BEST_FILE).is_file():
            best = json.loads((self.folder / BEST_FILE).read_text())["step"]
        for step in self.list_steps()[: -self.keep]:
            if step != best:
                shutil.rmtree(self.folder / f"step_{step:08d}")


def load_checkpoint(path: Path) -> tuple[Parts, dict[str, Any]]:
    """Parts and facts of a checkpoint, every tensor checked against its table.

    Raises:
      CheckpointError: a file is missing or unreadable, or a tensor is not what the table says.
    """
    try:
        facts = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        parts = {name: load_file(path / f"{name}.safetensors") for name in facts["parts"]}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if facts.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format version {facts.get('format_version')}, this program reads "
            f"{FORMAT_VERSION}"
        )
    table = {f"{part}/{name}" for part, tensors in parts.items() for name in tensors}
    if table != set(facts["tensors"]):
        raise CheckpointError(f"{path}: tensors differ from the table of {STATE_FILE}")
    for part, tensors in parts.items():
        for name, tensor in tensors.items():
            if _describe(tensor) != facts["tensors"][f"{part}/{name}"]:
                raise CheckpointError(f"{path}: tensor {part}/{name} fails its checksum")
    return parts, facts


def find_checkpoint(path: Path) -> Path:
    """The checkpoint behind a path: itself, or the newest one of a run or `checkpoints/`.

    Raises:
      UserError: there is none.
    """
    if (path / STATE_FILE).is_file():
        return path
    for folder in (path / "checkpoints", path):
        manager = CheckpointManager(folder)
        for step in reversed(manager.list_steps()):
            found = folder / f"step_{step:08d}"
            try:
                load_checkpoint(found)
            except CheckpointError as error:
                get_logger().warning("skipping a broken checkpoint: %s", error)
            else:
                return found
    raise UserError(
        f"run.resume ({str(path)!r}): no whole checkpoint there; give a run's directory or a "
        "step_... directory"
    )


def read_table(path: Path) -> dict[str, list[Any]]:
    """[shape, dtype, checksum] of every tensor of a checkpoint, without reading tensors."""
    try:
        return json.loads((path / STATE_FILE).read_text(encoding="utf-8"))["tensors"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"checkpoint {path} cannot be read: {error}; choose another") from error


def collect_state(state: Any, fetch_all: Any) -> tuple[Parts, dict[str, Any]]:
    """Parts and facts of a train state, as host tensors.

    Args:
      state: has model, ema, extra, optimizer, step, best_metric, input_processes.
      fetch_all: dict of device tensors -> dict of host tensors, in one read.
    """
    flat = {f"model/{k}": v for k, v in state.model.state_dict().items()}
    flat |= {f"extra/{k}": v for k, v in state.extra.state_dict().items()}
    if state.ema is not None:
        flat |= {f"ema/{k}": v for k, v in state.ema.state_dict().items()}
    tensors, scalars = _flatten_optimizer(state)
    flat |= {f"optimizer/{k}": v for k, v in tensors.items()}
    parts: Parts = {}
    for key, value in fetch_all(flat).items():
        part, _, name = key.partition("/")
        parts.setdefault(part, {})[name] = value
    facts = {
        "step": state.step,
        "best_metric": state.best_metric,
        "input_processes": state.input_processes,
        "optimizer": scalars,
    }
    return parts, facts


def restore_state(state: Any, parts: Parts, facts: Mapping[str, Any], path: Path) -> None:
    """Copy a checkpoint into a train state in place.

    Raises:
      UserError: the checkpoint is of another model, optimizer or EMA setting; names the misfits.
    """
    modules = {"model": state.model, "extra": state.extra, "ema": state.ema}
    for part, module in modules.items():
        own = {} if module is None else module.state_dict()
        _check_fit(own, parts.get(part, {}), part, path)
        _copy_into(own, parts.get(part, {}))
    own, _ = _flatten_optimizer(state)
    _check_fit(own, parts.get("optimizer", {}), "optimizer", path)
    _copy_into(own, parts.get("optimizer", {}))
    _restore_scalars(state, facts["optimizer"])
    state.step, state.best_metric = facts["step"], facts["best_metric"]
    state.input_processes = facts.get("input_processes", 0)


def _names_of(state: Any) -> dict[nn.Parameter, str]:
    names = {p: name for name, p in state.model.named_parameters()}
    return names | {p: f"extra.{name}" for name, p in state.extra.named_parameters()}


def _flatten_optimizer(state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as tensors by name, and its plain numbers."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    names = _names_of(state)
    for parameter, values in state.optimizer.state.items():
        for key, value in values.items():
            name = f"{names[parameter]}|{key}"
            if isinstance(value, Tensor):
                tensors[name] = value
            elif value is None or isinstance(value, int | float | bool):
                scalars[name] = value
    for index, group in enumerate(state.optimizer.param_groups):
        if isinstance(group.get("step"), Tensor):
            tensors[f"group{index}|step"] = group["step"]
        elif "step" in group:
            scalars[f"group{index}|step"] = group["step"]
    return tensors, scalars


def _restore_scalars(state: Any, scalars: Mapping[str, Any]) -> None:
    parameters = {name: p for p, name in _names_of(state).items()}
    for name, value in scalars.items():
        owner, _, key = name.partition("|")
        if owner in parameters:
            state.optimizer.state[parameters[owner]][key] = value
        else:
            state.optimizer.param_groups[int(owner.removeprefix("group"))][key] = value


def _check_fit(
    own: Mapping[str, Tensor], found: Mapping[str, Tensor], part: str, path: Path
) -> None:
    missing = [name for name in own if name not in found]
    unexpected = [name for name in found if name not in own]
    other = [
        f"{name} {tuple(found[name].shape)} {found[name].dtype} instead of "
        f"{tuple(value.shape)} {value.dtype}"
        for name, value in own.items()
        if name in found and (found[name].shape, found[name].dtype) != (value.shape, value.dtype)
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("different", other))
    faults = [f"{len(names)} {word}: {', '.join(names[:3])}" for word, names in kinds if names]
    if faults:
        raise UserError(
            f"checkpoint {path} does not fit this run's {part}: {'; '.join(faults)}; resume with "
            "the configuration that wrote it"
        )


@torch.no_grad()
def _copy_into(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name, value in own.items():
        value.copy_(found[name])


def _write_parts(folder: Path, parts: Parts, facts: Mapping[str, Any]) -> None:
    table = {}
    for part, tensors in parts.items():
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / f"{part}.safetensors")
        with (folder / f"{part}.safetensors").open("rb") as file:
            os.fsync(file.fileno())
        table |= {f"{part}/{name}": _describe(tensor) for name, tensor in tensors.items()}
    state = {
        "format_version": FORMAT_VERSION,
        **facts,
        "parts": list(parts),
        "tensors": table,
    }
    _write_atomically(folder / STATE_FILE, json.dumps(state, indent=1))


def _describe(tensor: Tensor) -> list[Any]:
    """[shape, dtype, SHA-256 of the bytes, shortened]."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(data.tobytes()).hexdigest()[:16]
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), digest]


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
