"""One set of inputs that every loss can run on, and arguments for each registered name."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from losses.base import Loss, LossInputs, SparseTeacher, Turned
from losses.factory import create_loss
from losses.table import LOSSES

CLASSES = 7
EXAMPLES_IN_SPLIT = 12
MAPS = {"layers": {"stage.1": "layer.2"}}
FLOW = {"layers": {"stage.0": "layer.1", "stage.1": "layer.2"}}
SHAPES = (
    {
        "stage.0": (1, 3, 8, 4),
        "stage.1": (1, 5, 4, 4),
        "block.0": (1, 5, 4),
        "block.1": (1, 5, 6),
        "wide": (1, 15, 2, 4),
    },
    {
        "layer.1": (1, 3, 8, 4),
        "layer.2": (1, 5, 4, 4),
        "block.0": (1, 5, 6),
        "block.1": (1, 5, 6),
        "fc.weight": (7, 5),
    },
)
BLOCKS = {"layers": {"block.0": "block.0", "block.1": "block.1"}}
HEAD = {"teacher_head": "fc"}
# A loss that is not in this list is tried with its defaults.
_CHOSEN: dict[str, dict[str, Any]] = {
    "ab": FLOW,
    "abkd": {"temperature": 2.0},
    "at": MAPS,
    "at_paper": MAPS,
    "bv_agree": {"top_k": 2},
    "bv_hard": {"label_smoothing": 0.1},
    "bv_kl": {"temperature": 2.0},
    "cat_kd": MAPS | HEAD | {"student_head": "head"},
    "cc_delta": MAPS | {"embed_dim": 3},
    "cckd": MAPS | {"kernel": "unit_gaussian"},
    "cckd_paper": MAPS,
    "crd": MAPS | {"num_examples": EXAMPLES_IN_SPLIT, "embed_dim": 4, "negatives": 3},
    "crld": {"weak_confidence": 0.4, "strong_confidence": 0.5, "across": 2.0},
    "ctkd": {"curriculum_steps": 10},
    "cwd": FLOW | {"temperature": 2.0},
    "deit_soft": {"temperature": 3.0},
    "dist": {"temperature": 2.0},
    "dist_plus": FLOW | {"temperature": 2.0, "weights": [1.0, 2.0, 0.5, 3.0]},
    "fitnet": MAPS,
    "fsp": FLOW,
    "ft": {"layers": {"stage.0": "layer.2"}, "paraphrase_steps": 0},
    "gram_kl": FLOW | {"gram_temperature": 0.5},
    "gram_mse": FLOW,
    "hard": {"label_smoothing": 0.1},
    "hcl": MAPS,
    "ickd": FLOW,
    "itrd": FLOW,
    "jsd": {"temperature": 2.0, "beta": 0.3},
    "ldrld": {"depth": 4, "alpha": 2.0, "beta": 0.5},
    "lskd": {"loss": "nkd", "loss_args": {"gamma": 2.0}},
    "mgd": FLOW | {"mask_ratio": 0.0},
    "mlkd": {"standardise": True},
    "multi_avg_loss": {"weights": [1.0, 3.0]},
    "multi_avg_prob": {"temperature": 2.0},
    "multi_sum": {"loss": "dkd"},
    "nd": MAPS | {"num_classes": CLASSES},
    "norm": {"layers": {"wide": "layer.2"}},
    "nst": FLOW,
    "ofa": {"exponent": 1.5},
    "ofd": FLOW,
    "pad": FLOW,
    "pkt": MAPS,
    "queue_kl": MAPS | {"size": 16, "queue_temperature": 0.3},
    "reverse_kl": {"temperature": 2.0},
    "prediction_huber": {"delta": 0.5},
    "reviewkd": FLOW | {"width": 4},
    "rkd": MAPS,
    "rkd_unit": MAPS,
    "rld": {"beta": 2.0, "confidence_temperature": 1.5},
    "scalekd": {"layers": {"stage.0": "layer.2"}, "alternating_weight": 2.0, "heads": 5},
    "sdd": MAPS | HEAD | {"student_head": "head", "scales": [1, 2], "complement_weight": 3.0},
    "semckd": FLOW | {"group_size": 2, "embed_width": 3},
    "simkd": MAPS | HEAD,
    "skd": {"tikhonov": 0.3},
    "sp": MAPS,
    "srd": FLOW,
    "srrl": MAPS | HEAD | {"head_weight": 2.0},
    "sskd": {"layers": {"stage.0": "layer.2"}, "head_steps": 0, "keep": [0.5, 0.75]},
    "vid": FLOW,
    "vitkd": BLOCKS | {"low_weight": 0.3, "high_weight": 0.2},
    "wkd_f": FLOW | {"grid": 2, "mean_weight": 3.0},
    "wkd_l": HEAD | {"gamma": 3.0},
}
ARGS = {name: _CHOSEN.get(name, {}) for name in LOSSES.names()}


def _list_second_names() -> dict[str, str]:
    """The other names of a loss to its first, the shortest one."""
    first: dict[Any, str] = {}
    for name in sorted(ARGS, key=len):
        first.setdefault(LOSSES.get(name), name)
    return {name: first[LOSSES.get(name)] for name in ARGS if first[LOSSES.get(name)] != name}


def _is_between_examples(name: str) -> bool:
    """Whether a loss has groups of its own; those around another loss have its groups."""
    group_size = inspect.signature(LOSSES.get(name)).parameters.get("group_size")
    return group_size is not None and group_size.default is not None


# What holds for the first name of a loss holds for the others.
ALIASES = _list_second_names()
NAMES = sorted(ARGS.keys() - ALIASES)
BETWEEN_EXAMPLES = tuple(name for name in ARGS if _is_between_examples(name))
# Their queue holds the examples of a step, of all ranks: `tests/losses/test_queue.py` shows it.
WITH_QUEUE = ("queue_kl",)
NO_GRADIENT = ("bv_agree",)
STUDENT_FIELDS = ("student_logits", "student_distill_logits", "strong_student_logits")


def create_example_loss(name: str, **more: Any) -> Loss:
    """The loss with its example arguments, its projections made from fixed random numbers."""
    loss = create_loss(name, ARGS[name] | more)
    torch.manual_seed(1)
    loss.build(*SHAPES)
    return loss


def create_inputs(name: str, batch: int = 4, scale: float = 1.0) -> LossInputs:
    """Random float32 inputs; two teachers for ensembles, a stored one where it is needed."""
    numbers = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return scale * torch.randn(batch, *shape, generator=numbers)

    targets = torch.softmax(3 * draw(CLASSES), dim=-1)
    teachers = (draw(CLASSES), draw(CLASSES))
    top = torch.log_softmax(teachers[0], dim=-1).topk(3, dim=-1)
    stored = SparseTeacher(top.values, top.indices, 1 - top.values.exp().sum(dim=-1))
    positions = torch.arange(batch) % EXAMPLES_IN_SPLIT
    negatives = (positions[:, None] + torch.arange(1, 4)) % EXAMPLES_IN_SPLIT
    inputs = LossInputs(
        student_logits=draw(CLASSES).requires_grad_(),
        targets=targets,
        labels=targets.argmax(dim=-1),
        teacher_logits=teachers if name.startswith("multi_") else teachers[:1],
        sparse_teacher=stored,
        student_distill_logits=draw(CLASSES).requires_grad_(),
        student_features={"stage.1": draw(5, 4, 4).requires_grad_()},
        teacher_features={"layer.2": draw(5, 4, 4)},
        strong_student_logits=draw(CLASSES).requires_grad_(),
        strong_teacher_logits=(draw(CLASSES),),
        example_indices=positions,
        noise_key=torch.tensor([1234567]),
        contrast_indices=torch.cat([positions[:, None], negatives], dim=1),
    )
    inputs.student_features["stage.0"] = draw(3, 8, 4).requires_grad_()
    inputs.teacher_features["layer.1"] = draw(3, 8, 4)
    heads = torch.randn(2, CLASSES, 5, generator=numbers)
    inputs.student_features["head.weight"] = heads[0].requires_grad_()
    inputs.teacher_features["fc.weight"] = heads[1]
    inputs.teacher_features["fc.bias"] = torch.randn(CLASSES, generator=numbers)
    inputs.student_features["head.bias"] = torch.randn(
        CLASSES, generator=torch.Generator().manual_seed(3)
    ).requires_grad_()
    tokens = torch.Generator().manual_seed(4)
    for path, width in (("block.0", 4), ("block.1", 6)):
        own = torch.randn(batch, 5, width, generator=tokens)
        inputs.student_features[path] = (scale * own).requires_grad_()
        inputs.teacher_features[path] = scale * torch.randn(batch, 5, 6, generator=tokens)
    for path, width in (("layer.1", 3), ("layer.2", 5)):
        inputs.teacher_features[f"{path}.weight"] = torch.randn(width, generator=numbers)
        inputs.teacher_features[f"{path}.bias"] = torch.randn(width, generator=numbers)
    wide = torch.randn(batch, 15, 2, 4, generator=torch.Generator().manual_seed(6))
    inputs.student_features["wide"] = (scale * wide).requires_grad_()
    inputs.teacher_features["layer.1.bias"][0] = 9.0  # nearly nothing of it lies below 0
    return replace(inputs, turned=create_turned(batch, scale))


def create_turned(batch: int, scale: float) -> Turned:
    """Create the logits of both models for three rotated copies of each example."""
    numbers = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return scale * torch.randn(batch, 3, *shape, generator=numbers)

    student = {"stage.0": draw(3, 8, 4).requires_grad_()}
    teacher = {"layer.2": draw(5, 4, 4)}
    return Turned(draw(CLASSES).requires_grad_(), (draw(CLASSES),), student, teacher)


def is_parameter(path: str) -> bool:
    """Whether a path of `features` names a parameter, which has no row for each example."""
    return path.endswith((".weight", ".bias"))


def is_of_examples(name: str) -> bool:
    """Whether a field or an activation has one row for each example."""
    return name != "noise_key" and not is_parameter(name)


def map_examples(inputs: Any, change: Any) -> Any:
    """Inputs, or their turned copies, with `change` applied to all that has a row an example.

    To the classifiers' parameters and the key of masks only changes of place and type apply, which
    keep the shape.
    """
    values: dict[str, Any] = {}

    def change_named(name: str, value: Tensor) -> Tensor:
        changed = change(value)
        return value if not is_of_examples(name) and changed.shape != value.shape else changed

    for name, value in vars(inputs).items():
        if isinstance(value, Tensor):
            values[name] = change_named(name, value)
        elif isinstance(value, tuple):
            values[name] = tuple(change(v) for v in value)
        elif isinstance(value, dict):
            values[name] = {k: change_named(k, v) for k, v in value.items()}
        elif isinstance(value, Turned):
            values[name] = map_examples(value, change)
        elif isinstance(value, SparseTeacher):
            values[name] = SparseTeacher(*(change(v) for v in vars(value).values()))
    return replace(inputs, **values)


def get_student_tensors(inputs: LossInputs) -> list[Tensor]:
    """All tensors of examples that may get a gradient."""
    features = inputs.student_features.items()
    activations = [value for path, value in features if not is_parameter(path)]
    turned = [inputs.turned.student_logits, *inputs.turned.student_features.values()]
    return [getattr(inputs, name) for name in STUDENT_FIELDS] + activations + turned


def get_teacher_tensors(inputs: LossInputs) -> list[Tensor]:
    """All floating tensors of teachers."""
    return [
        *inputs.teacher_logits,
        *inputs.strong_teacher_logits,
        *inputs.teacher_features.values(),
        *inputs.turned.teacher_logits,
        *inputs.turned.teacher_features.values(),
        inputs.sparse_teacher.log_probs,
        inputs.sparse_teacher.residual,
        inputs.targets,
    ]
