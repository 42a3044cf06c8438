"""docs/tpu.md against the programs: what it prints under a command is what --dry-run prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.documented_launches import find_launch, show_dry, wrap
from utils.generations import LAUNCHED

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "tpu.md").read_text(encoding="utf-8")
STACK_TEXT = (ROOT / "docs" / "torch_tpu.md").read_text(encoding="utf-8")
# A command, and what stands below it as its dry run.
_OUTPUT = r"((?:gcloud|git|kubectl|sky|scp|docker|torchrun)(?s:.*?))"
SHOWN = re.findall(rf"^```bash\n(.+)\n```\n\n```text\n{_OUTPUT}^```", TEXT, re.MULTILINE)
ALONE = [
    command
    for block in re.findall(r"^```bash\n(.*?)^```", TEXT + STACK_TEXT, re.MULTILINE | re.DOTALL)
    for command in block.splitlines()
]


def split_lines(text: str) -> list[list[str]]:
    """Words of each command of a text block."""
    return [shlex.split(line) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize(("command", "shown"), SHOWN)
def test_documented_output_equals_the_dry_runs(command, shown):
    assert split_lines(shown) == [shlex.split(line) for line in show_dry(command)]


def test_every_kind_of_launch_is_documented_with_its_commands():
    modules = {(find_launch(command)[0], find_launch(command)[1][0]) for command, _ in SHOWN}
    for verb in ("create", "sync", "setup", "run", "logs", "delete"):
        assert ("train.tpu_vm", verb) in modules
    assert {
        "train.xla_dist",
        "train.project",
        "train.container",
        "train.gpus",
        "train.sky.cluster",
        "tools.doctor",
    } <= {module for module, _ in modules}


def test_undocumented_launches_have_a_dry_run_too():
    launches = [command for command in ALONE if find_launch(command) is not None]
    assert len(launches) > len(SHOWN)
    assert all(show_dry(command) for command in launches)


def test_a_differing_documented_command_is_found():
    command, shown = SHOWN[0]
    assert split_lines(shown.replace("PROJECT", "OTHER")) != split_lines(
        "\n".join(show_dry(command))
    )


def test_a_wrapped_command_is_the_same_command():
    line = "gcloud ssh '--command=a b \"c d\"' " + " ".join(f"--flag-{n}=value" for n in range(20))
    assert "\\\n" in wrap(line)
    assert split_lines(wrap(line)) == [shlex.split(line)]


def test_the_table_of_generations_equals_the_programs():
    rows = re.findall(
        r"^\| (v\w+|tpu7x) \| `(\S+)-N` \| (\w+) \| `(\S+)` \| `\S+-(\d+)` \|$", TEXT, re.MULTILINE
    )
    assert rows == [
        (row.name, row.prefix, row.counts, row.runtime_version, str(row.one_host))
        for row in LAUNCHED
    ]


@pytest.mark.parametrize("code", [72, 73, 75, 76, 137, 255])
def test_the_exit_codes_of_the_launcher_are_listed(code):
    assert re.search(rf"^\| {code} \|", TEXT, re.MULTILINE)


@pytest.mark.parametrize(
    "symptom",
    [
        "first step",
        "graph_budget",
        "hangs at the start",
        "host_rss_gib",
        "input_wait_s",
        "PREEMPTED",
    ],
)
def test_symptoms_point_to_the_commands_that_show_them(symptom):
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and symptom in line]
    assert rows and all(line.count("|") == 4 for line in rows)


def test_keys_named_in_the_document_exist():
    from utils.config.data import DataSection
    from utils.config.execution import RuntimeSection
    from utils.config.train import TrainSection

    fields = {"data": DataSection, "runtime": RuntimeSection, "train": TrainSection}
    named = set(re.findall(r"`(data|runtime|train)\.([a-z_0-9]+)", TEXT))
    assert len(named) > 5
    wrong = [
        f"{section}.{key}"
        for section, key in named
        if key not in fields[section].model_fields and not (ROOT / section / f"{key}.py").exists()
    ]
    assert wrong == []
