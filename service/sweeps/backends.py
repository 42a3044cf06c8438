"""Trials on other machines: their queue runs them, and this module keeps the names of their jobs.

`launched.jsonl` beside the sweep's file holds what was submitted where. As for all trials, the run
itself tells whether it is complete.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.jobs.submission import write_flags
from service.sweeps import plan
from service.sweeps.report import read_result
from service.sweeps.spec import SweepSpec
from store.record.history import parse_lines
from train import commands
from train.execute import ROOT, Executor
from train.sky.task import TEMPLATE, SkyJob, render
from utils.errors import UserError
from utils.storage.places import is_remote

LAUNCHED_FILE = "launched.jsonl"
_SKY_ENDED = ("SUCCEEDED", "CANCELLED")  # and every FAILED...


@dataclass(frozen=True)
class SlurmBackend:
    """Slurm; its nodes must see the store."""

    options: tuple[str, ...] = ()
    name: str = "slurm"  # as in `--on`
    program: str = "sbatch"  # its client

    def submit(self, name: str, words: Sequence[str], executor: Executor) -> str:
        """Queue `main.py` with these arguments; return the job's name there."""
        (ROOT / ".sync/slurm").mkdir(parents=True, exist_ok=True)
        answer = executor.require(commands.sbatch(name, self.options, words), assume="0")
        return answer.strip().partition(";")[0]  # NUMBER;CLUSTER where there are several

    def is_there(self, job: str, executor: Executor) -> bool:
        """Return whether the job has not ended yet."""
        answer = executor.ask(commands.squeue(job))
        return answer.code == 0 and bool(answer.output.strip())


@dataclass(frozen=True)
class SkyBackend:
    """Managed jobs of SkyPilot on TPUs; the store must be a bucket."""

    accelerator_type: str  # as Cloud TPU spells it, such as v5litepod-8
    region: str = ""  # SkyPilot chooses one if empty
    name: str = "sky"
    program: str = "sky"

    def submit(self, name: str, words: Sequence[str], executor: Executor) -> str:
        flags = {key: value for key, _, value in (word.partition("=") for word in words[2:])}
        job = SkyJob(
            name=name,
            accelerator_type=self.accelerator_type,
            config=words[1],
            output_dir=flags.pop("--run.output_dir"),
            run_id=flags.pop("--run.run_id"),
            region=self.region,
            flags=tuple(f"{key}={value}" for key, value in flags.items()),
        )
        task = f".sync/{name}.sky.yaml"
        text = render(job, TEMPLATE.read_text(encoding="utf-8"))
        if not executor.dry_run:
            (ROOT / task).parent.mkdir(exist_ok=True)
            (ROOT / task).write_text(text, encoding="utf-8")
        executor.require(commands.sky_launch_managed(name, task))
        return name

    def is_there(self, job: str, executor: Executor) -> bool:
        answer = executor.require(commands.sky_jobs(), assume="[]")
        rows = json.loads(answer[answer.index("[") :])
        states = [row["status"] for row in rows if row.get("job_name") == job]
        return any(word not in _SKY_ENDED and not word.startswith("FAILED") for word in states)


class TrialLaunch:
    """Submission of trials to a queue of other machines, each once; SkyPilot needs a bucket."""

    def __init__(
        self, spec: SweepSpec, store: str, backend: SlurmBackend | SkyBackend, executor: Executor
    ) -> None:
        if spec.method == "optuna":
            raise UserError(
                f"method=optuna chooses one trial after another, which --on {backend.name} does "
                "not support; choose random"
            )
        if backend.name == "sky" and not is_remote(store):
            raise UserError(f"--store ({store}) must be a gs:// URL; a machine's disk goes with it")
        self.spec, self.store, self.backend, self.executor = spec, store, backend, executor
        self._base = plan.resolve_base(spec)
        plan.check_sweep(store, spec, self._base)
        if not executor.dry_run:
            executor.find_program(backend.program)
        self._states = {trial: self._find_state(trial) for trial in plan.plan_trials(spec)}

    def list_due(self) -> list[plan.Trial]:
        """List the trials that are neither complete nor in the other queue."""
        return [trial for trial, state in self._states.items() if not state]

    def submit(self) -> Iterator[tuple[plan.Trial, str]]:
        """Submit due trials and yield each with its new state; UserError if one is refused."""
        if not self.executor.dry_run:
            plan.keep_sweep(self.store, self.spec, self._base)
        for trial, state in self._states.items():
            if state:
                yield trial, state
                continue
            words = write_flags(plan.make_submission(self.spec, trial), self.store)
            job = self.backend.submit(trial.run_id, words, self.executor)
            if not self.executor.dry_run:
                self._note(trial, job)
            yield trial, f"submitted as {job}"

    def _find_state(self, trial: plan.Trial) -> str:
        run = f"{self._base.run.experiment}/{trial.run_id}"
        if read_result(self.store, run, self.spec.metric)[0] == "complete":
            return "complete"
        if self.executor.dry_run:
            return ""
        known = read_launched(self.store, self.spec.name)
        job = known.get((trial.id, self.backend.name), "")
        return f"queued as {job}" if job and self.backend.is_there(job, self.executor) else ""

    def _note(self, trial: plan.Trial, job: str) -> None:
        """Write the whole file anew each time: the program may be killed between two trials."""
        folder = plan.open_sweep_folder(self.store, self.spec.name)
        line = {"trial": trial.id, "on": self.backend.name, "job": job, "time": time.time()}
        text = folder.read_texts([LAUNCHED_FILE]).get(LAUNCHED_FILE, "")
        folder.write_text(LAUNCHED_FILE, text + json.dumps(line) + "\n")


def read_launched(store: str, sweep: str) -> dict[tuple[str, str], str]:
    """Read (trial, backend) -> its newest job there."""
    text = plan.open_sweep_folder(store, sweep).read_texts([LAUNCHED_FILE]).get(LAUNCHED_FILE, "")
    return {(line["trial"], line["on"]): line["job"] for line in parse_lines(text)}
