"""Hosts of one mesh: what is read or sent together is requested by all, or all hang.

Two threads are the hosts of a run: they add up and speak in a meeting that notices at once when
one of them asks for something else, or ends, which on a pod would be a hang.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import main
from job.check import check
from job.replica import run
from store.record.runs import Run
from tests.support.tiny_parts import create_argv, create_config
from utils.checkpoint import files as checkpoint_files
from utils.checkpoint.files import CheckpointError
from utils.config.execution import RuntimeSection
from utils.runtime.cpu import CpuRuntime
from utils.runtime.processes.ranks import ProcessRanks

HOSTS = 2


class Meeting:
    """Where the hosts meet: each call is answered once all have made the same one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turns: list[dict[int, Any]] = []
        self._next = [0] * HOSTS
        self._ended = False

    def meet(self, rank: int, kind: str, value: Any = None) -> list[Any]:
        """Every host's value, in order of ranks."""
        with self._changed:
            turn = self._next[rank]
            self._next[rank] += 1
            if turn == len(self._turns):
                self._turns.append({})
            told = self._turns[turn]
            told[rank] = (kind, value)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(told) == HOSTS or self._ended, timeout=60.0)
            assert len(told) == HOSTS, f"host {rank} waits in vain with its {kind}"
        kinds = [told[host][0] for host in range(HOSTS)]
        assert len(set(kinds)) == 1, f"the hosts do different things: {kinds}"
        return [told[host][1] for host in range(HOSTS)]

    def end(self) -> None:
        """Abort the calls of all waiting hosts."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class ThreadGroup:
    """What `ProcessGroup` does, between threads."""

    size = HOSTS

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        values = self.meeting.meet(self.rank, "sum", tensor.clone())
        return tensor.copy_(sum(values[1:], values[0]))

    def broadcast_from_first(self, tensors: list[Tensor]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(self.meeting.meet(self.rank, "copy", tensor.clone())[0])

    def gather(self, value: Any) -> list[Any]:
        return self.meeting.meet(self.rank, "gather", value)

    def barrier(self) -> None:
        self.meeting.meet(self.rank, "barrier")

    def leave(self) -> None:
        self.meeting.end()


class MeshHost(CpuRuntime):
    """One host of a mesh of two devices each: shards are fetched by all hosts together."""

    local_devices = 2

    def __init__(self, section: RuntimeSection, meeting: Meeting, rank: int) -> None:
        super().__init__(section)
        self.meeting = meeting
        self.ranks = ProcessRanks(self, ThreadGroup(meeting, rank), torch.float32)
        self.fetches: list[str] = []

    def fetch_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.fetches.append(self.instruments.current_span)
        self.meeting.meet(self.ranks.index, "fetch", len(tensors))
        return super().fetch_all(tensors)


def run_hosts(folder: Path, *flags: str) -> list[Any]:
    """A run on all hosts; gives each one's exit code or error."""
    config = create_config(
        folder, "--runtime.num_threads=1", "--run.run_id=mesh", "--runtime.num_processes=2", *flags
    )
    job, meeting = check(config), Meeting()

    def work(rank: int) -> tuple[Any, list[str]]:
        runtime = MeshHost(config.runtime, meeting, rank)
        try:
            outcome: Any = run(runtime, job)
        except Exception as error:
            outcome = error
        finally:
            runtime.ranks.leave()
        return outcome, runtime.fetches

    with ThreadPoolExecutor(HOSTS) as pool:
        outcomes = list(pool.map(work, range(HOSTS)))
    assert outcomes[0][1] == outcomes[1][1]
    return [outcome for outcome, _ in outcomes]


def test_running_statistics_become_the_mean_of_all_ranks():
    section, meeting = RuntimeSection(device="cpu"), Meeting()

    def average(rank: int) -> dict[str, list[float]]:
        norm = torch.nn.BatchNorm1d(2)
        norm.running_mean.copy_(torch.tensor([1.0, 2.0]) + 4 * rank)
        norm.running_var.fill_(1.0 + rank)
        norm.num_batches_tracked.fill_(5)
        MeshHost(section, meeting, rank).ranks.average_buffers(norm)
        return {name: value.tolist() for name, value in norm.named_buffers()}

    with ThreadPoolExecutor(HOSTS) as pool:
        found = list(pool.map(average, range(HOSTS)))
    wanted = {"running_mean": [3.0, 4.0], "running_var": [1.5, 1.5], "num_batches_tracked": 5}
    assert found == [wanted, wanted]


def test_hosts_agree_when_a_checkpoint_is_already_written(tmp_path):
    """Steps 3 and 6 are a checkpoint's and a best evaluation's; step 6 is the end as well."""
    flags = ("--train.steps=6", "--train.checkpoint_every_steps=3", "--train.eval_every_epochs=0.5")
    assert run_hosts(tmp_path, *flags) == [0, 0]
    assert Run(tmp_path / "tiny" / "mesh").read()["status"] == "complete"
    # Nothing is left to write: the writer knows the step from the checkpoint that it read.
    assert run_hosts(tmp_path, *flags, "--resume=auto") == [0, 0]


@pytest.mark.parametrize("bad", [2, 6])
def test_a_checkpoint_that_cannot_be_written_ends_all_hosts(tmp_path, monkeypatch, bad):
    """Rank zero alone meets it, in its thread; the others learn it by word, not by timeout."""
    original, calls = checkpoint_files.save_file, []

    def fail(tensors: object, path: object, **kwargs: object) -> None:
        calls.append(path)
        if f"step_{bad:08d}" in str(path):
            raise OSError(28, "No space left on device")
        original(tensors, path, **kwargs)

    monkeypatch.setattr(checkpoint_files, "save_file", fail)
    errors = run_hosts(tmp_path, "--train.steps=6", "--train.checkpoint_every_steps=2")
    assert [type(error) for error in errors] == [CheckpointError] * 2, errors
    assert all("No space left on device" in str(error) for error in errors)
    assert calls


@pytest.mark.parametrize("hosts", [1, 2])
def test_waiting_for_an_upload_does_not_count_as_hanging(tmp_path, monkeypatch, hosts):
    """Each write lasts until the loop, which waits for it, has given some more signs of life."""
    beats = threading.Semaphore(0)
    monkeypatch.setattr("job.saving.LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("utils.stopping.StallWatch.beat", lambda watch: beats.release())
    original, seen = checkpoint_files.save_file, []

    def save_slowly(*args: object, **kwargs: object) -> None:
        seen.append(all(beats.acquire(timeout=20.0) for _ in range(100)))
        original(*args, **kwargs)

    monkeypatch.setattr(checkpoint_files, "save_file", save_slowly)
    flags = ("--train.steps=2", "--train.eval_every_epochs=9")
    if hosts == 1:
        assert main.main(create_argv(tmp_path, "--run.run_id=mesh", *flags)) == 0
    else:
        assert run_hosts(tmp_path, *flags) == [0, 0]
    assert seen
    assert all(seen)
