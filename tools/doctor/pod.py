"""Checks on every worker of a pod, through the launcher."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.doctor.machine import RED, Finding
from train.commands import DEFAULT_STACK, STACKS, WORKDIR, RemoteCommand, Tpu
from train.execute import Executor
from train.fanout import FanoutOptions, Outcome, create_run_id, fan_out
from train.lifecycle import require_ready

_NUMBER = re.compile(r"worker_(\d+)\.log")


def examine_pod(
    tpu: Tpu, flags: Sequence[str], executor: Executor, *, stack: str = DEFAULT_STACK
) -> dict[str, list[Finding]]:
    """Return the findings of every worker by its number; one red line if it has none.

    A UserError if the TPU VM does not exist, or cannot be reached.
    """
    hosts = len(require_ready(tpu, executor).hosts)
    words = ("python", "-m", "tools.doctor", "--json", "--in-pod", "--exit-zero", *flags)
    remote = RemoteCommand(words, workdir=WORKDIR, venv=STACKS[stack].venv)
    with TemporaryDirectory() as folder:
        options = FanoutOptions(
            create_run_id(dry_run=executor.dry_run), Path(folder), grace_s=5.0, quiet=True
        )
        outcome = fan_out(tpu, remote, hosts=hosts, options=options, executor=executor)
        paths = Path(folder).rglob("worker_[0-9]*.log")
        logs = {match[1]: p for p in paths if (match := _NUMBER.match(p.name))}
        texts = {worker: path.read_text() for worker, path in logs.items()}
    workers = map(str, range(hosts))
    return {name: read_findings(name, texts.get(name, ""), outcome=outcome) for name in workers}


def read_findings(worker: str, log: str, *, outcome: Outcome) -> list[Finding]:
    """Read the findings in the log of a worker."""
    for line in log.splitlines():
        if line.startswith('{"verdict"'):
            return [Finding(**row) for row in json.loads(line)["findings"]]
    lines = [line for line in log.splitlines() if line.strip() and "::xla_dist::" not in line]
    reason = lines[-1] if lines else outcome.cause or "no output"
    hint = "python -m train.tpu_vm sync NAME, then setup NAME"
    return [Finding("doctor", RED, f"could not be run on worker {worker}: {reason}", hint)]
