"""Weights of a language model as transformers and fla save them: one file or several."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from utils.checkpoint.fit import Kind
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.folder import Folder
from utils.weights.language_hub import Pieces, find_pieces
from utils.weights.source import SafetensorsWeights, Weights

INDEX = "model.safetensors.index.json"
FILE = "model.safetensors"


class LanguageWeights(Weights):
    """A folder of .safetensors files under names that this program may call otherwise.

    Args:
      facts: what its config.json says.
    """

    def __init__(self, path: str, key: str, folder: Folder, facts: JsonObject) -> None:
        super().__init__(path, key)
        self._folder, self._facts, self.location = folder, facts, str(folder)

    @property
    def facts(self) -> JsonObject:
        return self._facts

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        found = {name: kind for part in self._parts for name, kind in part.kinds.items()}
        return {name: self._join_kinds(one, found) for name, one in self._find(found).items()}

    def read_tensors(self) -> dict[str, Tensor]:
        found = {name: one for part in self._parts for name, one in part.read_tensors().items()}
        self._require_one_head(found)
        return {name: join(one, found) for name, one in self._find(found).items()}

    def update_hash(self, digest: hashlib._Hash) -> None:
        for part in self._parts:
            part.update_hash(digest)

    @cached_property
    def _parts(self) -> list[SafetensorsWeights]:
        names = self._folder.list_names()
        if FILE in names:
            files = [FILE]
        else:
            files = self._read_index()
        missing = [one for one in files if one not in names]
        if missing:
            raise UserError(
                f"{self.key} ({self.path!r}): {INDEX} names {missing[0]}, which is not there; copy "
                "the whole folder"
            )
        return [SafetensorsWeights(self.path, self.key, self._folder, one, {}) for one in files]

    def _read_index(self) -> list[str]:
        try:
            told = json.loads(self._folder.read_text(INDEX))
            return sorted({str(one) for one in told["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.key} ({self.path!r}): neither {FILE} nor an {INDEX} that can be read is "
                "there; copy the whole folder"
            ) from error

    def _find(self, names: Mapping[str, object]) -> dict[str, Pieces]:
        found = find_pieces(list(names))
        if self._facts["args"].get("tied"):
            found.pop("lm_head.weight", None)
        return found

    def _require_one_head(self, found: Mapping[str, Tensor]) -> None:
        """A head that is tied may lie beside the embedding, as the same numbers."""
        head, own = found.get("lm_head.weight"), self._find(found).get("model.embed_tokens.weight")
        if head is None or own is None or not self._facts["args"].get("tied"):
            return
        if not torch.equal(head, join(own, found)):
            raise UserError(
                f"{self.key} ({self.path!r}): config.json has tie_word_embeddings true, and "
                "lm_head.weight is not the embedding; set it to false there"
            )

    def _join_kinds(self, pieces: Pieces, kinds: Mapping[str, Kind]) -> Kind:
        first, *_ = rows = [[kinds[name] for name in row] for row in pieces.rows]
        dtype = first[0][1]
        height = sum(shape[0] for shape, _ in first) if first[0][0] else None
        shape = first[0][0] if height is None else (height, *first[0][0][1:])
        return ((len(rows), *shape) if pieces.stacked else shape), dtype


def join(pieces: Pieces, tensors: Mapping[str, Tensor]) -> Tensor:
    """A tensor of a model here from those of a file."""
    rows = [
        tensors[row[0]] if len(row) == 1 else torch.cat([tensors[name] for name in row])
        for row in pieces.rows
    ]
    return torch.stack(rows) if pieces.stacked else rows[0]


def split(name: str, tensor: Tensor, model: str) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a file that `find_pieces` would make this one of.

    Args:
      model: the model's name here.
    """
    place, _, kind = name.rpartition(".")
    if model == "qwen3_next" and kind in ("gate_up_proj", "down_proj") and tensor.dim() == 3:
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for number, matrix in enumerate(tensor):
            for part, one in zip(parts, matrix.chunk(len(parts)), strict=True):
                yield f"{place}.{number}.{part}.weight", one
    elif model == "kimi_linear" and name.endswith(".self_attn.conv1d.weight"):
        start = place.removesuffix(".conv1d")
        for part, one in zip("qkv", tensor.chunk(3), strict=True):
            yield f"{start}.{part}_conv1d.weight", one
    else:
        yield name.replace(".forget_gate.", "."), tensor
