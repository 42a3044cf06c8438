"""Reports of an evaluation: tables, JSON, CSV and pictures."""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from store.terminal import create_console, create_table, print_json
from tasks.evaluation.sets import compute_corruption_errors, compute_mce
from tools.evaluate.pictures import draw_calibration, draw_confusion
from tools.evaluate.worst import WorstImages, describe_worst, draw_worst
from utils.json_types import JsonObject, make_finite

if TYPE_CHECKING:
    from models.trained import TrainedModel
    from tasks.evaluation.counts import SetResult
    from tasks.evaluation.sets import EvaluatedSet
    from tools.evaluate.plan import EvaluationPlan

REPORT = "report.json"
# Pairs of classes that are named in the report.
_CONFUSED = 20
_COLUMNS = (
    ("top1", ".2f"),
    ("top5", ".2f"),
    ("loss", ".4f"),
    ("ece", ".4f"),
    ("precision", ".3f"),
    ("recall", ".3f"),
    ("f1", ".3f"),
)
# Of two models, in percent of the examples: the same output, both correct, or only one.
SHARED = ("agreement", "both_right", "only_first", "only_second")


@dataclass(frozen=True)
class SetFinding:
    """A set, and the results on it."""

    evaluated: EvaluatedSet
    competing: int  # number of classes that an output is chosen from
    model: SetResult
    # teacher, shared: None without a teacher; `shared` is in percent, by the names of `SHARED`
    teacher: SetResult | None
    shared: dict[str, float] | None
    worst: WorstImages | None  # wrong outputs of the highest confidence, if --worst is given

    @property
    def name(self) -> str:
        """Name of the set."""
        return self.evaluated.spec.name

    @property
    def corruption(self) -> tuple[str, int] | None:
        """The corruption of ImageNet-C, or None."""
        return self.evaluated.spec.corruption


def write_report(
    plan: EvaluationPlan,
    options: argparse.Namespace,
    trained: TrainedModel,
    findings: Sequence[SetFinding],
    probes: JsonObject,
) -> None:
    """Print the report, and write its files to --out."""
    names = plan.classes.names or tuple(map(str, range(plan.classes.count)))
    report = {
        "weights": options.weights,
        "location": trained.location,
        "model": trained.name,
        "num_classes": plan.classes.count,
        "pp": trained.pp,
        "flip": options.flip,
        "teacher": options.teacher or None,
        "sets": {finding.name: describe(finding, names) for finding in findings},
        "groups": describe_groups(findings),
    }
    if options.teacher and findings:
        report["shift"] = describe_shift(findings)
    if probes:
        report["probes"] = probes
    if options.out is not None:
        write_files(options.out, report, findings, names)
    if options.json:
        print_json(report)
        return
    print_tables(report, findings, names, options.per_class)
    if options.out is not None:
        print(f"report: {options.out / REPORT}")


def describe(finding: SetFinding, names: Sequence[str]) -> JsonObject:
    """Describe a set for the report; of a corruption its metrics alone."""
    spec, result = finding.evaluated.spec, finding.model
    record: JsonObject = {
        "dataset": spec.data.name,
        "source": spec.data.source,
        "split": spec.data.eval_split,
        "pp": spec.data.eval_pp,
        "competing_classes": finding.competing,
        "metrics": result.metrics,
    }
    if finding.teacher is not None:
        record |= {"teacher": finding.teacher.metrics, "shared": finding.shared}
    if spec.corruption is None:
        record["classes"] = [{"name": names[row.number], **asdict(row)} for row in result.rows]
        record["calibration"] = [asdict(row) for row in result.bins]
        record["confused"] = list_confused(result, names)
    if finding.worst is not None:
        record["worst"] = describe_worst(finding.worst, names)
    return record


def describe_groups(findings: Sequence[SetFinding]) -> JsonObject:
    """Describe ImageNet-C: mean top-1, each corruption's error in percent of AlexNet's, mCE."""
    groups: JsonObject = {}
    corrupted = [finding for finding in findings if finding.corruption is not None]
    for group in dict.fromkeys(finding.evaluated.spec.group for finding in corrupted):
        members = [finding for finding in corrupted if finding.evaluated.spec.group == group]
        groups[group] = {}
        for side in ("model", "teacher") if members[0].teacher else ("model",):
            top1 = {
                each.corruption: getattr(each, side).metrics["top1"]
                for each in members
                if each.corruption
            }
            errors = compute_corruption_errors(top1)
            row = {"sets": len(members), "top1": float(np.mean(list(top1.values())))}
            groups[group][side] = {**row, "errors": errors, "mce": compute_mce(errors)}
    return groups


def describe_shift(findings: Sequence[SetFinding]) -> list[JsonObject]:
    """Describe what model and teacher keep on each set of their top-1 on the first, in percent."""
    rows = []
    for finding in findings:
        row: JsonObject = {"set": finding.name, **(finding.shared or {})}
        for side in ("model", "teacher"):
            first, top1 = (getattr(each, side).metrics["top1"] for each in (findings[0], finding))
            row |= {f"{side}_top1": top1, f"{side}_kept": 100.0 * top1 / max(first, 1e-9)}
        rows.append(row)
    return rows


def list_confused(result: SetResult, names: Sequence[str]) -> list[JsonObject]:
    """List the most frequent pairs of label and wrong output."""
    if result.confusion is None:
        return []
    wrong = result.confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(wrong, axis=None, kind="stable")[::-1][:_CONFUSED]
    pairs = [divmod(int(index), len(wrong)) for index in order]
    return [
        {"label": names[label], "answer": names[answer], "examples": int(wrong[label, answer])}
        for label, answer in pairs
        if wrong[label, answer]
    ]


def write_files(
    folder: Path, report: JsonObject, findings: Sequence[SetFinding], names: Sequence[str]
) -> None:
    """Write `report.json`, and tables and pictures of each set that is not a corruption."""
    text = json.dumps(make_finite(report), indent=1) + "\n"
    (folder / REPORT).write_text(text, encoding="utf-8")
    for finding in (each for each in findings if each.corruption is None):
        stem, result = finding.name, finding.model
        if result.rows:
            rows = [asdict(row) for row in result.rows]
            header = ["name", *rows[0]]
            lines = [[names[row["number"]], *row.values()] for row in rows]
            _write_csv(folder / f"{stem}.classes.csv", [header, *lines])
        if result.confusion is not None:
            seen = [row.number for row in result.rows]
            matrix = result.confusion[np.ix_(seen, seen)]
            shown = [names[number] for number in seen]
            lines = [[name, *row] for name, row in zip(shown, matrix.tolist(), strict=True)]
            _write_csv(folder / f"{stem}.confusion.csv", [["label \\ answer", *shown], *lines])
            draw_confusion(matrix, shown, stem, folder / f"{stem}.confusion.png")
        if finding.worst is not None:
            draw_worst(finding.worst, names, stem, folder / f"{stem}.worst.png")
        draw_calibration(result, stem, folder / f"{stem}.calibration.png")


def print_tables(
    report: JsonObject, findings: Sequence[SetFinding], names: Sequence[str], worst: int
) -> None:
    """Print a row for each set, results of several sets, then the worst classes."""
    console = create_console()
    heads = ["top-1", "top-5", "loss", "ECE", "precision", "recall", "F1"]
    shown = [finding for finding in findings if finding.corruption is None]
    if shown:
        table = create_table("set", "examples>", "classes>", *(f"{head}>" for head in heads))
        for finding in shown:
            metrics = finding.model.metrics
            cells = [format(metrics[n], form) if n in metrics else "" for n, form in _COLUMNS]
            examples = f"{metrics['examples']:.0f}"
            table.add_row(finding.name, examples, str(finding.competing), *cells)
        console.print(table)
    for group, sides in report["groups"].items():
        for side, row in sides.items():
            mce, top1 = row["mce"], f"{row['top1']:.2f}"
            mce = "none, sets are missing" if mce is None else f"{mce:.2f}"
            of = "" if side == "model" else " of the teacher"
            console.print(f"{group}{of}: top-1 {top1} over {row['sets']} sets, mCE {mce}")
    if "shift" in report:
        print_shift(report["shift"])
    if "probes" in report:
        print_probes(report["probes"])
    for finding in shown:
        if worst and finding.model.rows:
            print_worst(finding, names, worst)


def print_shift(rows: Sequence[JsonObject]) -> None:
    """Print model and teacher on each set, and what they keep of the first one."""
    columns = {
        "top-1": "model_top1",
        "teacher": "teacher_top1",
        "agreement": "agreement",
        "both right": "both_right",
        "only model": "only_first",
        "only teacher": "only_second",
        "kept": "model_kept",
        "teacher kept": "teacher_kept",
    }
    table = create_table("set", *(f"{name}>" for name in columns))
    for row in rows:
        table.add_row(row["set"], *(f"{row[key]:.2f}" for key in columns.values()))
    create_console().print(table)


def print_probes(results: JsonObject) -> None:
    """Print the results of the probes; of the linear heads the best one."""
    console = create_console()
    console.print(
        "probes of {features} features: {train_examples:,} examples of {train} to learn from, "
        "top-1 on {test_examples:,} of {test}".format_map(results),
        markup=False,
    )
    table = create_table("probe", "setting", "top-1>")
    for count, top1 in results.get("knn", {}).items():
        table.add_row("k-NN", f"k {count}", f"{top1:.2f}")
    for shots, row in results.get("fewshot", {}).items():
        setting = f"{shots} of a class, mean of {len(row['seeds'])} choices"
        table.add_row("few-shot", setting, f"{row['mean']:.2f}")
    if "linear" in results:
        chosen = results["linear"]["chosen"]
        setting = f"lr {chosen['lr']:g}, weight decay {chosen['weight_decay']:g}, best of "
        setting += str(len(results["linear"]["heads"]))
        table.add_row("linear", setting, f"{chosen['top1']:.2f}")
    console.print(table)


def print_worst(finding: SetFinding, names: Sequence[str], count: int) -> None:
    """Print the classes of a set with the lowest recall."""
    title = f"{finding.name}: the classes of least recall"
    table = create_table(
        "class", "examples>", "answers>", "precision>", "recall>", "F1>", title=title
    )
    rows = [row for row in finding.model.rows if row.examples]
    for row in sorted(rows, key=lambda row: (row.recall, row.precision, row.number))[:count]:
        shares = (f"{value:.3f}" for value in (row.precision, row.recall, row.f1))
        table.add_row(names[row.number], str(row.examples), str(row.answers), *shares)
    create_console().print(table)


def _write_csv(path: Path, lines: Sequence[Sequence[str | float]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(lines)
