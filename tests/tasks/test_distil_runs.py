"""Complete label-free runs, live and with stored features: killed, resumed, and exported."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import main
from models.trained import open_trained
from store.record.history import keep_deterministic, read_metrics
from store.record.runs import Run
from tests.support.child_runs import ROOT, get_command, get_environment, run_main
from tests.support.feature_teachers import write_feature_teacher
from tests.support.photographs import write_digits
from tests.support.tiny_parts import DEVICE_CASES
from tools.cache.__main__ import main as run_cache
from tools.export.__main__ import main as export
from tools.predict.__main__ import main as predict

# DINOv2's ViT-S/14 as it is but for its images, and a second teacher of another width and grid.
REAL_TEACHERS = (
    ("vit_small_patch14_dinov2", {"img_size": 28, "in_chans": 1, "init_values": 1.0}),
    ("vit_base_patch16_siglip_224", {"img_size": 48, "in_chans": 1, "depth": 2}),
)
TINY_TEACHERS = (
    (
        "vit_small_patch14_dinov2",
        {
            "img_size": 8,
            "patch_size": 4,
            "in_chans": 1,
            "embed_dim": 24,
            "depth": 1,
            "num_heads": 2,
            "init_values": 1.0,
        },
    ),
    (
        "vit_tiny_patch16_224",
        {
            "img_size": 12,
            "patch_size": 4,
            "in_chans": 1,
            "embed_dim": 40,
            "depth": 1,
            "num_heads": 2,
        },
    ),
)
TERMS = (
    {"name": "cosine", "warmup_epochs": 1},
    {"name": "smooth_l1", "of": "patches", "teacher": 0, "weight": 0.5},
    {"name": "mse", "of": "patches", "teacher": 1, "weight": 0.25},
    {"name": "queue_kl", "teacher": 0, "args": {"size": 48}},
)
REAL_IMAGES = (
    "--data.train_pp=decode(channels=1)|resize(28)|value_range(-1, 1)",
    "--data.eval_pp=decode(channels=1)|resize(28)|value_range(-1, 1)",
    "--model.image_size=28",
    "--train.epochs=4",
    '--model.args={"patch_size": 7, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}',
)


def write_teachers(folder: Path, teachers: tuple, second_size: int) -> str:
    """Two of them; gives the flag that names both."""
    sections = [
        write_feature_teacher(folder / str(number), name, args, seed=number)
        for number, (name, args) in enumerate(teachers)
    ]
    sections[1] |= {"size": second_size, "weight": 2.0}
    return f"--distill.teachers={json.dumps(sections)}"


def create_flags(digits_root: Path, folder: Path, teachers: str, *flags: str) -> list[str]:
    """4 steps an epoch on the digits, as many epochs as flags say."""
    return [
        "--config=configs/kd/digits_labelfree.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={folder}",
        "--run.experiment=kills",
        "--run.tensorboard=false",
        "--data.train_split=train[:128]",
        "--data.eval_split=validation[:40]",
        "--data.global_batch_size=32",
        "--data.eval_batch_size=40",
        "--optim.warmup_epochs=0",
        "--train.epochs=2",
        "--train.log_every_steps=1",
        "--train.eval_every_epochs=1",
        "--train.checkpoint_every_steps=3",
        "--train.keep_checkpoints=99",
        "--distill.projector=mlp",
        "--mixup=0.2",
        "--model_ema",
        f"--distill.losses={json.dumps(TERMS)}",
        teachers,
        *flags,
    ]


def read_tensors(run: Path) -> dict[str, torch.Tensor]:
    """All that the last checkpoint and the export hold."""
    *_, last = sorted((run / "checkpoints").glob("step_*"))
    files = [*sorted(last.glob("*.safetensors")), run / "student.safetensors"]
    return {f"{one.name}/{k}": v for one in files for k, v in load_file(one).items()}


def require_same(first: Path, second: Path) -> None:
    """Every tensor and every number of two runs, bit for bit."""
    then, now = read_tensors(first), read_tensors(second)
    assert then.keys() == now.keys() and any("projectors" in name for name in then)
    assert [name for name in then if not torch.equal(then[name], now[name])] == []
    lines = [list(map(keep_deterministic, read_metrics(one))) for one in (first, second)]
    assert lines[0] == lines[1]


def kill_at_second_checkpoint(command: list[str], run: Path) -> None:
    """SIGKILL once the second checkpoint lies there, whatever is being written then."""
    child = subprocess.Popen(command, cwd=ROOT, env=get_environment(), stderr=subprocess.DEVNULL)
    while child.poll() is None and len(list(run.glob("checkpoints/step_*/COMMITTED"))) < 2:
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


@pytest.fixture(scope="module")
def stored_run(digits_root, tmp_path_factory) -> tuple[Path, list[str]]:
    """A whole run on the CPU that a cache taught, and its flags."""
    folder = tmp_path_factory.mktemp("stored")
    flags = create_flags(digits_root, folder, write_teachers(folder, TINY_TEACHERS, 12))
    assert run_cache(["write", *flags, "--epochs=2", "--out", str(folder / "cache")]) == 0
    flags.append(f"--distill.teacher_cache={folder / 'cache'}")
    assert main.main([*flags, "--run.run_id=whole"]) == 0
    return folder / "kills" / "whole", flags


def test_a_run_on_stored_features_resumes_bit_for_bit(stored_run):
    """On the CPU, from a checkpoint in the middle; kills are the slow test's."""
    whole, flags = stored_run
    part = Path(shutil.copytree(whole, whole.with_name("part")))
    for later in (6, 8):
        shutil.rmtree(part / "checkpoints" / f"step_{later:08d}")
    (part / "student.safetensors").unlink()
    assert main.main([*flags, "--run.run_id=part", "--resume=auto"]) == 0
    require_same(whole, part)


def test_programs_load_the_backbone_of_a_finished_run(stored_run, tmp_path, capsys):
    """Its features as a table, and in the hands of timm, which builds it from its own file."""
    images = write_digits(tmp_path / "photos")
    weights, out = str(stored_run[0]), tmp_path / "out"
    table = tmp_path / "features.json"
    ask = [weights, str(tmp_path / "photos"), "--device=cpu", f"--out={table}"]
    assert predict(ask) == 2
    assert "holds a model without a classifier" in capsys.readouterr().err
    assert predict([*ask, "--embed"]) == 0
    flags = ["--images", str(tmp_path / "photos"), "--out", str(out)]
    assert export([weights, *flags, "--to", "timm", "onnx", "torch_export"]) == 0
    report = json.loads((out / "export.json").read_text())
    assert (report["output"], report["classes"]) == ("features", 0)
    assert "top-1" not in capsys.readouterr().out
    model = timm.create_model(f"local-dir:{out / 'timm'}", pretrained=True).eval()
    assert model.num_classes == 0
    saved = load_file(stored_run[0] / "student.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    with torch.no_grad():
        wanted = model((torch.from_numpy(images)[:, None].float() - 127.5) / 127.5)
    rows = json.loads(table.read_text())
    found = torch.tensor([row["features"] for row in rows])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert all(row["best"] == [] for row in rows)
    again = open_trained(f"local-dir:{out / 'timm'}", "WEIGHTS")
    assert again.num_classes == 0 and again.name == "vit_tiny_patch16_224"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICE_CASES)
def test_killed_runs_of_real_widths_resume_bit_for_bit(digits_root, tmp_path, device):
    """DINOv2's ViT-S and a ViT-B, live and stored: one graph, the same tensors and numbers."""
    teachers = write_teachers(tmp_path, REAL_TEACHERS, 48)
    flags = create_flags(
        digits_root, tmp_path, teachers, *REAL_IMAGES, f"--runtime.device={device}"
    )
    assert run_cache(["write", *flags, "--epochs=4", "--out", str(tmp_path / "cache")]) == 0
    stored = f"--distill.teacher_cache={tmp_path / 'cache'}"
    for kind, more in (("live", []), ("stored", [stored])):
        whole, killed = (tmp_path / "kills" / f"{kind}_{name}" for name in ("whole", "killed"))
        done = run_main([*flags, *more, f"--run.run_id={whole.name}"])
        assert done.returncode == 0, done.stderr[-3000:]
        again = [*flags, *more, f"--run.run_id={killed.name}"]
        kill_at_second_checkpoint(get_command(again), killed)
        before = len(read_metrics(killed))
        assert 0 < before < len(read_metrics(whole))
        done = run_main([*again, "--resume=auto"])
        assert done.returncode == 0 and "resumed from" in done.stderr, done.stderr[-3000:]
        require_same(whole, killed)
        for run in (whole, killed):
            lines = [line for line in read_metrics(run) if line["kind"] == "train"]
            graphs = [line["graphs_train"] for line in lines if line["attempt"] == 1]
            assert set(graphs) == {int(device == "xla")}
            assert lines[-1]["graphs_train"] == (1 + (run == killed)) * (device == "xla")
            assert [one["features"] for one in Run(run).read()["teachers"]] == [384, 768]
