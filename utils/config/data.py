"""`DataSection`: what a run reads, and how its batches are made."""

from __future__ import annotations

from typing import Literal

from utils.config.metadata import CLASS_TASKS, IMAGE_TASKS, ClassWeights, ConfigSection, key


class EvalSection(ConfigSection):
    """A further evaluation set of images; defaults are those of `data` or of a known set."""

    name: str = key(
        ...,
        "name in metrics; imagenet_v2, imagenet_real, imagenet_a, imagenet_r, imagenet_sketch and "
        "imagenet_c are known and need no more",
        pattern=r"^[\w.-]+$",
    )
    dataset: str = key("", "as data.name")
    source: str = key("", "as data.source")
    root: str = key("", "as data.root", is_path=True)
    split: str = key("", "as data.eval_split")
    bank: str = key(
        "",
        "distil: labelled split of probes; empty: data.train_split",
        needs=("train.task=distil",),
    )
    pp: str = key("", "as data.eval_pp; each further image size costs graphs")
    label_key: str = key("", "as data.label_key; with a list of labels, each counts as correct")
    classes: Literal["auto", "named", "present", "all"] = key(
        "auto",
        "classes to choose from: named by the set, present in it, or all of the model's; auto: as "
        "usual for a known set, else named",
    )
    class_map: str = key(
        "",
        "JSON list: the model's class for each class of the set, or -1 to leave its examples out; "
        "empty: by the classes' names",
        is_path=True,
    )
    every: int = key(1, "evaluate at every Nth evaluation of the run, and at the last one", ge=1)


class MixSection(ConfigSection):
    """A dataset of a mixture that a run trains on; defaults are those of `data`."""

    name: str = key("", "as data.name")
    weight: float = key(
        1.0, "share of the draws, relative to the weights of the other datasets", gt=0
    )
    pp: str = key("", "as data.train_pp, with the same value range")
    source: str = key("", "as data.source")
    root: str = key("", "as data.root", is_path=True)
    split: str = key("", "as data.train_split")
    image_key: str = key("", "as data.image_key")
    label_key: str = key("", "as data.label_key")


class DataSection(ConfigSection):
    """The data of a run."""

    source: str = key(
        "tfds",
        "tfds: a TFDS dataset; folder: class folders; webdataset: tars; hf: Arrow of datasets; "
        "synthetic: a fixed pattern; arrays: table of numbers; tokens: tokenised text; sequences: "
        "synthetic tokens",
        stream="dataset",
    )
    name: str = key(
        "", "TFDS name, `name/config` or `name:version`", stream="dataset", aliases=("data_set",)
    )
    root: str = key(
        "",
        "directory of the dataset (tfds data_dir)",
        resume="free",
        aliases=("data_path", "tfds_data_dir"),
        is_path=True,
    )
    allow_download: bool = key(
        False,
        "let TFDS download a dataset that is not below root",
        resume="free",
        affects_results=False,
        needs=("data.source=tfds",),
    )
    train_split: str = key(
        "train",
        "split to train on, TFDS slicing allowed",
        stream="dataset",
        aliases=("tfds_train_split",),
    )
    eval_split: str = key(
        "validation", "split to evaluate on during the run", aliases=("tfds_eval_split",)
    )
    test_split: str = key("", "split to evaluate once at the end; empty: none", resume="free")
    evals: tuple[EvalSection, ...] = key(
        (),
        "further sets to evaluate on, such as [{name: imagenet_v2}]",
        resume="free",
        tasks=("classify", "distil"),
    )
    train_pp: str = key(
        "decode_jpeg_and_inception_crop(224)|flip_lr|value_range(-1, 1)",
        "preprocessing string of the training split",
        stream="train_pp",
        tasks=IMAGE_TASKS,
    )
    eval_pp: str = key(
        "decode|resize_small(256)|central_crop(224)|value_range(-1, 1)",
        "preprocessing string of evaluation",
        tasks=IMAGE_TASKS,
    )
    strong_pp: str = key(
        "",
        "preprocessing string of the strongly augmented second view (distill.views: weak_strong)",
        tasks=CLASS_TASKS,
        needs=("distill.views=weak_strong",),
    )
    image_key: str = key(
        "image",
        "image feature of the examples; preprocessing strings call it image",
        stream="image_key",
        tasks=IMAGE_TASKS,
    )
    label_key: str = key(
        "label",
        "integer label feature of the examples; in a group: group/key; empty: no labels "
        "(train.task=distil)",
        tasks=IMAGE_TASKS,
    )
    labels_file: str = key(
        "",
        "source=folder: CSV below data.root with the columns file and labels, separated by |, for "
        "examples with several classes",
        tasks=("multilabel",),
    )
    input_columns: tuple[str, ...] = key(
        (), "columns to predict from; empty: `inputs`, or all but the targets", tasks=("regress",)
    )
    target_columns: tuple[str, ...] = key(
        (), "columns to predict; empty: `targets`", tasks=("regress",)
    )
    split_seed: int = key(
        0,
        "seed of the permutation of a table's rows that splits are slices of",
        ge=0,
        lt=1 << 32,
        tasks=("regress",),
    )
    standardise: Literal["both", "inputs", "targets", "none"] = key(
        "both", "columns scaled by the training split's mean and spread", tasks=("regress",)
    )
    global_batch_size: int = key(
        1024,
        "examples of one optimizer step, over all ranks and micro-batches",
        ge=1,
        stream="global_batch_size",
        aliases=("batch_size", "batch-size"),
    )
    eval_batch_size: int | None = key(
        None, "examples of a global evaluation batch; None: global_batch_size", ge=1, resume="free"
    )
    order: Literal["auto", "exact", "sharded"] = key(
        "auto",
        "exact: one seeded permutation by random access; sharded: files dealt to input processes "
        "and a shuffle buffer; auto: exact for local roots",
        stream="order",
    )
    repeats: int = key(
        1,
        "repeated augmentation: copies of an example in a batch, each augmented anew; epochs keep "
        "their length and show fewer examples",
        ge=1,
        stream="repeats",
        tasks=IMAGE_TASKS,
    )
    sample_weights: ClassWeights = key(
        (),
        "weights of a class's examples in the draws of an epoch: auto (each class equally often), "
        "{class name: number}, or a number for each class; unnamed: 1; empty: no draws, each "
        "example once an epoch",
        stream="sample_weights",
        tasks=IMAGE_TASKS,
    )
    mix: tuple[MixSection, ...] = key(
        (),
        "datasets to train on together, drawn by weights, such as [{name: a, weight: 3}, {name: b, "
        "pp: ...}]; data.name is evaluated on; empty: train on data.name",
        stream="mix",
        tasks=(*IMAGE_TASKS, "language"),
    )
    shuffle_gib: float = key(
        1.0, "GiB to shuffle in, order=sharded", gt=0, resume="between_epochs", stream="shuffle_gib"
    )
    sequence_length: int = key(
        256, "tokens of an input; windows hold one more, a target", ge=2, tasks=("language",)
    )
    threads: int = key(
        0, "of the input pipeline; 0: all cores", ge=0, resume="free", affects_results=False
    )
    prefetch_batches: int = key(
        2, "batches prepared ahead of the loop", ge=1, resume="free", affects_results=False
    )
    return_id: bool = key(
        False, "keep the example's TFDS id in Batch.ids", resume="free", affects_results=False
    )
    skip_corrupt: int = key(
        0, "unreadable records to skip and count before the run stops", ge=0, resume="free"
    )
    random_erasing: float = key(
        0.0,
        "probability of erasing a rectangle, on the device",
        ge=0,
        le=1,
        stream="random_erasing",
        tasks=IMAGE_TASKS,
    )
    erasing_mode: Literal["const", "pixel"] = key(
        "const",
        "fills an erased rectangle with: const: the mean pixel, pixel: normal noise",
        stream="erasing_mode",
        tasks=IMAGE_TASKS,
    )

    @property
    def train_strings(self) -> dict[str, str]:
        """The preprocessing strings of training by their keys."""
        own = {f"data.mix[{n}].pp": member.pp for n, member in enumerate(self.mix) if member.pp}
        is_shared = len(own) < len(self.mix) or not self.mix
        return {"data.train_pp": self.train_pp, **own} if is_shared else own
