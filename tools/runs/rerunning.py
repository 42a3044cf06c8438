"""`rerun`: the same run again, from its commit, its patch and its configuration, and the proof."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from store.compare.report import tell_divergence
from store.compare.sides import Side
from store.query.config_text import parse_config
from store.query.record import RunRecord
from store.record.ids import CONFIG_FILE
from store.record.source import SOURCE_ROOT, split_diff
from store.terminal import create_console, print_json
from tools.runs.comparing import print_divergence
from tools.runs.places import choose_records
from utils.errors import EXIT_FAILED, UserError
from utils.json_types import JsonObject
from utils.storage.places import check_writable, join_path_or_url, open_folder


@dataclass(frozen=True)
class Repetition:
    """What is needed to make a run again.

    Attributes:
      commit, patch: of its source.
      config: with another name and place.
      place: where the new run will lie.
      changed: what is not as it was: Python and packages, in words.
      variables: of its environment.
    """

    commit: str
    patch: str
    config: JsonObject
    place: str
    changed: tuple[str, ...]
    variables: dict[str, str]


def rerun(options: argparse.Namespace) -> int:
    """Make a run again and hold both against each other; gives the exit code, 1 where they part.

    Raises:
      UserError: the run does not tell its source, or this repository does not have it.
    """
    records = choose_records(options, "rerun", [options.run] if options.run else [])
    if len(records) != 1:
        raise UserError(
            f"--filter {options.filter!r} fits {len(records)} runs; rerun makes one run again"
        )
    record = records[0]
    plan = plan_repetition(record, options.out)
    if options.dry_run and options.json:
        files = sorted(split_diff(plan.patch))
        print_json({"run": record.path, "rerun": plan.place, "commit": plan.commit,
                    "files": files, "changed": list(plan.changed)})  # fmt: skip
    elif not options.json:
        _print_plan(record, plan)
    if options.dry_run:
        return 0
    with _make_tree(plan) as tree:
        _train(plan, tree)
    sides = [Side(one.path, (one,)) for one in (record, RunRecord(plan.place))]
    told = tell_divergence(sides, with_tensors=True)
    if options.json:
        print_json({"run": record.path, "rerun": plan.place, "divergence": told})
    else:
        create_console().print(f"\n{record.path} and {plan.place}", markup=False)
        print_divergence(create_console(), told)
    return 0 if told["found"] is None else EXIT_FAILED


def plan_repetition(record: RunRecord, out: str) -> Repetition:
    """All that a repetition needs; makes and changes nothing.

    Args:
      out: `run.output_dir` of the new run; empty: that of the old one.

    Raises:
      UserError: something of it is missing, or the new run's place takes nothing.
    """
    if not record.is_complete:
        raise UserError(
            f"RUN {record.path} is not complete, so nothing could be held against its repetition; "
            "go on with it first (--resume auto)"
        )
    commit = _check_source(record)
    config = parse_config(record.folder.read_texts([CONFIG_FILE]).get(CONFIG_FILE, ""))
    section = config.get("run")
    if not isinstance(section, dict):
        raise UserError(f"RUN {record.path} has no whole {CONFIG_FILE}; take it from a copy")
    key, out = ("--out", out) if out else ("--store", str(record.folder.parent.parent))
    check_writable(out, key)
    name = _choose_name(record.folder.name, out, record.folder.parent.name)
    section |= {"output_dir": out, "experiment": record.folder.parent.name, "run_id": name}
    section |= {"resume": "", "overwrite": False, "allow_changes": []}
    place = str(join_path_or_url(out, section["experiment"], name))
    return Repetition(
        commit, record.patch, config, place, tuple(_find_changes(record.environment)),
        record.environment.get("variables", {}),
    )  # fmt: skip


def _check_source(record: RunRecord) -> str:
    """The commit of a run whose source can be had here."""
    source = record.environment.get("source")
    if not isinstance(source, dict):
        raise UserError(
            f"RUN {record.path} does not tell its source: it has no environment.json; only runs "
            "of newer programs can be made again"
        )
    commit, kept = str(source.get("commit", "")), source.get("diff")
    if not commit or kept not in ("none", "whole"):
        raise UserError(
            f"RUN {record.path} cannot be made again: its source is not whole "
            f"({source.get('reason') or kept}); commit what a run needs before it starts"
        )
    digest = hashlib.sha256(record.patch.encode()).hexdigest() if record.patch else ""
    if digest != source.get("sha256", ""):
        raise UserError(
            f"RUN {record.path}: its source.diff.zst is missing, damaged or of another attempt; "
            "take it from a copy of the run"
        )
    sources = {one["source"] for one in record.attempts if one.get("source")}
    if len(sources) > 1:
        raise UserError(
            f"RUN {record.path}: its {len(record.attempts)} attempts were started from "
            f"{len(sources)} sources, so no single one makes it again; name another run"
        )
    if _ask_git("rev-parse", "--git-dir").returncode:
        raise UserError(f"{SOURCE_ROOT} is no git repository; call rerun from a clone of it")
    if _ask_git("cat-file", "-e", f"{commit}^{{commit}}").returncode:
        raise UserError(
            f"RUN {record.path}: its commit {commit[:12]} is not in this repository; fetch the "
            "branch that holds it"
        )
    return commit


def _choose_name(name: str, out: str, experiment: str) -> str:
    taken = set(open_folder(join_path_or_url(out, experiment)).list_names())
    found, count = f"{name}-rerun", 1
    while found in taken:
        count += 1
        found = f"{name}-rerun-{count}"
    return found


def _find_changes(environment: JsonObject) -> Iterator[str]:
    """Versions that are not what they were."""
    python = environment.get("python")
    if python != platform.python_version():
        yield f"Python {python}, now {platform.python_version()}"
    for package, then in environment.get("packages", {}).items():
        now = "not there"
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            now = importlib.metadata.version(package)
        if now != then:
            yield f"{package} {then}, now {now}"


def _print_plan(record: RunRecord, plan: Repetition) -> None:
    files = split_diff(plan.patch)
    beside = f" and changes in {', '.join(files)}" if files else ", nothing beside it"
    print(f"source: commit {plan.commit[:12]}{beside}")
    for line in plan.changed:
        print(f"changed since: {line}")
    if not plan.changed:
        print("Python and all pinned packages are as they were")
    print(f"{record.path} is made again as {plan.place}", flush=True)


@contextlib.contextmanager
def _make_tree(plan: Repetition) -> Iterator[Path]:
    """The source as it was, in a directory that goes away; the repository stays as it is."""
    with tempfile.TemporaryDirectory(prefix="rerun-") as scratch:
        tree = Path(scratch) / "tree"
        _require("clone", "--quiet", "--shared", "--no-checkout", str(SOURCE_ROOT), str(tree))
        _require("-C", str(tree), "checkout", "--quiet", "--detach", plan.commit)
        if plan.patch:
            _require("-C", str(tree), "apply", "--whitespace=nowarn", "-", text=plan.patch)
        yield tree


def _train(plan: Repetition, tree: Path) -> None:
    """Run the old source with the same configuration, from the directory of this program.

    Raises:
      UserError: it did not come to its end.
    """
    file = tree.parent / "rerun.yaml"
    file.write_text(yaml.safe_dump(plan.config, sort_keys=False, allow_unicode=True))
    command = [sys.executable, str(tree / "main.py"), "--config", str(file)]
    environment = {**os.environ, **plan.variables}
    # A trainer speaks on stderr; stdout is for the answer.
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise UserError(
            f"the repetition ended with code {done.returncode}; its lines above and {plan.place} "
            "say why"
        )


def _ask_git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = ["git", "-C", str(SOURCE_ROOT), *arguments]
    return subprocess.run(command, capture_output=True, check=False)


def _require(*arguments: str, text: str = "") -> None:
    command = ["git", *arguments]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise UserError(f"git {arguments[0]} could not make the source anew: {said}")
