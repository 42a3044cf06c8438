"""Writing beside the loop: one at a time, errors reach the loop, one is always complete."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
import torch

from tests.support.child_runs import ROOT
from utils.checkpoint import files as checkpoint_files
from utils.checkpoint.files import CheckpointError, load_checkpoint, verify_checkpoint
from utils.checkpoint.find import find_checkpoint
from utils.checkpoint.manager import BEST_FILE, CheckpointManager
from utils.errors import UserError
from utils.storage.local import get_old_name


def create_parts(step: int) -> dict[str, dict[str, torch.Tensor]]:
    """A model of 64 numbers that tell the step."""
    return {
        "model": {"weight": torch.full((8, 8), float(step)), "count": torch.tensor(step)},
        "optimizer": {"weight|exp_avg": torch.zeros(8, 8, dtype=torch.bfloat16)},
    }


def get_facts(step: int) -> dict:
    return {"step": step, "optimizer": {}}


def save(manager: CheckpointManager, step: int, *, best: bool = False) -> None:
    manager.save(step, create_parts(step), get_facts(step), best=best)


def read_step(place: object) -> float:
    return load_checkpoint(place)[0]["model"]["weight"][0, 0].item()


@pytest.fixture(params=["disk", "memory"])
def place(request, tmp_path) -> str | Path:
    """Where checkpoints go: a directory or fsspec's memory."""
    if request.param == "disk":
        return tmp_path / "checkpoints"
    return f"memory://{uuid.uuid4().hex}/checkpoints"


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """Until it is set, no checkpoint is written."""
    gate = threading.Event()
    original = checkpoint_files.save_file

    def slow(*args, **kwargs):
        gate.wait()
        original(*args, **kwargs)

    monkeypatch.setattr(checkpoint_files, "save_file", slow)
    return gate


def test_a_checkpoint_is_read_back_from_disk_and_from_a_url(place):
    manager = CheckpointManager(place)
    save(manager, 3)
    found = find_checkpoint(place)
    parts, facts = load_checkpoint(found)
    assert facts.step == 3
    for part, tensors in create_parts(3).items():
        for name, value in tensors.items():
            assert torch.equal(parts[part][name], value)
            assert parts[part][name].dtype == value.dtype
    assert verify_checkpoint(found) == facts
    assert manager.list_steps() == [3]


def test_last_best_and_every_kth_are_kept(place):
    manager = CheckpointManager(place, keep=2, keep_every=4)
    for step in range(1, 11):
        save(manager, step, best=step == 3)
    assert manager.list_steps() == [3, 4, 8, 9, 10]
    assert [read_step(find_checkpoint(place))] == [10.0]


def test_the_loop_continues_while_a_checkpoint_is_written(tmp_path, gate):
    """`submit` returns with the copy; the next one waits for the write before it collects."""
    calls = []
    manager = CheckpointManager(tmp_path)

    def collect(step: int):
        def collected():
            calls.append((step, manager.list_steps()))
            return create_parts(step), get_facts(step)

        return collected

    manager.submit(1, collect(1), best=False)
    assert calls == [(1, [])]
    assert manager.list_steps() == []
    threading.Timer(0.05, gate.set).start()
    manager.submit(2, collect(2), best=False)
    assert calls[1] == (2, [1])
    manager.wait()
    assert manager.list_steps() == [1, 2]
    held_s = manager.pop_blocked_s()
    assert held_s > 0
    assert manager.pop_blocked_s() == 0


def test_a_checkpoint_appears_only_after_what_it_depends_on(tmp_path):
    manager, seen = CheckpointManager(tmp_path), []
    manager.submit(
        1,
        lambda: (create_parts(1), get_facts(1)),
        best=False,
        before=lambda: seen.append(manager.list_steps()),
    )
    manager.wait()
    assert seen == [[]]


def test_only_complete_checkpoints_are_announced(tmp_path):
    manager, seen = CheckpointManager(tmp_path), []
    manager.announce = lambda step: seen.append((step, read_step(find_checkpoint(tmp_path))))
    save(manager, 1)
    save(manager, 2)
    assert seen == [(1, 1), (2, 2)]
    manager.submit(3, lambda: ({"model": {"weight": "no tensor"}}, get_facts(3)), best=False)
    with pytest.raises(CheckpointError, match=r"could be written.*earlier ones remain: repair"):
        manager.wait()
    assert len(seen) == 2


def test_a_failed_first_checkpoint_is_never_announced(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.submit(1, lambda: ({"model": {"weight": "no tensor"}}, get_facts(1)), best=False)
    with pytest.raises(CheckpointError, match=r"there is no earlier one: repair .* start again$"):
        manager.wait()


def test_rewriting_a_step_only_marks_it_as_the_best(tmp_path, gate):
    manager = CheckpointManager(tmp_path)
    manager.submit(1, lambda: (create_parts(1), get_facts(1)), best=False)
    manager.submit(1, lambda: pytest.fail("collected twice"), best=True)
    gate.set()
    manager.wait()
    assert json.loads((tmp_path / BEST_FILE).read_text())["step"] == 1
    save(manager, 2)
    manager.submit(2, lambda: pytest.fail("collected twice"), best=True)
    assert json.loads((tmp_path / BEST_FILE).read_text())["step"] == 2


@pytest.mark.parametrize("how", ["submit", "check", "wait"])
def test_an_error_of_the_writing_thread_reaches_the_loop(tmp_path, monkeypatch, how):
    manager = CheckpointManager(tmp_path)
    save(manager, 1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "save_file", full)
    manager.submit(2, lambda: (create_parts(2), get_facts(2)), best=False)
    manager._thread.join()
    ways = {
        "submit": lambda: manager.submit(3, lambda: (create_parts(3), get_facts(3)), best=False),
        "check": manager.check,
        "wait": manager.wait,
    }
    with pytest.raises(CheckpointError, match=r"No space left on device; earlier ones remain"):
        ways[how]()
    assert manager.list_steps() == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001"]
    monkeypatch.undo()
    save(manager, 3)
    assert manager.list_steps() == [1, 3]


FAULTS = ("mkdir", "save_file", "fsync", "fadvise", "rename", "directory sync", "replace", "rmtree")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("call", range(4))
def test_every_failure_leaves_a_complete_checkpoint(tmp_path, monkeypatch, fault, call):
    """Each system call that a save makes fails once, at its n-th use: with one checkpoint kept."""
    manager = CheckpointManager(tmp_path, keep=1)
    save(manager, 1)
    target = {
        "mkdir": "pathlib.Path.mkdir",
        "save_file": "utils.checkpoint.files.save_file",
        "fsync": "utils.storage.local.os.fsync",
        "fadvise": "utils.storage.os.posix_fadvise",
        "rename": "pathlib.Path.rename",
        "directory sync": "utils.storage.local.sync_directory",
        "replace": "pathlib.Path.replace",
        "rmtree": "utils.storage.local.shutil.rmtree",
    }[fault]
    module, _, name = target.rpartition(".")
    owner = Path if module == "pathlib.Path" else _import(module)
    original, count = getattr(owner, name), [0]

    def fail_once(*args, **kwargs):
        count[0] += 1
        if count[0] == call + 1:
            raise PermissionError(13, "Permission denied")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, fail_once)
    failed = False
    try:
        save(manager, 2)
    except CheckpointError as error:
        assert "Permission denied" in str(error)
        failed = True
    monkeypatch.undo()
    assert failed == (count[0] > call)
    # Step 2 may have appeared before the fault; what the newest says of itself is true.
    newest = find_checkpoint(tmp_path)
    assert read_step(newest) == int(Path(newest).name[5:])
    for name in ("step_00000001", "step_00000002"):
        if (tmp_path / name).exists():
            verify_checkpoint(tmp_path / name)
    save(manager, 3)
    assert manager.list_steps() == [3]
    assert {p.name for p in tmp_path.iterdir()} == {"step_00000003"}


def _import(name: str) -> object:
    """`utils.storage.os` -> the module os."""
    return {"os": os, "shutil": shutil}.get(name.rpartition(".")[2]) or sys.modules[name]


def test_a_broken_checkpoint_of_a_step_is_replaced_by_a_new_one(tmp_path):
    save(CheckpointManager(tmp_path), 2)
    file = tmp_path / "step_00000002" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    save(CheckpointManager(tmp_path), 2)
    assert read_step(find_checkpoint(tmp_path)) == 2


def test_a_checkpoint_killed_between_two_renames_counts(tmp_path):
    for step in (1, 2):
        save(CheckpointManager(tmp_path), step)
    (tmp_path / "step_00000002").rename(tmp_path / get_old_name("step_00000002"))
    (tmp_path / get_old_name("notes")).mkdir()  # nobody's checkpoint
    assert read_step(find_checkpoint(tmp_path)) == 2


def test_a_rollback_moves_later_checkpoints_aside(place):
    manager = CheckpointManager(place, keep=9)
    for step in (1, 2, 3):
        save(manager, step)
    again = CheckpointManager(place, keep=2)
    again.mark_verified(1)
    again.hide_later_than(1)
    assert again.list_steps() == [1]
    again.submit(1, lambda: pytest.fail("written again"), best=False)
    save(again, 2)
    assert again.list_steps() == [1, 2]


def test_a_removed_directory_is_recreated(tmp_path):
    manager = CheckpointManager(tmp_path / "checkpoints")
    save(manager, 1)
    shutil.rmtree(tmp_path / "checkpoints")
    save(manager, 2)
    assert manager.list_steps() == [2]


@pytest.mark.parametrize("fault", ["damaged", "unreadable"])
def test_nothing_is_deleted_while_the_best_step_is_unknown(tmp_path, caplog, monkeypatch, fault):
    manager = CheckpointManager(tmp_path, keep=1)
    save(manager, 1, best=True)
    best = (tmp_path / BEST_FILE).read_text()
    with monkeypatch.context() as patch:
        if fault == "damaged":
            (tmp_path / BEST_FILE).write_text("{")
        else:
            patch.setattr(type(manager.folder), "read_text", _refuse)
            patch.setattr("utils.checkpoint.manager.write_checkpoint", _write_plainly)
        save(manager, 3)
    assert manager.list_steps() == [1, 3]
    assert "the best one is unknown" in caplog.text
    (tmp_path / BEST_FILE).write_text(best)
    save(manager, 4)
    assert manager.list_steps() == [1, 4]


def _refuse(folder: object, name: str) -> str:
    raise OSError(5, "Input/output error")


def _write_plainly(folder, parts, facts) -> None:
    """A checkpoint as it lies on a disk, written without reading."""
    folder.path.mkdir()


def test_a_rollback_below_the_best_step_moves_its_record_aside(tmp_path):
    manager = CheckpointManager(tmp_path, keep=3)
    save(manager, 1)
    save(manager, 2, best=True)
    manager.hide_later_than(1)
    assert not (tmp_path / BEST_FILE).exists()
    save(manager, 3, best=True)
    manager.hide_later_than(3)
    assert json.loads((tmp_path / BEST_FILE).read_text())["step"] == 3


_SAVE_AS_NOBODY = """
import os, sys
sys.path.insert(0, os.getcwd())
from tests.utils.test_checkpoint_manager import CheckpointError, CheckpointManager, save
os.setgid(65534), os.setuid(65534)
try:
    save(CheckpointManager(sys.argv[1]), 2)
except CheckpointError as error:
    print(error)
    sys.exit(7)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_lost_permission_is_reported_and_harms_nothing(tmp_path):
    """The real thing: a user who may not write there."""
    save(CheckpointManager(tmp_path / "checkpoints"), 1)
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)
    command = [sys.executable, "-c", _SAVE_AS_NOBODY, str(tmp_path / "checkpoints")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert "Permission denied; earlier ones remain" in done.stdout
    assert read_step(find_checkpoint(tmp_path / "checkpoints")) == 1


_SAVE_ON_A_FULL_DISK = """
import os, resource, sys
sys.path.insert(0, os.getcwd())
import torch
from utils.checkpoint.files import CheckpointError
from utils.checkpoint.manager import CheckpointManager
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
manager = CheckpointManager(sys.argv[1])
parts = {"model": {"weight": torch.zeros(100, 100)}}
try:
    manager.save(2, parts, {"step": 2, "optimizer": {}}, best=True)
except CheckpointError as error:
    print(error)
    sys.exit(7)
"""


def test_a_full_disk_is_reported_and_harms_nothing(tmp_path):
    """A real limit of the kernel in place of a full disk: writes fail half way."""
    save(CheckpointManager(tmp_path), 1)
    command = [sys.executable, "-c", _SAVE_ON_A_FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 7, done.stdout + done.stderr
    assert "earlier ones remain" in done.stdout
    assert read_step(find_checkpoint(tmp_path)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001"}


def test_a_path_that_cannot_hold_a_folder_is_no_checkpoint(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="no checkpoint could be written"):
        save(CheckpointManager(tmp_path / "checkpoints"), 1)
    with pytest.raises(UserError, match="no whole checkpoint"):
        find_checkpoint(tmp_path)
