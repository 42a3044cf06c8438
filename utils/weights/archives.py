"""NumPy archives of JAX models (big_vision, AugReg, BiT, FlexiViT), read by timm's loaders."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from copy import deepcopy
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from utils.checkpoint.fit import Kind, get_kind
from utils.weights.files import WeightsError, get_reason, refuse_stand_in_file
from utils.weights.source import FileWeights

_LOADER = "load_pretrained"  # method of timm's models
_WAY = "use an archive of this model, or the name and model.args that it was trained with"


class ArchiveWeights(FileWeights):
    """An .npz with the names and layouts of a JAX model, which a timm model converts."""

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        return {name: get_kind(value) for name, value in self.read_tensors().items()}

    def read_tensors(self) -> dict[str, Tensor]:
        local = self._folder.open_local(self._name)
        with self._explain(), local as file, _open(file) as archive:
            tensors = {}
            for name in archive.files:
                try:
                    tensors[name] = torch.from_numpy(archive[name])
                except TypeError as error:  # bfloat16 of JAX is a type without a name to NumPy
                    text = f"{name} is of the type {archive[name].dtype}"
                    raise WeightsError(text, "write it as float32") from error
            return tensors

    def get_kinds(self, model: nn.Module) -> dict[str, Kind]:
        return {name: get_kind(value) for name, value in self.get_tensors(model).items()}

    def get_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Convert to the model's names and layouts; the head only if the classes agree."""
        with self._explain(), self._folder.open_local(self._name) as file:
            _open(file).close()
            return _convert(model, file)


def _open(file: Path) -> np.lib.npyio.NpzFile:
    refuse_stand_in_file(file)
    try:
        archive = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise WeightsError(f"it is not a NumPy archive: {error}") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise WeightsError("it is one array, not an archive of named ones", _WAY)
    return archive


def _convert(model: nn.Module, file: Path) -> dict[str, Tensor]:
    """Return what timm's loader writes into a copy of the model; NaN marks the rest."""
    if not hasattr(model, _LOADER):
        raise WeightsError(
            f"timm cannot read JAX archives of {type(model).__name__}",
            "use a .safetensors or .pth of this model",
        )
    is_meta = any(value.is_meta for value in model.state_dict().values())
    scratch = deepcopy(model).to_empty(device="cpu") if is_meta else deepcopy(model)
    for module in scratch.modules():
        getattr(module, "forget_adapter", bool)()  # timm's loader writes into `weight`
    own = {name: value.detach() for name, value in scratch.named_parameters()}
    for value in own.values():
        value.fill_(torch.nan)
    load: Callable[[str], None] = getattr(scratch, _LOADER)
    try:
        load(str(file))
    except (KeyError, AttributeError, RuntimeError, ValueError, IndexError, TypeError) as error:
        text = f"timm's reader of {type(model).__name__} fails: {get_reason(error)}"
        raise WeightsError(text, _WAY) from error
    written = {name: value for name, value in own.items() if not value.isnan().any()}
    buffers = {name: value for name, value in scratch.state_dict().items() if name not in own}
    return {**written, **buffers}
