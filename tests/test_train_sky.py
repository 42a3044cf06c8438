"""SkyPilot: tasks without placeholders or keys, one at a time, no running job is forgotten."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.cloud import ROOT, Cloud, create_sky_cloud, needs_git
from train import experiments
from train.experiments import find_config, find_output
from train.sky import cluster
from train.sky.task import TEMPLATE, SkyJob, create_job_name, render
from utils.errors import UserError

OUTPUT = "--output=gs://bucket/runs"
JOB = SkyJob("trainer-x", "v5litepod-8", "configs/digits_student.yaml", "gs://bucket/runs", "r")


@pytest.fixture
def cloud(tmp_path, monkeypatch) -> Cloud:
    return create_sky_cloud(tmp_path, monkeypatch)


def read_task(cloud: Cloud) -> dict:
    return yaml.safe_load((cloud.folder / "task.yaml").read_text())


def test_a_spot_experiment_is_a_managed_job(cloud, capfd):
    assert cluster.main(["launch", "v5litepod-8", "kd/deit_s_token", OUTPUT]) == 0
    assert cloud.get_calls()[-1][1:4] == ["jobs", "launch", "--name=trainer-deit-s-token"]
    task = read_task(cloud)
    assert task["resources"]["accelerators"] == "tpu-v5litepod-8"
    assert task["resources"]["accelerator_args"] == {"runtime_version": "v2-alpha-tpuv5-lite"}
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert task["envs"]["CONFIG"] == "configs/kd/deit_s_token.yaml"
    assert "run_commands.sh setup --tpu" in task["setup"]
    assert '--run.run_id "$RUN_ID" --resume auto' in task["run"]
    assert task["envs"]["RUN_ID"].startswith("sky-")
    assert (cloud.folder / ".cluster_name").read_text() == "job trainer-deit-s-token\n"


def test_torchtpu_is_set_up_where_the_stack_says_so(cloud):
    words = ["launch", "v6e-8", "kd/deit_s_token", OUTPUT, "--stack=torch_tpu"]
    assert cluster.main(words) == 0
    task = read_task(cloud)
    assert task["resources"]["accelerator_args"] == {"runtime_version": "v2-alpha-tpuv6e"}
    assert task["setup"].endswith("run_commands.sh setup --torch-tpu\n")
    assert "\n.venv-tpu/bin/python main.py" in task["run"]


def test_two_arguments_suffice_if_the_environment_names_a_bucket(cloud, capfd, monkeypatch):
    words = ["launch", "v5litepod-8", "kd/deit_s_token"]
    assert cluster.main(words) == 2
    error = capfd.readouterr().err
    assert "run.output_dir of configs/kd/deit_s_token.yaml (runs)" in error
    assert "export OUTPUT_DIR=gs://" in error and error.count("\n") == 1
    assert cloud.get_calls() == []
    monkeypatch.setenv("OUTPUT_DIR", "gs://mine/runs")
    assert cluster.main(words) == 0
    assert capfd.readouterr().err == "the results go to gs://mine/runs, by OUTPUT_DIR\n"
    assert read_task(cloud)["envs"]["OUTPUT_DIR"] == "gs://mine/runs"


def test_a_flag_overrides_the_experiments_bucket_and_that_the_environments(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "ROOT", tmp_path)
    (tmp_path / "own.yaml").write_text("run:\n  output_dir: gs://own/runs\n")
    monkeypatch.setenv("OUTPUT_DIR", "gs://mine/runs")
    assert find_output("gs://flag/runs", "own.yaml") == ("gs://flag/runs", "--output")
    own = ("gs://own/runs", "run.output_dir of own.yaml")
    assert find_output(None, "own.yaml") == own
    (tmp_path / "own.yaml").write_text("run:\n  output_dri: gs://own/runs\n")
    with pytest.raises(UserError, match="output_dri"):
        find_output(None, "own.yaml")


def test_arguments_after_two_dashes_are_checked_and_passed_to_the_run(cloud, capfd):
    words = ["launch", "v4-8", "digits_kd", OUTPUT]
    assert cluster.main(words) == 2
    assert "distill.teacher is empty" in capfd.readouterr().err
    assert cluster.main([*words, "--", "--distill.teacher", "mnist_cnn"]) == 0
    assert read_task(cloud)["envs"]["FLAGS"] == "--distill.teacher mnist_cnn"
    with pytest.raises(SystemExit) as ended:
        cluster.main(["status", "--", "--optim.lr=1"])
    assert ended.value.code == 2


def test_an_on_demand_experiment_is_a_reusable_cluster(cloud):
    words = ["launch", "tpu-v4-8", "digits_student", OUTPUT, "--on-demand"]
    assert cluster.main(words) == 0
    assert cloud.get_calls()[-1][1:3] == ["launch", "--cluster=trainer-digits-student"]
    assert read_task(cloud)["resources"]["use_spot"] is False
    assert cluster.main(words) == 0


def test_a_running_job_is_neither_replaced_nor_forgotten(cloud, capfd):
    assert cluster.main(["launch", "v4-8", "digits_student", OUTPUT, "--on-demand"]) == 0
    capfd.readouterr()
    assert cluster.main(["launch", "v4-8", "digits_teacher", OUTPUT]) == 2
    assert "trainer-digits-student still runs (UP); `sky down" in capfd.readouterr().err
    assert cluster.main(["forget"]) == 2
    assert cluster.main(["status"]) == 0
    (cloud.folder / "sky_clusters.json").write_text("[]")
    assert cluster.main(["status"]) == 1
    assert cluster.main(["forget"]) == 0
    assert not (cloud.folder / ".cluster_name").exists()
    assert cluster.main(["forget"]) == 2


@pytest.mark.parametrize(
    ("status", "runs"),
    [
        ("RUNNING", True),
        ("RECOVERING", True),
        ("PENDING", True),
        ("CANCELLING", True),
        ("SUCCEEDED", False),
        ("CANCELLED", False),
        ("FAILED", False),
        ("FAILED_SETUP", False),
    ],
)
def test_a_managed_job_is_forgotten_only_when_it_has_ended(cloud, status, runs):
    assert cluster.main(["launch", "v4-8", "digits_teacher", OUTPUT]) == 0
    rows = [
        {"job_name": "trainer-digits-teacher", "status": status},
        {"job_name": "x", "status": "UP"},
    ]
    (cloud.folder / "sky_jobs.json").write_text(json.dumps(rows))
    assert cluster.main(["forget"]) == (2 if runs else 0)


def test_an_unreachable_skypilot_forgets_nothing(cloud, capfd):
    assert cluster.main(["launch", "v4-8", "digits_teacher", OUTPUT]) == 0
    (cloud.folder / "sky_failure").write_text("API server is not reachable")
    assert cluster.main(["forget"]) == 2
    assert "returned no state" in capfd.readouterr().err
    assert (cloud.folder / ".cluster_name").exists()


def test_a_failed_launch_keeps_the_name(cloud):
    (cloud.folder / "sky_failure").write_text("provision failed")
    assert cluster.main(["launch", "v4-8", "digits_teacher", OUTPUT]) == 1
    assert (cloud.folder / ".cluster_name").read_text() == "job trainer-digits-teacher\n"


@pytest.mark.parametrize("kind", [[], ["--on-demand"]])
def test_a_launch_without_skypilot_leaves_nothing_behind(cloud, capfd, monkeypatch, kind):
    monkeypatch.setenv("PATH", str(cloud.folder))
    monkeypatch.setenv("OUTPUT_DIR", "gs://mine/runs")
    assert cluster.main(["launch", "v5litepod-8", "kd/deit_s_token", *kind]) == 2
    error = capfd.readouterr().err
    assert "'sky' is not on PATH" in error and error.count("\n") == 1
    assert list(cloud.folder.iterdir()) == []
    assert cluster.main(["sync", "--dirty"]) == 2
    assert "nothing was started from here" in capfd.readouterr().err


@needs_git
def test_sync_ships_the_tree_to_every_host_of_the_cluster(cloud, capfd):
    assert cluster.main(["launch", "v4-16", "digits_teacher", OUTPUT, "--on-demand"]) == 0
    assert cluster.main(["sync", "--dirty", "--hosts=2"]) == 0
    for host in ("trainer-digits-teacher", "trainer-digits-teacher-worker1"):
        shipped = cloud.folder / host / "sky_workdir" / "main.py"
        assert shipped.read_bytes() == (ROOT / "main.py").read_bytes()
    words = [word for call in cloud.get_calls() for word in call if call[0] in ("ssh", "scp")]
    assert "ForwardAgent=no" in words
    assert not [word for word in words if ".ssh" in word or "id_" in word]


def test_a_managed_job_has_no_cluster_to_ship_to(cloud, capfd):
    assert cluster.main(["launch", "v4-8", "digits_teacher", OUTPUT]) == 0
    assert cluster.main(["sync"]) == 2
    assert "is a managed job" in capfd.readouterr().err


@needs_git
def test_a_host_that_refuses_is_named(cloud, capfd, monkeypatch):
    assert cluster.main(["launch", "v4-8", "digits_teacher", OUTPUT, "--on-demand"]) == 0
    monkeypatch.setenv("STAND_IN_UNREACHABLE", "trainer-digits-teacher")
    assert cluster.main(["sync", "--dirty"]) == 2
    assert "Connection refused" in capfd.readouterr().err


@pytest.mark.parametrize("accelerator", ["v4-8", "v5litepod-8", "v5p-8", "v6e-8"])
def test_a_rendered_task_has_no_placeholder_and_no_key(accelerator):
    job = SkyJob("n", accelerator, "c.yaml", "gs://b", "r", region="us-west4")
    text = render(job, TEMPLATE.read_text())
    assert "{{" not in text
    assert yaml.safe_load(text)["resources"]["infra"] == "gcp/us-west4"
    assert "file_mounts" not in yaml.safe_load(text)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("name: {{nobody}}", "has an unknown placeholder 'nobody'"),
        ("file_mounts: {~/.ssh: ~/.ssh}", "'.ssh': keys stay"),
        ("file_mounts: {a: b}", "remove file_mounts"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_template_with_a_placeholder_or_a_key_is_refused(template, text):
    with pytest.raises(UserError, match=text):
        render(JOB, template)


def test_a_value_cannot_add_a_placeholder():
    with pytest.raises(UserError, match=r"contains \{\{ or"):
        render(SkyJob("n", "v4-8", "{{name}}", "gs://b", "r"), "a: {{config}}")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["launch", "v4-8", "digits_teacher", "--output=runs"], "no gs:// URL"),
        (["launch", "v4-8", "digits_teacher", "--output=gs://"], "no gs:// URL"),
        (["launch", "v4-8", "digits_teacher", "--output=gs://b/r x"], "no gs:// URL"),
        (["launch", "v4-8", "digits_teacher", OUTPUT, "--disk-gib=-5"], "--disk-gib (-5)"),
        (["launch", "v4-8", "digits_teacher", OUTPUT, "--max-restarts=-1"], "--max-restarts (-1)"),
        (["sync", "--hosts=0"], "--hosts (0)"),
        (["launch", "v9-8", "digits_teacher", OUTPUT], "'v9-8' is not known"),
        (["launch", "v5litepod-7", "digits_teacher", OUTPUT], "use v5litepod-4 or v5litepod-8"),
        (["launch", "tpu-v5e-7", "digits_teacher", OUTPUT], "v5e has no slice of 7 chips"),
        (["launch", "v4-8", "no_such", OUTPUT], "'no_such' is no file"),
        (["sync"], "nothing was started from here"),
    ],
)
def test_a_wrong_call_gives_one_line_and_code_2(cloud, capfd, words, text):
    assert cluster.main(words) == 2
    error = capfd.readouterr().err
    assert text in error and error.count("\n") == 1
    assert not (cloud.folder / ".cluster_name").exists()


def test_the_name_lies_at_the_root_and_an_older_one_is_taken_along(cloud, capfd):
    assert (cluster.ROOT, cluster.NAME_FILE.name) == (ROOT, ".cluster_name")
    old = cloud.folder / "old" / ".cluster_name"
    old.parent.mkdir()
    old.write_text("job trainer-x\n")
    assert cluster.main(["status"]) == 1
    assert not old.exists() and cluster.NAME_FILE.read_text() == "job trainer-x\n"
    assert "job trainer-x: not there" in capfd.readouterr().out


def test_names_and_configs_are_found_from_the_experiment():
    assert create_job_name("kd/deit_s_token") == "trainer-deit-s-token"
    assert create_job_name("a" * 99) == f"trainer-{'a' * 32}"
    assert find_config("configs/digits_teacher.yaml") == "configs/digits_teacher.yaml"
    assert find_config("digits_teacher") == "configs/digits_teacher.yaml"


@pytest.mark.parametrize("folder", ["train/sky", "scripts"])
@pytest.mark.parametrize(
    ("script", "words", "expected"),
    [
        (
            "launch_tpu.sh",
            ["v5litepod-8", "kd/deit_s_token", OUTPUT, "--dry-run"],
            "sky jobs launch --name=trainer-deit-s-token --detach-run --yes .sync/task.sky.yaml",
        ),
        ("sync_code.sh", ["--dry-run"], "scp -q -o BatchMode=yes train/worker.py"),
    ],
)
def test_the_scripts_call_the_module(folder, script, words, expected):
    import os
    import sys

    done = subprocess.run(
        ["bash", str(ROOT / folder / script), *words],
        cwd="/",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_the_template_is_one_file_under_both_names():
    assert (ROOT / "scripts/tpu_resource.sky.yaml").read_text() == TEMPLATE.read_text()


def test_the_name_file_is_not_under_version_control():
    assert ".cluster_name" in (ROOT / ".gitignore").read_text().split()
    assert Path(cluster.NAME_FILE).name == ".cluster_name"
