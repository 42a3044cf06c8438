"""Reference values of distillation losses (format kd-fixtures-1) against `losses`.

On the CPU every case runs in float64 and float32, on XLA in float32; a case passes if its value,
its gradients and its further outputs are within the tolerances of the format in every pass.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from losses.base import Loss, LossInputs, SparseTeacher
from losses.factory import create_loss
from losses.table import LOSSES
from losses.weighted import WeightedLoss
from tests.fixture_runs.cases import Arrays, Case, Outcome, Result, get_inputs
from tests.fixture_runs.whole_losses import run_whole

# hundreds of tiny graphs that run once each: the same XLA program, less of LLVM's work on it
QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

GRADIENT = "gradient of "
SMALL = 1e-3  # a difference from a smaller number is relative to this


@dataclass(frozen=True)
class Difference:
    """A number of ours beside the reference's: the largest gap, its size, what is allowed."""

    name: str
    gap: float
    size: float
    tolerance: float

    def get_relative(self) -> float:
        """The gap relative to the reference's size."""
        return self.gap / max(self.size, SMALL)

    def describe(self, dtype: torch.dtype) -> str:
        """Format the difference as one part of a failure's line."""
        label = "float64" if dtype == torch.float64 else "float32"
        return f"{label} {self.name} is off by {self.gap:.3g}, allowed {self.tolerance:.3g}"


# hyper-parameter -> argument of the loss
TEMPERATURE = {"T": "temperature"}
DECOUPLED = TEMPERATURE | {"alpha": "alpha", "beta": "beta"}
LOGIT_LOSSES: dict[str, dict[str, str]] = {
    "kd": TEMPERATURE,
    "hard_kd": {},
    "dkd": DECOUPLED,
    "lskd_kd": TEMPERATURE | {"eps": "eps"},
    "lskd_dkd": DECOUPLED | {"eps": "eps"},
    "nkd": TEMPERATURE | {"gamma": "gamma"},
    "wsld": TEMPERATURE,
    "dist": {"tau": "temperature", "beta": "beta", "gamma": "gamma", "eps": "eps"},
    "ttm": {"gamma_exponent": "temperature"},
    "wttm": {"gamma_exponent": "temperature"},
    "ofa": TEMPERATURE | {"eps_exponent": "exponent"},
    "mlkd_bc": TEMPERATURE,
    "mlkd_cc": TEMPERATURE,
    "bkd": {},
    "bv_euclidean": {},
    "bv_l2": {},
    "bv_hard": {"ls": "label_smoothing"},
    "bv_kl": {"t": "temperature"},
    "bv_logsoftmax_euclidean": {},
    "bv_agree": {"k": "top_k"},
}
RECIPROCALS = ("gamma_exponent",)  # an exponent there is 1 / temperature here
FIXED_ARGS = {"bkd": {"reduction": "numel"}}  # where the reference divides by K and we do not
FEATURE_LOSSES: dict[str, dict[str, str]] = {
    "fitnet": {key: key for key in ("regressor", "kernel", "stride", "padding")},
    "at": {"p": "power"},
    "at_paper": {"p": "power"},
    "hcl": {},
    "rkd": {k: k for k in ("distance_weight", "angle_weight", "squared", "eps")},
    "sp": {},
    "pkt": {"eps": "eps"},
    "cckd": {"kernel": "kernel", "gamma": "gamma", "max_p": "max_power"},
    "cc_delta": {"scale": "scale"},
}
# upstream's names of learned arrays -> parameters of our projections
WEIGHTS = {
    "conv1x1": {"w": "weight"},
    "convreg": {
        "w": "convolution.weight",
        "b": "convolution.bias",
        "bn_w": "norm.weight",
        "bn_b": "norm.bias",
    },
}


def run(path: Path, device: str = "cpu") -> tuple[int, list[str]]:
    """Cases passed, and one line for each that failed.

    Args:
      path: FILE.npz with FILE.json beside it.
      device: `cpu`, or `xla` (the CPU behind XLA unless PJRT_DEVICE says otherwise).
    """
    records = json.loads(path.with_suffix(".json").read_text())["cases"]
    with np.load(path) as arrays:
        return run_cases(records, {key: arrays[key] for key in arrays.files}, device=device)


def run_cases(
    records: Iterable[dict[str, Any]], arrays: Arrays, device: str = "cpu"
) -> tuple[int, list[str]]:
    """Run chosen cases of a file; the result is that of `run`."""
    passes = [torch.float32] if device == "xla" else [torch.float64, torch.float32]
    place, sync = _get_device(device)
    passed, failures = 0, []
    for record in records:
        errors = []
        for dtype in passes:
            case = Case(record, arrays, dtype, place)
            outcome = _evaluate(case, errors)
            sync()  # one graph a case: on XLA the time is compilation and does not shrink in groups
            differences = [] if outcome is None else _compare(case, outcome)
            errors += [d.describe(case.dtype) for d in differences if not d.gap <= d.tolerance]
        if errors:
            failures.append(f"{record['name']}: {'; '.join(errors)}")
        passed += not errors
    return passed, failures


def measure(records: Iterable[dict[str, Any]], arrays: Arrays) -> tuple[float, float | None]:
    """Compute the largest relative differences in float64 on the CPU, of values and of gradients.

    Returns:
      Value and gradient, each relative to the reference's size, or to `SMALL` where that is less;
      None for the gradient if no case has one. Infinite where a case cannot be run.
    """
    values, gradients = [], []
    for record in records:
        case = Case(record, arrays, torch.float64, torch.device("cpu"))
        errors: list[str] = []
        outcome = _evaluate(case, errors)
        if outcome is None:
            return math.inf, math.inf
        for difference in _compare(case, outcome):
            is_gradient = difference.name.startswith(GRADIENT)
            (gradients if is_gradient else values).append(difference.get_relative())
    return max(values), max(gradients) if gradients else None


def _get_device(device: str) -> tuple[torch.device, Callable[[], Any]]:
    if device == "cpu":
        return torch.device("cpu"), lambda: None
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    if "torch_xla" not in sys.modules:
        os.environ.setdefault("XLA_FLAGS", QUICK_COMPILATION)
    import torch_xla

    return torch_xla.device(), torch_xla.sync


def _evaluate(case: Case, errors: list[str]) -> Outcome | None:
    """Value and gradients; what cannot be evaluated is an error of the case."""
    try:
        value, extra = _get_adapter(case.record["loss"])(case)
        value = value / case.record.get("factor", 1.0)
        grads = {}
        if case.record["grad_check"]:
            roles = list(case.record["grad"])
            leaves = [case.tensor(role) for role in roles]
            grads = dict(zip(roles, torch.autograd.grad(value, leaves), strict=True))
    except Exception as error:  # a fault of one case must not hide the others
        errors.append(f"{case.dtype}: {type(error).__name__}: {error}")
        return None
    return Outcome(value, grads, extra)


def _get_adapter(name: str) -> Callable[[Case], Result]:
    special = {
        "deit_soft": _run_deit,
        "deit_hard": _run_deit,
        "mlkd_total": _run_mlkd,
        "tinyvit_sparse": _run_sparse,
        "crd": _run_crd,
        "multi_avg_loss": _run_ensemble,
        "multi_avg_prob": _run_ensemble,
        "multi_avg_logit": _run_ensemble,
        "multi_sum_bv": _run_ensemble,
    }
    if name in special:
        return special[name]
    if name in FEATURE_LOSSES:
        return _run_features
    if name in LOGIT_LOSSES:
        return _run_logits
    if name in LOSSES:
        return run_whole
    raise KeyError(f"no loss of this project stands for {name!r}")


def _get_args(case: Case, names: Mapping[str, str]) -> dict[str, Any]:
    return {
        names[key]: 1 / value if key in RECIPROCALS else value
        for key, value in case.record["hyper"].items()
    }


def _run_logits(case: Case) -> Result:
    name = case.record["loss"]
    args = _get_args(case, LOGIT_LOSSES[name]) | FIXED_ARGS.get(name, {})
    loss = create_loss(name, args)
    inputs = get_inputs(case, teacher_logits=(case.tensor("t"),))
    extra = {}
    if "per_example" in case.record.get("extra", {}):
        extra["per_example"] = loss.get_distance(inputs.student_logits, inputs.teacher_logits[0])
    return loss(inputs), extra


def _run_deit(case: Case) -> Result:
    """The reference's value holds the base term: the whole objective is run."""
    name = case.record["loss"]
    hyper = dict(case.record["hyper"])
    alpha, base = hyper.pop("alpha"), hyper.pop("base")
    if base not in ("ce", "soft_ce"):
        raise KeyError(f"base {base!r}")
    args = {"temperature": hyper["tau"], "reduction": "numel"} if "tau" in hyper else {}
    weighted = WeightedLoss([(name, create_loss(name, args), 1.0)], alpha=alpha)
    inputs = get_inputs(
        case, teacher_logits=(case.tensor("t"),), student_distill_logits=case.tensor("s_dist")
    )
    return weighted(inputs).total, {}


def _run_mlkd(case: Case) -> Result:
    names = {"T0": "temperature", "logit_stand": "standardise", "kd_weight": "weight"}
    args = {names[key]: value for key, value in case.record["hyper"].items()}
    loss = create_loss("mlkd", args)
    inputs = get_inputs(
        case,
        "s_weak",
        teacher_logits=(case.tensor("t_weak"),),
        strong_student_logits=case.tensor("s_strong"),
        strong_teacher_logits=(case.tensor("t_strong"),),
    )
    parts = loss.compute_parts(inputs)
    return loss(inputs), {f"loss_{key}": loss.weight * part for key, part in parts.items()}


def _run_sparse(case: Case) -> Result:
    probs = case.tensor("topk_val")
    teacher = SparseTeacher(probs.log(), case.tensor("topk_idx"), 1 - probs.sum(dim=-1))
    return create_loss("tinyvit_sparse")(get_inputs(case, sparse_teacher=teacher)), {}


def _run_ensemble(case: Case) -> Result:
    name = case.record["loss"]
    hyper = dict(case.record["hyper"])
    teachers = case.tensor("ts").unbind(0)
    if hyper.pop("K", len(teachers)) != len(teachers):
        raise KeyError("K is not the number of teachers")
    (temperature,) = hyper.values()
    loss = create_loss(name, {}, temperature=temperature)
    inputs = get_inputs(case, teacher_logits=teachers)
    extra = {}
    if "per_example" in case.record.get("extra", {}):
        distance = loss.inner.get_distance
        extra["per_example"] = sum(distance(inputs.student_logits, t) for t in teachers)
    return loss(inputs), extra


def _run_features(case: Case) -> Result:
    name = case.record["loss"]
    hyper = dict(case.record["hyper"])
    stages = hyper.pop("stages", None)
    suffixes = [""] if stages is None else [str(index) for index in range(stages)]
    if hyper.pop("reduction", "batchmean") != "batchmean":
        raise KeyError("only batchmean is defined")
    args = {FEATURE_LOSSES[name][key]: value for key, value in hyper.items()}
    args["layers"] = {f"f_s{suffix}": f"f_t{suffix}" for suffix in suffixes}
    if name == "cc_delta":
        args["embed_dim"] = len(case.get_array("w_s"))
    loss = _build(case, create_loss(name, args))
    extra = {}
    if "loss_distance" in case.record.get("extra", {}):
        for part, other in (("distance", "angle"), ("angle", "distance")):
            alone = args | {f"{part}_weight": 1.0, f"{other}_weight": 0.0}
            extra[f"loss_{part}"] = create_loss(name, alone)(_get_feature_inputs(case, loss))
    return loss(_get_feature_inputs(case, loss)), extra


def _build(case: Case, loss: Loss) -> Loss:
    """Projections from the shapes, holding the case's weights."""
    shapes = {role: tuple(entry["shape"]) for role, entry in case.record["inputs"].items()}
    loss.build(shapes, shapes)
    loss = loss.to(case.device, case.dtype)
    weights = {}
    if case.record["loss"] == "cc_delta":
        for side in ("student", "teacher"):
            weights[f"{side}_embeddings.0.weight"] = f"w_{side[0]}"
            weights[f"{side}_embeddings.0.bias"] = f"b_{side[0]}"
    for role, name in WEIGHTS.get(case.record["hyper"].get("regressor"), {}).items():
        weights[f"projections.f_s.{name}"] = role
    with torch.no_grad():
        parameters = dict(loss.named_parameters())
        assert parameters.keys() == weights.keys()
        for name, role in weights.items():
            parameters[name].copy_(case.tensor(role))
    return loss


def _get_feature_inputs(case: Case, loss: Loss) -> LossInputs:
    logits = torch.zeros(len(case.tensor(loss.student_layers()[0])), 2, device=case.device)
    return LossInputs(
        logits,
        logits,
        logits.argmax(dim=-1),
        student_features={role: case.tensor(role) for role in loss.student_layers()},
        teacher_features={role: case.tensor(role) for role in loss.teacher_layers()},
    )


def _run_crd(case: Case) -> Result:
    hyper = case.record["hyper"]
    args = {
        "layers": {"v_s": "v_t"},
        "num_examples": hyper["n_data"],
        "negatives": hyper["K"],
        "contrast_temperature": hyper["tau"],
        "momentum": hyper["momentum"],
        "embed_dim": 0,
    }
    loss = _build(case, create_loss("crd", args))
    loss.eps = hyper["eps"]
    with torch.no_grad():
        for side in ("student", "teacher"):
            getattr(loss, f"{side}_memory").copy_(case.tensor(f"mem_{side[0]}"))
            getattr(loss, f"{side}_normaliser").fill_(hyper["Z"])
    plain = _get_feature_inputs(case, loss)
    inputs = LossInputs(
        plain.student_logits,
        plain.targets,
        plain.labels,
        student_features=plain.student_features,
        teacher_features=plain.teacher_features,
        example_indices=case.tensor("y"),
        contrast_indices=case.tensor("idx"),
    )
    value = loss(inputs)
    return value, {"mem_s_after": loss.student_memory, "mem_t_after": loss.teacher_memory}


def _compare(case: Case, outcome: Outcome) -> list[Difference]:
    """Value, further outputs and gradients beside the reference's."""
    record = case.record
    want = record["value"]
    gap = _get_largest(outcome.value.detach().cpu().numpy(), want)
    differences = [Difference("value", gap, abs(want), _value_tolerance(case))]
    for name, got in outcome.extra.items():
        stored = record["extra"][name]["value"]
        wanted = case.get_array(name) if stored is None else np.asarray(stored)
        size = float(np.abs(wanted).max())
        gap = _get_largest(got.detach().cpu().numpy(), wanted)
        differences.append(Difference(name, gap, size, _get_tolerance(case, size, None)))
    for role, grad in outcome.grads.items():
        gap = _get_largest(*_pick_gradient(case, role, grad))
        size, tolerance = record["grad"][role]["max_abs"], _gradient_tolerance(case, role)
        differences.append(Difference(f"{GRADIENT}{role}", gap, size, tolerance))
    return differences


def _get_largest(got: np.ndarray, wanted: np.ndarray | float) -> float:
    return float(np.abs(np.asarray(got, dtype=np.float64) - wanted).max())


def _pick_gradient(case: Case, role: str, grad: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Our gradient and the stored one, flat, at the stored places."""
    flat = grad.detach().cpu().numpy().ravel()
    if case.record["grad"][role]["stored"] == "full":
        return flat, case.get_array(f"grad_{role}").ravel()
    return flat[case.get_array(f"gradidx_{role}")], case.get_array(f"gradval_{role}")


def _value_tolerance(case: Case) -> float:
    value, reference = case.record["value"], case.record["value_f32"]
    return _get_tolerance(case, abs(value), _get_gap(reference, value))


def _get_tolerance(case: Case, size: float, reference_gap: float | None) -> float:
    if case.dtype == torch.float64:
        return 1e-9 * size + 1e-11
    return max(1e-4 * size, 2e-5, 4 * (reference_gap or 0.0))


def _gradient_tolerance(case: Case, role: str) -> float:
    largest = case.record["grad"][role]["max_abs"]
    if case.dtype == torch.float64:
        return 1e-8 * largest + 1e-11
    reference_gap = _get_gap(case.record["grad_f32_maxabsdiff"].get(role), 0.0) or 0.0
    return max(1e-4 * largest, 1e-6, 4 * reference_gap)


def _get_gap(reference: float | str | None, value: float) -> float | None:
    """Distance of the float32 reference from the exact value; none where it overflowed."""
    if reference is None or isinstance(reference, str):
        return None
    return abs(reference - value) if math.isfinite(reference) else None
