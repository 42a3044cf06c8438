"""The stand-in of a TPU: XLA's CPU client in libtpu's place, for tests and trials without a chip.

torch_tpu finds its driver by `TPU_LIBRARY_PATH` and calls it through a table of functions, the PJRT
C API. A published build of XLA's CPU client has the same table. Two of its functions differ from
what torch_tpu expects and are replaced there by those of standin.c; three more are counted.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from utils.errors import UserError

# The counterpart of PJRT_DEVICE=CPU.
VARIABLE = "TPU_STANDIN"
_PACKAGE, _VERSION = "lammps-jax-pjrt-cpu", "0.11.2"
_SOURCE = Path(__file__).with_name("standin.c")
_FILE = "pjrt_c_api_cpu_plugin.so"
_SHA256 = "ad1309ac822b1b24d51b7f9947c7c9fa9ef5d67f390584cbc3d1fa2428fed9c2"
# Places in the table of functions, by pjrt_c_api.h; it only ever grows at its end.
_CREATE, _COMPILE, _NUM_OUTPUTS, _MEMORY_KINDS, _EXECUTE, _TO_HOST = 10, 20, 44, 47, 55, 70
_HEADER = 40  # bytes before the first function: size, extensions, version
# Counted calls of the driver, and where they stand in the table.
_COUNTED = {"programs": _COMPILE, "executions": _EXECUTE, "transfers": _TO_HOST}
# Transfers of the sums of several stand-ins, which are no reads of a step.
SUMS: Counter[str] = Counter()
_loaded: list[ctypes.CDLL] = []


class _Table(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p))


def is_requested() -> bool:
    """Return whether the environment requests the stand-in; UserError for an unknown one."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "cpu"):
        raise UserError(
            f"{VARIABLE} ({value!r}) in the environment is not a stand-in of a TPU; set it to cpu, "
            "or unset it"
        )
    return value == "cpu"


@functools.cache
def find_plugin() -> Path:
    """Return the plugin's file; UserError unless it is the one that the tests were made with."""
    way_out = "run bash run_commands.sh setup --torch-tpu"
    name = _PACKAGE.replace("-", "_")
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise UserError(
            f"{VARIABLE} (cpu) needs the package {_PACKAGE}, which is not installed; {way_out}"
        )
    version = importlib.metadata.version(_PACKAGE)
    path = Path(spec.origin).with_name(_FILE)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if (version, digest) != (_VERSION, _SHA256):
        raise UserError(
            f"{VARIABLE} (cpu) needs {_PACKAGE} {_VERSION} with SHA-256 {_SHA256[:12]}, got "
            f"{version} with {digest[:12]}; {way_out}"
        )
    return path


@functools.cache
def install() -> None:
    """Put the stand-in in libtpu's place; before the device is opened."""
    path = find_plugin()
    os.environ["TPU_LIBRARY_PATH"] = str(path)
    library, own = ctypes.CDLL(str(path)), ctypes.CDLL(str(_build()))
    library.GetPjrtApi.restype = ctypes.c_void_p
    table = library.GetPjrtApi()
    size = _Table.from_address(table).struct_size
    if size < _HEADER + 8 * (_TO_HOST + 1):
        raise RuntimeError(f"the stand-in's table of functions has {size} bytes, too few")
    places = (_CREATE, _MEMORY_KINDS, *_COUNTED.values())
    of_c = (ctypes.c_int * len(places))(*places)
    own.replace(ctypes.c_void_p(table), ctypes.c_void_p(table + _HEADER), of_c, _NUM_OUTPUTS)
    own.read_count.restype = ctypes.c_longlong
    _loaded.extend((library, own))


def read_counts() -> dict[str, int]:
    """Count the driver's calls since it was opened: programs, executions, transfers to the host."""
    if not _loaded:
        return dict.fromkeys(_COUNTED, 0)
    return {name: _loaded[1].read_count(n) for n, name in enumerate(_COUNTED)}


def _build() -> Path:
    """Compile the functions that are replaced, once for each state of their source."""
    # Not above: the doctor loads this file where no package is installed.
    from utils.storage.places import get_user_cache

    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    library = get_user_cache("tpu_standin", former="tpu_standin") / f"{digest}.so"
    if library.is_file():
        return library
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise UserError(
            f"{VARIABLE} (cpu) needs a C compiler, and there is no {os.environ.get('CC') or 'cc'} "
            "on the PATH; install one, such as gcc, or set CC to one"
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        subprocess.run([compiler, "-O1", "-fPIC", "-shared", _SOURCE, "-o", built], check=True)
        built.replace(library)
    return library
