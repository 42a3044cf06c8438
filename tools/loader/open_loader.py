"""Opens a loader by flags."""

from __future__ import annotations

import argparse

from big_vision.input.catalog import load_tfds_catalog
from datasets import SOURCES, Loader, Role, create_loader
from utils.config.data import DataSection
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.places import is_remote, to_path


def open_loader(arguments: argparse.Namespace, shard: tuple[int, int]) -> Loader:
    """Open the loader of the flags, for one input process."""
    classes = arguments.num_classes
    known = {} if classes is None else {"num_classes": classes}
    data, role = create_section(arguments)
    return create_loader(data, role, seed=arguments.seed, shard=shard, known=known)


def create_section(arguments: argparse.Namespace) -> tuple[DataSection, Role]:
    """Create the data section of the flags, and the role to open."""
    role = arguments.mode or ("train" if arguments.split.startswith("train") else "eval")
    root, name = _find_dataset(arguments)
    values: JsonObject = {
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
    """Return the data root and the dataset's name, given or the only one."""
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
        held = ", ".join(names) or "nothing"
        raise UserError(f"--data-dir ({root}) holds {held}; choose one dataset with --dataset")
    return root, names[0]


def _is_tfds(arguments: argparse.Namespace) -> bool:
    return SOURCES.get(arguments.source) is SOURCES.get("tfds")


def _get_buffer_gib(arguments: argparse.Namespace, values: JsonObject) -> float:
    """Return the GiB of --shuffle-buffer examples."""
    if not _is_tfds(arguments):
        raise UserError("--shuffle-buffer is for --source tfds; files of a folder are not buffered")
    catalog = load_tfds_catalog(values["root"], values["name"])
    selection = catalog.select(arguments.split, arguments.label_key, "--split")
    # The loader holds two windows; half an example more, so that rounding does not lose one.
    return (arguments.shuffle_buffer + 0.5) * selection.mean_record_bytes / (1 << 30)
