"""Weights of each form behind one face: names and shapes come first, tensors when asked for."""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

from torch import Tensor, nn

from utils.checkpoint.files import CheckpointError, inspect_checkpoint, load_part
from utils.checkpoint.find import iterate_checkpoints
from utils.checkpoint.fit import Kind, Table, get_kind
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.log import get_logger
from utils.storage.folder import Folder
from utils.storage.places import join_place
from utils.weights.adapters import drop_adapters, merge_adapters
from utils.weights.files import (
    WeightsError,
    get_known_facts,
    load_pickled,
    load_safetensors,
    parse_facts,
    read_facts,
    read_header,
    read_kinds,
    read_pickled_kinds,
)

_BLOCK = 1 << 20


class Weights(ABC):
    """The weights behind a path or URL that a key of the configuration gives.

    Nothing is read of them in full but by `read_tensors` and `update_hash`.

    Attributes:
      key: the configuration's, for errors.
      path: as it was given.
      location: the file or checkpoint that was found there.
    """

    location: str

    def __init__(self, path: str, key: str) -> None:
        self.path, self.key = path, key

    @property
    @abstractmethod
    def kinds(self) -> dict[str, Kind]:
        """Shapes and types of the tensors by name, whose bytes are not read."""

    @property
    @abstractmethod
    def facts(self) -> JsonObject:
        """What was written with them: model name, arguments, classes; empty if nothing."""

    @abstractmethod
    def read_tensors(self) -> dict[str, Tensor]:
        """The tensors on the host by name."""

    def get_kinds(self, model: nn.Module) -> dict[str, Kind]:
        """Shapes and types under the names of a model that is to have them."""
        return self.kinds

    def get_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The tensors on the host under the names of a model that is to have them."""
        return self.read_tensors()

    @abstractmethod
    def update_hash(self, digest: hashlib._Hash) -> None:
        """Feed every byte of the weights, or checksums of all of them, to a hash."""

    @contextlib.contextmanager
    def _explain(self) -> Iterator[None]:
        """Name the key and the path in what is wrong with a file or checkpoint."""
        try:
            yield
        except (WeightsError, CheckpointError, OSError) as error:
            way = error.way if isinstance(error, WeightsError) else "is it whole?"
            raise UserError(f"{self.key} ({self.path!r}) cannot be read: {error}; {way}") from error


class FileWeights(Weights):
    """A file, and perhaps a `NAME.json` beside it, never that of a neighbour.

    Args:
      given: facts that stand elsewhere and count instead.
    """

    def __init__(
        self, path: str, key: str, folder: Folder, name: str, given: JsonObject | None = None
    ) -> None:
        super().__init__(path, key)
        self._folder, self._name, self._given = folder, name, given
        self.location = str(join_place(str(folder), name))

    @property
    def facts(self) -> JsonObject:
        return self._read_facts_beside() if self._given is None else self._given

    def update_hash(self, digest: hashlib._Hash) -> None:
        with self._explain(), self._folder.open_local(self._name) as path, path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)

    def _read_facts_beside(self) -> JsonObject:
        beside = self._get_name_beside()
        if beside not in self._folder.list_names():
            return {}
        return parse_facts(self._folder.read_text(beside))

    def _get_name_beside(self) -> str:
        return f"{self._name.rpartition('.')[0]}.json"


class SafetensorsWeights(FileWeights):
    """A .safetensors file, whose header tells all but the values."""

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        with self._explain():
            return read_kinds(self._header)

    @cached_property
    def facts(self) -> JsonObject:
        """Of its metadata, or of the JSON beside it.

        Raises:
          UserError: the two do not say the same.
        """
        if self._given is not None:
            return self._given
        with self._explain():
            own, told = read_facts(self._header), self._read_facts_beside()
        for fact in own.keys() & told.keys():
            if own[fact] != told[fact]:
                beside = self._get_name_beside()
                raise UserError(
                    f"{self.key} ({self.path!r}): {beside} says {fact} {told[fact]!r}, but "
                    f"{self._name} itself {own[fact]!r}; remove {beside} or export the weights "
                    "again"
                )
        return own or told

    def read_tensors(self) -> dict[str, Tensor]:
        with self._explain(), self._folder.open_local(self._name) as file:
            return load_safetensors(file)

    @cached_property
    def _header(self) -> JsonObject:
        return read_header(self._folder, self._name)


class PickledWeights(FileWeights):
    """A .pth, or a file of another name that `torch.load` reads."""

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        with self._explain(), self._folder.open_local(self._name) as file:
            return read_pickled_kinds(file)

    def read_tensors(self) -> dict[str, Tensor]:
        with self._explain(), self._folder.open_local(self._name) as file:
            return load_pickled(file)


class CheckpointWeights(Weights):
    """The evaluated weights of the newest whole checkpoint below a place, adapters merged."""

    def __init__(self, path: str, key: str, place: Folder) -> None:
        super().__init__(path, key)
        self._folder, self._state = self._find(place)
        self.location = str(self._folder)

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        kinds = {name: get_kind(entry) for name, entry in self._table.items()}
        return drop_adapters(kinds)

    @property
    def facts(self) -> JsonObject:
        return get_known_facts(self._state.get("model"))

    def read_tensors(self) -> dict[str, Tensor]:
        with self._explain():
            return merge_adapters(load_part(self._folder, self._part))

    def update_hash(self, digest: hashlib._Hash) -> None:
        # The table holds a checksum of each tensor, and reading them compares.
        digest.update(json.dumps(self._table, sort_keys=True).encode())

    @property
    def _part(self) -> str:
        return "ema" if "ema" in self._state["parts"] else "model"

    @property
    def _table(self) -> Table:
        start = f"{self._part}/"
        entries = self._state["tensors"].items()
        return {name.removeprefix(start): e for name, e in entries if name.startswith(start)}

    def _find(self, place: Folder) -> tuple[Folder, JsonObject]:
        """The newest that is whole as far as can be told without its tensors."""
        failure: CheckpointError | None = None
        for folder in iterate_checkpoints(place):
            try:
                return folder, inspect_checkpoint(folder)
            except CheckpointError as error:
                get_logger().warning("skipping a broken checkpoint: %s", error)
                failure = failure or error
        raise UserError(
            f"{self.key} ({self.path!r}) cannot be read: {failure}; give another checkpoint"
        ) from failure
