"""Which places a submission may name: below roots that the service's owner has given, no others.

A key of the configuration says itself that it names a place (`utils.config.metadata`). Texts of all
other keys, such as names and preprocessing strings, may not lead out of the repository either:
what reads them may open any path or URL that it is given.
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

# Neither of them leads anywhere.
_NOWHERE = ("", "auto", "none")
_BUCKET = "gs://"
_WORDS = re.compile(r"""[\s"'`(),|=\[\]{};<>]+""")
# Controls, and halves of pairs that no encoding can hold.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
# Keyword arguments with which a model reads a file or a hub of somebody else's choice.
_READS = re.compile(r"checkpoint_path|pretrained_cfg.*|cache_dir")
# timm takes `hf-hub:owner/name` and `local-dir:path` for names.
_MODELS = ("model.name", "distill.teacher", "model")
_MODEL = re.compile(r"[\w.\-]*")


def check_places(config: RunConfig, roots: Sequence[str], base: Path) -> None:
    """Refuse a configuration that names a place beyond the roots.

    Args:
      roots: directories, and buckets or parts of them as gs://bucket/name.
      base: the directory that relative paths are below.

    Raises:
      UserError: names the key, its value and the roots.
    """
    for key, value, is_place in _iterate(config, ""):
        if is_place and isinstance(value, str):
            _check_place(key, value, roots, base)
        else:
            _check_value(key, value)


def check_config_path(config: str, root: Path) -> None:
    """Refuse a configuration that is no file of the repository's `configs/`.

    Raises:
      UserError: says what may be given.
    """
    folder = (root / "configs").resolve()
    path = (root / config).resolve() if "\0" not in config else folder
    is_below = path.is_relative_to(folder) and not Path(config).is_absolute()
    if not is_below or path.suffix != ".yaml" or not path.is_file():
        raise UserError(
            f"config ({config[:200]!r}) is no file of configs/; give one such as "
            "configs/digits_student.yaml"
        )


def check_root(root: str) -> None:
    """Refuse a root below which nothing could ever be named.

    Raises:
      UserError: it is empty, or a URL of another kind than a bucket's.
    """
    is_bucket = root.startswith(_BUCKET) and root.removeprefix(_BUCKET).strip("/")
    if not root.strip() or (not is_bucket and (is_remote(root) or "://" in root)):
        raise UserError(
            f"--root ({root!r}) is no place of submissions; give a directory, or gs://BUCKET"
        )


def list_configs(root: Path) -> list[str]:
    """What may be given as a submission's configuration."""
    found = (path.relative_to(root) for path in (root / "configs").rglob("*.yaml"))
    return sorted(path.as_posix() for path in found if path.parts[1] != "presets")


def _iterate(section: ConfigSection, prefix: str) -> Iterator[tuple[str, JsonValue, bool]]:
    """Each key with its value, and whether it names a place; those of list elements, too."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{name}"
        sections = value if isinstance(value, tuple) else (value,)
        if sections and all(isinstance(one, ConfigSection) for one in sections):
            for number, one in enumerate(sections):
                inner = f"{key}.{number}." if isinstance(value, tuple) else f"{key}."
                yield from _iterate(one, inner)
        else:
            yield key, value, read_key_info(field.json_schema_extra).is_path


def _check_place(key: str, value: str, roots: Sequence[str], base: Path) -> None:
    if value in _NOWHERE:
        return
    if _CONTROLS.search(value) or not value.isprintable():
        raise UserError(f"{key} ({value[:200]!r}) holds control characters; give a plain path")
    is_below = _is_below_bucket if is_remote(value) else _is_below_directory
    if not any(is_below(value, root, base) for root in roots):
        raise UserError(
            f"{key} ({value[:200]!r}) lies below none of this service's roots "
            f"({', '.join(roots)}); choose another place, or give tools.serve --root"
        )


def _is_below_bucket(value: str, root: str, _: Path) -> bool:
    """One URL without chains, below a bucket that is named; whole names only: a is not below ab."""
    parts = value.removeprefix(_BUCKET).split("/")
    is_plain = value.startswith(_BUCKET) and "::" not in value and "://" not in value[5:]
    return (
        is_plain
        and root.startswith(_BUCKET)
        and not set(parts) & {".", ".."}
        and f"{value.rstrip('/')}/".startswith(f"{root.rstrip('/')}/")
    )


def _is_below_directory(value: str, root: str, base: Path) -> bool:
    """Links, `~` and variables of the environment are followed first."""
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
                raise UserError(
                    f"{key}.{name} makes a model read a file or a hub of its own; take it out"
                )
            _check_text(key, name)
            _check_value(f"{key}.{name}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _check_value(f"{key}.{number}", inner)


def _check_text(key: str, text: str) -> None:
    is_model = key in _MODELS or re.fullmatch(r"distill\.teachers\.\d+\.model", key)
    if is_model and not _MODEL.fullmatch(text):
        raise UserError(f"{key} ({text[:200]!r}) is no plain name of a model; give one of timm's")
    for one in (text, *_read_constants(text)):
        words = _WORDS.split(one)
        if _CONTROLS.search(one) or "://" in one or any(_leads_out(word) for word in words):
            raise UserError(
                f"{key} ({text[:200]!r}) holds a path or a URL out of the repository; only keys "
                "that name a place may, below this service's roots"
            )


def _leads_out(word: str) -> bool:
    parts = re.split(r"[/\\:]", word)
    return "$" in word or "::" in word or word.startswith(("/", "~", "\\")) or ".." in parts


def _read_constants(text: str) -> list[str]:
    """The texts in a preprocessing string as its reader sees them: escapes done, pieces joined.

    What does not parse its reader refuses, too.
    """
    found: list[str] = []
    for piece in (text, *text.split("|")) if set(text) & set("'\"") else ():
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            nodes = ast.walk(ast.parse(piece.strip(), mode="eval"))
            values = [node.value for node in nodes if isinstance(node, ast.Constant)]
            found += [value for value in values if isinstance(value, str)]
            found += [value.decode("latin-1") for value in values if isinstance(value, bytes)]
    return found
