"""Checks of what is installed and set: Python, the torch family, TensorFlow, NumPy, variables."""

from __future__ import annotations

import re
from importlib.metadata import Distribution

from tools.doctor.devices import count_chips
from tools.doctor.machine import GREEN, RED, YELLOW, Finding, Machine, green, red, yellow

_SETUP = "bash run_commands.sh setup"
# In the order of a run: TensorFlow before torch_xla aborts Python. Their libraries clash, too,
# so torch_xla's Python part, half of the time, is left to the check of a device's step; TensorFlow
# is imported as in a run, without Keras.
_TENSORFLOW = "from big_vision.tensorflow_setup import import_tensorflow; import_tensorflow()"
_IMPORTS = f"import torch, _XLAC; {_TENSORFLOW}"
_IMPORTS_CPU = f"import torch; {_TENSORFLOW}"
_CLASHING = ("numpy", "protobuf")
_TCMALLOC = [f"usr/lib/x86_64-linux-gnu/libtcmalloc{form}.so.4" for form in ("_minimal", "")]
# Variable -> (effect, level if it is set).
_HARMFUL = {
    "XLA_USE_BF16": ("puts weights and moments into bf16; use runtime.precision: bf16", RED),
    "XLA_DOWNCAST_BF16": ("puts weights into bf16; use runtime.precision: bf16", RED),
    "XLA_USE_F16": ("puts weights and moments into fp16", RED),
    "XLA_IR_DEBUG": ("records a stack for every op: slow", YELLOW),
    "XLA_HLO_DEBUG": ("records a stack for every op: slow", YELLOW),
    "XLA_SAVE_TENSORS_FILE": ("writes every graph to a file: slow", YELLOW),
    "PT_XLA_DEBUG": ("analyses every graph: slow", YELLOW),
    "PT_XLA_DEBUG_LEVEL": ("analyses every graph: slow", YELLOW),
    "XLA_SYNC_WAIT": ("makes every step wait for its end: slow", YELLOW),
    "XLA_USE_EAGER_DEBUG_MODE": ("runs op by op: slow", YELLOW),
    "XLA_MAX_ASYNC_QUEUE": ("torch_xla 2.9 fails on it: it is not taken as a number", RED),
    "CUDA_LAUNCH_BLOCKING": ("makes every kernel wait for its end: slow", YELLOW),
}


def check_python(machine: Machine) -> Finding:
    """Check that Python is a final 3.11 to 3.13."""
    version = ".".join(str(part) for part in machine.python_version[:3])
    if not (3, 11) <= tuple(machine.python_version[:2]) <= (3, 13):
        text = f"{version} at {machine.python}, not 3.11 to 3.13"
        return red(text, f"install python3.11, then {_SETUP}", version)
    if machine.python_version[3] != "final":
        text = f"{version} is a pre-release ({machine.python_version[3]})"
        hint = "install a final 3.11, for example with conda, and set PYTHON"
        return yellow(text, hint, version)
    return green(f"{version} at {machine.python}", value=version)


def check_torch(machine: Machine) -> Finding:
    """Check that torch, torchvision, torch_xla and libtpu fit, by their metadata."""
    names = ("torch", "torchvision", "torch_xla", "libtpu")
    versions = {name: machine.get_version(name) for name in names}
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
    level, reason, hint = _explain_torch(machine, versions)
    shown = f"{text}: {reason}" if reason else text
    return Finding("", level, shown, hint, ", ".join(str(v) for v in versions.values()))


def check_imports(machine: Machine) -> Finding:
    """Check imports of torch_xla and then TensorFlow, in a child, as a clash aborts Python."""
    builds = [n for n in ("tensorflow-cpu", "tensorflow", "tf-nightly") if machine.get_version(n)]
    if not builds:
        return red("TensorFlow is not installed: no data.source of image files can be read", _SETUP)
    if len(builds) > 1:
        hint = f"pip uninstall -y {' '.join(builds)}, then {_SETUP}"
        return red(f"{' and '.join(builds)} overwrite each other's files", hint)
    first = "torch_xla" if machine.get_version("torch_xla") else "torch"
    code = _IMPORTS if first == "torch_xla" else _IMPORTS_CPU
    done = machine.run([machine.python, "-c", code], timeout_s=300, PJRT_DEVICE="CPU")
    version = f"{builds[0]} {machine.get_version(builds[0])}"
    if done.code != 0:
        text = f"{version}: importing {first}, then tensorflow failed: {done.reason}"
        return red(text, f"rm -r .venv, then {_SETUP}", version)
    text = f"{version} after {first}: imports in {done.seconds:.1f} s"
    if builds[0] != "tensorflow-cpu":
        hint = f"pip uninstall -y {builds[0]}; pip install tensorflow-cpu"
        return yellow(f"{text}; a build with GPU or TPU", hint, version)
    return green(text, value=version)


def check_clashes(machine: Machine) -> Finding:
    """Check the requirements of installed packages on NumPy and protobuf."""
    versions = {name: machine.get_version(name) for name in _CLASHING}
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
    try:
        clashes = _find_clashes(machine, versions)
    except ImportError as error:
        return yellow(f"could not look: {error}", "pip install packaging")
    if clashes:
        text = f"{text}: {clashes[0]}"
        more = f" (and {len(clashes) - 1} more)" if len(clashes) > 1 else ""
        return red(text + more, f"rm -r .venv, then {_SETUP}")
    if not versions["numpy"]:
        return red(text, _SETUP)
    return green(f"{text}: no package demands others", value=text)


def check_allocator(machine: Machine) -> Finding:
    """Check that tcmalloc is loaded: the input pipeline allocates much and often."""
    preload = machine.environment.get("LD_PRELOAD", "")
    try:
        loaded = sorted(set(re.findall(r"\S*tcmalloc\S*", machine.read("proc/self/maps"))))
    except OSError as error:
        return yellow(f"could not look: {error}")
    if loaded:
        return green(f"loaded: {loaded[0]}")
    libraries = [f"/{path}" for path in _TCMALLOC if (machine.root / path).exists()]
    if "tcmalloc" in preload:
        text, hint = f"LD_PRELOAD names {preload}, which was not loaded", "correct the path"
    elif libraries:
        text, hint = "installed, but not loaded", f"export LD_PRELOAD={libraries[0]}"
    else:
        text = "not installed"
        hint = "sudo apt-get install libtcmalloc-minimal4, then export LD_PRELOAD=<its path>"
    return yellow(f"{text}: host memory may grow and input be slower", hint)


def check_variables(machine: Machine) -> Finding:
    """Check that no variable is set that harms a run."""
    environment = machine.environment
    bad = []
    for name, (effect, level) in _HARMFUL.items():
        if environment.get(name, "") not in ("", "0"):
            bad.append((level, name, f"{name}={environment[name]} {effect}"))
    stale = sorted(name for name in environment if name.startswith("XRT_"))
    if stale:
        bad.append((YELLOW, " ".join(stale), f"{stale[0]} is of XRT, gone since torch_xla 2.1"))
    pjrt = environment.get("PJRT_DEVICE", "")
    chips = count_chips(machine)
    if pjrt not in ("", "CPU", "TPU"):
        bad.append((RED, "PJRT_DEVICE", f"PJRT_DEVICE={pjrt} is no device of torch_xla 2.9"))
    elif pjrt == "CPU" and chips:
        bad.append((YELLOW, "PJRT_DEVICE", f"PJRT_DEVICE=CPU leaves {chips} TPU chips unused"))
    elif pjrt == "TPU" and chips == 0:
        bad.append((RED, "PJRT_DEVICE", "PJRT_DEVICE=TPU without a TPU chip on the PCI bus"))
    if chips and environment.get("TPU_STANDIN"):
        bad.append((YELLOW, "TPU_STANDIN", f"TPU_STANDIN leaves {chips} TPU chips unused"))
    if environment.get("HDF5_USE_FILE_LOCKING", "FALSE").upper() in ("TRUE", "1", "BEST_EFFORT"):
        text = "HDF5_USE_FILE_LOCKING makes HDF5 on network file systems fail or hang"
        bad.append((YELLOW, "HDF5_USE_FILE_LOCKING", text))
    if not bad:
        return green("none that harms a run")
    level = RED if any(entry[0] == RED for entry in bad) else YELLOW
    names = " ".join(entry[1] for entry in bad)
    return Finding("", level, "; ".join(entry[2] for entry in bad), f"unset {names}")


def _explain_torch(machine: Machine, versions: dict[str, str | None]) -> tuple[str, str, str]:
    torch, xla = versions["torch"], versions["torch_xla"]
    chips = count_chips(machine)
    if torch is None:
        return RED, "no PyTorch", _SETUP
    if xla is not None and _get_series(torch) != _get_series(xla):
        wanted = ".".join(_strip(xla).split(".")[:3])
        pair = f"pip install torch=={wanted} torch_xla=={wanted}"
        return RED, f"torch_xla {xla} is built against torch {wanted}", pair
    pinned = _find_pin(machine.get_distribution("torchvision"), "torch")
    if pinned and _strip(torch) != pinned:
        reason = f"torchvision {versions['torchvision']} is built against torch {pinned}"
        return RED, reason, _SETUP
    if machine.get_version("torch_tpu") is not None:
        return GREEN, "", ""  # see `check_torch_tpu`
    if xla is None:
        return (RED if chips else YELLOW), "no torch_xla: no TPU and no XLA runtime", _SETUP
    wanted = _find_pin(machine.get_distribution("torch_xla"), "libtpu")
    if chips and versions["libtpu"] is None:
        return RED, f"{chips} TPU chips but no libtpu", f"{_SETUP} --tpu"
    if wanted and versions["libtpu"] not in (None, wanted):
        return YELLOW, f"torch_xla {xla} was made with libtpu {wanted}", f"{_SETUP} --tpu"
    return GREEN, "", ""


def _find_pin(package: Distribution | None, name: str) -> str | None:
    """Return the version that a package's requirements pin another to, extras included."""
    lines = (package.requires if package else None) or []
    matches = (re.match(rf"{name}\s*\(?==\s*([\w.]+)", line) for line in lines)
    return next((match[1] for match in matches if match), None)


def _find_clashes(machine: Machine, versions: dict[str, str | None]) -> list[str]:
    import importlib.metadata

    from packaging.requirements import Requirement

    clashes = []
    for package in importlib.metadata.distributions(path=list(machine.site)):
        for line in package.requires or []:
            if not line.lower().startswith(_CLASHING):
                continue
            demand = Requirement(line)
            have = versions.get(demand.name.lower())
            applies = demand.marker is None or demand.marker.evaluate({"extra": ""})
            if have and applies and not demand.specifier.contains(have, prereleases=True):
                demanded = f"{demand.name} {demand.specifier}"
                clashes.append(f"{package.metadata['Name']} {package.version} demands {demanded}")
    return sorted(set(clashes))


def _get_series(version: str) -> list[str]:
    return _strip(version).split(".")[:2]


def _strip(version: str) -> str:
    return version.split("+", maxsplit=1)[0]
