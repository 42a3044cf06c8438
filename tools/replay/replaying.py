"""Replays a step of a run on its device: the work of `tools.replay`."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine import train_step, upload_numbers
from job.build import build_parts
from job.check import check
from job.steps.bad_step import BAD_STEP, rebuild_batch, walk_to
from job.steps.modules import name_modules
from store.query.record import RunRecord
from store.record.ids import CONFIG_FILE
from store.terminal import print_json
from tools.replay.watching import StepWatch, count_bad
from tools.runs.find_runs import find_paths
from utils.checkpoint.files import inspect_checkpoint, load_part
from utils.checkpoint.find import get_folder_name, list_steps
from utils.config.load import load_config
from utils.errors import EXIT_FAILED, UserError
from utils.log import setup_logging
from utils.programs import require_at_least
from utils.runtime.launcher import launch
from utils.storage.places import is_remote, to_path

if TYPE_CHECKING:
    from datasets import Batch
    from job.build import Parts
    from job.spec import Job
    from tasks.protocol import RunTask
    from utils.config.load import RunConfig
    from utils.json_types import JsonObject
    from utils.runtime.base import Runtime
    from utils.storage.folder import Folder

# How many of the modules that are not finite are printed for each phase.
_SHOWN = 5


@dataclass(frozen=True)
class Replay:
    """What is replayed: `kept` is the folder of a kept step, or empty if the way is repeated."""

    run: str
    step: int
    kept: str
    as_json: bool


def replay(options: argparse.Namespace) -> int:
    """Find the state to start from, check the configuration, and replay on its runtime."""
    require_at_least(0, options, "step")
    (place,) = find_paths(options, [options.run])
    record = RunRecord(place if is_remote(place) else to_path(place).absolute())
    kept = list_steps(record.folder.child(BAD_STEP))
    if options.step is None and not kept:
        raise UserError(
            f"RUN {record.path} has kept no bad step; give --step N, which the reason in its "
            "run.json names, or train with --train.keep_bad_step"
        )
    step = kept[-1] if options.step is None else options.step
    start = record.folder.child(BAD_STEP) if step in kept else None
    before = [number for number in list_steps(record.checkpoints) if number <= step]
    if start is not None:
        start = start.child(get_folder_name(step))
    elif before:
        start = record.checkpoints.child(get_folder_name(before[-1]))
    job = check(_read_config(record, start, options.rest))
    if step >= job.total_steps:
        raise UserError(
            f"--step ({step}) lies beyond the run's {job.total_steps} steps, which are 0 to "
            f"{job.total_steps - 1}; give one of them"
        )
    work = Replay(record.path, step, str(start) if step in kept else "", options.json)
    return launch(job.config.runtime, replay_replica, job, work, device=job.device)


def _read_config(record: RunRecord, start: Folder | None, flags: list[str]) -> RunConfig:
    """Return the run's configuration, set to go on from a checkpoint or from its first step."""
    text = record.folder.read_texts([CONFIG_FILE]).get(CONFIG_FILE, "")
    if not text:
        raise UserError(f"RUN {record.path} has no {CONFIG_FILE}; take it from a copy of the run")
    experiment = record.folder.parent
    own = {
        "run.output_dir": experiment.parent,
        "run.experiment": experiment.name,
        "run.run_id": record.folder.name,
        "run.resume": "" if start is None else start,
        # Nothing is written; without a checkpoint the run's directory is there already.
        "run.overwrite": "true" if start is None else "false",
        # Compiled blocks hide the modules in them.
        "train.scan_layers": "false",
        "runtime.compile": "false",
    }
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / CONFIG_FILE
        file.write_text(text, encoding="utf-8")
        return load_config(
            ["--config", str(file), *flags, *(f"--{key}={value}" for key, value in own.items())]
        )


def replay_replica(runtime: Runtime, job: Job, work: Replay) -> int:
    """Replay the step on one replica; the first one prints what all have found."""
    setup_logging(runtime.ranks.index, runtime.ranks.size)
    if job.config.train.deterministic:
        runtime.make_deterministic()
    parts = build_parts(runtime, job)
    try:
        task = runtime.prepare_task(parts.task, parts.state.model, parts.state.loss_modules)
        if work.kept:
            batch = _load_batch(runtime, work.kept)
        else:
            batch = walk_to(runtime, parts, task, work.step)
        reports = runtime.ranks.gather(_examine(runtime, parts, task, batch))
    finally:
        parts.close()
    is_finite = not any(rank["found"] or rank["bad_scalars"] for rank in reports)
    if runtime.ranks.is_writer:
        source = work.kept or (str(job.checkpoint) if job.checkpoint else "its first step")
        report = {"run": work.run, "step": work.step, "from": source, "device": job.device}
        if work.as_json:
            print_json({**report, "ranks": reports})
        else:
            sys.stdout.write("\n".join(_describe(report, reports)) + "\n")
    return EXIT_FAILED if is_finite else 0


def _load_batch(runtime: Runtime, kept: str) -> Batch:
    rank, batches = runtime.ranks.index, inspect_checkpoint(kept).batches
    if len(batches) != runtime.ranks.size:
        raise UserError(
            f"{kept} has the batches of {len(batches)} processes, but {runtime.ranks.size} are "
            "running; replay with as many (runtime.cpu_processes, runtime.num_processes)"
        )
    part = f"batch_{rank}"
    return rebuild_batch({part: load_part(kept, part)}, batches[rank], rank)


def _examine(runtime: Runtime, parts: Parts, task: RunTask[Batch], batch: Batch) -> JsonObject:
    """Run the state's next step as the loop does, and collect what is not finite in it."""
    state, plan = parts.state, parts.plan
    moved = runtime.to_device(batch)
    tensors = {"weights": state.get_replicated(), "batch": moved.get_tensors()}
    given = {name: count_bad(list(values.values())) for name, values in tensors.items()}
    state.model.train()
    state.loss_modules.train()
    with StepWatch(name_modules(parts)) as watch, runtime.step(plan.seed, state.step):
        numbers = upload_numbers(state, plan, runtime)
        scalars = train_step(state, moved, task, runtime, plan, numbers)
    values = {name: float(runtime.fetch(value)) for name, value in scalars.items()}
    bad = {
        name: 0 if counts is None else int(runtime.fetch(counts)[:2].sum())
        for name, counts in given.items()
    }
    bad_scalars = {name: str(v) for name, v in values.items() if not math.isfinite(v)}
    bad_values = watch.read(runtime)
    return {"given": bad, "scalars": values, "bad_scalars": bad_scalars, "found": bad_values}


def _describe(report: JsonObject, ranks: list[JsonObject]) -> list[str]:
    lines = ["step {step} of {run}, from {from}, on {device}".format(**report)]
    for index, rank in enumerate(ranks):
        head = f"rank {index}: " if len(ranks) > 1 else ""
        lines += [
            f"{head}{name}: {count:,} numbers are not finite before the step"
            for name, count in rank["given"].items()
            if count
        ]
        for phase in ("forward", "backward"):
            rows = [row for row in rank["found"] if row["phase"] == phase]
            lines.append(f"{head}{phase}: {_describe_first(rows)}")
            lines += [f"{head}  then {_describe_row(row)}" for row in rows[1:_SHOWN]]
        shown = rank["bad_scalars"] or {"all scalars": "finite"}
        lines.append(head + ", ".join(f"{name} {value}" for name, value in shown.items()))
    return lines


def _describe_first(rows: list[JsonObject]) -> str:
    if not rows:
        return "every number is finite"
    text = f"the first numbers that are not finite: {_describe_row(rows[0])}"
    if rows[0]["phase"] == "backward":
        return text
    count = rows[0]["bad_inputs"]
    return f"{text}; {f'{count:,} of its inputs are not' if count else 'its inputs are all finite'}"


def _describe_row(row: JsonObject) -> str:
    call = f", call {row['call']}" if row["call"] > 1 else ""
    return (
        f"{row['module']}{call}, {row['what']}: {row['nan']:,} NaN and {row['infinite']:,} "
        f"infinite of {row['of']:,}"
    )
