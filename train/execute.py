"""Runs commands, or prints them in a dry run; no other module starts one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from train.commands import show
from utils.errors import UserError
from utils.storage.installation import ROOT, is_installed

# Programs that a person installs, with the name or the way to get each.
_PROGRAMS = {
    "gcloud": "Google Cloud's command line",
    "sky": "SkyPilot: pip install 'skypilot[gcp]'",
    "docker": "Docker",
    "kubectl": "kubectl, by gcloud components install kubectl",
    "torchrun": "PyTorch's launcher: bash run_commands.sh setup",
    "git": "git",
    "sbatch": "Slurm, or log in to its head node",
    "squeue": "Slurm, or log in to its head node",
    "ssh": "the OpenSSH client",
    "scp": "the OpenSSH client",
}

_REASON_LENGTH = 1000


@dataclass(frozen=True)
class CommandResult:
    """How a command ended and what it wrote."""

    code: int
    output: str
    error: str

    @property
    def reason(self) -> str:
        """The cause of a failure: gcloud's last error with the lines after it, or one line."""
        lines = [line.strip() for line in (self.error or self.output).splitlines() if line.strip()]
        starts = [number for number, line in enumerate(lines) if line.startswith("ERROR: (gcloud")]
        if starts:
            # The lines below the first name what is missing and how to supply it.
            return " ".join(lines[starts[-1] :])[:_REASON_LENGTH]
        errors = [line for line in lines if "error" in line.lower()]
        return (errors or lines or [f"exit code {self.code}"])[-1]


class Executor:
    """Runs commands from the repository's root; in a dry run it prints them instead.

    Raises:
      UserError: there is no repository to ship to other machines, but an installed package.
    """

    def __init__(self, *, dry_run: bool = False) -> None:
        if is_installed():
            raise UserError(
                "launching on other machines ships a clone of the repository, and this is an "
                "installed package; clone it and launch from there, or install the package there"
            )
        self.dry_run = dry_run

    def ask(self, command: Sequence[str], *, assume: str = "") -> CommandResult:
        """Run a command to its end and return its output; a dry run returns `assume`."""
        if self._show(command):
            return CommandResult(0, assume, "")
        done = subprocess.run(
            self._find(command), cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def require(self, command: Sequence[str], *, assume: str = "") -> str:
        """Return the output of a command as `ask` does; a UserError has the reason if it fails."""
        answer = self.ask(command, assume=assume)
        if answer.code:
            raise UserError(f"{show(command[:5])} ... failed with {answer.code}: {answer.reason}")
        return answer.output

    def watch(self, command: Sequence[str]) -> None:
        """Run a command of minutes, print its lines; a UserError has the last one if it fails."""
        process = self.open(command)
        if process is None:
            return
        last = ""
        try:
            for raw in process.stdout or ():
                line = raw.decode(errors="replace").rstrip()
                last = line or last
                print(line, flush=True)
            process.wait()
        finally:
            end_process(process)
        if process.returncode:
            raise UserError(f"{show(command[:5])} ... failed with {process.returncode}: {last}")

    def call(self, command: Sequence[str]) -> int:
        """Run on this terminal and return the exit code."""
        if self._show(command):
            return 0
        return subprocess.run(self._find(command), cwd=ROOT).returncode

    def open(self, command: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Start in a session of its own, output and errors in one pipe; None in a dry run."""
        if self._show(command):
            return None
        return subprocess.Popen(
            self._find(command),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _show(self, command: Sequence[str]) -> bool:
        if self.dry_run:
            print(show(command))
        return self.dry_run

    def find_program(self, name: str) -> str:
        """Find the path of a program; a UserError if it is not installed."""
        program = shutil.which(name)
        if program is None:
            label = _PROGRAMS.get(name, "a program")
            raise UserError(f"{name!r} is not on PATH; install {label}, or use --dry-run")
        return program

    def _find(self, command: Sequence[str]) -> list[str]:
        program = self.find_program(command[0])
        sys.stdout.flush()
        return [program, *command[1:]]


def end_process(process: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """End a process that `open` started, and all its children."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=wait_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
