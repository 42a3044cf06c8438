"""Machines for the doctor to look at: planted files, real processes, a real metadata server."""

from __future__ import annotations

import email.utils
import http.server
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

from tools.doctor.machine import Finding, Machine

NOWHERE = "http://127.0.0.1:9"  # nobody listens on the discard port


def run_unprivileged(check, machine: Machine) -> Finding:
    """A check as a user who is not root, in a child."""
    # Not a fork: other tests' libraries have threads here, whose locks a copy would wait for. The
    # check is imported before its rights are gone: that user may not be able to read the tree.
    with multiprocessing.get_context("spawn").Pool(1, _become_nobody, (check,)) as pool:
        return pool.apply(check, (machine,))


def _become_nobody(check) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)


def add_chip(root: Path, place: str, vendor: str = "0x1ae0", kind: str = "0x0063") -> None:
    folder = root / "sys/bus/pci/devices" / place
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{kind}\n")


def add_tpu(machine: Machine, chips: int = 4) -> None:
    """A v5e host: chips on the bus, device files below /dev/vfio."""
    for number in range(chips):
        add_chip(machine.root, f"0000:00:1{number}.0")
        (machine.root / "dev/vfio").mkdir(exist_ok=True)
        (machine.root / "dev/vfio" / str(number)).touch()


def add_package(machine: Machine, name: str, version: str, *requires: str) -> None:
    """What pip leaves behind: a dist-info directory."""
    folder = Path(machine.site[0]) / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


def add_torch(machine: Machine, torch: str = "2.9.0", xla: str = "2.9.0") -> None:
    add_package(machine, "torch", torch)
    add_package(machine, "torchvision", "0.24.0", "torch (==2.9.0)")
    add_package(machine, "torch_xla", xla, 'libtpu==0.0.21; extra == "tpu"')


def with_environment(machine: Machine, **changes: str) -> Machine:
    return replace(machine, environment={**machine.environment, **changes})


def with_program(machine: Machine, name: str, text: str) -> Machine:
    """A program of this machine, first on its PATH."""
    folder = machine.root / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)
    changed = with_environment(machine, PATH=f"{folder}:{machine.environment['PATH']}")
    return replace(changed, python=str(folder / name)) if name == "python" else changed


def with_wishes(machine: Machine, **changes) -> Machine:
    return replace(machine, requirements=replace(machine.requirements, **changes))


class Metadata(http.server.BaseHTTPRequestHandler):
    """The cloud's metadata server: what it knows, and the time it believes in."""

    known: dict[str, str]
    ahead_s = 0.0

    def do_GET(self) -> None:
        key = self.path.removeprefix("/computeMetadata/v1/")
        if self.headers.get("Metadata-Flavor") != "Google" or key not in self.known:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.known[key].encode())

    def date_time_string(self, timestamp=None) -> str:
        return email.utils.formatdate(time.time() + self.ahead_s, usegmt=True)

    def log_message(self, *_: object) -> None:
        pass
