"""Checks of the accelerators: device files, processes that hold them, and a step on each."""

from __future__ import annotations

import contextlib
import json
import os
import re
from typing import TYPE_CHECKING

from tools.doctor.machine import RED, Finding, Machine, green, red, yellow
from utils.device_use import find_holders, list_device_files
from utils.generations import PCI_VENDOR, name_chip

if TYPE_CHECKING:
    from tools.doctor.device_step import DeviceStep

_PCI = "sys/bus/pci/devices"
# Of experiments with parts of a slice; they hide chips from a run.
_PARTIAL = (
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "TPU_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
)
_STEP = "tools.doctor.device_step"
_SLOW_MS = 2000.0


def check_tpu(machine: Machine) -> Finding:
    """Check TPU chips: on the PCI bus, as device files, and whether this user may open them."""
    try:
        chips = list_chips(machine)
        pci_devices = len(machine.find(_PCI, "*"))
        files = list_device_files(machine.root)
    except OSError as error:
        text = f"could not look at the PCI bus and /dev: {error}"
        return yellow(text, "run the doctor on the machine, not in a sandbox")
    if not chips and not files:
        return _report_no_tpu(machine, pci_devices)
    name = ", ".join(sorted(set(chips))) or "unknown kind"
    text = f"{len(chips)} chips ({name}), {len(files)} device files"
    if not files:
        hint = "in a container add --privileged; else the TPU driver is not loaded: reboot"
        return red(f"{text}: none below /dev/accel*, /dev/vfio", hint)
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        text = f"{text}: no permission for /{closed[0].relative_to(machine.root)}"
        return red(text, "run as root, or in docker with --user 0 --privileged")
    if chips and len(files) < len(chips):
        return yellow(f"{text}: some chips have none", "reboot the machine")
    return green(text, value=f"{len(files)} {name}")


def check_topology(machine: Machine) -> Finding:
    """Check the variables of this worker's place in a slice."""
    variables = {k: v for k, v in sorted(machine.environment.items()) if k.startswith("TPU_")}
    text = ", ".join(f"{name}={value}" for name, value in variables.items()) or "nothing is set"
    hosts = [host for host in variables.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    worker = variables.get("TPU_WORKER_ID", "")
    if worker and not worker.isdecimal():
        return red(f"{text}: TPU_WORKER_ID is no number", "unset TPU_WORKER_ID")
    if worker and hosts and int(worker) >= len(hosts):
        text = f"{text}: worker {worker} of {len(hosts)} hosts"
        return red(text, "unset TPU_WORKER_ID TPU_WORKER_HOSTNAMES")
    partial = [name for name in _PARTIAL if name in variables]
    if partial:
        return yellow(f"{text}: a run sees a part of the chips", f"unset {' '.join(partial)}")
    return green(text)


def check_busy(machine: Machine) -> Finding:
    """Check which processes hold a TPU; unreadable processes are counted."""
    try:
        files = list_device_files(machine.root)
    except OSError as error:
        return yellow(f"could not look: {error}", "run the doctor by sudo")
    if not files:
        return green("no device file that could be held")
    names = {f"/{path.relative_to(machine.root)}" for path in files}
    holders, closed = find_holders(names, machine.root)
    if holders:
        text = "; ".join(f"process {pid} ({what}) holds {name}" for pid, what, name in holders)
        return red(text, f"if it is an orphan: kill {holders[0][0]}")
    lock = machine.root / "tmp/libtpu_lockfile"
    if lock.exists():
        text = "/tmp/libtpu_lockfile is there without a process that holds a TPU"
        return yellow(text, "sudo rm /tmp/libtpu_lockfile")
    if closed:
        text = f"no holder found, but {closed} processes of others were not to be read"
        return yellow(text, "run the doctor by sudo")
    return green(f"{len(files)} device files, no process holds one")


def check_step(machine: Machine) -> Finding:
    """Check a matmul and an all-reduce on every device, in a child with a time limit."""
    hosts = machine.environment.get("TPU_WORKER_HOSTNAMES", "").split(",")
    chips = count_chips(machine)
    if machine.get_version("torch") is None:
        return red("not tried: no torch", "bash run_commands.sh setup")
    if chips and check_busy(machine).level == RED:
        return yellow("not tried: a process holds the TPU", "see 'tpu busy'")
    if chips and len(hosts) > 1 and not machine.requirements.in_pod:
        text = f"not tried: one worker of {len(hosts)}, all must take part"
        return yellow(text, "python -m tools.doctor --tpu NAME")
    on_cpu = chips == 0 and "PJRT_DEVICE" not in machine.environment
    environment = {"PJRT_DEVICE": "CPU"} if on_cpu else {}
    done = machine.run([machine.python, "-m", _STEP], timeout_s=180, **environment)
    steps = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    if done.code != 0 or not steps:
        hint = "see 'torch', 'tpu' and 'tpu busy'; then reboot the machine"
        return red(f"failed: {done.reason}", hint)
    return _explain_steps(steps, chips or 0)


def check_cuda(machine: Machine) -> Finding:
    """Check GPUs as the driver, PyTorch and NCCL see them."""
    try:
        cards = len(machine.find("dev", "nvidia[0-9]*"))
    except OSError as error:
        return yellow(f"could not look at /dev: {error}")
    program = machine.find_program("nvidia-smi")
    if not cards and program is None:
        return green("no GPU: neither /dev/nvidia* nor nvidia-smi")
    if program is None:
        hint = "install the driver's tools, or use the CUDA image of the machine"
        return yellow(f"{cards} device files, but no nvidia-smi", hint)
    words = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    smi = machine.run(words, timeout_s=30)
    if smi.code != 0:
        return red(f"nvidia-smi failed: {smi.reason}", "reboot, or reinstall the driver")
    seen = [line.strip() for line in smi.output.splitlines() if line.strip()]
    return _explain_cuda(machine, seen)


def count_chips(machine: Machine) -> int | None:
    """Count the TPU chips on the PCI bus; None if it cannot be read."""
    try:
        return len(list_chips(machine))
    except OSError:
        return None


def list_chips(machine: Machine) -> list[str]:
    """List the generation of every TPU chip."""
    chips = []
    for device in machine.find(_PCI, "*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            names = name_chip((device / "device").read_text().strip())
        except OSError:
            continue
        if vendor == PCI_VENDOR and names:
            chips.append(" or ".join(names))
    return chips


def _report_no_tpu(machine: Machine, pci_devices: int) -> Finding:
    """Report that there is no chip: fine on a laptop, not on a TPU VM."""
    text = f"no TPU: {pci_devices} PCI devices, no TPU among them, and no device file"
    names = ("TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")
    signs = [name for name in names if machine.environment.get(name)]
    if machine.environment.get("PJRT_DEVICE") == "TPU":
        signs.append("PJRT_DEVICE=TPU")
    with contextlib.suppress(OSError):
        name, _ = machine.fetch_metadata("instance/attributes/accelerator-type")
        signs.append(f"accelerator type {name} in the metadata")
    if signs:
        text = f"{text}; yet {', '.join(signs)}"
        return red(text, "in a container add --privileged; else reboot the TPU VM")
    return green(text)


def _explain_steps(steps: list[DeviceStep], chips: int) -> Finding:
    wrong = [step for step in steps if not step["correct"]]
    shown = "; ".join(
        f"{step['device']} matmul {step['matmul_ms']:.1f} ms, all-reduce over {step['world']} "
        f"{step['all_reduce_ms']:.1f} ms"
        for step in steps[:8]
    )
    if wrong:
        text = f"{wrong[0]['device']} computed a wrong value: {shown}"
        return red(text, "stop using this machine; report the chip")
    on_tpu = [step for step in steps if step["device"].startswith("tpu")]
    if chips and not on_tpu:
        text = f"{chips} TPU chips, but PJRT gave other devices: {shown}"
        return red(text, "see 'torch', 'torch_tpu' and 'variables'")
    slow = [s for s in steps if max(s["matmul_ms"], s["all_reduce_ms"]) > _SLOW_MS]
    if slow:
        return yellow(f"slow: {shown}", "look for other processes; on a pod, at the odd worker")
    return green(shown)


def _explain_cuda(machine: Machine, seen: list[str]) -> Finding:
    text = f"{len(seen)} GPUs ({seen[0]})" if seen else "nvidia-smi lists no GPU"
    code = (
        "import torch; print(torch.cuda.device_count(), torch.version.cuda, "
        "'.'.join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else 'none')"
    )
    done = machine.run([machine.python, "-c", code], timeout_s=120)
    match = re.search(r"^(\d+) (\S+) (\S+)$", done.output.strip(), re.MULTILINE)
    if done.code != 0 or not match:
        return red(f"{text}; PyTorch could not be asked: {done.reason}", "see 'torch'")
    count, cuda, nccl = match.groups()
    text = f"{text}; PyTorch sees {count}, CUDA {cuda}, NCCL {nccl}"
    if int(count) < len(seen):
        hint = "a build of torch with CUDA, a newer driver, or unset CUDA_VISIBLE_DEVICES"
        return red(text, hint)
    return green(text, value=f"{count} {cuda} {nccl}")
