"""Fixtures of the doctor's tests."""

from __future__ import annotations

import http.server
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.doctor.machines import NOWHERE, Metadata, add_chip
from tools.doctor.machine import Machine


@pytest.fixture
def machine(tmp_path) -> Machine:
    """A laptop without accelerators: an empty bus, this Python, no cloud."""
    for folder in ("dev/shm", "proc/self", "sys/bus/pci/devices", "tmp", "site"):
        (tmp_path / folder).mkdir(parents=True)
    add_chip(tmp_path, "0000:00:01.0", "0x8086", "0x1234")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1 kB\nMemAvailable:   67108864 kB\n")
    (tmp_path / "proc/self/maps").write_text("7f00-7f01 r-xp /usr/lib/libc.so.6\n")
    return Machine(
        root=tmp_path,
        environment={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        site=[str(tmp_path / "site")],
        metadata_url=NOWHERE,
    )


@pytest.fixture
def metadata() -> Iterator[type[Metadata]]:
    """A real server on this machine; `metadata.url` is where it listens."""
    kind = type("Known", (Metadata,), {"known": {"instance/id": "1"}})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    kind.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield kind
    server.shutdown()
    server.server_close()


@pytest.fixture
def shared_machine(machine) -> Iterator[Machine]:
    """The same laptop where every user may look."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        shutil.copytree(machine.root, root)
        Path(folder).chmod(0o755)
        root.chmod(0o755)
        yield replace(machine, root=root)
