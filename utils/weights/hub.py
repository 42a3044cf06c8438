"""Models as timm shares them, `hf-hub:owner/name` and `local-dir:folder`: config.json and weights.

A repository of the hub comes from its cache on this machine where it is there, else from the
network.
"""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping

from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject, JsonValue
from utils.storage.folder import Folder
from utils.storage.places import open_folder
from utils.weights.language_hub import VARIANTS, read_language_facts

HUB, HUB_OLD, LOCAL = "hf-hub:", "hf_hub:", "local-dir:"
CONFIG = "config.json"
# In timm's order; other names count by their endings, in this order.
_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
_ENDINGS = (".safetensors", ".pth", ".bin")
_REACH_S = 3.0


def is_shared(path: str) -> bool:
    """Whether a path or a model's name is one of timm's sources."""
    return path.startswith((HUB, HUB_OLD, LOCAL))


def open_shared(path: str, key: str) -> Folder:
    """The folder that holds a shared model's config.json and weights.

    Raises:
      UserError: it is not there, or cannot be fetched.
    """
    _, _, name = path.partition(":")
    folder = open_folder(name if path.startswith(LOCAL) else _fetch(path, name, key))
    if not name or CONFIG not in folder.list_names():
        raise UserError(
            f"{key} ({path!r}): no {CONFIG} there; give a folder as timm.models.save_for_hf and "
            "push_to_hf_hub write it"
        )
    return folder


def find_file(folder: Folder, path: str, key: str) -> str:
    """The name of the file of weights in a shared model's folder.

    Raises:
      UserError: there is none.
    """
    names = sorted(folder.list_names())
    for name in _FILES:
        if name in names:
            return name
    for ending in _ENDINGS:
        for name in names:
            if name.endswith(ending):
                return name
    raise UserError(
        f"{key} ({path!r}): no weights beside {CONFIG}; put {' or '.join(_FILES[:2])} there"
    )


def read_shared_facts(folder: Folder, path: str, key: str) -> JsonObject:
    """What config.json says, in the words of this program's exports.

    Mean and standard deviation are of pixels from 0 to 255 here, from 0 to 1 there.

    Raises:
      UserError: it cannot be read, or is neither timm's nor a language model's that models/ has.
    """
    said = _read_config(folder, path, key)
    if (language := _read_language(said, path, key)) is not None:
        return language
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
        facts |= _tell_input(said, own)
    except (KeyError, TypeError, AttributeError) as error:
        kinds = ", ".join(one.kind for one in VARIANTS)
        raise UserError(
            f"{key} ({path!r}): {CONFIG} names no architecture of timm, and no model_type of "
            f"{kinds}; give a model that timm or transformers has saved"
        ) from error
    if not isinstance(facts["model"], str) or not isinstance(own, Mapping):
        raise UserError(f"{key} ({path!r}): the architecture in {CONFIG} is no text; mend it")
    return facts


def _read_config(folder: Folder, path: str, key: str) -> JsonValue:
    try:
        return json.loads(folder.read_text(CONFIG))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{key} ({path!r}): {CONFIG} cannot be read: {error}; is it whole? copy it again"
        ) from error


def _read_language(said: JsonValue, path: str, key: str) -> JsonObject | None:
    """What config.json says, if it is of a language model that models/ has.

    Raises:
      UserError: it is one, of a form that is not here.
    """

    def refuse(reason: str) -> UserError:
        return UserError(f"{key} ({path!r}): {CONFIG} is of another form: {reason}; give another")

    try:
        return read_language_facts(said, refuse) if isinstance(said, dict) else None
    except (KeyError, TypeError, AttributeError) as error:
        raise refuse(f"a value of another type ({error})") from error


def _tell_input(said: JsonMapping, own: JsonMapping) -> JsonObject:
    """Size, crop and resampling of the images, and names of the classes, where they are told."""
    names = said.get("label_names")
    if isinstance(names, dict):  # by number, which may have gaps
        names = [names.get(str(n), str(n)) for n in range(1 + max(map(int, names), default=-1))]
    spoken = said.get("label_descriptions") or {}
    told = {"classes": [spoken.get(name, name) for name in names]} if names else {}
    keys = ("input_size", "crop_pct", "crop_mode", "interpolation")
    found = {key: own[key] for key in keys if own.get(key) is not None}
    return {**told, "input": found} if found else told


@contextlib.contextmanager
def ask_hub() -> Iterator[None]:
    """Around what may fetch: where the hub is out of reach its cache alone is asked, at once.

    Its client would ask again for half a minute, file by file.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _is_reachable(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _is_reachable(address: str) -> bool:
    """Whether somebody answers at an address; behind a proxy only the client can tell."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme in urllib.request.getproxies():
        return True
    port = parts.port or {"http": 80}.get(parts.scheme, 443)
    try:
        socket.create_connection((parts.hostname, port), timeout=_REACH_S).close()
    except OSError:
        return False
    return True


def _fetch(path: str, name: str, key: str) -> str:
    """The folder of the cache that a repository's files lie in."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    repository, _, revision = name.partition("@")
    more = {"revision": revision or None}
    try:
        with ask_hub():
            config = hf_hub_download(repository, CONFIG, **more)
            for file in _FILES:
                with contextlib.suppress(EntryNotFoundError):
                    hf_hub_download(repository, file, **more)
                    break
    except (OSError, EntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        raise UserError(
            f"{key} ({path!r}) cannot be fetched ({type(error).__name__}); where there is no "
            "network copy the repository's folder here and give it as local-dir:FOLDER"
        ) from error
    return config.removesuffix(CONFIG)
