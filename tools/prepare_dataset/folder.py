"""Folders of class folders: images, a folder for each class."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from big_vision.input.catalog import load_tfds_catalog
from big_vision.input.faults import get_reason
from big_vision.input.images.folder import FolderSelection, select_folder
from big_vision.input.selection import list_some
from big_vision.pp.builder import get_preprocess_fn
from big_vision.pp.orientation import UPRIGHT, read_orientation
from tools.prepare_dataset import write
from utils.errors import UserError


def add_command(commands: write.Commands) -> None:
    """Add the subcommand `folder`."""
    text = "SRC/<class>/<image> or SRC/<split>/<class>/<image>; images are kept as is"
    folder = commands.add_parser("folder", help=text)
    add = folder.add_argument
    add("source", metavar="SRC", help="the folder")
    add("--name", required=True, help="name of the dataset: a-z, 0-9 and _")
    text = (
        "comma-separated subfolders that are splits; default: those named train, val, "
        "validation or test; without any, all classes become the split train"
    )
    add("--splits", help=text)
    text = "comma-separated splits that may lack classes of other splits"
    add("--fewer-classes", default="", metavar="SPLITS", help=text)
    text = "decode every image first, and name those that fail"
    add("--check", action="store_true", help=text)
    add("--version", default=write.VERSION, help="of the dataset (default 1.0.0)")
    folder.set_defaults(prepare=prepare_folder)
    write.add_output_flags(folder)


def prepare_folder(arguments: argparse.Namespace) -> Path:
    """Write a folder of class folders; files are copied into the records byte by byte."""
    write.check_name(arguments.name)
    target = write.get_target(arguments)
    selections = {
        name: select_folder(arguments.source, inner, "SRC")
        for name, inner in _find_splits(arguments).items()
    }
    if write.is_complete(target):
        write.refuse_other_format(target, arguments.format, "write it beside with --version 1.0.1")
        _compare_with_stored(target, selections, arguments.source)
        return target
    class_names = join_classes(selections, arguments.fewer_classes.split(","))
    print_summary(selections)
    if arguments.check:
        check_images([path for selection in selections.values() for path in selection.paths])
    numbers = {name: number for number, name in enumerate(class_names)}
    import tensorflow_datasets as tfds

    conversion: write.Conversion[tuple[Path, int]] = write.Conversion(
        name=arguments.name,
        description=f"Images of {len(class_names)} classes.",
        features={
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(names=list(class_names)),
            "file_name": tfds.features.Text(),
        },
        splits={
            name: [(path, numbers[path.parent.name]) for path in selection.paths]
            for name, selection in selections.items()
        },
        encode=lambda example: {
            "image": str(example[0]),
            "label": example[1],
            "file_name": f"{example[0].parent.name}/{example[0].name}",
        },
        get_bytes=lambda example: example[0].stat().st_size,
    )
    return write.write_by_flags(conversion, target, arguments)


def join_classes(
    selections: Mapping[str, FolderSelection], may_lack: Sequence[str]
) -> tuple[str, ...]:
    """Return the names of all classes; a UserError if a split not in `may_lack` lacks some."""
    names = tuple(sorted({name for s in selections.values() for name in s.class_names or ()}))
    for split, selection in selections.items():
        missing = sorted(set(names) - set(selection.class_names or ()))
        if missing and split not in may_lack:
            raise UserError(
                f"split {split} has no folder for {len(missing)} of the {len(names)} classes: "
                f"{list_some(missing)}; add the folders, or allow it by --fewer-classes {split}"
            )
    return names


def print_summary(selections: Mapping[str, FolderSelection]) -> None:
    """Print a line for each split to stderr: classes, images, and what is left out."""
    for split, selection in selections.items():
        filled, classes = len(np.unique(selection.labels)), len(selection.class_names or ())
        words = f"{split}: {len(selection.paths)} images in {classes} classes"
        if filled < classes:
            words += f", {classes - filled} of them without an image"
        if selection.left_out:
            words += f"; left out, as no images: {', '.join(selection.left_out)}"
        print(words, file=sys.stderr)


def check_images(paths: Sequence[Path]) -> None:
    """Decode every image, and count those with an EXIF orientation other than upright.

    A UserError if some cannot be decoded; each has a line on stderr.
    """
    import tensorflow as tf

    decode = get_preprocess_fn("decode")
    orient = tf.function(read_orientation, input_signature=[tf.TensorSpec([], tf.string)])
    rotated: list[Path] = []

    def find_fault(path: Path) -> str:
        try:
            image = path.read_bytes()
            decode({"image": image})
            if int(orient(image)) != UPRIGHT:
                rotated.append(path)
        except Exception as error:  # TensorFlow's classes
            return f"{path}: {get_reason(error)}"
        return ""

    bar = {"total": len(paths), "desc": "check", "unit": "image", "disable": None}
    with ThreadPoolExecutor() as pool:
        faults = [fault for fault in tqdm(pool.map(find_fault, paths), **bar) if fault]
    for fault in faults:
        print(fault, file=sys.stderr)
    if rotated:
        print(
            f"{len(rotated)} of the {len(paths)} images have an EXIF orientation other than 1, "
            f"first {min(rotated)}: decode leaves them turned or mirrored; write upright in its "
            "place in data.train_pp and data.eval_pp",
            file=sys.stderr,
        )
    if faults:
        raise UserError(
            f"{len(faults)} of the {len(paths)} images cannot be decoded; restore or remove them"
        )


def _compare_with_stored(
    target: Path, selections: Mapping[str, FolderSelection], source: str
) -> None:
    """Print that the dataset exists; a UserError if its numbers of images differ."""
    stored = load_tfds_catalog(str(target), "").splits
    sizes = {name: sum(split.lengths) for name, split in stored.items()}
    now = {name: len(selection.paths) for name, selection in selections.items()}
    if sizes != now:
        raise UserError(
            f"{target} is there already with {_show_sizes(sizes)}, but {source} has "
            f"{_show_sizes(now)}; write it beside with --version 1.0.1, or remove the old one"
        )
    print(f"is there already, with {_show_sizes(sizes)}; nothing is written", file=sys.stderr)


def _show_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} images in {split}" for split, count in sizes.items())


def _find_splits(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the subfolder of each TFDS split (`all`: the folder itself)."""
    base = Path(arguments.source)
    if not base.is_dir():
        raise UserError(f"SRC ({base}) is no folder; name the folder that holds the class folders")
    if names := write.read_splits(arguments.splits):
        return {name: name for name in names}
    known = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
    splits = {split: name for name, split in known.items() if (base / name).is_dir()}
    return splits or {"train": "all"}
