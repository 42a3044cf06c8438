"""The runtime of the device, as its owner would write it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from tests.support.private_device import NAME
from utils.config.execution import RuntimeSection
from utils.runtime.base import Runtime, derive_seed
from utils.runtime.processes.group import ProcessGroup
from utils.runtime.start import DeviceStart
from utils.runtime.xla.ranks import GlooRanks
from utils.storage.places import get_user_cache

SOURCE = Path(__file__).with_name("device.cpp")


class PrivateStart(DeviceStart):
    """It is never chosen by `auto`."""

    def is_available(self) -> bool:
        return False


class PrivateRuntime(Runtime):
    """Each operation runs at once; sums over ranks leave the device."""

    name = NAME

    def __init__(self, section: RuntimeSection) -> None:
        self._library = open_device()
        self.device = torch.device(NAME)
        super().__init__(section)
        group = ProcessGroup.join(section, "gloo")
        if group is not None:
            self.ranks = GlooRanks(self, group, torch.float32)

    def _seed(self, seed: int, step: int) -> None:
        torch.default_generator.manual_seed(derive_seed(seed, step, self.ranks.index))

    def counters(self) -> dict[str, int]:
        return {**super().counters(), "operations": self._library.count_operations()}


@functools.cache
def open_device() -> ctypes.CDLL:
    """Load the device, built once for each source and release of torch."""
    library = ctypes.CDLL(str(_build()), mode=ctypes.RTLD_GLOBAL)
    library.count_operations.restype = ctypes.c_longlong
    torch.utils.rename_privateuse1_backend(NAME)
    module = ModuleType(f"torch.{NAME}")
    vars(module).update(
        is_available=lambda: True,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        device_count=lambda: 1,
        current_device=lambda: 0,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
    )
    torch._register_device_module(NAME, module)
    return library


def _build() -> Path:
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    library = get_user_cache("private_device") / f"{digest}.so"
    if library.is_file():
        return library
    from torch.utils.cpp_extension import include_paths, library_paths

    library.parent.mkdir(parents=True, exist_ok=True)
    abi = int(torch.compiled_with_cxx11_abi())
    includes = [f"-I{path}" for path in include_paths()]
    folders = [f"-L{path}" for path in library_paths()]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        flags = ["-O1", "-fPIC", "-shared", "-std=c++17", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
        words = ["g++", *flags, *includes, str(SOURCE), "-o", str(built), *folders]
        subprocess.run([*words, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
        built.replace(library)
    return library
