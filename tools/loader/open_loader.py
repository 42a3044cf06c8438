"""Opens a loader by flags, or by the data keys of a run's YAML."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from big_vision.input.catalog import load_tfds_catalog
from big_vision.input.images.image_files import ImageFiles
from datasets import SOURCES, Loader, Role, create_loader, create_source
from utils.config.data import DataSection
from utils.config.load import change, load_config
from utils.config.sections import RunConfig
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.places import is_remote, to_path

# Flag -> the key of data that it sets.
_KEYS = {
    "source": "source",
    "train_pp": "train_pp",
    "eval_pp": "eval_pp",
    "image_key": "image_key",
    "label_key": "label_key",
    "batch": "global_batch_size",
    "prefetch": "prefetch_batches",
    "threads": "threads",
    "order": "order",
}
_BATCH = 128
_SHOWN = 5  # folders in an error
# What decodes the first example -> the beginning of the default string.
_CROPS = {
    "jpeg": "decode_jpeg_and_inception_crop(224)",
    "decode": "decode|inception_crop(224)",
    "": "inception_crop(224)",
}


@dataclass(frozen=True)
class LoaderPlan:
    """A loader that flags describe."""

    data: DataSection
    role: Role
    seed: int
    known: dict[str, int]

    @property
    def split(self) -> str:
        return self.data.train_split if self.role == "train" else self.data.eval_split

    @property
    def title(self) -> str:
        """Name of the dataset, or else its directory."""
        return self.data.name or self.data.root

    def open(self, shard: tuple[int, int]) -> Loader:
        """Open the loader for one input process."""
        return create_loader(self.data, self.role, seed=self.seed, shard=shard, known=self.known)


def plan_loader(arguments: argparse.Namespace) -> LoaderPlan:
    """Return what --config and the flags describe; flags win."""
    given = arguments.config
    if not (given or arguments.data_dir):
        raise UserError(
            "--data-dir is missing; name the dataset's directory, or a YAML by --config"
        )
    base = load_config(["--config", given]) if given else RunConfig()
    split = arguments.split or ("" if given else "train")
    is_train = (
        arguments.mode == "train" if arguments.mode else split.startswith("train") or not split
    )
    values: JsonObject = {} if given else {"global_batch_size": _BATCH}
    for name, key in _KEYS.items():
        value = getattr(arguments, name)
        values |= {} if value is None else {key: value}
    values |= {"train_split": split, "eval_split": split} if split else {}
    values["return_id"] = True
    source = values.get("source", base.data.source)
    values |= _find_dataset(arguments, source) if arguments.data_dir else {}
    if arguments.dataset:
        values["name"] = arguments.dataset
    plan = LoaderPlan(
        change(base, data=values).data,
        "train" if is_train else "eval",
        base.train.seed if arguments.seed is None else arguments.seed,
        base.model.known_sizes,
    )
    if arguments.num_classes is not None:
        plan.known["num_classes"] = arguments.num_classes
    more: JsonObject = {}
    if arguments.shuffle_buffer:
        more = {"order": "sharded", "shuffle_gib": _get_buffer_gib(arguments.shuffle_buffer, plan)}
    if is_train and "train_pp" not in values and not given:
        more["train_pp"] = _choose_train_pp(plan)
    return replace(plan, data=change(base, data=values | more).data) if more else plan


def _choose_train_pp(plan: LoaderPlan) -> str:
    """Return the default string, which fits the first example."""
    source = create_source(plan.data, plan.known)
    decoder = source.find_decoder(plan.role) if isinstance(source, ImageFiles) else ""
    return f"{_CROPS[decoder]}|flip_lr|value_range(-1, 1)"


def _find_dataset(arguments: argparse.Namespace, source: str) -> JsonObject:
    """Return data.root and, for the only dataset of it, data.name."""
    root = arguments.data_dir
    if arguments.config or arguments.dataset or not _is_tfds(source) or is_remote(root):
        return {"root": root}
    path = to_path(root)
    if (path / "dataset_info.json").exists() or not path.is_dir():
        return {"root": root}
    if any(path.glob("*/dataset_info.json")):
        # The dataset's own directory, which holds its versions.
        return {"root": str(path.parent), "name": path.name}
    names = sorted(p.name for p in path.iterdir() if p.is_dir() and p.name != "downloads")
    if len(names) != 1:
        held = ", ".join(names[:_SHOWN]) or "nothing"
        held += f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise UserError(f"--data-dir ({root}) holds {held}; choose one dataset with --dataset")
    return {"root": root, "name": names[0]}


def _is_tfds(source: str) -> bool:
    return SOURCES.get(source) is SOURCES.get("tfds")


def _get_buffer_gib(examples: int, plan: LoaderPlan) -> float:
    """Return the GiB of --shuffle-buffer examples."""
    data = plan.data
    if not _is_tfds(data.source):
        raise UserError("--shuffle-buffer is for --source tfds; files of a folder are not buffered")
    selection = load_tfds_catalog(data.root, data.name).select(
        plan.split, data.label_key, "--split"
    )
    # The loader holds two windows; half an example more, so that rounding does not lose one.
    return (examples + 0.5) * selection.mean_record_bytes / (1 << 30)
