"""Reads the dependencies of the wheel from the requirement files, which alone hold the pins.

An environment has room for one stack of PyTorch. So the wheel itself takes any torch from the
oldest to the newest that a stack pins, and extras choose: `xla`, `tpu` and `tpu-compiler` that of
PyTorch/XLA, `torch-tpu` that of TorchTPU, `cuda` the newest alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

TORCH = ("torch", "torchvision")
# Of environments of their own, which no extra can be: other versions of the same packages.
APART = ("compiler", "mirrors")


class CustomMetadataHook(MetadataHookInterface):
    """The hook that hatchling looks for by this name."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add `dependencies` and `optional-dependencies` to the project's metadata."""
        root = Path(self.root)
        pins = read_requirements(root / "requirements.txt")
        paths = {path.stem.partition("-")[2]: path for path in root.glob("requirements-*.txt")}
        lists = {name: list(read_requirements(path).values()) for name, path in paths.items()}
        newest = read_requirements(paths["torch-tpu"])
        stack = [pins.pop(name) for name in TORCH]
        xla = pins.pop("torch_xla")
        others = [newest[name] for name in TORCH]
        ranges = zip(stack, others, strict=True)
        metadata["dependencies"] = [
            *(f"{old.replace('==', '>=')},<={new.partition('==')[2]}" for old, new in ranges),
            *pins.values(),
        ]
        metadata["optional-dependencies"] = {
            **{name: lists[name] for name in sorted(lists) if name not in APART},
            "xla": [*stack, xla],
            "tpu": [*stack, xla.replace("torch_xla", "torch_xla[tpu]")],
            "tpu-compiler": [*stack, xla.replace("torch_xla", "torch_xla[tpu,pallas]")],
            "cuda": others,
        }


def read_requirements(path: Path) -> dict[str, str]:
    """Read name -> pinned requirement from a requirement file; a wheel has no `===`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pins = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return {pin.partition("=")[0]: pin.replace("===", "==") for pin in pins}
