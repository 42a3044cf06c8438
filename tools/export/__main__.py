"""Hands a model over to other programs, and proves that they give the same answers.

    python -m tools.export runs/digits_student/RUN --to onnx timm --out exported
    python -m tools.export local-dir:exported/timm --to stablehlo --normalize --out exported
    python -m tools.export runs/qwen3_5_sequences/RUN --to transformers --out exported

Each form is written below OUT, read back by what will serve it and asked about real images, whose
answers are compared with those of the model in PyTorch: `export.json` has the differences, and the
exit code is 1 where one exceeds --bound. Programs take any number of images, but for `stablehlo`,
which takes 8 at once; --batch-size fixes the number for all. `stablehlo_any` is StableHLO of any
number, by torchax and jax, which `bash run_commands.sh setup --jax-export` installs; savedmodel
needs neither: it holds the program of a fixed number and deals images out to it. `transformers` is
of language models (docs/delta.md): config.json and weights under the names of the Hub.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from store.query.record import RunRecord
from store.record.environment import read_environment
from tools.card import make_card
from tools.weights_of import add_weights_flags, load_trained
from utils.errors import EXIT_USER_ERROR, UserError
from utils.json_types import JsonObject
from utils.programs import CommandLine, create_program_parser, prepare_folder, require_at_least
from utils.storage.local import write_atomically

if TYPE_CHECKING:
    from models.trained import TrainedModel
    from tools.export.formats import Form
    from tools.export.servable import Handover

EXIT_BEYOND = 1
REPORT, CARD = "export.json", "README.md"
# In this order: what each loads later must not come before the other.
_NAMES = ("onnx", "torch_export", "timm", "stablehlo", "savedmodel", "stablehlo_any")
# Of language models, alone.
_LANGUAGE = "transformers"


def create_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = create_program_parser(__doc__, prog="python -m tools.export")
    add_weights_flags(parser)
    add = parser.add_argument
    add(
        "--to",
        nargs="+",
        required=True,
        choices=(*_NAMES, _LANGUAGE),
        metavar="FORM",
        help=", ".join((*_NAMES, _LANGUAGE)),
    )
    add("--out", type=Path, required=True, help="folder; each form has one of its own in it")
    add(
        "--normalize", action="store_true",
        help="take pixels of 0 to 255 and normalise inside; else the caller does",
    )  # fmt: skip
    add("--batch-size", type=int, metavar="B", help="fix it; none: any number of images")
    add("--images", default="", metavar="FOLDER", help="to compare on; none: two photographs")
    add("--count", type=int, default=16, metavar="N", help="images to compare on (16)")
    add("--bound", type=float, default=1e-4, help="largest difference of a number (1e-4)")
    return parser


def export(options: argparse.Namespace) -> int:
    """Write, read back and compare; gives the exit code.

    Raises:
      UserError: weights, images or a flag that cannot be used.
    """
    from tools.export.comparison import compare, show
    from tools.export.formats import FORMS
    from tools.export.language import export_language
    from tools.export.servable import Handover
    from tools.sample_images import read_images

    _check_flags(options)
    if _LANGUAGE in options.to:
        if len(options.to) > 1:
            raise UserError(
                f"--to {' '.join(options.to)}: {_LANGUAGE} is of language models, the others of "
                "images; give one kind"
            )
        return export_language(options)
    trained = load_trained(options)
    forms = {name: FORMS[name]() for name in _NAMES if name in options.to}
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
            write_atomically(place / REPORT, json.dumps(told, indent=2) + "\n")
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
    from utils.weights.beside import find_run_folder

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


main = CommandLine(create_parser, export, logs=True)

if __name__ == "__main__":
    sys.exit(main())
