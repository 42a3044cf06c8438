"""Releases: what has changed, where a section goes, and what a bump refuses."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from proofs.release import checks
from proofs.release.__main__ import main
from proofs.release.changelog import THEMES, find_theme, format_first_section, insert_section
from proofs.release.changes import FORMATS, read_changes, read_formats
from proofs.release.fixture import STORE, check_fixture
from proofs.release.history import History, open_history
from store.quality.trends import keep_report
from tests.store.test_trends import REPORT
from tests.support.child_runs import ROOT
from utils.errors import UserError

KEYS = "| key | type | default | what |\n|---|---|---|---|\n"
CITATION = "cff-version: 1.2.0\nversion: 0.1.0\ndate-released: 2026-01-01\n"


class Repository:
    """A small checkout with a history of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(self.root), *who, *arguments]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)

    def commit(self, subject: str, **files: str) -> None:
        for name, text in files.items():
            path = self.root / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.write("count", str(len(self.git("log", "--all", "--format=%h"))) + subject)
        self.git("add", ".")
        self.git("commit", "--quiet", "-m", subject)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    @property
    def history(self) -> History:
        return open_history(self.root)


def write_facts(
    repository: Repository, *, keys: str, schema: dict, version: int, pins: str
) -> None:
    repository.write("docs/keys.md", KEYS + keys)
    repository.write("schemas/run.json", json.dumps(schema))
    repository.write("utils/checkpoint/files.py", f"_SCHEMA_VERSION = {version}\n")
    repository.write("requirements.txt", pins)
    repository.write("requirements-torch-tpu.txt", "# the other\ntorch===2.13.0\n")


@pytest.fixture
def released(tmp_path) -> Repository:
    """0.1.0 with its tag, then changes of each sort."""
    repository = Repository(tmp_path / "checkout")
    field = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    keys = "| `x.a` | int | `1` | |\n| `x.gone` | str |  | |\n"
    write_facts(repository, keys=keys, schema=field, version=1, pins="torch==2.9.0\nold==1\n")
    repository.write("VERSION", "0.1.0\n")
    repository.write("CITATION.cff", CITATION)
    repository.write(
        "CHANGELOG.md", "# Changelog\n\n## [0.1.0] - 2026-01-01\n\n### Added\n\n- all\n"
    )
    repository.commit("feat(store): write runs")
    repository.git("tag", "v0.1.0")
    field = {
        "properties": {"a": {"type": "number"}, "c": {}},
        "$defs": {"T": {"properties": {"d": {}}}},
    }
    keys = "| `x.a` | int | `2` | |\n| `x.new` | float | `0.5` | |\n"
    write_facts(repository, keys=keys, schema=field, version=2, pins="torch==2.10.0\nnew==3\n")
    repository.commit("feat(store,data): read shards")
    repository.commit("fix: keep the last step")
    repository.commit("docs(store): say what a shard is")
    return repository


def run(repository: Repository, *words: str) -> int:
    return main(["--root", str(repository.root), *words])


def test_subjects_are_read_with_types_and_scopes(released):
    (release,) = released.history.list_releases()
    commits = released.history.read_commits(release)
    assert [(c.kind, c.scopes, c.text) for c in commits] == [
        ("docs", ("store",), "say what a shard is"),
        ("fix", (), "keep the last step"),
        ("feat", ("store", "data"), "read shards"),
    ]


@pytest.mark.parametrize(
    "subject", ["feature: x", "feat(Store): x", "feat(a b): x", "more", "feat:x"]
)
def test_a_subject_without_type_or_scope_is_refused(released, subject, capsys):
    released.commit(subject)
    assert run(released, "notes") == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and repr(subject) in said.err


def test_a_clone_without_tags_finds_the_same_release(released):
    (tagged,) = released.history.list_releases()
    assert tagged.revision == "v0.1.0"
    commit = released.git("rev-parse", "v0.1.0").strip()
    released.git("tag", "--delete", "v0.1.0")
    (found,) = released.history.list_releases()
    assert (found.version, found.revision) == ("0.1.0", commit)


def test_releases_are_ordered_by_number_and_other_tags_are_none(released):
    released.git("tag", "v0.10.0")
    released.git("tag", "v0.9.0")
    released.git("tag", "vision")
    assert [r.version for r in released.history.list_releases()] == ["0.1.0", "0.9.0", "0.10.0"]


def test_each_sort_of_change_is_found(released):
    changes = read_changes(released.history, "v0.1.0")

    def show(rows):
        return {row.name: (row.before, row.after) for row in rows}

    assert show(changes.keys) == {
        "x.a": ("int, default `1`", "int, default `2`"),
        "x.gone": ("str, default empty", None),
        "x.new": (None, "float, default `0.5`"),
    }
    assert show(changes.fields) == {
        "run.json: T: d": (None, "{}"),
        "run.json: a": ('{"type": "string"}', '{"type": "number"}'),
        "run.json: b": ('{"type": "string"}', None),
        "run.json: c": (None, "{}"),
    }
    assert show(changes.formats) == {"checkpoint": ("1", "2")}
    assert show(changes.pins) == {
        "torch": ("2.9.0", "2.10.0"),
        "old": ("1", None),
        "new": (None, "3"),
    }


def test_notes_name_commits_keys_fields_formats_and_pins(released, capsys):
    assert run(released, "notes") == 0
    sections = capsys.readouterr().out.split("\n### ")
    assert sections[0] == "## [Unreleased]\n\n3 commits: 1 feature, 1 fix, 1 on documents.\n"
    parts = {part.partition("\n")[0]: part for part in sections[1:]}
    assert list(parts) == ["Added", "Changed", "Removed", "Fixed"]
    assert "- **store, data**: read shards" in parts["Added"] and "`x.new`" in parts["Added"]
    assert "Key `x.a`: int, default `1` to int, default `2`." in parts["Changed"]
    assert "Format `checkpoint`: 1 to 2." in parts["Changed"]
    assert "Pin `torch`: 2.9.0 to 2.10.0." in parts["Changed"]
    assert "Pin `old`: 1 to gone." in parts["Changed"]
    assert "`x.gone`" in parts["Removed"] and "`run.json: b`" in parts["Removed"]
    assert "- keep the last step" in parts["Fixed"]


def test_benchmarks_of_a_store_are_named_with_their_verdict(released, tmp_path, capsys):
    store = tmp_path / "runs"
    for day in range(10, 30):
        report = copy.deepcopy(REPORT)
        report["created"] = f"2040-01-{day}T10:00:00Z"
        report["results"][0]["img_per_s"] = 100.0 + day % 3 - 50.0 * (day > 26)
        keep_report(store, report)
    assert run(released, "notes", "--store", str(store)) == 0
    assert "`1 x img_per_s`: much worse (+" in capsys.readouterr().out
    assert run(released, "notes", "--store", str(tmp_path / "none")) == 0
    assert "img_per_s" not in capsys.readouterr().out


def test_a_first_release_is_described_by_themes_whose_counts_are_all_commits(tmp_path):
    repository = Repository(tmp_path / "checkout")
    for subject in (
        "feat(losses): a",
        "fix(losses): b",
        "feat(store): c",
        "test: d",
        "perf(other): e",
    ):
        repository.commit(subject)
    commits = repository.history.read_commits(None)
    assert Counter(map(find_theme, commits)) == {
        "Distillation": 2,
        "Runs and their numbers": 1,
        "Everything else": 2,
    }
    text = format_first_section("0.1.0", "2026-02-03", commits, [])
    assert text.startswith("## [0.1.0] - 2026-02-03\n\n5 commits: 2 features, 1 fix, 1 speed-up, ")
    assert "- **Distillation** (1 feature, 1 fix):" in text
    assert "- **Everything else**: 1 speed-up, 1 on tests." in text
    assert max(map(len, text.splitlines())) <= 130


def test_no_scope_belongs_to_two_themes():
    counts = Counter(scope for theme in THEMES for scope in theme.scopes)
    assert {scope: n for scope, n in counts.items() if n > 1} == {}


def test_each_format_is_found_in_this_checkout():
    read = {}
    for name, (path, constant) in FORMATS.items():
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        read[name] = [line for line in lines if line.startswith(f"{constant} = ")]
    assert all(len(lines) == 1 for lines in read.values()), read


def test_formats_that_a_revision_lacks_are_left_out(released):
    assert read_formats(released.history, "v0.1.0") == {"checkpoint": "1"}


def test_a_section_goes_on_top_or_replaces_the_newest():
    first = insert_section("", "0.1.0", "## [0.1.0] - a\n\n- x\n")
    assert first.startswith("# Changelog\n") and first.endswith("\n\n## [0.1.0] - a\n\n- x\n")
    second = insert_section(first, "0.2.0", "## [0.2.0] - b\n\n- y\n")
    assert second.index("## [0.2.0]") < second.index("## [0.1.0]")
    assert insert_section(second, "0.2.0", "## [0.2.0] - b\n\n- y\n") == second
    third = insert_section(second, "0.2.0", "## [0.2.0] - c\n\n- z\n")
    assert third == second.replace("- b\n\n- y", "- c\n\n- z")
    with pytest.raises(UserError, match="not the newest"):
        insert_section(second, "0.1.0", "## [0.1.0] - d\n")


def test_notes_of_a_version_are_written_until_it_has_a_tag(released):
    before = (released.root / "CHANGELOG.md").read_text()
    assert run(released, "notes", "--write") == 2
    assert (released.root / "CHANGELOG.md").read_text() == before
    released.git("tag", "--delete", "v0.1.0")
    assert run(released, "notes", "--write") == 0
    text = (released.root / "CHANGELOG.md").read_text()
    assert text.count("## [0.1.0]") == 1 and "4 commits: 2 features" in text


@pytest.fixture
def fit(released, tmp_path, monkeypatch) -> Repository:
    """A checkout that is fit for 0.2.0: fixture, pages, schemas, and a suite that passed."""
    for name in ("docs/keys.md", "docs/errors.md"):
        shutil.copy(ROOT / name, released.root / name)
    shutil.rmtree(released.root / "schemas")
    shutil.copytree(ROOT / "schemas", released.root / "schemas")
    for version in ("0.1.0", "0.2.0"):
        shutil.copytree(ROOT / STORE / "0.1.0", released.root / STORE / version)
    released.commit("test(release): keep files of 0.2.0")
    monkeypatch.setattr(checks, "SUITE_RECORD", tmp_path / "suite")
    note_suite(released)
    return released


def note_suite(repository: Repository) -> None:
    checks.SUITE_RECORD.write_text(repository.git("rev-parse", "HEAD^{tree}"))


def test_a_fit_checkout_is_bumped_once(fit, capsys):
    assert run(fit, "bump", "0.2.0") == 0
    assert "git tag v0.2.0" in capsys.readouterr().out
    assert (fit.root / "VERSION").read_text() == "0.2.0\n"
    changelog = (fit.root / "CHANGELOG.md").read_text()
    assert changelog.index("## [0.2.0] - 20") < changelog.index("## [0.1.0]")
    assert "read shards" in changelog
    citation = (fit.root / "CITATION.cff").read_text()
    assert "version: 0.2.0\n" in citation and "cff-version: 1.2.0\n" in citation
    assert "2026-01-01" not in citation
    fit.commit("chore(release): release 0.2.0")
    note_suite(fit)
    assert run(fit, "check") == 0
    assert run(fit, "bump", "0.2.0") == 2


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.1.0", "must be higher than 0.1.0"),
        ("0.0.9", "must be higher"),
        ("1.0", "MAJOR.MINOR.PATCH"),
    ],
)
def test_a_version_that_is_not_higher_is_refused(fit, version, said, capsys):
    assert run(fit, "bump", version) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert (fit.root / "VERSION").read_text() == "0.1.0\n"


FAULTS = {
    "a clean tree": lambda r: r.write("new.txt", "x"),
    "the suite": lambda r: checks.SUITE_RECORD.unlink(),
    "versions": lambda r: r.write("CITATION.cff", CITATION.replace("0.1.0", "0.0.1")),
    "subjects of commits": lambda r: r.commit("fixed it"),
    "fixtures": lambda r: shutil.rmtree(r.root / STORE / "0.2.0"),
    "generated pages": lambda r: r.write("docs/keys.md", "x"),
    "schemas": lambda r: (r.root / "schemas" / "run.json").unlink(),
    "form and structure": lambda r: r.write("a.py", "import os\n"),
}


def test_each_check_has_a_planted_fault():
    assert list(FAULTS) == list(checks.CHECKS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_bump_names_what_stands_in_its_way_and_writes_nothing(fit, name, capsys):
    FAULTS[name](fit)
    assert run(fit, "bump", "0.2.0") == 1
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines[name] != "fit"
    assert (fit.root / "VERSION").read_text() == "0.1.0\n"
    assert "0.2.0" not in (fit.root / "CHANGELOG.md").read_text()


def test_a_damaged_fixture_is_found(tmp_path):
    folder = shutil.copytree(ROOT / STORE / "0.1.0", tmp_path / "0.1.0")
    assert check_fixture(folder) == ""
    weights = folder / "plain" / "student.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "student.safetensors" in check_fixture(folder)


@pytest.mark.parametrize("words", [("check",), ("notes",), ("bump", "9.0.0")])
def test_a_source_tree_without_git_and_a_shallow_clone_are_refused(
    released, tmp_path, words, capsys
):
    bare = shutil.copytree(released.root, tmp_path / "bare", ignore=lambda *_: [".git"])
    assert main(["--root", str(bare), *words]) == 2
    assert "has no .git" in capsys.readouterr().err
    shallow = tmp_path / "shallow"
    url = f"file://{released.root}"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", url, str(shallow)], check=True)
    assert main(["--root", str(shallow), *words]) == 2
    error = capsys.readouterr().err
    assert "is a shallow clone" in error and error.count("\n") == 1


def test_a_fixture_is_made_once(capsys):
    assert main(["fixture", "0.1.0"]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["fixture", "one"]) == 2
