"""Reference values of the losses; the runner detects wrong ones."""

from __future__ import annotations

import collections
import functools
import json

import numpy as np
import pytest
import torch

from losses.base import LossInputs
from losses.factory import create_loss
from tests.fixture_runs.distillation import run, run_cases
from tests.losses.reference_table import FILES, INDEXES


@functools.cache
def read_file(name):
    """Records and arrays of one file."""
    with np.load(FILES[name]) as arrays:
        return INDEXES[name]["cases"], {key: arrays[key] for key in arrays.files}


@pytest.mark.parametrize(
    ("name", "loss"), [(name, loss) for name in FILES for loss in INDEXES[name]["losses"]]
)
def test_all_cases_of_a_loss_pass_on_the_cpu(name, loss):
    records, arrays = read_file(name)
    own = [record for record in records if record["loss"] == loss]
    assert own and run_cases(own, arrays, device="cpu") == (len(own), [])


def test_all_cases_of_a_file_are_run(tmp_path):
    records, arrays = read_file("kd_public")
    few = [record for record in records if record["loss"] in ("kd", "dkd")]
    path = tmp_path / "few.npz"
    np.savez(path, **{k: v for k, v in arrays.items() if k.startswith(("kd/", "dkd/"))})
    path.with_suffix(".json").write_text(json.dumps({"cases": few}))
    assert run(path, device="cpu") == (len(few), [])


@pytest.mark.parametrize(("name", "cases", "losses"), [("kd_public", 280, 38), ("kd_more", 96, 43)])
def test_a_file_holds_the_cases_that_it_lists(name, cases, losses):
    records, _ = read_file(name)
    listed = {loss: entry["n_cases"] for loss, entry in INDEXES[name]["losses"].items()}
    assert (len(records), len(listed)) == (cases, losses)
    assert collections.Counter(record["loss"] for record in records) == listed


@pytest.mark.xla
@pytest.mark.parametrize("name", FILES)
def test_one_case_of_every_loss_passes_on_xla(name):
    records, arrays = read_file(name)
    last = {record["loss"]: record for record in records}
    assert run_cases(last.values(), arrays, device="xla") == (len(last), [])


@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_all_cases_pass_on_xla(name):
    assert run(FILES[name], device="xla") == (INDEXES[name]["n_cases"], [])


@pytest.mark.parametrize("part", ["value", "gradient", "extra"])
def test_a_wrong_reference_is_reported(part):
    records, arrays = read_file("kd_public")
    record = next(r for r in records if r["name"] == "bv_kl/p02")
    if part == "value":
        record = record | {"value": record["value"] * 1.001}
    elif part == "gradient":
        arrays = arrays | {"bv_kl/p02/grad_s": arrays["bv_kl/p02/grad_s"] * 1.001}
    else:
        arrays = arrays | {"bv_kl/p02/per_example": arrays["bv_kl/p02/per_example"] * 1.001}
    passed, failures = run_cases([record], arrays)
    assert passed == 0 and len(failures) == 1 and failures[0].startswith("bv_kl/p02: ")


def test_a_case_that_lacks_a_parameter_of_its_loss_is_a_failure():
    records, arrays = read_file("kd_more")
    vid = next(r for r in records if r["loss"] == "vid")
    shapes = dict(vid["parameters"])
    shapes.pop("gaussians.0.raw_variance")
    passed, failures = run_cases([vid | {"parameters": shapes}], arrays)
    assert passed == 0 and "gaussians.0.raw_variance" in failures[0]


def test_an_unknown_loss_or_hyper_parameter_is_a_failure():
    records, arrays = read_file("kd_public")
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
def test_forms_that_deviate_from_the_default_are_options(case, implementation, loss, args):
    records, arrays = read_file("kd_public")
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
