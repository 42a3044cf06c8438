"""`tests.losses.references` of losses on activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tests.losses.references import Array, Example, get_correlation, softmax


def list_pairs(example: Example) -> Iterator[tuple[Array, Array]]:
    """Activations [B, C, H, W] of the student and the teacher, pair by pair."""
    for student, teacher in example.args["layers"].items():
        yield example.student[student], example.teacher[teacher]


def average(example: Example, compute: Callable[[Array, Array], float]) -> float:
    """The sum over pairs of the mean over examples of what two [C, H, W] give."""
    sums = [
        np.mean([compute(s, t) for s, t in zip(*pair, strict=True)]) for pair in list_pairs(example)
    ]
    return float(sum(sums))


def compute_nst(example: Example) -> float:
    """Kernel by kernel, as a double sum over channels."""

    def compare(first: list[Array], second: list[Array]) -> float:
        return float(np.mean([np.dot(a, b) ** 2 for a in first for b in second]))

    def compute(student: Array, teacher: Array) -> float:
        s, t = ([row.ravel() / np.linalg.norm(row) for row in side] for side in (student, teacher))
        return compare(s, s) + compare(t, t) - 2 * compare(s, t)

    return average(example, compute)


def compute_simkd(example: Example) -> float:
    """The Euclidean distance, squared, over the number of elements."""

    def compute(student: Array, teacher: Array) -> float:
        return np.linalg.norm((student - teacher).ravel()) ** 2 / student.size

    return average(example, compute)


def compute_norm(example: Example) -> float:
    """Segment by segment; the teacher's maps have twice the student's height."""
    ((wide, theirs),) = list_pairs(example)
    small = np.maximum(theirs[:, :, ::2], theirs[:, :, 1::2])
    count = small.shape[1]
    parts = [wide[:, n : n + count] for n in range(0, wide.shape[1], count)]
    return float(sum(((part - small) ** 2).mean() for part in parts))


def compute_cwd(example: Example) -> float:
    """Channel by channel."""
    temperature = example.get("temperature", 4.0)

    def compute(student: Array, teacher: Array) -> float:
        values = []
        for s, t in zip(student, teacher, strict=True):
            p, q = softmax(t.ravel() / temperature), softmax(s.ravel() / temperature)
            values.append((p * np.log(p / q)).sum())
        return temperature**2 * float(np.mean(values))

    return average(example, compute)


def compute_ab(example: Example) -> float:
    """The two cases of the definition."""
    margin = example.get("margin", 1.0)

    def compute(student: Array, teacher: Array) -> float:
        should_fire = (student < margin) * (student - margin) ** 2
        should_rest = (student > -margin) * (student + margin) ** 2
        return np.where(teacher > 0, should_fire, should_rest).sum()

    return average(example, compute)


def compute_ofd(example: Example) -> float:
    """Margins by integrating the normal density below 0, channel by channel."""
    total = 0.0
    for (student, teacher), path in zip(
        list_pairs(example), example.args["layers"].values(), strict=True
    ):
        weight, bias = (example.teacher[f"{path}.{key}"] for key in ("weight", "bias"))
        for channel, (sigma, mean) in enumerate(zip(np.abs(weight), bias, strict=True)):
            grid = np.linspace(min(0, mean) - 12 * sigma, 0, 200_001)
            density = np.exp(-(((grid - mean) / sigma) ** 2) / 2) / (sigma * np.sqrt(2 * np.pi))
            below = np.trapezoid(density, grid)
            margin = np.trapezoid(grid * density, grid) / below if below > 1e-3 else -3 * sigma
            s, t = student[:, channel], np.maximum(teacher[:, channel], margin)
            total += np.where((s <= t) & (t <= 0), 0.0, (s - t) ** 2).sum() / len(s)
    return float(total)


def compute_fsp(example: Example) -> float:
    """Entry by entry; the first map has twice the second's height."""
    (first_s, first_t), (second_s, second_t) = list_pairs(example)

    def get_matrices(first: Array, second: Array) -> Array:
        small = np.maximum(first[:, :, ::2], first[:, :, 1::2])
        return np.einsum("bihw,bjhw->bij", small, second) / 16

    gap = get_matrices(first_s, second_s) - get_matrices(first_t, second_t)
    return float((gap**2).sum(axis=(1, 2)).mean())


def compute_ickd(example: Example) -> float:
    """Rows of both Gram matrices at unit length."""

    def compute(student: Array, teacher: Array) -> float:
        grams = []
        for side in (student, teacher):
            rows = side.reshape(len(side), -1)
            gram = rows @ rows.T
            grams.append(gram / np.linalg.norm(gram, axis=1)[:, None])
        return ((grams[0] - grams[1]) ** 2).sum() / len(student)

    return average(example, compute)


def compute_vid(example: Example) -> float:
    """The density of a normal distribution, without its constant."""
    total = 0.0
    for index, (student, teacher) in enumerate(list_pairs(example)):
        hidden = np.moveaxis(student, 1, -1)
        for layer in (0, 2, 4):
            if layer:
                hidden = np.maximum(hidden, 0)
            hidden = hidden @ example.state[f"gaussians.{index}.mean.{layer}.weight"].T
        raw = example.state[f"gaussians.{index}.raw_variance"]
        variance = np.log(1 + np.exp(raw)) + 1e-5
        assert np.allclose(variance, 5.0)
        target = np.moveaxis(teacher, 1, -1)
        density = np.exp(-((hidden - target) ** 2) / (2 * variance)) / np.sqrt(variance)
        total += -np.log(density).mean()
    return float(total)


def compute_pad(example: Example) -> float:
    """Means over positions; the layers of variances stand at 0 but for what the test gave them."""
    total = 0.0
    for index, (student, teacher) in enumerate(list_pairs(example)):
        s, t = student.mean(axis=(2, 3)), teacher.mean(axis=(2, 3))
        weight, bias = (example.state[f"variances.{index}.{key}"] for key in ("weight", "bias"))
        log_variance = s @ weight.T + bias
        total += ((s - t) ** 2 / (np.exp(log_variance) + 1e-6) + log_variance).mean()
    return float(total)


def compute_wkd_f(example: Example) -> float:
    """Cell by cell of a grid that divides the maps."""
    grid, weight = example.get("grid", 1), example.get("mean_weight", 1.0)

    def compute(student: Array, teacher: Array) -> float:
        height, width = (size // grid for size in student.shape[1:])
        values = []
        for i in range(grid):
            for j in range(grid):
                rows = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
                s, t = student[:, rows[0], rows[1]], teacher[:, rows[0], rows[1]]
                means = s.mean(axis=(1, 2)) - t.mean(axis=(1, 2))
                wide = [np.sqrt(x.var(axis=(1, 2), ddof=1) + 1e-5) for x in (s, t)]
                values.append(weight * (means**2).sum() + ((wide[0] - wide[1]) ** 2).sum())
        return float(np.mean(values))

    return average(example, compute)


def list_vectors(example: Example) -> Iterator[tuple[Array, Array]]:
    """Projected vectors of the student, and the teacher's."""
    for path, (student, teacher) in zip(example.args["layers"], list_pairs(example), strict=True):
        vectors = student.mean(axis=(2, 3)) @ example.state[f"projections.{get_key(path)}.weight"].T
        bias = example.state.get(f"projections.{get_key(path)}.bias", 0.0)
        yield vectors + bias, teacher.mean(axis=(2, 3))


def get_key(path: str) -> str:
    """As a key of a module's state."""
    return path.replace(".", "/")


def compute_srd(example: Example) -> float:
    """The logarithm of a sum over all numbers of the batch."""
    total = 0.0
    for pair in list_vectors(example):
        s, t = ((x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-4) for x in pair)
        total += np.log((np.abs(s - t) ** example.get("exponent", 4.0)).sum())
    return float(total)


def compute_itrd(example: Example) -> float:
    """numpy's own correlations; Gram matrices one by one."""
    total = 0.0
    for s, t in list_vectors(example):
        found = [np.corrcoef(s[:, d], t[:, d])[0, 1] for d in range(s.shape[1])]
        correlation = np.log2(sum(abs(c - 1) ** (2 * example.get("alpha", 1.5)) for c in found))
        grams = []
        for side in (s, t):
            rows = side / np.linalg.norm(side, axis=1, keepdims=True)
            grams.append(rows @ rows.T)
        own, both = grams[0], grams[0] * grams[1]
        norms = [np.linalg.norm(gram / np.trace(gram)) ** 2 for gram in (own, both)]
        total += 2.0 * correlation + 0.05 * (norms[0] - norms[1])
    return float(total)


def compute_wkd_l(example: Example) -> float:
    """Example by example, the target class taken out of everything."""
    weight = example.teacher["fc.weight"]
    rows = weight / np.linalg.norm(weight, axis=1, keepdims=True)
    costs = 1 - np.exp(-example.get("sharpness", 1.0) * (1 - rows @ rows.T))
    values = []
    for s, t, y in zip(example.logits, example.teachers[0], example.classes, strict=True):
        left = np.arange(len(s)) != y
        cost = costs[left][:, left]
        kernel = np.exp(-cost / example.get("entropy", 0.05))
        a, b = softmax(s[left] / 2), softmax(t[left] / 2)
        u = np.full(len(a), 1 / len(a))
        for _ in range(example.get("iterations", 10)):
            v = b / (kernel.T @ u)
            u = a / (kernel @ v)
        plan = np.diag(u) @ kernel @ np.diag(v)
        target = -softmax(t)[y] * np.log(softmax(s)[y])
        values.append(target + example.args["gamma"] * (plan * cost).sum())
    return float(np.mean(values))


def compute_srrl(example: Example) -> float:
    """Compute SRRL with the teacher's classifier on both sides."""
    ((student, teacher),) = list_pairs(example)
    student, teacher = (side.mean(axis=(2, 3)) for side in (student, teacher))
    weight, bias = example.teacher["fc.weight"], example.teacher["fc.bias"]
    answers = [side @ weight.T + bias for side in (student, teacher)]
    gaps = ((student - teacher) ** 2).mean(), ((answers[0] - answers[1]) ** 2).mean()
    return float(gaps[0] + example.args["head_weight"] * gaps[1])


def compute_cat_kd(example: Example) -> float:
    """Maps of all classes at full size, pooled after the classifier; windows may overlap."""
    size = example.get("size", 2)

    def get_maps(features: Array, weight: Array) -> Array:
        maps = np.einsum("kc,chw->khw", weight, features)
        edges = [(i * 4 // size, -(-(i + 1) * 4 // size)) for i in range(size)]
        pooled = np.array(
            [[maps[:, a:b, c:d].mean(axis=(1, 2)) for c, d in edges] for a, b in edges]
        )
        return pooled / np.linalg.norm(pooled, axis=(0, 1))

    def compute(student: Array, teacher: Array) -> float:
        heads = example.student["head.weight"], example.teacher["fc.weight"]
        return ((get_maps(student, heads[0]) - get_maps(teacher, heads[1])) ** 2).mean()

    return average(example, compute)


def convolve(maps: Array, weight: Array, bias: Array) -> Array:
    """A 3x3 convolution of [C, H, W] with a border of 0, window by window."""
    padded = np.pad(maps, ((0, 0), (1, 1), (1, 1)))
    height, width = maps.shape[1:]
    found = np.zeros((len(weight), height, width))
    for i in range(height):
        for j in range(width):
            window = padded[:, i : i + 3, j : j + 3]
            found[:, i, j] = np.tensordot(weight, window, axes=3) + bias
    return found


def draw(example: Example, row: int, count: int) -> list[float]:
    """The numbers of one example's mask, in plain integers."""
    found = []
    for position in range(count):
        state = int(example.indices[row]) * 0x1E3779B1 + position * 0x05EBCA77 + example.noise_key
        for shift, factor in ((16, 0x7FEB352D), (15, 0x5BD1E995)):
            state %= 2**32
            state = (state ^ state >> shift) * factor
        state %= 2**32
        found.append(((state ^ state >> 16) >> 8) / 2**24)
    return found


def compute_mgd(example: Example) -> float:
    """Positions set to 0, two convolutions and a sum of squares."""
    total = 0.0
    for index, (student, teacher) in enumerate(list_pairs(example)):
        first, second = (
            [example.state[f"generations.{index}.{layer}.{key}"] for key in ("weight", "bias")]
            for layer in (0, 2)
        )
        height, width = student.shape[2:]
        drawn = [draw(example, row, height * width) for row in range(len(student))]
        kept = np.array(drawn).reshape(-1, 1, height, width) >= example.args["mask_ratio"]
        seen = student * kept
        rebuilt = [convolve(np.maximum(convolve(x, *first), 0), *second) for x in seen]
        total += ((np.array(rebuilt) - teacher) ** 2).sum(axis=(1, 2, 3)).mean()
    return float(total)


def pool(maps: Array, level: int) -> Array:
    """[C, level, level] averages; windows overlap where the level does not divide."""
    sides = [
        [(i * size // level, -(-(i + 1) * size // level)) for i in range(level)]
        for size in maps.shape[1:]
    ]
    cells = [[maps[:, a:b, c:d].mean(axis=(1, 2)) for c, d in sides[1]] for a, b in sides[0]]
    return np.moveaxis(np.array(cells), -1, 0)


def compute_context(student: Array, teacher: Array) -> float:
    """The squares at full size and at 4, 2 and 1, where these are smaller."""
    weights, values = [1.0], [((student - teacher) ** 2).mean()]
    for level in (level for level in (4, 2, 1) if level < student.shape[1]):
        weights.append(weights[-1] / 2)
        values.append(((pool(student, level) - pool(teacher, level)) ** 2).mean())
    return float(np.average(values, weights=weights))


def compute_reviewkd(example: Example) -> float:
    """The deepest stage first; the norms have weight 1 and bias 0 at the start."""

    def normalise(maps: Array) -> Array:
        axes = (0, 2, 3)
        return (maps - maps.mean(axes, keepdims=True)) / np.sqrt(
            maps.var(axes, keepdims=True) + 1e-5
        )

    total, residual = 0.0, None
    for index, (student, teacher) in reversed(list(enumerate(list_pairs(example)))):
        state = {
            key.removeprefix(f"fusions.{index}."): value for key, value in example.state.items()
        }
        fused = normalise(np.einsum("oc,bchw->bohw", state["inward.weight"][..., 0, 0], student))
        if residual is not None:
            deeper = residual[:, :, np.arange(8) // 2]  # twice the height, the same width
            both = np.concatenate([fused, deeper], axis=1)
            raw = np.einsum("oc,bchw->bohw", state["attention.weight"][..., 0, 0], both)
            shares = 1 / (1 + np.exp(-raw - state["attention.bias"][:, None, None]))
            fused = shares[:, :1] * fused + shares[:, 1:] * deeper
        residual = fused
        wide = [
            convolve(maps, state["outward.weight"], np.zeros(teacher.shape[1])) for maps in fused
        ]
        values = zip(normalise(np.array(wide)), teacher, strict=True)
        total += np.mean([compute_context(s, t) for s, t in values])
    return float(total)


def list_tokens(maps: Array) -> Array:
    """[positions, C] of a map [C, H, W], each at unit length."""
    rows = np.array([column / np.linalg.norm(column) for column in maps.reshape(len(maps), -1).T])
    assert np.allclose((rows**2).sum(axis=1), 1)
    return rows


def compute_gram_mse(example: Example) -> float:
    """Cosine by cosine."""

    def compute(student: Array, teacher: Array) -> float:
        s, t = list_tokens(student), list_tokens(teacher)
        pairs = [(i, j) for i in range(len(s)) for j in range(len(s))]
        return float(np.mean([(s[i] @ s[j] - t[i] @ t[j]) ** 2 for i, j in pairs]))

    return average(example, compute)


def compute_gram_kl(example: Example) -> float:
    """Token by token."""
    temperature = example.get("gram_temperature", 0.07)

    def compute(student: Array, teacher: Array) -> float:
        s, t = list_tokens(student), list_tokens(teacher)
        values = []
        for i in range(len(s)):
            p, q = softmax(t @ t[i] / temperature), softmax(s @ s[i] / temperature)
            values.append((p * np.log(p / q)).sum())
        return float(np.mean(values))

    return average(example, compute)


def compute_queue_kl(example: Example) -> float:
    """The queue as a list: this batch, then what stood in it before, up to its size."""
    ((student, teacher),) = list_pairs(example)
    s, t = (
        [row / np.linalg.norm(row) for row in side.mean(axis=(2, 3))] for side in (student, teacher)
    )
    places = zip(example.state["memory.rows"], example.state["memory.filled"], strict=True)
    earlier = [row for row, is_there in places if is_there]
    queue = np.array([*t, *earlier][: example.args["size"]])
    temperature = example.args["queue_temperature"]
    values = []
    for mine, theirs in zip(s, t, strict=True):
        p, q = softmax(queue @ theirs / temperature), softmax(queue @ mine / temperature)
        values.append((p * np.log(p / q)).sum())
    return float(np.mean(values))


def compute_dist_plus(example: Example) -> float:
    """NumPy's correlations, one vector after another."""

    def compare(rows: Array, others: Array) -> float:
        return 1 - np.mean([get_correlation(a, b) for a, b in zip(rows, others, strict=True)])

    heat = example.args["temperature"]
    q, p = softmax(example.logits / heat), softmax(example.teachers[0] / heat)
    classes, examples, channels, positions = example.args["weights"]
    total = heat**2 * (classes * compare(q, p) + examples * compare(q.T, p.T))
    for student, teacher in list_pairs(example):
        rows = [np.moveaxis(x, 1, -1).reshape(-1, x.shape[1]) for x in (student, teacher)]
        sums = [x.sum(axis=1).reshape(len(x), -1).T for x in (student, teacher)]
        total += channels * compare(*rows) + positions * compare(*sums)
    return float(total)


FEATURE_REFERENCES: dict[str, Callable[[Example], float]] = {
    "ab": compute_ab,
    "cat_kd": compute_cat_kd,
    "cwd": compute_cwd,
    "dist_plus": compute_dist_plus,
    "fsp": compute_fsp,
    "gram_kl": compute_gram_kl,
    "gram_mse": compute_gram_mse,
    "ickd": compute_ickd,
    "itrd": compute_itrd,
    "mgd": compute_mgd,
    "norm": compute_norm,
    "nst": compute_nst,
    "ofd": compute_ofd,
    "pad": compute_pad,
    "queue_kl": compute_queue_kl,
    "reviewkd": compute_reviewkd,
    "simkd": compute_simkd,
    "srd": compute_srd,
    "srrl": compute_srrl,
    "vid": compute_vid,
    "wkd_f": compute_wkd_f,
    "wkd_l": compute_wkd_l,
}
