"""Pictures of a result: calibration, and which classes are confused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tasks.evaluation.counts import SetResult

# Most classes whose names are drawn, and whose counts are.
_NAMED, _COUNTED = 60, 20


def draw_calibration(result: SetResult, title: str, path: Path) -> None:
    """Draw accuracy by confidence, with the diagonal of a calibrated model."""
    pyplot = import_pyplot()
    bins = [row for row in result.bins if row.examples]
    figure, (top, below) = pyplot.subplots(
        2, 1, figsize=(5, 6), height_ratios=(3, 1), sharex=True, constrained_layout=True
    )
    centres = [(row.low + row.high) / 2 for row in bins]
    width = 0.9 / len(result.bins)
    confidences, accuracies = [row.confidence for row in bins], [row.accuracy for row in bins]
    style = {"color": "black", "markersize": 3, "label": "at its mean confidence"}
    top.bar(centres, accuracies, width, label="accuracy")
    top.plot(confidences, accuracies, "o", **style)
    top.plot([0, 1], [0, 1], "--", color="grey", label="calibrated")
    top.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    top.set_title(f"{title}: ECE {result.metrics['ece']:.4f}")
    top.legend(loc="best", fontsize="small")
    below.bar(centres, [row.examples for row in bins], width, color="grey")
    below.set(xlabel="confidence", ylabel="examples")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_confusion(matrix: np.ndarray, names: Sequence[str], title: str, path: Path) -> None:
    """Draw the shares of each label's examples by output, from counts [K, K] (label, output)."""
    pyplot = import_pyplot()
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    side = float(np.clip(0.35 * len(names), 5, 12))
    figure, axes = pyplot.subplots(figsize=(side + 1, side), constrained_layout=True)
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues", interpolation="nearest")
    axes.set(xlabel="answer", ylabel="label", title=title)
    if len(names) <= _NAMED:
        size = 9 if len(names) <= _COUNTED else 6
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=size)
        axes.set_yticks(range(len(names)), names, fontsize=size)
    if len(names) <= _COUNTED:
        for (label, answer), count in np.ndenumerate(matrix):
            if count:
                colour = "white" if shares[label, answer] > 0.5 else "black"
                axes.text(
                    answer, label, str(count), ha="center", va="center", color=colour, fontsize=7
                )
    figure.colorbar(image, ax=axes, shrink=0.8, label="share of the label's examples")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def import_pyplot() -> ModuleType:
    """Return pyplot for files, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
