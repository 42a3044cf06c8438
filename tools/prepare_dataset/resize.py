"""TFDS datasets with images of the size that is needed, which take a fraction of the decoding."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from big_vision.input.catalog import StoredSplit, TfdsCatalog, load_tfds_catalog
from big_vision.input.faults import get_reason
from big_vision.pp.builder import get_preprocess_fn
from big_vision.pp.registry import Example
from big_vision.tensorflow_setup import tf
from tools.prepare_dataset import write
from utils.errors import UserError
from utils.storage.places import is_remote

if TYPE_CHECKING:
    from tensorflow_datasets.core.features import FeatureConnector

HASH_KEY = "original_sha256"
_STORES = ("jpeg", "uint8")
_MAX_SIDE = 1 << 14
_QUALITY = 90


@dataclass(frozen=True)
class Images:
    """Format of the new images."""

    key: str  # the feature; `a/b` is feature b of the group a
    channels: int  # 1 or 3
    short_side: int
    quality: int
    stored: str  # "jpeg", or "uint8": the pixels themselves


def add_command(commands: write.Commands) -> None:
    """Add the subcommand `resize`."""
    text = "a prepared dataset with smaller images, as JPEGs or as pixels"
    resize = commands.add_parser("resize", help=text)
    add = resize.add_argument
    add("source", metavar="NAME", help="the prepared dataset: imagenet2012, imagenet2012:5.1.0")
    add("--root", required=True, metavar="DIR", help="data root that it lies below")
    add("--out", metavar="DIR", help="data root to write below (default: --root)")
    add("--name", help="of the new dataset (default NAME_256, or NAME_256_uint8)")
    text = "length of the smaller side (default 256); smaller images stay as they are"
    add("--short-side", type=int, default=256, metavar="PIXELS", help=text)
    add("--quality", type=int, help=f"of the JPEGs, 1 to 100 (default {_QUALITY})")
    text = "jpeg, or uint8: pixels without decoding, in 5 to 10 times the space"
    add("--format", choices=_STORES, default="jpeg", help=text)
    add("--files", choices=write.FORMATS, help="file format (default: the source's)")
    add("--image-key", default="image", help="the feature that holds the image (default image)")
    add("--splits", help="comma-separated splits (default: all)")
    resize.set_defaults(prepare=prepare_resized)


def prepare_resized(arguments: argparse.Namespace) -> Path:
    """Write the dataset again, file by file, with smaller images; all else stays the same.

    An example keeps its file, position and features, so that splits, slices and the order of
    training are those of the source. A new feature, `original_sha256`, has the hash of the source's
    encoded image.

    Raises:
      UserError: a flag has no effect, or an image cannot be decoded.
    """
    _check_numbers(arguments)
    root = _get_root(arguments)
    catalog = load_tfds_catalog(arguments.root, arguments.source)
    images = Images(
        key=arguments.image_key,
        channels=_get_channels(catalog, arguments.image_key, arguments.format),
        short_side=arguments.short_side,
        quality=_QUALITY if arguments.quality is None else arguments.quality,
        stored=arguments.format,
    )
    splits = _choose_splits(catalog, arguments.splits)
    target = root / _name(arguments) / Path(catalog.directory).name
    write.check_target(target, "--name")
    description = _describe(catalog, splits, images)
    if write.is_complete(target):
        return _accept(target, description)
    file_format = arguments.files or catalog.file_format
    return _write(catalog, splits, images, target, file_format, description)


def _check_numbers(arguments: argparse.Namespace) -> None:
    if not 1 <= arguments.short_side <= _MAX_SIDE:
        raise UserError(
            f"--short-side ({arguments.short_side}) must be 1 to {_MAX_SIDE} pixels; 256 is usual"
        )
    quality = arguments.quality
    if quality is not None and not 1 <= quality <= 100:
        raise UserError(f"--quality ({quality}) must be 1 to 100; {_QUALITY} is the default")
    if quality is not None and arguments.format != "jpeg":
        raise UserError(
            f"--quality ({quality}) is not supported with --format {arguments.format}, which "
            "stores pixels; remove it, or use --format jpeg"
        )
    if arguments.name:
        write.check_name(arguments.name)


def _get_root(arguments: argparse.Namespace) -> Path:
    if arguments.out is None and is_remote(arguments.root):
        raise UserError(
            f"--out is missing, and nothing is written below a URL such as --root "
            f"({arguments.root!r}); give a local directory as --out"
        )
    return write.get_root(arguments.out or arguments.root, "--out" if arguments.out else "--root")


def _get_channels(catalog: TfdsCatalog, key: str, stored: str) -> int:
    sides = catalog.get_image_sides(key)
    if sides is None:
        raise UserError(
            f"--image-key ({key}) is no encoded image in {catalog.directory}; pixels are resized "
            "in the preprocessing string, or name another feature"
        )
    channels = sides[2] or 3
    if channels not in (1, 3):
        raise UserError(
            f"--image-key ({key}): {catalog.directory} has images of {channels} channels, and "
            f"{stored} is written of 1 or 3 alone; use the dataset as it is"
        )
    return channels


def _choose_splits(catalog: TfdsCatalog, asked: str | None) -> dict[str, StoredSplit]:
    names = write.read_splits(asked) or list(catalog.splits)
    for name in names:
        if name not in catalog.splits:
            raise UserError(
                f"--splits ({asked}): {catalog.directory} has no {name!r}; it has "
                f"{', '.join(catalog.splits)}"
            )
    return {name: catalog.splits[name] for name in names}


def _name(arguments: argparse.Namespace) -> str:
    if arguments.name:
        return arguments.name
    # TFDS splits the names of files at their dashes.
    name = re.sub(r"\W", "_", arguments.source.split(":")[0]).lower()
    return f"{name}_{arguments.short_side}" + ("_uint8" if arguments.format == "uint8" else "")


def _describe(catalog: TfdsCatalog, splits: Mapping[str, StoredSplit], images: Images) -> str:
    """Return the description of the dataset, which depends on the source and the size."""
    hashes = ", ".join(f"{name} {catalog.select(name, '', '').files_hash}" for name in splits)
    how = f"JPEG of quality {images.quality}" if images.stored == "jpeg" else "uint8 pixels"
    version = Path(catalog.directory)
    return (
        f"{images.key} of {version.parent.name}:{version.name}, the smaller side at most "
        f"{images.short_side} pixels (decode|resize_small({images.short_side})), as {how}. "
        f"Files of the source: {hashes}."
    )


def _accept(target: Path, description: str) -> Path:
    """Return an existing dataset if its description is the same; else raise a UserError."""
    facts = json.loads((target / "dataset_info.json").read_text(encoding="utf-8"))
    if facts.get("description") != description:
        raise UserError(
            f"--name ({target.parent.name}): {target} is there already with other images: "
            f"{facts.get('description', '')!r}; give another --name, or remove it"
        )
    print("is there already; nothing is written", file=sys.stderr)
    return target


def _write(
    catalog: TfdsCatalog,
    splits: Mapping[str, StoredSplit],
    images: Images,
    target: Path,
    file_format: str,
    description: str,
) -> Path:
    import tensorflow_datasets as tfds

    write.open_partial(target, f"{description} {file_format}")
    old = tfds.builder_from_directory(catalog.directory).info.features
    convert = _Conversion(images, catalog.file_format, keeps_hash=HASH_KEY in old)
    total = sum(sum(split.lengths) for split in splits.values())
    name = target.parent.name
    with tqdm(total=total, desc=f"write {name}", unit="example", disable=None) as bar:

        def report(count: int, size: int) -> None:
            bar.update(count)
            _check_space(target.parent, size * (total - bar.n) // count)

        infos = []
        for split, stored in splits.items():
            shards = list(zip(stored.lengths, map(convert, stored.paths), strict=True))
            stem = f"{name}-{split}"
            infos.append(write.write_split(target, stem, file_format, shards, report))
    features = _replace(old, images.key.split("/"), convert.feature)
    features.setdefault(HASH_KEY, tfds.features.Text())
    return write.finish(target, tfds.features.FeaturesDict(features), infos, description)


def _check_space(folder: Path, needed: int) -> None:
    """Raise a UserError if the disk has no room for the rest."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"--out: the rest needs about {needed / 2**30:.1f} GiB and {folder} has "
            f"{free / 2**30:.1f}; make room, or give a smaller --short-side or --format jpeg"
        )


def _replace(features: Example, path: list[str], feature: FeatureConnector) -> Example:
    first, *rest = path
    return {
        name: old if name != first else (_replace(old, rest, feature) if rest else feature)
        for name, old in features.items()
    }


class _Conversion:
    """Converts a file of the source to records with smaller images, in their order.

    `keeps_hash`: whether the source was resized and has the hashes of the original images.
    """

    def __init__(self, images: Images, file_format: str, *, keeps_hash: bool) -> None:
        import tensorflow_datasets as tfds

        self._images, self._file_format, self._keeps_hash = images, file_format, keeps_hash
        shape = (None, None, images.channels)
        if images.stored == "jpeg":
            self.feature = tfds.features.Image(shape=shape)
        else:
            self.feature = tfds.features.Tensor(shape=shape, dtype=np.uint8, encoding="bytes")
        own = {} if keeps_hash else {HASH_KEY: tfds.features.Text()}
        self._own = tfds.features.FeaturesDict({images.key: self.feature, **own})

    def __call__(self, path: str) -> Iterator[bytes]:
        """Yield the records; a UserError if an image cannot be decoded."""
        records = self._read(path).map(self._shrink, num_parallel_calls=tf.data.AUTOTUNE)
        number = 0
        try:
            for record, image in records.prefetch(16).as_numpy_iterator():
                yield self._merge(record, image)
                number += 1
        except (tf.errors.InvalidArgumentError, tf.errors.DataLossError) as error:
            raise UserError(
                f"{path}, record {number}: {get_reason(error)}; mend that image or file in the "
                "source, and run the same command again"
            ) from error

    def _read(self, path: str) -> tf.data.Dataset:
        if self._file_format != "array_record":
            return tf.data.TFRecordDataset(path)
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        def read() -> Iterator[bytes]:
            source = ArrayRecordDataSource(path)
            for start in range(0, len(source), 64):
                yield from source.__getitems__(range(start, min(start + 64, len(source))))

        return tf.data.Dataset.from_generator(read, output_signature=tf.TensorSpec((), tf.string))

    def _shrink(self, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return a serialised example and its image as it will be stored."""
        images, key = self._images, self._images.key
        encoded = tf.io.parse_single_example(record, {key: tf.io.FixedLenFeature((), tf.string)})
        decode = get_preprocess_fn(f"decode({images.channels})")
        shrink = get_preprocess_fn(f"resize_small({images.short_side})")
        pixels = decode({"image": encoded[key]})["image"]
        is_large = tf.reduce_min(tf.shape(pixels)[:2]) > images.short_side

        def smaller() -> tf.Tensor:
            return shrink({"image": pixels})["image"]

        if images.stored == "uint8":
            return record, tf.cond(is_large, smaller, lambda: pixels)
        return record, tf.cond(
            is_large,
            lambda: tf.io.encode_jpeg(smaller(), quality=images.quality),
            lambda: encoded[key],
        )

    def _merge(self, record: bytes, image: np.ndarray | bytes) -> bytes:
        """Return the example with its new image; other features keep their bytes."""
        key, example = self._images.key, tf.train.Example.FromString(record)
        original = example.features.feature.pop(key).bytes_list.value[0]
        hashes = {} if self._keeps_hash else {HASH_KEY: hashlib.sha256(original).hexdigest()}
        own = tf.train.Example.FromString(self._own.serialize_example({key: image, **hashes}))
        example.MergeFrom(own)
        return example.SerializeToString(deterministic=True)
