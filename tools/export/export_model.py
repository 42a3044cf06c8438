"""Writes a model in the forms of other programs and compares their answers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from models.run_folder import find_run_folder
from models.trained import TrainedModel
from store.query.record import RunRecord
from store.record.environment import read_environment
from tools.card.model_card import make_card
from tools.export.comparison import compare, show
from tools.export.formats import FORMS, Form
from tools.export.language import FORM as LANGUAGE
from tools.export.language import export_language
from tools.export.servable import Handover
from tools.weights.load_model import load_trained
from tools.weights.sample_images import read_images
from utils.errors import EXIT_USER_ERROR, UserError
from utils.json_types import JsonObject
from utils.programs import prepare_folder, require_at_least
from utils.storage.json_files import write_json
from utils.storage.local import write_atomically

EXIT_BEYOND = 1
REPORT, CARD = "export.json", "README.md"


def export(options: argparse.Namespace) -> int:
    """Write, read back and compare; gives the exit code.

    Raises:
      UserError: weights, images or a flag that cannot be used.
    """
    _check_flags(options)
    if LANGUAGE in options.to:
        if len(options.to) > 1:
            raise UserError(
                f"--to {' '.join(options.to)}: {LANGUAGE} is of language models, the others of "
                "images; give one kind"
            )
        return export_language(options)
    trained = load_trained(options)
    forms = {name: FORMS[name]() for name in FORMS if name in options.to}
    left_out = _leave_out_unnormalised(forms, options)
    for name, form in forms.items():
        form.check(name, trained, normalize=options.normalize)
        form.choose_batch(options.batch_size)
        form.prepare()
    prepare_folder(options.out, "--out")
    images = read_images(trained, options.images, options.count, normalize=options.normalize)
    handover = Handover(trained, images, options.batch_size, options.normalize)
    wanted, report = handover.answer(), _describe(handover, options.bound)
    for name, form in forms.items():
        folder = options.out / name
        prepare_folder(folder, "--out")
        batch = form.choose_batch(options.batch_size)
        answers = form.write(handover, folder, handover.cut(batch))
        is_classifier = trained.num_classes > 0
        found = compare(wanted, answers, options.bound, are_classes=is_classifier)
        report["forms"][name] = {"batch": batch, **found}
        # A later command for the same OUT, or a form that fails, leaves the others' as they are.
        alone = {**report, "forms": {name: report["forms"][name]}}
        for place, told in ((folder, alone), (options.out, report)):
            write_json(place / REPORT, told)
        print(f"{folder}: {show(found, options.bound)}")
    _write_card(trained, options.out / CARD)
    if left_out:
        print(f"error: {left_out}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0 if all(one["within"] for one in report["forms"].values()) else EXIT_BEYOND


def _leave_out_unnormalised(forms: dict[str, Form], options: argparse.Namespace) -> str:
    """Take out forms that cannot normalise inside where others can; say so, or return ""."""
    plain = [name for name, form in forms.items() if not form.normalises]
    if not options.normalize or not plain or len(plain) == len(forms):
        return ""
    for name in plain:
        del forms[name]
    return (
        f"--to {' '.join(plain)} is not written: its config.json tells mean and std, and cannot "
        f"hold --normalize inside; export it without the flag ({', '.join(forms)} is written)"
    )


def _write_card(trained: TrainedModel, path: Path) -> None:
    """The card of the run that the weights lie in, if they do."""
    if (folder := find_run_folder(trained.location)) is not None:
        write_atomically(path, make_card(RunRecord(folder), trained.facts, trained.location))


def _check_flags(options: argparse.Namespace) -> None:
    require_at_least(1, options, "batch_size", "count")
    require_at_least(0, options, "bound")


def _describe(handover: Handover, bound: float) -> JsonObject:
    """The report's head: what was handed over, and on what it is judged."""
    trained = handover.trained
    return {
        "weights": trained.location,
        "model": trained.name,
        "args": trained.facts["args"],
        "classes": trained.num_classes,
        "class_names": trained.class_names,
        "input": handover.describe_input(),
        "output": handover.output,
        "images": len(handover.images),
        "bound": bound,
        "packages": read_environment()["packages"],
        "forms": {},
    }
