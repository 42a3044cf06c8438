"""The table of patches: which rows it has, what they train, and how they are compared."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from proofs.study.frame import StudyOutcome
from proofs.tables import patches_table
from proofs.tables.patches_table import PatchesTable

SMOKE = str(Path(__file__).resolve().parents[2] / "configs/smoke.yaml")
SMALL = (
    "--config",
    SMOKE,
    "--data.name=image_size=32,num_classes=10,num_examples=16",
    '--model.args={"depth":1,"embed_dim":32,"num_heads":2,"img_size":32}',
    "--runtime.device=xla",
    "--data.test_split=test",
)


def create_table(*flags: str) -> PatchesTable:
    return PatchesTable(patches_table.main.parse(flags))


@pytest.mark.xla
def test_a_row_for_each_patch_that_changes_the_model():
    table = create_table(*SMALL)
    rows = table.list_rows()
    assert rows[:2] == ["all", "none"]
    # No BatchNorm and no convolution but the patches', which are a product.
    assert [row for row in rows[2:] if row != "attention_kernel"] == [
        "linear",
        "layer_norm",
        "gelu",
        "attention",
        "embedding",
        "residual_stream",
        "head_tokens",
    ]
    assert ("attention_kernel" in rows) == (importlib.util.find_spec("jax") is not None)
    found = {row: table.create_config(row, 3).model for row in ("all", "none", "gelu")}
    patched = {row: (one.xla_patches, list(one.skip_patches)) for row, one in found.items()}
    assert patched == {"all": (True, []), "none": (False, []), "gelu": (True, ["gelu"])}
    assert {one.attention_kernel for one in found.values()} == {"auto"}
    assert table.create_config("attention_kernel", 3).model.attention_kernel == "on"
    assert table.create_config("gelu", 3).train.seed == 3


@pytest.mark.xla
def test_joined_groups_have_a_row_although_no_class_changes():
    args = '{"layers":[1,1,1,1],"channels":[16,16,16,16],"cardinality":4}'
    flags = ["--model.name=resnet26", f"--model.args={args}", *SMALL[-2:]]
    rows = create_table(*SMALL[:3], *flags).list_rows()
    assert rows == ["all", "none", "linear", "batch_norm", "convolution", "grouped_convolution"]


def test_differences_are_of_the_same_seed():
    scores = {"all": [90.0, 92.0], "none": [91.0, 90.0], "gelu": [90.0, 92.0]}
    outcomes = [
        StudyOutcome(row, seed, {"test_top1": top1})
        for row, values in scores.items()
        for seed, top1 in enumerate(values)
    ]
    table = PatchesTable.format(outcomes)
    assert table.splitlines()[2:] == [
        "| all | 90.00 | 92.00 | 91.00 |  |  |",
        "| none | 91.00 | 90.00 | 90.50 | -1.00, +2.00 | +0.50 |",
        "| all but `gelu` | 90.00 | 92.00 | 91.00 | +0.00, +0.00 | +0.00 |",
    ]


def test_a_run_without_patches_is_refused(capsys):
    assert patches_table.main(["--config", SMOKE, "--runtime.device=cpu"]) == 2
    assert "must be a run of runtime.device=xla" in capsys.readouterr().err
