"""Damaged checkpoints and configurations: one line, no traceback, no further damage."""

from __future__ import annotations

import io
import shutil
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import main
from tests.support.tiny_parts import create_argv
from utils.checkpoint.files import CheckpointError, load_checkpoint, verify_checkpoint
from utils.checkpoint.find import find_checkpoint, load_newest
from utils.errors import UserError

SAVING = (
    "--train.steps=4",
    "--train.checkpoint_every_steps=2",
    "--runtime.num_threads=1",
    "--train.eval_every_epochs=100",
    "--run.run_id=a",
)


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Path:
    """A finished run with checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("origin")
    assert main.main(create_argv(folder, *SAVING)) == 0
    return folder


@st.composite
def damages(draw) -> list[tuple]:
    """Draw a few damages: which file, what, where."""
    files = st.sampled_from(
        ["model.safetensors", "optimizer.safetensors", "state.json", "COMMITTED"]
    )
    deed = st.tuples(
        st.sampled_from(["flip", "cut", "remove", "append", "overwrite", "directory"]),
        files,
        st.floats(0, 1),
        st.binary(min_size=1, max_size=64),
    )
    return draw(st.lists(deed, min_size=1, max_size=3))


def apply(folder: Path, deeds: list[tuple]) -> None:
    """Apply the damages to a checkpoint; deleted files stay deleted."""
    for deed, name, share, data in deeds:
        path = folder / name
        if not path.is_file():
            continue
        content = bytearray(path.read_bytes())
        place = min(int(share * len(content)), max(len(content) - 1, 0))
        if deed == "remove":
            path.unlink()
        elif deed == "directory":
            path.unlink()
            path.mkdir()
        elif deed == "cut":
            path.write_bytes(content[:place])
        elif deed == "append":
            path.write_bytes(content + data)
        elif deed == "overwrite":
            path.write_bytes(content[:place] + data + content[place + len(data) :])
        elif content:
            content[place] ^= 1 << (data[0] % 8)
            path.write_bytes(content)


def read_bytes(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*") if p.is_file()
    }


@given(deeds=damages())
def test_a_damaged_checkpoint_is_refused_or_read_correctly(origin, tmp_path, deeds):
    """Reading never gives other tensors than those that were written, and changes nothing."""
    place = tmp_path / "checkpoints"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(origin / "tiny" / "a" / "checkpoints", place)
    whole, _ = load_checkpoint(place / "step_00000004")
    older, _ = load_checkpoint(place / "step_00000002")
    apply(place / "step_00000004", deeds)
    before = read_bytes(place)
    try:
        verify_checkpoint(place / "step_00000004")
        wanted, step = whole, 4
    except CheckpointError as error:
        assert "\n" not in str(error)
        wanted, step = older, 2
    found, parts, facts = load_newest(find_checkpoint(place, verify=False))
    assert (facts.step, Path(found).name) == (step, f"step_{step:08d}")
    for part, tensors in wanted.items():
        for name, value in tensors.items():
            assert torch.equal(parts[part][name], value)
    assert find_checkpoint(place).name == f"step_{step:08d}"
    assert read_bytes(place) == before


def check_one_line(output_dir: Path, flags: tuple[str, ...]) -> int:
    """Run main; whatever it says to a person is one line without a traceback."""
    text = io.StringIO()
    with redirect_stderr(text):
        code = main.main(create_argv(output_dir, *SAVING, *flags))
    assert "Traceback" not in text.getvalue()
    last = text.getvalue().splitlines()[-1]
    # 1: a store that proved unwritable only when it was written to.
    beginnings = {0: "", 2: "error: ", 1: "the run was stopped: no checkpoint could be written to"}
    assert last[9:].startswith("complete") if code == 0 else last.startswith(beginnings[code]), last
    return code


@settings(max_examples=12)
@given(
    newer=damages(),
    older=st.none() | damages(),
    metrics=st.none() | st.binary(max_size=80),
    facts=st.none() | st.binary(max_size=40),
)
def test_a_run_with_damaged_files_resumes_or_refuses_in_one_line(
    origin, tmp_path, newer, older, metrics, facts
):
    output_dir = tmp_path / "runs"
    shutil.rmtree(output_dir, ignore_errors=True)
    shutil.copytree(origin, output_dir)
    folder = output_dir / "tiny" / "a"
    apply(folder / "checkpoints" / "step_00000004", newer)
    if older is not None:
        apply(folder / "checkpoints" / "step_00000002", older)
    if metrics is not None:
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(metrics)
    if facts is not None:
        (folder / "run.json").write_bytes(facts)
    before = read_bytes(folder)
    if check_one_line(output_dir, ("--resume=auto",)) == 0:
        verify_checkpoint(folder / "checkpoints" / "step_00000004")
    else:
        assert read_bytes(folder) == before


KEYS = st.fixed_dictionaries(
    {},
    optional={
        "train.keep_checkpoints": st.integers(-1, 3),
        "train.keep_every_steps": st.integers(0, 3),
        "train.checkpoint_every_steps": st.integers(0, 5),
        "train.checkpoint_every_epochs": st.sampled_from(["0", "0.1", "1", "nan", "1e9"]),
        "train.on_nonfinite": st.sampled_from(["stop", "rollback", "ignore"]),
        "train.max_rollbacks": st.integers(-1, 2),
        "train.stall_timeout_s": st.sampled_from(["-1", "0", "1e6", "x"]),
        "train.seed": st.integers(0, 1),
        "optim.lr": st.sampled_from(["1e-3", "2e-3", "-1"]),
        "run.allow_changes": st.sampled_from(["optim.lr", "*", "[]", '["train.seed"]']),
        "run.checkpoint_root": st.sampled_from(["", "nonsense://x", "/proc/nowhere"]),
        "run.init_from": st.sampled_from(["", "/nowhere"]),
        "run.init_skip": st.sampled_from(["[]", '["*"]', "head.*"]),
        "run.resume": st.sampled_from(["", "auto", "/nowhere", "nonsense://x", "gs:/"]),
    },
)


@settings(max_examples=40)
@given(keys=KEYS)
def test_keys_of_saving_and_resuming_work_or_are_refused_in_one_line(origin, tmp_path, keys):
    output_dir = tmp_path / "runs"
    shutil.rmtree(output_dir, ignore_errors=True)
    shutil.copytree(origin, output_dir)
    check_one_line(output_dir, tuple(f"--{key}={value}" for key, value in keys.items()))
    try:
        newest = find_checkpoint(output_dir / "tiny" / "a")
    except UserError:
        pytest.fail("no whole checkpoint is left")
    verify_checkpoint(newest)
