"""Flags of the loader checks."""

from __future__ import annotations

import argparse


def add_loader_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a dataset and of how it is read."""
    add = parser.add_argument
    text = "YAML of a run: its keys of data, model.num_classes and train.seed are the defaults"
    add("--config", default="", metavar="FILE", help=text)
    add("--data-dir", default="", help="directory that holds the dataset (default: of --config)")
    add("--dataset", default="", help="TFDS name; default: the only one in --data-dir")
    add("--source", help="kind of dataset, as data.source (default tfds)")
    add("--split", default="", help="split to read, slicing allowed (default train)")
    text = "endless shuffled batches, or one ordered pass (default: train for train splits)"
    add("--mode", choices=("train", "eval"), help=text)
    text = "preprocessing string of --mode train (default: an inception crop of 224, flipped; of "
    add("--train-pp", help=text + "JPEGs, by the first record, only the crop is decoded)")
    text = "preprocessing string of --mode eval (default: the middle 224 of 256)"
    add("--eval-pp", help=text)
    add("--image-key", help="as data.image_key (default image)")
    add("--label-key", help="as data.label_key (default label)")
    add("--num-classes", type=int, help="number of classes, if the dataset has none")
    add("--batch", type=int, help="global batch size (default 128)")
    add("--seed", type=int, help="seed of order and augmentation (default 0)")
    add("--prefetch", type=int, help="batches prepared ahead (default 2)")
    names, text = ("--private-threadpool-size", "--num-parallel-calls"), "as data.threads (0)"
    add(*names, dest="threads", type=int, help=text)
    add("--order", choices=("auto", "exact", "sharded"), help="as data.order (default auto)")
    text = "examples of the shuffle buffer; implies --order sharded (default: data.shuffle_gib)"
    add("--shuffle-buffer", type=int, default=0, help=text)
