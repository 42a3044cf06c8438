"""The demo: distils a teacher into a student on handwritten digits and shows the gain.

Writes the dataset, trains the teacher, the student alone and the student distilled through
`python main.py`, prints a table, draws the curves, and ends with `tools.runs compare`: distilled
against alone with the interval of the difference. `--seeds 0 1 2` repeats it and adds mean and
spread; at least six seeds distinguish a difference from chance.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

from job.curves import draw_curves
from store.record.runs import Run
from tools.runs import __main__ as runs
from utils.json_types import JsonObject
from utils.programs import CommandLine, ProgramParser
from utils.storage.installation import ROOT, get_workplace, name_commands
from utils.storage.json_files import write_json

ROLES = {
    "teacher": ("configs/digits_teacher.yaml", "teacher"),
    "alone": ("configs/digits_student.yaml", "student alone"),
    "distilled": ("configs/digits_kd.yaml", "student distilled"),
}
EXPERIMENT = "demo"
COMPARED = ("test.top1", "eval.top1", "eval.loss")
COLUMNS = ("model", "parameters", "test top-1 (%)", "seconds", "graphs")


def run_demo(options: argparse.Namespace) -> int:
    """Run everything, print and write the table; return the exit code."""
    dataset = [sys.executable, "-m", "tools.prepare_dataset", "digits"]
    if code := subprocess.call([*dataset, "--out", str(options.data_dir)]):
        return code
    rows = []
    for seed, role in itertools.product(options.seeds, ROLES):
        if code := train(role, seed, options):
            sys.stderr.write(f"error: the run {role}-seed{seed} ended with code {code}\n")
            return code
        rows.append(read_row(role, seed, options))
    report(rows, options)
    return compare(options)


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the demo's flags; those after `--` go to every run of main.py."""
    here = get_workplace()
    parser = ProgramParser(prog="python -m tools.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=here / "data", help="dataset directory")
    parser.add_argument("--output-dir", type=Path, default=here / "runs", help="where runs go")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one demo for each seed")
    parser.add_argument("rest", nargs="*", metavar="-- FLAG", help="flags for every run of main.py")
    return parser


def train(role: str, seed: int, options: argparse.Namespace) -> int:
    """Train by main.py; the teacher of the distilled student has the same seed."""
    config, label = ROLES[role]
    command = [
        sys.executable,
        str(ROOT / "main.py"),
        "--config",
        str(ROOT / config),
        f"--data.root={options.data_dir}",
        f"--run.output_dir={options.output_dir}",
        f"--run.experiment={EXPERIMENT}",
        f"--run.run_id={role}-seed{seed}",
        "--run.overwrite=true",
        f"--train.seed={seed}",
        "--runtime.device=auto",  # the files name xla, which not every environment has
    ]
    if role == "distilled":
        command.append(f"--distill.teacher_weights={get_run('teacher', seed, options).path}")
    print(f"--- {label}, seed {seed}", flush=True)
    return subprocess.call([*command, *options.rest])


def get_run(role: str, seed: int, options: argparse.Namespace) -> Run:
    """Return the directory of a run of the demo."""
    return Run(options.output_dir / EXPERIMENT / f"{role}-seed{seed}")


def read_row(role: str, seed: int, options: argparse.Namespace) -> JsonObject:
    """Read the row of a finished run."""
    record = get_run(role, seed, options).read()
    final = record["final"]
    return {
        "role": role,
        "seed": seed,
        "model": ROLES[role][1],
        "parameters": final["parameters"],
        "test_top1": final["test_top1"],
        "eval_top1": final["eval_top1"],
        "seconds": record["ended"] - record["started"],
        "graphs": final["graphs"],
    }


def report(rows: list[JsonObject], options: argparse.Namespace) -> None:
    """Print the table, write it as JSON, and draw the curves."""
    print()
    print("{:<22}{:>12}{:>18}{:>10}{:>8}".format(*COLUMNS))
    for row in rows:
        name = row["model"] if len(options.seeds) == 1 else f"{row['model']} ({row['seed']})"
        print(
            f"{name:<22}{row['parameters']:>12,}{row['test_top1']:>18.2f}{row['seconds']:>10.0f}"
            f"{row['graphs']:>8}"
        )
    summary = summarise(rows)
    if len(options.seeds) > 1:
        print(f"\nover {len(options.seeds)} seeds: test top-1, mean and standard deviation")
        for role, facts in summary.items():
            print(f"{ROLES[role][1]:<22}{facts['mean']:>8.2f} +- {facts['std']:.2f}")
    gain = summary["distilled"]["mean"] - summary["alone"]["mean"]
    print(f"\ndistillation gains {gain:+.2f} points of top-1")
    seed = options.seeds[0]
    paths = {label: get_run(role, seed, options).path for role, (_, label) in ROLES.items()}
    picture = draw_curves(paths, options.output_dir / "demo.png")
    target = options.output_dir / "demo.json"
    write_json(target, {"rows": rows, "summary": summary, "gain": gain, "made": time.time()})
    print(f"curves: {picture}\ntable:  {target}")


def compare(options: argparse.Namespace) -> int:
    """Compare distilled against alone over the seeds by `tools.runs compare`; return its code."""
    command = ["compare", *(describe_side(role, options) for role in ("alone", "distilled"))]
    command += ["--store", str(options.output_dir), "--metrics", ",".join(COMPARED)]
    command += ["--html", str(options.output_dir / "demo.html")]
    print(name_commands(f"\npython -m tools.runs {shlex.join(command)}\n"), flush=True)
    return runs.main(command)


def describe_side(role: str, options: argparse.Namespace) -> str:
    """Return the query of this demo's runs of a role."""
    names = " or ".join(f"name={role}-seed{seed}" for seed in dict.fromkeys(options.seeds))
    return f"{role}:experiment={EXPERIMENT} and ({names})"


def summarise(rows: list[JsonObject]) -> dict[str, dict[str, float]]:
    """Compute mean and sample standard deviation of test top-1 for each role."""
    summary = {}
    for role in ROLES:
        values = [row["test_top1"] for row in rows if row["role"] == role]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        summary[role] = {"mean": statistics.fmean(values), "std": spread, "runs": len(values)}
    return summary


main = CommandLine(create_parser, run_demo)

if __name__ == "__main__":
    sys.exit(main())
