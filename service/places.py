"""Checks that a submission names only paths and URLs below the roots of the service's owner.

The metadata of a configuration key marks paths (`utils.config.metadata`). Texts of all other keys,
such as names and preprocessing strings, may not lead out of the repository either: their readers
may open any path or URL.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from utils.config.load import RunConfig
from utils.config.metadata import ConfigSection, read_key_info
from utils.errors import UserError
from utils.json_types import JsonValue
from utils.storage.places import is_remote, to_path

# Folders below configs/ whose files are no configurations of runs, but parts or programs.
_NO_RUNS = ("presets", "lab")
# Values of path keys that name no path.
_NOWHERE = ("", "auto", "none")
_BUCKET = "gs://"
_WORDS = re.compile(r"""[\s"'`(),|=\[\]{};<>]+""")
# Control characters, and halves of surrogate pairs, which no encoding can hold.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
# Keyword arguments that make a model read an arbitrary file or hub.
_READS = re.compile(r"checkpoint_path|pretrained_cfg.*|cache_dir")
# timm accepts `hf-hub:owner/name` and `local-dir:path` as names.
_MODELS = ("model.name", "distill.teacher", "model")
_MODEL = re.compile(r"[\w.\-]*")


def check_places(config: RunConfig, roots: Sequence[str], base: Path) -> None:
    """Raise a UserError for a configuration that names a path or URL outside the roots.

    Args:
      roots: directories, and buckets or parts of them as gs://bucket/name.
      base: the directory of relative paths.
    """
    for key, value, is_path in _iterate(config, ""):
        if is_path and isinstance(value, str):
            _check_place(key, value, roots, base)
        else:
            _check_value(key, value)


def check_config_path(config: str, root: Path) -> None:
    """Raise a UserError for a configuration that is no file of the repository's `configs/`."""
    folder = (root / "configs").resolve()
    path = (root / config).resolve() if "\0" not in config else folder
    is_below = path.is_relative_to(folder) and not Path(config).is_absolute()
    if not is_below or path.suffix != ".yaml" or not path.is_file():
        raise UserError(
            f"config ({config[:200]!r}) is no file of configs/; give one such as "
            "configs/digits_student.yaml"
        )


def check_root(root: str) -> None:
    """Raise a UserError for a root that is empty, or a URL other than a bucket's."""
    is_bucket = root.startswith(_BUCKET) and root.removeprefix(_BUCKET).strip("/")
    if not root.strip() or (not is_bucket and (is_remote(root) or "://" in root)):
        raise UserError(
            f"--root ({root!r}) is neither a directory nor a bucket; use a directory or gs://BUCKET"
        )


def list_configs(root: Path) -> list[str]:
    """List the configurations that a submission may use."""
    paths = (path.relative_to(root) for path in (root / "configs").rglob("*.yaml"))
    return sorted(path.as_posix() for path in paths if path.parts[1] not in _NO_RUNS)


def _iterate(section: ConfigSection, prefix: str) -> Iterator[tuple[str, JsonValue, bool]]:
    """Yield each key, its value and whether it names a path, also of elements of lists."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{name}"
        sections = value if isinstance(value, tuple) else (value,)
        if sections and all(isinstance(item, ConfigSection) for item in sections):
            for number, item in enumerate(sections):
                inner = f"{key}.{number}." if isinstance(value, tuple) else f"{key}."
                yield from _iterate(item, inner)
        else:
            yield key, value, read_key_info(field).is_path


def _check_place(key: str, value: str, roots: Sequence[str], base: Path) -> None:
    if value in _NOWHERE:
        return
    if _CONTROLS.search(value) or not value.isprintable():
        raise UserError(f"{key} ({value[:200]!r}) holds control characters; give a plain path")
    is_below = _is_below_bucket if is_remote(value) else _is_below_directory
    if not any(is_below(value, root, base) for root in roots):
        raise UserError(
            f"{key} ({value[:200]!r}) lies below none of this service's roots "
            f"({', '.join(roots)}); choose another path, or give tools.serve --root"
        )


def _is_below_bucket(value: str, root: str, _: Path) -> bool:
    """Accept one URL without chains below a bucket; names match whole: a is not below ab."""
    parts = value.removeprefix(_BUCKET).split("/")
    is_plain = value.startswith(_BUCKET) and "::" not in value and "://" not in value[5:]
    return (
        is_plain
        and root.startswith(_BUCKET)
        and not set(parts) & {".", ".."}
        and f"{value.rstrip('/')}/".startswith(f"{root.rstrip('/')}/")
    )


def _is_below_directory(value: str, root: str, base: Path) -> bool:
    """Follow links, `~` and environment variables before the comparison."""
    other = ("file:", "hf-hub:", "hf_hub:", "local-dir:")
    if is_remote(root) or value.startswith(other) or "::" in value:
        return False
    return (base / to_path(value)).resolve().is_relative_to((base / to_path(root)).resolve())


def _check_value(key: str, value: JsonValue) -> None:
    if isinstance(value, str):
        _check_text(key, value)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if _READS.fullmatch(name):
                raise UserError(f"{key}.{name} makes a model read a file or a hub; remove it")
            _check_text(key, name)
            _check_value(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_value(f"{key}.{number}", inner)


def _check_text(key: str, text: str) -> None:
    is_model = key in _MODELS or re.fullmatch(r"distill\.teachers\.\d+\.model", key)
    if is_model and not _MODEL.fullmatch(text):
        raise UserError(f"{key} ({text[:200]!r}) is no plain name of a model; give one of timm's")
    for constant in (text, *_read_constants(text)):
        words = _WORDS.split(constant)
        if _CONTROLS.search(constant) or "://" in constant or any(map(_leads_out, words)):
            raise UserError(
                f"{key} ({text[:200]!r}) holds a path or a URL out of the repository; only keys "
                "that name a path may, below this service's roots"
            )


def _leads_out(word: str) -> bool:
    is_absolute = word.startswith(("/", "~", "\\"))
    return "$" in word or "::" in word or is_absolute or ".." in re.split(r"[/\\:]", word)


def _read_constants(text: str) -> list[str]:
    """Return the texts in a preprocessing string as its reader sees them: unescaped and joined.

    The reader itself refuses a string that does not parse.
    """
    texts: list[str] = []
    for piece in (text, *text.split("|")) if set(text) & set("'\"") else ():
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            nodes = ast.walk(ast.parse(piece.strip(), mode="eval"))
            values = [node.value for node in nodes if isinstance(node, ast.Constant)]
            texts += [value for value in values if isinstance(value, str)]
            texts += [value.decode("latin-1") for value in values if isinstance(value, bytes)]
    return texts
