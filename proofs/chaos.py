"""Proves that a killed run ends as an unbroken one.

    python -m proofs.chaos --config configs/x.yaml --kills 20

Runs a reference, then the same run again, which is killed at random instants and continued by
`--resume auto` until it is complete. Compares metrics at every step, all final tensors and the
quantiles of the gradient's norm bit for bit, by the comparison of `tools.runs compare --exact`.
Gates hold each killed run against the reference in what is no part of that: clocks and resources,
such as train.graphs:-:2:major. Exit code 0: equal; 1: not, a gate has failed, or a run hung or
could not go on.

Kinds of kills: `kill` (SIGKILL to all processes), `term` (SIGTERM), `write` (SIGKILL while a
checkpoint is being written), `rank` (SIGKILL to one of several processes). Further flags go to
main.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from store.compare.divergence import find_divergence, read_lines
from store.compare.rows import format_ulps
from store.compare.sides import Side
from store.compare.tensors import find_tensors
from store.quality.findings import print_findings, publish_findings, read_gates
from store.quality.gate_flags import add_gate_flags
from store.quality.gates import GateFinding, check_known, check_sides, get_code, resolve_direction
from store.query.record import RunRecord
from store.record.catalogue import GRAD_NORM
from store.record.history import read_metrics
from store.terminal import make_finite
from utils.checkpoint.find import find_checkpoint
from utils.config.devices import DEVICES
from utils.errors import EXIT_FAILED, EXIT_PREEMPTED, UserError
from utils.programs import create_program_parser, prepare_file, run_program
from utils.storage.places import to_path

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]


def _list_forms(ranks: int) -> dict[str, tuple[tuple[str, ...], dict[str, str]]]:
    """List flags and environment of each device with so many ranks: cpu, cpu2, ..."""
    return {
        f"{name}{'' if ranks == 1 else ranks}": (
            (f"--runtime.device={name}", f"--runtime.num_processes={ranks}"),
            dict(device.on_cpu),
        )
        for name, device in DEVICES.items()
    }


# Name -> flags and environment.
RUNTIMES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    **_list_forms(1),
    **_list_forms(2),
    "tpu_fsdp2": (
        ("--runtime.device=tpu", "--runtime.num_processes=2", "--runtime.parallel=fsdp"),
        dict(DEVICES["tpu"].on_cpu),
    ),
    "spmd4": (
        ("--runtime.device=xla", "--runtime.parallel=spmd"),
        {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"},
    ),
    "fsdp4": (
        ("--runtime.device=xla", "--runtime.parallel=spmd", "--runtime.mesh_fsdp=4"),
        {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"},
    ),
}
KINDS = ("kill", "term", "write", "rank")
_EXPERIMENT = "chaos"
_POLL_S = 0.002
# Share of kills that come before the first step of an attempt.
_EARLY = 0.15


class HangError(RuntimeError):
    """A run neither ended nor got on."""


@dataclass
class Tally:
    """What happened to the killed runs."""

    kills: Counter[str] = field(default_factory=Counter)  # by kind
    hits: int = 0  # kills of kind `write` that left a half-written checkpoint behind
    # Steps that were done and had to be done again, one number a kill
    lost: list[int] = field(default_factory=list)
    survived: int = 0  # kills after which the run went on


def main(argv: list[str] | None = None) -> int:
    """Run the proof and print its verdict; gives the exit code."""
    return run_program(run, *parse_arguments(argv))


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Run the proof in --out, or in a temporary directory; return the exit code."""
    with contextlib.ExitStack() as stack:
        out = options.out or stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
        return Chaos(options, flags, to_path(out, "--out")).prove()


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the tool's flags, and those for main.py."""
    parser = create_program_parser(__doc__, prog="python -m proofs.chaos", allow_abbrev=False)
    parser.add_argument("--config", required=True, help="YAML file of the run; keep it short")
    parser.add_argument("--runtime", choices=tuple(RUNTIMES), default="cpu")
    parser.add_argument("--kills", type=int, default=20, help="kills in all")
    parser.add_argument("--seed", type=int, default=0, help="of kinds and instants")
    parser.add_argument("--kinds", default="", help="only these, such as kill,term (default: all)")
    parser.add_argument(
        "--checkpoint-every", type=int, default=5, help="steps, or 0: as the config"
    )
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for one attempt")
    parser.add_argument("--out", help="keep runs and logs there (default: a temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict here")
    add_gate_flags(parser)
    return parser.parse_known_args(argv)


class Chaos:
    """A reference, and the same run under kills.

    Args:
      flags: for main.py, after those of the runtime.
      out: directory of runs and logs.
    """

    def __init__(self, options: argparse.Namespace, flags: list[str], out: Path) -> None:
        self.options, self.out = options, out
        out.mkdir(parents=True, exist_ok=True)
        own, self.environment = RUNTIMES[options.runtime]
        self.flags = ["--config", options.config, *own, *flags, "--train.log_every_steps=1"]
        self.flags += [f"--run.output_dir={out}", f"--run.experiment={_EXPERIMENT}"]
        self.flags += ["--run.tensorboard=false"]
        if options.checkpoint_every:
            self.flags.append(f"--train.checkpoint_every_steps={options.checkpoint_every}")
        self.random = random.Random(options.seed)
        self.kinds = self._choose_kinds()
        prepare_file(options.json, "--json")
        self.gates, self.undecided = read_gates(options)
        self.gates = [resolve_direction(gate) for gate in self.gates]
        self.tally = Tally()
        self.start_s = self.lines = 0.0

    def prove(self) -> int:
        """Reference, rounds of killed runs, comparison; gives the exit code."""
        self._run_reference()
        differences: list[str] = []
        findings: list[GateFinding] = []
        number = 0
        check_known(self.gates, [self._read_side("reference")])
        try:
            while self._killed() < self.options.kills:
                number += 1
                name = f"killed{number}"
                self._run_under_kills(name)
                lines = compare_runs(self._folder("reference"), self._folder(name))
                differences += [f"{name}: {line}" for line in lines]
                findings += self._check_gates(name)
        except HangError as error:
            differences.append(str(error))
        return self._report(differences, findings, number)

    def _choose_kinds(self) -> list[str]:
        has_ranks = any("num_processes=2" in flag for flag in self.flags)
        wanted = [k for k in self.options.kinds.split(",") if k] or [
            kind for kind in KINDS if kind != "rank" or has_ranks
        ]
        unknown = [kind for kind in wanted if kind not in KINDS]
        if unknown or ("rank" in wanted and not has_ranks):
            raise UserError(
                f"--kinds ({self.options.kinds}): choose among {', '.join(KINDS)}; rank needs a "
                "runtime of several processes"
            )
        return wanted

    def _run_reference(self) -> None:
        began = time.monotonic()
        process = self._start("reference")
        metrics = self._folder("reference") / "metrics.jsonl"
        while process.poll() is None and not _count_lines(metrics):
            time.sleep(_POLL_S)
        self.start_s = time.monotonic() - began
        code = self._await_end(process, "reference")
        if code != 0:
            tail = (self.out / "reference.log").read_text(errors="replace").splitlines()[-3:]
            raise UserError(f"the reference run ended with code {code}: {' | '.join(tail)}")
        self.lines = len(read_metrics(self._folder("reference")))
        print(
            f"reference: {self.lines:.0f} lines of metrics in {time.monotonic() - began:.1f} s, "
            f"first one after {self.start_s:.1f} s",
            flush=True,
        )

    def _run_under_kills(self, name: str) -> None:
        """Start, kill and continue a run until it is complete."""
        while True:
            process = self._start(name)
            if self._killed() < self.options.kills and self._strike(process, name):
                continue
            code = self._await_end(process, name)
            if code == 0:
                self.tally.survived = self._killed()
                return
            raise HangError(f"{name} ended with code {code} though it was not killed")

    def _strike(self, process: subprocess.Popen[bytes], name: str) -> bool:
        """Kill a run once; False if it was complete before."""
        kind = self.random.choice(self.kinds)
        is_alive = self._await_instant(process, name, kind)
        if not is_alive:
            if process.returncode == 0:
                self.tally.survived = self._killed()
            return False
        last = _get_last_step(self._folder(name))
        began = time.monotonic()
        self._kill(process, kind)
        code = self._await_end(process, name)
        if code == 0:
            return False
        if kind == "term" and code not in (EXIT_PREEMPTED, -signal.SIGTERM):
            raise HangError(f"{name} ended with code {code} after SIGTERM, not {EXIT_PREEMPTED}")
        self.tally.kills[kind] += 1
        left = list((self._folder(name) / "checkpoints").glob(".writing_*"))
        self.tally.hits += kind == "write" and bool(left)
        lost = max(0, last - _get_saved_step(self._folder(name)))
        self.tally.lost.append(lost)
        print(
            f"{self._killed():3d}. {kind:5s} at step {last:4d}: code {code}, ended in "
            f"{time.monotonic() - began:.1f} s, {lost} steps to redo"
            f"{', a write was cut' if left else ''}",
            flush=True,
        )
        return True

    def _await_instant(self, process: subprocess.Popen[bytes], name: str, kind: str) -> bool:
        """Wait for a random instant of an attempt; False if the run has ended before."""
        folder = self._folder(name)
        deadline = time.monotonic() + self.options.patience
        if kind != "write" and self.random.random() < _EARLY:
            return _wait(process, lambda: False, self.random.uniform(0, self.start_s))
        metrics = folder / "metrics.jsonl"
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        has_begun = _wait(
            process,
            lambda: metrics.exists() and metrics.stat().st_mtime_ns != before,
            deadline - time.monotonic(),
        )
        ahead = max(2.0, 2 * self.lines / (self.options.kills + 1))
        wanted = _count_lines(metrics) + self.random.randint(0, round(ahead))
        if not has_begun or not _wait(
            process, lambda: _count_lines(metrics) >= wanted, deadline - time.monotonic()
        ):
            return False
        if kind == "write":
            return _wait(
                process,
                lambda: any((folder / "checkpoints").glob(".writing_*")),
                deadline - time.monotonic(),
                poll_s=0.0,
            )
        return _wait(process, lambda: False, self.random.uniform(0, 0.05))

    def _kill(self, process: subprocess.Popen[bytes], kind: str) -> None:
        if kind == "term":
            process.send_signal(signal.SIGTERM)
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            children = _get_ranks(psutil.Process(process.pid))
            if kind == "rank" and children:
                self.random.choice(children).kill()
                return
            for victim in (psutil.Process(process.pid), *children):
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "main.py", *self.flags, f"--run.run_id={name}"]
        if name != "reference":
            command.append("--resume=auto")
        with (self.out / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **self.environment}, stdout=log, stderr=log
            )

    def _await_end(self, process: subprocess.Popen[bytes], name: str) -> int:
        """Return the exit code, once no process of the run is left."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        try:
            code = process.wait(timeout=self.options.patience)
        except subprocess.TimeoutExpired:
            self._kill(process, "kill")
            process.wait()
            raise HangError(f"{name} did not end within {self.options.patience:g} s") from None
        _, alive = psutil.wait_procs(family, timeout=30)
        if alive:
            for orphan in alive:
                orphan.kill()
            raise HangError(f"{name} left {len(alive)} processes behind")
        return code

    def _folder(self, name: str) -> Path:
        return self.out / _EXPERIMENT / name

    def _killed(self) -> int:
        return sum(self.tally.kills.values())

    def _read_side(self, name: str) -> Side:
        return Side(name, (RunRecord(self._folder(name)),))

    def _check_gates(self, name: str) -> list[GateFinding]:
        if not self.gates:
            return []
        base, new = (self._read_side(side) for side in ("reference", name))
        checks = [check_sides(gate, base, new) for gate in self.gates]
        print_findings(checks, ("reference", name), get_code(checks, self.undecided))
        return checks

    def _report(self, differences: list[str], findings: list[GateFinding], rounds: int) -> int:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.tally.kills.items()))
        lost = self.tally.lost
        print(f"kills survived: {self.tally.survived} of {self._killed()} ({kinds or 'none'})")
        print(f"checkpoint writes cut: {self.tally.hits}; complete runs: {rounds}")
        mean = sum(lost) / max(len(lost), 1)
        most = max(lost, default=0)
        print(f"steps lost and redone: {sum(lost)} in all, {mean:.1f} a kill, {most} at most")
        for line in differences[:20]:
            print(f"  {line}")
        verdict = "NOT EQUAL" if differences else "equal bit for bit"
        code = EXIT_FAILED if differences else get_code(findings, self.undecided)
        if self.options.json:
            self._write_verdict(differences, findings, code)
        print(f"verdict on {self.options.runtime}: {verdict}")
        return code

    def _write_verdict(
        self, differences: list[str], findings: list[GateFinding], code: int
    ) -> None:
        content = {
            "runtime": self.options.runtime,
            "kills": dict(self.tally.kills),
            "survived": self.tally.survived,
            "writes_cut": self.tally.hits,
            "steps_redone": self.tally.lost,
            "differences": differences,
            "findings": publish_findings(findings),
            "exit_code": code,
        }
        text = json.dumps(make_finite(content), indent=2) + "\n"
        self.options.json.write_text(text, encoding="utf-8")


def compare_runs(reference: Path, other: Path) -> list[str]:
    """List what differs between two complete runs: where they part, tensors, export, quantiles."""
    differences = []
    parted = find_divergence(*(read_lines(RunRecord(run)) for run in (reference, other)))
    if parted is not None:
        values = f"{parted.metric} {parted.base!r} against {parted.new!r}{format_ulps(parted)}"
        words = values if parted.metric else "a line that one of them lacks"
        differences.append(f"step {parted.step}: {words}")
    wrong = find_tensors(*(find_checkpoint(run / "checkpoints") for run in (reference, other)))
    if wrong:
        differences.append(f"{len(wrong)} final tensors, first {wrong[0]}")
    exports = [(run / "student.safetensors").read_bytes() for run in (reference, other)]
    if exports[0] != exports[1]:
        differences.append("the exported weights")
    norms = [_read_norms(RunRecord(run)) for run in (reference, other)]
    if norms[0] != norms[1]:
        differences.append("the quantiles of the gradient's norm")
    return differences


def _read_norms(record: RunRecord) -> str:
    """Read the gradient norm's counts from `sketches.json`, which are equal to the bit."""
    kept = record.sketches
    norms = None if kept is None else kept.merge().get(GRAD_NORM)
    return "" if kept is None or norms is None else f"from step {kept.from_step} on: {norms}"


def _wait(
    process: subprocess.Popen[bytes],
    is_time: Callable[[], bool],
    limit_s: float,
    poll_s: float = _POLL_S,
) -> bool:
    """Wait for a moment, or for the limit; False if the process has ended."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return False
        if is_time():
            break
        time.sleep(poll_s)
    return process.poll() is None


def _get_ranks(process: psutil.Process) -> list[psutil.Process]:
    """Child processes that are ranks, not helpers of multiprocessing."""
    ranks = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "spawn_main" in " ".join(child.cmdline()):
                ranks.append(child)
    return ranks


def _count_lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _get_last_step(folder: Path) -> int:
    if not (folder / "metrics.jsonl").is_file():
        return 0
    return max((line["step"] for line in read_metrics(folder)), default=0)


def _get_saved_step(folder: Path) -> int:
    names = [path.name for path in (folder / "checkpoints").glob("step_*")]
    return max((int(name.removeprefix("step_")) for name in names), default=0)


if __name__ == "__main__":
    sys.exit(main())
