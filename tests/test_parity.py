"""The same seed and global batch give the same run on every runtime and number of devices."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from models.factory import export_model
from store.record.history import read_metrics
from store.record.hits import HITS_FILE, Hits, parse_hits
from tests.support.child_runs import ROOT, get_command, get_environment
from tests.support.tiny_parts import CLASSES, SIDE, SYNTHETIC, VIT_ARGS, create_argv, create_vit
from utils.config.devices import DEVICES

STEPS = 20
PRIVATE, IMPORT = "private", "--run.imports=[tests.support.private_device]"
# 97 evaluation examples: no number of ranks or devices divides them.
EXAMPLES = 97
NORM_NET = "--model=resnet18"
VIT_FLAGS = [flag for flag in SYNTHETIC if flag.startswith(("--model.image_size", "--model.args"))]


@dataclass(frozen=True)
class Form:
    """One way to run: device, flags, virtual devices of the mesh.

    Args:
      optimised: by XLA's back end, as users have it and the other forms for speed do not.
    """

    device: str
    flags: tuple[str, ...] = ()
    devices: int | None = None
    optimised: bool = False


def _mesh(devices: int, fsdp: int = 1) -> Form:
    return Form("xla", ("--runtime.parallel=spmd", f"--runtime.mesh_fsdp={fsdp}"), devices)


def _ranks(device: str, count: int, *flags: str) -> Form:
    return Form(device, (f"--runtime.num_processes={count}", *flags))


FORMS = {
    "cpu x2": _ranks("cpu", 2),
    "cpu x4": _ranks("cpu", 4),
    "cpu x4 overlapped": _ranks("cpu", 4, "--runtime.overlap=true"),
    "cpu compiled": Form("cpu", ("--runtime.compile=true", "--runtime.channels_last=true")),
    "xla x1": Form("xla", optimised=True),
    "xla x2": _ranks("xla", 2),
    "xla x4": _ranks("xla", 4),
    "mesh 1": _mesh(1),
    "mesh 2": _mesh(2),
    "mesh 4": _mesh(4),
    "mesh 8": _mesh(8),
    "fsdp 4": _mesh(4, fsdp=4),
    "fsdp 2x2": _mesh(4, fsdp=2),
    "tpu x1": Form("tpu"),
    "tpu x2": _ranks("tpu", 2),
    "tpu x2 overlapped": _ranks("tpu", 2, "--runtime.overlap=true"),
    "tpu x2 fsdp": _ranks("tpu", 2, "--runtime.parallel=fsdp"),
    "tpu compiled": Form("tpu", ("--runtime.compile=true",)),
    # A device that the project does not know: PrivateUse1, by a module of its owner.
    "private x1": Form(PRIVATE, (IMPORT,)),
    "private x2": _ranks(PRIVATE, 2, IMPORT),
    "private compiled": Form(PRIVATE, (IMPORT, "--runtime.compile=true")),
}


QUICK = ("mesh 4", "tpu x1", "tpu x2", "tpu compiled", "private x1")


def list_marks(name: str, quick: Sequence[str] = ()) -> list[pytest.MarkDecorator]:
    """The marks of a test of one form: of the package that it needs, and slow unless quick."""
    needed = {"xla": [pytest.mark.xla], "tpu": [pytest.mark.tpu]}.get(FORMS[name].device, [])
    return needed if name in quick else [*needed, pytest.mark.slow]


CASES = [pytest.param(name, marks=list_marks(name, QUICK), id=name) for name in FORMS]
# BatchNorm over all ranks; FSDP and DDP do nothing else to it than to a ViT.
NORM_FORMS = ("cpu x2", "cpu x4", "xla x1", "xla x2", "xla x4", "mesh 2", "mesh 4", "mesh 8")
NORM_FORMS += ("private x2",)
NORM_CASES = [pytest.param(name, marks=list_marks(name), id=name) for name in NORM_FORMS]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """An export of a wider ViT, untrained."""
    folder = tmp_path_factory.mktemp("teacher")
    args = {**VIT_ARGS, "embed_dim": 32, "img_size": SIDE}
    model = create_vit(seed=7, embed_dim=32)
    facts = {"model": "vit_tiny_patch16_224", "args": args, "num_classes": CLASSES}
    return export_model(model.state_dict(), facts, folder)


@pytest.fixture(scope="module")
def vit_flags(teacher) -> tuple[str, ...]:
    """A distillation with all that could depend on how examples are dealt out."""
    return (
        "--kd=kd",
        f"--teacher_path={teacher.parent}",
        "--distill.allow_weak_teacher",
        "--train.mixup_alpha=0.8",
        "--train.cutmix_alpha=1.0",
        "--train.ema",
        "--optim.max_grad_norm=1.0",
        "--train.accumulate_steps=2",
    )


@pytest.fixture(scope="module")
def norm_flags() -> tuple[str, ...]:
    """A convnet with BatchNorm, synchronised, without accumulation."""
    return (
        NORM_NET,
        '--model.args={"in_chans": 1, "layers": [1, 1, 1, 1], "channels": [4, 8, 8, 8]}',
        "--train.sync_batchnorm",
        "--train.mixup_alpha=0.8",
        "--train.cutmix_alpha=1.0",
        "--train.ema",
        "--optim.max_grad_norm=1.0",
        "--runtime.graph_budget=100",
    )


def run_form(folder: Path, form: Form, flags: tuple[str, ...]) -> list[dict]:
    """The metrics of a run in processes of its own."""
    own = (
        f"--data.name=image_size={SIDE},channels=1,num_classes=10,num_examples={EXAMPLES}",
        "--data.global_batch_size=32",
        f"--train.steps={STEPS}",
        "--run.run_id=form",
        "--train.eval_every_epochs=3",
        "--runtime.num_threads=1",
        "--runtime.graph_budget=12",
    )
    argv = create_argv(folder, *own, *flags, *form.flags, device=form.device)
    if NORM_NET in flags:
        argv = [flag for flag in argv if flag not in VIT_FLAGS]
    run_child(argv, form)
    return read_metrics(folder / "tiny" / "form")


def run_child(argv: list[str], form: Form) -> None:
    """A run of any task in processes of its own."""
    environment = get_environment()
    if form.devices:
        environment["CPU_NUM_DEVICES"] = str(form.devices)
    if form.optimised:
        environment["XLA_FLAGS"] = ""
    done = subprocess.run(
        get_command(argv), cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def vit_folder(tmp_path_factory, vit_flags) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    run_form(folder, Form("cpu"), vit_flags)
    return folder


@pytest.fixture(scope="module")
def vit_reference(vit_folder) -> list[dict]:
    return read_metrics(vit_folder / "tiny" / "form")


@pytest.fixture(scope="module")
def norm_reference(tmp_path_factory, norm_flags) -> list[dict]:
    return run_form(tmp_path_factory.mktemp("reference"), Form("cpu"), norm_flags)


def compare(
    found: list[dict],
    wanted: list[dict],
    *,
    rel: float = 1e-4,
    eval_rel: float = 1e-4,
    score: str = "loss",
) -> None:
    """Compare losses of every step and evaluations of two runs.

    Args:
      rel: largest relative difference of a loss; of a gradient's norm ten times as much.
      score: the metric of an evaluation that is compared.
    """
    assert [line["step"] for line in found] == [line["step"] for line in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        if theirs["kind"] == "train":
            loss = pytest.approx(theirs["loss/total"], rel=rel)
            assert mine["loss/total"] == loss, theirs["step"]
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=10 * rel)
            assert mine["host_reads"] == 0
        else:
            assert mine["examples"] == EXAMPLES
            assert mine[score] == pytest.approx(theirs[score], rel=eval_rel)


def get_bounds(name: str) -> dict[str, float]:
    """Return the bounds of `compare` for a form."""
    return {"rel": 1e-5, "eval_rel": 1e-5} if FORMS[name].device == "tpu" else {}


def read_hits(folder: Path) -> dict[str, Hits]:
    """Return which examples a run has classified correctly."""
    return parse_hits((folder / "tiny" / "form" / HITS_FILE).read_bytes())


def check_hits(found: dict[str, Hits], lines: list[dict]) -> None:
    """Check that the hits add up to the counts in the lines of their steps."""
    top1 = {line["step"]: line["top1"] for line in lines if line["kind"] == "eval"}
    assert found["last"].step == max(top1)
    for one in found.values():
        assert one.examples == EXAMPLES
        assert 100.0 * one.count() * (1.0 / EXAMPLES) == top1[one.step]
    assert found["best"].count() == max(round(value * EXAMPLES / 100) for value in top1.values())


def test_every_device_has_a_parity_form():
    """GPUs have theirs in tests/device, where there is one."""
    assert {form.device for form in FORMS.values()} | {"cuda"} == {PRIVATE, *DEVICES}


@pytest.mark.parametrize("name", CASES)
def test_a_vit_distils_alike(name, vit_flags, vit_folder, vit_reference, tmp_path):
    found = run_form(tmp_path, FORMS[name], vit_flags)
    if name == "tpu x2 overlapped":  # DDP reads how it has arranged its buckets, once
        assert found[1].pop("host_reads") == 2
        found[1]["host_reads"] = 0
    compare(found, vit_reference, **get_bounds(name))
    # Alike to the bit, however the examples were dealt out.
    assert read_hits(tmp_path) == read_hits(vit_folder)
    check_hits(read_hits(tmp_path), found)
    if name in ("xla x1", "tpu compiled") or FORMS[name].devices:
        assert found[-1]["graphs_train"] == 1
    if name == "tpu compiled":
        executions = [line["executions"] for line in found if line["kind"] == "train"]
        assert sorted(executions)[STEPS // 2] == 1  # counted as they begin, at times a line late


@pytest.mark.parametrize("name", NORM_CASES)
def test_synchronised_batch_norm_trains_alike(name, norm_flags, norm_reference, tmp_path):
    compare(run_form(tmp_path, FORMS[name], norm_flags), norm_reference, eval_rel=1e-3)


@pytest.mark.slow
def test_without_synchronisation_ranks_normalise_by_their_own_examples(
    norm_flags, norm_reference, tmp_path
):
    flags = tuple(flag for flag in norm_flags if flag != "--train.sync_batchnorm")
    found = run_form(tmp_path, FORMS["cpu x2"], flags)
    with pytest.raises(AssertionError):
        compare(found, norm_reference)
