"""Reads the dependencies of the wheel from the requirement files, which alone hold the pins.

An environment has room for one stack of PyTorch. So the wheel itself takes any torch from the
oldest to the newest that a stack pins, and extras choose: `xla`, `tpu` and `tpu-compiler` that of
PyTorch/XLA, `torch-tpu` that of TorchTPU, `cuda` the newest alone. Alike with whatever else two
lists pin to two versions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.version import Version

TORCH = ("torch", "torchvision")
# Of an environment of its own, which no extra can be: other versions of what torch_xla pins.
APART = "compiler"


class CustomMetadataHook(MetadataHookInterface):
    """The hook that hatchling looks for by this name."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add `dependencies` and `optional-dependencies` to the project's metadata."""
        root = Path(self.root)
        pins = read_requirements(root / "requirements.txt")
        paths = {path.stem.partition("-")[2]: path for path in root.glob("requirements-*.txt")}
        lists = {name: read_requirements(paths[name]) for name in sorted(paths) if name != APART}
        stack = [pins[name] for name in TORCH]
        xla = pins.pop("torch_xla")
        metadata["dependencies"] = [
            format_range({pin, *(part[name] for part in lists.values() if name in part)})
            for name, pin in pins.items()
        ]
        metadata["optional-dependencies"] = {
            **{name: list(part.values()) for name, part in lists.items()},
            "xla": [*stack, xla],
            "tpu": [*stack, xla.replace("torch_xla", "torch_xla[tpu]")],
            "tpu-compiler": [*stack, xla.replace("torch_xla", "torch_xla[tpu,pallas]")],
            "cuda": [lists["torch-tpu"][name] for name in TORCH],
        }


def format_range(pins: set[str]) -> str:
    """Return the one pin of a package, or the range from the oldest to the newest of several."""
    oldest, *_, newest = sorted([*pins, *pins], key=lambda pin: Version(pin.partition("==")[2]))
    if oldest == newest:
        return oldest
    return f"{oldest.replace('==', '>=')},<={newest.partition('==')[2]}"


def read_requirements(path: Path) -> dict[str, str]:
    """Read name -> pinned requirement from a requirement file; a wheel has no `===`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pins = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return {pin.partition("=")[0]: pin.replace("===", "==") for pin in pins}
