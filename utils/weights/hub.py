"""Models shared by timm, `hf-hub:owner/name` and `local-dir:folder`: config.json and weights.

A repository of the hub is read from the local cache if it is there, else from the network.
"""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator

from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject, JsonValue
from utils.storage.folder import Folder
from utils.storage.places import open_folder
from utils.weights.facts import WeightFacts, are_facts
from utils.weights.language import VARIANTS, read_language_facts

HUB, HUB_OLD, LOCAL = "hf-hub:", "hf_hub:", "local-dir:"
CONFIG = "config.json"
# In timm's order of preference; then other names by these endings.
_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
_ENDINGS = (".safetensors", ".pth", ".bin")


def is_shared(path: str) -> bool:
    """Return whether a path or a model's name is a source of timm's."""
    return path.startswith((HUB, HUB_OLD, LOCAL))


def open_shared(path: str, key: str) -> Folder:
    """Open the folder of a shared model's config.json and weights; UserError if it fails."""
    _, _, name = path.partition(":")
    folder = open_folder(name if path.startswith(LOCAL) else _fetch(path, name, key))
    if not name or CONFIG not in folder.list_names():
        raise UserError(
            f"{key} ({path!r}): no {CONFIG} there; use a folder that timm.models.save_for_hf or "
            "push_to_hf_hub has written"
        )
    return folder


def find_file(folder: Folder, path: str, key: str) -> str:
    """Return the name of the file of weights in a shared model's folder; an error without one."""
    names = sorted(folder.list_names())
    by_ending = (name for ending in _ENDINGS for name in names if name.endswith(ending))
    for name in (*(name for name in _FILES if name in names), *by_ending):
        return name
    raise UserError(
        f"{key} ({path!r}): no weights beside {CONFIG}; put {' or '.join(_FILES[:2])} there"
    )


def read_shared_facts(folder: Folder, path: str, key: str) -> WeightFacts:
    """Read config.json as facts of this program, with mean and std of pixels in 0..255."""
    try:
        said = json.loads(folder.read_text(CONFIG))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{key} ({path!r}): {CONFIG} cannot be read: {error}; is it whole? copy it again"
        ) from error
    if (language := _read_language(said, path, key)) is not None:
        return _check(language, path, key)
    try:
        own = said.get("pretrained_cfg", said)
        facts: JsonObject = {
            "model": said["architecture"],
            "args": dict(said.get("model_args") or {}),
            "num_classes": said.get("num_classes", own.get("num_classes")),
        }
        facts["args"].pop("num_classes", None)
        for name in ("mean", "std"):
            if own.get(name):
                facts[name] = [255.0 * value for value in own[name]]
        facts |= _describe_input(said, own)
    except (KeyError, TypeError, AttributeError) as error:
        kinds = ", ".join(variant.kind for variant in VARIANTS)
        raise UserError(
            f"{key} ({path!r}): {CONFIG} names no architecture of timm, and no model_type of "
            f"{kinds}; use a model that timm or transformers has saved"
        ) from error
    return _check(facts, path, key)


def _check(facts: JsonObject, path: str, key: str) -> WeightFacts:
    try:
        if are_facts(facts):
            return facts
    except ValueError as error:
        raise UserError(f"{key} ({path!r}): {CONFIG}: {error}; correct it") from error
    raise UserError(f"{key} ({path!r}): the architecture in {CONFIG} is not a text; correct it")


def _read_language(said: JsonValue, path: str, key: str) -> JsonObject | None:
    """Read config.json of a supported language model; None if it is of another model."""

    def refuse(reason: str) -> UserError:
        return UserError(
            f"{key} ({path!r}): {CONFIG} is not supported: {reason}; use another model"
        )

    try:
        return read_language_facts(said, refuse) if isinstance(said, dict) else None
    except (KeyError, TypeError, AttributeError) as error:
        raise refuse(f"a value of another type ({error})") from error


def _describe_input(said: JsonMapping, own: JsonMapping) -> JsonObject:
    """Return size, crop and resampling of the images, and the class names, if they are known."""
    names = said.get("label_names")
    if isinstance(names, dict):  # by number, which may have gaps
        names = [names.get(str(n), str(n)) for n in range(1 + max(map(int, names), default=-1))]
    texts = said.get("label_descriptions") or {}
    facts = {"classes": [texts.get(name, name) for name in names]} if names else {}
    keys = ("input_size", "crop_pct", "crop_mode", "interpolation")
    known = {key: own[key] for key in keys if own.get(key) is not None}
    return {**facts, "input": known} if known else facts


@contextlib.contextmanager
def prefer_hub_cache() -> Iterator[None]:
    """Use only the hub's local cache in this context if the hub cannot be reached.

    The hub's client would retry for half a minute, file by file.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _is_reachable(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _is_reachable(address: str) -> bool:
    """Return whether an address accepts connections; True behind a proxy, which hides it."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme in urllib.request.getproxies():
        return True
    port = parts.port or {"http": 80}.get(parts.scheme, 443)
    try:
        socket.create_connection((parts.hostname, port), timeout=3.0).close()
    except OSError:
        return False
    return True


def _fetch(path: str, name: str, key: str) -> str:
    """Download a repository, or find it in the cache; return its folder there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    repository, _, revision = name.partition("@")
    more = {"revision": revision or None}
    try:
        with prefer_hub_cache():
            config = hf_hub_download(repository, CONFIG, **more)
            for file in _FILES:
                with contextlib.suppress(EntryNotFoundError):
                    hf_hub_download(repository, file, **more)
                    break
    except (OSError, EntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        raise UserError(
            f"{key} ({path!r}) cannot be fetched ({type(error).__name__}); without a "
            "network, copy the repository's folder here and use local-dir:FOLDER"
        ) from error
    return config.removesuffix(CONFIG)
