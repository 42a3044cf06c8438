"""What was found, for people and for programs: tables, JSON, CSV and pictures."""

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
    from tools.evaluate.plan import JudgePlan

REPORT = "report.json"
# Pairs of classes that are named in the report.
_CONFUSED = 20
_COLUMNS = (("top1", ".2f"), ("top5", ".2f"), ("loss", ".4f"), ("ece", ".4f"),
            ("precision", ".3f"), ("recall", ".3f"), ("f1", ".3f"))  # fmt: skip


@dataclass(frozen=True)
class Shared:
    """Examples that two models answer alike; how many are right in both, or in one alone."""

    same: float
    both_right: float
    only_first: float
    only_second: float
    examples: float


@dataclass(frozen=True)
class SetFinding:
    """A set, and what was found on it.

    Attributes:
      competing: classes that an answer was chosen from.
      teacher, shared: none without a teacher.
      worst: the surest wrong answers; None if they were not asked for.
    """

    shown: EvaluatedSet
    competing: int
    verdict: SetResult
    teacher: SetResult | None = None
    shared: Shared | None = None
    worst: WorstImages | None = None

    @property
    def name(self) -> str:
        """The set's."""
        return self.shown.spec.name


def write_report(
    plan: JudgePlan,
    options: argparse.Namespace,
    trained: TrainedModel,
    findings: Sequence[SetFinding],
    probes: JsonObject,
) -> None:
    """Show what was found, and write it where --out says."""
    names = plan.classes.names or tuple(map(str, range(plan.classes.count)))
    report = {
        "weights": options.weights,
        "location": trained.location,
        "model": trained.name,
        "num_classes": plan.classes.count,
        "pp": trained.pp,
        "flip": options.flip,
        "teacher": options.teacher or None,
        "sets": {one.name: describe(one, names) for one in findings},
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
    """One set in the report; of a corruption the metrics alone."""
    spec, verdict = finding.shown.spec, finding.verdict
    found: JsonObject = {
        "dataset": spec.data.name,
        "source": spec.data.source,
        "split": spec.data.eval_split,
        "pp": spec.data.eval_pp,
        "competing_classes": finding.competing,
        "metrics": verdict.metrics,
    }
    if finding.teacher is not None:
        found["teacher"] = finding.teacher.metrics
        found["shared"] = describe_shared(finding)
    if spec.corruption is None:
        found["classes"] = [{"name": names[row.number], **asdict(row)} for row in verdict.rows]
        found["calibration"] = [asdict(one) for one in verdict.bins]
        found["confused"] = list_confused(verdict, names)
    if finding.worst is not None:
        found["worst"] = describe_worst(finding.worst, names)
    return found


def describe_shared(finding: SetFinding) -> JsonObject:
    """Percent of the examples."""
    shared = asdict(finding.shared)
    total = max(shared.pop("examples"), 1.0)
    found = {name: 100.0 * value / total for name, value in shared.items()}
    return {"agreement": found.pop("same"), **found}


def describe_groups(findings: Sequence[SetFinding]) -> JsonObject:
    """Of ImageNet-C: mean top-1, the error of each corruption in percent of AlexNet's, mCE."""
    groups: JsonObject = {}
    for group in dict.fromkeys(one.shown.spec.group for one in findings):
        members = [one for one in findings if one.shown.spec.group == group]
        if members[0].shown.spec.corruption is None:
            continue
        for who in ("model", "teacher"):
            verdicts = [one.verdict if who == "model" else one.teacher for one in members]
            if verdicts[0] is None:
                continue
            top1 = {
                one.shown.spec.corruption: verdict.metrics["top1"]
                for one, verdict in zip(members, verdicts, strict=True)
            }
            errors = compute_corruption_errors(top1)
            found = {"sets": len(members), "top1": float(np.mean(list(top1.values())))}
            found |= {"errors": errors, "mce": compute_mce(errors)}
            groups.setdefault(group, {})[who] = found
    return groups


def describe_shift(findings: Sequence[SetFinding]) -> list[JsonObject]:
    """What model and teacher keep on each set of their top-1 on the first one, in percent."""
    first, rows = findings[0], []
    for one in findings:
        row: JsonObject = {"set": one.name, **describe_shared(one)}
        sides = {"model": (one.verdict, first.verdict), "teacher": (one.teacher, first.teacher)}
        for who, (here, there) in sides.items():
            row[f"{who}_top1"] = here.metrics["top1"]
            row[f"{who}_kept"] = 100.0 * here.metrics["top1"] / max(there.metrics["top1"], 1e-9)
        rows.append(row)
    return rows


def list_confused(verdict: SetResult, names: Sequence[str]) -> list[JsonObject]:
    """The pairs of label and wrong answer that occur most often."""
    if verdict.confusion is None:
        return []
    wrong = verdict.confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(wrong, axis=None, kind="stable")[::-1][:_CONFUSED]
    pairs = [divmod(int(place), len(wrong)) for place in order]
    return [
        {"label": names[label], "answer": names[answer], "examples": int(wrong[label, answer])}
        for label, answer in pairs
        if wrong[label, answer]
    ]


def write_files(
    folder: Path, report: JsonObject, findings: Sequence[SetFinding], names: Sequence[str]
) -> None:
    """`report.json`, and of each set that is no corruption its tables and pictures."""
    text = json.dumps(make_finite(report), indent=1) + "\n"
    (folder / REPORT).write_text(text, encoding="utf-8")
    for one in findings:
        if one.shown.spec.corruption is not None:
            continue
        stem, verdict = one.name, one.verdict
        if verdict.rows:
            rows = [asdict(row) for row in verdict.rows]
            header = ["name", *rows[0]]
            lines = [[names[row["number"]], *row.values()] for row in rows]
            _write_csv(folder / f"{stem}.classes.csv", [header, *lines])
        if verdict.confusion is not None:
            seen = [row.number for row in verdict.rows]
            matrix = verdict.confusion[np.ix_(seen, seen)]
            shown = [names[number] for number in seen]
            lines = [[name, *row] for name, row in zip(shown, matrix.tolist(), strict=True)]
            _write_csv(folder / f"{stem}.confusion.csv", [["label \\ answer", *shown], *lines])
            draw_confusion(matrix, shown, stem, folder / f"{stem}.confusion.png")
        if one.worst is not None:
            draw_worst(one.worst, names, stem, folder / f"{stem}.worst.png")
        draw_calibration(verdict, stem, folder / f"{stem}.calibration.png")


def print_tables(
    report: JsonObject, findings: Sequence[SetFinding], names: Sequence[str], worst: int
) -> None:
    """A row for each set, then what belongs to several, then the worst classes."""
    console = create_console()
    heads = ["top-1", "top-5", "loss", "ECE", "precision", "recall", "F1"]
    shown = [one for one in findings if one.shown.spec.corruption is None]
    if shown:
        table = create_table("set", "examples>", "classes>", *(f"{head}>" for head in heads))
        for one in shown:
            metrics = one.verdict.metrics
            cells = [format(metrics[n], form) if n in metrics else "" for n, form in _COLUMNS]
            table.add_row(one.name, f"{metrics['examples']:.0f}", str(one.competing), *cells)
        console.print(table)
    for group, sides in report["groups"].items():
        for who, found in sides.items():
            mce = "none, sets are missing" if found["mce"] is None else f"{found['mce']:.2f}"
            of = "" if who == "model" else " of the teacher"
            console.print(
                f"{group}{of}: top-1 {found['top1']:.2f} over {found['sets']} sets, mCE {mce}"
            )
    if "shift" in report:
        print_shift(report["shift"])
    if "probes" in report:
        print_probes(report["probes"])
    for one in shown:
        if worst and one.verdict.rows:
            print_worst(one, names, worst)


def print_shift(rows: Sequence[JsonObject]) -> None:
    """Model and teacher on each set, and what they keep of the first one."""
    columns = {
        "top-1": "model_top1", "teacher": "teacher_top1", "agreement": "agreement",
        "both right": "both_right", "only model": "only_first", "only teacher": "only_second",
        "kept": "model_kept", "teacher kept": "teacher_kept",
    }  # fmt: skip
    table = create_table("set", *(f"{name}>" for name in columns))
    for row in rows:
        table.add_row(row["set"], *(f"{row[key]:.2f}" for key in columns.values()))
    create_console().print(table)


def print_probes(found: JsonObject) -> None:
    """What simple readers make of the features; of the linear heads the best ones."""
    console = create_console()
    console.print(
        f"probes of {found['features']} features: {found['train_examples']:,} examples of "
        f"{found['train']} to learn from, top-1 on {found['test_examples']:,} of {found['test']}",
        markup=False,
    )
    table = create_table("probe", "setting", "top-1>")
    for count, top1 in found.get("knn", {}).items():
        table.add_row("k-NN", f"k {count}", f"{top1:.2f}")
    for shots, one in found.get("fewshot", {}).items():
        setting = f"{shots} of a class, mean of {len(one['seeds'])} choices"
        table.add_row("few-shot", setting, f"{one['mean']:.2f}")
    if "linear" in found:
        chosen = found["linear"]["chosen"]
        setting = f"lr {chosen['lr']:g}, weight decay {chosen['weight_decay']:g}"
        table.add_row("linear", f"{setting}, best of {len(found['linear']['heads'])}",
                      f"{chosen['top1']:.2f}")  # fmt: skip
    console.print(table)


def print_worst(finding: SetFinding, names: Sequence[str], count: int) -> None:
    """The classes of a set of which the fewest are found."""
    title = f"{finding.name}: the classes of least recall"
    table = create_table(
        "class", "examples>", "answers>", "precision>", "recall>", "F1>", title=title
    )
    rows = [row for row in finding.verdict.rows if row.examples]
    for row in sorted(rows, key=lambda one: (one.recall, one.precision, one.number))[:count]:
        shares = (f"{value:.3f}" for value in (row.precision, row.recall, row.f1))
        table.add_row(names[row.number], str(row.examples), str(row.answers), *shares)
    create_console().print(table)


def _write_csv(path: Path, lines: Sequence[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(lines)
