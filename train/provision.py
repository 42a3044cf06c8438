"""Brings the tree and its environment to every worker, and checks that all have the same."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from train import commands
from train.commands import TREE_ARCHIVE, VENV, Tpu
from train.execute import ROOT, Executor
from train.fanout import copy_worker_script
from train.table import draw_table, find_odd
from train.tree import pack_tree
from train.worker import MARK
from utils.errors import UserError

_FACTS = re.compile(rf"^\[w(\d+|\?)\] {re.escape(MARK)} facts (.*)$", re.MULTILINE)
_CHECKED = ("torch", "torchvision", "torch_xla", "timm", "tensorflow-cpu", "numpy")


def sync(tpu: Tpu, executor: Executor, *, workdir: str, dirty: bool) -> str:
    """Ship the tree; gives the commit that it is.

    Raises:
      UserError: this is no git checkout, or a worker cannot be reached.
    """
    tree = pack_tree(executor, dirty=dirty)
    copy_worker_script(tpu, executor)
    executor.require(commands.copy_to(tpu, tree.archive, target=TREE_ARCHIVE))
    output = executor.require(commands.run_remote(tpu, commands.worker_unpack(workdir)))
    if not executor.dry_run:
        _print_worker_lines(output)
        print(f"shipped {tree.commit}")
    return tree.commit


def set_up(tpu: Tpu, executor: Executor, *, workdir: str) -> bool:
    """Make the environment on every worker and compare what they have; whether all agree.

    `run_commands.sh setup --tpu` does nothing where requirements.txt is unchanged.

    Raises:
      UserError: the installation fails on a worker.
    """
    copy_worker_script(tpu, executor)
    install = f"cd {workdir} && bash run_commands.sh setup --tpu"
    executor.watch(commands.run_remote(tpu, install))
    facts = f"python3 {commands.WORKER_SCRIPT} facts --workdir={workdir} --python={VENV}/bin/python"
    output = executor.require(commands.run_remote(tpu, facts))
    if executor.dry_run:
        return True
    found = {worker: json.loads(text) for worker, text in _FACTS.findall(output)}
    if not found:
        raise UserError(f"no worker told its versions; they said: {output.strip()[-200:]!r}")
    print(describe_workers(found))
    problems = find_problems(found, read_pins(ROOT / "requirements.txt"))
    for problem in problems:
        print(f"problem: {problem}")
    if not problems:
        print(f"all {len(found)} workers have the versions of requirements.txt")
    return not problems


def describe_workers(columns: Mapping[str, Mapping[str, str]]) -> str:
    """A row for each fact, a column for each worker; what differs from the most is starred."""
    workers = sorted(columns, key=lambda worker: (len(worker), worker))
    names = dict.fromkeys(name for worker in workers for name in columns[worker])
    rows = {name: [columns[worker].get(name, "-") for worker in workers] for name in names}
    return draw_table(workers, rows, {name: find_odd(cells) for name, cells in rows.items()})


def find_problems(columns: Mapping[str, Mapping[str, str]], pins: Mapping[str, str]) -> list[str]:
    """Versions that differ from requirements.txt, and workers without libtpu."""
    problems = []
    for worker in sorted(columns):
        facts = columns[worker]
        for name in _CHECKED:
            have = facts.get(name, "none").partition("+")[0]
            if have != pins.get(name, have):
                problems.append(f"worker {worker} has {name} {have}, not {pins[name]}")
        if facts.get("libtpu", "none") == "none":
            problems.append(f"worker {worker} has no libtpu; `run_commands.sh setup --tpu` adds it")
    pythons = Counter(facts.get("python", "?") for facts in columns.values())
    if len(pythons) > 1:
        problems.append(f"workers have different Pythons: {', '.join(sorted(pythons))}")
    return problems


def read_pins(path: Path) -> dict[str, str]:
    """Name -> version of a requirements file."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {re.sub(r"\[.*\]", "", name): version for name, version in pairs}


def _print_worker_lines(output: str) -> None:
    for line in output.splitlines():
        if line.startswith("[w"):
            print(line)
