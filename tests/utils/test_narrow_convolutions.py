"""oneDNN's fault in the weight gradients of narrow convolutions does not reach a run on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from utils.processor import find_vector_block

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("limit", ["DEFAULT", "AVX2"])
def test_convolution_gradients_match_float64_with_new_and_old_instructions(limit):
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.convolutions"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": limit, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-1000:]


AVX2 = "fpu avx avx2 fma"
AVX512 = f"{AVX2} avx512f avx512dq avx512bw avx512vl"


@pytest.mark.parametrize(
    ("architecture", "flags", "limit", "block"),
    [
        ("x86_64", AVX512, "", ("AVX-512", 16)),
        ("x86_64", AVX512, "AVX2", ("AVX2", 8)),
        ("x86_64", AVX512, "avx512_core", ("AVX-512", 16)),
        ("AMD64", f"{AVX2} avx512f", "", ("AVX2", 8)),
        ("x86_64", AVX2, "SSE41", ("", 0)),
        ("x86_64", "fpu sse4_1", "", ("", 0)),
        ("aarch64", "fp asimd sve", "", ("SVE", 16)),
        ("aarch64", "fp asimd", "", ("", 0)),
        ("x86_64", None, "", ("AVX-512", 16)),
    ],
)
def test_the_block_of_channels_follows_from_the_processor(
    tmp_path, architecture, flags, limit, block
):
    if flags is not None:
        name = "Features" if architecture == "aarch64" else "flags"
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\n{name}\t\t: {flags}\n\n")
    environment = {"ONEDNN_MAX_CPU_ISA": limit}
    assert find_vector_block(environment, tmp_path, architecture) == block
