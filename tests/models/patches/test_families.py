"""Runs of timm's other families with the patches: native PyTorch's numbers in one graph."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from store.record.history import read_metrics
from tests.support.tiny_parts import SYNTHETIC, create_argv
from tests.test_parity import EXAMPLES, FORMS, Form, compare, run_child
from tests.test_spmd_graph import run_and_read

# timm's name, arguments, and the side that its images have.
MODELS = {
    "eva02": (
        "eva02_tiny_patch14_224",
        {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "ref_feat_shape": [2, 2]},
        8,
    ),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {
            "patch_size": 2,
            "window_size": 2,
            "embed_dim": 16,
            "depths": [2],
            "num_heads": [2],
            "drop_path_rate": 0.0,
        },
        8,
    ),
    "maxvit": (
        "maxvit_tiny_tf_224",
        {
            "embed_dim": [32, 32],
            "depths": [2, 1],
            "block_type": ["M", "M"],
            "stem_width": 8,
            "transformer_window_size": [2, 2],
            "transformer_grid_size": [2, 2],
        },
        32,
    ),
    "nfnet": (
        "nfnet_l0",
        {"depths": [1, 1, 1, 1], "channels": [32, 32, 32, 32], "stem_chs": 16, "group_size": 8},
        32,
    ),
}
# Their attention is written anew: nothing of it may be gathered. NFNet's gains have no sum of their
# own, since gradients of standardised weights are summed before.
PATCHED = ("eva02", "swin", "maxvit")
# Of the model that tiny runs have.
OTHERS = [flag for flag in SYNTHETIC if flag.startswith("--model")]
CASES = [
    *((name, Form("xla")) for name in MODELS),
    *((name, Form("xla", ("--train.remat=true",))) for name in MODELS),
    *((name, FORMS["mesh 4"]) for name in MODELS),
]


def describe(name: str) -> list[str]:
    """Flags of a family's model and its images."""
    model, arguments, side = MODELS[name]
    arguments = {"in_chans": 1, **({} if name == "nfnet" else {"img_size": side}), **arguments}
    return [
        f"--model={model}",
        f"--model.args={json.dumps(arguments)}",
        f"--data.name=image_size={side},channels=1,num_classes=10,num_examples={EXAMPLES}",
        "--data.global_batch_size=32",
    ]


def run(folder: Path, name: str, form: Form) -> list[dict]:
    """The metrics of four steps in a process of its own."""
    argv = create_argv(
        folder,
        *describe(name),
        "--train.steps=4",
        "--run.run_id=form",
        "--runtime.num_threads=1",
        "--runtime.graph_budget=12",
        *form.flags,
        device=form.device,
    )
    run_child([flag for flag in argv if flag not in OTHERS], form)
    return read_metrics(folder / "tiny" / "form")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_family_trains_as_timm_does_in_one_graph(name, form, tmp_path):
    wanted = run(tmp_path / "cpu", name, Form("cpu"))
    found = run(tmp_path / "own", name, form)
    compare(found, wanted)
    assert found[-1]["graphs_train"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", PATCHED)
def test_attention_of_a_family_needs_no_gather_between_devices(name, tmp_path):
    found, parameters = run_and_read(tmp_path, *describe(name))
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert found["all-reduce", "f32"] >= 4 * parameters
