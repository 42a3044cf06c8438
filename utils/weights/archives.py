"""NumPy archives of JAX models (big_vision, AugReg, BiT, FlexiViT), read by timm's own loaders."""

from __future__ import annotations

import zipfile
from copy import deepcopy
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from utils.checkpoint.fit import Kind, get_kind
from utils.weights.files import WeightsError, refuse_stand_in_file
from utils.weights.source import FileWeights

_LOADER = "load_pretrained"  # what timm calls it
_WAY = "give an archive of this model, or the name and model.args that it was trained with"


class ArchiveWeights(FileWeights):
    """An .npz whose names and layouts are those of a JAX model: a model of timm's turns them."""

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        return {name: get_kind(value) for name, value in self.read_tensors().items()}

    def read_tensors(self) -> dict[str, Tensor]:
        """As they lie in the archive, under its own names."""
        local = self._folder.open_local(self._name)
        with self._explain(), local as file, _open(file) as archive:
            return {name: _read(archive, name) for name in archive.files}

    def get_kinds(self, model: nn.Module) -> dict[str, Kind]:
        return {name: get_kind(value) for name, value in self.get_tensors(model).items()}

    def get_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Under the model's names and in its layouts; its head only where the classes agree."""
        with self._explain(), self._folder.open_local(self._name) as file:
            _open(file).close()
            return _convert(model, file)


def _open(file: Path) -> np.lib.npyio.NpzFile:
    refuse_stand_in_file(file)
    try:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise WeightsError("it is one array, not an archive of named ones", _WAY)
        return archive
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"it is no archive of NumPy: {error}") from error


def _read(archive: np.lib.npyio.NpzFile, name: str) -> Tensor:
    try:
        return torch.from_numpy(archive[name])
    except TypeError as error:  # bfloat16 of JAX is a type without a name to NumPy
        kind = archive[name].dtype
        raise WeightsError(f"{name} is of the type {kind}", "write it as float32") from error


def _convert(model: nn.Module, file: Path) -> dict[str, Tensor]:
    """What timm's loader writes into a copy of the model, told from what it leaves by NaN."""
    if not hasattr(model, _LOADER):
        raise WeightsError(
            f"timm has no reader of JAX archives for {type(model).__name__}",
            "give a .safetensors or .pth of this model",
        )
    is_meta = any(value.is_meta for value in model.state_dict().values())
    scratch = deepcopy(model).to_empty(device="cpu") if is_meta else deepcopy(model)
    for module in scratch.modules():
        if hasattr(module, "forget_adapter"):  # timm's loader writes into `weight`
            module.forget_adapter()
    own = {name: value.detach() for name, value in scratch.named_parameters()}
    for value in own.values():
        value.fill_(torch.nan)
    try:
        getattr(scratch, _LOADER)(str(file))
    except (KeyError, AttributeError, RuntimeError, ValueError, IndexError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(
            f"timm's reader of {type(model).__name__} says {reason}", _WAY
        ) from error
    found = {name: value for name, value in own.items() if not value.isnan().any()}
    buffers = {name: value for name, value in scratch.state_dict().items() if name not in own}
    return {**found, **buffers}
