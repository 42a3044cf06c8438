"""Pictures of runs: the loss in training and the first verdict of each evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from store.record.catalogue import EVAL, METRICS, TRAIN
from store.record.history import get_learnt, read_metrics

CURVES_FILE = "curves.png"
# Kind of the lines, title and marker of each panel.
_PANELS = ((TRAIN, "training", ""), (EVAL, "evaluation", "."))


def draw_run(folder: Path) -> Path:
    """Draw one run's curves into its directory."""
    return draw_curves({f"{folder.parent.name}/{folder.name}": folder}, folder / CURVES_FILE)


def draw_curves(runs: Mapping[str, Path], path: Path) -> Path:
    """First part of the loss and first verdict of evaluation, one colour for each run.

    Both are what the task names first: `loss/task` and `top1` of a classification.
    """
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
                axes.set_ylabel(_describe(name))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def read_curve(folder: Path, kind: str) -> tuple[str, list[tuple[int, float]]]:
    """What a run's lines of a kind name first of what is learnt, and (step, value) of it."""
    lines = [
        (line["step"], get_learnt(line)) for line in read_metrics(folder) if line["kind"] == kind
    ]
    name = next((name for _, numbers in lines for name in numbers), "")
    return name, [(step, found[name]) for step, found in lines if found.get(name) is not None]


def _describe(name: str) -> str:
    metric = METRICS.find(name)
    return f"{name} ({metric.unit})" if metric and metric.unit else name
