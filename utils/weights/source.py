"""Opens the weights that a path means: names and shapes come first, tensors when asked for."""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

from torch import Tensor

from utils.checkpoint import (
    CheckpointError,
    Kind,
    Table,
    get_kind,
    has_checkpoints,
    inspect_checkpoint,
    iterate_checkpoints,
    load_part,
)
from utils.errors import UserError, get_near_names
from utils.json_types import JsonObject
from utils.log import get_logger
from utils.storage import Folder, join_place, open_folder
from utils.weights.files import (
    EXPORT_FILE,
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

_SUFFIX = ".safetensors"
_BLOCK = 1 << 20
# Ways of timm's to name weights that are not read here, and what to do instead.
_OTHER_SOURCES = {
    "hf-hub:": "weights of the Hugging Face hub are not fetched; download the repository's "
    "model.safetensors and give that file",
    "local-dir:": "a directory of timm's hub is not read; give its model.safetensors",
}


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


def open_weights(path: str, key: str) -> Weights:
    """What stands behind a path or URL: a file of weights, a run, or a checkpoint.

    A run's directory means its export where it has one, or else the newest of its checkpoints; a
    checkpoint means its evaluated weights, the average where there is one.

    Args:
      key: the configuration's, for errors.

    Raises:
      UserError: there are no weights there.
    """
    refuse_other_sources(path, key)
    folder = open_folder(path)
    if not folder.is_there():
        if folder.name not in folder.parent.list_names():
            near = _describe_near_places(folder.parent, folder.name)
            raise UserError(f"{key} ({path!r}): no such file or directory; {near}")
        return _open_file(path, key, folder.parent, folder.name)
    if EXPORT_FILE in folder.list_names():
        return _open_file(path, key, folder, EXPORT_FILE)
    if has_checkpoints(folder):
        return CheckpointWeights(path, key, folder)
    raise UserError(
        f"{key} ({path!r}): no file {EXPORT_FILE} there, and no checkpoint; give a .safetensors, a "
        ".pth, a run's directory or a step_... directory"
    )


def refuse_other_sources(path: str, key: str) -> None:
    """Refuse the sources of weights that timm knows and this program does not.

    Raises:
      UserError: with the way to the same weights.
    """
    for prefix, answer in _OTHER_SOURCES.items():
        if path.startswith(prefix):
            raise UserError(f"{key} ({path!r}): {answer}")
    if path.endswith((".npz", ".npy")):
        raise UserError(
            f"{key} ({path!r}): NumPy archives of JAX models are not read; let timm convert it "
            "once (timm.models.load_checkpoint) and save the state_dict as .safetensors"
        )


class _FileWeights(Weights):
    """A file, and perhaps a `NAME.json` beside it, never that of a neighbour."""

    def __init__(self, path: str, key: str, folder: Folder, name: str) -> None:
        super().__init__(path, key)
        self._folder, self._name = folder, name
        self.location = str(join_place(str(folder), name))

    @property
    def facts(self) -> JsonObject:
        return self._read_facts_beside()

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


class SafetensorsWeights(_FileWeights):
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


class PickledWeights(_FileWeights):
    """A .pth, or a file of another name that `torch.load` reads."""

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        with self._explain(), self._folder.open_local(self._name) as file:
            return read_pickled_kinds(file)

    def read_tensors(self) -> dict[str, Tensor]:
        with self._explain(), self._folder.open_local(self._name) as file:
            return load_pickled(file)


class CheckpointWeights(Weights):
    """The evaluated weights of the newest whole checkpoint below a place."""

    def __init__(self, path: str, key: str, place: Folder) -> None:
        super().__init__(path, key)
        self._folder, self._state = self._find(place)
        self.location = str(self._folder)

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        return {name: get_kind(entry) for name, entry in self._table.items()}

    @property
    def facts(self) -> JsonObject:
        return get_known_facts(self._state.get("model"))

    def read_tensors(self) -> dict[str, Tensor]:
        with self._explain():
            return load_part(self._folder, self._part)

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


def _open_file(path: str, key: str, folder: Folder, name: str) -> Weights:
    kind = SafetensorsWeights if name.endswith(_SUFFIX) else PickledWeights
    return kind(path, key, folder, name)


def _describe_near_places(folder: Folder, name: str) -> str:
    """Names that are there instead, in the nearest folder above that exists."""
    while not folder.is_there() and folder.name:
        folder, name = folder.parent, folder.name
    near = get_near_names(name, folder.list_names())
    if near:
        return f"did you mean {' or '.join(str(join_place(str(folder), one)) for one in near)}?"
    return f"{folder} is there, and holds nothing named like {name!r}"
