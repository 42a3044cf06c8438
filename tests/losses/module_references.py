"""Reference formulas (`tests.losses.references`) of losses with trained modules or memories."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tests.losses.feature_references import convolve, draw, list_pairs, pool
from tests.losses.references import Array, Example, get_kl, softmax


def unit(vector: Array) -> Array:
    """At unit length."""
    return vector / np.linalg.norm(vector)


def compute_sdd(example: Example) -> float:
    """Cell by cell, with plain loops over the cells of maps that the scales divide."""
    heat, weight = example.get("temperature", 4.0), example.args["complement_weight"]
    heads = [(side["weight"], side["bias"]) for side in list_heads(example)]
    values = []
    ((students, teachers),) = list_pairs(example)
    for student, teacher, label in zip(students, teachers, example.classes, strict=True):
        cells = []
        for scale in example.args["scales"]:
            pools = [pool(maps, scale).reshape(len(maps), -1).T for maps in (student, teacher)]
            cells += list(zip(*pools, strict=True))
        right = []
        for s, t in cells:
            q, p = (w @ x + b for x, (w, b) in zip((s, t), heads, strict=True))
            right.append(p.argmax() == label)
            factor = 1.0 if right[-1] == right[0] else weight
            kl = get_kl(softmax(p[None] / heat), softmax(q[None] / heat))[0]
            values.append(factor * heat**2 * kl)
    return float(np.mean(values))


def list_heads(example: Example) -> list[Mapping[str, Array]]:
    """Weight and bias of both classifiers."""
    sides = (example.student, "head"), (example.teacher, "fc")
    return [{key: side[f"{path}.{key}"] for key in ("weight", "bias")} for side, path in sides]


def compute_nd(example: Example) -> float:
    """Example by example, the class's mean direction or the teacher's own."""
    ((students, teachers),) = list_pairs(example)
    values = []
    for s, t, label in zip(students, teachers, example.classes, strict=True):
        s, t, total = s.mean(axis=(1, 2)), t.mean(axis=(1, 2)), example.state["sums"][label]
        direction = unit(total) if total.any() else unit(t)
        values.append(1 - s @ direction / max(np.linalg.norm(s), np.linalg.norm(t)))
    return float(np.mean(values))


def leak(values: Array) -> Array:
    """Leaky ReLU of slope 0.1."""
    return np.where(values > 0, values, 0.1 * values)


def run_convolutions(example: Example, name: str, maps: Array, *, is_back: bool = False) -> Array:
    """The three layers of an encoder; a transposed one is a convolution with a turned kernel."""
    for layer in (0, 2, 4):
        weight, bias = (example.state[f"{name}.{layer}.{key}"] for key in ("weight", "bias"))
        if is_back:
            weight = weight.swapaxes(0, 1)[:, :, ::-1, ::-1]
        maps = leak(convolve(maps, weight, bias))
    return maps


def compute_ft(example: Example) -> float:
    """The student's maps of twice the height are averaged over pairs of rows."""
    ((students, teachers),) = list_pairs(example)
    values = []
    for student, teacher in zip(students, teachers, strict=True):
        student = student.reshape(len(student), 4, 2, 4).mean(axis=2)
        factor = run_convolutions(example, "encoder", teacher)
        back = run_convolutions(example, "decoder", factor, is_back=True)
        value = ((back - teacher) ** 2).mean()
        if not example.args["paraphrase_steps"]:
            own = run_convolutions(example, "translator", student)
            value += np.abs(unit(own.ravel()) - unit(factor.ravel())).sum()
        values.append(value)
    return float(np.mean(values))


def normalise(maps: Array) -> Array:
    """BatchNorm over examples and positions, weight 1 and bias 0."""
    axes = (0, 2, 3)
    variance = maps.var(axes, keepdims=True)
    return (maps - maps.mean(axes, keepdims=True)) / np.sqrt(variance + 1e-5)


def embed(example: Example, name: str, features: Array) -> Array:
    """[g, e] of one group's activations."""
    rows = features.reshape(len(features), -1)
    hidden = rows @ rows.T
    for layer in (0, 2):
        weight, bias = (example.state[f"{name}.layers.{layer}.{key}"] for key in ("weight", "bias"))
        hidden = (np.maximum(hidden, 0) if layer else hidden) @ weight.T + bias
    return np.array([unit(row) for row in hidden])


def compute_semckd(example: Example) -> float:
    """Group by group and pair by pair."""
    pairs, size = list(list_pairs(example)), example.args["group_size"]
    values = []
    for start in range(0, len(example.classes), size):
        part = slice(start, start + size)
        own, theirs = ([side[index][part] for side in pairs] for index in (0, 1))
        queries = [embed(example, f"queries.{i}", x) for i, x in enumerate(own)]
        keys = [embed(example, f"keys.{j}", x) for j, x in enumerate(theirs)]
        for i, query in enumerate(queries):
            attention = softmax(np.stack([(query * key).sum(axis=1) for key in keys], axis=1))
            for j, teacher in enumerate(theirs):
                gap = compare_maps(example, i * len(theirs) + j, own[i], teacher)
                values.append((attention[:, j] * gap).mean() / len(queries))
    return float(sum(values) / (len(example.classes) / size))


def compare_maps(example: Example, index: int, student: Array, teacher: Array) -> Array:
    """[g] mean squares after the projector of a pair, maps of 8 x 4 averaged to 4 x 4 first."""
    rows = min(student.shape[2], teacher.shape[2])
    student, teacher = (
        side.reshape(*side.shape[:2], rows, side.shape[2] // rows, 4).mean(axis=3)
        for side in (student, teacher)
    )
    weights = {
        key: example.state[f"projectors.{index}.{key}.weight"]
        for key in ("first", "second", "last")
    }
    maps = np.einsum("oc,bchw->bohw", weights["first"][..., 0, 0], student)
    maps = np.maximum(normalise(maps), 0)
    bias = np.zeros(len(weights["second"]))
    maps = np.array([convolve(one, weights["second"], bias) for one in maps])
    maps = np.einsum("oc,bchw->bohw", weights["last"][..., 0, 0], np.maximum(normalise(maps), 0))
    return ((maps - teacher) ** 2).mean(axis=(1, 2, 3))


def compute_vitkd(example: Example) -> float:
    """A grid of 2 x 2 patches behind one token; example by example."""
    (low, low_teacher), (high, high_teacher) = (
        (s[:, 1:], t[:, 1:]) for s, t in list_pairs(example)
    )
    weight, bias = (example.state[f"projections.block/0.{key}"] for key in ("weight", "bias"))
    token = example.state["mask_token"][0, 0]
    layers = [
        [example.state[f"generation.{layer}.{key}"] for key in ("weight", "bias")]
        for layer in (0, 2)
    ]
    ratio, values = example.get("mask_ratio", 0.5), []
    for row, (s, t) in enumerate(zip(high, high_teacher, strict=True)):
        first = ((low[row] @ weight.T + bias - low_teacher[row]) ** 2).sum()
        drawn = draw(example, row, 4)
        masked = sorted(range(4), key=drawn.__getitem__)[int(4 * (1 - ratio)) :]
        seen = np.array([token if i in masked else s[i] for i in range(4)])
        maps = convolve(np.maximum(convolve(seen.T.reshape(-1, 2, 2), *layers[0]), 0), *layers[1])
        gap = ((maps.reshape(len(maps), 4).T - t) ** 2)[masked].sum() / ratio
        values.append(example.args["low_weight"] * first + example.args["high_weight"] * gap)
    return float(np.mean(values))


def compute_scalekd(example: Example) -> float:
    """Head by head and position by position."""
    ((students, teachers),) = list_pairs(example)
    total = 0.0
    for view, factor in enumerate((1.0, example.args["alternating_weight"])):
        prefix = f"projectors.stage/0.{view}."
        state = {k.removeprefix(prefix): v for k, v in example.state.items() if prefix in k}
        answers = project_maps(state, students, example.args["heads"])
        for answer, teacher in zip(answers, teachers, strict=True):
            target = teacher.reshape(len(teacher), -1).T
            sides = [x - x.mean(axis=0) if view else x for x in (answer, target)]
            rows = [np.array([unit(row) for row in side]) for side in sides]
            total += factor * ((rows[0] - rows[1]) ** 2).sum() / len(teachers)
    return float(total)


def project_maps(state: Mapping[str, Array], maps: Array, heads: int) -> list[Array]:
    """Compute [positions, C] of each example by the projector of one view."""

    def apply(name: str, rows: Array) -> Array:
        return rows @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    stem = np.array([convolve(x, state["stem.weight"], state["stem.bias"]) for x in maps])
    seen = np.maximum(normalise(stem), 0) + state["places"]
    queries = apply("query", np.maximum(apply("ask", state["queries"]), 0))
    found = []
    for one in seen:
        tokens = one.reshape(len(one), -1).T
        keys, values = apply("key", tokens), apply("value", tokens)
        parts = []
        for head in np.split(np.arange(queries.shape[1]), heads):
            scores = queries[:, head] @ keys[:, head].T / np.sqrt(len(head))
            parts.append(softmax(scores) @ values[:, head])
        rows = apply("out", np.concatenate(parts, axis=1))
        centred = rows - rows.mean(axis=1, keepdims=True)
        rows = centred / np.sqrt(rows.var(axis=1, keepdims=True) + 1e-5)
        found.append(rows + apply("forwards.2", np.maximum(apply("forwards.0", rows), 0)))
    return found


def apply_head(example: Example, name: str, features: Array) -> Array:
    """Compute the unit-length outputs of one side's head for averaged maps [C, H, W]."""
    hidden = features.mean(axis=(1, 2))
    for layer in (0, 2):
        weight, bias = (example.state[f"{name}.{layer}.{key}"] for key in ("weight", "bias"))
        hidden = (np.maximum(hidden, 0) if layer else hidden) @ weight.T + bias
    return unit(hidden)


def select_predictions(answers: list[tuple[Array, int]], share: float) -> list[int]:
    """List the counted predictions: the correct ones, then the least wrong."""
    wrongs = []
    for number, (scores, right) in enumerate(answers):
        order = sorted(range(len(scores)), key=lambda one: (-scores[one], one))
        wrongs.append((order.index(right), number))
    wrong = sorted(pair for pair in wrongs if pair[0])
    right = [number for rank, number in wrongs if not rank]
    return right + [number for _, number in wrong[: int(share * len(wrong))]]


def compute_sskd(example: Example) -> float:
    """Group by group, copy by copy."""
    batch, heat = len(example.classes), example.get("temperature", 4.0)
    size = example.get("group_size", 0) or batch
    weights = example.get("weights", (0.9, 2.7, 10.0))
    is_learning = example.args["head_steps"] > 0
    plain = heat**2 * get_kl(softmax(example.teachers[0] / heat), softmax(example.logits / heat))
    totals = [weights[0] * plain.mean()]
    for start in range(0, batch, size):
        members = range(start, start + size)
        copies = [(one, turn) for one in members for turn in range(3)]
        (own, _), (theirs, _) = example.turned
        answers = [(theirs[pair], example.classes[pair[0]]) for pair in copies]
        found = []
        for number in select_predictions(answers, example.args["keep"][0]):
            p, q = (softmax(side[copies[number]][None] / heat) for side in (theirs, own))
            found.append(heat**2 * get_kl(p, q)[0])
        totals.append(weights[1] * np.mean(found or [0.0]) * size / batch)
        rows = [compare_rotated(example, pair, members) for pair in copies]
        rights = [one - start for one, _ in copies]
        if is_learning:
            lost = [-np.log(row[1][right]) for row, right in zip(rows, rights, strict=True)]
            totals.append(np.mean(lost) * size / batch)
            continue
        answers = [(row[1], right) for row, right in zip(rows, rights, strict=True)]
        kept = select_predictions(answers, example.args["keep"][1])
        found = [0.25 * get_kl(rows[one][1][None], rows[one][0][None])[0] for one in kept]
        totals.append(weights[2] * np.mean(found or [0.0]) * size / batch)
    return float(sum(totals))


def compare_rotated(example: Example, pair: tuple[int, int], members: range) -> tuple[Array, Array]:
    """Of student and teacher, the distribution of one copy over the images of its group."""
    ((path, teacher_path),) = example.args["layers"].items()
    found = []
    for name, plain, turned in (
        ("student_head", example.student[path], example.turned[0][1][path]),
        ("teacher_head", example.teacher[teacher_path], example.turned[1][1][teacher_path]),
    ):
        copy = apply_head(example, name, turned[pair])
        cosines = [copy @ apply_head(example, name, plain[one]) for one in members]
        found.append(softmax(np.array([cosines]) / 0.5)[0])
    return found[0], found[1]


MODULE_REFERENCES: dict[str, Callable[[Example], float]] = {
    "ft": compute_ft,
    "nd": compute_nd,
    "scalekd": compute_scalekd,
    "sdd": compute_sdd,
    "semckd": compute_semckd,
    "sskd": compute_sskd,
    "vitkd": compute_vitkd,
}
