"""Stores the outputs of a run's teachers, and manages what is stored.

    python -m tools.cache write --config configs/digits_kd.yaml --teacher_path TEACHER --out CACHE
    python -m tools.cache info CACHE
    python -m tools.cache verify CACHE
    python -m tools.cache merge CACHE OTHER --out BOTH
    python -m tools.cache subset CACHE --top-k 5 --augmentations 2 --dtype int8 --out SMALL
    python -m tools.cache import imagenet_plus FILES --config configs/x.yaml --out CACHE

Exit code 2: wrong use; 1: `verify` found a difference from what was written. `COMMAND --help` has
the flags.
"""

from __future__ import annotations

import argparse
import sys
from typing import TypeAlias

from tasks.teachers.cache import DTYPES
from utils.programs import CommandLine, ProgramParser, create_program_parser

Commands: TypeAlias = "argparse._SubParsersAction[ProgramParser]"
_WRITE = """Run the teachers of a run once and store their outputs for training.

The stream of examples (order, crop, flip, mixup; windows of text) is a function of seed, epoch and
position, so the stored outputs are those of a live teacher. `--plan` prints the sizes only.
"""
_KEYS = "All other flags are keys of the run's configuration, as for main.py"
_CACHE = "directory or URL"
_NEW = "directory or URL of the new cache"


def create_parser() -> argparse.ArgumentParser:
    """Create the parser, with one parser for each command."""
    parser = create_program_parser(__doc__, prog="python -m tools.cache")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_write(commands)
    _add_readers(commands)
    _add_rewriters(commands)
    _add_import(commands)
    return parser


def _add_write(commands: Commands) -> None:
    text = "run a run's teachers once and store their outputs"
    form = {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": f"{_KEYS}."}
    parser = commands.add_parser("write", help=text, description=_WRITE, **form)
    parser.set_defaults(run="tools.cache.writing:cache", takes_keys=True)
    add = parser.add_argument
    add("--config", required=True, help="YAML of the run that will be taught")
    add("--out", default="", help="directory or URL (default: distill.teacher_cache)")
    add("--epochs", type=int, help="epochs to store (default: those of the run)")
    augmentations = "store N epochs, which are N augmentations of each example, and let runs of "
    augmentations += "any length start over with them"
    add("--augmentations", type=int, metavar="N", help=augmentations)
    add("--top-k", type=int, help="classes to store (default: 16, or all if fewer)")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="of the stored numbers (float16)")
    part = "store the epochs I, I + N, I + 2 N: N machines share the work, into one directory, or "
    part += "into one each that `merge` joins"
    add("--part", default="0/1", metavar="I/N", help=part)
    add("--plan", action="store_true", help="print sizes and stop")


def _add_readers(commands: Commands) -> None:
    parser = commands.add_parser("info", help="the card of a cache: its teachers and errors")
    parser.add_argument("cache", help=_CACHE)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run="tools.cache.verifying:show", takes_keys=False, config="")
    text = "compare all files with their checksums, and some outputs with the teachers'"
    epilog = "With --config all other flags are keys of the run that was stored for. Exit code 1: "
    epilog += "something differs from what was written."
    parser = commands.add_parser("verify", help=text, epilog=epilog)
    add = parser.add_argument
    add("cache", help=_CACHE)
    add("--config", default="", help="YAML of that run (default: no teacher is run)")
    add("--workers", type=int, default=1, metavar="N", help="processes that read the files (1)")
    add("--steps", type=int, default=4, metavar="N", help="batches to compute again (4)")
    # Nats, or units of features.
    add("--tolerance", type=float, default=0.01, help="beyond the noted mean error (0.01)")
    parser.set_defaults(run="tools.cache.verifying:verify", takes_keys=True)


def _add_rewriters(commands: Commands) -> None:
    text = "parts of several machines, or several teachers' outputs for one stream, as one cache"
    parser = commands.add_parser("merge", help=text)
    parser.add_argument("caches", nargs="+", help="directories or URLs")
    parser.add_argument("--out", required=True, help=_NEW)
    parser.set_defaults(run="tools.cache.rewriting:merge", takes_keys=False, config="")
    text = "a smaller cache: fewer classes, augmentations or teachers, another type"
    parser = commands.add_parser("subset", help=text)
    add = parser.add_argument
    add("cache", help=_CACHE)
    add("--out", required=True, help=_NEW)
    add("--top-k", type=int, help="classes to keep of each output")
    add("--augmentations", type=int, metavar="N", help="keep the first N epochs")
    add("--teachers", nargs="+", default=[], metavar="HASH", help="keep these, as info names them")
    add("--dtype", choices=DTYPES, help="of the stored numbers")
    parser.set_defaults(run="tools.cache.rewriting:cut", takes_keys=False, config="")


def _add_import(commands: Commands) -> None:
    text = "published outputs (ImageNet+, TinyViT) as a cache, with the views of the images"
    epilog = f"{_KEYS}; its data.train_pp shows the views by stored_view."
    parser = commands.add_parser("import", help=text, epilog=epilog)
    parser.set_defaults(run="tools.cache.importing:import_published", takes_keys=True)
    add = parser.add_argument
    form = "imagenet_plus: a folder of Dataset Reinforcement; tinyvit: one of save_logits.py"
    add("form", choices=("imagenet_plus", "tinyvit"), help=form)
    add("source", help="directory of the published files, unpacked")
    saved = "of tinyvit: the config.json of save_logits.py, which has the augmentations"
    add("--saved-config", default="", metavar="FILE", help=saved)
    add("--config", required=True, help="YAML of a run that will be taught")
    add("--out", required=True, help="directory of the new cache, which also holds the views")
    ids = "how files name the dataset's examples: sorted: by their rank among the names class/file "
    ids += "(torchvision's ImageFolder); stem: by the file's name without its ending; or a text "
    ids += "file with the name of each example of the split in a line (sorted if files have "
    ids += "numbers, else stem)"
    add("--ids", default="", metavar="RULE", help=ids)
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="of the stored numbers (float16)")


main = CommandLine(create_parser, logs=True, interrupted="interrupted; the same command continues")

if __name__ == "__main__":
    sys.exit(main())
