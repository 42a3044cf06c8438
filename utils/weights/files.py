"""Files of weights: .safetensors, whose header holds names and shapes, and .pth without code."""

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
from utils.json_types import JsonMapping, JsonObject, JsonValue
from utils.storage.folder import Folder
from utils.storage.json_files import write_json
from utils.storage.local import apply_umask
from utils.weights.facts import WeightFacts, are_facts

EXPORT_FILE = "student.safetensors"
_SCHEMA_VERSION = 2
_FACTS_KEY = "facts"  # of a .safetensors file's metadata
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict")
_WRAPPERS += ("model", "net", "module")
_COMPILED = "_orig_mod."  # in names of modules wrapped by torch.compile
# First bytes of files that are not weights: what they are, and the way out.
_STAND_INS = (
    (b"version https://git-lfs", "it is a Git LFS pointer, not the file", "run git lfs pull"),
    (b"<!doctype html", "it is an HTML page", "download the file itself"),
    (b"<html", "it is an HTML page", "download the file itself"),
)
_START = 64  # bytes that are compared with them
# Type names of the header -> PyTorch's.
_WHOLE = {"I": "int", "U": "uint"}
_TYPES = {f"{c}{bits}": f"{x}{bits}" for c, x in _WHOLE.items() for bits in (8, 16, 32, 64)}
_TYPES |= {f"F{bits}": f"float{bits}" for bits in (16, 32, 64)}
_TYPES |= {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_TYPES |= {"C64": "complex64", "BOOL": "bool"}


class WeightsError(ValueError):
    """A file of weights cannot be read; the text has the reason without the file's name."""

    def __init__(self, text: str, way: str = "is it whole?") -> None:
        super().__init__(text)
        self.way = way  # the way out


def refuse_stand_in(start: bytes) -> None:
    """Raise a `WeightsError` if the first bytes are those of a pointer or a web page."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for mark, what, way in _STAND_INS:
        if text.startswith(mark):
            raise WeightsError(what, way)


def refuse_stand_in_file(file: Path) -> None:
    """Refuse a file by its first bytes; see `refuse_stand_in`."""
    with file.open("rb") as opened:
        refuse_stand_in(opened.read(_START))


def read_header(folder: Folder, name: str) -> JsonObject:
    """Read a .safetensors header and check the file's length; a WeightsError if it is wrong."""
    start = folder.read_bytes(name, 0, _START)
    length = int.from_bytes(start[:8], "little")
    if not 0 < length <= 100_000_000:  # the format's own limit
        refuse_stand_in(start)
        raise WeightsError(f"its header cannot be {length} bytes long")
    try:
        header = json.loads(folder.read_bytes(name, 8, length))
        dict(header.get("__metadata__") or {})
        ends = []
        for entry in list_entries(header).values():
            tuple(entry["shape"]), str(entry["dtype"])  # read later: fail here
            ends.append(int(entry["data_offsets"][1]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError("it does not begin with a header of safetensors") from error
    wanted, size = 8 + length + max(ends, default=0), folder.get_size(name)
    if size != wanted:
        raise WeightsError(f"it has {size} of {wanted} bytes")
    return header


def list_entries(header: JsonMapping) -> JsonObject:
    """Return the header's entries of tensors."""
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def read_kinds(header: JsonMapping) -> dict[str, Kind]:
    """Return shapes and types of the tensors of a .safetensors file; WeightsError if unknown."""
    kinds = {}
    for name, entry in list_entries(header).items():
        if entry["dtype"] not in _TYPES:
            raise WeightsError(f"{name} is of the type {entry['dtype']}")
        kinds[name.replace(_COMPILED, "")] = tuple(entry["shape"]), _TYPES[entry["dtype"]]
    return kinds


def read_facts(header: JsonMapping) -> WeightFacts:
    """Return the facts of the model in a .safetensors header; empty without any."""
    return parse_facts((header.get("__metadata__") or {}).get(_FACTS_KEY, ""))


def parse_facts(text: str) -> WeightFacts:
    """Parse the facts in a text; empty if this program did not write it."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return get_known_facts(value)


def get_known_facts(facts: JsonValue) -> WeightFacts:
    """Return the facts; empty if they do not name a model, a WeightsError if a type is wrong."""
    try:
        return facts if are_facts(facts) else {}
    except ValueError as error:
        raise WeightsError(str(error), "correct it, or export the weights again") from error


def load_safetensors(file: Path) -> dict[str, Tensor]:
    """Load the tensors of a .safetensors file; raise a `WeightsError` if it is broken."""
    refuse_stand_in_file(file)
    try:
        return {name.replace(_COMPILED, ""): value for name, value in load_file(file).items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(get_reason(error)) from error


def load_pickled(file: Path) -> dict[str, Tensor]:
    """Load the tensors of a .pth without unpickling code; a WeightsError if it has none.

    Wrappers (`state_dict`, `model`, ...), `module.` prefixes and torch.compile's are removed.
    """
    return _unwrap(_unpickle(file, mmap=False))


def read_pickled_kinds(file: Path) -> dict[str, Kind]:
    """Read shapes and types of the tensors of a .pth, without their bytes if possible."""
    # Files from before PyTorch 1.6 are not archives and are read in full.
    tensors = _unwrap(_unpickle(file, mmap=zipfile.is_zipfile(file)))
    return {name: get_kind(value) for name, value in tensors.items()}


def write_weights(path: Path, tensors: Mapping[str, Tensor], facts: JsonMapping) -> None:
    """Write `NAME.safetensors` with the model's facts in its metadata and in `NAME.json`."""
    facts = {"schema_version": _SCHEMA_VERSION, **facts}
    metadata = {"format": "pt", _FACTS_KEY: json.dumps(facts)}
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata)
    _sort_metadata(path)
    apply_umask(path)
    write_json(path.with_suffix(".json"), facts)


def write_pickled(path: Path, tensors: Mapping[str, Tensor], facts: JsonMapping) -> None:
    """Write `NAME.pth` as timm's programs do, and the model's facts in `NAME.json`."""
    arch, step = facts.get("model", ""), facts.get("step", 0)
    torch.save({"state_dict": dict(tensors), "arch": arch, "step": step}, path)
    write_json(path.with_suffix(".json"), {"schema_version": _SCHEMA_VERSION, **facts})


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a .safetensors file: the library's order differs by process.

    The file is the length of its header in 8 bytes, the header in JSON, the tensors' bytes.
    """
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size, "the same entries in another order"
        file.seek(8)
        file.write(text.ljust(size))


def _unpickle(file: Path, *, mmap: bool) -> object:
    refuse_stand_in_file(file)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except (RuntimeError, OSError, ValueError, EOFError) as error:
        raise WeightsError(get_reason(error)) from error
    except (LookupError, TypeError, AttributeError, AssertionError) as error:
        # Raised by the reader if the bytes are not a pickle, such as a text.
        raise WeightsError("it is not a file that PyTorch has written") from error
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
        name.replace(_COMPILED, "").removeprefix("module."): value
        for name, value in items
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    if not tensors:
        listed = ", ".join(repr(key) for key in list(dict(items))[:8])
        keys = f"; its keys are {listed}" if listed else ""
        raise WeightsError(
            f"it holds no tensors{keys}", f"save tensors by name, alone or as {_WRAPPERS[2]!r}"
        )
    return tensors


def get_reason(error: Exception) -> str:
    """Return the first line of an error, or its class."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
