"""What strangers meet first: workflows, forms, citation, changelog; and their commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from proofs.release.changelog import THEMES
from proofs.release.history import CHANGELOG, list_versions
from tests.support.documented_commands import Places, get_call, run_dry, start_script
from tests.support.linters import find_linter

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "dependabot": [GITHUB / "dependabot.yml"],
    "github-issue-forms": FORMS,
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
}


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def check_schema(name: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{name}"]
    return subprocess.run([*command, *map(str, paths)], capture_output=True, text=True)


def list_steps() -> Iterator[tuple[str, dict]]:
    """Workflow and job, and each step of it."""
    for path in WORKFLOWS:
        for name, job in read(path)["jobs"].items():
            for step in job["steps"]:
                yield f"{path.stem} {name}", step


def list_commands() -> list[tuple[str, str]]:
    """Job and command, with a value of the matrix in the place of its name."""
    commands = [(job, step["run"]) for job, step in list_steps() if "run" in step]
    return [(job, re.sub(r"\$\{\{ matrix\.part \}\}", "2", text)) for job, text in commands]


@pytest.mark.parametrize("name", SCHEMAS)
def test_files_for_github_fit_their_published_schemas(name):
    done = check_schema(name, *SCHEMAS[name])
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_planted_fault_does_not_fit(tmp_path):
    text = WORKFLOWS[0].read_text(encoding="utf-8")
    (tmp_path / "ci.yml").write_text(text.replace("runs-on:", "run-on:"))
    assert check_schema("github-workflows", tmp_path / "ci.yml").returncode == 1


def lint(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [find_linter("actionlint"), "-shellcheck", find_linter("shellcheck")]
    return subprocess.run([*command, *map(str, paths)], capture_output=True, text=True)


def test_the_linter_finds_nothing_in_the_workflows():
    done = lint(*WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("right", "wrong", "rule"),
    [
        ("${{ matrix.python }}", "${{ matrix.pyhton }}", "expression"),
        ("actions/upload-artifact@v6", "actions/upload-artifact@v4", "action"),
        ("ubuntu-24.04", "ubuntu-24", "runner-label"),
        ("bash run_commands.sh lint", 'echo "$(ls) | head', "shellcheck"),
    ],
)
def test_the_linter_would_find_what_fits_the_schema(tmp_path, right, wrong, rule):
    text = (GITHUB / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert right in text
    (tmp_path / "ci.yml").write_text(text.replace(right, wrong))
    assert check_schema("github-workflows", tmp_path / "ci.yml").returncode == 0
    done = lint(tmp_path / "ci.yml")
    assert done.returncode == 1 and f"[{rule}]" in done.stdout, done.stdout


@pytest.mark.parametrize(("job", "command"), list_commands())
def test_each_command_of_a_job_is_a_verb_that_runs_its_program(job, command, tmp_path):
    words = shlex.split(command)
    assert words[:2] == ["bash", "run_commands.sh"], f"{job}: {command}"
    done = start_script(words[2:], tmp_path)
    assert done.returncode == 0, done.stderr
    named = [word for word in get_call(done) if word.startswith("tests/")]
    assert all((ROOT / word).exists() for word in named)


def test_the_jobs_are_those_that_the_project_promises():
    jobs = {
        f"{path.stem} {name}": job for path in WORKFLOWS for name, job in read(path)["jobs"].items()
    }
    assert jobs["ci suite"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    verbs = {shlex.split(command)[2] for _, command in list_commands()}
    assert verbs >= {"lint", "test", "docs", "wheel", "proofs", "baseline", "release"}
    parts = jobs["nightly proofs"]["strategy"]["matrix"]["part"]
    assert [f"proofs {part}/{len(parts)}" for part in parts] == [
        f"proofs {k}/6" for k in range(1, 7)
    ]


def test_jobs_have_limits_and_no_more_rights_than_reading():
    for path in WORKFLOWS:
        workflow = read(path)
        assert workflow["permissions"] == {"contents": "read"}
        assert all(job["timeout-minutes"] <= 360 for job in workflow["jobs"].values())
        assert "pull_request_target" not in path.read_text(encoding="utf-8")
    checkouts = [step for _, step in list_steps() if "checkout" in step.get("uses", "")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_what_pip_downloads_is_kept_by_the_hash_of_the_lists():
    setups = [step["with"] for job, step in list_steps() if "setup-python" in step.get("uses", "")]
    kept = [setup for setup in setups if setup.get("cache") == "pip"]
    assert len(kept) >= 6
    assert {setup["cache-dependency-path"] for setup in kept} == {"requirements*.txt"}


def test_the_parts_of_the_long_proofs_are_all_of_them_once(tmp_path):
    def list_files(part: str) -> list[str]:
        done = start_script(("proofs", part), tmp_path)
        assert done.returncode == 0, done.stderr
        return re.findall(r"^tests/\S+\.py$", done.stdout, re.MULTILINE)

    whole = list_files("1/1")
    parts = [name for k in range(1, 7) for name in list_files(f"{k}/6")]
    assert len(whole) > 50 and sorted(parts) == sorted(whole)


@pytest.mark.parametrize("part", ["", "0/6", "7/6", "1", "a/b"])
def test_a_wrong_part_is_refused_with_code_2(part, tmp_path):
    done = start_script(("proofs", part), tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: proofs needs a part such as 1/6")


def test_packages_that_are_one_set_move_by_hand():
    (pip,) = (
        row
        for row in read(GITHUB / "dependabot.yml")["updates"]
        if row["package-ecosystem"] == "pip"
    )
    ignored = {row["dependency-name"] for row in pip["ignore"]}
    text = (ROOT / "requirements-torch-tpu.txt").read_text(encoding="utf-8")
    pins = set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))
    assert ignored == pins | {"torch_xla"}


def test_commands_that_forms_and_the_template_name_are_understood(tmp_path):
    texts = [
        path.read_text(encoding="utf-8") for path in (*FORMS, GITHUB / "PULL_REQUEST_TEMPLATE.md")
    ]
    commands = {c for text in texts for c in re.findall(r"`(python -m [^`]+)`", text)}
    commands |= {c for text in texts for c in re.findall(r"`(bash run_commands[^`]+)`", text)}
    assert any("tools.doctor --json" in command for command in commands)
    assert any("tools.runs report" in command for command in commands)
    places = Places(*[tmp_path] * 6)
    assert all(run_dry(command, places) for command in commands)


def test_the_template_has_the_parts_of_the_report():
    text = (GITHUB / "PULL_REQUEST_TEMPLATE.md").read_text(encoding="utf-8")
    source = (ROOT / "tools" / "runs" / "reporting.py").read_text(encoding="utf-8")
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == re.findall(
        r'^        "(\w+)": ', source, re.MULTILINE
    )


def test_the_citation_names_the_version_and_the_licence():
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == (ROOT / "VERSION").read_text(encoding="utf-8").strip()
    assert citation["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_changelog_is_short_and_begins_with_the_version():
    text = (ROOT / CHANGELOG).read_text(encoding="utf-8")
    version = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
    versions = list_versions(text)
    assert versions[0] == version
    first = text[text.index(f"## [{versions[-1]}]") :]
    assert len(first.splitlines()) <= 120
    assert all(f"- **{theme.title}** (" in first for theme in THEMES)
    assert re.findall(r"^### (.*)$", text, re.MULTILINE)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds


def test_modules_that_the_changelog_names_exist():
    text = (ROOT / CHANGELOG).read_text(encoding="utf-8")
    for name in re.findall(r"python -m ([\w.]+)", text):
        path = ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name
