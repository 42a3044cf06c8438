"""Checks of the accelerators: what the kernel shows, who holds it, and one real step on each."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

from tools.doctor.machine import GREEN, RED, YELLOW, Finding, Machine
from utils.generations import PCI_VENDOR, name_chip

_PCI = "sys/bus/pci/devices"
# Left over from an experiment with parts of a slice, they hide chips from a whole run.
_PARTIAL = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "TPU_PROCESS_BOUNDS",
            "TPU_CHIPS_PER_PROCESS_BOUNDS")  # fmt: skip
_STEP = "tools.doctor.device_step"
_SLOW_MS = 2000.0


def check_tpu(machine: Machine) -> Finding:
    """TPU chips: on the PCI bus, as device files, and whether this user may open them."""
    try:
        kinds = _list_chips(machine)
        looked = len(machine.find(_PCI, "*"))
        files = list_device_files(machine)
    except OSError as error:
        text = f"could not look at the PCI bus and /dev: {error}"
        return Finding("tpu", YELLOW, text, "run the doctor on the machine, not in a sandbox")
    if not kinds and not files:
        return _report_no_tpu(machine, looked)
    name = ", ".join(sorted(set(kinds))) or "unknown kind"
    text = f"{len(kinds)} chips ({name}), {len(files)} device files"
    if not files:
        hint = "in a container add --privileged; else the TPU driver is not loaded: reboot"
        return Finding("tpu", RED, f"{text}: none below /dev/accel*, /dev/vfio", hint)
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        text = f"{text}: no permission for /{closed[0].relative_to(machine.root)}"
        return Finding("tpu", RED, text, "run as root, or in docker with --user 0 --privileged")
    if kinds and len(files) < len(kinds):
        return Finding("tpu", YELLOW, f"{text}: some chips have none", "reboot the machine")
    return Finding("tpu", GREEN, text, value=f"{len(files)} {name}")


def check_topology(machine: Machine) -> Finding:
    """What the environment says of this worker's place in a slice."""
    environment = machine.environment
    told = {name: environment[name] for name in sorted(environment) if name.startswith("TPU_")}
    text = ", ".join(f"{name}={value}" for name, value in told.items()) or "nothing is set"
    hosts = [host for host in told.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    worker = told.get("TPU_WORKER_ID", "")
    if worker and not worker.isdecimal():
        return Finding(
            "topology", RED, f"{text}: TPU_WORKER_ID is no number", "unset TPU_WORKER_ID"
        )
    if worker and hosts and int(worker) >= len(hosts):
        text = f"{text}: worker {worker} of {len(hosts)} hosts"
        return Finding("topology", RED, text, "unset TPU_WORKER_ID TPU_WORKER_HOSTNAMES")
    partial = [name for name in _PARTIAL if name in told]
    if partial:
        hint = f"unset {' '.join(partial)}"
        return Finding("topology", YELLOW, f"{text}: a run sees a part of the chips", hint)
    return Finding("topology", GREEN, text)


def check_busy(machine: Machine) -> Finding:
    """Which processes hold a TPU; a process that may not be looked into is counted, not ignored."""
    try:
        files = list_device_files(machine)
    except OSError as error:
        return Finding("tpu busy", YELLOW, f"could not look: {error}", "run the doctor by sudo")
    if not files:
        return Finding("tpu busy", GREEN, "no device file that could be held")
    names = {f"/{path.relative_to(machine.root)}" for path in files}
    holders, closed = _find_holders(machine, names)
    if holders:
        text = "; ".join(f"process {pid} ({what}) holds {name}" for pid, what, name in holders)
        return Finding("tpu busy", RED, text, f"if it is an orphan: kill {holders[0][0]}")
    lock = machine.root / "tmp/libtpu_lockfile"
    if lock.exists():
        text = "/tmp/libtpu_lockfile is there without a process that holds a TPU"
        return Finding("tpu busy", YELLOW, text, "sudo rm /tmp/libtpu_lockfile")
    if closed:
        text = f"nobody, as far as could be seen: {closed} processes of others were not to be read"
        return Finding("tpu busy", YELLOW, text, "run the doctor by sudo")
    return Finding("tpu busy", GREEN, f"{len(files)} device files, nobody holds one")


def check_step(machine: Machine) -> Finding:
    """A matmul and an all-reduce on every device, in a child with a time limit."""
    hosts = machine.environment.get("TPU_WORKER_HOSTNAMES", "").split(",")
    chips = count_chips(machine)
    if machine.get_version("torch") is None:
        return Finding("device step", RED, "not tried: no torch", "bash run_commands.sh setup")
    if chips and check_busy(machine).level == RED:
        hint = "see 'tpu busy'"
        return Finding("device step", YELLOW, "not tried: a process holds the TPU", hint)
    if chips and len(hosts) > 1 and not machine.requirements.in_pod:
        text = f"not tried: one worker of {len(hosts)}, all must take part"
        return Finding("device step", YELLOW, text, "python -m tools.doctor --tpu NAME")
    on_cpu = chips == 0 and "PJRT_DEVICE" not in machine.environment
    environment = {"PJRT_DEVICE": "CPU"} if on_cpu else {}
    answer = machine.run([machine.python, "-m", _STEP], timeout_s=180, **environment)
    steps = [json.loads(line) for line in answer.output.splitlines() if line.startswith("{")]
    if answer.code != 0 or not steps:
        hint = "see 'torch', 'tpu' and 'tpu busy'; then reboot the machine"
        return Finding("device step", RED, f"failed: {answer.reason}", hint)
    return _explain_steps(steps, chips or 0)


def check_cuda(machine: Machine) -> Finding:
    """GPUs as the driver, PyTorch and NCCL see them, where there is one."""
    try:
        cards = len(machine.find("dev", "nvidia[0-9]*"))
    except OSError as error:
        return Finding("cuda", YELLOW, f"could not look at /dev: {error}")
    program = machine.find_program("nvidia-smi")
    if not cards and program is None:
        return Finding("cuda", GREEN, "no GPU: neither /dev/nvidia* nor nvidia-smi")
    if program is None:
        hint = "install the driver's tools, or use the CUDA image of the machine"
        return Finding("cuda", YELLOW, f"{cards} device files, but no nvidia-smi", hint)
    words = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    smi = machine.run(words, timeout_s=30)
    if smi.code != 0:
        hint = "the driver does not answer: reboot, or reinstall it"
        return Finding("cuda", RED, f"nvidia-smi failed: {smi.reason}", hint)
    seen = [line.strip() for line in smi.output.splitlines() if line.strip()]
    return _explain_cuda(machine, seen)


def count_chips(machine: Machine) -> int | None:
    """TPU chips on the PCI bus; none: it cannot be read."""
    try:
        return len(_list_chips(machine))
    except OSError:
        return None


def list_device_files(machine: Machine) -> list[Path]:
    """What a TPU process opens: /dev/accel0 (v4), /dev/vfio/0 (v5e and later).

    Raises:
      OSError: a directory is there and cannot be read.
    """
    found = []
    for folder, pattern in (("dev", "accel[0-9]*"), ("dev/vfio", "[0-9]*")):
        with contextlib.suppress(FileNotFoundError):
            found += machine.find(folder, pattern)
    return found


def _list_chips(machine: Machine) -> list[str]:
    """The generation of every TPU chip."""
    found = []
    for device in machine.find(_PCI, "*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "device").read_text().strip()
        except OSError:
            continue
        names = name_chip(kind)
        if vendor == PCI_VENDOR and names:
            found.append(" or ".join(names))
    return found


def _report_no_tpu(machine: Machine, looked: int) -> Finding:
    """No chip: fine on a laptop, not on a machine that says it is a TPU VM."""
    text = f"no TPU: {looked} PCI devices, none of them one, and no device file"
    signs = [name for name in ("TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")
             if machine.environment.get(name)]  # fmt: skip
    if machine.environment.get("PJRT_DEVICE") == "TPU":
        signs.append("PJRT_DEVICE=TPU")
    try:
        kind, _ = machine.ask_metadata("instance/attributes/accelerator-type")
        signs.append(f"accelerator type {kind} in the metadata")
    except OSError:
        pass
    if signs:
        text = f"{text}; yet {', '.join(signs)}"
        return Finding("tpu", RED, text, "in a container add --privileged; else reboot the TPU VM")
    return Finding("tpu", GREEN, text)


def _find_holders(machine: Machine, names: set[str]) -> tuple[list[tuple[str, str, str]], int]:
    """(process, its command, device file) of those that have one open; how many cannot be read."""
    holders, closed = [], 0
    for process in machine.find("proc", "[0-9]*"):
        try:
            held = sorted(_list_open_files(process) & names)
        except PermissionError:
            closed += 1
            continue
        except OSError:  # ended meanwhile
            continue
        if held:
            holders.append((process.name, _describe_process(process), held[0]))
    return holders, closed


def _describe_process(process: Path) -> str:
    """Its command, and whether nobody waits for it any more."""
    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()[:60]
    with contextlib.suppress(OSError, IndexError):
        if (process / "stat").read_text().rpartition(")")[2].split()[1] == "1":
            return f"{command}, an orphan"
    return command


def _list_open_files(process: Path) -> set[str]:
    found = set()
    for entry in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(entry.readlink()))
    return found


def _explain_steps(steps: list[dict], chips: int) -> Finding:
    wrong = [step for step in steps if not step["correct"]]
    shown = "; ".join(
        f"{step['device']} matmul {step['matmul_ms']:.1f} ms, all-reduce over {step['world']} "
        f"{step['all_reduce_ms']:.1f} ms"
        for step in steps[:8]
    )
    if wrong:
        text = f"{wrong[0]['device']} computed a wrong value: {shown}"
        return Finding("device step", RED, text, "stop using this machine; report the chip")
    on_tpu = [step for step in steps if step["device"].startswith("tpu")]
    if chips and not on_tpu:
        text = f"{chips} TPU chips, but PJRT gave other devices: {shown}"
        return Finding("device step", RED, text, "see 'torch' for libtpu and 'variables'")
    slow = [s for s in steps if max(s["matmul_ms"], s["all_reduce_ms"]) > _SLOW_MS]
    if slow:
        hint = "look for other processes; on a pod, at the odd worker"
        return Finding("device step", YELLOW, f"slow: {shown}", hint)
    return Finding("device step", GREEN, shown)


def _explain_cuda(machine: Machine, seen: list[str]) -> Finding:
    text = f"{len(seen)} GPUs ({seen[0]})" if seen else "nvidia-smi lists no GPU"
    code = (
        "import torch; print(torch.cuda.device_count(), torch.version.cuda, "
        "'.'.join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else 'none')"
    )
    answer = machine.run([machine.python, "-c", code], timeout_s=120)
    found = re.search(r"^(\d+) (\S+) (\S+)$", answer.output.strip(), re.MULTILINE)
    if answer.code != 0 or not found:
        text = f"{text}; PyTorch could not be asked: {answer.reason}"
        return Finding("cuda", RED, text, "see 'torch'")
    count, cuda, nccl = found.groups()
    text = f"{text}; PyTorch sees {count}, CUDA {cuda}, NCCL {nccl}"
    if int(count) < len(seen):
        hint = "a build of torch with CUDA, a newer driver, or unset CUDA_VISIBLE_DEVICES"
        return Finding("cuda", RED, text, hint)
    return Finding("cuda", GREEN, text, value=f"{count} {cuda} {nccl}")
