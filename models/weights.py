"""Reading weights: .safetensors, .pth or a run directory, with what does not fit named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from utils.errors import UserError

EXPORT_NAME = "student.safetensors"
EXPORT_FACTS = "student.json"
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "module")


def find_weights(path: str, key: str) -> Path:
    """The weights file behind a path: itself, or a run directory's export.

    Raises:
      UserError: nothing there.
    """
    found = Path(path)
    if found.is_dir():
        found = found / EXPORT_NAME
    if not found.is_file():
        raise UserError(
            f"{key} ({path!r}): no file {found}; give a .safetensors, a .pth or a finished run's "
            "directory"
        )
    return found


def load_weights(path: str, key: str) -> dict[str, Tensor]:
    """The tensors of a weights file on the host, by name.

    A .pth is read without unpickling code; the usual wrappers (`state_dict`, `model`, ...) and
    `module.` prefixes are taken off.
    """
    file = find_weights(path, key)
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, OSError, ValueError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{key} ({path!r}) cannot be read: {reason}; is it whole?") from error
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":
            raise
        raise UserError(
            f"{key} ({path!r}) holds pickled objects, not tensors alone; convert it to .safetensors"
        ) from error
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    tensors = {k.removeprefix("module."): v for k, v in content.items() if isinstance(v, Tensor)}
    if not tensors:
        raise UserError(f"{key} ({path!r}) holds no tensors; give a file of weights")
    return tensors


def load_into(model: nn.Module, tensors: dict[str, Tensor], key: str, path: str) -> None:
    """Copy tensors into a model, all or none; every name and shape must fit.

    A model on the meta device is only checked.

    Raises:
      UserError: the misfits, named.
    """
    own = model.state_dict()
    missing = [name for name in own if name not in tensors]
    unexpected = [name for name in tensors if name not in own]
    shapes = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    faults = [
        f"{len(found)} {word} ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})"
        for word, found in (
            ("missing", missing), ("unexpected", unexpected), ("of another shape", shapes),
        )
        if found
    ]  # fmt: skip
    if faults:
        raise UserError(
            f"{key} ({path!r}) is of another model: {'; '.join(faults)}; check the model's name "
            "and classes"
        )
    if not any(value.is_meta for value in own.values()):
        model.load_state_dict(tensors, strict=True)


def read_facts(path: str) -> dict[str, Any]:
    """What a run wrote beside its export (model name, arguments, classes); empty if nothing."""
    folder = Path(path)
    facts = (folder if folder.is_dir() else folder.parent) / EXPORT_FACTS
    if not facts.is_file():
        return {}
    return json.loads(facts.read_text(encoding="utf-8"))
