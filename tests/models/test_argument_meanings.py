"""Arguments that change what tensors of equal names and shapes mean: refused or converted."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields

import pytest
import torch

import main
from models.factory import build_model, create_model, export_model
from models.table import ARGUMENTS, list_taking
from tests.models.delta.test_qwen import DENSE, HYBRID, KINDS, VOCAB, create
from tests.models.delta.test_rules import SMALL
from tests.models.delta.test_rwkv import SHAPE
from tests.support.language import LANGUAGE, create_language_argv
from tools.export.language import write_folder
from utils.config.sections import ModelSection
from utils.errors import UserError
from utils.weights.fitting import FitRules
from utils.weights.load import load_weights
from utils.weights.opening import open_weights

SHAPES = {name: shape for name, (_, shape) in KINDS.items()} | {
    "rwkv7": SHAPE,
    "delta_rules": {**SMALL, "rule": "delta_product", "full_every": 2},
    "transformer": {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "mlp_width": 48},
    "mlp": {"widths": (4, 6)},
}
OF_TASK = {name: {"vocab_size": VOCAB, "sequence_length": 16} for name in SHAPES}
OF_TASK["mlp"] = {"in_features": 3, "out_features": 2}
# What nothing of a model's tensors depends on, beside how rules are computed.
FREE = {"capacity_factor", "balance", "dropout"}
START, STUDENT = "run.init_from", "model.weights"


def build(name: str, **args: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(name, {**args, **OF_TASK[name]})


def write(folder, name: str, **args: object) -> str:
    """An export of drawn weights; gives its path."""
    folder.mkdir(exist_ok=True)
    model = build(name, **args)
    facts = {"model": name, "args": args, **OF_TASK[name]}
    return str(export_model(model.state_dict(), facts, folder))


def load(path: str, name: str, key: str = START, *, skip=(), rename=None, **args: object):
    """A model with such weights."""
    model = build(name, **args)
    load_weights(model, open_weights(path, key), FitRules(tuple(skip), rename or {}))
    return model


def run(folder, name: str, args: dict, *flags: str) -> int:
    data = f"--data.name=copy,symbols={VOCAB - 1},num_examples=640,num_held_out=100"
    own = (f"--model={name}", f"--model.args={json.dumps(args)}", "--data.sequence_length=16", data)
    argv = create_language_argv(folder, *own, *flags)
    return main.main([one for one in argv if one not in LANGUAGE or "--model.args" not in one])


def test_every_language_model_declares_what_its_arguments_mean():
    assert set(list_taking("vocab_size")) <= set(ARGUMENTS)
    assert set(SHAPES) | {"vit_s16_sincos2d"} == set(ARGUMENTS)


def find_kinds(name: str, shape: dict) -> dict:
    with torch.device("meta"):
        tensors = build_model(name, {**shape, **OF_TASK[name]}, device="meta").state_dict()
    return {key: tuple(value.shape) for key, value in tensors.items()}


def list_others(value: object) -> list[object]:
    """Other values of an argument, of which a model takes some."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value + 1, max(1, value // 2)]
    if isinstance(value, tuple):
        return [(*value, 3)]
    return ["layer"]


@pytest.mark.parametrize("name", SHAPES)
def test_every_argument_is_declared_or_visible_in_shapes(name):
    """An argument that is added, and that neither tells, is found here."""
    kind, shape = ARGUMENTS.get(name), SHAPES[name]
    own = kind(**shape)
    told, base = own.list_meanings().keys(), find_kinds(name, shape)
    silent = {"kv_heads", "rope_base"} if name == "kimi_linear" else set()
    silent |= {"mlp_width"} if "experts" in name or "expert_width" in shape else set()
    for one in fields(kind):
        assert one.default is not MISSING
        if one.name in {*kind.how, *told, *FREE, *silent}:
            continue
        found = []
        for value in list_others(getattr(own, one.name)):
            try:
                found.append(find_kinds(name, {**shape, one.name: value}))
            except UserError:
                continue
        assert found and all(other != base for other in found), one.name


VARIANTS = [
    ("delta_rules", {**SMALL, "rule": "linear"}, {"rule": "linear_elu"}, "0.mix.*"),
    ("delta_rules", {**SMALL, "full_every": 2}, {"rope_base": 1000.0}, "1.mix.*"),
    ("qwen3", DENSE, {"rope_base": 1000.0}, "0.self_attn.*"),
    ("qwen3_5", HYBRID, {"linear_key_heads": 1, "linear_key_width": 16}, "0.linear_attn.*"),
    (
        "qwen3_next",
        SHAPES["qwen3_next"],
        {"linear_key_heads": 1, "linear_key_width": 16},
        "0.linear_attn.*",
    ),
    ("qwen3_5_moe", SHAPES["qwen3_5_moe"], {"experts_per_token": 1}, "*.mlp.*"),
]
OTHERS = [
    ("transformer", SHAPES["transformer"], {"heads": 2, "kv_heads": 1}, "blocks.*.attention.*"),
    ("transformer", SHAPES["transformer"], {"positions": "sinusoidal"}, "blocks.*.attention.*"),
    ("mlp", SHAPES["mlp"], {"activation": "gelu"}, "blocks.*"),
]
ALL_VARIANTS = [*((a, b, c, f"model.layers.{d}") for a, b, c, d in VARIANTS), *OTHERS]


@pytest.mark.parametrize(("name", "there", "here", "pattern"), ALL_VARIANTS)
def test_another_variant_is_refused_with_both_values(name, there, here, pattern, tmp_path):
    path, whole = write(tmp_path / "there", name, **there), ARGUMENTS.get(name)(**there)
    for key, way in ((START, f"by run.init_skip: {pattern}"), (STUDENT, "or use run.init_")):
        with pytest.raises(UserError) as caught:
            load(path, name, key, **{**there, **here})
        text = str(caught.value)
        assert text.startswith(f"{key} ({path!r}) is of another variant: model.args.")
        for argument, value in here.items():
            was = getattr(whole, argument)
            assert f"model.args.{argument} is {was!r} there and {value!r} here" in text
        assert way in text and "\n" not in text
    # What has the meaning may keep its start, and the rest comes.
    names = whole.list_meanings()[next(iter(here))].tensors
    load(path, name, skip=names, **{**there, **here})
    load(path, name, **there)


def test_weights_of_another_rule_are_refused(tmp_path, capsys):
    path = write(tmp_path / "there", "delta_rules", **{**SMALL, "rule": "linear"})
    for key in (START, STUDENT):
        for flags in (("--check",), ("--train.steps=6",)):
            wrong = {**SMALL, "rule": "linear_elu"}
            assert run(tmp_path, "delta_rules", wrong, f"--{key}={path}", *flags) == 2
            error = capsys.readouterr().err
            assert "model.args.rule is 'linear' there and 'linear_elu' here" in error
            assert error.count("\n") == 1


def test_a_folder_with_other_heads_and_wavelengths_is_refused(tmp_path, capsys):
    """Of transformers' words: 2 heads of keys of 16 and 1 of 32 have the same tensors."""
    shape = {**HYBRID, "linear_key_heads": 2, "linear_key_width": 16, "rope_base": 1e7}
    folder = tmp_path / "m"
    folder.mkdir()
    facts = {"model": "qwen3_5", **OF_TASK["qwen3_5"]}
    write_folder(build("qwen3_5", **shape), facts, folder)
    place = f"local-dir:{folder}"
    wrong = {**shape, "linear_key_heads": 1, "linear_key_width": 32, "rope_base": 1000}
    words = (
        "model.args.rope_base is 10000000.0 there and 1000 here, "
        "model.args.linear_key_heads is 2 there and 1 here, "
        "model.args.linear_key_width is 16 there and 32 here"
    )
    for key in (START, STUDENT):
        with pytest.raises(UserError, match=words):
            load(place, "qwen3_5", key, **wrong)
    load(place, "qwen3_5", **shape)
    # As a name the folder says what the model is, and what the run says of it must not differ.
    section = ModelSection(name="qwen3_5", args=wrong, weights=place)
    with pytest.raises(UserError, match=words):
        create_model(section, **OF_TASK["qwen3_5"], device="meta")


def test_arguments_that_contradict_a_teachers_weights_are_refused(tmp_path, capsys):
    path = write(tmp_path / "t", "qwen3", **DENSE)
    found = {"weights": path, "args": {"rope_base": 1000.0}}
    flags = (f"--distill.teachers={json.dumps([found])}", "--distill.loss=kd", "--check")
    assert run(tmp_path, "qwen3", DENSE, *flags) == 2
    error = capsys.readouterr().err
    assert "distill.teachers args.rope_base is 1000000.0 there and 1000.0 here" in error
    assert "remove it there" in error and error.count("\n") == 1


def test_an_evaluation_of_another_variant_is_refused(tmp_path, capsys):
    linear = {**SMALL, "rule": "linear"}
    assert run(tmp_path, "delta_rules", linear, "--train.steps=6") == 0
    again = (f"--run.resume={tmp_path / 'lang' / 'a' / 'checkpoints'}", "--eval", "--check")
    capsys.readouterr()
    assert run(tmp_path, "delta_rules", {**linear, "chunk": 8}, *again) == 0
    capsys.readouterr()
    assert run(tmp_path, "delta_rules", {**linear, "rule": "linear_elu"}, *again) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "is a checkpoint of another variant: model.args.rule is 'linear' there and" in error


@pytest.mark.parametrize(
    "changes",
    [{"chunk": 16}, {"loop": "unrolled", "solver": "rows"}, {"products": "bfloat16x3"}, {}],
)
def test_computation_options_of_a_rule_may_differ(changes, tmp_path):
    path = write(tmp_path / "there", "qwen3_5", **HYBRID)
    found = load(path, "qwen3_5", **{**HYBRID, **changes}).state_dict()
    wanted = build("qwen3_5", **HYBRID).state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_capacity_and_balance_of_experts_may_differ(tmp_path):
    path = write(tmp_path / "there", "qwen3_next", **SHAPES["qwen3_next"])
    load(path, "qwen3_next", **{**SHAPES["qwen3_next"], "capacity_factor": 1.1, "balance": 0.0})


def test_weights_without_recorded_arguments_are_accepted(tmp_path):
    path = write(tmp_path / "there", "delta_rules", **{**SMALL, "rule": "linear"})
    weights, other = open_weights(path, START), {**SMALL, "rule": "linear_elu"}
    weights.facts.pop("args")
    load_weights(build("delta_rules", **other), weights)
    weights.facts.clear()
    load_weights(build("delta_rules", **other), weights)


def test_weights_of_a_missing_backend_are_accepted(tmp_path):
    path = write(tmp_path / "there", "qwen3_5", **HYBRID)
    weights = open_weights(path, START)
    weights.facts["args"] |= {"backend": "flashinfer", "of_a_later_version": 3}
    load_weights(build("qwen3_5", **HYBRID), weights)
    weights.facts["args"] |= {"rope_base": "wide"}
    with pytest.raises(UserError, match=r"^run\.init_from .* has arguments that qwen3_5 does"):
        load_weights(build("qwen3_5", **HYBRID), weights)


def test_converting_another_architecture_is_logged(tmp_path, caplog):
    caplog.set_level("INFO", logger="train")
    there = {**DENSE, "rope_base": 5000.0}
    path = write(tmp_path / "there", "qwen3", **there)
    here = {**SMALL, "width": 32, "heads": 4, "head_width": 16, "mlp_width": 48, "full_every": 2}
    rules = {
        "model.layers.*.self_attn.*": "model.layers.*.mix.*",
        "*.input_layernorm.*": "*.mix_norm.*",
        "*.post_attention_layernorm.*": "*.mlp_norm.*",
    }
    model = load(path, "delta_rules", rename=rules, skip=["model.layers.0.mix.*"], **here)
    wanted = build("qwen3", **there).state_dict()
    assert torch.equal(
        model.state_dict()["model.layers.1.mix.q_proj.weight"],
        wanted["model.layers.1.self_attn.q_proj.weight"],
    )
    assert "of qwen3: model.args.rope_base is 5000.0 there and 1000000.0 here" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("source", "name"), [("qwen3", "qwen3_5"), ("qwen3_5", "qwen3"), ("qwen3_5", "qwen3_5")]
)
def test_converted_norms_keep_their_scale(source, name, dtype, tmp_path, caplog):
    caplog.set_level("INFO", logger="train")
    first = create(source, depth=2).to(dtype)
    facts = {"model": source, "args": {**SHAPES[source], "depth": 2}, **OF_TASK[source]}
    path = str(export_model(first.state_dict(), facts, tmp_path))
    skip = [] if source == name else ["model.layers.*.linear_attn.*", "model.layers.*.self_attn.*"]
    second = load(path, name, skip=skip, **{**SHAPES[name], "depth": 2})
    pairs = [(first.model.norm, second.model.norm)]
    for mine, its in zip(first.model.layers, second.model.layers, strict=True):
        pairs += [
            (mine.input_layernorm, its.input_layernorm),
            (mine.post_attention_layernorm, its.post_attention_layernorm),
        ]
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    for mine, its in pairs:
        torch.testing.assert_close(its(x), mine.float()(x), rtol=0, atol=1e-6)
    assert ("5 norms are converted from" in caplog.text) == (source != name)


def test_norms_after_a_rule_are_converted_unchanged(tmp_path):
    """They multiply by weight in both; all others of a hybrid by 1 + weight."""
    path = write(tmp_path / "there", "qwen3_5", **HYBRID)
    wanted = build("qwen3_5", **HYBRID).state_dict()
    rename = {
        "model.layers.*.linear_attn.norm.*": "model.layers.*.mix.norm.*",
        "*.input_layernorm.*": "*.mix_norm.*",
        "*.post_attention_layernorm.*": "*.mlp_norm.*",
    }
    here = {**SMALL, "depth": 4, "width": 32, "mlp_width": 48, "linear_width": 12}
    skip = [
        "model.layers.*.linear_attn.*",
        "model.layers.*.self_attn.*",
        "model.layers.*.mix.in_proj*",
        "model.layers.*.mix.[!n]*",
        "model.layers.3.mix.*",
    ]
    found = load(path, "delta_rules", rename=rename, skip=skip, **here).state_dict()
    before = wanted["model.layers.0.linear_attn.norm.weight"]
    assert torch.equal(found["model.layers.0.mix.norm.weight"], before)
    before = wanted["model.layers.0.input_layernorm.weight"]
    assert torch.equal(found["model.layers.0.mix_norm.weight"], before + 1)
