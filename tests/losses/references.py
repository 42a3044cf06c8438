"""Formulas of losses in plain NumPy and float64, written from the papers, not from the code.

`LOGIT_REFERENCES` here and `FEATURE_REFERENCES` next door have one function for each name that the
file of reference values does not hold; it takes an `Example` and gives the value over examples that
are all valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Example:
    """Inputs of one loss.

    Attributes:
      logits: [B, K] of the student.
      teachers: [B, K] of each teacher.
      strong: [B, K] of student and teacher for the strong view.
      turned: logits [B, 3, K] and activations [B, 3, ...] of student and teacher.
      classes: [B], the heaviest class of each target.
      targets: [B, K].
      student, teacher: activations by module path.
      state: parameters and buffers of the loss before the call.
      args: arguments of the loss.
      indices: [B], positions in the split.
      noise_key: of the step.
    """

    logits: Array
    teachers: tuple[Array, ...]
    classes: Array
    targets: Array
    student: Mapping[str, Array]
    teacher: Mapping[str, Array]
    state: Mapping[str, Array]
    strong: tuple[Array, Array]
    turned: tuple[tuple[Array, Mapping[str, Array]], tuple[Array, Mapping[str, Array]]]
    args: Mapping[str, Any]
    indices: Array
    noise_key: int

    def get(self, key: str, default: Any) -> Any:
        """Return an argument or its default."""
        return self.args.get(key, default)


def softmax(logits: Array) -> Array:
    """Probabilities over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def get_kl(first: Array, second: Array) -> Array:
    """[B] KL(first || second) of rows of probabilities, without classes of probability 0."""
    rows = [
        sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
        for p, q in zip(first, second, strict=True)
    ]
    return np.array(rows)


def standardise(logits: Array) -> Array:
    """Rows of mean 0 and deviation 1, divisor K - 1 and the addend that `lskd` documents."""
    return (logits - logits.mean(1, keepdims=True)) / (logits.std(1, ddof=1, keepdims=True) + 1e-7)


def compute_abkd(example: Example) -> float:
    """By the definition and its limits, on probabilities."""
    temperature = example.get("temperature", 4.0)
    a, b = example.get("alpha", 0.9), example.get("beta", 0.2)
    p, q = softmax(example.teachers[0] / temperature), softmax(example.logits / temperature)
    if a and b:
        mixed = p**a * q**b - a / (a + b) * p ** (a + b) - b / (a + b) * q ** (a + b)
        cells = -mixed / (a * b)
    elif a:
        cells = (p**a * np.log(p**a / q**a) - p**a + q**a) / a**2
    elif b:
        cells = (q**b * np.log(q**b / p**b) - q**b + p**b) / b**2
    else:
        cells = (np.log(p) - np.log(q)) ** 2 / 2
    return cells.sum(axis=1).mean()


def compute_ctkd(example: Example) -> float:
    """`kd` at the temperature of the parameter."""
    raw = float(example.state["raw_temperature"][0])
    temperature = 1 + 20 / (1 + np.exp(-raw))
    p, q = softmax(example.teachers[0] / temperature), softmax(example.logits / temperature)
    return temperature**2 * get_kl(p, q).mean()


def compute_normkd(example: Example) -> float:
    """KL at each side's deviation times the scale, by the teacher's temperature squared."""
    scale = example.get("scale", 2.0)
    hot, warm = (scale * x.std(1, ddof=1) for x in (example.teachers[0], example.logits))
    p = softmax(example.teachers[0] / hot[:, None])
    q = softmax(example.logits / warm[:, None])
    return (hot**2 * get_kl(p, q)).mean()


def compute_rld(example: Example) -> float:
    """Example by example, with the classes left as a list."""
    temperature = example.get("temperature", 4.0)
    sure = example.get("confidence_temperature", temperature)
    values = []
    for s, t, y in zip(example.logits, example.teachers[0], example.classes, strict=True):
        best, own = softmax(t / sure).max(), softmax(s / sure)[y]
        pairs = np.array([[best, 1 - best]]), np.array([[own, 1 - own]])
        scd = sure**2 * get_kl(*pairs)[0]
        below = [c for c in range(len(t)) if t[c] < t[y]]
        mcd = 0.0
        if below:
            left = softmax(t[None, below] / temperature), softmax(s[None, below] / temperature)
            mcd = temperature**2 * get_kl(*left)[0]
        values.append(example.get("alpha", 1.0) * scd + example.get("beta", 1.0) * mcd)
    return float(np.mean(values))


def compute_crld(example: Example) -> float:
    """Example by example, as the teacher's sureness of each view lets its pairs of answers in."""
    temperature, values = example.get("temperature", 4.0), []

    def kd(student: Array, teacher: Array) -> float:
        p, q = softmax(teacher[None] / temperature), softmax(student[None] / temperature)
        return temperature**2 * get_kl(p, q)[0]

    views = zip(example.logits, example.teachers[0], *example.strong, strict=True)
    for weak, weak_teacher, strong, strong_teacher in views:
        value = 0.0
        if softmax(weak_teacher).max() >= example.args["weak_confidence"]:
            value += kd(weak, weak_teacher) + kd(strong, strong_teacher)
        if softmax(strong_teacher).max() >= example.args["strong_confidence"]:
            value += example.get("across", 1.0) * (
                kd(strong, weak_teacher) + kd(weak, strong_teacher)
            )
        values.append(value)
    return float(np.mean(values))


def compute_bce_kd(example: Example) -> float:
    """Class by class, by the definition of the sigmoid."""
    p, q = (1 / (1 + np.exp(-side)) for side in (example.teachers[0], example.logits))
    return float(-(p * np.log(q) + (1 - p) * np.log(1 - q)).sum(axis=1).mean())


def compute_reverse_kl(example: Example) -> float:
    """KL with the student first."""
    temperature = example.get("temperature", 4.0)
    p, q = softmax(example.teachers[0] / temperature), softmax(example.logits / temperature)
    return temperature**2 * get_kl(q, p).mean()


def compute_jsd(example: Example) -> float:
    """Both to their mixture."""
    temperature, beta = example.get("temperature", 4.0), example.get("beta", 0.5)
    p, q = softmax(example.teachers[0] / temperature), softmax(example.logits / temperature)
    mixture = beta * p + (1 - beta) * q
    return temperature**2 * (beta * get_kl(p, mixture) + (1 - beta) * get_kl(q, mixture)).mean()


def compute_nkd(student: Array, teacher: Array, classes: Array, gamma: float) -> float:
    """NKD at temperature 1."""
    values = []
    for s, t, y in zip(student, teacher, classes, strict=True):
        others = np.arange(len(s)) != y
        target = -softmax(t)[y] * np.log(softmax(s)[y])
        values.append(target - gamma * (softmax(t[others]) * np.log(softmax(s[others]))).sum())
    return float(np.mean(values))


def compute_lskd(example: Example) -> float:
    """NKD, or the named loss, on standardised logits."""
    student, teacher = standardise(example.logits), standardise(example.teachers[0])
    if example.get("loss", "kd") == "nkd":
        return compute_nkd(student, teacher, example.classes, example.args["loss_args"]["gamma"])
    temperature = 4.0
    return 16.0 * get_kl(softmax(teacher / temperature), softmax(student / temperature)).mean()


def compute_dkd(student: Array, teacher: Array, classes: Array, beta: float) -> float:
    """DKD at temperature 4 and alpha 1."""
    values = []
    for s, t, y in zip(student / 4, teacher / 4, classes, strict=True):
        others = np.arange(len(s)) != y
        own = [np.array([[p[y], 1 - p[y]]]) for p in (softmax(t), softmax(s))]
        rest = [softmax(x[None, others]) for x in (t, s)]
        values.append(16 * (get_kl(*own)[0] + beta * get_kl(*rest)[0]))
    return float(np.mean(values))


def compute_multi_sum(example: Example) -> float:
    """DKD of each teacher, added."""
    values = [compute_dkd(example.logits, t, example.classes, 8.0) for t in example.teachers]
    return float(sum(values))


def get_rows(activation: Array) -> Array:
    """[B, D]."""
    return activation.reshape(len(activation), -1)


def compute_cckd_paper(example: Example) -> float:
    """The squared gap of the two Gram matrices over B^2."""
    s, t = get_rows(example.student["stage.1"]), get_rows(example.teacher["layer.2"])
    return float(((s @ s.T - t @ t.T) ** 2).sum() / len(s) ** 2)


def compute_rkd_unit(example: Example) -> float:
    """Pair by pair and triple by triple, on unit rows."""
    sides = []
    for rows in (get_rows(example.student["stage.1"]), get_rows(example.teacher["layer.2"])):
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        gaps = rows[None] - rows[:, None]
        distances = np.linalg.norm(gaps, axis=-1)
        directions = gaps / np.where(distances, distances, 1)[..., None]
        angles = np.einsum("ijd,ikd->ijk", directions, directions)
        sides.append((distances / distances[distances > 0].mean(), angles))
    huber = [
        np.where(abs(a - b) < 1, (a - b) ** 2 / 2, abs(a - b) - 0.5).mean()
        for a, b in zip(*sides, strict=True)
    ]
    return float(25 * huber[0] + 50 * huber[1])


def get_correlation(first: Array, second: Array) -> float:
    """Pearson's, with the addend to the product of norms that `dist` documents."""
    norms = [np.linalg.norm(x - x.mean()) for x in (first, second)]
    together = norms[0] * norms[1]
    return np.corrcoef(first, second)[0, 1] * together / (together + 1e-8)


def compute_skd(example: Example) -> float:
    """Covariance and inverse by NumPy, example by example."""
    p, q = softmax(example.teachers[0] / 4), softmax(example.logits / 4)
    grams = []
    for logits in (example.logits, example.teachers[0]):
        rows = logits / np.linalg.norm(logits, axis=1, keepdims=True)
        grams.append(rows @ rows.T)
    gap = grams[0] - grams[1]
    white = np.linalg.inv(np.cov(gap.T) + example.get("tikhonov", 0.1) * np.eye(len(gap)))
    lengths = [np.sqrt(row @ white @ row) for row in gap]
    return get_kl(p, q).mean() + example.get("direction_weight", 1.0) * float(np.mean(lengths))


def compute_ldrld(example: Example) -> float:
    """Pair by pair of the student's best classes."""
    values = []
    for s, t in zip(example.logits / 4, example.teachers[0] / 4, strict=True):
        best = list(np.argsort(-s)[: example.args["depth"]])
        rest = [c for c in range(len(s)) if c not in best]
        local = get_kl(softmax(t[None, best]), softmax(s[None, best]))[0]
        for i, first in enumerate(best, start=1):
            for j, second in enumerate(best[i:], start=i + 1):
                pair = [first, second]
                kl = get_kl(softmax(t[None, pair]), softmax(s[None, pair]))[0]
                local += 2 * np.exp(-0.05 * (i + j)) / (abs(i - j) + 1.5) * kl
        left = get_kl(softmax(t[None, rest]), softmax(s[None, rest]))[0]
        values.append(16 * (example.args["alpha"] * local + example.args["beta"] * left))
    return float(np.mean(values))


def compute_prediction(example: Example, kind: str) -> float:
    """Squares, sizes, or Huber's mixture of the gaps."""
    gaps = np.abs(example.logits - example.teachers[0])
    delta = example.get("delta", 1.0)
    forms = {
        "mse": gaps**2,
        "mae": gaps,
        "huber": np.where(gaps <= delta, gaps**2 / 2, delta * (gaps - delta / 2)),
    }
    return float(forms[kind].mean())


LOGIT_REFERENCES: dict[str, Callable[[Example], float]] = {
    "abkd": compute_abkd,
    "cckd_paper": compute_cckd_paper,
    "crld": compute_crld,
    "ctkd": compute_ctkd,
    "jsd": compute_jsd,
    "ldrld": compute_ldrld,
    "lskd": compute_lskd,
    "multi_sum": compute_multi_sum,
    "normkd": compute_normkd,
    "prediction_huber": lambda example: compute_prediction(example, "huber"),
    "prediction_mae": lambda example: compute_prediction(example, "mae"),
    "prediction_mse": lambda example: compute_prediction(example, "mse"),
    "bce_kd": compute_bce_kd,
    "reverse_kl": compute_reverse_kl,
    "rkd_unit": compute_rkd_unit,
    "rld": compute_rld,
    "skd": compute_skd,
}
