"""The launcher on 1 to 4 workers: output, exit codes, failures, Ctrl-C, lost connections."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.cloud import Cloud
from train.worker import find_group, is_alive

ECHO = ("python", "-c", "import os; print('worker', os.environ['TPU_WORKER_ID'], os.getcwd())")
# Worker 1 fails at once; the others would sleep for ever.
ONE_FAILS = (
    "import os, sys, time\n"
    "if os.environ['TPU_WORKER_ID'] == '1':\n"
    "    print('ValueError: no such thing'); sys.exit(7)\n"
    "print('waiting'); time.sleep(1000)"
)
WAIT = "import time; print('begun'); time.sleep(1000)"


@pytest.fixture
def cloud(tmp_path) -> Cloud:
    made = Cloud(tmp_path, hosts=4)
    made.create()
    return made


def launch(cloud: Cloud, *command: str, flags: tuple[str, ...] = ()):
    return cloud.start(*words(cloud, *command, flags=flags))


def words(cloud: Cloud, *command: str, flags: tuple[str, ...] = ()) -> list[str]:
    return [
        "train.xla_dist",
        "--tpu=pod",
        "--zone=z",
        "--workdir=.",
        "--run-id=r1",
        f"--logs-dir={cloud.folder}/logs",
        *flags,
        "--",
        *command,
    ]


def get_groups(cloud: Cloud) -> list[int]:
    """Process groups of the launch that still live on any worker."""
    found = [find_group(cloud.get_home(n) / ".xla_dist" / "r1") for n in range(cloud.hosts)]
    return [group for group in found if group is not None]


def read_until(process: subprocess.Popen[str], text: str, count: int) -> list[str]:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if sum(text in seen for seen in lines) == count:
            return lines
    raise AssertionError("".join(lines))


def test_every_worker_runs_the_command_and_its_lines_are_kept(cloud):
    done = cloud.run(*words(cloud, *ECHO))
    assert done.returncode == 0, done.stdout
    for worker in range(4):
        line = f"worker {worker} {cloud.get_home(worker)}"
        assert f"[w{worker}] {line}\n" in done.stdout
        assert line in (cloud.folder / "logs" / "r1" / f"worker_{worker}.log").read_text()
        assert (cloud.get_home(worker) / ".xla_dist/r1/output.log").read_text() == f"{line}\n"


def test_variables_and_quotes_reach_the_program_unchanged(cloud):
    value = "a 'b' \"c\" $HOME; *"
    code = "import os, sys; print(os.environ['K'] == sys.argv[1], len(sys.argv))"
    done = cloud.run(*words(cloud, "python", "-c", code, value, flags=(f"--env=K={value}",)))
    assert [f"[w{n}] True 2\n" in done.stdout for n in range(4)] == [True] * 4


def test_the_first_failure_ends_all_workers_and_gives_its_code_and_cause(cloud):
    done = cloud.run(*words(cloud, "python", "-c", ONE_FAILS))
    assert done.returncode == 7
    assert "worker 1 failed first with exit code 7: ValueError: no such thing" in done.stdout
    assert get_groups(cloud) == []
    assert (cloud.get_home(0) / ".xla_dist/r1/exit").read_text() == "143"


def test_a_program_that_ignores_sigterm_is_killed_after_the_grace(cloud):
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ONE_FAILS
    done = cloud.run(*words(cloud, "python", "-c", code, flags=("--grace-s=0.2",)))
    assert done.returncode == 7
    assert "ended by SIGKILL after 0.2 s" in done.stdout
    assert get_groups(cloud) == []


def test_a_worker_killed_by_a_signal_gives_128_plus_its_number(cloud):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert cloud.run(*words(cloud, "python", "-c", code)).returncode == 137


def test_after_exit_75_the_other_workers_may_end_by_themselves(cloud):
    code = (
        "import os, sys, time\n"
        "time.sleep(0.7 if os.environ['TPU_WORKER_ID'] != '2' else 0); sys.exit(75)"
    )
    done = cloud.run(*words(cloud, "python", "-c", code))
    assert done.returncode == 75
    assert not any("stop r1" in call[-2] for call in cloud.get_calls() if "ssh" in call)
    assert (cloud.get_home(0) / ".xla_dist/r1/exit").read_text() == "75"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_a_signal_ends_all_workers_and_leaves_no_orphans(cloud, number, code):
    process = launch(cloud, "python", "-c", WAIT)
    read_until(process, "] begun", 4)
    groups = get_groups(cloud)
    assert len(groups) == 4
    process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == code, output
    assert "all workers were asked to end" in output
    assert get_groups(cloud) == []


def test_a_launcher_that_is_killed_takes_its_workers_with_it(cloud):
    """A lost connection, by the same way: nobody reads what the workers write."""
    process = launch(cloud, "python", "-c", WAIT)
    read_until(process, "] begun", 4)
    watched = [os.pidfd_open(get_parent(group)) for group in get_groups(cloud)]
    relay = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    for pid in relay:  # the connection ends with its client
        os.kill(int(pid), signal.SIGKILL)
    for handle in watched:
        assert select.select([handle], [], [], 60)[0], "a worker did not end"
    exits = [cloud.get_home(n) / ".xla_dist/r1/exit" for n in range(4)]
    assert [path.read_text() for path in exits] == ["143"] * 4


def get_parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_children_of_the_program_end_with_it(cloud):
    code = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "print('parent ends')"
    )
    done = cloud.run(*words(cloud, "python", "-c", code))
    assert done.returncode == 0, done.stdout
    for worker in range(4):
        group = int((cloud.get_home(worker) / ".xla_dist/r1/group").read_text().split()[0])
        assert not is_alive(group)


def test_a_worker_that_cannot_be_reached_is_named_and_the_others_end(cloud):
    cloud.environment["STAND_IN_UNREACHABLE"] = "3"
    done = cloud.run(*words(cloud, "python", "-c", WAIT))
    assert done.returncode == 255
    assert "worker 3 failed first with exit code 255" in done.stdout
    assert get_groups(cloud) == []


@pytest.mark.slow
def test_a_worker_that_never_starts_is_named(cloud):
    """Worker 2 cannot begin: its home holds a program in place of python3 that hangs."""
    bin_dir = cloud.folder / "bin"
    bin_dir.mkdir()
    (bin_dir / "python3").write_text(
        "#!/bin/bash\n"
        'if [[ "$TPU_WORKER_ID" == 2 && "$*" == *" run "* ]]; then exec sleep 1000; fi\n'
        f'exec {cloud.environment["STAND_IN_PYTHON"]} "$@"\n'
    )
    (bin_dir / "python3").chmod(0o755)
    path = f'{{"PATH": "{bin_dir}:{Path(cloud.environment["STAND_IN_PYTHON"]).parent}:/bin"}}'
    cloud.environment["STAND_IN_ENV"] = path
    flags = ("--start-timeout-s=5", "--grace-s=1")
    done = cloud.run(*words(cloud, "python", "-c", WAIT, flags=flags))
    assert done.returncode == 255
    assert "worker 2 failed first with exit code 255: did not begin within 5 s" in done.stdout
    assert get_groups(cloud) == []


def test_a_reconnection_does_not_run_the_command_twice(cloud):
    """gcloud connects again after ssh's 255: the worker must not start a second program."""
    for worker in range(4):
        (cloud.get_home(worker) / ".xla_dist" / "r1").mkdir(parents=True)
    done = cloud.run(*words(cloud, *ECHO))
    assert done.returncode == 76
    assert "not run a second time" in done.stdout
    assert "worker 0 /" not in done.stdout


def test_leftovers_of_an_earlier_launch_are_refused_and_ended_on_request(cloud):
    first = launch(cloud, "python", "-c", WAIT)
    read_until(first, "] begun", 4)
    again = [word.replace("r1", "r2") for word in words(cloud, *ECHO)]
    done = cloud.run(*again)
    assert done.returncode == 73
    assert "launch r1 still runs here; end it by --end-others" in done.stdout
    assert len(get_groups(cloud)) == 4
    again = [word.replace("r1", "r3") for word in words(cloud, *ECHO, flags=("--end-others",))]
    done = cloud.run(*again)
    assert done.returncode == 0, done.stdout
    assert get_groups(cloud) == []
    assert first.communicate()[0] and first.returncode == 143


def test_a_launch_can_be_ended_from_elsewhere_by_its_name(cloud):
    first = launch(cloud, "python", "-c", WAIT)
    read_until(first, "] begun", 4)
    done = cloud.run("train.xla_dist", "--tpu=pod", "--stop=r1", "--grace-s=5")
    assert done.returncode == 0
    assert done.stdout.count("r1: ended by SIGTERM") == 4
    assert first.communicate()[0] and first.returncode == 143


def test_a_worker_stopped_before_its_start_never_starts(cloud):
    assert cloud.run("train.xla_dist", "--tpu=pod", "--stop=r1").returncode == 0
    done = cloud.run(*words(cloud, *ECHO))
    assert done.returncode == 143
    assert "was ended before it began" in done.stdout
    assert "worker 0 /" not in done.stdout


def test_lines_of_all_sizes_and_progress_bars_arrive_complete(cloud):
    code = (
        "import sys\n"
        "for n in range(200): print('x' * (n * 7 % 900), n, flush=False)\n"
        "for n in range(5): sys.stdout.write(f'\\rbar {n}')\n"
        "print(); sys.stdout.write('no end of line')"
    )
    done = cloud.run(*words(cloud, "python", "-c", code))
    assert done.returncode == 0
    for worker in range(4):
        lines = (cloud.get_home(worker) / ".xla_dist/r1/output.log").read_text().splitlines()
        assert [line.split()[-1] for line in lines[:200]] == [str(n) for n in range(200)]
        assert lines[200:205] == ["", "bar 0", "bar 1", "bar 2", "bar 3"] or "bar 4" in lines
        assert lines[-1] == "no end of line"


@pytest.mark.parametrize("code", [0, 7])
def test_marks_torn_by_other_connections_do_not_lose_a_worker(cloud, code):
    """As with ssh, four connections write to one pipe, and none ends its pieces with a line."""
    cloud.environment["STAND_IN_PIECE"] = "11"
    program = f"import sys; print(*range(200), sep='\\n'); sys.exit({code})"
    done = cloud.run(*words(cloud, "python", "-c", program, flags=("--grace-s=1",)))
    assert done.returncode in ({0} if code == 0 else {7, 255})
    for worker in range(4):
        lines = (cloud.get_home(worker) / ".xla_dist/r1/output.log").read_text().splitlines()
        assert lines[:200] == [str(n) for n in range(200)]


def test_the_dry_run_prints_the_commands_and_runs_none(cloud):
    done = cloud.run(
        "train.xla_dist",
        "--tpu=pod",
        "--zone=z",
        "--project=p",
        "--venv=.venv",
        "--env=A=b c",
        "--dry-run",
        "--",
        "python",
        "main.py",
        "--lr=1",
    )
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "gcloud compute tpus tpu-vm describe pod --zone=z --project=p --format=json",
        "gcloud compute tpus tpu-vm scp train/worker.py pod:.xla_dist_worker.py --zone=z "
        "--project=p --worker=all --quiet",
        "gcloud compute tpus tpu-vm ssh pod --zone=z --project=p --worker=all '--command=python3 "
        ".xla_dist_worker.py run --run-id=RUN_ID --workdir=trainer --venv=.venv '\"'\"'--env=A=b "
        "c'\"'\"' -- python main.py --lr=1' --quiet",
    ]
    assert cloud.get_calls() == []


def test_a_program_with_a_path_is_searched_in_the_workdir(cloud):
    for worker in range(4):
        script = cloud.get_home(worker) / "tree" / "run.sh"
        script.parent.mkdir(parents=True)
        script.write_text("#!/bin/bash\necho ran in $PWD\n")
        script.chmod(0o755)
    done = cloud.run(*words(cloud, "./run.sh", flags=("--workdir=tree",)))
    assert done.returncode == 0, done.stdout
    assert f"[w3] ran in {cloud.get_home(3)}/tree" in done.stdout


def test_environments_of_venv_and_conda_are_used(cloud):
    for worker in range(4):
        conda = cloud.get_home(worker) / "miniconda3/bin/conda"
        python = cloud.get_home(worker) / "own/bin/python"
        for program in (conda, python):
            program.parent.mkdir(parents=True)
            program.write_text('#!/bin/bash\necho "$(basename $0): $* in $VIRTUAL_ENV"\n')
            program.chmod(0o755)
    done = cloud.run(*words(cloud, "python", "main.py", flags=("--conda-env=torch",)))
    assert "[w3] conda: run --no-capture-output -n torch python main.py in \n" in done.stdout
    done = cloud.run(*words(cloud, "python", "main.py", flags=("--venv=own", "--run-id=r2")))
    assert f"[w3] python: main.py in {cloud.get_home(3)}/own\n" in done.stdout


def test_flags_of_the_removed_launcher_are_ignored_with_a_message(cloud):
    flags = ("--restart-tpuvm-pod-server", "--tpuvm-server-port=1")
    done = cloud.run(*words(cloud, *ECHO, flags=flags))
    assert done.returncode == 0
    assert done.stdout.count("is ignored: PJRT") == 2


WRONG = [
    (["--tpu=pod"], "there is no command"),
    (["--tpu=none", "--", "true"], "'none' does not exist"),
    (["--tpu=pod", "--venv=a", "--conda-env=b", "--", "true"], "exclude each other"),
    (["--tpu=pod", "--env=A", "--", "true"], "is not of the form NAME=VALUE"),
]


@pytest.mark.parametrize(("flags", "text"), WRONG)
def test_a_wrong_call_gives_one_line_and_code_2(cloud, flags, text):
    done = cloud.run("train.xla_dist", *flags)
    assert done.returncode == 2
    assert done.stdout.startswith("error: ") and text in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("state", ["PREEMPTED", "CREATING", "STOPPED"])
def test_a_tpu_that_is_not_ready_is_refused(cloud, state):
    cloud.create(state=state)
    done = cloud.run(*words(cloud, *ECHO))
    assert done.returncode == 2
    assert f"'pod' is {state}, not READY" in done.stdout


def test_an_unreachable_cloud_is_not_taken_for_one_without_the_tpu(cloud):
    cloud.save("failures", {"tpu-vm describe": [{"error": "PERMISSION_DENIED: no access"}]})
    done = cloud.run(*words(cloud, *ECHO))
    assert done.returncode == 2
    assert "returned no state of 'pod'" in done.stdout and "PERMISSION_DENIED" in done.stdout


def test_missing_directories_and_programs_on_the_workers_are_named(cloud):
    done = cloud.run(*words(cloud, *ECHO, flags=("--workdir=none",)))
    assert done.returncode == 72 and "ship the tree first" in done.stdout
    done = cloud.run(*words(cloud, *ECHO, flags=("--venv=.none", "--run-id=r2")))
    assert done.returncode == 72 and "set it up first" in done.stdout
    done = cloud.run(*words(cloud, "no-such-program", flags=("--run-id=r3",)))
    assert done.returncode == 127 and "'no-such-program' is not on this worker's" in done.stdout


def test_without_gcloud_the_error_names_it(cloud):
    cloud.environment["PATH"] = "/nonexistent"
    done = cloud.run(*words(cloud, *ECHO))
    assert done.returncode == 2
    assert "'gcloud' is not on PATH" in done.stdout
