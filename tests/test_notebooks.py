"""The notebooks: valid, without outputs of an old run, and run from top to bottom."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
FLAGS = "--train.epochs=3 --runtime.device=cpu --runtime.num_threads=1 --optim.warmup_epochs=1"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_holds_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)
    for cell in cells:
        compile(cell.source, cell.id, "exec")


IMAGES = {
    "torch_xla": ({"torch": "2.9.0", "torch_xla": "2.9.0"}, ["--tpu"], ".venv"),
    "torch_tpu": ({"torch": "2.13.0", "torch_tpu": "0.2.0"}, ["--torch-tpu"], ".venv-tpu"),
    "both": ({"torch_xla": "2.9.0", "torch_tpu": "0.2.0"}, ["--tpu"], ".venv"),
    "no stack": ({}, ["--tpu"], ".venv"),
}


@pytest.mark.parametrize("has_chip", [True, False])
@pytest.mark.parametrize("image", IMAGES)
def test_the_stack_of_an_image_is_found(image, has_chip, monkeypatch, tmp_path, capsys):
    packages, setup, folder = IMAGES[image]

    def find(package: str) -> str:
        if package in packages:
            return packages[package]
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", find)
    monkeypatch.setattr(Path, "exists", lambda path: has_chip)
    monkeypatch.delenv("TRAINER_PYTHON", raising=False)
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "digits.ipynb", as_version=4)
    (source,) = [cell.source for cell in notebook.cells if cell.id == "stack"]
    names = {"Path": Path, "os": os, "OUT": tmp_path}
    exec(source, names)
    wanted = (setup, folder) if has_chip else ([], ".venv")
    assert (names["SETUP"], names["PYTHON"].parts[-3]) == wanted
    assert names["DEVICE"] == (["--runtime.device=tpu"] if wanted[0] == ["--torch-tpu"] else [])
    assert ("no TPU is visible" in capsys.readouterr().out) is not has_chip


@pytest.mark.slow
def test_the_digits_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    """In a kernel of its own, with this environment in the place of the one that is set up."""
    monkeypatch.setenv("TRAINER_PYTHON", sys.executable)
    monkeypatch.setenv("TRAINER_OUT", str(tmp_path))
    monkeypatch.setenv("TRAINER_FLAGS", FLAGS)
    monkeypatch.setenv("PJRT_DEVICE", os.environ.get("PJRT_DEVICE", "CPU"))
    path = ROOT / "docs" / "notebooks" / "digits.ipynb"
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": path.parent}})
    client.execute()
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    assert outputs["resume"][-1]["data"]["text/plain"] == "'complete'"
    text = "".join(one["text"] for one in outputs["look"])
    assert text.count("top-1") == 1 and "graphs compiled: 0" in text
    assert "image/png" in outputs["picture"][-1]["data"]
