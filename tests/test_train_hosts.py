"""Several hosts, as processes with their own homes: the real command through the real launcher.

The stand-in for gcloud runs each worker's command here and gives it the environment of a worker of
a slice; on the CPU the ranks find each other through torch.distributed.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.cloud import ROOT, Cloud
from train.worker import find_group

STEPS = 12
# Each host would take all cores for itself.
THREADS = {"OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2"}
FLAGS = (
    "--config",
    str(ROOT / "configs/digits_student.yaml"),
    "--data.source=synthetic",
    "--data.name=image_size=8,channels=1,num_classes=10,num_examples=301",
    "--data.test_split=",
    f"--train.steps={STEPS}",
    "--train.log_every_steps=1",
    "--train.checkpoint_every_steps=4",
    "--train.eval_every_epochs=100",
    "--optim.warmup_epochs=0",
    "--run.tensorboard=false",
    "--run.experiment=pod",
    "--run.run_id=r",
)


def start_hosts(folder: Path, count: int) -> Cloud:
    folder.mkdir()
    cloud = Cloud(folder, hosts=count)
    cloud.create()
    cloud.environment["STAND_IN_ENV"] = json.dumps(THREADS)
    return cloud


def train(cloud: Cloud, name: str, *flags: str):
    """`main.py` on all hosts, each in its own home directory."""
    return cloud.start(
        "train.xla_dist",
        "--tpu=pod",
        "--workdir=.",
        f"--run-id={name}",
        "--grace-s=10",
        f"--logs-dir={cloud.folder}/logs",
        "--",
        "python",
        str(ROOT / "main.py"),
        *FLAGS,
        *flags,
    )


def finish(process) -> str:
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def find_worker_after_checkpoint(cloud: Cloud, process) -> tuple[int, str]:
    """Worker 1's process group once a checkpoint stands, and what was said until then."""
    seen = ""
    for line in process.stdout:
        seen += line
        if "saved and read back" in line:
            break
    group = find_group(cloud.get_home(1) / ".xla_dist" / "r1")
    assert group is not None, seen
    return group, seen


def read_losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss/total"] for line in lines if line["kind"] == "train"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run of the same global batches on a single host."""
    cloud = start_hosts(tmp_path_factory.mktemp("alone") / "cloud", 1)
    finish(train(cloud, "r1", "--runtime.device=cpu", "--run.output_dir=runs"))
    return cloud.get_home(0) / "runs/pod/r"


@pytest.mark.parametrize("hosts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_hosts_train_as_one_and_only_rank_zero_writes(tmp_path, alone, hosts):
    cloud = start_hosts(tmp_path / "cloud", hosts)
    output = finish(train(cloud, "r1", "--runtime.device=cpu", "--run.output_dir=runs"))
    run = cloud.get_home(0) / "runs/pod/r"
    facts = json.loads((run / "run.json").read_text())
    assert facts["status"] == "complete"
    assert facts["environment"]["world_size"] == hosts
    losses, expected = read_losses(run), read_losses(alone)
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, rel=1e-4)
    for worker in range(1, hosts):
        written = {path.name for path in cloud.get_home(worker).iterdir()}
        assert written <= {".xla_dist", ".xla_dist_worker.py", ".cache", ".config"}
    assert f"r1: {hosts} workers of pod" in output


@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4])
def test_xla_hosts_train_as_one(tmp_path, alone, hosts):
    cloud = start_hosts(tmp_path / "cloud", hosts)
    finish(train(cloud, "r1", "--runtime.device=xla", "--run.output_dir=runs"))
    run = cloud.get_home(0) / "runs/pod/r"
    assert json.loads((run / "run.json").read_text())["environment"]["world_size"] == hosts
    assert read_losses(run) == pytest.approx(read_losses(alone), rel=1e-4)
    assert not (cloud.get_home(1) / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4])
def test_a_dying_host_ends_all_and_resume_auto_continues(tmp_path, hosts):
    """The outcome is that of hosts that never died, to the bit."""
    cloud = start_hosts(tmp_path / "cloud", hosts)
    shared = ("--runtime.device=cpu", f"--run.output_dir={tmp_path}/shared")
    process = train(cloud, "r1", *shared, "--train.steps=4000", "--optim.schedule=constant")
    group, _ = find_worker_after_checkpoint(cloud, process)
    os.killpg(group, signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 137, output
    assert "worker 1 failed first with exit code 137" in output
    for worker in range(hosts):
        assert find_group(cloud.get_home(worker) / ".xla_dist" / "r1") is None
    at = max(int(p.name[5:]) for p in (tmp_path / "shared/pod/r/checkpoints").glob("step_*"))
    length = (f"--train.steps={at + 4}", "--optim.schedule=constant")
    resumed = finish(train(cloud, "r2", *shared, *length, "--resume", "auto"))
    assert f"step {at + 4}/{at + 4}" in resumed
    whole = ("--runtime.device=cpu", f"--run.output_dir={tmp_path}/whole", *length)
    finish(train(cloud, "r3", *whole))
    weights = [
        load_file(tmp_path / name / "pod/r/student.safetensors") for name in ("shared", "whole")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert [name for name in weights[0] if not weights[0][name].equal(weights[1][name])] == []


@pytest.mark.slow
def test_a_preempted_run_saves_and_resumes_by_itself(tmp_path):
    """SIGTERM on one worker, as before a maintenance: exit code 75, then a restart to the end."""
    cloud = start_hosts(tmp_path / "cloud", 2)
    process = cloud.start(
        "train.tpu_vm",
        "run",
        "pod",
        "--no-setup",
        "--workdir=.",
        "--venv=",
        "--backoff-s=0",
        "--run-id=r1",
        f"--logs-dir={cloud.folder}/logs",
        "--",
        "python",
        str(ROOT / "main.py"),
        *FLAGS,
        "--runtime.device=cpu",
        f"--run.output_dir={tmp_path}/shared",
        "--train.steps=1500",
        "--train.log_every_steps=10",
    )
    group, seen = find_worker_after_checkpoint(cloud, process)
    os.kill(group, signal.SIGTERM)
    output, _ = process.communicate()
    assert process.returncode == 0, seen + output
    assert "preempted (exit code 75); restart 1 of 10" in output
    run = tmp_path / "shared/pod/r"
    assert json.loads((run / "run.json").read_text())["status"] == "complete"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == list(range(10, 1501, 10))


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_shards_of_the_hosts_are_disjoint_and_complete(tmp_path, digits_root, hosts, split):
    cloud = start_hosts(tmp_path / "cloud", hosts)
    tool = (
        f"{ROOT}/tools/test_tfds_loader_multihost.py --data-dir {digits_root} --split {split} "
        f"--batch 64 --world-size {hosts} --reports {tmp_path}/reports --train-pp "
        "'decode(channels=1)|resize(8)|value_range(-1, 1)' --eval-pp "
        "'decode(channels=1)|resize(8)|value_range(-1, 1)'"
    )
    finish(
        cloud.start(
            "train.xla_dist",
            "--tpu=pod",
            "--workdir=.",
            f"--logs-dir={cloud.folder}/logs",
            "--",
            "bash",
            "-c",
            f"exec python {tool} --rank $TPU_WORKER_ID",
        )
    )
    verdict = cloud.run(
        "tools.test_tfds_loader_multihost",
        "--data-dir",
        str(digits_root),
        "--world-size",
        str(hosts),
        "--reports",
        f"{tmp_path}/reports",
        "--check",
    )
    assert verdict.returncode == 0, verdict.stdout
    assert "verdict: PASS" in verdict.stdout


@pytest.mark.slow
def test_a_config_invalid_for_the_group_is_refused_once(tmp_path):
    cloud = start_hosts(tmp_path / "cloud", 4)
    process = train(cloud, "r1", "--runtime.device=cpu", "--data.global_batch_size=63")
    output, _ = process.communicate()
    assert process.returncode == 2, output
    assert output.count("] error: ") == 1
    assert "global_batch_size" in output
