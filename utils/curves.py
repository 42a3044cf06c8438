"""Pictures of runs: loss and accuracy over steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from store import read_metrics

CURVES_FILE = "curves.png"


def draw_run(folder: Path) -> Path:
    """Draw one run's curves into its directory."""
    return draw_curves({f"{folder.parent.name}/{folder.name}": folder}, folder / CURVES_FILE)


def draw_curves(runs: Mapping[str, Path], path: Path) -> Path:
    """Task loss in training and top-1 in evaluation, one colour for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for label, folder in runs.items():
        lines = read_metrics(folder)
        train = [(line["step"], line["task"]) for line in lines if line.get("task") is not None]
        top1 = [(line["step"], line["eval_top1"]) for line in lines if "eval_top1" in line]
        if train:
            left.plot(*zip(*train, strict=True), label=label, linewidth=1.2)
        if top1:
            right.plot(*zip(*top1, strict=True), label=label, marker=".", linewidth=1.2)
    left.set(xlabel="step", ylabel="task loss (nats)", title="training")
    right.set(xlabel="step", ylabel="top-1 (%)", title="evaluation")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
