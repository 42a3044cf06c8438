"""Every key of the configuration has a visible effect: none may be set in vain."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import main
from models import factory as models_factory
from models.factory import create_model, export_model
from tests.support.key_descriptions import describe
from tests.support.key_effects import ELSEWHERE, list_rows, load
from tests.support.tiny_parts import CLASSES, VIT_ARGS, create_argv, create_config, create_vit
from tests.test_config_keys import get_wanted
from utils.config.command_line import ALIASES
from utils.config.execution import RuntimeSection
from utils.errors import UserError
from utils.runtime.xla.runtime import prepare_cache

ROOT = Path(__file__).resolve().parents[1]
ROWS = list_rows(Path("a"), Path("b"))

NAMES = [
    pytest.param(
        row[0],
        number,
        marks=[pytest.mark.xla] if "--runtime.device=xla" in (*row[1], row[2]) else [],
    )
    for number, row in enumerate(ROWS)
]


@pytest.fixture(scope="module")
def places(tmp_path_factory, digits_root):
    """Two exported teachers, the flags of the digits and what unchanged flags give."""
    folders = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp(f"teacher{seed}")
        facts = {"model": "vit_tiny_patch16_224", "args": {"img_size": 8, **VIT_ARGS}}
        facts |= {"num_classes": CLASSES, "mean": [0.0], "std": [1.0]}
        export_model(create_vit(seed).state_dict(), facts, folder)
        folders.append(folder)
    pp = "decode(channels=1)|resize(8)|value_range(-1, 1)"
    digits = (
        "--data.source=tfds",
        "--data.name=digits",
        f"--data.root={digits_root}",
        f"--data.train_pp={pp}",
        f"--data.eval_pp={pp}",
    )
    return tmp_path_factory.mktemp("effects"), digits, list_rows(*folders), {}


@pytest.mark.parametrize(("key", "number"), NAMES)
def test_a_key_that_changes_shows_in_the_run(places, key, number):
    folder, digits, rows, seen = places
    _, shared, flag, part = rows[number]
    part, _, words = part.partition(":")
    if part == "invalid":
        with pytest.raises(UserError, match=re.escape(words)):
            load(folder, digits, (*shared, flag))
        return
    if shared not in seen:
        seen[shared] = describe(load(folder, digits, shared))
    now, then = describe(load(folder, digits, (*shared, flag))), seen[shared]
    if part == "refused":
        assert (words or key) in now["refused"]
        assert (words or key) not in then.get("refused", "")
    else:
        assert "refused" not in {**then, **now} or part == "mesh"
        assert now[part] != then[part]


@pytest.mark.parametrize("key", ["optim.lr", "model.skip_patches", "data.threads", "distill.alpha"])
def test_without_a_change_nothing_differs(places, key):
    folder, digits, rows, _ = places
    shared = next(row[1] for row in rows if row[0] == key)
    assert describe(load(folder, digits, shared)) == describe(load(folder, digits, shared))


def test_every_key_has_a_row_or_the_name_of_its_test():
    shown = {row[0] for row in ROWS}
    elsewhere = [key for keys in ELSEWHERE.values() for key in keys]
    assert get_wanted() - shown == set(elsewhere)
    assert shown <= get_wanted()


@pytest.mark.parametrize("file", ELSEWHERE)
def test_the_tests_that_are_named_are_there(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    names = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    for key, test in ELSEWHERE[file].items():
        assert test in names, key
        # Of what stands in a list its own name.
        own = key.partition(".")[2].rpartition("[].")[2]
        spellings = (own, *(f"--{name}" for name in ALIASES.get(key, ())))
        assert any(spelling in text for spelling in spellings), key


def test_pretrained_loads_hub_weights(tmp_path, monkeypatch):
    """There is no hub here: what timm is asked for is seen."""
    asked = []
    create = models_factory.timm.create_model

    def record(name, pretrained=False, **arguments):
        asked.append(pretrained)
        return create(name, **arguments)

    monkeypatch.setattr(models_factory.timm, "create_model", record)
    for word in ("false", "true"):
        config = create_config(tmp_path, f"--model.pretrained={word}")
        create_model(config.model, num_classes=CLASSES)
    assert asked == [False, True]


def test_a_compile_cache_keeps_its_size_limit(tmp_path):
    for limit, left in ((1.0, 2), (1500 / 2**30, 1)):
        for name in ("old", "new"):
            (tmp_path / "rank_0").mkdir(exist_ok=True)
            (tmp_path / "rank_0" / name).write_bytes(bytes(1000))
        section = RuntimeSection(compile_cache=str(tmp_path), compile_cache_gib=limit)
        assert prepare_cache(section, "TPU", rank=0) == tmp_path / "rank_0"
        assert len(list((tmp_path / "rank_0").iterdir())) == left


def test_tensorboard_events_are_written_on_request(tmp_path):
    for word in ("false", "true"):
        flags = ("--train.steps=1", f"--run.tensorboard={word}", f"--run.run_id={word}")
        assert main.main(create_argv(tmp_path, *flags)) == 0
    assert list((tmp_path / "tiny" / "true").glob("events.out.*"))
    assert not list((tmp_path / "tiny" / "false").glob("events.out.*"))
