"""Ships the tree to every worker, sets up its environment, and checks that all have the same."""

from __future__ import annotations

import json
import re
import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from train import commands
from train.commands import DEFAULT_STACK, STACKS, TREE_ARCHIVE, Stack, Tpu
from train.execute import ROOT, Executor
from train.fanout import copy_worker_script
from train.table import draw_table, find_odd
from train.worker import MARK
from utils.errors import UserError

ARCHIVE = ".sync/tree.tar.gz"
_SHOWN = 3
_FACTS = re.compile(rf"^\[w(\d+|\?)\] {re.escape(MARK)} facts (.*)$", re.MULTILINE)
_CHECKED = ("torch", "torchvision", "torch_xla", "torch_tpu", "timm", "tensorflow-cpu", "numpy")


def sync(tpu: Tpu, executor: Executor, *, workdir: str, dirty: bool) -> str:
    """Ship the tree, return its commit; a UserError if a worker cannot be reached."""
    commit = pack_tree(executor, dirty=dirty)
    copy_worker_script(tpu, executor)
    executor.require(commands.copy_to(tpu, ARCHIVE, target=TREE_ARCHIVE))
    output = executor.require(commands.run_remote(tpu, commands.worker_unpack(workdir)))
    if not executor.dry_run:
        for line in output.splitlines():
            if line.startswith("[w"):
                print(line)
        print(f"shipped {commit}")
    return commit


def pack_tree(executor: Executor, *, dirty: bool) -> str:
    """Write `ARCHIVE` below the repository's root; return its commit.

    The commit ends with +dirty if the archive holds more than the commit.

    Raises:
      UserError: this is no git checkout.
    """
    commit = executor.require(commands.get_commit(), assume="HEAD").strip()
    changes = executor.require(commands.list_changes()).splitlines()
    if not executor.dry_run:
        (ROOT / ARCHIVE).parent.mkdir(exist_ok=True)
    if dirty:
        names = executor.require(commands.list_tree()).split("\0")
        if not executor.dry_run:
            _pack(names, ROOT / ARCHIVE)
        return f"{commit}+dirty" if changes else commit
    executor.require(commands.archive_commit(ARCHIVE))
    if changes:
        shown = ", ".join(line[3:] for line in changes[:_SHOWN])
        more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        print(f"not shipped, as not committed: {shown}{more}; --dirty ships them")
    return commit


def set_up(tpu: Tpu, executor: Executor, *, workdir: str, stack: str = DEFAULT_STACK) -> bool:
    """Create the environment on every worker and compare the versions; return whether all agree.

    `run_commands.sh setup` does nothing if its requirements are unchanged.

    Raises:
      UserError: the installation fails on a worker.
    """
    copy_worker_script(tpu, executor)
    chosen = STACKS[stack]
    install = f"cd {workdir} && bash run_commands.sh setup {chosen.setup}"
    executor.watch(commands.run_remote(tpu, install))
    python = f"{chosen.venv}/bin/python"
    facts = f"python3 {commands.WORKER_SCRIPT} facts --workdir={workdir} --python={python}"
    output = executor.require(commands.run_remote(tpu, facts))
    if executor.dry_run:
        return True
    versions = {worker: json.loads(text) for worker, text in _FACTS.findall(output)}
    if not versions:
        raise UserError(f"no worker reported its versions; output: {output.strip()[-200:]!r}")
    print(describe_workers(versions))
    problems = find_problems(versions, read_stack_pins(chosen))
    for problem in problems:
        print(f"problem: {problem}")
    if not problems:
        print(f"all {len(versions)} workers have the versions of {chosen.requirements[-1]}")
    return not problems


def describe_workers(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Format a row for each fact and a column for each worker; outliers are starred."""
    workers = sorted(columns, key=lambda worker: (len(worker), worker))
    names = dict.fromkeys(name for worker in workers for name in columns[worker])
    rows = {name: [columns[worker].get(name, "-") for worker in workers] for name in names}
    return draw_table(workers, rows, {name: find_odd(cells) for name, cells in rows.items()})


def find_problems(columns: Mapping[str, Mapping[str, str]], pins: Mapping[str, str]) -> list[str]:
    """List versions that differ from the pinned ones, and workers without libtpu."""
    problems = []
    for worker in sorted(columns):
        facts = columns[worker]
        for name in _CHECKED:
            have = facts.get(name, "none").partition("+")[0]
            if have != pins.get(name, have):
                problems.append(f"worker {worker} has {name} {have}, not {pins[name]}")
        if facts.get("libtpu", "none") == "none":
            problems.append(f"worker {worker} has no libtpu; `run_commands.sh setup` adds it")
    pythons = Counter(facts.get("python", "?") for facts in columns.values())
    if len(pythons) > 1:
        problems.append(f"workers have different Pythons: {', '.join(sorted(pythons))}")
    return problems


def read_stack_pins(stack: Stack) -> dict[str, str]:
    """Read the versions of a stack; `none` for what another stack alone has."""
    pins = {"torch_xla": "none", "torch_tpu": "none"}
    for name in stack.requirements:
        pins |= read_pins(ROOT / name)
    if pins["torch_tpu"] != "none":
        pins["torch_xla"] = "none"
    return pins


def read_pins(path: Path) -> dict[str, str]:
    """Read name -> version from a requirements file."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    pins = (re.match(r"([\w.-]+)(?:\[.*\])?={2,3}(\S+)", line) for line in lines)
    return {pin[1]: pin[2] for pin in pins if pin}


def _pack(names: list[str], path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name in filter(None, names):
            # git also lists files that were deleted but are still committed.
            if (ROOT / name).is_symlink() or (ROOT / name).is_file():
                archive.add(ROOT / name, arcname=name)
    if path.stat().st_size > 1 << 30:
        raise UserError(f"the tree packs to {path.stat().st_size >> 20} MiB; ignore large files")
