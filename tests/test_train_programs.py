"""Programs as YAML files, from the launcher to the store, on SkyPilot's machines and on GKE."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import main as trainer
from lab import matmul
from store.quality.trends import read_reports
from tests.support.cloud import ROOT, Cloud, create_sky_cloud
from tools.runs.__main__ import main as show_runs
from train import tpu_vm, xla_dist
from train.sky import cluster
from train.sky.task import JOBSET, SkyJob, render
from utils.config.programs import read_program
from utils.errors import UserError
from utils.generations import LAUNCHED, find_slice

OUTPUT = "--output=gs://bucket/runs"
PROGRAMS = sorted((ROOT / "configs/lab").glob("*.yaml"))
SCHEMA = json.loads((ROOT / "tests/fixtures/jobset_v1alpha2.json").read_text())
SMALL = "program: lab.matmul\nargs: {on: cpu, base: 32, added: [0, 8], axes: M, repeats: 1}\n"


@pytest.fixture
def cloud(tmp_path, monkeypatch) -> Cloud:
    return create_sky_cloud(tmp_path, monkeypatch)


@pytest.fixture
def small(tmp_path) -> Path:
    path = tmp_path / "small_bench.yaml"
    path.write_text(SMALL)
    return path


def render_jobset(accelerator: str, **options: Any) -> str:
    """A JobSet of a small run on GKE."""
    job = SkyJob(
        "trainer-x", accelerator, "a b.yaml", "gs://b/r", "r", on="gke", image="i", **options
    )
    return render(job, JOBSET.read_text())


def run_task(task: dict, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a task's own script here, by this Python."""
    text = task["run"].replace(".venv/bin/python", sys.executable)
    environment = {**os.environ, **task["envs"], **variables}
    return subprocess.run(
        ["bash", "-c", text], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_every_program_of_configs_is_launched_by_its_name(cloud, path):
    assert cluster.main(["launch", "tpu-v6e-1", path.stem, OUTPUT]) == 0
    task = yaml.safe_load((cloud.folder / "task.yaml").read_text())
    program = read_program(str(path))
    assert f'/bin/python -m {program.name} "$@" --store "$OUTPUT_DIR"' in task["run"]
    assert task["envs"]["OUTPUT_DIR"] == "gs://bucket/runs"
    header = path.read_text().split("program:")[0]
    for key in ("command", "hardware", "dataset", "expected"):
        assert f"# {key}:" in header
    assert f"bash scripts/launch_tpu.sh v6e-{'8' if path.stem == 'benchmark' else '1'}" in header


def test_the_machines_script_runs_the_program_and_keeps_its_report(cloud, small, tmp_path):
    words = ["launch", "v6e-1", str(small), OUTPUT, "--", "--json", str(tmp_path / "a b.json")]
    assert cluster.main(words) == 0
    task = yaml.safe_load((cloud.folder / "task.yaml").read_text())
    done = run_task(task, OUTPUT_DIR=str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "a b.json").read_text())
    assert report["settings"]["base"] == 32 and [r["size"] for r in report["rows"]] == [32, 40]
    ((kept,),) = read_reports(tmp_path / "runs").values()
    assert kept == report


def test_reports_on_a_bucket_are_read_as_on_a_disk(capsys, tmp_path):
    store = f"memory://{uuid.uuid4().hex}/runs"
    flags = ["--on=cpu", "--base=32", "--added", "0", "8", "--axes=M", "--repeats=1"]
    for place in (store, str(tmp_path)):
        assert matmul.main([*flags, "--store", place]) == 0
    printed = capsys.readouterr().out
    assert f"kept: {store}/benchmarks/" in printed.replace("memory:///", "memory://")
    ((identity, (report,)),) = read_reports(store).items()
    assert list(read_reports(tmp_path)) == [identity]
    assert show_runs(["trend", "--store", store, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["trends"]
    assert {row["figure"]: row["values"] for row in shown} == {
        f"M {row['size']} x ms": [row["ms"]] for row in report["rows"]
    }


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("program: lab.matmull", "program ('lab.matmull') is no program of this repository; did"),
        ("program: os.system", "program ('os.system') is no program"),
        ("program: ../main", "is no program"),
        ("program: 3", "program (3) is no program of this repository; such as lab.matmul"),
        ("program: lab.matmul\nargs: [base]", "args (['base']) must name flags"),
        ("program: lab.matmul\nargs: {base: {a: 1}}", "args.base ({'a': 1}) is no flag"),
        ("program: lab.matmul\nargs: {--base: 1}", "args.--base (1) is no flag"),
        ("program: lab.matmul\nargs: {added: []}", "args.added ([]) is no flag"),
        ("program: lab.matmul\nargs: {base: x}", "argument --base: invalid int value: 'x'"),
        ("program: lab.matmul\nargs: {bas: 1}", "unrecognized arguments: --bas=1"),
        ("program: lab.matmul\nrun: {}", "run is no key of a file with program; use program"),
        ("program: lab.traffic", "arguments: --store"),
        ("program: proofs.benchmark\nargs: {optim.lrr: 1}", "--optim.lrr"),
    ],
)
def test_a_wrong_program_is_one_line_and_nothing_is_written(cloud, capfd, tmp_path, text, error):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert cluster.main(["launch", "v6e-1", str(path), OUTPUT]) == 2
    line = capfd.readouterr().err
    assert error in line and line.count("\n") == 1
    assert cloud.get_calls() == [] and list(tmp_path.iterdir()) == [path]


def test_main_says_what_runs_a_program(small, capsys):
    assert trainer.main(["--config", str(small)]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: --config {small} is run by lab.matmul, not by main.py; use")
    assert "`python -m lab.matmul --on=cpu --base=32 --added 0 8 --axes=M --repeats=1`" in line
    assert "scripts/launch_tpu.sh ACCELERATOR small_bench" in line and line.count("\n") == 1
    base = small.with_name("run.yaml")
    base.write_text(f"extends: {small.name}\n")
    assert trainer.main(["--config", str(base)]) == 2
    assert "is run by lab.matmul" in capsys.readouterr().err


def test_a_lab_is_for_one_host_and_needs_a_bucket(cloud, capfd):
    assert cluster.main(["launch", "v6e-16", "matmul_bench", OUTPUT]) == 2
    assert "measures one device, and this slice has 4 hosts" in capfd.readouterr().err
    assert cluster.main(["launch", "v6e-16", "benchmark", OUTPUT]) == 0
    (cloud.folder / "sky_jobs.json").write_text("[]")
    assert cluster.main(["launch", "v6e-1", "matmul_bench"]) == 2
    line = capfd.readouterr().err
    assert "the bucket for results () is no gs:// URL" in line and line.count("\n") == 1
    assert cluster.main(["launch", "v6e-1", "matmul_bench", OUTPUT, "--data-root=gs://b/d"]) == 2
    assert "--data-root is for a run" in capfd.readouterr().err


def test_a_pod_takes_a_yaml_in_place_of_a_command(cloud, small, capfd, monkeypatch):
    run = ["run", "vm", "--dry-run", "--no-setup", "--run-id=r", "--"]
    assert tpu_vm.main([*run, str(small)]) == 2
    assert "export OUTPUT_DIR=gs://BUCKET/runs" in capfd.readouterr().err
    monkeypatch.setenv("OUTPUT_DIR", "gs://mine/runs")
    assert tpu_vm.main([*run, str(small), "--repeats=2"]) == 0
    command = "python -m lab.matmul --on=cpu --base=32 --added 0 8 --axes=M --repeats=1"
    assert f"{command} --repeats=2 --store=gs://mine/runs" in capfd.readouterr().out
    assert tpu_vm.main([*run, "configs/digits_student.yaml"]) == 0
    command = "python main.py --config configs/digits_student.yaml --run.run_id=r"
    assert command in capfd.readouterr().out
    words = ["--tpu=vm", "--dry-run", "--", str(small), "--store=gs://other/runs"]
    assert xla_dist.main(words) == 0
    assert "--repeats=1 --store=gs://other/runs" in capfd.readouterr().out


def test_a_pod_refuses_a_lab_before_anything_is_shipped_or_created(cloud, capfd, monkeypatch):
    pod = Cloud(cloud.folder, hosts=2)
    for name in ("STAND_IN_HOSTS", "STAND_IN_PYTHON", "STAND_IN_PORT"):
        monkeypatch.setenv(name, pod.environment[name])
    pod.create()
    lab = ["--run-id=r", "--", "python", "-m", "lab.matmul", "--on=tpu"]
    assert tpu_vm.main(["run", "pod", *lab]) == 2
    assert tpu_vm.main(["run", "new", "--accelerator-type=v6e-16", *lab]) == 2
    assert xla_dist.main(["--tpu=pod", *lab]) == 2
    text = "error: lab.matmul measures one device, and this slice has {} hosts; choose a slice of"
    lines = capfd.readouterr().err.splitlines()
    assert all(line.startswith(text.format(n)) for line, n in zip(lines, (2, 4, 2), strict=True))
    assert pod.get_verbs() == ["tpu-vm describe"] * 2


def test_exec_copies_the_tree_and_returns_the_programs_exit_code(cloud, small, capfd):
    assert cluster.main(["exec", "--", "true"]) == 2
    assert "nothing was started from here" in capfd.readouterr().err
    assert cluster.main(["launch", "v6e-1", str(small), OUTPUT, "--on-demand"]) == 0
    assert cluster.main(["exec"]) == 2
    assert "exec needs a command" in capfd.readouterr().err
    code = "import sys; print('here', sys.argv[1:]); sys.exit(7)"
    assert cluster.main(["exec", "--", sys.executable, "-c", code, "a b"]) == 7
    assert "here ['a b']" in capfd.readouterr().out
    call = cloud.get_calls()[-1]
    assert call[:4] == ["sky", "exec", "--workdir=.", "trainer-small-bench"]
    assert call[4].startswith('PATH="$PWD/.venv/bin:$PATH" ')


def test_exec_needs_a_cluster_and_not_a_job(cloud, capfd):
    assert cluster.main(["launch", "v6e-1", "matmul_bench", OUTPUT]) == 0
    assert cluster.main(["exec", "--", "true"]) == 2
    assert "is a managed job" in capfd.readouterr().err


@pytest.mark.parametrize("stack", ["torch_xla", "torch_tpu"])
@pytest.mark.parametrize(
    ("accelerator", "hosts", "chips", "topology"),
    [
        ("v6e-1", 1, 1, "1x1"),
        ("v5litepod-8", 1, 8, "2x4"),
        ("v5litepod-16", 4, 4, "4x4"),
        ("v4-32", 4, 4, "2x2x4"),
        ("v5p-256", 32, 4, "4x4x8"),
        ("tpu7x-8", 1, 4, "2x2x1"),
        ("tpu7x-128", 16, 4, "4x4x4"),
    ],
)
def test_a_jobset_fits_the_published_schema_and_the_slice(
    stack, accelerator, hosts, chips, topology
):
    if stack not in find_slice(accelerator).generation.stacks:
        with pytest.raises(UserError, match="does not run torch_xla; use --stack torch_tpu"):
            render_jobset(accelerator, stack=stack)
        return
    jobset = yaml.safe_load(render_jobset(accelerator, stack=stack))
    jsonschema.Draft202012Validator(SCHEMA).validate(jobset)
    assert jobset["metadata"]["labels"] == {
        "kueue.x-k8s.io/queue-name": "multislice-queue",
        "xpk.google.com/workload": "trainer-x",
    }
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job_spec = replicated["template"]["spec"]
    assert (job_spec["parallelism"], job_spec["completions"]) == (hosts, hosts)
    pod = job_spec["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": find_slice(accelerator).generation.gke,
        "cloud.google.com/gke-tpu-topology": topology,
        "cloud.google.com/gke-spot": "true",
    }
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": chips}
    assert container["args"][:3] == ["main.py", "--config", "a b.yaml"]
    assert len(container["env"]) == (stack == "torch_xla")
    assert (container["command"] == ["python"]) == (stack == "torch_xla" or hosts == 1)


def test_the_published_schema_refuses_what_jobset_does_not_know():
    jobset = yaml.safe_load(render_jobset("v6e-1"))
    broken = [
        {**jobset, "apiVersion": "jobset.x-k8s.io/v1"},
        {**jobset, "spec": {**jobset["spec"], "maxRestarts": 3}},
        {**jobset, "spec": {**jobset["spec"], "failurePolicy": {"maxRestarts": "3"}}},
        {**jobset, "metadata": {**jobset["metadata"], "name": "Trainer_X"}},
    ]
    for value in broken:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(SCHEMA).validate(value)


def test_torchtpu_starts_the_processes_of_each_host_by_torchrun(tmp_path):
    jobset = yaml.safe_load(render_jobset("tpu7x-16", stack="torch_tpu"))
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = pod["template"]["spec"]["containers"][0]
    for name, text in {
        "python": "echo NNODES=2 NODE_RANK=1",
        "torchrun": 'printf "%s\\n" "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [*container["command"], *container["args"]],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "--nnodes=2",
        "--node_rank=1",
        "--nproc_per_node=8",
        "--master_addr=h",
        "--master_port=1",
        "main.py",
        "--config",
        "a b.yaml",
        *("--run.output_dir", "gs://b/r", "--run.run_id", "r", "--resume", "auto"),
    ]


def test_gke_gets_a_jobset_of_its_own_name_until_it_has_ended(cloud, capfd):
    gke = ["--on=gke", "--image=registry/trainer:1", "--queue=team"]
    assert cluster.main(["launch", "v6e-16", "kd/deit_s_token", OUTPUT, *gke]) == 0
    jobset = yaml.safe_load((cloud.folder / "jobset.yaml").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(jobset)
    name = jobset["metadata"]["name"]
    assert name.startswith("trainer-deit-s-to-") and len(name) <= 28
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    words = pod["containers"][0]["args"]
    assert words[:3] == ["main.py", "--config", "configs/kd/deit_s_token.yaml"]
    assert words[3:5] == ["--run.output_dir", "gs://bucket/runs"]
    assert words[-2:] == ["--resume", "auto"]
    assert (cloud.folder / ".cluster_name").read_text() == f"jobset {name}\n"
    assert cluster.main(["status"]) == 0
    assert cluster.main(["launch", "v6e-1", "matmul_bench", OUTPUT, *gke]) == 2
    assert f"`kubectl delete jobset {name}` ends it" in capfd.readouterr().err
    (cloud.folder / "jobset_state").write_text("Completed")
    assert cluster.main(["status"]) == 1
    assert cluster.main(["launch", "v6e-1", "matmul_bench", OUTPUT, *gke]) == 0
    text = (cloud.folder / "jobset.yaml").read_text()
    assert '"lab.matmul"' in text and '"--store", "gs://bucket/runs"]' in text


@pytest.mark.parametrize(
    ("accelerator", "name"),
    [
        ("v5litepod-8", "tpu-v5-lite-podslice:8"),
        ("v5p-8", "tpu-v5p-slice:4"),
        ("v6e-1", "tpu-v6e-slice:1"),
    ],
)
def test_skypilot_has_its_own_names_on_gke(cloud, accelerator, name):
    assert cluster.main(["launch", accelerator, "kd/deit_s_token", OUTPUT, "--on=k8s"]) == 0
    resources = yaml.safe_load((cloud.folder / "task.yaml").read_text())["resources"]
    assert (resources["infra"], resources["accelerators"]) == ("k8s", name)
    assert resources["accelerator_args"] == {}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["v6e-16", "digits_student", "--on=k8s"], "finds no v6e-16 on Kubernetes"),
        (["v4-8", "digits_student", "--on=k8s"], "these chips of v4: none; use --on gke"),
        (["tpu7x-8", "digits_student"], "does not run torch_xla; use --stack torch_tpu"),
        (["tpu7x-8", "digits_student", "--stack=torch_tpu"], "SkyPilot has no tpu7x machines"),
        (["v7x-8", "digits_student"], "'v7x-8' is spelled tpu7x-8"),
        (["tpu7x-24", "digits_student"], "use tpu7x-16 or tpu7x-32"),
        (["v6e-8", "digits_student", "--on=gke"], "--on gke needs --image"),
        (["v6e-2", "digits_student", "--on=gke", "--image=i"], "use v6e-1 or v6e-4"),
        (["v6e-8", "digits_student", "--image=i"], "--image has no effect with --on gcp"),
        (["v6e-8", "digits_student", "--queue=q"], "--queue has no effect"),
        (["v6e-8", "digits_student", "--on=k8s", "--region=r"], "--region has no effect"),
        (["v6e-8", "digits_student", "--on=gke", "--image=i", "--disk-gib=9"], "--disk-gib has no"),
        (["v6e-8", "digits_student", "--on=gke", "--image=i", "--max-restarts=-1"], "(-1) must be"),
    ],
)
def test_a_wrong_place_is_one_line_and_nothing_is_written(cloud, capfd, words, text):
    assert cluster.main(["launch", *words, OUTPUT]) == 2
    line = capfd.readouterr().err
    assert text in line and line.count("\n") == 1
    assert list(cloud.folder.iterdir()) == []


def test_the_launcher_works_without_an_environment_of_its_own(tmp_path):
    """By a Python that has PyYAML alone, in a tree that has no .venv."""
    packages, tree = tmp_path / "packages", tmp_path / "tree"
    packages.mkdir()
    (packages / "yaml").symlink_to(Path(yaml.__file__).parent)
    tree.mkdir()
    for name in ("train", "utils", "scripts", "configs", "lab", "main.py"):
        (tree / name).symlink_to(ROOT / name)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/bash\nPYTHONPATH={packages} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)

    def launch(*words: str) -> subprocess.CompletedProcess[str]:
        path = f"{python.parent}:/usr/bin:/bin"
        script = ["bash", str(tree / "train/sky/launch_tpu.sh"), *words, "--dry-run"]
        return subprocess.run(script, env={"PATH": path}, capture_output=True, text=True)

    for experiment in ("matmul_bench", "digits_student"):
        done = launch("v6e-1", experiment, OUTPUT)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("sky jobs launch --name=trainer-")
        assert "is not checked here, but on the machine: No module named" in done.stderr
    (packages / "yaml").unlink()
    python.write_text("#!/bin/bash\nexit 1\n")
    done = launch("v6e-1", "matmul_bench", OUTPUT)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no Python 3.10 with PyYAML is here" in done.stderr


def test_every_generation_that_is_launched_has_a_name_on_gke():
    assert all(row.gke and row.runtime_version for row in LAUNCHED)
    assert [row.name for row in LAUNCHED if row.seen_per_chip > 1] == ["tpu7x"]
