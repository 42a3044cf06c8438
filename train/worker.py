"""The worker's half of a launch: it is copied to every TPU VM and runs there.

It needs the standard library and Python 3.8 only: a worker may have nothing else yet. It prints
every line of the program as `[w3] line`; marks such as `[w3] ::xla_dist:: exit 1` report progress
to the launcher. Each launch has a directory ~/.xla_dist/RUN_ID/ with its log, process group and
exit code.

    python3 .xla_dist_worker.py run --run-id=R --workdir=trainer -- python main.py --config C
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO

MARK = "::xla_dist::"
EXIT_NO_WORKDIR = 72
EXIT_OCCUPIED = 73
EXIT_TWICE = 76
EXIT_STOPPED = 143
EXIT_NO_PROGRAM = 127
# ssh uses 255 for its own failures, and gcloud would then run the command again.
EXIT_RESERVED = 255
RUNS = ".xla_dist"
MANIFEST = ".synced.json"
GRACE_S = 120.0
_POLL_S = 0.25
_LINE_BYTES = 3500  # a pipe takes up to 4096 bytes in one piece
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    arguments = create_parser().parse_args(argv)
    verbs = {"run": run, "stop": stop, "unpack": unpack, "logs": show_logs, "facts": show_facts}
    return verbs[arguments.verb](arguments)


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    add = verbs.add_parser("run").add_argument
    add("--run-id", required=True)
    add("--workdir", default=".")
    add("--venv", default="")
    add("--conda-env", default="")
    add("--env", action="append", default=[])
    add("--end-others", action="store_true")
    add("words", nargs="+")
    add = verbs.add_parser("stop").add_argument
    add("run_id")
    add("--grace-s", type=float, default=GRACE_S)
    add = verbs.add_parser("unpack").add_argument
    add("archive")
    add("workdir")
    add = verbs.add_parser("logs").add_argument
    add("--run-id", default="")
    add("--lines", type=int, default=50)
    add("--follow", action="store_true")
    add = verbs.add_parser("facts").add_argument
    add("--workdir", default=".")
    add("--python", default="python3")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run a program until it ends or the launcher is gone; return its exit code."""
    speaker = Speaker(find_worker())
    folder = get_runs() / arguments.run_id
    refusal = _prepare(arguments, folder, speaker=speaker)
    if refusal is not None:
        speaker.mark(f"exit {refusal}")
        return refusal
    words, environment = _get_program(arguments)
    if words is None:
        speaker.say(f"error: {arguments.words[0]!r} is not on this worker's PATH")
        speaker.mark(f"exit {EXIT_NO_PROGRAM}")
        return EXIT_NO_PROGRAM
    child = subprocess.Popen(
        words,
        cwd=_resolve(arguments.workdir),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    (folder / "group").write_text(f"{child.pid} {_get_boot()}")
    if (folder / "stopped").exists():  # a stop between the claim of the directory and this line
        end_group(child.pid, GRACE_S)
    speaker.mark(f"started {child.pid}")
    pump = threading.Thread(target=_copy_output, args=(child.stdout, speaker, folder), daemon=True)
    pump.start()
    _watch(child, speaker)
    end_group(child.pid, 5.0)  # what the program has left behind
    pump.join(timeout=5.0)
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    code = EXIT_RESERVED - 1 if code == EXIT_RESERVED else code
    (folder / "exit").write_text(str(code))
    speaker.mark(f"exit {code}")
    return code


def stop(arguments: argparse.Namespace) -> int:
    """End a launch on this worker: SIGTERM to all of it, then SIGKILL to the rest.

    A launch whose slower connection arrives after this one does not begin.
    """
    speaker = Speaker(find_worker())
    folder = get_runs() / arguments.run_id
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stopped").touch()
    group = find_group(folder)
    if group is None:
        speaker.say(f"{arguments.run_id}: nothing to end")
        return 0
    speaker.say(f"{arguments.run_id}: {end_group(group, arguments.grace_s)}")
    return 0


def unpack(arguments: argparse.Namespace) -> int:
    """Unpack a tree: delete files of the previous tree that it lacks; keep all others."""
    speaker = Speaker(find_worker())
    target = _resolve(arguments.workdir)
    target.mkdir(parents=True, exist_ok=True)
    manifest = target / MANIFEST
    before = set(json.loads(manifest.read_text())) if manifest.exists() else set()
    with tarfile.open(_resolve(arguments.archive)) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
        names = {member.name for member in members}
        outside = [name for name in names if name.startswith("/") or ".." in Path(name).parts]
        if outside:
            speaker.say(f"error: {outside[0]!r} of the archive lies outside the tree")
            return EXIT_NO_WORKDIR
        for name in sorted(before - names):
            with contextlib.suppress(FileNotFoundError):
                (target / name).unlink()
        # Newer Pythons warn if no filter is named; older ones do not know any.
        if hasattr(tarfile, "data_filter"):
            archive.extractall(target, filter="data")
        else:
            archive.extractall(target)
    manifest.write_text(json.dumps(sorted(names)))
    speaker.say(f"{len(names)} files in ~/{arguments.workdir}, {len(before - names)} removed")
    return 0


def show_logs(arguments: argparse.Namespace) -> int:
    """Show the last lines of a launch's log, with --follow also the lines that come."""
    speaker = Speaker(find_worker())
    runs = sorted(get_runs().glob("*/output.log"), key=lambda path: path.stat().st_mtime)
    if arguments.run_id:
        runs = [path for path in runs if path.parent.name == arguments.run_id]
    if not runs:
        speaker.say(f"error: no log of {arguments.run_id or 'any launch'} below ~/{RUNS}")
        return 1
    with runs[-1].open("rb") as log:
        for line in log.read().splitlines()[-arguments.lines :]:
            speaker.write(line)
        while arguments.follow and find_group(runs[-1].parent) and not speaker.is_alone():
            for line in log.read().splitlines():
                speaker.write(line)
            time.sleep(_POLL_S)
    return 0


def show_facts(arguments: argparse.Namespace) -> int:
    """Print versions of installed packages as one line of JSON."""
    stacks = ("torch_xla", "torch_tpu", "libtpu")
    names = ("torch", "torchvision", *stacks, "timm", "tensorflow-cpu", "numpy")
    code = (
        "import importlib.metadata as m, json, platform\n"
        "def version(name):\n"
        "    try: return m.version(name)\n"
        "    except m.PackageNotFoundError: return 'none'\n"
        f"print(json.dumps({{'python': platform.python_version(), "
        f"**{{n: version(n) for n in {names!r}}}}}))"
    )
    workdir = _resolve(arguments.workdir)
    program = workdir / arguments.python
    speaker = Speaker(find_worker())
    try:
        done = subprocess.run(
            [str(program) if program.exists() else arguments.python, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except FileNotFoundError as error:
        speaker.say(f"error: {error}")
        return EXIT_NO_PROGRAM
    if done.returncode:
        speaker.say(f"error: {done.stdout.strip().splitlines()[-1]}")
        return 1
    speaker.mark(f"facts {done.stdout.strip()}")
    return 0


class Speaker:
    """Writer of this worker's lines, each in one piece; notices a closed connection."""

    def __init__(self, worker: str) -> None:
        self._prefix = f"[w{worker}] ".encode()
        self._lock = threading.Lock()
        self._is_alone = False
        self._poll = select.poll()
        self._poll.register(1, 0)

    def say(self, text: str) -> None:
        """Print a line of this program's own."""
        self.write(text.encode())

    def mark(self, text: str) -> None:
        """Print a mark for the launcher."""
        self.say(f"{MARK} {text}")

    def write(self, line: bytes) -> None:
        """Print a line of the program, split where a pipe would tear it."""
        for start in range(0, max(len(line), 1), _LINE_BYTES):
            data = self._prefix + line[start : start + _LINE_BYTES] + b"\n"
            try:
                with self._lock:
                    os.write(1, data)
            except OSError:
                self._is_alone = True

    def is_alone(self) -> bool:
        """Return whether the other end of the connection is gone."""
        closed = select.POLLERR | select.POLLHUP | select.POLLNVAL
        self._is_alone |= any(event & closed for _, event in self._poll.poll(0))
        return self._is_alone


def find_worker() -> str:
    """Find this worker's number as Cloud TPU counts; `?` if unknown."""
    if os.environ.get("TPU_WORKER_ID", "").isdigit():
        return os.environ["TPU_WORKER_ID"]
    match = re.search(r"-w-(\d+)$", socket.gethostname())
    if match:
        return match[1]
    request = urllib.request.Request(
        _METADATA + "agent-worker-number", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return answer.read().decode().strip()
    except OSError:
        return "?"


def get_runs() -> Path:
    """Return the directory of all launches."""
    return Path.home() / RUNS


def find_group(folder: Path) -> int | None:
    """Return the process group of a running launch; None if it has ended or never began."""
    path = folder / "group"
    if not path.exists() or (folder / "exit").exists():
        return None
    group, boot = path.read_text().split()
    return int(group) if boot == _get_boot() and is_alive(int(group)) else None


def is_alive(group: int) -> bool:
    """Return whether a process of the group is alive; one that waits to be reaped is not."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return any(_get_state(path) == (group, True) for path in Path("/proc").glob("[0-9]*"))


def end_group(group: int, grace_s: float) -> str:
    """Send SIGTERM, wait, send SIGKILL; return which of them it took."""
    if not is_alive(group):
        return "had ended"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        if not is_alive(group):
            return "ended by SIGTERM"
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    return f"ended by SIGKILL after {grace_s:g} s"


def _prepare(arguments: argparse.Namespace, folder: Path, *, speaker: Speaker) -> int | None:
    """Claim the launch's directory; return an exit code if the launch cannot begin."""
    workdir = _resolve(arguments.workdir)
    if not workdir.is_dir():
        speaker.say(f"error: no directory {workdir}; ship the tree first, or set --workdir")
        return EXIT_NO_WORKDIR
    if arguments.venv and not (workdir / arguments.venv / "bin" / "python").exists():
        speaker.say(f"error: no virtual environment {workdir / arguments.venv}; set it up first")
        return EXIT_NO_WORKDIR
    for path in get_runs().glob("*"):
        group = find_group(path) if path != folder else None
        if group is None:
            continue
        if not arguments.end_others:
            speaker.say(f"error: launch {path.name} still runs here; end it by --end-others")
            return EXIT_OCCUPIED
        speaker.say(f"launch {path.name}: {end_group(group, GRACE_S)}")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if (folder / "stopped").exists() and not (folder / "group").exists():
            speaker.say("was ended before it began")
            return EXIT_STOPPED
        speaker.say("error: the connection was lost and made again; not run a second time")
        return EXIT_TWICE
    return None


def _get_program(arguments: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Return the command to start and its environment; no command if the program is missing."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    words = list(arguments.words)
    if arguments.venv:
        venv = _resolve(arguments.workdir) / arguments.venv
        environment["VIRTUAL_ENV"] = str(venv)
        environment["PATH"] = f"{venv / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
    if arguments.conda_env:
        homes = [Path.home() / name / "bin" / "conda" for name in ("miniconda3", "miniforge3")]
        conda = next((str(path) for path in homes if path.exists()), "conda")
        words = [conda, "run", "--no-capture-output", "-n", arguments.conda_env, *words]
    environment.update(pair.split("=", 1) for pair in arguments.env)
    if "/" in words[0]:
        words[0] = str(_resolve(arguments.workdir) / words[0])
    program = shutil.which(words[0], path=environment.get("PATH"))
    return ([program, *words[1:]] if program else None), environment


def _copy_output(output: IO[bytes], speaker: Speaker, folder: Path) -> None:
    """Pass on and store the program's lines; progress bars end lines with a carriage return."""
    rest = b""
    with (folder / "output.log").open("ab", buffering=0) as log:
        while True:
            data = os.read(output.fileno(), 65536)
            *lines, rest = re.split(rb"[\r\n]+", rest + data)
            if not data and rest:
                lines.append(rest)
            for line in lines:
                log.write(line + b"\n")
                speaker.write(line)
            if not data:
                return


def _watch(child: subprocess.Popen[bytes], speaker: Speaker) -> None:
    """Wait for the program; end it if the launcher is gone or a signal comes."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    while child.poll() is None:
        if ended.is_set() or speaker.is_alone():
            threading.Thread(target=end_group, args=(child.pid, GRACE_S), daemon=True).start()
            child.wait()
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_POLL_S)


def _get_state(path: Path) -> tuple[int | None, bool]:
    try:
        fields = (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None, False
    return int(fields[2]), fields[0] not in "ZX"


def _get_boot() -> str:
    """Read the id of the machine's present boot: process numbers of an earlier one are void."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _resolve(path: str) -> Path:
    return Path.home() / Path(path).expanduser()


if __name__ == "__main__":
    sys.exit(main())
