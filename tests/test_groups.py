"""Ranks as processes: a failure ends all in bounded time, with the first cause last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed import DistBackendError, DistNetworkError

from tests.support.child_runs import ROOT, get_command, get_environment
from tests.support.tiny_parts import create_argv
from tests.support.waiting import PATIENCE_S, wait_for
from utils.errors import UserError
from utils.runtime.processes.children import (
    RECORDS,
    GroupError,
    get_core_share,
    launch_processes,
    raise_cause,
    read_failures,
    record_failure,
)
from utils.runtime.processes.ranks import ReplicaError, compare_checksums

TIMEOUT_S = 10.0


def join() -> object:
    from utils.config.execution import RuntimeSection
    from utils.runtime.launcher import create_runtime

    return create_runtime(RuntimeSection(device="cpu", timeout_s=TIMEOUT_S))


def sum_forever(folder: str, rank: int, act: str) -> None:
    """Sum over ranks without end; one rank does something else in its third turn."""
    import torch

    runtime = join()
    Path(folder, f"pid_{runtime.ranks.index}").write_text(str(os.getpid()))
    for turn in range(10**9):
        if runtime.ranks.index == rank and turn == 3:
            {"raise": _raise, "kill": _kill, "hang": _hang, "refuse": _refuse}[act]()
        runtime.ranks.sum(torch.ones(1))


def arrive_unless(rank: int) -> None:
    """Join the group, but for one rank, which never does."""
    if os.environ["RANK"] == str(rank):
        _hang()
    join().barrier("start")


def give_rank_sums(folder: str) -> int:
    import torch

    from utils.runtime.processes.ranks import create_gather

    runtime = join()
    ranks = runtime.ranks
    found = {
        "sum": ranks.sum(torch.tensor([ranks.index + 1.0])).item(),
        "mean": ranks.mean(torch.tensor([float(ranks.index)])).item(),
        "ranks": ranks.gather(ranks.index),
        "first": ranks.broadcast_value(f"of {ranks.index}"),
        "any": ranks.any(ranks.index == 1),
        "rows": create_gather(runtime)(torch.full((2, 1), ranks.index + 0.1)).flatten().tolist(),
        "threads": torch.get_num_threads(),
    }
    Path(folder, f"rank_{ranks.index}").write_text(json.dumps(found))
    ranks.barrier("end")
    runtime.ranks.leave()
    return 0


class MeanOfImages:
    """What DistributedDataParallel needs of a task."""

    unit = ("img", 1)
    count = summarise = None

    def loss(self, model, batch):
        return model(batch.images).mean()


def sum_gradients(folder: str) -> None:
    """Gradients of 1 + 2^-10, which bfloat16 rounds to 1, by each way of summing."""
    import torch

    from datasets import ImageBatch
    from utils.config.execution import RuntimeSection
    from utils.runtime.launcher import create_runtime
    from utils.runtime.processes.group import ProcessGroup

    images = torch.full((2, 1), 1 + 2.0**-10)
    rest = {name: torch.zeros(2) for name in ("labels", "mask", "indices")}
    batch = ImageBatch(images=images, **rest)
    group, found = ProcessGroup.join(RuntimeSection(timeout_s=TIMEOUT_S), "gloo"), {}
    ProcessGroup.join = lambda section, backend: group  # of a process one can be joined
    for overlap in (False, True):
        for dtype in ("fp32", "bf16"):
            section = RuntimeSection(device="cpu", reduce_dtype=dtype, overlap=overlap)
            runtime = create_runtime(section)
            layer = torch.nn.Linear(1, 1, bias=False)
            task = runtime.prepare_task(MeanOfImages(), layer, torch.nn.Module())
            optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
            runtime.backward(task.loss(layer, batch), last=True)
            runtime.ranks.reduce_gradients(optimizer)
            found[f"{overlap} {dtype}"] = layer.weight.grad.item()
            del task  # DDP must be gone before the group that it speaks by
    runtime.ranks.leave()
    Path(folder, f"rank_{os.environ['RANK']}").write_text(json.dumps(found))


def end_unless(rank: int) -> int:
    if os.environ["RANK"] == str(rank):
        _hang()
    return 0


def give_code(code: int) -> int:
    return code


def _raise() -> None:
    raise ArithmeticError("the third turn")


def _refuse() -> None:
    raise UserError("data.root is empty; name it")


def _kill() -> None:
    os.kill(os.getpid(), 9)


def _hang() -> None:
    import threading

    threading.Event().wait()


def test_ranks_sum_gather_and_broadcast(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch_processes(3, TIMEOUT_S, give_rank_sums, str(tmp_path)) == 0
    for rank in range(3):
        found = json.loads((tmp_path / f"rank_{rank}").read_text())
        assert found.pop("threads") == max(1, len(os.sched_getaffinity(0)) // 3)
        assert found.pop("rows") == pytest.approx([0.1, 0.1, 1.1, 1.1, 2.1, 2.1])
        assert found == {"sum": 6.0, "mean": 1.0, "ranks": [0, 1, 2], "first": "of 0", "any": True}
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(("said", "share"), [("", 2), ("3", 3)])
def test_cores_are_divided_among_ranks_unless_set(monkeypatch, said, share):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(9)))
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert get_core_share(4) == share


def test_gradients_are_summed_in_the_requested_type(tmp_path):
    assert launch_processes(2, TIMEOUT_S, sum_gradients, str(tmp_path)) == 0
    exact, rounded = 1 + 2.0**-10, 1.0
    for rank in range(2):
        found = json.loads((tmp_path / f"rank_{rank}").read_text())
        assert found == {
            "False fp32": exact,
            "False bf16": rounded,
            "True fp32": exact,
            "True bf16": rounded,
        }


@pytest.mark.slow
def test_the_group_gives_its_ranks_exit_code():
    assert launch_processes(2, TIMEOUT_S, give_code, 75) == 75


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        ("raise", "rank 1 failed: ArithmeticError: the third turn"),
        pytest.param("kill", "rank 1 died: ended by SIGKILL", marks=pytest.mark.slow),
        pytest.param(
            "hang",
            rf"rank 1 hung: no answer for {TIMEOUT_S:g} s \(runtime.timeout_s\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failed_rank_ends_all_and_is_named(act, cause, tmp_path):
    with pytest.raises(GroupError, match=cause):
        launch_processes(3, TIMEOUT_S, sum_forever, str(tmp_path), 1, act)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid_*")]
    assert len(pids) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_ranks_user_error_is_reported_as_such(tmp_path):
    with pytest.raises(UserError, match=r"^data.root is empty; name it$"):
        launch_processes(2, TIMEOUT_S, sum_forever, str(tmp_path), 0, "refuse")


@pytest.mark.slow
def test_a_rank_that_does_not_end_is_named():
    with pytest.raises(GroupError, match="rank 1 hung: no end within 2 s"):
        launch_processes(2, 2.0, end_unless, 1)


@pytest.mark.slow
def test_a_rank_that_never_arrives_is_named():
    with pytest.raises(GroupError, match="rank 2 hung: no answer for 10 s"):
        launch_processes(3, TIMEOUT_S, arrive_unless, 2)


def test_no_rank_outlives_the_process_that_started_it(tmp_path):
    script = (
        "from tests.test_groups import *\n"
        f"launch_processes(2, {TIMEOUT_S}, sum_forever, {str(tmp_path)!r}, 9, 'raise')"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", f"if __name__ == '__main__':\n exec({script!r})"],
        cwd=ROOT,
        env=get_environment(),
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: len(list(tmp_path.glob("pid_*"))) == 2)
    ranks = [psutil.Process(int(path.read_text())) for path in tmp_path.glob("pid_*")]
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(ranks, timeout=PATIENCE_S)
    assert alive == []


def test_a_failure_record_holds_the_cause_not_its_consequences(tmp_path):
    records = [
        {"rank": 0, "kind": "consequence", "text": "Connection closed by peer", "time": 1.0},
        {"rank": 1, "kind": "error", "text": "KeyError: 'image'", "time": 2.0},
        {"rank": 2, "kind": "timeout", "text": "timed out", "time": 3.0},
    ]
    for record in records:
        (tmp_path / f"rank_{record['rank']}.json").write_text(json.dumps(record))
    with pytest.raises(GroupError, match="rank 1 failed: KeyError: 'image'"):
        raise_cause(read_failures(tmp_path))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("shapes of the DistilledVisionTransformer do not fit"), "error"),
        (ValueError("gloo: Connection closed by peer"), "error"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), "consequence"),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting"), "timeout"),
        (DistNetworkError("The client socket has timed out after 600s"), "timeout"),
        (DistBackendError("something of the other ranks"), "consequence"),
        (UserError("timeout of a Distillation"), "user"),
    ],
)
def test_a_lost_rank_is_distinguished_from_a_models_name(error, kind, tmp_path, monkeypatch):
    monkeypatch.setenv(RECORDS, str(tmp_path))
    record_failure(0, error)
    assert [failure.kind for failure in read_failures(tmp_path)] == [kind]


def test_checksums_name_the_rank_and_the_tensor():
    same = {"head.weight": 1, "head.bias": 2}
    compare_checksums([same, dict(same)], "at the start")
    with pytest.raises(ReplicaError, match=r"rank 2 differ.*after step 7: 1 of 2.*head.bias"):
        compare_checksums([same, same, {**same, "head.bias": 3}, same], "after step 7")


def test_main_ends_with_the_killed_rank_in_its_last_line(tmp_path):
    flags = create_argv(
        tmp_path,
        "--runtime.num_processes=2",
        "--train.steps=1000000",
        "--run.run_id=killed",
        f"--runtime.timeout_s={TIMEOUT_S}",
    )
    process = subprocess.Popen(
        get_command(flags), cwd=ROOT, env=get_environment(), stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "tiny" / "killed" / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and metrics.stat().st_size > 0)
    ranks = [c for c in psutil.Process(process.pid).children() if "spawn_main" in str(c.cmdline())]
    assert len(ranks) == 2
    ranks[1].kill()
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "rank 1 died: ended by SIGKILL" in errors.splitlines()[-1]
    assert not any(psutil.pid_exists(rank.pid) for rank in ranks)


def test_bad_input_is_reported_by_one_rank_only(tmp_path):
    """Under torchrun every rank checks the configuration, and one of them speaks."""
    flags = create_argv(tmp_path, "--runtime.num_processes=2", "--data.global_batch_size=15")
    said = []
    for rank in ("0", "1"):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        environment = {**get_environment(), **place, "RANK": rank, "WORLD_SIZE": "2"}
        done = subprocess.run(
            get_command(flags), cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 2
        said += done.stderr.splitlines()
    assert len(said) == 1
    assert said[0].startswith("error: data.global_batch_size (15) does not divide")
