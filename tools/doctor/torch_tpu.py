"""Check of TorchTPU, the second stack of a TPU, in the environment of the doctor."""

from __future__ import annotations

from tools.doctor.devices import count_chips, list_chips
from tools.doctor.machine import Finding, Machine, green, red, yellow
from train.provision import read_pins
from utils.device_use import list_device_files
from utils.generations import GENERATIONS
from utils.runtime.tpu.start import find_clash
from utils.storage.installation import ROOT

_SETUP = "bash run_commands.sh setup --torch-tpu"
# What no test of this project has run on a chip; docs/torch_tpu.md says what was run instead.
UNPROVEN = (
    "sums over two chips",
    "fused attention",
    "Pallas kernels",
    "memory readings",
    "every speed",
)


def check_torch_tpu(machine: Machine) -> Finding:
    """Check that torch and libtpu fit torch_tpu, alone in an environment, and its chips."""
    names = ("torch_tpu", "torch", "libtpu")
    versions = {name: machine.get_version(name) for name in names}
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
    if versions["torch_tpu"] is None:
        return green(f"not installed here; {_SETUP} makes .venv-tpu with it")
    if versions["torch"] is None or versions["libtpu"] is None:
        return red(text, _SETUP, text)
    clash = find_clash(versions["torch"], has_xla=machine.get_version("torch_xla") is not None)
    if clash:
        return red(f"{text}: {clash}", _SETUP, text)
    unseen = _explain_chips(machine)
    if unseen:
        return red(f"{text}: {unseen}", "runtime.device=xla, by bash run_commands.sh setup --tpu")
    pins = read_pins(ROOT / "requirements-torch-tpu.txt")
    others = [name for name in names if (versions[name] or "").split("+")[0] != pins[name]]
    if others:
        wanted = ", ".join(f"{name} {pins[name]}" for name in others)
        return yellow(f"{text}: tests were run with {wanted}", _SETUP, text)
    text = f"{text}; never run on a chip: {', '.join(UNPROVEN)}"
    return yellow(text, "compare the first steps with runtime.device=xla or cpu", text)


def _explain_chips(machine: Machine) -> str:
    """Explain which chips of the machine TorchTPU cannot open; empty if it opens all."""
    if not count_chips(machine):
        return ""
    chip = list_chips(machine)[0]
    if any("torch_tpu" not in GENERATIONS[name].stacks for name in chip.split(" or ")):
        return f"it has no support of {chip}"
    if any(path.parent.name == "vfio" for path in list_device_files(machine.root)):
        return ""
    return "it counts chips below /dev/vfio alone, and there are none"
