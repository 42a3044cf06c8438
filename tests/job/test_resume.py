"""Resuming in one process: what is refused, what is reported, what all ranks agree on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from datasets import DatasetFacts
from engine import TrainState
from job.resume import check_resume, describe_hardware, restore
from job.spec import Job
from store.record.runs import Run
from tasks.protocol import TaskFacts
from tests.support.tiny_parts import TinyConvNet, create_config, create_cpu_runtime, create_state
from utils.checkpoint.files import CheckpointError
from utils.checkpoint.find import find_checkpoint
from utils.checkpoint.manager import CheckpointManager
from utils.checkpoint.state import collect_state
from utils.errors import UserError


@pytest.fixture
def job(tmp_path) -> Job:
    """A checked job with one checkpoint, of step 3."""
    config = create_config(tmp_path)
    runtime = create_cpu_runtime()
    state = create_tiny_state(config, runtime)
    state.step = 3
    tensors, facts = collect_state(state, runtime.fetch_all)
    facts = {
        **facts.model_dump(),
        "config": config.model_dump(mode="json"),
        "environment": describe_hardware(runtime),
    }
    run = Run(tmp_path / "run")
    CheckpointManager(run.checkpoints).save(3, tensors, facts, best=False)
    facts_of_task = TaskFacts(
        dataset=DatasetFacts({}, 10, None),
        model_arguments={},
        export={},
        stream={},
        teachers=[],
        description="",
    )
    return Job(
        config=config,
        device="cpu",
        run=run,
        checkpoint=find_checkpoint(run.checkpoints),
        facts=facts_of_task,
        stream={},
        total_steps=8,
        steps_per_epoch=8,
        num_parameters=1,
    )


def create_tiny_state(config, runtime):
    return create_state(runtime, TinyConvNet(), config.optim)


def change(job: Job, *flags: str) -> Job:
    return replace(job, config=create_config(Path(job.config.run.output_dir), *flags))


def restore_here(job: Job, runtime=None) -> TrainState:
    runtime = runtime or create_cpu_runtime()
    state = create_tiny_state(job.config, runtime)
    restore(runtime, job, state)
    return state


def test_a_run_resumes_in_its_old_environment_without_warning(job, caplog):
    check_resume(job, TinyConvNet())
    assert restore_here(job).step == 3
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_checkpoint_without_metadata_is_refused_before_a_device_is_touched(job):
    (Path(job.checkpoint) / "state.json").unlink()
    with pytest.raises(UserError, match=r"^run.resume: .*state.json.*choose another checkpoint$"):
        check_resume(job, TinyConvNet())


def test_another_seed_is_refused_before_and_after_the_device_starts(job):
    other = change(job, "--train.seed=7")
    for go_on in (lambda: check_resume(other, TinyConvNet()), lambda: restore_here(other)):
        with pytest.raises(UserError, match=r"train.seed"):
            go_on()


def test_another_environment_warns_and_is_refused_if_deterministic(job, caplog, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    restore_here(job)
    assert "is 99" in caplog.text and "bits may differ" in caplog.text
    with pytest.raises(UserError, match=r"train.deterministic: .*is 99"):
        restore_here(change(job, "--train.deterministic=true"))


def test_ranks_that_read_different_checkpoints_are_named(job, monkeypatch):
    runtime = create_cpu_runtime()
    monkeypatch.setattr(
        runtime.ranks, "gather", lambda value: [value, 2] if value == 3 else [value]
    )
    with pytest.raises(CheckpointError, match=r"different steps: \[3, 2\]"):
        restore_here(job, runtime)
