"""What must agree before a version is released; each check lists what is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import yaml

from proofs import house, keys, words
from proofs.release.fixture import STORE, check_fixture
from proofs.release.history import CHANGELOG, History, list_versions
from store.query.schemas import MODELS, format_schema
from utils.errors import UserError

VERSION_FILE, CITATION = "VERSION", "CITATION.cff"
# `run_commands.sh test` writes here the tree of the commit on which the whole suite has passed.
SUITE_RECORD = Path(sys.prefix) / ".suite-tree"
Check = Callable[[History, str], list[str]]


def find_faults(history: History, version: str) -> dict[str, list[str]]:
    """Run every check for releasing a version; return what each has found."""
    return {name: check(history, version) for name, check in CHECKS.items()}


def read_version(root: Path) -> str:
    """Read the version of a checkout."""
    path = root / VERSION_FILE
    if not path.is_file():
        raise UserError(f"{str(path)!r} does not exist; write a version such as 0.1.0 into it")
    return path.read_text(encoding="utf-8").strip()


def check_tree(history: History, version: str) -> list[str]:
    """Find files that are not committed."""
    del version
    return [f"{path} is not committed" for path in history.list_changes()]


def check_suite(history: History, version: str) -> list[str]:
    """Find out whether the whole suite has passed on this very tree."""
    del version
    tree = history.run_git("rev-parse", "HEAD^{tree}").strip()
    passed = SUITE_RECORD.read_text(encoding="utf-8").strip() if SUITE_RECORD.is_file() else "none"
    if passed == tree:
        return []
    return [f"the suite has passed on tree {passed[:12]}, not {tree[:12]}: run_commands.sh test"]


def check_versions(history: History, version: str) -> list[str]:
    """Find files that name another version than VERSION."""
    del version
    current = read_version(history.root)
    text = (history.root / CITATION).read_text(encoding="utf-8")
    citation = yaml.safe_load(text)
    faults = []
    if citation.get("version") != current:
        faults.append(f"{CITATION} has version {citation.get('version')}, VERSION has {current}")
    changelog = history.root / CHANGELOG
    known = list_versions(changelog.read_text(encoding="utf-8")) if changelog.is_file() else []
    if known[:1] != [current]:
        newest = known[0] if known else "no version"
        faults.append(f"{CHANGELOG} begins with {newest}, VERSION has {current}")
    return faults


def check_subjects(history: History, version: str) -> list[str]:
    """Find a commit since the last release whose subject has no type or scope."""
    before = [release for release in history.list_releases() if release.version != version]
    try:
        history.read_commits(before[-1] if before else None)
    except UserError as error:
        return [str(error)]
    return []


def check_fixtures(history: History, version: str) -> list[str]:
    """Find released versions, and the one to release, without files of theirs in the tests."""
    versions = {release.version for release in history.list_releases()} | {version}
    faults = [check_fixture(history.root / STORE / name) for name in sorted(versions)]
    return [fault for fault in faults if fault]


def check_pages(history: History, version: str) -> list[str]:
    """Find generated pages that differ from what they are generated from."""
    del version
    pages = {keys.PAGE: keys.format_page(), keys.ERROR_PAGE: keys.format_error_page()}
    return [
        f"{path.relative_to(keys.DOCS.parent)} is old: python -m proofs.keys --write"
        for path, text in pages.items()
        if (history.root / path.relative_to(keys.DOCS.parent)).read_text(encoding="utf-8") != text
    ]


def check_schemas(history: History, version: str) -> list[str]:
    """Find published schemas that differ from the models."""
    del version
    folder = history.root / "schemas"
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return [
        f"schemas/{name}.json is old: python -m tools.runs schemas --out schemas"
        for name in sorted({*texts, *MODELS})
        if name not in MODELS or texts.get(name) != format_schema(name)
    ]


def check_form(history: History, version: str) -> list[str]:
    """Find what ruff, the words and the structure of the source refuse."""
    del version
    faults = []
    for command in (("check", "--quiet"), ("format", "--check", "--quiet")):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."], cwd=history.root, capture_output=True
        )
        if done.returncode:
            faults.append(f"ruff {command[0]} finds faults: run_commands.sh lint")
    counts = Counter(finding.kind for finding in words.find_in_checkout(history.root))
    faults += [
        f"{kind}: {counts[kind]} > {n}" for kind, n in words.BOUNDS.items() if counts[kind] > n
    ]
    return faults + house.find_exceeded(house.read_house(history.root).measure())


CHECKS: dict[str, Check] = {
    "a clean tree": check_tree,
    "the suite": check_suite,
    "versions": check_versions,
    "subjects of commits": check_subjects,
    "fixtures": check_fixtures,
    "generated pages": check_pages,
    "schemas": check_schemas,
    "form and structure": check_form,
}
