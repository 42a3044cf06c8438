"""Checkpoints: complete or absent; broken ones are named, wrong ones are refused."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from optim_factory import PROVEN
from tests.support.tiny_parts import (
    RUNTIMES,
    TinyConvNet,
    TinyTask,
    create_batch,
    create_cpu_runtime,
    create_plan,
    create_state,
    create_vit,
)
from utils.checkpoint.files import (
    CheckpointError,
    CheckpointFacts,
    inspect_checkpoint,
    load_checkpoint,
)
from utils.checkpoint.find import find_checkpoint, load_newest
from utils.checkpoint.manager import BEST_FILE, CheckpointManager
from utils.checkpoint.state import collect_state, restore_state
from utils.config.sections import OptimSection
from utils.errors import UserError

ADAMW = OptimSection(lr=1e-2, warmup_steps=2)


def train(runtime, state, first: int, last: int) -> None:
    from engine import train_step
    from utils.runtime.step_numbers import StepNumbers

    plan = create_plan(8, ADAMW, ema_decay=0.9)
    for step in range(first, last):
        with runtime.step(0, step):
            values = plan.schedule.values(step, state.optimizer)
            rates = runtime.updates.set_hyperparameters(state.optimizer, *values)
            batch = create_batch(seed=step).map(runtime.tensor_to_device)
            train_step(state, batch, TinyTask(), runtime, plan, StepNumbers(rates))
        state.step = step + 1


def create_trained(runtime, model=None, name: str = "adamw", steps: int = 2):
    torch.manual_seed(1)
    section = ADAMW.model_copy(update={"name": name})
    state = create_state(runtime, model or TinyConvNet(), section, ema=True)
    train(runtime, state, 0, steps)
    return state


def save(folder: Path, state, runtime, *, keep: int = 2, best: bool = False) -> Path:
    tensors, facts = collect_state(state, runtime.fetch_all)
    return CheckpointManager(folder, keep).save(state.step, tensors, facts.model_dump(), best=best)


@pytest.fixture
def saved(tmp_path):
    """A run's directory with checkpoints of steps 1, 2 and 3."""
    runtime = create_cpu_runtime()
    state = create_trained(runtime, steps=0)
    for step in range(3):
        train(runtime, state, step, step + 1)
        save(tmp_path / "checkpoints", state, runtime, keep=5)
    return tmp_path


@pytest.mark.parametrize(
    ("device", "name"),
    [*(("cpu", name) for name in PROVEN), pytest.param("xla", "adamw", marks=pytest.mark.xla)],
)
def test_a_restored_state_continues_bit_for_bit(tmp_path, device, name):
    runtime = RUNTIMES[device]()
    state = create_trained(runtime, name=name)
    state.best_score = 12.5
    path = save(tmp_path, state, runtime)
    torch.manual_seed(99)
    section = ADAMW.model_copy(update={"name": name})
    other = create_state(runtime, TinyConvNet(), section, ema=True)
    restore_state(other, *load_checkpoint(path), path)
    assert (other.step, other.best_score) == (2, 12.5)
    for each in (state, other):
        train(runtime, each, 2, 4)
    for module in ("model", "ema"):
        found = getattr(other, module).state_dict()
        for key, value in getattr(state, module).state_dict().items():
            assert torch.equal(value.cpu(), found[key].cpu()), f"{module} {key}"


def test_a_state_is_restored_with_all_its_counters(tmp_path):
    """Without run.json, as on a new machine, the checkpoint alone tells it."""
    runtime = create_cpu_runtime()
    state = create_trained(runtime)
    state.skipped_steps, state.input_processes, state.best_score = (3, 7), 4, 12.5
    folder = save(tmp_path, state, runtime)
    other = create_trained(runtime, steps=0)
    parts, facts = load_checkpoint(folder)
    restore_state(other, parts, facts, folder)
    assert (other.step, other.skipped_steps) == (2, (3, 7))
    assert (other.input_processes, other.best_score) == (4, 12.5)


@pytest.mark.xla
@pytest.mark.parametrize(("origin", "target"), [("xla", "cpu"), ("cpu", "xla")])
def test_a_checkpoint_of_one_device_is_restored_bit_for_bit_on_another(tmp_path, origin, target):
    runtime, other = RUNTIMES[origin](), RUNTIMES[target]()
    state = create_trained(runtime)
    path = save(tmp_path, state, runtime)
    restored = create_trained(other, steps=0)
    restore_state(restored, *load_checkpoint(path), path)
    found, _ = collect_state(restored, other.fetch_all)
    written, _ = load_checkpoint(path)
    assert found.keys() == written.keys()
    for part, tensors in written.items():
        for name, value in tensors.items():
            assert torch.equal(found[part][name], value), f"{part} {name}"
    train(other, restored, 2, 3)


def test_a_checkpoint_describes_every_tensor(saved):
    path = saved / "checkpoints" / "step_00000003"
    parts, facts = load_checkpoint(path)
    assert facts.step == 3
    assert set(parts) == {"model", "ema", "optimizer"}
    table = inspect_checkpoint(path).tensors
    assert table["model/head.weight"][:2] == ([10, 4], "float32")
    assert set(table) == {f"{part}/{name}" for part, named in parts.items() for name in named}
    written = json.loads((path / "state.json").read_text())
    assert CheckpointFacts.model_validate(written) == facts
    of_state = [name for name in facts.model_dump() if name in written][:7]
    assert list(written) == ["schema_version", *of_state, "parts", "files", "tensors"]


def test_all_files_of_a_checkpoint_have_the_mode_of_new_files(saved):
    (saved / "new").touch()
    usual = (saved / "new").stat().st_mode
    files = [path for path in (saved / "checkpoints").rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in files)
    assert {path.stat().st_mode for path in files} == {usual}


def test_the_newest_checkpoint_of_a_run_is_found(saved):
    assert find_checkpoint(saved).name == "step_00000003"
    assert find_checkpoint(saved / "checkpoints").name == "step_00000003"
    exact = saved / "checkpoints" / "step_00000001"
    assert find_checkpoint(exact) == exact


def cut_tensors(path: Path) -> str:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    return r"model.safetensors is incomplete: \d+ of \d+ bytes"


def flip_one_bit(path: Path) -> str:
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))
    return r"tensor model/[\w.]+ fails its checksum"


def remove_tensors(path: Path) -> str:
    (path / "optimizer.safetensors").unlink()
    return r"optimizer.safetensors"


def cut_table(path: Path) -> str:
    file = path / "state.json"
    file.write_text(file.read_text()[:-40])
    return "step_00000003"


def remove_table(path: Path) -> str:
    (path / "state.json").unlink()
    return r"state.json"


def drop_a_tensor_from_the_table(path: Path) -> str:
    facts = json.loads((path / "state.json").read_text())
    facts["tensors"].pop("model/head.bias")
    (path / "state.json").write_text(json.dumps(facts))
    return r"state.json fails its checksum"


def drop_a_tensor_and_sign_the_table(path: Path) -> str:
    drop_a_tensor_from_the_table(path)
    digest = hashlib.sha256((path / "state.json").read_bytes()).hexdigest()
    (path / "COMMITTED").write_text(json.dumps({"state_sha256": digest}))
    return "tensors differ from the table"


def remove_marker(path: Path) -> str:
    (path / "COMMITTED").unlink()
    return "COMMITTED: No such file"


def spoil_marker(path: Path) -> str:
    (path / "COMMITTED").write_text("[]")
    return "COMMITTED"


def age_the_format(path: Path) -> str:
    facts = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**facts, "schema_version": 99}))
    return "schema_version 99, this program reads 1 and 2"


def empty_the_table(path: Path) -> str:
    (path / "state.json").write_text('{"schema_version": 2, "tensors": [], "parts": 3}')
    return "lacks a field or has a wrong type"


DAMAGES = (
    cut_tensors,
    flip_one_bit,
    remove_tensors,
    cut_table,
    remove_table,
    remove_marker,
    spoil_marker,
    drop_a_tensor_from_the_table,
    drop_a_tensor_and_sign_the_table,
    age_the_format,
    empty_the_table,
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_checkpoint_is_named_and_skipped(saved, damage, caplog):
    path = saved / "checkpoints" / "step_00000003"
    reason = damage(path)
    with pytest.raises(CheckpointError, match=reason) as caught:
        load_checkpoint(path)
    assert "step_00000003" in str(caught.value)
    assert find_checkpoint(saved).name == "step_00000002"
    assert "skipping a broken checkpoint" in caplog.text
    assert "step_00000003" in caplog.text


def test_a_run_without_a_complete_checkpoint_is_refused(saved):
    for path in (saved / "checkpoints").glob("step_*"):
        flip_one_bit(path)
    with pytest.raises(UserError, match=r"run.resume .*no whole checkpoint"):
        find_checkpoint(saved)


def test_an_interrupted_write_is_no_checkpoint(saved):
    folder = saved / "checkpoints"
    shutil.copytree(folder / "step_00000003", folder / ".writing_00000004")
    (folder / "step_9").mkdir()
    assert CheckpointManager(folder).list_steps() == [1, 2, 3]
    assert find_checkpoint(saved).name == "step_00000003"


def test_old_checkpoints_are_deleted_and_the_best_is_kept(tmp_path):
    runtime = create_cpu_runtime()
    state = create_trained(runtime, steps=0)
    for step in range(5):
        train(runtime, state, step, step + 1)
        save(tmp_path, state, runtime, keep=2, best=step == 1)
    assert CheckpointManager(tmp_path).list_steps() == [2, 4, 5]
    assert json.loads((tmp_path / BEST_FILE).read_text())["step"] == 2
    assert not list(tmp_path.glob(".writing*"))


def test_a_checkpoint_of_another_model_is_refused_with_names(saved, caplog):
    path = find_checkpoint(saved)
    state = create_trained(create_cpu_runtime(), create_vit(), steps=0)
    before = {k: v.clone() for k, v in state.model.state_dict().items()}
    with pytest.raises(UserError) as caught:
        restore_state(state, *load_checkpoint(path), path)
    text = str(caught.value)
    assert "does not fit this run's model and ema and optimizer: model: " in text
    assert "missing: cls_token" in text
    assert re.search(r"unexpected: (conv|norm)\.", text)
    assert "\n" not in text and not caplog.records
    for key, value in state.model.state_dict().items():
        assert torch.equal(value, before[key])


def test_a_checkpoint_of_another_width_is_refused_with_both_shapes(saved):
    path = find_checkpoint(saved)
    state = create_trained(create_cpu_runtime(), TinyConvNet(6), steps=0)
    with pytest.raises(UserError) as caught:
        restore_state(state, *load_checkpoint(path), path)
    text = str(caught.value)
    assert "conv.weight (4, 1, 3, 3) float32 instead of (6, 1, 3, 3) float32" in text
    assert "head.weight (10, 4) float32 instead of (10, 6) float32" in text


def test_a_checkpoint_of_other_types_is_refused_with_both(saved):
    path = find_checkpoint(saved)
    state = create_trained(create_cpu_runtime(), TinyConvNet().bfloat16(), steps=0)
    with pytest.raises(
        UserError, match=r"conv.weight \(4, 1, 3, 3\) float32 instead of .* bfloat16"
    ):
        restore_state(state, *load_checkpoint(path), path)


def test_a_checkpoint_of_another_optimizer_is_refused(saved):
    path = find_checkpoint(saved)
    state = create_trained(create_cpu_runtime(), name="sgd", steps=0)
    with pytest.raises(UserError, match="does not fit this run's optimizer"):
        restore_state(state, *load_checkpoint(path), path)


def test_a_checkpoint_with_an_average_is_refused_by_a_run_without(saved):
    path, runtime = find_checkpoint(saved), create_cpu_runtime()
    state = create_state(runtime, TinyConvNet(), ADAMW)
    with pytest.raises(UserError, match="does not fit this run's ema"):
        restore_state(state, *load_checkpoint(path), path)


def test_a_checkpoint_of_the_first_format_is_still_read(saved):
    path = saved / "checkpoints" / "step_00000003"
    parts, facts = load_checkpoint(path)
    late = ("schema_version", "files", "skipped_steps")
    old = {key: value for key, value in facts.model_dump().items() if key not in late}
    (path / "state.json").write_text(json.dumps({**old, "format_version": 1}))
    (path / "COMMITTED").unlink()
    found, _ = load_checkpoint(find_checkpoint(saved))
    assert find_checkpoint(saved) == path
    for part, tensors in parts.items():
        assert all(torch.equal(value, found[part][name]) for name, value in tensors.items())


def test_a_broken_tensor_falls_back_to_an_older_checkpoint(saved, caplog):
    """Resuming reads each checkpoint once: the quick look takes the newest, the load decides."""
    newest = saved / "checkpoints" / "step_00000003"
    flip_one_bit(newest)
    quick = find_checkpoint(saved, verify=False)
    assert quick == newest
    place, parts, facts = load_newest(quick)
    assert (Path(place).name, facts.step) == ("step_00000002", 2)
    assert "step_00000003: tensor model/" in caplog.text
    assert set(parts) == {"model", "ema", "optimizer"}
    for path in newest.parent.glob("step_*"):
        remove_table(path)
    with pytest.raises(CheckpointError, match="step_00000003"):
        load_newest(quick)
