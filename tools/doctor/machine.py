"""The machine as the doctor's checks see it, and what they find.

Standard library alone: the doctor works where nothing is installed yet.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


GREEN, YELLOW, RED = "green", "yellow", "red"
GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
      hint: the way out, for what is not green.
      value: what must be the same on every worker of a pod; empty: nothing.
    """

    name: str
    level: str
    text: str
    hint: str = ""
    value: str = ""


@dataclass(frozen=True)
class Requirements:
    """What the user is going to do.

    Attributes:
      output: run store, a directory or a URL.
      processes: input processes of this host; 0: one for each TPU chip, at least one.
      in_pod: the other workers run the same checks now.
    """

    data_dir: str = ""
    data_name: str = ""
    output: str = "runs"
    compile_cache: str = "auto"
    shuffle_gib: float = 1.0
    processes: int = 0
    in_pod: bool = False


@dataclass(frozen=True)
class Answer:
    """How a program ended; `code` is none where it did not: `error` says why."""

    code: int | None
    output: str
    error: str
    seconds: float

    @property
    def reason(self) -> str:
        """The last line that tells what went wrong."""
        lines = [line.strip() for line in f"{self.output}\n{self.error}".splitlines()]
        lines = [line for line in lines if line]
        if self.code is not None and self.code < 0:
            lines.append(f"ended by signal {-self.code}")
        return lines[-1][:200] if lines else f"exit code {self.code}"


@dataclass(frozen=True)
class Machine:
    """Where checks look; every place can be another one in a test.

    Attributes:
      root: holds dev, proc and sys.
      site: directories with installed packages.
      metadata_url: of the cloud's metadata server.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable
    python_version: Sequence[object] = tuple(sys.version_info)
    site: Sequence[str] = tuple(sys.path)
    metadata_url: str = "http://metadata.google.internal"
    requirements: Requirements = field(default_factory=Requirements)

    def find(self, folder: str, pattern: str) -> list[Path]:
        """Paths below a directory of this machine, in order.

        Raises:
          OSError: the directory cannot be read.
        """
        return sorted(p for p in (self.root / folder).iterdir() if Path(p.name).match(pattern))

    def read(self, path: str) -> str:
        """A file of this machine.

        Raises:
          OSError: it cannot be read.
        """
        return (self.root / path).read_text(errors="replace")

    def get_version(self, name: str) -> str | None:
        """Version of an installed package; none: it is not there."""
        found = self.get_distribution(name)
        return found.version if found else None

    def get_distribution(self, name: str) -> importlib.metadata.Distribution | None:
        """An installed package; none: it is not there."""
        found = importlib.metadata.distributions(name=name, path=list(self.site))
        return next(iter(found), None)

    def run(self, words: Sequence[str], *, timeout_s: float = 60.0, **environment: str) -> Answer:
        """Run a program to its end, or to the end of our patience."""
        start = time.monotonic()
        try:
            done = subprocess.run(
                list(words), cwd=ROOT, env={**self.environment, **environment},
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Answer(None, "", f"did not end within {timeout_s:g} s", timeout_s)
        except OSError as error:
            return Answer(None, "", str(error), time.monotonic() - start)
        return Answer(done.returncode, done.stdout, done.stderr, time.monotonic() - start)

    def find_program(self, name: str) -> str | None:
        """Where a program is on this machine's PATH."""
        return shutil.which(name, path=self.environment.get("PATH", ""))

    def ask_metadata(self, key: str) -> tuple[str, str]:
        """A value of the cloud's metadata server and the time it tells.

        Raises:
          OSError: there is no such server, or it does not know the key.
        """
        url = f"{self.metadata_url}/computeMetadata/v1/{key}"
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=2) as answer:
            return answer.read().decode().strip(), answer.headers.get("Date", "")

    def get_disk(self, path: Path) -> tuple[float, float]:
        """Total and free GiB of the file system that holds a path, there already or not."""
        while not path.exists():
            path = path.parent
        usage = shutil.disk_usage(path)
        return usage.total / GIB, usage.free / GIB

    def get_open_files(self) -> int:
        """The limit of open files; -1: none."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
