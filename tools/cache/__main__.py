"""Stores the answers of a run's teachers, and looks after what is stored.

    python -m tools.cache write --config configs/digits_kd.yaml --teacher_path TEACHER --out CACHE
    python -m tools.cache info CACHE
    python -m tools.cache verify CACHE
    python -m tools.cache merge CACHE OTHER --out BOTH
    python -m tools.cache subset CACHE --top-k 5 --augmentations 2 --dtype int8 --out SMALL
    python -m tools.cache import imagenet_plus FILES --config configs/x.yaml --out CACHE

Exit code 2: wrong use; 1: `verify` found what was not written so. `COMMAND --help` says more.
"""

from __future__ import annotations

import argparse
import sys

from tasks.teachers.cache import DTYPES
from utils.programs import CommandLine, create_program_parser

_WRITE = """Ask a run's teachers once and store their answers for training.

The stream of examples (order, crop, flip, mixup; windows of text) is a function of seed, epoch and
position, so the stored answers are those that a live teacher would give. `--plan` says what it will
take.
"""


def create_parser() -> argparse.ArgumentParser:
    """The tool's commands."""
    parser = create_program_parser(__doc__, prog="python -m tools.cache")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_write(commands)
    _add_info_and_verify(commands)
    _add_merge_and_subset(commands)
    _add_import(commands)
    return parser


def _add_write(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "write",
        help="ask a run's teachers once and store their answers",
        description=_WRITE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other flags are keys of the run's configuration, as for main.py.",
    )
    parser.set_defaults(run="tools.cache.writing:cache", takes_keys=True)
    add = parser.add_argument
    add("--config", required=True, help="YAML of the run that will be taught")
    add("--out", default="", help="directory or URL; none: distill.teacher_cache")
    add("--epochs", type=int, help="epochs to store; none: as the run is long")
    add(
        "--augmentations", type=int, metavar="N",
        help="store N epochs, which are N augmentations of each example, and let runs of any "
        "length start over with them",
    )  # fmt: skip
    add("--top-k", type=int, help="classes to store; none: 16, or all if fewer")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="of the stored numbers (float16)")
    add(
        "--part", default="0/1", metavar="I/N",
        help="store the epochs I, I + N, I + 2 N: N machines share the work, into one directory, "
        "or into one each that `merge` puts together",
    )  # fmt: skip
    add("--plan", action="store_true", help="print sizes and stop")


def _add_info_and_verify(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("info", help="the card of a cache: whose answers, how exact")
    parser.add_argument("cache", help="directory or URL")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run="tools.cache.looking:show", takes_keys=False, config="")
    parser = commands.add_parser(
        "verify",
        help="hold all files against their checksums, and ask the teachers again about some",
        epilog="With --config all other flags are keys of the run that was stored for. Exit code "
        "1: something is not what was written.",
    )
    add = parser.add_argument
    add("cache", help="directory or URL")
    add("--config", default="", help="YAML of that run; none: no teacher is asked again")
    add("--workers", type=int, default=1, metavar="N", help="processes that read the files (1)")
    add("--steps", type=int, default=4, metavar="N", help="batches to ask about again (4)")
    # Nats, or units of features, by which a second answer of the same teacher may lie further off.
    add("--tolerance", type=float, default=0.01, help="beyond the noted mean error (0.01)")
    parser.set_defaults(run="tools.cache.looking:verify", takes_keys=True)


def _add_merge_and_subset(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "merge",
        help="parts of several machines, or several teachers' answers to one stream, as one cache",
    )
    parser.add_argument("caches", nargs="+", help="directories or URLs")
    parser.add_argument("--out", required=True, help="directory or URL of the new cache")
    parser.set_defaults(run="tools.cache.cutting:merge", takes_keys=False, config="")
    parser = commands.add_parser(
        "subset", help="a smaller cache: fewer classes, augmentations or teachers, another type"
    )
    add = parser.add_argument
    add("cache", help="directory or URL")
    add("--out", required=True, help="directory or URL of the new cache")
    add("--top-k", type=int, help="classes to keep of each answer")
    add("--augmentations", type=int, metavar="N", help="keep the first N epochs")
    add("--teachers", nargs="+", default=[], metavar="HASH", help="keep these, as info names them")
    add("--dtype", choices=DTYPES, help="of the stored numbers")
    parser.set_defaults(run="tools.cache.cutting:cut", takes_keys=False, config="")


def _add_import(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "import",
        help="published answers (ImageNet+, TinyViT) as a cache, with the views that they are to",
        epilog="All other flags are keys of the run's configuration, as for main.py; its "
        "data.train_pp shows the views by stored_view.",
    )
    parser.set_defaults(run="tools.cache.importing:import_published", takes_keys=True)
    add = parser.add_argument
    add(
        "form", choices=("imagenet_plus", "tinyvit"),
        help="imagenet_plus: a folder of Dataset Reinforcement; tinyvit: one of save_logits.py",
    )  # fmt: skip
    add("source", help="directory of the published files, unpacked")
    add(
        "--saved-config", default="", metavar="FILE",
        help="of tinyvit: the config.json that save_logits.py wrote, which says what was drawn",
    )  # fmt: skip
    add("--config", required=True, help="YAML of a run that will be taught")
    add("--out", required=True, help="directory of the new cache, which holds the views, too")
    add(
        "--ids", default="", metavar="RULE",
        help="how files name the dataset's examples: sorted: by their place among the names "
        "class/file (torchvision's ImageFolder); stem: by the file's name without its ending; or "
        "a text file with the name of each example of the split in a line (sorted where files "
        "have numbers, else stem)",
    )  # fmt: skip
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="of the stored numbers (float16)")


main = CommandLine(create_parser, logs=True, interrupted="interrupted; the same command continues")

if __name__ == "__main__":
    sys.exit(main())
