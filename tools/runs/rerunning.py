"""`rerun`: repeat a run from its commit, patch and configuration, and compare the two."""

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
from tools.runs.find_runs import choose_records
from utils.errors import EXIT_FAILED, UserError
from utils.json_types import JsonObject
from utils.storage.places import check_writable, join_path_or_url, open_folder


@dataclass(frozen=True)
class Repetition:
    """Plan of a rerun.

    Attributes:
      commit, patch: of its source.
      config: with the name and directory of the new run.
      location: directory or URL of the new run.
      changed: versions of Python and packages that differ, in words.
      variables: of its environment.
    """

    commit: str
    patch: str
    config: JsonObject
    location: str
    changed: list[str]
    variables: dict[str, str]


def rerun(options: argparse.Namespace) -> int:
    """Repeat a run and compare the two; return the exit code, 1 if they diverge.

    Raises:
      UserError: the run has no source, or this repository does not contain it.
    """
    records = choose_records(options, "rerun", [options.run] if options.run else [])
    if len(records) != 1:
        raise UserError(
            f"--filter {options.filter!r} fits {len(records)} runs; rerun repeats exactly one"
        )
    record = records[0]
    plan = plan_repetition(record, options.out)
    view: JsonObject = {"run": record.path, "rerun": plan.location}
    if options.dry_run and options.json:
        files = sorted(split_diff(plan.patch))
        print_json({**view, "commit": plan.commit, "files": files, "changed": plan.changed})
    elif not options.json:
        _print_plan(record, plan)
    if options.dry_run:
        return 0
    _train(plan)
    sides = [Side(run.path, (run,)) for run in (record, RunRecord(plan.location))]
    divergence = tell_divergence(sides, with_tensors=True)
    if options.json:
        print_json({**view, "divergence": divergence})
    else:
        create_console().print(f"\n{record.path} and {plan.location}", markup=False)
        print_divergence(create_console(), divergence)
    return 0 if divergence["found"] is None else EXIT_FAILED


def plan_repetition(record: RunRecord, out: str) -> Repetition:
    """Plan a repetition; creates and changes nothing.

    Args:
      out: `run.output_dir` of the new run; empty: that of the old one.

    Raises:
      UserError: a part of the source is missing, or the new directory cannot be written.
    """
    if not record.is_complete:
        raise UserError(
            f"RUN {record.path} is not complete, so a repetition could not be compared with it; "
            "finish it first (--resume auto)"
        )
    commit = _check_source(record)
    config = parse_config(record.folder.read_texts([CONFIG_FILE]).get(CONFIG_FILE, ""))
    section = config.get("run")
    if not isinstance(section, dict):
        raise UserError(f"RUN {record.path} has no whole {CONFIG_FILE}; take it from a copy")
    key, out = ("--out", out) if out else ("--store", str(record.folder.parent.parent))
    check_writable(out, key)
    experiment = record.folder.parent.name
    name = _choose_name(record.folder.name, out, experiment)
    section |= {"output_dir": out, "experiment": experiment, "run_id": name}
    section |= {"resume": "", "overwrite": False, "allow_changes": []}
    location = str(join_path_or_url(out, experiment, name))
    changed, variables = _find_changes(record.environment), record.environment.get("variables", {})
    return Repetition(commit, record.patch, config, location, list(changed), variables)


def _check_source(record: RunRecord) -> str:
    """Return the commit of a run whose source is complete and in this repository."""
    source = record.environment.get("source")
    if not isinstance(source, dict):
        raise UserError(
            f"RUN {record.path} has no environment.json with its source; only runs of newer "
            "programs can be repeated"
        )
    commit, kept = str(source.get("commit", "")), source.get("diff")
    if not commit or kept not in ("none", "whole"):
        raise UserError(
            f"RUN {record.path} cannot be repeated: its source is not whole "
            f"({source.get('reason') or kept}); commit all changes before a run starts"
        )
    digest = hashlib.sha256(record.patch.encode()).hexdigest() if record.patch else ""
    if digest != source.get("sha256", ""):
        raise UserError(
            f"RUN {record.path}: its source.diff.zst is missing, damaged or of another attempt; "
            "take it from a copy of the run"
        )
    sources = {attempt["source"] for attempt in record.attempts if attempt.get("source")}
    if len(sources) > 1:
        raise UserError(
            f"RUN {record.path}: its {len(record.attempts)} attempts were started from "
            f"{len(sources)} sources, so no single one repeats it; use another run"
        )
    if _git("-C", str(SOURCE_ROOT), "rev-parse", "--git-dir").returncode:
        raise UserError(f"{SOURCE_ROOT} is no git repository; call rerun from a clone of it")
    if _git("-C", str(SOURCE_ROOT), "cat-file", "-e", f"{commit}^{{commit}}").returncode:
        raise UserError(
            f"RUN {record.path}: its commit {commit[:12]} is not in this repository; fetch the "
            "branch that holds it"
        )
    return commit


def _choose_name(name: str, out: str, experiment: str) -> str:
    taken = set(open_folder(join_path_or_url(out, experiment)).list_names())
    new, count = f"{name}-rerun", 1
    while new in taken:
        count += 1
        new = f"{name}-rerun-{count}"
    return new


def _find_changes(environment: JsonObject) -> Iterator[str]:
    """Yield the versions of Python and packages that differ."""
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
    changes = f" and changes in {', '.join(files)}" if files else ", without changes"
    print(f"source: commit {plan.commit[:12]}{changes}")
    for line in plan.changed:
        print(f"changed since: {line}")
    if not plan.changed:
        print("Python and all pinned packages are as they were")
    print(f"{record.path} is repeated as {plan.location}", flush=True)


def _train(plan: Repetition) -> None:
    """Run the old source, in a temporary directory, with the same configuration.

    Raises:
      UserError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="rerun-") as scratch:
        tree, file = Path(scratch) / "tree", Path(scratch) / "rerun.yaml"
        _require("clone", "--quiet", "--shared", "--no-checkout", str(SOURCE_ROOT), str(tree))
        _require("-C", str(tree), "checkout", "--quiet", "--detach", plan.commit)
        if plan.patch:
            _require("-C", str(tree), "apply", "--whitespace=nowarn", "-", text=plan.patch)
        file.write_text(yaml.safe_dump(plan.config, sort_keys=False, allow_unicode=True))
        command = [sys.executable, str(tree / "main.py"), "--config", str(file)]
        environment = {**os.environ, **plan.variables}
        # A trainer logs to stderr; stdout is for the result of this program.
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise UserError(
            f"the repetition ended with code {done.returncode}; see its lines above and "
            f"{plan.location}"
        )


def _require(*arguments: str, text: str = "") -> None:
    done = _git(*arguments, text=text)
    if done.returncode:
        output = " ".join(done.stderr.decode(errors="replace").split())
        raise UserError(f"git {arguments[0]} could not restore the source: {output}")


def _git(*arguments: str, text: str = "") -> subprocess.CompletedProcess[bytes]:
    command = ["git", *arguments]
    return subprocess.run(command, input=text.encode(), capture_output=True, check=False)
