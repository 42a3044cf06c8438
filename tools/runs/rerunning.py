"""`rerun`: repeat a run from its commit, patch and configuration, and compare the two."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import itertools
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from store.compare.report import view_divergence
from store.compare.sides import Side
from store.query.config_text import parse_config
from store.query.record import RunRecord
from store.record.ids import CONFIG_FILE
from store.record.source import split_diff
from store.terminal import create_console, print_json
from tools.runs.comparing import print_divergence
from tools.runs.find_runs import choose_records
from utils.errors import EXIT_FAILED, UserError
from utils.json_types import JsonObject
from utils.storage.installation import ROOT, is_installed
from utils.storage.places import check_writable, join_path_or_url, open_folder


def rerun(options: argparse.Namespace) -> int:
    """Repeat a run and compare the two; return the exit code, 1 if they diverge."""
    records = choose_records(options, "rerun", [options.run] if options.run else [])
    if len(records) != 1:
        raise UserError(
            f"--filter {options.filter!r} fits {len(records)} runs; rerun repeats exactly one"
        )
    record = records[0]
    commit, config, location = plan_repetition(record, options.out)
    changed = list(_find_changes(record.environment))
    files = split_diff(record.patch)
    view: JsonObject = {"run": record.path, "rerun": location}
    if options.dry_run and options.json:
        print_json({**view, "commit": commit, "files": sorted(files), "changed": changed})
    elif not options.json:
        changes = f" and changes in {', '.join(files)}" if files else ", without changes"
        print(f"source: commit {commit[:12]}{changes}")
        for line in changed:
            print(f"changed since: {line}")
        if not changed:
            print("Python and all pinned packages are as they were")
        print(f"{record.path} is repeated as {location}", flush=True)
    if options.dry_run:
        return 0
    _train(record, commit, config, location)
    sides = [Side(run.path, (run,)) for run in (record, RunRecord(location))]
    divergence = view_divergence(sides, with_tensors=True)
    if options.json:
        print_json({**view, "divergence": divergence})
    else:
        create_console().print(f"\n{record.path} and {location}", markup=False)
        print_divergence(create_console(), divergence)
    return 0 if divergence["found"] is None else EXIT_FAILED


def plan_repetition(record: RunRecord, out: str) -> tuple[str, JsonObject, str]:
    """Plan a repetition; creates and changes nothing.

    Returns the commit of the source, the new run's configuration, and its directory or URL, below
    `out` or the old `run.output_dir`. A UserError if a part of the source is missing, or the new
    directory cannot be written.
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
    experiment, name = record.folder.parent.name, f"{record.folder.name}-rerun"
    taken = set(open_folder(join_path_or_url(out, experiment)).list_names())
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    name = next(name for name in names if name not in taken)
    section |= {"output_dir": out, "experiment": experiment, "run_id": name}
    section |= {"resume": "", "overwrite": False, "allow_changes": []}
    return commit, config, str(join_path_or_url(out, experiment, name))


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
    if is_installed() or _git("-C", str(ROOT), "rev-parse", "--git-dir").returncode:
        raise UserError(f"{ROOT} is no git repository; call rerun from a clone of it")
    if _git("-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}").returncode:
        raise UserError(
            f"RUN {record.path}: its commit {commit[:12]} is not in this repository; fetch the "
            "branch that holds it"
        )
    return commit


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


def _train(record: RunRecord, commit: str, config: JsonObject, location: str) -> None:
    """Run the old source, in a temporary directory, with a configuration; UserError if it fails."""
    with tempfile.TemporaryDirectory(prefix="rerun-") as scratch:
        tree, file = Path(scratch) / "tree", Path(scratch) / "rerun.yaml"
        _require("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(tree))
        _require("-C", str(tree), "checkout", "--quiet", "--detach", commit)
        if record.patch:
            _require("-C", str(tree), "apply", "--whitespace=nowarn", "-", text=record.patch)
        file.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        command = [sys.executable, str(tree / "main.py"), "--config", str(file)]
        environment = {**os.environ, **record.environment.get("variables", {})}
        # A trainer logs to stderr; stdout is for the result of this program.
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise UserError(
            f"the repetition ended with code {done.returncode}; see its lines above and {location}"
        )


def _require(*arguments: str, text: str = "") -> None:
    done = _git(*arguments, text=text)
    if done.returncode:
        output = " ".join(done.stderr.decode(errors="replace").split())
        raise UserError(f"git {arguments[0]} could not restore the source: {output}")


def _git(*arguments: str, text: str = "") -> subprocess.CompletedProcess[bytes]:
    command = ["git", *arguments]
    return subprocess.run(command, input=text.encode(), capture_output=True, check=False)
