"""docs/coming_from.md against the programs: what it says of each name that people bring."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from big_vision.pp.checks import check_spec
from big_vision.pp.registry import OPS
from losses.table import LOSSES
from tests.support.documented_launches import import_program, split_program
from utils.config.command_line import ALIASES
from utils.config.foreign_flags import FOREIGN_FLAGS
from utils.config.keys import get_keys
from utils.config.load import load_config
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
_KEY = re.compile(r"(?:--)?([a-z]+\.[a-z_]+)(?:=(.+))?")
_KEY_OF = {flag.replace("-", "_"): key for key, flags in ALIASES.items() for flag in flags}
# Flags of programs that have a configuration file of their own, not of a trainer's command line.
NOT_OURS = ("--config", "--cfg", "--cfg.workdir", "--workdir")


class Row(NamedTuple):
    """A row of a table: the words in backticks of its first two cells."""

    section: str
    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    text: str


def read_rows(text: str) -> list[Row]:
    rows, section = [], ""
    for line in text.splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if line.startswith("| ") and not line.startswith("| there |"):
            theirs, ours, *_ = (cell.strip() for cell in line.strip("|").split(" | "))
            words = (tuple(re.findall(r"`([^`]+)`", cell)) for cell in (theirs, ours))
            rows.append(Row(section, *words, line))
    return rows


ROWS = read_rows(TEXT)


def check_ours(word: str) -> str:
    """Check one name of ours; gives what it is, or raises."""
    if word.startswith("python ") and not word.endswith("tests/test_kd.py"):
        return check_command(word)
    match = _KEY.fullmatch(word)
    if match and match[1] in get_keys():
        if match[2]:
            load_config([f"--{match[1]}={match[2]}"])
        return "key"
    path = word.removeprefix("bash ").removeprefix("python ").split()[0]
    if (ROOT / path).exists():
        verbs = word.removeprefix("bash run_commands.sh").split()[:1] if "bash" in word else []
        text = (ROOT / "run_commands.sh").read_text()
        assert all(f"    {verb})" in text for verb in verbs if "run_commands" in word), word
        return "file"
    if word in LOSSES:
        return "loss"
    assert word.partition("(")[0] in OPS, f"{word} is no key, command, file, loss or op"
    check_spec(word)
    return "op"


def check_command(command: str) -> str:
    module, words = split_program(shlex.split(command)[1:])
    if module == "main":
        load_config(words)
        return "command"
    program = import_program(module)
    if hasattr(program.main, "parse"):
        program.main.parse(words)
    else:
        program.create_parser().parse_args(words)
    return "command"


def list_ours() -> list[tuple[str, str]]:
    return [(row.section, word) for row in ROWS for word in row.ours]


@pytest.mark.parametrize(("section", "word"), list_ours())
def test_what_it_is_here_exists(section, word):
    assert check_ours(word)


FLAGS = [
    (row, flag)
    for row in ROWS
    for flag in row.theirs
    if flag.startswith("--") and flag not in NOT_OURS
]


@pytest.mark.parametrize(("row", "flag"), FLAGS, ids=[flag for _, flag in FLAGS])
def test_a_flag_from_there_leads_to_what_the_row_says(row, flag):
    name = flag.removeprefix("--").replace("-", "_").lower()
    if name in _KEY_OF:  # a short flag here, too
        assert _KEY_OF[name] in row.text
        return
    with pytest.raises(UserError) as error:
        load_config([flag, "1"])
    hint = str(error.value).partition("; ")[2]
    assert str(error.value).startswith(f"unknown flag {flag}; ")
    if "leave it out" in hint:
        return
    assert "did you mean" not in hint, hint
    # The sentence names a key, an op or a program of the row.
    named = re.findall(r"[a-z]+\.[a-z_]+|\w+(?=\()|\bflip_lr\b", hint)
    named += [_KEY_OF[word] for word in re.findall(r"--(\w+)", hint) if word in _KEY_OF]
    assert any(word in row.text for word in named), (hint, row.text)


def test_the_recipe_in_both_is_counted_honestly():
    words = re.findall(r"^torchrun .*?^```", TEXT, re.MULTILINE | re.DOTALL)[0].split()
    flags = [word for word in words[words.index("train.py") :] if word.startswith("--")]
    recipe = yaml.safe_load((ROOT / "configs/imagenet/deit_s.yaml").read_text())
    keys = sum(len(section) for name, section in recipe.items() if name != "source")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| {keys} keys of a YAML, 0 flags" in readme and f"| {len(flags)} flags |" in readme
    values = dict(itertools.pairwise(words))
    assert float(values["--weight-decay"]) == recipe["optim"]["weight_decay"]
    assert int(values["--epochs"]) == recipe["train"]["epochs"]
    assert 8 * int(values["--batch-size"]) == recipe["data"]["global_batch_size"]
    assert values["--model"] == recipe["model"]["name"]


def test_results_of_benchmarks_are_ignored_by_git():
    command = ["git", "check-ignore", "results/resnet50/metrics.json", ".cluster_name"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == command[2:]


def test_the_tables_are_whole():
    sections = {row.section for row in ROWS}
    assert len(sections) == 10 and len(ROWS) > 130
    for row in ROWS:
        assert row.text.count(" | ") >= 2 or row.text.endswith(" | |"), row.text
        assert row.ours or "| none |" in row.text, row.text
    # What a hint exists for stands on the page.
    named = {flag.removeprefix("--").replace("-", "_").lower() for _, flag in FLAGS}
    training = {name.partition(".")[2] for name in named}
    asked = "aa hflip recount log_wandb enable_wandb tpu finetune big_vision_pp_train scale "
    asked += "color_jitter crop_pct train_interpolation remode layer_scale_init_value "
    asked += "save_ckpt_freq num_workers dist_eval disable_eval input_size amp"
    assert set(asked.split()) <= named & FOREIGN_FLAGS.keys()
    assert {"epochs", "batch_size"} <= training


@pytest.mark.parametrize(
    "word", ["optim.lrr", "python -m tools.nothing x", "configs/no.yaml", "flip_rl", "data.order=x"]
)
def test_a_name_that_does_not_exist_is_found(word):
    with pytest.raises((AssertionError, UserError, SystemExit, KeyError)):
        check_ours(word)
