"""The flags that the loader checks share."""

from __future__ import annotations

import argparse

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
