"""Draws runs: the loss in training and the first metric of each evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from store.record.catalogue import EVAL, METRICS, TRAIN
from store.record.history import get_learnt, read_metrics

CURVES_FILE = "curves.png"
# Kind of the lines, title and marker of each panel.
_PANELS = ((TRAIN, "training", ""), (EVAL, "evaluation", "."))


def draw_run(folder: Path) -> Path:
    return draw_curves({f"{folder.parent.name}/{folder.name}": folder}, folder / CURVES_FILE)


def draw_curves(runs: Mapping[str, Path], path: Path) -> Path:
    """Draw the first loss term and the first metric of evaluations, one colour for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for axes, (kind, title, marker) in zip(panels, _PANELS, strict=True):
        axes.set(xlabel="step", title=title)
        for label, folder in runs.items():
            name, points = read_curve(folder, kind)
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker=marker, linewidth=1.2)
                metric = METRICS.find(name)
                axes.set_ylabel(f"{name} ({metric.unit})" if metric and metric.unit else name)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def read_curve(folder: Path, kind: str) -> tuple[str, list[tuple[int, float]]]:
    """Return the first learnt number of a run's lines of a kind, and its (step, value) pairs."""
    lines = [
        (line["step"], get_learnt(line)) for line in read_metrics(folder) if line["kind"] == kind
    ]
    name = next((name for _, numbers in lines for name in numbers), "")
    return name, [(step, value) for step, row in lines if (value := row.get(name)) is not None]
