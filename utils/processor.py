"""Facts of the host's processor that known faults depend on."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class _Instructions(NamedTuple):
    """Vector instructions that oneDNN has kernels for."""

    name: str
    architectures: tuple[str, ...]
    needs: frozenset[str]  # flags of the processor in Linux
    width: int  # float32 values in a register; 16 if its width is not fixed
    limits: tuple[str, ...]  # values of ONEDNN_MAX_CPU_ISA that exclude them


_X86 = ("x86_64", "amd64")
_OLDER = ("sse41", "avx")
# Widest first.
_INSTRUCTIONS = (
    _Instructions(
        "AVX-512",
        _X86,
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
        16,
        (*_OLDER, "avx2", "avx2_vnni", "avx2_vnni_2"),
    ),
    _Instructions("AVX2", _X86, frozenset({"avx2"}), 8, _OLDER),
    _Instructions("SVE", ("aarch64", "arm64"), frozenset({"sve"}), 16, ("asimd",)),
)
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def find_vector_block(
    environment: Mapping[str, str], root: Path = Path("/"), architecture: str = ""
) -> tuple[str, int]:
    """Return oneDNN's widest vector instructions and block of channels: ("AVX2", 8), or ("", 0)."""
    architecture = (architecture or platform.machine()).lower()
    limit = next((environment[name].lower() for name in _LIMITS if environment.get(name)), "")
    flags = _read_flags(root)
    for instructions in _INSTRUCTIONS:
        is_built_for = architecture in instructions.architectures
        has_them = flags is None or flags >= instructions.needs
        if is_built_for and has_them and limit not in instructions.limits:
            return instructions.name, instructions.width
    return "", 0


def _read_flags(root: Path) -> frozenset[str] | None:
    """Return instruction sets of the first processor, or None if the system lists none."""
    try:
        lines = (root / "proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, text = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(text.split())
    return None
