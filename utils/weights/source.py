"""One interface for weights of each form; tensors are read only on request."""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

from torch import Tensor, nn

from utils.checkpoint.files import CheckpointError, CheckpointFacts, inspect_checkpoint, load_part
from utils.checkpoint.find import iterate_checkpoints
from utils.checkpoint.fit import Kind, Table, get_kind
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.log import get_logger
from utils.storage.folder import Folder
from utils.storage.places import join_path_or_url
from utils.weights.adapters import drop_adapters, merge_adapters
from utils.weights.facts import WeightFacts
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


class Weights(ABC):
    """The weights behind a path or URL; only `read_tensors` and `update_hash` read all of them.

    `key` is of the configuration, for errors; `path` as configured; `location` the file or
    checkpoint.
    """

    location: str

    def __init__(self, path: str, key: str) -> None:
        self.path, self.key = path, key

    @property
    @abstractmethod
    def kinds(self) -> dict[str, Kind]:
        """Shapes and types of the tensors by name, without reading their bytes."""

    @property
    @abstractmethod
    def facts(self) -> WeightFacts:
        """Facts written with them: model name, arguments, classes; may be empty."""

    @abstractmethod
    def read_tensors(self) -> dict[str, Tensor]:
        """Read the tensors to the host."""

    def get_kinds(self, model: nn.Module) -> dict[str, Kind]:
        """Return shapes and types under the names of the model that loads them."""
        return self.kinds

    def get_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Read the tensors to the host, under the names of the model that loads them."""
        return self.read_tensors()

    @abstractmethod
    def update_hash(self, digest: hashlib._Hash) -> None:
        """Feed every byte of the weights, or checksums of all of them, to a hash."""

    @contextlib.contextmanager
    def _explain(self) -> Iterator[None]:
        """Add the key and the path to an error of a file or checkpoint."""
        try:
            yield
        except (WeightsError, CheckpointError, OSError) as error:
            way = error.way if isinstance(error, WeightsError) else "is it whole?"
            raise UserError(f"{self.key} ({self.path!r}) cannot be read: {error}; {way}") from error


class FileWeights(Weights):
    """A file with an optional `NAME.json` beside it; `given` facts replace those of the file."""

    def __init__(
        self, path: str, key: str, folder: Folder, name: str, given: WeightFacts | None = None
    ) -> None:
        super().__init__(path, key)
        self._folder, self._name, self._given = folder, name, given
        self._beside = f"{name.rpartition('.')[0]}.json"
        self.location = str(join_path_or_url(str(folder), name))

    @property
    def facts(self) -> WeightFacts:
        with self._explain():
            return self._read_facts_beside() if self._given is None else self._given

    def update_hash(self, digest: hashlib._Hash) -> None:
        with self._explain(), self._folder.open_local(self._name) as path, path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)

    def _read_facts_beside(self) -> WeightFacts:
        if self._beside not in self._folder.list_names():
            return {}
        return parse_facts(self._folder.read_text(self._beside))


class SafetensorsWeights(FileWeights):
    """A .safetensors file, whose header holds names, shapes and types."""

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        with self._explain():
            return read_kinds(self._header)

    @cached_property
    def facts(self) -> WeightFacts:
        """Facts of its metadata, or of the JSON beside it; a UserError if both differ."""
        if self._given is not None:
            return self._given
        with self._explain():
            facts, beside = read_facts(self._header), self._read_facts_beside()
        own, other = dict(facts), dict(beside)
        for fact in own.keys() & other.keys():
            if own[fact] != other[fact]:
                raise UserError(
                    f"{self.key} ({self.path!r}): {self._beside} says {fact} {other[fact]!r}, but "
                    f"{self._name} itself {own[fact]!r}; remove {self._beside} or export the "
                    "weights again"
                )
        return facts or beside

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
    """The evaluated weights of the newest whole checkpoint below a folder, adapters merged."""

    def __init__(self, path: str, key: str, root: Folder) -> None:
        super().__init__(path, key)
        self._folder, self._state = self._find(root)
        self.location = str(self._folder)

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        return drop_adapters({name: get_kind(entry) for name, entry in self._table.items()})

    @property
    def facts(self) -> WeightFacts:
        with self._explain():
            return get_known_facts(self._state.model)

    def read_tensors(self) -> dict[str, Tensor]:
        with self._explain():
            return merge_adapters(load_part(self._folder, self._part))

    def update_hash(self, digest: hashlib._Hash) -> None:
        # The table holds a checksum of each tensor, and reading them compares.
        digest.update(json.dumps(self._table, sort_keys=True).encode())

    @property
    def _part(self) -> str:
        return "ema" if "ema" in self._state.parts else "model"

    @property
    def _table(self) -> Table:
        start = f"{self._part}/"
        entries = self._state.tensors.items()
        return {name.removeprefix(start): e for name, e in entries if name.startswith(start)}

    def _find(self, root: Folder) -> tuple[Folder, CheckpointFacts]:
        """Find the newest whole one, without reading its tensors."""
        failure: CheckpointError | None = None
        for folder in iterate_checkpoints(root):
            try:
                return folder, inspect_checkpoint(folder)
            except CheckpointError as error:
                get_logger().warning("skipping a broken checkpoint: %s", error)
                failure = failure or error
        raise UserError(
            f"{self.key} ({self.path!r}) cannot be read: {failure}; use another checkpoint"
        ) from failure
