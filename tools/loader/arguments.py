"""Flags of the loader checks."""

from __future__ import annotations

import argparse


def add_loader_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a dataset and of how it is read."""
    add = parser.add_argument
    add("--data-dir", required=True, help="directory that holds the dataset")
    add("--dataset", default="", help="TFDS name; default: the only one in --data-dir")
    add("--source", default="tfds", help="kind of dataset, as data.source (default tfds)")
    add("--split", default="train", help="split to read, slicing allowed (default train)")
    text = "endless shuffled batches, or one ordered pass (default: train for train splits)"
    add("--mode", choices=("train", "eval"), help=text)
    train_pp = "decode_jpeg_and_inception_crop(224)|flip_lr|value_range(-1, 1)"
    eval_pp = "decode|resize_small(256)|central_crop(224)|value_range(-1, 1)"
    text = "preprocessing string of --mode {} (default %(default)s)"
    add("--train-pp", default=train_pp, help=text.format("train"))
    add("--eval-pp", default=eval_pp, help=text.format("eval"))
    add("--image-key", default="image", help="as data.image_key")
    add("--label-key", default="label", help="as data.label_key")
    add("--num-classes", type=int, help="number of classes, if the dataset has none")
    add("--batch", type=int, default=128, help="global batch size (default 128)")
    add("--seed", type=int, default=0, help="seed of order and augmentation (default 0)")
    add("--prefetch", type=int, default=2, help="batches prepared ahead (default 2)")
    names, text = ("--private-threadpool-size", "--num-parallel-calls"), "as data.threads (0)"
    add(*names, dest="threads", type=int, default=0, help=text)
    add("--order", default="auto", choices=("auto", "exact", "sharded"), help="as data.order")
    text = "examples of the shuffle buffer; implies --order sharded (default: data.shuffle_gib)"
    add("--shuffle-buffer", type=int, default=0, help=text)
