"""The machine that the doctor checks, and findings of the checks.

Standard library alone: the doctor works before anything is installed.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from utils.storage.installation import get_workplace

GREEN, YELLOW, RED = "green", "yellow", "red"
GIB = 1 << 30
# Where torch_tpu is installed, importing torch opens libtpu without it.
_NO_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    name: str  # set by `examine`
    level: str
    text: str
    hint: str = ""  # the way out, unless green
    value: str = ""  # must be the same on every worker of a pod


green, yellow, red = (partial(Finding, "", level) for level in (GREEN, YELLOW, RED))


@dataclass(frozen=True)
class Requirements:
    """Settings of the planned run."""

    data_dir: str = ""
    data_name: str = ""
    output: str = "runs"  # run store, a directory or a URL
    compile_cache: str = "auto"
    shuffle_gib: float = 1.0
    processes: int = 0  # input processes of this host; 0 for one for each TPU chip, at least one
    in_pod: bool = False  # whether the other workers run the same checks now


@dataclass(frozen=True)
class ProgramResult:
    """Exit code and output of a program; the code is None if it did not end, see `error`."""

    code: int | None
    output: str
    error: str
    seconds: float

    @property
    def reason(self) -> str:
        """The last line of the output, which usually is the error."""
        lines = [line.strip() for line in f"{self.output}\n{self.error}".splitlines()]
        lines = [line for line in lines if line]
        if self.code is not None and self.code < 0:
            lines.append(f"ended by signal {-self.code}")
        return lines[-1][:200] if lines else f"exit code {self.code}"


@dataclass(frozen=True)
class Machine:
    """The machine under examination; tests replace its parts."""

    root: Path = Path("/")  # directory of dev, proc and sys
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable
    python_version: Sequence[int | str] = tuple(sys.version_info)
    site: Sequence[str] = tuple(sys.path)  # directories of installed packages
    metadata_url: str = "http://metadata.google.internal"  # of the cloud's metadata server
    requirements: Requirements = field(default_factory=Requirements)

    def find(self, folder: str, pattern: str) -> list[Path]:
        """List paths in a directory of this machine, in order; an OSError if it cannot be read."""
        return sorted(p for p in (self.root / folder).iterdir() if Path(p.name).match(pattern))

    def read(self, path: str) -> str:
        """Read a file of this machine; an OSError if it cannot be read."""
        return (self.root / path).read_text(errors="replace")

    def get_version(self, name: str) -> str | None:
        """Return the version of a package, or None if it is not installed."""
        package = self.get_distribution(name)
        return package.version if package else None

    def get_distribution(self, name: str) -> importlib.metadata.Distribution | None:
        """Return a package, or None if it is not installed."""
        return next(iter(importlib.metadata.distributions(name=name, path=list(self.site))), None)

    def run(
        self, words: Sequence[str], *, timeout_s: float = 60.0, **environment: str
    ) -> ProgramResult:
        """Run a program to its end, at most for `timeout_s`."""
        start = time.monotonic()
        try:
            done = subprocess.run(
                list(words),
                cwd=get_workplace(),
                env={**_NO_AUTOLOAD, **self.environment, **environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return ProgramResult(None, "", f"did not end within {timeout_s:g} s", timeout_s)
        except OSError as error:
            return ProgramResult(None, "", str(error), time.monotonic() - start)
        return ProgramResult(done.returncode, done.stdout, done.stderr, time.monotonic() - start)

    def find_program(self, name: str) -> str | None:
        """Return the path of a program on this machine's PATH, or None."""
        return shutil.which(name, path=self.environment.get("PATH", ""))

    def fetch_metadata(self, key: str) -> tuple[str, str]:
        """Fetch a value of the cloud's metadata server, and its date, or raise an OSError."""
        url = f"{self.metadata_url}/computeMetadata/v1/{key}"
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=2) as response:
            return response.read().decode().strip(), response.headers.get("Date", "")

    def get_disk(self, path: Path) -> tuple[float, float]:
        """Return total and free GiB of the file system of a path, which may not exist yet."""
        while not path.exists():
            path = path.parent
        usage = shutil.disk_usage(path)
        return usage.total / GIB, usage.free / GIB

    def get_open_files(self) -> int:
        """Return the limit of open files; -1 if unlimited."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
