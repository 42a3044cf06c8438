"""Pictures of a verdict: how sure the answers are and how right, and what is taken for what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tasks.evaluation.counts import SetResult

# Up to so many classes the picture names them, and up to so many it counts in each field.
_NAMED, _COUNTED = 60, 20


def draw_calibration(verdict: SetResult, title: str, path: Path) -> Path:
    """Accuracy by confidence, with the diagonal of a model that knows what it knows."""
    pyplot = import_pyplot()
    bins = [one for one in verdict.bins if one.examples]
    figure, (top, below) = pyplot.subplots(
        2, 1, figsize=(5, 6), height_ratios=(3, 1), sharex=True, constrained_layout=True
    )
    centres = [(one.low + one.high) / 2 for one in bins]
    width = 0.9 / len(verdict.bins)
    top.bar(centres, [one.accuracy for one in bins], width, label="accuracy")
    top.plot(
        [one.confidence for one in bins], [one.accuracy for one in bins], "o", color="black",
        markersize=3, label="at its mean confidence",
    )  # fmt: skip
    top.plot([0, 1], [0, 1], "--", color="grey", label="calibrated")
    top.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    top.set_title(f"{title}: ECE {verdict.metrics['ece']:.4f}")
    top.legend(loc="best", fontsize="small")
    below.bar(centres, [one.examples for one in bins], width, color="grey")
    below.set(xlabel="confidence", ylabel="examples")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def draw_confusion(matrix: np.ndarray, names: Sequence[str], title: str, path: Path) -> Path:
    """Shares of each label's examples by answer.

    Args:
      matrix: [K, K] counts, label and answer.
    """
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
    return path


def import_pyplot():
    """Return pyplot for files, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
