"""Every reference value of the public file, through the program that runs such files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = ROOT / "tests" / "fixtures" / "pp_public.npz"


def test_every_reference_value_of_the_public_file_is_met():
    # A process of its own: TensorFlow reads the switch for exact kernels when it is imported.
    result = subprocess.run(
        [sys.executable, "-m", "tests.run_fixtures", "preprocessing", str(PUBLIC)],
        cwd=ROOT,
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    passed, failed = result.stdout.splitlines()[-1].removesuffix(" failed").split(" passed, ")
    assert failed == "0"
    assert int(passed) > 250


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
    from tests.fixture_runs.preprocessing import compare

    complaint = compare(found, np.array([10, 20, 30], np.uint8), tolerance)
    assert (complaint == "") is is_close
