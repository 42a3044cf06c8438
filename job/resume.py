"""Chooses the run and checkpoint to resume, checks that they fit, and restores the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from store.query.changes import check_changes, check_stream, find_changes
from store.record.lock import refuse_if_owned
from store.record.runs import CHECKPOINTS, Run, RunStore, check_free
from store.record.session import RunSession
from store.record.summary import is_finished
from utils.checkpoint.files import CheckpointError, Location, inspect_checkpoint, verify_checkpoint
from utils.checkpoint.find import find_checkpoint, has_checkpoints, load_newest
from utils.checkpoint.fit import compare_tensors
from utils.checkpoint.state import restore_state
from utils.config.keys import get_neutral_keys, get_resume_rules
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.log import get_logger
from utils.patterns import matches
from utils.storage.folder import StorageError
from utils.storage.places import check_writable, is_remote, open_folder, to_path
from utils.storage.retry import hurry
from utils.weights.adapters import is_adapter
from utils.weights.class_names import ClassSide, require_same_classes
from utils.weights.fitting import Fit, FitRules
from utils.weights.load import find_other_variant, load_weights
from utils.weights.opening import open_weights

if TYPE_CHECKING:
    from torch import nn

    from engine import TrainState
    from job.spec import Job
    from utils.checkpoint.files import CheckpointFacts
    from utils.config.load import RunConfig
    from utils.runtime.base import Runtime

# Keys of a run's data.
_DATA_KEYS = ("data.source", "data.name", "data.root")


@dataclass(frozen=True)
class Finished:
    """A complete run, of which nothing is left to do; `reason`: that of its run.json."""

    reason: str


def choose_run(config: RunConfig) -> tuple[Run, Location | None]:
    """Choose the run's directory and the checkpoint to resume or evaluate, if any."""
    store = open_store(config)
    with hurry():
        if not config.run.eval_only:
            check_writable(config.run.output_dir, "run.output_dir")
            if config.run.checkpoint_root:
                check_writable(config.run.checkpoint_root, "run.checkpoint_root")
        try:
            run, checkpoint = _choose(config, store)
        except StorageError as error:
            key = "run.resume" if config.run.resume not in ("", "auto") else "run.output_dir"
            raise UserError(
                f"{key}: {error}; check the bucket's name, your login and its permissions"
            ) from error
    if not config.run.eval_only:
        nearest = next(p for p in (run.path, *run.path.absolute().parents) if p.exists())
        if not nearest.is_dir():
            raise UserError(
                f"run.output_dir: the run would be in {run.path}, but {nearest} is a file; move it "
                "away, or change run.output_dir, run.experiment or run.run_id"
            )
        refuse_if_owned(run.path)
    return run, checkpoint


def open_store(config: RunConfig) -> RunStore:
    """Open the runs of the configuration's experiment."""
    section = config.run
    return RunStore(
        section.output_dir, section.experiment, section.checkpoint_root, section.cache_dir
    )


def take_run(
    config: RunConfig, session: RunSession, checkpoint: Location | None
) -> Location | Finished | None:
    """Acquire the chosen run, and return its newest checkpoint.

    Between the choice and the lock another program may have begun, written or ended. `Finished` if
    `run.resume: auto` finds a complete run of the same configuration.
    """
    if not config.run.resume:
        session.take_new(overwrite=config.run.overwrite)
        return None
    session.take_old()
    if config.run.resume != "auto":
        return checkpoint
    location = session.run.checkpoints
    newest = find_checkpoint(location, verify=False) if has_checkpoints(location) else None
    # The cheaper check first: the other one reads the whole checkpoint.
    own = config.model_dump(mode="json")
    if is_finished(session.run, own, get_neutral_keys()) and _is_at_end(session.run, newest):
        return Finished(str(session.run.read().get("reason", "")))
    return newest


def _is_at_end(run: Run, newest: Location | None) -> bool:
    """Return whether no checkpoint is left, or the newest is valid and of a complete run's end."""
    final = run.read().get("final")
    steps = final.get("steps") if isinstance(final, dict) else None
    if newest is None or open_folder(newest).name != f"step_{steps or 0:08d}":
        return newest is None
    try:
        verify_checkpoint(newest)
    except CheckpointError:
        return False  # the restore names it and uses an older one
    return True


def check_resume(job: Job, student: nn.Module) -> None:
    """Check that the configuration fits the checkpoint's model, settings and teachers."""
    if job.checkpoint is None:
        return
    try:
        facts = inspect_checkpoint(job.checkpoint)
    except CheckpointError as error:
        raise UserError(f"run.resume: {error}; choose another checkpoint") from error
    own = {f"model/{name}": value for name, value in student.state_dict().items()}
    saved = {name: e for name, e in facts.tensors.items() if name.startswith("model/")}
    if len(diff := compare_tensors(own, saved)):
        raise UserError(
            f"run.resume ({str(job.checkpoint)!r}) is a checkpoint of another model: {len(diff)} "
            f"tensors differ, {diff.summary()}; resume with the model that wrote it"
        )
    _check_classes(job, facts.model)
    if job.config.run.eval_only:
        now = job.config.model_dump(mode="json")
        changes = find_changes(facts.config, now) if facts.config is not None else {}
        changed = [(key, changes[key]) for key in _DATA_KEYS if key in changes]
        if words := [f"{key} was {old!r}, is {new!r}" for key, (old, new) in changed]:
            get_logger().warning("other data than the checkpoint's run: %s", "; ".join(words))
    else:
        for line in check_same_config(job, facts):
            get_logger().warning("changed since the checkpoint was written: %s", line)
    _check_variant(job, student, facts.model)


def check_same_config(job: Job, facts: CheckpointFacts) -> list[str]:
    """Refuse a checkpoint of another configuration; return a line for each change of bits.

    The UserError names each key with both values, or more steps than are configured.
    """
    if facts.step > job.total_steps:
        key = "train.epochs" if job.config.train.steps is None else "train.steps"
        raise UserError(
            f"{key} gives {job.total_steps} steps, but the checkpoint in run.resume has done "
            f"{facts.step}; resume with at least as many, or start a new run by --init-from"
        )
    if facts.config is None:
        return ["the checkpoint has no configuration: nothing could be compared"]
    allowed = job.config.run.allow_changes
    rules = get_resume_rules()
    lines = check_changes(facts.config, job.config.model_dump(mode="json"), allowed, rules)
    is_other = facts.teachers not in (None, job.facts.teachers)
    if is_other and "distill.teacher_weights" not in allowed:
        raise UserError(
            "distill.teacher_weights: the teachers' weights differ from those of the run's start; "
            "use the same files, or allow it by "
            """--run.allow_changes='["distill.teacher_weights"]'"""
        )
    if facts.stream is None:
        return lines
    mid_epoch = facts.data["examples"] > 0
    return lines + check_stream(facts.stream, job.stream, allowed, rules, mid_epoch=mid_epoch)


def start_weights(job: Job, student: nn.Module) -> Fit | None:
    """Load run.init_from, if it is set, into a new run's student; on the meta device only check."""
    section = job.config.run
    if not section.init_from or job.checkpoint is not None:
        return None
    rules = _create_rules(job, student, section.init_skip, section.init_rename)
    return load_weights(student, open_weights(section.init_from, "run.init_from"), rules)


def describe_start(job: Job, student: nn.Module) -> tuple[str, ...]:
    """Describe the weights that a new run's student takes from model.weights and run.init_from.

    Logs a warning if class names are known on one side only. `student` is on the meta device.
    """
    if job.checkpoint is not None:
        return ()
    path_or_url, lines = job.config.model.weights, list[str]()
    fits: dict[str, Fit | None] = {}
    if path_or_url:
        opened = open_weights(path_or_url, "model.weights")
        fits["model.weights"] = load_weights(student, opened, _create_rules(job, student))
    fits["run.init_from"] = start_weights(job, student)
    for key, fit in fits.items():
        if fit is not None:
            lines += [f"{key}: {note}" for note in fit.notes]
        if fit is not None and fit.warning:
            get_logger().warning("%s", fit.warning)
    return tuple(lines)


def _create_rules(
    job: Job,
    student: nn.Module,
    skip: tuple[str, ...] = (),
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> FitRules:
    # Adapters are the run's own: they keep their initial values with any weights.
    kept = (*skip, *filter(is_adapter, student.state_dict()))
    names = job.facts.class_names
    return FitRules(kept, renamed, job.config.model.reset_head, names)


def restore(runtime: Runtime, job: Job, state: TrainState) -> None:
    """Restore the state of the job's checkpoint, if it has one.

    If a checkpoint proves broken only now, an older one is used, unless it was named. UserError if
    the named one is broken or none fits; CheckpointError if none is valid, or the ranks have read
    different ones.
    """
    if job.checkpoint is None:
        return
    wanted, location = job.config.run.resume, job.checkpoint
    is_named = wanted != "auto" and open_folder(wanted).name == open_folder(location).name
    try:
        location, parts, facts = load_newest(location, fall_back=not is_named)
    except CheckpointError as error:
        if is_named:
            raise UserError(f"run.resume: {error}; choose another checkpoint") from error
        raise
    check_same_config(job, facts)  # it may be newer or older than the one checked before
    _check_hardware(runtime, job, facts.environment)
    restore_state(state, parts, facts, location)
    runtime.finish_step()
    # Another host may not see the run's directory.
    known = runtime.ranks.broadcast_value(job.run.read().get("skipped_steps", ()))
    state.skipped_steps = tuple(sorted({*state.skipped_steps, *known}))
    get_logger().info("resumed from %s at step %d", location, state.step)
    steps = runtime.ranks.gather(state.step)
    if len(set(steps)) > 1:
        raise CheckpointError(f"the ranks have read checkpoints of different steps: {steps}")


def describe_hardware(runtime: Runtime) -> JsonObject:
    """Return what affects bits besides the configuration: device, ranks, threads, versions."""
    threads = torch.get_num_threads()
    return {**runtime.describe(), "threads": threads, "torch": torch.__version__}


def _check_hardware(runtime: Runtime, job: Job, then: JsonObject) -> None:
    """Log, or with train.deterministic refuse, hardware on which bits may differ."""
    now = describe_hardware(runtime)
    changed = [f"{k} was {then[k]}, is {now[k]}" for k in now if then.get(k, now[k]) != now[k]]
    if not changed:
        return
    words = "; ".join(changed)
    if job.config.train.deterministic:
        raise UserError(
            f"train.deterministic: the checkpoint was written elsewhere ({words}), so bits would "
            "differ; resume there, or remove train.deterministic"
        )
    get_logger().warning("bits may differ from those of an unbroken run: %s", words)


def roll_back_state(runtime: Runtime, job: Job, state: TrainState, bad_step: int) -> bool:
    """Restore the newest checkpoint before a bad step; return whether there is one."""
    location = None
    if runtime.ranks.is_writer and has_checkpoints(job.run.checkpoints):
        location = find_checkpoint(job.run.checkpoints)
    location = runtime.ranks.broadcast_value(location)
    if location is None:
        return False
    skipped = {*state.skipped_steps, bad_step}
    _, parts, facts = load_newest(location)
    restore_state(state, parts, facts, location)
    runtime.finish_step()
    state.skipped_steps = tuple(sorted({*state.skipped_steps, *skipped}))
    return True


def _choose(config: RunConfig, store: RunStore) -> tuple[Run, Location | None]:
    if not config.run.resume:
        run = store.choose(config.run.run_id, config.train.seed)
        if not config.run.eval_only:
            check_free(run, overwrite=config.run.overwrite)
        return run, None
    if config.run.resume != "auto":
        checkpoint = find_checkpoint(config.run.resume, verify=False)
        return _find_owner(config, store, checkpoint), checkpoint
    run = store.get(config.run.run_id) if config.run.run_id else store.find_newest()
    if run is None or not has_checkpoints(run.checkpoints):
        if config.run.eval_only:
            raise UserError(
                f"run.resume 'auto' finds no checkpoint under {store.place}; train first, or give "
                "--resume PATH"
            )
        return run or store.choose(config.run.run_id, config.train.seed), None
    return run, find_checkpoint(run.checkpoints, verify=False)


def _find_owner(config: RunConfig, store: RunStore, checkpoint: Location) -> Run:
    """Return the run that a checkpoint belongs to."""
    folder = open_folder(checkpoint).parent
    if folder.name != CHECKPOINTS:
        return store.get(config.run.run_id or folder.name)
    home = folder.parent
    if config.run.run_id not in ("", home.name):
        raise UserError(
            f"run.run_id ({config.run.run_id!r}) is not supported with run.resume of "
            f"{home.name!r}; remove it, or start a new run by --init-from"
        )
    if not is_remote(home.place):
        return Run(to_path(home.place))
    root = RunStore(home.parent.parent.place, home.parent.name, cache_dir=config.run.cache_dir)
    return root.get(home.name)


def _check_classes(job: Job, model: JsonObject) -> None:
    """Refuse data whose class numbers have another meaning than the checkpoint's."""
    path, allowed = str(job.checkpoint), job.config.run.allow_changes
    data = job.config.data
    own = ClassSide(
        f"data.{'name' if data.name else 'root'} ({data.name or data.root!r})",
        job.facts.export.get("classes"),
    )
    then = ClassSide(f"run.resume ({path!r})", model.get("classes"))
    if job.config.run.eval_only:
        way = "evaluate it by python -m tools.evaluate RUN --sets, "
        by_name, way = f"{way}which maps classes by name", f"{way}with a class_map"
    elif any(matches(key, allowed) for key in _DATA_KEYS):
        return
    else:
        way = "resume with the data that wrote it, or allow it by "
        way += """--run.allow_changes='["data.root"]'"""
        by_name = ""
    require_same_classes(own, then, way=way, by_name=by_name)


def _check_variant(job: Job, student: nn.Module, model: JsonObject) -> None:
    """Refuse arguments that change the meaning of equal tensors, unless they are allowed."""
    if matches("model.args", job.config.run.allow_changes):
        return
    path = str(job.checkpoint)
    if words := find_other_variant(student, model, "run.resume", path):
        raise UserError(
            f"run.resume ({path!r}) is a checkpoint of another variant: {words}, which changes the "
            "meaning of tensors of the same names and shapes; set the checkpoint's values"
        )
