"""Wrong arguments and configurations of losses, and their error messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from losses.factory import create_loss
from tests.losses.examples import ARGS, create_example_loss, create_inputs
from utils.errors import UserError


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("kdd", {}, "did you mean 'kd'"),
        ("kd", {"temprature": 2}, "no argument 'temprature'; did you mean 'temperature'"),
        ("kd", {"layers": {}}, "it takes temperature, reduction, form"),
        ("bkd", {"temperature": 1.0}, "it takes reduction"),
        ("bv_l2", {"temperature": 1.0}, "it takes none"),
        ("fitnet", {}, "fitnet needs args.layers"),
        ("fitnet", {"layers": ["blocks.3"]}, "{blocks.3: blocks.5}"),
        ("fitnet", {"layers": {"a": "b"}, "regressor": "mlp"}, "conv1x1"),
        ("crd", {"layers": {"a": "b"}}, "crd needs args.num_examples"),
        ("kd", {"temperature": 0}, "kd.temperature is 0; give a number above 0"),
        ("kd", {"temperature": "4"}, "kd.temperature is '4'"),
        ("kd", {"form": "js"}, "choose one of kl, cross_entropy"),
        ("hard", {"label_smoothing": 1.0}, "give 0 <= value < 1"),
        ("lskd", {"loss": "dkdd"}, "did you mean 'dkd'"),
        ("lskd", {"loss": "dkd", "loss_args": {"betta": 1}}, "did you mean 'beta'"),
        ("abkd", {"beta": -0.1}, "abkd.beta is -0.1; give a number of 0 or more"),
        ("ctkd", {}, "ctkd needs args.curriculum_steps"),
        ("ft", {"layers": {"a": "b"}, "paraphrase_steps": -1}, "a whole number of 0 or more"),
        ("semckd", {"layers": {"a": "b"}, "group_size": 1}, "semckd.group_size is 1; give a whole"),
        ("sdd", ARGS["sdd"] | {"scales": [2, 4]}, "sdd.scales is [2, 4]; give cells along a side"),
        ("vitkd", {"layers": {"a": "b"}}, "two or more pairs of layers: the first blocks"),
        ("vitkd", ARGS["vitkd"] | {"mask_ratio": 0}, "vitkd.mask_ratio is 0; give a number above"),
        ("ldrld", {"depth": 1}, "ldrld.depth is 1; give a whole number of 2 or more"),
        (
            "dist_plus",
            {"layers": {"a": "b"}, "weights": [1, 2]},
            "dist_plus.weights is [1, 2]; give four numbers",
        ),
        ("fsp", {"layers": {"a": "b"}}, "fsp needs two or more pairs of layers"),
        (
            "mgd",
            {"layers": {"a": "b"}, "mask_ratio": 1.0},
            "mgd.mask_ratio is 1.0; give 0 <= value",
        ),
        ("srrl", {"layers": {"a": "b", "c": "d"}, "teacher_head": "fc"}, "one pair of layers"),
        ("sskd", {"layers": {"a": "b"}, "head_steps": -1}, "sskd.head_steps is -1; give a whole"),
        ("sskd", ARGS["sskd"] | {"keep": [0.5, 2]}, "sskd.keep is [0.5, 2]; give 2 shares from 0"),
        ("sskd", ARGS["sskd"] | {"weights": 1}, "sskd.weights is 1; give 3 numbers of 0 or more"),
        ("wkd_l", {}, "wkd_l needs args.teacher_head"),
        ("reviewkd", {"layers": {"a": "b"}}, "two or more pairs of layers; name them"),
        ("multi_avg_loss", {"weights": [1, 0]}, "one number above 0 per teacher"),
    ],
)
def test_bad_arguments_are_named(name, args, words):
    with pytest.raises(UserError) as raised:
        create_loss(name, args)
    assert words in str(raised.value)


# Loss -> its arguments that are numbers above 0.
ABOVE_ZERO = {
    "ab": "margin",
    "abkd": "temperature",
    "at": "power",
    "bv_agree": "top_k",
    "bv_kl": "temperature",
    "cat_kd": "size",
    "cc_delta": "embed_dim",
    "cckd": "gamma max_power",
    "crd": "num_examples negatives",
    "ctkd": "curriculum_steps",
    "cwd": "temperature",
    "dist": "temperature eps",
    "dist_plus": "temperature",
    "dkd": "temperature",
    "itrd": "alpha",
    "ft": "rate",
    "kd": "temperature",
    "ldrld": "temperature",
    "lskd": "eps",
    "mlkd": "temperature",
    "mlkd_bc": "temperature",
    "nkd": "temperature",
    "normkd": "scale",
    "ofa": "temperature exponent",
    "pad": "eps",
    "pkt": "eps",
    "reviewkd": "width",
    "rkd": "eps",
    "rld": "temperature confidence_temperature",
    "nd": "num_classes",
    "sdd": "temperature complement_weight",
    "scalekd": "heads score_scale",
    "semckd": "embed_width",
    "skd": "temperature tikhonov",
    "srd": "exponent eps",
    "sskd": "temperature",
    "ttm": "temperature",
    "wkd_f": "mean_weight grid eps",
    "wkd_l": "temperature sharpness entropy iterations",
    "wsld": "temperature",
}


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, keys in ABOVE_ZERO.items() for key in keys.split()]
)
@pytest.mark.parametrize("value", [0, -1.5, True, "1"])
def test_numbers_that_must_be_above_zero_are_refused_by_name(name, key, value):
    with pytest.raises(UserError) as raised:
        create_loss(name, {**ARGS[name], key: value})
    words = f"distill.losses: {name}.{key} is {value!r}; give a number above 0"
    assert str(raised.value) == words


@pytest.mark.parametrize(
    ("name", "key", "choices"),
    [
        ("fitnet", "regressor", "auto, none, conv1x1, convreg, linear"),
        ("kd", "reduction", "batchmean, numel"),
        ("kd", "form", "kl, cross_entropy"),
        ("bkd", "reduction", "batchmean, numel"),
        ("cckd", "kernel", "bilinear, gaussian, unit_gaussian"),
    ],
)
def test_unknown_choices_are_refused_with_the_known_ones(name, key, choices):
    with pytest.raises(UserError) as raised:
        create_loss(name, {**ARGS[name], key: "odd"})
    assert str(raised.value).endswith(f".{key} is 'odd'; choose one of {choices}")


def test_section_defaults_are_dropped_for_losses_without_that_argument():
    loss = create_loss("bv_l2", temperature=4.0, group_size=2)
    assert not hasattr(loss, "temperature")
    assert not hasattr(loss, "group_size")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("kd", {"teacher_logits": (), "sparse_teacher": None}, "set distill.teacher"),
        ("kd", {"teacher_logits": (torch.zeros(4, 7),) * 2}, "multi_avg_prob"),
        ("kd", {"teacher_logits": (torch.zeros(4, 9),)}, "the same classes on both sides"),
        ("deit_hard", {"student_distill_logits": None}, "a distillation token"),
        (
            "deit_hard",
            {"student_distill_logits": torch.zeros(4, 9)},
            "logits (4, 7) and the student (4, 9)",
        ),
        ("mlkd", {"strong_student_logits": None}, "set distill.views=weak_strong and data"),
        ("mlkd_total", {"strong_student_logits": None}, "no second, strongly augmented one"),
        ("crld", {"strong_teacher_logits": ()}, "and 0 of teachers; give exactly one"),
        ("sskd", {"turned": None}, "set distill.views=rotations"),
        ("tinyvit_sparse", {"sparse_teacher": None}, "distill.teacher_cache"),
        ("multi_avg_prob", {"teacher_logits": ()}, "need live teachers"),
        ("multi_avg_loss", {"teacher_logits": (torch.zeros(4, 7),)}, "2 weights for 1 teachers"),
        (
            "wkd_l",
            {"teacher_features": {"fc.weight": torch.ones(9, 5)}},
            "has 9 rows for 7 classes",
        ),
        ("wkd_l", {"teacher_features": {}}, "'fc.weight' was not collected"),
        ("bv_l2", {"teacher_logits": ()}, "bv_logsoftmax_euclidean"),
        (
            "ldrld",
            {"student_logits": torch.zeros(4, 4), "teacher_logits": (torch.zeros(4, 4),)},
            "ldrld.depth (4) must be less than the number of classes (4)",
        ),
        ("vitkd", {"example_indices": None}, "vitkd draws its masks by the examples' indices"),
        (
            "nd",
            {"student_logits": torch.zeros(4, 9)},
            "nd.num_classes (7) is less than the student's 9",
        ),
        ("crd", {"example_indices": None}, "needs the examples' indices"),
        ("fitnet", {"student_features": {"stage.2": torch.zeros(1)}}, "did you mean 'stage.2'"),
    ],
)
def test_unusable_inputs_are_named(name, change, words):
    inputs = replace(create_inputs(name), **change)
    with pytest.raises(UserError) as raised:
        create_example_loss(name)(inputs)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("name", "student", "teacher", "words"),
    [
        ("nst", (4, 5), (4, 5), "has no positions; name layers whose outputs are maps"),
        ("nst", (4, 9, 5), (4, 8, 5), "the same number of tokens"),
        ("fsp", (4, 5, 4, 4), (4, 6, 4, 4), "choose maps of equal widths"),
        ("fsp", (4, 5, 3, 4), (4, 5, 4, 4), "fsp cannot pool maps of (8, 4) to (3, 4)"),
        ("cat_kd", (4, 6, 4, 4), (4, 5, 4, 4), "name the maps that are pooled before it"),
        ("sdd", (4, 5, 1, 1), (4, 5, 1, 1), "ask for more cells than maps of (1, 1) have"),
        ("sdd", (4, 6, 4, 4), (4, 5, 4, 4), "sdd cannot apply a classifier of (7, 5)"),
        ("ofd", (4, 6, 4, 4), (4, 6, 4, 4), "a weight of (5,) for activations (4, 6, 4, 4) of"),
        ("reviewkd", (4, 5, 3, 4), (4, 5, 3, 4), "cannot enlarge maps of (3, 4) to (8, 4)"),
        ("wkd_f", (4, 5, 2, 2), (4, 5, 2, 2), "has one position in a cell"),
    ],
)
def test_incomparable_activations_are_named(name, student, teacher, words):
    inputs = create_inputs(name)
    inputs.student_features["stage.1"] = torch.zeros(student)
    inputs.teacher_features["layer.2"] = torch.zeros(teacher)
    with pytest.raises(UserError) as raised:
        create_example_loss(name)(inputs)
    assert words in str(raised.value)


def test_a_group_that_does_not_divide_the_batch_is_refused():
    with pytest.raises(UserError, match=r"distill\.group_size \(3\) does not divide"):
        create_loss("dist", group_size=3)(create_inputs("dist"))


@pytest.mark.parametrize(
    ("regressor", "student", "teacher", "words"),
    [
        ("none", (1, 4, 8, 8), (1, 6, 8, 8), "use conv1x1 or convreg"),
        ("conv1x1", (1, 4, 8, 8), (1, 4, 4, 4), "use convreg"),
        ("linear", (1, 9, 4), (1, 6, 4), "choose layers of like shapes"),
        ("convreg", (1, 4, 5, 5), (1, 4, 7, 7), "choose a student layer"),
    ],
)
def test_an_impossible_projection_lists_the_possible_ones(regressor, student, teacher, words):
    loss = create_loss("fitnet", {"layers": {"a": "b"}, "regressor": regressor})
    with pytest.raises(UserError) as raised:
        loss.build({"a": student}, {"b": teacher})
    assert words in str(raised.value)


def test_only_feature_maps_can_be_rebuilt():
    loss = create_loss("mgd", {"layers": {"a": "b"}})
    with pytest.raises(
        UserError, match=r"mgd rebuilds maps and teacher layer 'b' gives \(1, 9, 4\)"
    ):
        loss.build({"a": (1, 9, 4)}, {"b": (1, 9, 4)})


@pytest.mark.parametrize(
    ("name", "words"), [("ft", "ft paraphrases maps"), ("semckd", "semckd compares maps")]
)
def test_only_feature_maps_have_factors_and_projectors(name, words):
    more = {"paraphrase_steps": 0} if name == "ft" else {"group_size": 2}
    loss = create_loss(name, {"layers": {"a": "b"}} | more)
    with pytest.raises(UserError, match=words):
        loss.build({"a": (1, 9, 4)}, {"b": (1, 9, 4)})


@pytest.mark.parametrize(
    ("name", "student", "words"),
    [
        ("vitkd", (1, 4, 6), "behind 1 tokens; name blocks with the same square grid"),
        ("scalekd", (1, 5, 6), "scalekd with 8 heads cannot attend from"),
    ],
)
def test_vectors_without_a_grid_are_refused(name, student, words):
    loss = create_loss(name, {"layers": {"a": "a", "b": "b"}})
    with pytest.raises(UserError) as raised:
        loss.build(dict.fromkeys("ab", student), dict.fromkeys("ab", (1, 5, 6)))
    assert words in str(raised.value)


def test_reviewkd_refuses_stages_of_different_sizes():
    loss = create_loss("reviewkd", {"layers": {"a": "a", "b": "b"}})
    shapes = {"a": (1, 3, 8, 8), "b": (1, 5, 4, 4)}
    with pytest.raises(UserError, match="name maps of equal height and width"):
        loss.build(shapes, shapes | {"b": (1, 5, 2, 2)})


def test_an_unknown_layer_lists_similar_ones():
    loss = create_loss("fitnet", {"layers": {"blocks.3": "blocks.55"}})
    shapes = {f"blocks.{i}": (1, 9, 4) for i in range(12)}
    with pytest.raises(UserError, match=r"teacher has no layer 'blocks.55'; did you mean 'blocks"):
        loss.build(shapes, shapes)
