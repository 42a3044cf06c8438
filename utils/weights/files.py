"""Files of weights: .safetensors, whose header tells names and shapes, and .pth without code."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from utils.checkpoint.fit import Kind, get_kind
from utils.json_types import JsonMapping, JsonObject
from utils.storage.folder import Folder
from utils.storage.local import give_usual_mode

EXPORT_FILE = "student.safetensors"
_SCHEMA_VERSION = 2
_FACTS_KEY = "facts"  # of a .safetensors file's metadata
_WRAPPERS = (
    "state_dict_ema",
    "model_ema",
    "state_dict",
    "model_state_dict",
    "model",
    "net",
    "module",
)
_COMPILED = "_orig_mod."  # in names of what torch.compile has wrapped
# How files begin that stand in for weights: what they are, and the way out.
_STAND_INS = (
    (b"version https://git-lfs", "it is a Git LFS pointer, not the file", "run git lfs pull"),
    (b"<!doctype html", "it is an HTML page", "download the file itself"),
    (b"<html", "it is an HTML page", "download the file itself"),
)
_START = 64  # bytes by which they are told
_KEYS = 8  # that a message lists at most
# The header's names of types -> PyTorch's.
_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32",
    "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


class WeightsError(ValueError):
    """A file of weights cannot be read; the text says why, without the file's name.

    Attributes:
      way: what to do about it.
    """

    def __init__(self, text: str, way: str = "is it whole?") -> None:
        super().__init__(text)
        self.way = way


def refuse_stand_in(start: bytes) -> None:
    """Refuse what stands where a file of weights should be, by its first bytes.

    Raises:
      WeightsError: says what it is.
    """
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for mark, what, way in _STAND_INS:
        if text.startswith(mark):
            raise WeightsError(what, way)


def refuse_stand_in_file(file: Path) -> None:
    """Refuse a file by its first bytes; see `refuse_stand_in`."""
    with file.open("rb") as opened:
        refuse_stand_in(opened.read(_START))


def read_header(folder: Folder, name: str) -> JsonObject:
    """The header of a .safetensors file, read without its tensors, which must all be there.

    Raises:
      WeightsError: it is none, or cut.
      OSError: the file cannot be read.
    """
    start = folder.read_bytes(name, 0, _START)
    length = int.from_bytes(start[:8], "little")
    if not 0 < length <= _LONGEST_HEADER:
        refuse_stand_in(start)
        raise WeightsError(f"its header cannot be {length} bytes long")
    try:
        header = json.loads(folder.read_bytes(name, 8, length))
        ends = [_read_end(entry) for entry in list_entries(header).values()]
        dict(header.get("__metadata__") or {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError("it does not begin with a header of safetensors") from error
    wanted, found = 8 + length + max(ends, default=0), folder.get_size(name)
    if found != wanted:
        raise WeightsError(f"it has {found} of {wanted} bytes")
    return header


def _read_end(entry: JsonMapping) -> int:
    """Where a tensor's bytes end; an error where the entry does not say all that is read later."""
    tuple(entry["shape"]), str(entry["dtype"])
    return int(entry["data_offsets"][1])


def list_entries(header: JsonMapping) -> JsonObject:
    """What a header says of each tensor."""
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def read_kinds(header: JsonMapping) -> dict[str, Kind]:
    """Shapes and types of the tensors of a .safetensors file.

    Raises:
      WeightsError: a type that PyTorch does not have.
    """
    found = {}
    for name, entry in list_entries(header).items():
        if entry["dtype"] not in _TYPES:
            raise WeightsError(f"{name} is of the type {entry['dtype']}")
        found[_clean(name)] = tuple(entry["shape"]), _TYPES[entry["dtype"]]
    return found


def read_facts(header: JsonMapping) -> JsonObject:
    """What a .safetensors file says of its model; empty if nothing."""
    return parse_facts((header.get("__metadata__") or {}).get(_FACTS_KEY, ""))


def parse_facts(text: str) -> JsonObject:
    """The facts in a text; empty if it is not one of this program's."""
    try:
        facts = json.loads(text)
    except ValueError:
        return {}
    return get_known_facts(facts)


def get_known_facts(facts: object) -> JsonObject:
    """The facts themselves; empty if they do not name a model."""
    return facts if isinstance(facts, dict) and isinstance(facts.get("model"), str) else {}


def load_safetensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file.

    Raises:
      WeightsError: it is broken.
    """
    refuse_stand_in_file(file)
    try:
        return {_clean(name): value for name, value in load_file(file).items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(_get_reason(error)) from error


def load_pickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a .pth, which is read without unpickling code.

    The usual wrappers (`state_dict`, `model`, ...), `module.` prefixes and what torch.compile adds
    to names are taken off.

    Raises:
      WeightsError: it is broken, holds other objects, or no tensors.
    """
    return _unwrap(_unpickle(file, mmap=False))


def read_pickled_kinds(file: Path) -> dict[str, Kind]:
    """Shapes and types of the tensors of a .pth, their bytes unread where its form allows it.

    Raises:
      WeightsError: as `load_pickled`.
    """
    # Files from before PyTorch 1.6 are no archives, and read in full.
    tensors = _unwrap(_unpickle(file, mmap=zipfile.is_zipfile(file)))
    return {name: get_kind(value) for name, value in tensors.items()}


def write_weights(path: Path, tensors: Mapping[str, Tensor], facts: JsonMapping) -> None:
    """Write `NAME.safetensors` with what it is a model of, in its metadata and in `NAME.json`."""
    facts = {"schema_version": _SCHEMA_VERSION, **facts}
    metadata = {"format": "pt", _FACTS_KEY: json.dumps(facts)}
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata)
    _sort_metadata(path)
    give_usual_mode(path)
    _write_beside(path, facts)


def write_pickled(path: Path, tensors: Mapping[str, Tensor], facts: JsonMapping) -> None:
    """Write `NAME.pth` as timm's programs do, and in `NAME.json` what it is a model of."""
    arch, step = facts.get("model", ""), facts.get("step", 0)
    torch.save({"state_dict": dict(tensors), "arch": arch, "step": step}, path)
    _write_beside(path, {"schema_version": _SCHEMA_VERSION, **facts})


def _write_beside(path: Path, facts: JsonMapping) -> None:
    text = json.dumps(facts, indent=2) + "\n"
    path.with_suffix(".json").write_text(text, encoding="utf-8")


def _sort_metadata(path: Path) -> None:
    """Put the metadata of a .safetensors file in order: the library's own differs by process.

    The file is the length of its header in 8 bytes, the header in JSON, the tensors' bytes.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size, "the same words in another order"
        file.seek(8)
        file.write(text.ljust(size))


def _unpickle(file: Path, *, mmap: bool) -> object:
    refuse_stand_in_file(file)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except (RuntimeError, OSError, ValueError, EOFError) as error:
        raise WeightsError(_get_reason(error)) from error
    except (LookupError, TypeError, AttributeError, AssertionError) as error:
        # What the reader runs into where the bytes are no pickle, as of a text.
        raise WeightsError("it is no file that PyTorch has written") from error
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":
            raise
        raise WeightsError(
            "it holds pickled objects, not tensors alone", "convert it to .safetensors"
        ) from error


def _unwrap(content: object) -> dict[str, Tensor]:
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    items = content.items() if isinstance(content, dict) else ()
    tensors = {
        _clean(name).removeprefix("module."): value
        for name, value in items
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    if not tensors:
        listed = ", ".join(repr(key) for key in list(dict(items))[:_KEYS])
        keys = f"; its keys are {listed}" if listed else ""
        raise WeightsError(
            f"it holds no tensors{keys}", f"give tensors by name, alone or as {_WRAPPERS[2]!r}"
        )
    return tensors


def _clean(name: str) -> str:
    """A tensor's name in the model that was compiled."""
    return name.replace(_COMPILED, "")


def _get_reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
