"""The files that the project's own checks demand of one new thing, by adding it to a copy."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each runs the project's own checks in a copy
ROOT = Path(__file__).resolve().parents[1]
CHANGING = ("losses", "utils", "proofs", "tests", "docs")


def copy_project(folder: Path) -> Path:
    """A copy of the project; what nothing is added to is linked."""
    copy = folder / "copy"
    copy.mkdir()
    for entry in ROOT.iterdir():
        if entry.name in CHANGING:
            skip = shutil.ignore_patterns("__pycache__", "*.h5")
            shutil.copytree(entry, copy / entry.name, ignore=skip)
        elif entry.is_file():
            shutil.copy2(entry, copy)  # a script that is a link finds the modules of its target
        elif not entry.name.startswith("."):
            (copy / entry.name).symlink_to(entry)
    return copy


def list_changed(copy: Path) -> list[str]:
    """The files of a copy that the project does not have like this."""

    def read(root: Path) -> dict[str, str]:
        files = (path for name in CHANGING for path in (root / name).rglob("*"))
        return {
            str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if path.is_file() and path.suffix in (".py", ".md", ".json", ".npz", ".yaml")
        }

    ours = read(ROOT)
    return sorted(path for path, content in read(copy).items() if ours.get(path) != content)


def run(copy: Path, *arguments: str) -> str:
    """A Python program in a copy.

    Raises:
      AssertionError: it failed.
    """
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def insert(path: Path, before: str, text: str) -> None:
    """Write text in front of the only place where a file has such words."""
    content = path.read_text(encoding="utf-8")
    assert content.count(before) == 1, f"{path}: {content.count(before)} times {before!r}"
    path.write_text(content.replace(before, text + before), encoding="utf-8")


LOSS = '''"""The largest gap of two distributions."""

from __future__ import annotations

import torch
from torch import Tensor

from losses.base import LogitLoss
from losses.factory import define
from losses.reductions import Mask, mean_valid, soften


def compute_total_variation(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float, *, mask: Mask = None
) -> Tensor:
    """Half the sum of the gaps of all probabilities, 0 to 1, without T^2.

    Source: made up.
    """
    probs, student_probs = (x.exp() for x in soften(student_logits, teacher_logits, temperature))
    return mean_valid((probs - student_probs).abs().sum(dim=-1) / 2, mask)


create_total_variation = define(
    LogitLoss, "total_variation", compute_total_variation, "temperature", temperature=2.0
)
'''
FORMULA = '''def compute_total_variation(example: Example) -> float:
    """Class by class."""
    temperature = example.get("temperature", 2.0)
    sides = (softmax(x / temperature) for x in (example.logits, example.teachers[0]))
    return float(np.mean([sum(abs(p - q) for p, q in zip(*rows)) / 2 for rows in zip(*sides)]))


'''
CHECKS = (
    "tests/losses/test_reference_table.py",
    "tests/losses/test_every_loss.py",
    "tests/losses/test_tokens.py",
    "tests/losses/test_references.py",
    "tests/losses/test_documented_layers.py::test_every_loss_is_documented_and_tested",
    "tests/proofs/test_kd_table.py::test_rows_and_reasons_name_registered_losses",
)


def test_a_new_loss_touches_its_file_table_reference_and_document(tmp_path):
    copy = copy_project(tmp_path)
    (copy / "losses/logits/variation.py").write_text(LOSS, encoding="utf-8")
    row = '        "total_variation": "losses.logits.variation:create_total_variation",\n'
    insert(copy / "losses/table.py", '        "vid":', row)
    references = copy / "tests/losses/references.py"
    insert(references, "LOGIT_REFERENCES: dict", FORMULA)
    insert(references, '    "abkd": compute', '    "total_variation": compute_total_variation,\n')
    insert(copy / "docs/losses.md", "| `reverse_kl` | KL", "| `total_variation` | made up |\n")
    run(copy, "-m", "tests.losses.reference_table", "--docs", "docs/losses.md")
    words = "total_variation or table or registered or documented or takes_tokens"
    assert run(copy, "-m", "pytest", "-q", "-n0", "-k", words, *CHECKS).count(".") > 20
    assert list_changed(copy) == [
        "docs/losses.md",
        "losses/logits/variation.py",
        "losses/table.py",
        "tests/losses/references.py",
    ]


KEY = """    jitter: float = key(
        0.0,
        "share by which the learning rate of each run is moved",
        ge=0,
        le=1,
        resume="warns",
        aliases=("lr_jitter",),
        tasks=("classify",),
    )
"""
EFFECT = """    ("optim.jitter", (), "--lr_jitter=0.5", "refused"),
"""
KEY_CHECKS = (
    "tests/test_config_keys.py",
    "tests/test_key_effects.py::test_every_key_has_a_row_or_the_name_of_its_test",
    "tests/test_readme.py",
)


def test_a_new_key_touches_its_field_the_page_and_the_effects_table(tmp_path):
    copy = copy_project(tmp_path)
    insert(copy / "utils/config/sections.py", "    base_lr: float | None = ", KEY)
    insert(copy / "tests/support/key_effects.py", '    ("optim.lr_factors", ', EFFECT)
    run(copy, "-m", "proofs.keys", "--write")
    run(copy, "-m", "pytest", "-q", "-n0", "-k", "not documents", *KEY_CHECKS)
    words = " ".join(run(copy, "main.py", "--help").split())
    assert "rate of each run is moved (default: 0.0)" in words and "--lr_jitter" in words
    assert list_changed(copy) == [
        "docs/keys.md",
        "tests/support/key_effects.py",
        "utils/config/sections.py",
    ]


DEVICE = '''"""The CPU under another name."""

from __future__ import annotations

from utils.runtime.cpu import CpuRuntime


class SecondRuntime(CpuRuntime):
    """The host's cores a second time."""

    name = "second"
'''
ROW = """    "second": DeviceInfo(
        runtime="utils.runtime.second:SecondRuntime",
        start="utils.runtime.start:DeviceStart",
        compilers=("eager",),
        modes=("native",),
    ),
"""
DEVICE_CHECKS = (
    "tests/test_config_keys.py",
    "tests/utils/test_runtime_choice.py::test_every_configurable_device_has_a_runtime",
    "tests/test_parity.py::test_every_device_has_a_parity_form",
)
ASKS = """
import json
from proofs.chaos import RUNTIMES
from service.jobs.slots import choose_slots
from utils.config.execution import RuntimeSection
from utils.errors import UserError
from utils.runtime.choice import choose_device

refused = []
for keys in ({"precision": "fp16"}, {"compile": True, "compile_backend": "inductor"}):
    try:
        choose_device(RuntimeSection(device="second", **keys))
    except UserError as error:
        refused.append(str(error))
slots = choose_slots("second", 1, ["cuda:0", "cpu:0"], [])
print(json.dumps([refused, slots, RUNTIMES["second2"][0]]))
"""


def test_a_new_device_touches_its_file_table_and_parity_form(tmp_path):
    copy = copy_project(tmp_path)
    (copy / "utils/runtime/second.py").write_text(DEVICE, encoding="utf-8")
    insert(copy / "utils/config/devices.py", '    "cuda": DeviceInfo(', ROW)
    insert(copy / "tests/test_parity.py", '    "xla x1": Form(', '    "second": Form("second"),\n')
    run(copy, "-m", "proofs.keys", "--write")
    run(copy, "-m", "pytest", "-q", "-n0", *DEVICE_CHECKS)
    (precision, compiler), slots, flags = json.loads(run(copy, "-c", ASKS))
    assert "runtime.precision ('fp16') works on cpu and cuda, not on 'second'" in precision
    assert "('inductor') is not supported on 'second', which has eager" in compiler
    assert slots == ["cpu:0"]
    assert flags == ["--runtime.device=second", "--runtime.num_processes=2"]
    for program in (("-m", "tools.predict"), ("-m", "tools.generate")):
        assert "second,cuda}" in run(copy, *program, "--help").replace("\n", "")
    assert "cpu, second, cuda;" in " ".join(run(copy, "main.py", "--help").split())
    trained = run(
        copy,
        "main.py",
        "--config=configs/smoke.yaml",
        "--runtime.device=second",
        "--train.steps=1",
        f"--run.output_dir={tmp_path / 'runs'}",
    )
    (environment,) = (tmp_path / "runs").rglob("environment.json")
    assert '"second"' in environment.read_text(encoding="utf-8"), trained
    assert list_changed(copy) == [
        "docs/keys.md",
        "tests/test_parity.py",
        "utils/config/devices.py",
        "utils/runtime/second.py",
    ]
