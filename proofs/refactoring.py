"""Proves that a change of form has changed nothing else.

`python -m proofs.refactoring --before REVISION` makes the same short runs in a checkout of
the revision and in this tree: with and without a teacher, with stored answers, averages, mixing,
accumulation and feature losses, on PyTorch and XLA, on a mesh of four devices, in two processes,
and one that is interrupted and resumed. All deterministic metrics at every step, all final tensors
and all graph counts must be equal bit for bit. Exit code 1: they are not.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from store.record.catalogue import METRICS
from store.record.history import get_numbers, keep_deterministic, modernise, read_metrics
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.programs import create_program_parser, run_program

ROOT = Path(__file__).resolve().parents[1]

_PROGRAMS = {"main": ("main.py",), "cache_teacher": ("-m", "tools.cache_teacher")}
_SHORT = ("--train.log_every_steps=4", "--train.epochs=2", "--run.tensorboard=false")
_CPU, _XLA = ("--runtime.device=cpu",), ("--runtime.device=xla",)
_TEACHER = ("configs/digits_teacher.yaml", *_SHORT)
_STUDENT = (
    "configs/digits_kd.yaml",
    *_SHORT,
    "--teacher_path={runs}/{tree}/digits_teacher/teacher",
)
_LAYERS = json.dumps([
    {"name": "kd"},
    {"name": "fitnet", "layers": {"fc_norm": "fc_norm"}, "weight": 0.1},
    {"name": "rkd", "layers": {"fc_norm": "fc_norm"}, "weight": 0.1, "weight_end": 0.0},
])  # fmt: skip
# Of the run that goes on: its warm-up ends before its first half does.
_HALVED = ("--train.ema", "--optim.warmup_epochs=1")
_RICH = (
    "--train.ema", "--train.ema_decay=0.9", "--train.mixup_alpha=0.8", "--train.cutmix_alpha=1.0",
    "--train.accumulate_steps=2", "--data.random_erasing=0.25", "--distill.loss=",
    f"--distill.losses={_LAYERS}",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run of main.py.

    Args:
      flags: of main.py, the configuration first.
      before: flags of a run, or of the program that stores answers, that must come first.
      environment: variables of the process.
    """

    flags: tuple[str, ...]
    before: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


CASES = {
    # The first one is the teacher of all the others.
    "teacher": Case((*_TEACHER, *_CPU)),
    "teacher_xla": Case((*_TEACHER, *_XLA)),
    "kd": Case((*_STUDENT, *_CPU)),
    "kd_xla": Case((*_STUDENT, *_XLA)),
    "cached": Case(
        (*_STUDENT, *_XLA, "--distill.loss=kd", "--distill.teacher_cache={runs}/{tree}/cache"),
        before=("cache_teacher", *_STUDENT, *_CPU, "--out={runs}/{tree}/cache"),
    ),
    "rich": Case((*_STUDENT, *_CPU, *_RICH)),
    "rich_xla": Case((*_STUDENT, *_XLA, *_RICH)),
    "mesh": Case(
        (*_STUDENT, *_XLA, "--runtime.parallel=spmd"), environment=(("CPU_NUM_DEVICES", "4"),)
    ),
    "processes": Case((*_STUDENT, *_CPU, "--runtime.num_processes=2")),
    "resumed": Case(
        (*_STUDENT, *_XLA, *_HALVED, "--run.resume=auto"),
        before=("main", *_STUDENT, *_XLA, *_HALVED, "--train.steps=23",
                "--train.checkpoint_every_steps=23"),
    ),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Parse flags, run both trees, compare; gives the exit code."""
    parser = create_program_parser(__doc__, prog="python -m proofs.refactoring")
    parser.add_argument("--before", required=True, help="revision that this tree is compared with")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="some of the runs; none: all")
    parser.add_argument("--keep", type=Path, help="directory in which the runs stay")
    # Asked to end, it takes its checkout away all the same.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run_program(lambda: prove(parser.parse_args(argv)))


def prove(options: argparse.Namespace) -> int:
    """Run every case in both trees; gives the exit code."""
    names = [name for name in CASES if name == "teacher" or name in (options.cases or CASES)]
    faults = 0
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        trees = {"before": stack.enter_context(checked_out(options.before)), "now": ROOT}
        call(ROOT, ["-m", "tools.prepare_dataset", "digits", "--out", str(folder / "data")])
        for name in names:
            began = time.perf_counter()
            found = {tree: run_case(name, tree, path, folder) for tree, path in trees.items()}
            lines = compare(found["before"], found["now"])
            faults += bool(lines)
            verdict = "equal bit for bit" if not lines else f"{len(lines)} differences"
            facts = f"{len(found['now']['lines'])} lines, {len(found['now']['tensors'])} tensors"
            print(f"{name:<12} {facts:<26} {verdict}, {time.perf_counter() - began:.0f} s")
            for line in lines[:8]:
                print(f"    {line}")
    return 1 if faults else 0


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A checkout of a revision in a directory that goes again."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        command = ["git", "-C", str(ROOT), "worktree", "add", "--detach", str(tree), revision]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"--before ({revision!r}): {done.stderr.strip().splitlines()[-1]}")
        try:
            yield tree
        finally:
            remove = ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)]
            subprocess.run(remove, check=True, capture_output=True)


def run_case(name: str, tree: str, path: Path, folder: Path) -> JsonObject:
    """Make a case's runs in one tree and read what they have left."""
    case = CASES[name]
    places = [f"--data.root={folder}/data", f"--run.output_dir={folder}/{tree}",
              f"--run.run_id={name}"]  # fmt: skip
    flags = {"program": "main", "flags": case.flags}
    starts = [flags]
    if case.before:
        starts.insert(0, {"program": case.before[0], "flags": case.before[1:]})
    for start in starts:
        config, *rest = (one.format(runs=folder, tree=tree) if "{runs}" in one else one
                         for one in start["flags"])  # fmt: skip
        own = places if start["program"] == "main" else places[:1]
        words = [*_PROGRAMS[start["program"]], "--config", config, *rest, *own]
        call(path, words, dict(case.environment))
    (run,) = (folder / tree).glob(f"*/{name}")
    return {
        "lines": [normalise(line) for line in read_metrics(run)],
        "tensors": hash_tensors(run),
    }


def call(tree: Path, words: list[str], environment: dict[str, str] | None = None) -> None:
    """Run Python in a tree; its last lines are shown where it fails."""
    done = subprocess.run(
        [sys.executable, *words], cwd=tree, capture_output=True, text=True,
        env={**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(tree), **(environment or {})},
    )  # fmt: skip
    if done.returncode:
        end = "\n".join(done.stderr.splitlines()[-12:])
        raise UserError(f"{' '.join(words)} ended with {done.returncode} in {tree}:\n{end}")


def normalise(line: JsonObject) -> JsonObject:
    """What equal runs share at a line, in today's form, and its graphs.

    Graphs are compared here because both trees make their runs in the same way.
    """
    line = modernise(line)
    graphs = {
        name: value for name, value in get_numbers(line).items()
        if (metric := METRICS.find(name)) and metric.unit == "graphs"
    }  # fmt: skip
    return keep_deterministic(line) | graphs


def hash_tensors(run: Path) -> dict[str, str]:
    """SHA-256 of every tensor of a run's checkpoints and of its export."""
    from safetensors.numpy import load_file

    found = {}
    for path in sorted(run.rglob("*.safetensors")):
        for name, value in load_file(path).items():
            key = f"{path.relative_to(run)}:{name}"
            found[key] = hashlib.sha256(value.tobytes()).hexdigest()
    return found


def compare(before: JsonObject, now: JsonObject) -> list[str]:
    """What differs, one line each."""
    faults = []
    if len(before["lines"]) != len(now["lines"]):
        faults.append(f"{len(before['lines'])} lines before, {len(now['lines'])} now")
    for old, new in zip(before["lines"], now["lines"], strict=False):
        faults += [
            f"step {old['step']}: {name} was {old.get(name)}, is {new.get(name)}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        ]
    for name in sorted({*before["tensors"], *now["tensors"]}):
        if before["tensors"].get(name) != now["tensors"].get(name):
            faults.append(f"{name} differs")
    return faults


if __name__ == "__main__":
    sys.exit(main())
