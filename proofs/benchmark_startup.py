"""Start-up, from the flags to the first step, of this tree and of another one, in turns.

    python -m proofs.benchmark_startup --against ../before -- --config configs/smoke.yaml

Everything behind `--` goes to main.py as it is. Each measurement is a process of its own that ends
as soon as its first step was made; it prints CPU time (user and system, all threads) and wall time
since the process began, at four points: flags read, checks made, parts built, first step. A
round measures both trees; medians and the ratio of CPU times are printed. Runs are written to a
directory that is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from proofs.timed_run import measure_in_turns
from utils.errors import EXIT_USER_ERROR, UserError
from utils.programs import CommandLine, create_program_parser, prepare_file, require_at_least

_ROOT = Path(__file__).resolve().parents[1]
_POINTS = ("flags", "checks", "parts", "step")
_REFUSAL = "error: "
# Runs in the tree that is measured, which need not know of this program: it may be an older one.
_CHILD = """
import builtins, json, os, sys, time
sys.path.insert(0, os.getcwd())
began, found = float(os.environ["STARTUP_BEGAN"]), {}

def mark(point):
    found[point] = [time.process_time(), time.time() - began, len(sys.modules)]

def wrap(owner, name, point):
    wrapped = getattr(owner, name)
    def call(*args, **kwargs):
        result = wrapped(*args, **kwargs)
        mark(point)
        if point == "step":
            args[3].finish_step()
            args[3].fetch(result if hasattr(result, "cpu") else next(iter(result.values())))
            mark(point)
            print(json.dumps(found), flush=True)
            os._exit(0)
        return result
    setattr(owner, name, call)

real_import = builtins.__import__

def import_and_wrap(name, *args, **kwargs):
    found = real_import(name, *args, **kwargs)
    # The run imports its parts itself, behind the flags and in its own way.
    if name == "job.entry" and "job.replica" in sys.modules:
        builtins.__import__ = real_import
        wrap(sys.modules["job.entry"], "check", "checks")
        wrap(sys.modules["job.replica"], "build_parts", "parts")
        wrap(sys.modules["engine"], "train_step", "step")
    return found

import main
wrap(main, "load_config", "flags")
builtins.__import__ = import_and_wrap
sys.exit(main.main(sys.argv[1:]))
"""


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_program_parser(__doc__, prog="python -m proofs.benchmark_startup")
    parser.add_argument(
        "--against", type=Path, metavar="TREE", help="another checkout (default: this one alone)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds after one to warm up (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("flags", nargs="+", help="of main.py, behind --")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Measure in turns, print, and write the figures to --json."""
    require_at_least(1, arguments, "rounds")
    trees = {"this": _ROOT}
    if arguments.against:
        trees["before"] = _find_tree(arguments.against)
    prepare_file(arguments.json, "--json")
    with tempfile.TemporaryDirectory(prefix="benchmark_startup_") as folder:
        cases = {
            name: partial(_measure, tree, arguments.flags, folder) for name, tree in trees.items()
        }
        turns = measure_in_turns(cases, arguments.rounds, warm_up=1)
    rounds = [dict(zip(turns, values, strict=True)) for values in zip(*turns.values(), strict=True)]
    medians = {
        name: {
            point: [statistics.median(r[name][point][i] for r in rounds) for i in range(3)]
            for point in _POINTS
        }
        for name in trees
    }
    for name, points in medians.items():
        for point, (cpu_s, wall_s, modules) in points.items():
            print(f"{name:7s} {point:7s} {cpu_s:7.2f} CPU s {wall_s:8.2f} s {modules:6.0f} modules")
    if arguments.against:
        ratios = [r["this"]["step"][0] / r["before"]["step"][0] for r in rounds]
        print(f"CPU time to the first step, this over before: {statistics.median(ratios):.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rounds": rounds, "medians": medians}) + "\n")


def _find_tree(path: Path) -> Path:
    if not (path / "main.py").is_file():
        raise UserError(
            f"--against ({str(path)!r}) is no directory with a main.py; give the root of another "
            "checkout"
        )
    return path.resolve()


def _measure(tree: Path, flags: Sequence[str], folder: str) -> dict[str, list[float]]:
    """Measure one start in a tree: (CPU s, s, modules) at each point.

    Raises:
      UserError: it did not get as far as its first step.
    """
    own = [f"--run.output_dir={folder}", f"--run.run_id={time.time_ns()}"]
    environment = os.environ | {"STARTUP_BEGAN": str(time.time())}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *flags, *own],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    answer = done.stdout.splitlines()[-1:]
    if done.returncode or not answer or not answer[0].startswith("{"):
        raise UserError(_describe_end(tree, done.returncode, done.stderr))
    return json.loads(answer[0])


def _describe_end(tree: Path, code: int, log: str) -> str:
    """Describe a run that made no step in a line; if the flags were refused, by their message."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    refusals = [line for line in lines if line.startswith(_REFUSAL)]
    if code == EXIT_USER_ERROR and refusals:
        return f"the run in {tree} was refused: {refusals[-1].removeprefix(_REFUSAL)}"
    last = f": {lines[-1]}" if lines else ""
    return (
        f"the run in {tree} ended with code {code} before its first step{last}; run main.py there "
        "with the same flags to see why"
    )


main = CommandLine(create_parser, run)

if __name__ == "__main__":
    sys.exit(main())
