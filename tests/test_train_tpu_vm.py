"""The life of a TPU VM against a stand-in cloud: every verb twice, refusals, preemptions."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cloud import ROOT, Cloud, needs_git
from train.commands import STACKS, RemoteCommand
from train.execute import CommandResult
from train.provision import describe_workers, find_problems, read_pins, read_stack_pins
from train.recover import add_resume, name_run
from train.worker import main as worker
from utils.errors import UserError
from utils.generations import LAUNCHED, check_stack, find_generation

CREATE = ("create", "vm", "--accelerator-type=v5litepod-8", "--zone=z")
# What a worker's environment looks like to `facts`: a Python that answers for its packages.
FAKE_PYTHON = "#!/bin/bash\nprintf '%s\\n' '{}'\n"


@pytest.fixture
def cloud(tmp_path) -> Cloud:
    return Cloud(tmp_path, hosts=2)


def run(cloud: Cloud, *words: str):
    return cloud.run("train.tpu_vm", *words)


@pytest.mark.parametrize(
    ("accelerator_type", "version"),
    [
        ("v4-8", "tpu-ubuntu2204-base"),
        ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v2-alpha-tpuv5"),
        ("v6e-64", "v2-alpha-tpuv6e"),
    ],
)
def test_each_generation_has_its_runtime_version(accelerator_type, version):
    assert find_generation(accelerator_type).runtime_version == version


@pytest.mark.parametrize(
    "wrong",
    ["v5e-8", "v3-8", "-8", "v9-8", "v4", "", "v4-0", "8-v4", "v5litepod-7", "v4-24", "v5p-320"],
)
def test_an_unknown_accelerator_type_is_refused(wrong):
    with pytest.raises(UserError, match="accelerator type"):
        find_generation(wrong)


def test_create_makes_one_request_and_reports_an_existing_vm(cloud):
    first = run(cloud, *CREATE, "--spot")
    assert (first.returncode, first.stdout) == (0, "vm is created: v5litepod-8\n")
    assert cloud.load("tpu-vm")["vm"]["runtimeVersion"] == "v2-alpha-tpuv5-lite"
    second = run(cloud, *CREATE, "--spot")
    assert second.returncode == 0
    assert "vm exists already: v5litepod-8, READY" in second.stdout
    assert cloud.get_verbs().count("tpu-vm create") == 1


@pytest.mark.parametrize("generation", LAUNCHED, ids=lambda row: row.name)
def test_create_uses_the_table_for_every_generation(cloud, generation):
    stack = f"--stack={generation.stacks[0]}"
    done = run(cloud, "create", "vm", f"--accelerator-type={generation.prefix}-8", stack)
    assert done.returncode == 0
    assert cloud.load("tpu-vm")["vm"]["runtimeVersion"] == generation.runtime_version


def test_create_starts_a_stopped_one_and_stop_can_be_repeated(cloud):
    run(cloud, *CREATE)
    assert "vm is stopped" in run(cloud, "stop", "vm").stdout
    assert "vm is STOPPED already" in run(cloud, "stop", "vm").stdout
    assert "has been started" in run(cloud, *CREATE).stdout
    assert cloud.load("tpu-vm")["vm"]["state"] == "READY"
    assert cloud.get_verbs().count("tpu-vm stop") == 1


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"acceleratorType": "v4-8"}, "exists already as v4-8, not v5litepod-8"),
        ({"acceleratorType": "v5litepod-8", "state": "PREEMPTED"}, "is PREEMPTED: delete it"),
    ],
)
def test_create_refuses_conflicting_existing_vms(cloud, facts, text):
    cloud.create("vm", **facts)
    done = run(cloud, *CREATE)
    assert done.returncode == 2 and text in done.stdout
    assert "tpu-vm create" not in cloud.get_verbs()


def test_missing_capacity_is_reported_in_the_clouds_words(cloud):
    cloud.save("failures", {"tpu-vm create": [{"error": "RESOURCE_EXHAUSTED: no more capacity"}]})
    done = run(cloud, *CREATE)
    assert done.returncode == 2
    assert "RESOURCE_EXHAUSTED: no more capacity" in done.stdout


def test_a_queued_request_is_made_once_and_deleted_with_its_machine(cloud):
    cloud.environment["STAND_IN_QUEUED_STATE"] = "WAITING_FOR_RESOURCES"
    flags = ("--queued", "--reserved", "--valid-until=6h")
    assert "is requested in the queue" in run(cloud, *CREATE, *flags).stdout
    call = next(c for c in cloud.get_calls() if c[3:5] == ["queued-resources", "create"])
    assert {"--node-id=vm", "--reserved", "--valid-until-duration=6h"} <= set(call)
    assert "queued already: WAITING_FOR_RESOURCES" in run(cloud, *CREATE, *flags).stdout
    assert run(cloud, "describe", "vm").stdout == "vm: queued, WAITING_FOR_RESOURCES\n"
    assert "its queued resource are deleted" in run(cloud, "delete", "vm", "--yes").stdout
    assert cloud.load("queued-resources") == {}


def test_a_queued_request_that_has_failed_is_replaced(cloud):
    cloud.save("queued-resources", {"vm": {"name": "vm", "state": {"state": "FAILED"}}})
    assert run(cloud, *CREATE, "--queued").returncode == 0
    assert cloud.load("queued-resources")["vm"]["state"]["state"] == "ACTIVE"


def test_delete_needs_yes_and_can_be_repeated(cloud):
    run(cloud, *CREATE)
    asked = run(cloud, "delete", "vm")
    assert asked.returncode == 2 and "add --yes" in asked.stdout
    assert "vm" in cloud.load("tpu-vm")
    assert run(cloud, "delete", "vm", "--yes").stdout == "vm is deleted\n"
    again = run(cloud, "delete", "vm", "--yes")
    assert (again.returncode, again.stdout) == (0, "vm does not exist; nothing to delete\n")


def test_describe_shows_state_and_hosts(cloud):
    assert run(cloud, "describe", "vm").returncode == 1
    run(cloud, *CREATE)
    done = run(cloud, "describe", "vm")
    assert done.stdout.splitlines() == [
        "vm: v5litepod-8, READY, HEALTHY, v2-alpha-tpuv5-lite",
        "  worker 0: 10.0.0.2",
        "  worker 1: 10.0.0.3",
    ]
    assert json.loads(run(cloud, "describe", "vm", "--json").stdout)["hosts"] == [
        "10.0.0.2",
        "10.0.0.3",
    ]


def test_a_host_in_two_networks_is_one_worker(cloud):
    addresses = [{"ipAddress": f"10.{net}.0.{host}"} for host in range(2) for net in range(2)]
    cloud.create("vm", networkEndpoints=addresses, networkConfigs=[{}, {}])
    hosts = json.loads(run(cloud, "describe", "vm", "--json").stdout)["hosts"]
    assert hosts == ["10.0.0.0", "10.0.0.1"]


def test_ssh_gives_the_remote_exit_code(cloud):
    run(cloud, *CREATE)
    done = run(cloud, "ssh", "vm", "--worker=1", "--", "python", "-c", "print('a b'); exit(3)")
    assert done.returncode == 3
    assert "a b" in done.stdout
    refused = run(cloud, "ssh", "vm", "--worker=all")
    assert refused.returncode == 2 and "needs a command" in refused.stdout


@needs_git
def test_sync_ships_the_tree_and_setup_is_stopped_by_other_versions(cloud):
    """The real tree goes to both workers; a worker with another torch is marked in the table."""
    run(cloud, *CREATE)
    done = run(cloud, "sync", "vm", "--dirty")
    assert done.returncode == 0, done.stdout
    pins = read_pins(ROOT / "requirements.txt")
    for worker_number in range(2):
        home = cloud.get_home(worker_number)
        tree = home / "trainer"
        assert (tree / "main.py").read_bytes() == (ROOT / "main.py").read_bytes()
        assert not (tree / ".git").exists()
        prepare_environment(tree, {**pins, "torch": ["2.9.0", "2.8.0"][worker_number]})
    done = run(cloud, "setup", "vm")
    assert done.returncode == 1
    assert "problem: worker 1 has torch 2.8.0, not 2.9.0" in done.stdout
    assert "2.8.0 *" in done.stdout
    prepare_environment(cloud.get_home(1) / "trainer", pins)
    done = run(cloud, "setup", "vm")
    assert done.returncode == 0
    assert "all 2 workers have the versions of requirements.txt" in done.stdout


def prepare_environment(tree: Path, versions: dict[str, str]) -> None:
    """An environment that is up to date, as far as setup and facts look at it."""
    import hashlib

    (tree / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    stamp = hashlib.sha256((tree / "requirements.txt").read_bytes()).hexdigest()
    (tree / ".venv" / ".requirements.sha256").write_text(f"{stamp}\n")
    (tree / ".venv" / ".extra-tpu").write_text(f"{stamp}\n")
    python = tree / ".venv" / "bin" / "python"
    facts = {"python": "3.11.9", "libtpu": "0.0.21", **versions}
    python.write_text(FAKE_PYTHON.format(json.dumps(facts)))
    python.chmod(0o755)


def test_a_new_tree_replaces_the_old_one_and_leaves_the_rest(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    for names in (("a.py", "old/b.py"), ("a.py", "c.py")):
        with tarfile.open(tmp_path / "tree.tar.gz", "w:gz") as archive:
            for name in names:
                (tmp_path / "source.py").write_text(f"{name} of {names}")
                archive.add(tmp_path / "source.py", arcname=name)
        (tmp_path / "tree" / "runs").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / "runs" / "kept").touch()
        assert worker(["unpack", "tree.tar.gz", "tree"]) == 0
    left = {str(p.relative_to(tmp_path / "tree")) for p in (tmp_path / "tree").rglob("*")}
    assert left == {"a.py", "c.py", "old", "runs", "runs/kept", ".synced.json"}
    assert "of ('a.py', 'c.py')" in (tmp_path / "tree" / "a.py").read_text()


def test_an_archive_that_leads_outside_is_refused(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "evil").touch()
    with tarfile.open(tmp_path / "tree.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "evil", arcname="../outside")
    assert worker(["unpack", "tree.tar.gz", "tree/in"]) == 72
    assert "lies outside the tree" in capfd.readouterr().out
    assert not (tmp_path / "tree" / "outside").exists()


def test_logs_shows_the_newest_launch_of_each_worker(cloud):
    run(cloud, *CREATE)
    place = ("--tpu=vm", "--workdir=.", f"--logs-dir={cloud.folder}/logs")
    cloud.run("train.xla_dist", *place, "--", "python", "-c", "print('one\\ntwo\\nthree')")
    done = run(cloud, "logs", "vm", "--lines=2")
    for number in range(2):
        assert f"[w{number}] two\n" in done.stdout
    assert "one" not in done.stdout
    missing = run(cloud, "logs", "vm", "--run-id=none")
    assert missing.returncode == 1 and "no log of none" in missing.stdout


# The program ends with the code that the next line of a file names, and writes what it was given.
PROGRAM = """
import os, sys
from pathlib import Path
home = Path(os.environ['HOME'])
codes = (home / 'codes').read_text().split()
(home / 'codes').write_text(' '.join(codes[1:]))
with (home / 'given').open('a') as log: log.write(' '.join(sys.argv[1:]) + '\\n')
if codes[0] == 'vanish' and home.name == 'host0':
    import json
    path = home.parent / 'tpu-vm.json'
    path.write_text(json.dumps({}))
sys.exit(255 if codes[0] == 'vanish' else int(codes[0]))
"""
RUN = ("run", "vm", "--run-id=r1", "--no-setup", "--workdir=.", "--venv=", "--backoff-s=0")


def run_program(cloud: Cloud, codes: str, *flags: str, **facts):
    cloud.create("vm", acceleratorType="v5litepod-8", **facts)
    for number in range(2):
        cloud.get_home(number).mkdir(exist_ok=True)
        (cloud.get_home(number) / "codes").write_text(codes)
        (cloud.get_home(number) / "main.py").write_text(PROGRAM)
    logs = f"--logs-dir={cloud.folder}/logs"
    return run(cloud, *RUN, logs, *flags, "--", "python", "main.py", "--config", "c.yaml")


def get_given(cloud: Cloud) -> list[str]:
    return (cloud.get_home(1) / "given").read_text().splitlines()


def test_a_run_preempted_twice_resumes_until_complete(cloud):
    done = run_program(cloud, "75 75 0")
    assert done.returncode == 0, done.stdout
    first = "--config c.yaml --run.run_id=r1"
    assert get_given(cloud) == [first, *[f"{first} --resume=auto"] * 2]
    assert done.stdout.count("preempted (exit code 75); restart") == 2


def test_a_vanished_machine_is_recreated_and_the_run_resumes(cloud):
    flags = ("--accelerator-type=v5litepod-8", "--zone=z", "--spot")
    done = run_program(cloud, "vanish 0", *flags)
    assert done.returncode == 0, done.stdout
    assert "the TPU VM is gone; restart 1 of 10" in done.stdout
    assert "vm is created: v5litepod-8" in done.stdout
    assert get_given(cloud)[-1] == "--config c.yaml --run.run_id=r1 --resume=auto"
    assert cloud.get_verbs().count("tpu-vm create") == 1
    created = [call for call in cloud.get_calls() if call[4] == "create"]
    assert "--spot" in created[-1]


def test_recreating_a_vanished_machine_needs_its_flags(cloud):
    done = run_program(cloud, "vanish 0", "--max-restarts=1")
    assert done.returncode == 255
    assert "add --accelerator-type" in done.stdout
    assert "gave up after 1 restarts" in done.stdout


def test_a_run_gives_up_after_its_limit_of_restarts(cloud):
    done = run_program(cloud, "75 75 75 75", "--max-restarts=2")
    assert done.returncode == 75
    assert len(get_given(cloud)) == 3
    assert "gave up after 2 restarts" in done.stdout


def test_a_long_lived_start_does_not_count_as_a_restart(cloud):
    """With --soon-s=0 every start has lasted: preempted five times over some days, say."""
    done = run_program(cloud, "75 75 75 75 75 0", "--max-restarts=2", "--soon-s=0")
    assert done.returncode == 0
    assert done.stdout.count("restart 1 of 2") == 5


def test_a_programs_own_failure_is_not_retried(cloud):
    done = run_program(cloud, "1 0")
    assert done.returncode == 1
    assert len(get_given(cloud)) == 1
    assert "exit code 1 is no preemption" in done.stdout


def test_a_preempted_machine_is_deleted_and_recreated(cloud):
    done = run_program(cloud, "0", "--accelerator-type=v5litepod-8", state="PREEMPTED")
    assert done.returncode == 0, done.stdout
    assert cloud.get_verbs().count("tpu-vm delete") == 1


def test_a_machine_being_created_is_waited_for(cloud):
    done = run_program(cloud, "0", state="CREATING", then=["STARTING", "STARTING", "READY"])
    assert done.returncode == 0, done.stdout
    waits = [line for line in done.stdout.splitlines() if line.endswith(": waiting")]
    assert waits == ["vm is CREATING: waiting", "vm is STARTING: waiting"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("python", "main.py"), ("python", "main.py", "--resume=auto")),
        (("python", "main.py", "--resume=x"), ("python", "main.py", "--resume=x")),
        (("python", "main.py", "--run.resume", "x"), ("python", "main.py", "--run.resume", "x")),
        (("python", "other.py"), ("python", "other.py")),
    ],
)
def test_resume_is_added_to_main_py_only_and_once(words, expected):
    assert add_resume(RemoteCommand(words)).words == expected
    named = name_run(RemoteCommand(words), "r1").words
    assert named == ((*expected[:2], "--run.run_id=r1") if words[1:] == ("main.py",) else words)


@pytest.mark.parametrize(
    ("flags", "shown"), [((), "--venv=.venv"), (("--conda-env=torch",), "--conda-env=torch")]
)
def test_a_run_uses_the_environment_of_setup_unless_it_names_another(cloud, flags, shown):
    done = run(cloud, "run", "vm", "--dry-run", *flags, "--", "python", "main.py")
    assert done.returncode == 0, done.stdout
    assert f" {shown} -- python main.py" in done.stdout.splitlines()[-1]


def test_a_named_run_keeps_its_name():
    words = ("python", "main.py", "--run.run_id", "mine")
    assert name_run(RemoteCommand(words), "r1").words == words


@pytest.mark.parametrize(
    "verb", ["create", "describe", "ssh", "sync", "setup", "run", "logs", "stop", "delete"]
)
def test_every_verb_has_a_dry_run_that_calls_nothing(cloud, verb):
    more = {"create": ["--accelerator-type=v4-8"], "run": ["--", "python", "main.py"]}
    done = run(cloud, verb, "vm", "--zone=z", "--dry-run", *more.get(verb, []))
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines and all(line.startswith(("gcloud compute tpus ", "git ")) for line in lines)
    assert cloud.get_calls() == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["create", "vm", "--accelerator-type=v5e-8"], "is spelled v5litepod-8"),
        (["create", "vm", "--accelerator-type=v4-8", "--valid-until=6h"], "add --queued"),
        (["stop", "vm"], "nothing to stop"),
        (["run", "vm"], "there is no command"),
        (["run", "vm", "--", "true"], "add --accelerator-type"),
    ],
)
def test_a_wrong_call_gives_one_line_and_code_2(cloud, words, text):
    done = run(cloud, *words)
    assert done.returncode == 2
    assert text in done.stdout and done.stdout.count("\n") == 1


def test_a_deviating_worker_is_starred():
    table = describe_workers(
        {"0": {"torch": "2.9.0"}, "1": {"torch": "2.8.0"}, "2": {"torch": "2.9.0"}}
    )
    assert table.splitlines()[1].split() == ["torch", "2.9.0", "2.8.0", "*", "2.9.0"]
    table = describe_workers({"0": {"torch": "2.9.0"}, "10": {}})
    assert table.splitlines() == ["       w0       w10", "torch  2.9.0 *  - *"]


def test_torchtpu_is_set_up_in_an_environment_of_its_own(cloud):
    done = run(cloud, "setup", "vm", "--stack=torch_tpu", "--dry-run")
    assert "bash run_commands.sh setup --torch-tpu'" in done.stdout
    assert "--python=.venv-tpu/bin/python" in done.stdout
    words = ("run", "vm", "--stack=torch_tpu", "--dry-run", "--", "python", "main.py")
    done = run(cloud, *words)
    assert "setup --torch-tpu" in done.stdout
    assert " --venv=.venv-tpu -- python main.py" in done.stdout.splitlines()[-1]
    refused = run(cloud, "setup", "vm", "--stack=jax")
    assert refused.returncode == 2 and "invalid choice: 'jax'" in refused.stdout


def test_a_worker_must_have_the_packages_of_its_stack_alone():
    pins = read_stack_pins(STACKS["torch_tpu"])
    assert (pins["torch"], pins["torch_xla"], pins["torch_tpu"]) == ("2.13.0", "none", "0.2.0")
    fits = {**pins, "torch": "2.13.0+cu130"}
    assert find_problems({"0": fits}, pins) == []
    problems = find_problems({"0": {**fits, "torch_xla": "2.9.0"}}, pins)
    assert problems == ["worker 0 has torch_xla 2.9.0, not none"]
    pins = read_stack_pins(STACKS["torch_xla"])
    assert (pins["torch_xla"], pins["torch_tpu"]) == ("2.9.0", "none")


def test_a_generation_without_the_stack_is_refused(monkeypatch):
    row = replace(find_generation("v6e-8"), stacks=("torch_tpu",))
    monkeypatch.setattr("utils.generations.find_generation", lambda name: row)
    assert check_stack("v6e-8", "torch_tpu") is row
    with pytest.raises(UserError, match="does not run torch_xla; use --stack torch_tpu"):
        check_stack("v6e-8", "torch_xla")


def test_builds_of_a_version_match_it_and_a_missing_libtpu_fails():
    columns = {"0": {"torch": "2.9.0+cpu", "libtpu": "none"}}
    problems = find_problems(columns, {"torch": "2.9.0"})
    assert len(problems) == 1 and "no libtpu" in problems[0]


PROJECT = ("train.project", "p", "--bucket=gs://b", "--location=us-west4")


def test_a_project_is_prepared_once(cloud):
    first = cloud.run(*PROJECT)
    assert (first.returncode, first.stdout) == (0, "p: services are on, gs://b is created\n")
    assert "--location=us-west4" in cloud.load("buckets")["gs://b"]
    assert cloud.run(*PROJECT).stdout == "p: services are on, gs://b exists\n"
    creations = [call for call in cloud.get_calls() if "create" in call]
    assert len(creations) == 1


def test_an_inaccessible_project_is_reported(cloud):
    cloud.save("failures", {"services enable": [{"error": "PERMISSION_DENIED: p"}]})
    done = cloud.run(*PROJECT)
    assert done.returncode == 2 and "PERMISSION_DENIED" in done.stdout
    cloud.save("failures", {"buckets describe": [{"error": "HTTPError 403: no permission"}]})
    done = cloud.run(*PROJECT)
    assert done.returncode == 2 and "returned no state of gs://b" in done.stdout
    wrong = cloud.run("train.project", "p", "--bucket=b", "--location=l")
    assert wrong.returncode == 2 and "is not gs://NAME" in wrong.stdout


_NO_PROJECT = """WARNING: an update is there
ERROR: (gcloud.compute.tpus.tpu-vm.describe) Error parsing [tpu].
The [tpu] resource is not properly specified.
Failed to find attribute [project]. The attribute can be set in the following ways:
- provide the argument `--project` on the command line
"""


def test_gclouds_full_error_is_shown():
    reason = CommandResult(1, "", _NO_PROJECT).reason
    assert reason.startswith("ERROR: (gcloud.compute.tpus.tpu-vm.describe) Error parsing [tpu].")
    assert "Failed to find attribute [project]." in reason
    assert reason.endswith("- provide the argument `--project` on the command line")
    assert CommandResult(1, "", "noise\nssh: error: no route\n").reason == "ssh: error: no route"
