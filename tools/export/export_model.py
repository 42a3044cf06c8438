"""Writes a model in the forms of other programs and compares their outputs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from models.run_folder import find_run_folder
from store.query.record import RunRecord
from store.record.environment import read_environment
from tools.card.model_card import make_card
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
    """Write, read back and compare; return the exit code.

    Raises:
      UserError: weights, images or a flag that cannot be used.
    """
    require_at_least(1, options, "batch_size", "count")
    require_at_least(0, options, "bound")
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
    wanted, report = handover.compute_outputs(), _describe(handover, options.bound)
    for name, form in forms.items():
        folder = options.out / name
        prepare_folder(folder, "--out")
        batch = form.choose_batch(options.batch_size)
        outputs = form.write(handover, folder, handover.cut(batch))
        is_classifier = trained.num_classes > 0
        result = compare(wanted, outputs, options.bound, are_classes=is_classifier)
        report["forms"][name] = {"batch": batch, **result}
        # A later command for the same OUT, or a form that fails, leaves the others' as they are.
        write_json(folder / REPORT, {**report, "forms": {name: report["forms"][name]}})
        write_json(options.out / REPORT, report)
        print(f"{folder}: {format_comparison(result, options.bound)}")
    if (run := find_run_folder(trained.location)) is not None:
        card = make_card(RunRecord(run), trained.facts, trained.location)
        write_atomically(options.out / CARD, card)
    if left_out:
        print(f"error: {left_out}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0 if all(form["within"] for form in report["forms"].values()) else EXIT_BEYOND


def _leave_out_unnormalised(forms: dict[str, Form], options: argparse.Namespace) -> str:
    """Remove forms that cannot normalise inside if others can; return the error line, or ""."""
    plain = [name for name, form in forms.items() if not form.normalises]
    if not options.normalize or not plain or len(plain) == len(forms):
        return ""
    for name in plain:
        del forms[name]
    return (
        f"--to {' '.join(plain)} is not written: its config.json has mean and std, and cannot "
        f"hold --normalize inside; export it without the flag ({', '.join(forms)} is written)"
    )


def _describe(handover: Handover, bound: float) -> JsonObject:
    """Describe the model and the images of the comparison: the head of the report."""
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


def compare(
    wanted: np.ndarray, parts: Sequence[np.ndarray], bound: float, *, are_classes: bool = True
) -> JsonObject:
    """Compare outputs [N, K] with those of the model; differences are None if not finite.

    Args:
      are_classes: whether the largest output of an image is its top-1; features have none.
    """
    outputs = np.concatenate(parts)[: len(wanted)]
    if outputs.shape != wanted.shape:
        raise UserError(f"--to gives outputs of shape {outputs.shape}, not {wanted.shape}")
    distance = np.abs(outputs.astype(np.float64) - wanted)
    agreement = float((outputs.argmax(axis=1) == wanted.argmax(axis=1)).mean())
    is_finite = bool(np.isfinite(distance).all())
    return {
        "max_difference": float(distance.max()) if is_finite else None,
        "mean_difference": float(distance.mean()) if is_finite else None,
        **({"top1_agreement": agreement} if are_classes else {}),
        "within": is_finite and float(distance.max()) <= bound,
    }


def format_comparison(result: JsonObject, bound: float) -> str:
    """Return the comparison as a line of text."""
    if result["max_difference"] is None:
        return "outputs that are not finite: BEYOND every bound"
    verdict = "within" if result["within"] else "BEYOND"
    top1 = result.get("top1_agreement")
    same = "" if top1 is None else f", top-1 agrees on {top1:.1%}"
    return (
        f"max difference {result['max_difference']:.2e}, mean {result['mean_difference']:.2e}"
        f"{same}: {verdict} {bound:g}"
    )
