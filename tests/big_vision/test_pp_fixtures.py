"""Every reference value of the public file, through the program that runs such files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.fixture_runs.preprocessing import Fixture, compare, get_complaint, list_checks

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = ROOT / "tests" / "fixtures" / "pp_public.npz"


RECORDS = json.loads(PUBLIC.with_suffix(".json").read_text())
LABELS = [label for label, _ in list_checks(SimpleNamespace(json=RECORDS))]
# TensorFlow reads the switch for exact kernels when it is imported; this op needs it.
SWITCHED = "sharpness"


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """Every entry of the public file by its label."""
    return dict(list_checks(Fixture(PUBLIC, tmp_path_factory.mktemp("files"))))


@pytest.mark.parametrize(
    "label",
    [label for label in LABELS if SWITCHED not in label],
    ids=lambda label: label.partition(" ")[0],
)
def test_a_reference_value_of_the_public_file_is_met(label, checks):
    assert get_complaint(checks[label]) == ""


def test_the_program_meets_a_files_values_with_exact_kernels(tmp_path):
    assert len(LABELS) > 250
    switched = [record for record in RECORDS["aa_ops"] if record["func"] == SWITCHED]
    few = {"images": RECORDS["images"], "cases": RECORDS["cases"][:1], "aa_ops": switched}
    path = shutil.copy(PUBLIC, tmp_path)
    Path(path).with_suffix(".json").write_text(json.dumps(few))
    result = subprocess.run(
        [sys.executable, "-m", "tests.run_fixtures", "preprocessing", str(path)],
        cwd=ROOT,
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    assert result.stdout.splitlines()[-1] == f"{1 + len(switched)} passed, 0 failed"


@pytest.mark.parametrize(
    ("found", "tolerance", "is_close"),
    [
        (np.array([10, 20, 30], np.uint8), "exact", True),
        (np.array([10, 21, 30], np.uint8), "exact", False),
        (np.array([10, 20, 30], np.int32), "exact", False),
        (np.array([[10, 20, 30]], np.uint8), "resize_u8", False),
        (np.array([10, 21, 30], np.uint8), "resize_u8", False),
    ],
)
def test_the_comparison_of_reference_values_can_fail(found, tolerance, is_close):
    complaint = compare(found, np.array([10, 20, 30], np.uint8), tolerance)
    assert (complaint == "") is is_close
