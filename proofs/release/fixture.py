"""Files of a released version that every later one opens: a store of two runs, and a cache.

They are made by the version itself, before its release, and stay in the tests for ever.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import main
from store.quality.validation import check_run
from store.query.record import RunRecord
from tools.cache.__main__ import main as run_cache
from utils.errors import UserError
from utils.storage.places import open_folder

# A store whose experiments are the released versions.
STORE = Path("tests/fixtures/releases")
STEPS = 4
CACHE = "cache"
_ARGS = {"patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}
_TERMS = [
    {"name": "kd"},
    {"name": "fitnet", "layers": {"fc_norm": "fc_norm"}, "weight": 0.1, "weight_end": 0.0},
]
COMMON = (
    "--data.source=synthetic",
    "--data.name=image_size=8,channels=1,num_classes=10,num_examples=96",
    "--data.train_pp=value_range(-1, 1)",
    "--data.eval_pp=value_range(-1, 1)",
    "--data.global_batch_size=16",
    "--model=vit_tiny_patch16_224",
    "--model.image_size=8",
    "--optim.warmup_epochs=0",
    "--train.log_every_steps=1",
    "--train.keep_checkpoints=1",
    "--train.epochs=1",
    f"--train.steps={STEPS}",
    "--run.tensorboard=false",
    "--runtime.device=cpu",
)
RUNS = ("plain", "distilled")


def get_flags(name: str, teacher: str) -> list[str]:
    """Return the flags of a run of the fixture, or of its cache; the plain run is the teacher."""
    taught = (f"--teacher_path={teacher}", "--distill.allow_weak_teacher=true")
    narrow = {**_ARGS, "embed_dim": 12}
    flags = {
        "plain": ("--train.ema=true", "--train.mixup_alpha=0.8", _format("model.args", _ARGS)),
        "distilled": (
            *taught,
            "--distill.loss=",
            _format("distill.losses", _TERMS),
            "--train.accumulate_steps=2",
            _format("model.args", narrow),
        ),
        CACHE: (*taught, "--distill.loss=kd", _format("model.args", _ARGS)),
    }
    return [*COMMON, *flags[name]]


def make_fixture(root: Path, version: str) -> Path:
    """Train the runs of a version's fixture and store the teacher's outputs; return its folder.

    Raises:
      UserError: there is one already.
    """
    folder = STORE / version
    if (root / folder).exists():
        raise UserError(
            f"{str(folder)!r} exists; files of a released version stay as they are, so remove it "
            "only if the version was never released"
        )
    teacher = f"{folder}/{RUNS[0]}"
    # Elsewhere, so that the runs are of a clean tree, and under the names that they will have.
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        for name in RUNS:
            where = (f"--run.output_dir={STORE}", f"--run.experiment={version}")
            _check_code(main.main([*get_flags(name, teacher), *where, f"--run.run_id={name}"]))
        Path("empty.yaml").write_text("{}\n", encoding="utf-8")
        words = ("write", "--config=empty.yaml", f"--out={folder}/{CACHE}")
        _check_code(run_cache([*words, *get_flags(CACHE, teacher)]))
        for lock in folder.rglob("run.lock"):
            lock.unlink()
        shutil.copytree(folder, root / folder)
    return folder


def check_fixture(folder: Path) -> str:
    """Describe what a version's fixture lacks; empty if it is whole."""
    way_out = f"python -m proofs.release fixture {folder.name}"
    missing = [name for name in (*RUNS, CACHE) if not (folder / name).is_dir()]
    if missing:
        return f"{folder.name} has no {', '.join(missing)} in {STORE}: {way_out}"
    folders = [open_folder(folder / name) for name in RUNS]
    faults = [
        f"{place.parent.name}/{place.name}/{fault.file} {fault.text}"
        for place in folders
        for fault in check_run(place, is_thorough=True)
    ]
    unfinished = [
        f"{place} is not complete" for place in folders if not RunRecord(place).is_complete
    ]
    return "; ".join([*unfinished, *faults])


def _format(key: str, value: object) -> str:
    return f"--{key}={json.dumps(value)}"


def _check_code(code: int) -> None:
    if code:
        raise UserError(f"a run of the fixture ended with exit code {code}; see its lines above")
