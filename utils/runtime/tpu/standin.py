"""The stand-in of a TPU: XLA's CPU client in libtpu's place, for tests and trials without a chip.

torch_tpu finds its driver by `TPU_LIBRARY_PATH` and calls it through a table of functions, the PJRT
C API. A published build of XLA's CPU client has the same table. Two of its functions differ from
what torch_tpu expects and are replaced there; four more are counted.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from utils.errors import UserError

# The counterpart of PJRT_DEVICE=CPU.
VARIABLE = "TPU_STANDIN"
_PACKAGE, _VERSION = "lammps-jax-pjrt-cpu", "0.11.2"
_FILE = "pjrt_c_api_cpu_plugin.so"
_SHA256 = "ad1309ac822b1b24d51b7f9947c7c9fa9ef5d67f390584cbc3d1fa2428fed9c2"
# Places in the table of functions, by pjrt_c_api.h; it only ever grows at its end.
_CREATE, _COMPILE, _NUM_OUTPUTS, _MEMORY_KINDS, _EXECUTE, _TO_HOST = 10, 20, 44, 47, 55, 70
_HEADER = 40  # bytes before the first function: size, extensions, version
_MAX_OUTPUTS = 16_384

COUNTED = {"programs": _COMPILE, "executions": _EXECUTE, "transfers": _TO_HOST}
COUNTS: Counter[str] = Counter()  # calls of the driver since it was opened

_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_kept: list[object] = []  # what the table points to


class _Header(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p))


class _Create(_Header):
    _fields_ = (("options", ctypes.c_void_p), ("num_options", ctypes.c_size_t))


class _Option(_Header):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("name_size", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("value", ctypes.c_int64),
        ("value_size", ctypes.c_size_t),
    )


class _NumOutputs(_Header):
    _fields_ = (("executable", ctypes.c_void_p), ("num_outputs", ctypes.c_size_t))


class _MemoryKinds(_NumOutputs):
    _fields_ = (("kinds", ctypes.c_void_p), ("kind_sizes", ctypes.c_void_p))


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
    library = ctypes.CDLL(str(path))
    library.GetPjrtApi.restype = ctypes.c_void_p
    table = library.GetPjrtApi()
    size = _Header.from_address(table).struct_size
    if size < _HEADER + 8 * (_TO_HOST + 1):
        raise RuntimeError(f"the stand-in's table of functions has {size} bytes, too few")
    _kept.append(library)
    _replace(table, _CREATE, _create_one_device)
    _replace(table, _MEMORY_KINDS, _name_memory(_get_function(table, _NUM_OUTPUTS)))
    for name, place in COUNTED.items():
        _replace(table, place, functools.partial(_count, name))


def _get_function(table: int, place: int) -> Callable[[int], int | None]:
    return _Function(ctypes.c_void_p.from_address(table + _HEADER + 8 * place).value or 0)


def _replace(
    table: int, place: int, wrap: Callable[[Callable[[int], int | None], int], int | None]
) -> None:
    """Replace a function by `wrap(function, address of its arguments)`."""
    wrapped = _Function(functools.partial(wrap, _get_function(table, place)))
    _kept.append(wrapped)
    address = ctypes.cast(wrapped, ctypes.c_void_p).value
    ctypes.c_void_p.from_address(table + _HEADER + 8 * place).value = address


def _count(name: str, function: Callable[[int], int | None], address: int) -> int | None:
    COUNTS[name] += 1
    return function(address)


def _create_one_device(function: Callable[[int], int | None], address: int) -> int | None:
    """Open a client of one device instead of with the options of libtpu."""
    arguments = _check_size(_Create.from_address(address))
    name = b"cpu_device_count"
    option = _Option(ctypes.sizeof(_Option), None, name, len(name), 1, 1, 1)
    _kept.append(option)
    arguments.options, arguments.num_options = ctypes.addressof(option), 1
    return function(address)


def _name_memory(
    count_outputs: Callable[[int], int | None],
) -> Callable[[Callable[[int], int | None], int], int | None]:
    """Create a function that says for each output that it lies in device memory."""
    word = b"device"
    kinds = (ctypes.c_char_p * _MAX_OUTPUTS)(*[word] * _MAX_OUTPUTS)
    sizes = (ctypes.c_size_t * _MAX_OUTPUTS)(*[len(word)] * _MAX_OUTPUTS)
    _kept.extend((kinds, sizes))

    def name_memory(_: Callable[[int], int | None], address: int) -> int | None:
        arguments = _check_size(_MemoryKinds.from_address(address))
        counted = _NumOutputs(ctypes.sizeof(_NumOutputs), None, arguments.executable, 0)
        error = count_outputs(ctypes.addressof(counted))
        if error:
            return error
        if counted.num_outputs > _MAX_OUTPUTS:
            raise RuntimeError(f"a program of {counted.num_outputs} outputs is too large")
        arguments.num_outputs = counted.num_outputs
        arguments.kinds, arguments.kind_sizes = ctypes.addressof(kinds), ctypes.addressof(sizes)
        return None

    return name_memory


def _check_size(arguments: ctypes.Structure) -> ctypes.Structure:
    """Check that a call's structure has at least the fields that are read here."""
    size, least = arguments.struct_size, ctypes.sizeof(type(arguments))
    if size < least:
        raise RuntimeError(f"a structure of the PJRT C API has {size} bytes, not {least}")
    return arguments
