"""Proves that no kill of a dispatcher, a sweep or a trial loses a run or starts one twice.

    python -m proofs.queue_chaos jobs --jobs 6 --kills 50
    python -m proofs.queue_chaos sweep --trials 24 --kills 30 --trial-kills 10

`jobs` kills `tools.queue run` at random instants while it works on a queue of real runs. `sweep`
runs a sweep undisturbed, then the same one in another store, kills `tools.sweep` and its trials at
random instants, and compares the weights of all trials bit for bit. Exit code 0: all is as it
should be.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from service.jobs.files import JobQueue, open_queue, read_progress
from service.jobs.state import ENDS
from service.jobs.submission import Submission
from store.record.attempts import read_attempts
from utils.errors import EXIT_FAILED
from utils.json_types import JsonObject
from utils.programs import create_program_parser, run_program
from utils.storage.places import to_path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "configs/regression/diabetes_linear.yaml"
# Long enough to be met by kills, with checkpoints to go on from.
_RUN = {
    "runtime.device": "cpu",
    "runtime.num_threads": 1,
    "train.epochs": 1500,
    "train.eval_every_epochs": 1500,
    "train.log_every_steps": 500,
    "train.checkpoint_every_steps": 500,
    "run.tensorboard": False,
}
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
_PATIENCE_S = 1800.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = create_parser().parse_args(argv)
    return run_program(_prove, options)


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_program_parser(__doc__, prog="python -m proofs.queue_chaos")
    proofs = parser.add_subparsers(required=True, metavar="PROOF")
    jobs = proofs.add_parser("jobs", help="kill a dispatcher")
    jobs.add_argument("--jobs", type=int, default=6, help="runs in the queue (6)")
    jobs.set_defaults(proof=prove_jobs)
    sweep = proofs.add_parser("sweep", help="kill a sweep and its trials")
    sweep.add_argument("--trials", type=int, default=24, help="of the sweep (24)")
    sweep.add_argument("--trial-kills", type=int, default=10, help="kills of trials (10)")
    sweep.set_defaults(proof=prove_sweep)
    for proof, kills in ((jobs, 50), (sweep, 30)):
        add = proof.add_argument
        add("--kills", type=int, default=kills, help=f"kills of the program ({kills})")
        add("--seed", type=int, default=0, help="of the instants (0)")
        add("--slots", type=int, default=2, help="runs at once (2)")
        add("--out", type=to_path, help="where the stores stay (a directory that is removed)")
    return parser


def prove_jobs(options: argparse.Namespace, folder: Path) -> JsonObject:
    """Kill the dispatcher of a queue until the kills are used up and every job has ended."""
    queue = open_queue(str(folder / "runs"))
    for number in range(options.jobs):
        given = {**_RUN, "train.seed": number, "run.run_id": f"job{number}"}
        queue.submit(Submission(config=CONFIG, overrides=given), "proof")
    command = ["tools.queue", "run", "--store", queue.store, f"--slots={options.slots}"]
    kills = _harass(command, options, queue, lambda random_: None)
    return {"kills": kills, **_judge(queue), "wanted": options.jobs}


def prove_sweep(options: argparse.Namespace, folder: Path) -> JsonObject:
    """Run the same sweep twice, the second time under kills."""
    spec = folder / "harassed.yaml"
    rates = [round(0.01 + 0.001 * number, 4) for number in range(options.trials)]
    sweep = {"config": CONFIG, "set": _RUN, "axes": {"optim.lr": rates}, "metric": "eval.mse"}
    spec.write_text(yaml.safe_dump(sweep), encoding="utf-8")
    calm, harassed = (open_queue(str(folder / name)) for name in ("calm", "harassed"))
    _start(_list_words(spec, calm, options)).wait()
    trial_kills: list[str] = []

    def kill_trial(instants: random.Random) -> None:
        if len(trial_kills) < options.trial_kills:
            trial_kills.extend(_kill_one_run(harassed, instants))

    kills = _harass(_list_words(spec, harassed, options), options, harassed, kill_trial)
    weights = [_read_weights(queue) for queue in (calm, harassed)]
    return {
        "kills": kills,
        "trial_kills": len(trial_kills),
        **_judge(harassed),
        "wanted": options.trials,
        "equal_weights": weights[0] == weights[1],
        "runs_with_weights": len(weights[1]),
    }


def _prove(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        faults = options.proof(options, options.out or Path(scratch))
    is_good = (
        faults["complete"] == faults["wanted"] == faults["jobs"]
        and not faults["overlaps"]
        and not faults["more_attempts_than_starts"]
        and faults.get("equal_weights", True)
    )
    sys.stdout.write(json.dumps({"passed": is_good, **faults}, indent=1) + "\n")
    return 0 if is_good else EXIT_FAILED


def _harass(
    command: Sequence[str],
    options: argparse.Namespace,
    queue: JobQueue,
    between: Callable[[random.Random], None],
) -> int:
    """Start a program again and again, and kill it at random instants; gives the kills."""
    instants, kills = random.Random(options.seed), 0
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        program = _start(command)
        if kills < options.kills:
            time.sleep(instants.uniform(0.0, 8.0))
            kills += program.poll() is None
            program.kill()
            program.wait()
            between(instants)
            continue
        while program.poll() is None and not _is_over(queue):
            between(instants)
            time.sleep(1.0)
        program.terminate()
        program.wait()
        if _is_over(queue):
            return kills
    raise TimeoutError(f"not over within {_PATIENCE_S:g} s")


def _list_words(spec: Path, queue: JobQueue, options: argparse.Namespace) -> list[str]:
    return ["tools.sweep", "run", str(spec), "--store", queue.store, f"--slots={options.slots}"]


def _start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, **_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _is_over(queue: JobQueue) -> bool:
    jobs = queue.list()
    return bool(jobs) and all(job.state in ENDS for job in jobs)


def _kill_one_run(queue: JobQueue, instants: random.Random) -> list[str]:
    """SIGKILL to the `main.py` of one running job, or to its keeper; gives which one it was."""
    running = [folder for folder in queue.list_folders() if read_progress(folder).is_open]
    if not running:
        return []
    folder = instants.choice(running)
    last = read_progress(folder).attempts[-1]
    try:
        os.kill(last.main_pid or last.pid, signal.SIGKILL)
    except ProcessLookupError:
        return []
    return [folder.name]


def _judge(queue: JobQueue) -> JsonObject:
    """Jobs by what should never have happened to them."""
    overlaps: list[str] = []
    too_many: list[str] = []
    jobs = queue.list()
    for job in jobs:
        attempts = read_attempts(Path(queue.store) / job.run)
        if len(attempts) > job.attempts:
            too_many.append(job.id)
        for first, second in itertools.pairwise(attempts):
            if second["began"] < first.get("ended", 0.0):
                overlaps.append(job.id)
    return {
        "jobs": len(jobs),
        "complete": sum(job.state == "complete" for job in jobs),
        "attempts": sum(job.attempts for job in jobs),
        "overlaps": overlaps,
        "more_attempts_than_starts": too_many,
    }


def _read_weights(queue: JobQueue) -> dict[str, bytes]:
    """Read the exported weights of each run."""
    paths = Path(queue.store).glob("*/*/student.safetensors")
    return {path.parent.name: path.read_bytes() for path in paths}


if __name__ == "__main__":
    sys.exit(main())
