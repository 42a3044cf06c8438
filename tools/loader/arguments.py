"""The flags that the two loader checks share, and the configuration that they make."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.places import is_remote, to_path

if TYPE_CHECKING:
    from datasets import Loader, Role
    from utils.config.data import DataSection

_MODES = ("train", "eval")


def add_loader_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what describes a dataset and how it is read."""
    add = parser.add_argument
    add("--data-dir", required=True, help="directory that holds the dataset")
    add("--dataset", default="", help="TFDS name; default: the only one in --data-dir")
    add("--source", default="tfds", help="kind of dataset, as data.source (default tfds)")
    add("--split", default="train", help="split to read, slicing allowed (default train)")
    add(
        "--mode",
        choices=_MODES,
        help="endless shuffled batches, or one ordered pass; default: train where the split's name "
        "begins with train",
    )
    add(
        "--train-pp",
        default="decode_jpeg_and_inception_crop(224)|flip_lr|value_range(-1, 1)",
        help="preprocessing string of --mode train (default %(default)s)",
    )
    add(
        "--eval-pp",
        default="decode|resize_small(256)|central_crop(224)|value_range(-1, 1)",
        help="preprocessing string of --mode eval (default %(default)s)",
    )
    add("--image-key", default="image", help="as data.image_key")
    add("--label-key", default="label", help="as data.label_key")
    add("--num-classes", type=int, help="classes, where the dataset does not tell them")
    add("--batch", type=int, default=128, help="global batch size (default 128)")
    add("--seed", type=int, default=0, help="seed of order and augmentation (default 0)")
    add("--prefetch", type=int, default=2, help="batches prepared ahead (default 2)")
    add(
        "--private-threadpool-size",
        "--num-parallel-calls",
        dest="threads",
        type=int,
        default=0,
        help="threads of the pipeline: pool and parallel calls are one number here; 0: one a core",
    )
    add("--order", default="auto", choices=("auto", "exact", "sharded"), help="as data.order")
    add(
        "--shuffle-buffer",
        type=int,
        default=0,
        help="examples of the shuffle buffer; implies --order sharded (default: data.shuffle_gib)",
    )


def open_loader(arguments: argparse.Namespace, shard: tuple[int, int]) -> Loader:
    """The loader that the flags describe, of one input process."""
    from datasets import create_loader

    classes = arguments.num_classes
    known = {} if classes is None else {"num_classes": classes}
    data, role = create_section(arguments)
    return create_loader(data, role, seed=arguments.seed, shard=shard, known=known)


def create_section(arguments: argparse.Namespace) -> tuple[DataSection, Role]:
    """The section that the flags describe, and the role to open."""
    from utils.config.data import DataSection

    role = arguments.mode or ("train" if arguments.split.startswith("train") else "eval")
    root, name = _find_dataset(arguments)
    values: dict[str, Any] = {
        "source": arguments.source,
        "name": name,
        "root": root,
        "train_split": arguments.split,
        "eval_split": arguments.split,
        "train_pp": arguments.train_pp,
        "eval_pp": arguments.eval_pp,
        "global_batch_size": arguments.batch,
        "prefetch_batches": arguments.prefetch,
        "threads": arguments.threads,
        "order": arguments.order,
        "image_key": arguments.image_key,
        "label_key": arguments.label_key,
        "return_id": True,
    }
    if arguments.shuffle_buffer:
        values |= {"order": "sharded", "shuffle_gib": _get_buffer_gib(arguments, values)}
    return DataSection(**values), role


def _find_dataset(arguments: argparse.Namespace) -> tuple[str, str]:
    """The data root and the dataset's name, given or the only one that is there."""
    root = arguments.data_dir
    if arguments.dataset or not _is_tfds(arguments) or is_remote(root):
        return root, arguments.dataset
    path = to_path(root)
    if (path / "dataset_info.json").exists() or not path.is_dir():
        return root, ""
    if any(path.glob("*/dataset_info.json")):
        # The dataset's own directory, which holds its versions.
        return str(path.parent), path.name
    names = sorted(p.name for p in path.iterdir() if p.is_dir() and p.name != "downloads")
    if len(names) != 1:
        found = ", ".join(names) or "nothing"
        raise UserError(f"--data-dir ({root}) holds {found}; choose one dataset with --dataset")
    return root, names[0]


def _is_tfds(arguments: argparse.Namespace) -> bool:
    from big_vision.input.images.image_files import TfdsSource
    from datasets import SOURCES

    return SOURCES.get(arguments.source) is TfdsSource


def _get_buffer_gib(arguments: argparse.Namespace, values: JsonObject) -> float:
    """The bytes that hold --shuffle-buffer examples."""
    from big_vision.input.catalog import load_tfds_catalog

    if not _is_tfds(arguments):
        raise UserError("--shuffle-buffer is for --source tfds; files of a folder are not buffered")
    catalog = load_tfds_catalog(values["root"], values["name"])
    selection = catalog.select(arguments.split, arguments.label_key, "--split")
    # The loader holds two windows; a hair more, so that rounding does not lose an example.
    return (arguments.shuffle_buffer + 0.5) * selection.mean_record_bytes / (1 << 30)
