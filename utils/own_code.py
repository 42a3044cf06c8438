"""Imports the modules that a run names, so that what they register can be used by name.

A module is named by `run.imports`: its dotted name, or the name of an entry point of an installed
package in the group `trainer.imports`. It is looked for as Python does, at last in
`run.import_dir`, the directory of the YAML file that names it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from utils.errors import UserError

GROUP = "trainer.imports"  # of entry points
_KEY = "run.imports"
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class OwnCode(NamedTuple):
    """The modules of a run: names, and a directory that they may lie in; empty: none."""

    names: Sequence[str] = ()
    folder: str = ""


NO_CODE = OwnCode()


def import_modules(code: OwnCode) -> None:
    """Import the modules, unless this process has done so; UserError if one is missing or fails."""
    if not code.names:
        return
    # Where torch_tpu is installed, `import torch` would open libtpu, whatever the device.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    if code.folder and code.folder not in sys.path:
        sys.path.append(code.folder)
    for name in code.names:
        _refuse_shadowed(name, _import_module(name, code.folder), code.folder)


def describe_modules(code: OwnCode) -> dict[str, dict[str, str]]:
    """Return file, SHA-256 and version of each module, once imported, by its name.

    The hash is of all Python files of the module's package: what it imports from there counts.
    """
    described: dict[str, dict[str, str]] = {}
    for name in code.names:
        module = sys.modules[_resolve(name)]
        described[name] = {
            "file": module.__file__ or "",
            "sha256": _hash_files(module),
            "version": _find_version(module),
        }
    return described


def _resolve(name: str) -> str:
    """Return the module behind an entry point's name; other names as they are."""
    points = importlib.metadata.entry_points(group=GROUP, name=name)
    return next((point.module for point in points), name)


def _import_module(name: str, folder: str) -> ModuleType:
    module = _resolve(name)
    if not _NAME.fullmatch(module):
        raise UserError(f"{_KEY} ({name!r}) is no module; write a name such as my_pkg.models")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module}.".startswith(f"{error.name}."):
            raise _describe(name, error) from error
        other = sys.modules.get(module.partition(".")[0])
        if other is not None:
            _refuse_shadowed(name, other, folder)
        raise UserError(
            f"{_KEY} ({name!r}): there is no module {error.name}; put it beside the YAML file that "
            f"names it ({folder or 'none here'}), install it, add its directory to PYTHONPATH, or "
            "set run.import_dir"
        ) from error
    except (Exception, SystemExit) as error:
        raise _describe(name, error) from error


def _describe(name: str, error: BaseException) -> UserError:
    """Return the error of a module that fails, with the line that did."""
    frames = traceback.extract_tb(error.__traceback__)
    file, line = (frames[-1].filename, frames[-1].lineno) if frames else ("", 0)
    if isinstance(error, SyntaxError) and error.filename:
        file, line = error.filename, error.lineno
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(
        f"{_KEY} ({name!r}) cannot be imported: {reason} ({file}, line {line}); correct the module"
    )


def _refuse_shadowed(name: str, module: ModuleType, folder: str) -> None:
    """Refuse a module that is another one than that of the same name in the folder."""
    top = _resolve(name).partition(".")[0]
    own = [Path(folder, top), Path(folder, f"{top}.py")] if folder else []
    if not any(path.exists() for path in own):
        return
    files = [module.__file__ or "", *getattr(module, "__path__", ())]
    if any(Path(file).resolve().is_relative_to(Path(folder).resolve()) for file in files):
        return
    raise UserError(
        f"{_KEY} ({name!r}): {files[0] or files[-1]} has the same name as {top} in {folder} and "
        "comes before it; rename your own"
    )


def _hash_files(module: ModuleType) -> str:
    digest = hashlib.sha256()
    top = sys.modules[module.__name__.partition(".")[0]]
    roots = [Path(path) for path in getattr(top, "__path__", ())]
    files = [(path.relative_to(root), path) for root in roots for path in _list_sources(root)]
    if not roots and top.__file__:
        files.append((Path(Path(top.__file__).name), Path(top.__file__)))
    for name, path in sorted(files):
        digest.update(f"{name.as_posix()}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _list_sources(root: Path) -> Iterator[Path]:
    """Yield the Python files of a package; directories without one are not searched."""
    for folder, folders, files in os.walk(root):
        sources = [name for name in files if name.endswith(".py")]
        if not sources and folder != str(root):
            folders.clear()
        yield from (Path(folder, name) for name in sources)


def _find_version(module: ModuleType) -> str:
    """Return the version of the module's distribution, else its `__version__`, else empty."""
    top = module.__name__.partition(".")[0]
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules[top], "__version__", ""))
