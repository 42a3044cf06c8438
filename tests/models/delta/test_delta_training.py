"""Models of delta rules through main: resume with remat, generation, distillation."""

from __future__ import annotations

import json

import pytest

import main
from store.record.history import read_metrics
from tests.models.delta.test_delta_devices import SHARED
from tests.models.delta.test_qwen import DENSE, EXPERTS, HYBRID, KIMI, check_going_on
from tests.models.delta.test_rules import SMALL
from tests.models.delta.test_rwkv import SHAPE
from tests.support.language import LANGUAGE, create_language_argv
from tests.test_parity import FORMS, Form, compare, run_child

# Two groups of two layers, one compiled for both.
_PAIRS = {"depth": 4, "full_every": 2}
RULE = {**SMALL, **_PAIRS, "width": 32}
STUDENTS = {
    "qwen3_5": ("qwen3_5", {**HYBRID, **_PAIRS}),
    "kimi_linear": ("kimi_linear", {**KIMI, **_PAIRS}),
    "qwen3_next": ("qwen3_next", {**EXPERTS, **_PAIRS}),
    "qwen3_5_moe": ("qwen3_5_moe", {**EXPERTS, **_PAIRS, "balance": 0.05}),
    "rwkv7": ("rwkv7", SHAPE),
    "kda": ("delta_rules", {**RULE, "rule": "kda"}),
    "gdn2": ("delta_rules", {**RULE, "rule": "gdn2"}),
    "delta_product": ("delta_rules", {**RULE, "rule": "delta_product"}),
}
MODELS = {"qwen3": ("qwen3", DENSE), **STUDENTS}


def create_argv(folder, name, *flags, device="cpu"):
    model, shape = MODELS[name]
    own = (f"--model={model}", f"--model.args={json.dumps(shape)}", "--data.sequence_length=20")
    argv = create_language_argv(folder, *own, *flags, device=device)
    # The sizes of the other model there, which not every one of these has.
    return [one for one in argv if one not in LANGUAGE or "--model.args" not in one]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "kda", "gdn2", "delta_product"])
def test_a_run_with_remat_resumes_bit_for_bit_and_generates(name, tmp_path):
    check_going_on(create_argv, name, tmp_path)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run of full attention that has learnt a little."""
    folder = tmp_path_factory.mktemp("teacher")
    assert main.main(create_argv(folder, "qwen3", "--train.steps=60")) == 0
    return folder / "lang" / "a"


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDENTS)
def test_full_attention_teaches_each_rule_by_logits_and_hidden_states(name, teacher, tmp_path):
    """The conversion: what a linear layer of each gives, and its logits."""
    layers = {"model.layers.2": "model.layers.1"}
    terms = [{"name": "kd"}, {"name": "fitnet", "layers": layers}]
    flags = (
        "--train.steps=40",
        f"--teacher_path={teacher}",
        "--distill.alpha=0.9",
        f"--distill.losses={json.dumps(terms)}",
    )
    assert main.main(create_argv(tmp_path, name, *flags)) == 0
    lines = [one for one in read_metrics(tmp_path / "lang" / "a") if "loss/kd" in one]
    for one in ("loss/kd", "loss/fitnet"):
        assert lines[-1][one] < 0.7 * lines[0][one], one


def run_form(folder, name, form: Form, *flags: str) -> list[dict]:
    run_child(create_argv(folder, name, *SHARED, *form.flags, *flags, device=form.device), form)
    return read_metrics(folder / "lang" / "a")


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_alike_under_fsdp_with_remat_and_in_a_loop_over_layers(name, tmp_path):
    """In one graph each."""
    pytest.importorskip("torch_xla")
    # Where gradients are 15 long, rounding grows from step to step, on one device of XLA, too.
    is_steep = MODELS[name][0] == "delta_rules"
    short = ("--train.steps=5", "--optim.lr=0.005") if is_steep else ()
    wanted = run_form(tmp_path / "cpu", name, Form("cpu"), *short)
    for form, flag in ((FORMS["fsdp 4"], "remat"), (Form("xla"), "scan_layers")):
        found = run_form(tmp_path / flag, name, form, f"--train.{flag}=true", *short)
        compare(found, wanted, score="loss")
        assert found[-1]["graphs_train"] == 1
