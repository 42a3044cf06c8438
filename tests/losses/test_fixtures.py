"""The reference values of the losses, and that the runner sees what is wrong."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from losses import LossInputs, create_loss
from tests.fixture_runs.distillation import run, run_cases

FILE = Path(__file__).parents[1] / "fixtures" / "kd_public.npz"


RECORDS = json.loads(FILE.with_suffix(".json").read_text())["cases"]
LOSSES = sorted({record["loss"] for record in RECORDS})


@functools.cache
def read_file():
    """Records and arrays of the public file."""
    with np.load(FILE) as arrays:
        return RECORDS, {key: arrays[key] for key in arrays.files}


@pytest.mark.parametrize("loss", LOSSES)
def test_all_cases_of_a_loss_pass_on_the_cpu(loss):
    records, arrays = read_file()
    own = [record for record in records if record["loss"] == loss]
    assert run_cases(own, arrays, device="cpu") == (len(own), [])


def test_a_file_is_run_with_all_its_cases(tmp_path):
    records, arrays = read_file()
    few = [record for record in records if record["loss"] in ("kd", "dkd")]
    assert (len(records), len(LOSSES)) == (280, 38)
    path = tmp_path / "few.npz"
    np.savez(path, **{k: v for k, v in arrays.items() if k.startswith(("kd/", "dkd/"))})
    path.with_suffix(".json").write_text(json.dumps({"cases": few}))
    assert run(path, device="cpu") == (len(few), [])


@pytest.mark.xla
def test_one_case_of_every_loss_passes_on_xla():
    records, arrays = read_file()
    last = {record["loss"]: record for record in records}
    assert run_cases(last.values(), arrays, device="xla") == (len(last), [])


@pytest.mark.xla
@pytest.mark.slow
def test_all_cases_pass_on_xla():
    assert run(FILE, device="xla") == (280, [])


@pytest.mark.parametrize("part", ["value", "gradient", "extra"])
def test_a_wrong_reference_is_reported(part):
    records, arrays = read_file()
    record = next(r for r in records if r["name"] == "bv_kl/p02")
    if part == "value":
        record = record | {"value": record["value"] * 1.001}
    elif part == "gradient":
        arrays = arrays | {"bv_kl/p02/grad_s": arrays["bv_kl/p02/grad_s"] * 1.001}
    else:
        arrays = arrays | {"bv_kl/p02/per_example": arrays["bv_kl/p02/per_example"] * 1.001}
    passed, failures = run_cases([record], arrays)
    assert passed == 0 and len(failures) == 1 and failures[0].startswith("bv_kl/p02: ")


def test_an_unknown_loss_or_hyper_parameter_is_a_failure():
    records, arrays = read_file()
    kd = next(r for r in records if r["loss"] == "kd")
    strange = [kd | {"loss": "kd2"}, kd | {"hyper": {"T": 4.0, "form": "odd"}}]
    passed, failures = run_cases(strange, arrays)
    assert passed == 0 and len(failures) == 2


@pytest.mark.parametrize(
    ("case", "implementation", "loss", "args"),
    [
        ("kd/p01", "DeiT soft, alpha=1", "kd", {"reduction": "numel", "temperature": 4.0}),
        ("kd/p01", "cls_KD KDLoss(alpha=1)", "kd", {"form": "cross_entropy", "temperature": 4.0}),
        (
            "rkd/p01",
            "mmrazor DistanceWiseRKD+AngleWiseRKD (L2-normalised input)",
            "rkd_unit",
            {"layers": {"f_s": "f_t"}},
        ),
    ],
)
def test_the_forms_that_are_not_followed_are_options(case, implementation, loss, args):
    records, arrays = read_file()
    record = next(r for r in records if r["name"] == case)
    want = next(a["value"] for a in record["alternatives"] if a["impl"] == implementation)
    student, teacher = (
        torch.from_numpy(arrays[f"{case}/{role}"]).double()
        for role in (("s", "t") if "s" in record["inputs"] else ("f_s", "f_t"))
    )
    inputs = LossInputs(
        student,
        torch.softmax(student, dim=-1),
        student.argmax(dim=-1),
        teacher_logits=(teacher,),
        student_features={"f_s": student},
        teacher_features={"f_t": teacher},
    )
    assert create_loss(loss, args)(inputs).item() == pytest.approx(want, rel=1e-9)
