"""The keys of the configuration: on their page, described, and named with their unit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

from proofs.keys import ELEMENTS, PAGE, format_page
from utils.config.keys import get_keys, iterate_keys
from utils.config.load import RunConfig
from utils.config.metadata import KeyInfo, read_key_info

ROOT = Path(__file__).resolve().parents[1]
# Keys that are named like a path and are none.
NO_PLACES = """
data.labels_file model.drop_path_rate model.drop_path_law model.drop_path_rescale
data.sample_weights train.class_weights distill.cache_end runtime.compile_cache_gib
"""


def get_wanted() -> set[str]:
    """All keys, and those of the elements of lists."""
    nested = {
        f"{prefix}.{name}" for prefix, section in ELEMENTS.items() for name in section.model_fields
    }
    return set(iterate_keys()) | nested


def test_the_page_of_keys_equals_the_declared_fields():
    """An added key, a default, a rule on resume, a device or a task shows there in review."""
    is_equal = PAGE.read_text(encoding="utf-8") == format_page()
    assert is_equal, "docs/keys.md: run `python -m proofs.keys --write` and look at the difference"


def test_every_key_has_a_description_with_its_unit():
    """Times, sizes and intervals carry their unit in the name."""
    for key in iterate_keys():
        section, name = key.split(".")
        field = RunConfig.model_fields[section].annotation.model_fields[name]
        assert field.description, key
        assert not name.endswith(("_freq", "_interval", "_period")), key


def test_keys_that_may_change_between_epochs_are_stream_entries():
    """`store.query.changes.check_stream` finds its value there by the key's last word."""
    for key in get_keys().values():
        if key.resume == "between_epochs":
            assert key.stream == key.name.rpartition(".")[2]


def test_devices_and_their_values_are_choices_of_their_keys():
    known = set(get_keys()["runtime.device"].known)
    for key in get_keys().values():
        if key.devices is None:
            continue
        section, name = key.name.split(".")
        field = RunConfig.model_fields[section].annotation.model_fields[name]
        assert set(key.devices.names) < known - {"auto"}, key.name
        assert "; " in key.devices.why, key.name
        if key.devices.value is not None:
            assert key.devices.value in get_args(field.annotation), key.name
            assert key.devices.value != field.default, key.name


def test_the_configuration_schema_holds_what_keys_declare():
    schema = json.loads(json.dumps(RunConfig.model_json_schema()))
    assert schema["$defs"]["TrainSection"]["properties"]["epochs"]["resume"] == "warns"
    assert schema["$defs"]["DataSection"]["properties"]["shuffle_gib"]["stream"] == "shuffle_gib"
    tf32 = schema["$defs"]["RuntimeSection"]["properties"]["tf32"]
    assert tf32["devices"]["mode"] == "tf32"
    assert "resume" not in tf32 and "stream" not in tf32


def test_a_short_flag_stands_for_one_key_and_hides_none():
    flags = Counter(flag for key in get_keys().values() for flag in key.aliases)
    assert {flag for flag, count in flags.items() if count > 1} == set()
    assert not flags.keys() & (get_keys().keys() | {"config"})


def test_keys_of_list_elements_declare_no_rules():
    """A list is one key: what it says holds for all that stands in it."""
    for section in ELEMENTS.values():
        for name, field in section.model_fields.items():
            info = read_key_info(field)
            assert replace(info, is_path=False, needs=()) == KeyInfo(), name


def test_a_key_named_like_a_path_is_declared_as_one():
    """Who lets others submit runs takes what is no path for a name."""
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    words = ("path", "directory", "file", "root", "cache", "weights")
    for prefix, section in (*sections.items(), *ELEMENTS.items()):
        for name, field in section.model_fields.items():
            is_path = read_key_info(field).is_path
            if any(word in name for word in words) and not is_path:
                assert f"{prefix}.{name}" in NO_PLACES.split(), "a path? declare is_path=True"


# A key that says all that a key can say of itself, and is named nowhere but in its section.
PLANTED = """
    hue: float = key(
        0.0,
        "share of examples in shifted colours",
        ge=0,
        resume="between_epochs",
        stream="hue",
        devices=Devices("pallas", "others shift no colours; leave it out"),
        aliases=("hue_shift",),
    )
"""
PROGRAM = """
import json, sys
import main
from store.query.changes import check_changes, check_stream, hash_config
from datasets import DatasetFacts
from job.spec import describe_stream
from utils.config.keys import get_resume_rules
from utils.config.load import load_config
from utils.config.load import create_parser
from utils.errors import UserError

FLAGS = ["--data.source=synthetic", "--runtime.device=cpu", "--model=resnet18"]

def load(*flags):
    return load_config([*FLAGS, *flags])

def describe(config):
    dataset = DatasetFacts({"train": 4}, {}, "1", "x")
    return describe_stream(config, dataset, {"num_classes": 2}, processes=1)

old, new = load(), load("--hue-shift=0.5")
then, now = (config.model_dump(mode="json") for config in (old, new))
rules = get_resume_rules()
refusal = ""
try:
    check_stream(describe(old), describe(new), (), rules, mid_epoch=True)
except UserError as error:
    refusal = str(error)
print(json.dumps({
    "help": create_parser().format_help(),
    "value": new.data.hue,
    "entry": describe(new)["hue"],
    "config": check_changes(then, now, (), rules),
    "same_hash": hash_config(then, rules) == hash_config(now, rules),
    "border": check_stream(describe(old), describe(new), (), rules, mid_epoch=False),
    "refusal": refusal,
}))
sys.stdout.flush()
sys.exit(main.main([*FLAGS, "--hue_shift=0.5", "--check"]))
"""


def test_a_new_keys_declaration_is_honoured_everywhere(tmp_path):
    """The program's own files, with one field more in `DataSection` and no other edit."""
    _link(ROOT, tmp_path, but="utils")
    _link(ROOT / "utils", tmp_path / "utils", but="config")
    _link(ROOT / "utils" / "config", tmp_path / "utils" / "config", but="data.py")
    head, name, tail = (
        (ROOT / "utils/config/data.py").read_text().partition('"""The data of a run."""\n')
    )
    assert name
    head = head.replace("ConfigSection, key", "ConfigSection, Devices, key")
    (tmp_path / "utils/config/data.py").write_text(head + name + PLANTED + tail)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert "data.hue (0.5) works on xla, not on 'cpu': others shift no colours" in done.stderr
    found = json.loads(done.stdout.splitlines()[0])
    words = " ".join(found.pop("help").split())
    assert "--hue_shift" in words
    assert "in shifted colours (default: 0.0) [resume: between epochs; xla only]" in words
    refusal = found.pop("refusal")
    assert "data.hue: hue was 0.0, is 0.5" in refusal and "repeated or missing" in refusal
    border = ["data.hue: hue was 0.0, is 0.5"]
    assert found == {"value": 0.5, "entry": 0.5, "config": [], "same_hash": True, "border": border}


def _link(source: Path, target: Path, *, but: str) -> None:
    """A directory that shows the entries of another one, except for one of them."""
    target.mkdir(exist_ok=True)
    for entry in source.iterdir():
        if entry.name != but and not entry.name.startswith("."):
            (target / entry.name).symlink_to(entry)
