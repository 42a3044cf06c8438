"""Paths that a submission may name: none outside the roots, by any key and spelling."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.places import check_config_path, check_places, list_configs
from utils.config.load import RunConfig, combine_config
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs" / "digits_student.yaml")


@pytest.fixture
def base(tmp_path):
    """Create the roots `runs` and `data`, and a forbidden directory beside them."""
    for name in ("runs", "data", "runs_of_others"):
        (tmp_path / name).mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "data" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "data" / "in").symlink_to(tmp_path / "runs")
    return tmp_path


ROOTS = ("runs", "data", "gs://bucket/mine")
PLACES = (
    "data.root",
    "model.weights",
    "distill.teacher_weights",
    "distill.teacher_cache",
    "distill.statistics",
    "runtime.compile_cache",
    "run.init_from",
    "run.checkpoint_root",
    "run.cache_dir",
    "run.output_dir",
    "run.import_dir",
)
OUTSIDE = (
    "/etc/passwd",
    "secret",
    "data/../secret",
    "data/out",
    "runs_of_others",
    "~/x",
    "$HOME/x",
    "file:///etc/passwd",
    "http://169.254.169.254/computeMetadata",
    "https://h/x",
    "s3://b/x",
    "gcs://bucket/mine/x",
    "gs://bucket",
    "gs://bucket/mine2",
    "gs://bucket/mine/../other",
    "gs://other/mine",
    "simplecache::gs://bucket/mine/x",
    "gs://bucket/mine::http://h/x",
    "memory://x",
    "data\x00/x",
    "data/\n/x",
    "//etc/passwd",
    ".",
    "..",
    "/proc/self/environ",
    "filecache::file:///etc/passwd",
    "zip://x::/etc/x.zip",
    "GS://bucket/mine",
    "hf://x",
)
INSIDE = (
    "",
    "auto",
    "data",
    "data/",
    "data/mnist",
    "data/in/x",
    "runs/a/b",
    "./data/x",
    "data/a/../b",
    "gs://bucket/mine",
    "gs://bucket/mine/",
    "gs://bucket/mine/a",
)


def make(key: str, value: object) -> RunConfig:
    """Create a configuration before anything of it is used."""
    section, _, name = key.partition(".")
    config = combine_config(CONFIG, {}, "test")
    part = getattr(config, section).model_copy(update={name: value})
    return config.model_copy(update={section: part})


@pytest.mark.parametrize("value", OUTSIDE)
@pytest.mark.parametrize("key", PLACES)
def test_a_path_outside_the_roots_is_refused(base, key, value):
    with pytest.raises(UserError, match=key.replace(".", r"\.")):
        check_places(make(key, value), ROOTS, base)


@pytest.mark.parametrize("value", INSIDE)
@pytest.mark.parametrize("key", PLACES)
def test_a_path_below_a_root_is_allowed(base, key, value):
    check_places(make(key, value), ROOTS, base)


TEACHERS = [
    {"model": "vit_tiny", "weights": "/etc/passwd"},
    {"model": "a", "label_map": "/etc/x"},
    {"model": "local-dir:/etc"},
    {"model": "a", "args": {"checkpoint_path": "x"}},
]


@pytest.mark.parametrize("teacher", TEACHERS)
def test_paths_inside_lists_are_checked_too(base, teacher):
    values = combine_config(CONFIG, {}, "test").model_dump()
    values["distill"]["teachers"] = [teacher]
    with pytest.raises(UserError, match=r"distill\.teachers\.0\."):
        check_places(RunConfig.model_validate(values), ROOTS, base)


TEXTS = {
    "data.name": ("../secret", "/etc/passwd", "a/../../b", "gs://b/x", "a\x00"),
    "data.train_split": ("../../etc", "/etc"),
    "model.name": ("local-dir:/etc", "hf-hub:a/b", "hf_hub:a", "a/b"),
    "distill.teacher": ("local-dir:data",),
    "data.train_pp": (
        'lookup("/etc/passwd")',
        "lookup('\\x2fetc\\x2fpasswd')",
        'lookup("." "./" "./secret")',
        'decode\n|lookup("." "./secret")',
        'lookup("http://h/x")',
        "lookup(b'/etc/passwd')",
        'lookup("a::b")',
        'lookup("$HOME/x")',
        'lookup("~root/x")',
        "lookup('''/etc/passwd''')",
        'lookup(r"/etc/passwd")',
        'lookup("\\N{SOLIDUS}etc")',
    ),
    "model.args": (
        {"checkpoint_path": "data/x"},
        {"pretrained_cfg": {}},
        {"pretrained_cfg_overlay": {}},
        {"deep": {"pretrained_cfg": {"file": "x"}}},
        {"file": "/etc/passwd"},
        {"list": ["a", "../x"]},
        {"cache_dir": "x"},
    ),
    "optim.args": ({"path": "/etc/passwd"},),
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, found in TEXTS.items() for v in found])
def test_no_other_value_names_a_path_outside_the_roots(base, key, value):
    with pytest.raises(UserError, match=key.replace(".", r"\.")):
        check_places(make(key, value), ROOTS, base)


def test_every_configuration_of_the_repository_may_be_submitted():
    """Nothing in them is taken for a way out; those that name a bucket need it as a root."""
    roots = ("runs", "data", "gs://BUCKET")
    checked = [name for name in list_configs(ROOT) if is_whole(name)]
    assert len(checked) > 20
    for name in checked:
        check_config_path(name, ROOT)
        check_places(combine_config(str(ROOT / name), {}, "test"), roots, ROOT)


def is_whole(name: str) -> bool:
    """Return whether a file is complete by itself: some need a teacher's weights as a flag."""
    try:
        combine_config(str(ROOT / name), {}, "test")
    except UserError as error:
        return "name a teacher" not in str(error)
    return True


@pytest.mark.parametrize(
    "config",
    [
        "",
        "/etc/passwd",
        "configs",
        "configs/../main.py",
        "configs/../../x.yaml",
        "README.md",
        "configs/none.yaml",
        "configs/a\x00.yaml",
        "configs//etc/passwd",
        "gs://b/x.yaml",
        str(ROOT / "configs" / "smoke.yaml"),
    ],
)
def test_a_file_other_than_a_configuration_is_refused(config):
    with pytest.raises(UserError, match="is no file of configs/"):
        check_config_path(config, ROOT)
