"""Reading weights: .safetensors, .pth or a run directory, with what does not fit named."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from utils.errors import UserError, get_near_names
from utils.storage import Folder, give_usual_mode, join_place, open_folder

EXPORT_NAME = "student.safetensors"
_FACTS_KEY = "facts"  # of a .safetensors file's metadata
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "module")
# Ways of timm's to name weights that are not read here, and what to do instead.
_OTHER_SOURCES = {
    "hf-hub:": "weights of the Hugging Face hub are not fetched; download the repository's "
    "model.safetensors and give that file",
    "local-dir:": "a directory of timm's hub is not read; give its model.safetensors",
}


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


@contextlib.contextmanager
def open_weights(path: str, key: str) -> Iterator[Path]:
    """The weights file behind a path or URL, the file itself or a run's export, as a local one.

    Raises:
      UserError: nothing there.
    """
    folder, name = find_weights(path, key)
    with folder.open_local(name) as file:
        yield file


def find_weights(path: str, key: str) -> tuple[Folder, str]:
    """Folder and name of the weights file behind a path or URL.

    Raises:
      UserError: nothing there.
    """
    refuse_other_sources(path, key)
    place = open_folder(path)
    is_folder = place.is_there()
    folder, name = (place, EXPORT_NAME) if is_folder else (place.parent, place.name)
    if name in folder.list_names():
        return folder, name
    if is_folder:
        raise UserError(
            f"{key} ({path!r}): no file {EXPORT_NAME} there; give a .safetensors, a .pth or a "
            "finished run's directory"
        )
    raise UserError(
        f"{key} ({path!r}): no such file or directory; {_get_near_places(folder, name)}"
    )


def load_weights(path: str, key: str) -> dict[str, Tensor]:
    """The tensors of a weights file on the host, by name.

    A .pth is read without unpickling code; the usual wrappers (`state_dict`, `model`, ...) and
    `module.` prefixes are taken off.
    """
    with open_weights(path, key) as file:
        content = _read_content(file, path, key)
    for wrapper in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    tensors = {k.removeprefix("module."): v for k, v in content.items() if isinstance(v, Tensor)}
    if not tensors:
        raise UserError(f"{key} ({path!r}) holds no tensors; give a file of weights")
    return tensors


def write_weights(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write `NAME.safetensors` with what it is a model of, in its metadata and in `NAME.json`."""
    metadata = {"format": "pt", _FACTS_KEY: json.dumps(facts)}
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata)
    _sort_metadata(path)
    give_usual_mode(path)
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
        way = "check the model's name and classes"
        if key == "model.weights":
            way += (
                ", or start from the tensors that fit: run.init_from instead, with "
                "run.init_tolerance for the share that may not"
            )
        raise UserError(f"{key} ({path!r}) is of another model: {'; '.join(faults)}; {way}")
    if not any(value.is_meta for value in own.values()):
        model.load_state_dict(tensors, strict=True)


def read_facts(path: str, key: str) -> dict[str, Any]:
    """What was written with weights (model name, arguments, classes); empty if nothing.

    It stands in the metadata of `NAME.safetensors` or in `NAME.json` beside it, never in the file
    of a neighbour.

    Raises:
      UserError: the two do not say the same.
    """
    folder, name = find_weights(path, key)
    beside = f"{name.rpartition('.')[0]}.json"
    told = _parse_facts(folder.read_text(beside)) if beside in folder.list_names() else {}
    own = {}
    if name.endswith(".safetensors"):
        with folder.open_local(name) as file:
            own = _read_metadata(file)
    for fact in own.keys() & told.keys():
        if own[fact] != told[fact]:
            raise UserError(
                f"{key} ({path!r}): {beside} says {fact} {told[fact]!r}, but {name} itself "
                f"{own[fact]!r}; remove {beside} or export the weights again"
            )
    return own or told


def _read_content(file: Path, path: str, key: str) -> Any:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, OSError, ValueError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{key} ({path!r}) cannot be read: {reason}; is it whole?") from error
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":
            raise
        raise UserError(
            f"{key} ({path!r}) holds pickled objects, not tensors alone; convert it to .safetensors"
        ) from error


def _read_metadata(file: Path) -> dict[str, Any]:
    try:
        with safe_open(file, "pt") as opened:
            return _parse_facts((opened.metadata() or {}).get(_FACTS_KEY, ""))
    except (SafetensorError, OSError):
        return {}  # whoever loads the tensors says what is wrong with the file


def _parse_facts(text: str) -> dict[str, Any]:
    """The facts in a text; empty if it is not one of this program's."""
    try:
        facts = json.loads(text)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) and isinstance(facts.get("model"), str) else {}


def _get_near_places(folder: Folder, name: str) -> str:
    """Names that are there instead, in the nearest folder above that exists."""
    while not folder.is_there() and folder.name:
        folder, name = folder.parent, folder.name
    near = get_near_names(name, folder.list_names())
    if near:
        return f"did you mean {' or '.join(str(join_place(str(folder), one)) for one in near)}?"
    return f"{folder} is there, and holds nothing named like {name!r}"
