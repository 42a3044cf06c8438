"""`DataSection`: what a run reads, and how its batches come about."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from utils.config.evals import EvalSection
from utils.config.metadata import CLASS_TASKS, IMAGE_TASKS, ConfigSection, about


class DataSection(ConfigSection):
    """What the model sees."""

    source: str = Field(
        "tfds",
        description="tfds dataset, folder of class folders, webdataset: tars, hf: Arrow of "
        "datasets, a fixed synthetic pattern; arrays: table of numbers; tokens: tokenised text; "
        "sequences: made-up tokens",
        **about(stream="dataset"),
    )
    name: str = Field(
        "",
        description="TFDS dataset name, `name`, `name/config` or `name:version`",
        **about(stream="dataset", aliases=("data_set",)),
    )
    root: str = Field(
        "",
        description="directory that holds the dataset (tfds data_dir)",
        **about(resume="free", aliases=("data_path", "tfds_data_dir"), is_place=True),
    )
    allow_download: bool = Field(
        False,
        description="have TFDS fetch a dataset that is not below root; else nothing is fetched",
        **about(resume="free", is_neutral=True),
    )
    train_split: str = Field(
        "train",
        description="split to train on, TFDS slicing allowed",
        **about(stream="dataset", aliases=("tfds_train_split",)),
    )
    eval_split: str = Field(
        "validation",
        description="split to evaluate on during the run",
        **about(aliases=("tfds_eval_split",)),
    )
    test_split: str = Field(
        "", description="split to evaluate once at the end; empty: none", **about(resume="free")
    )
    evals: tuple[EvalSection, ...] = Field(
        (),
        description="further sets to judge on at evaluations, such as [{name: imagenet_v2}]",
        **about(resume="free", tasks=("classify", "distil")),
    )
    train_pp: str = Field(
        "decode_jpeg_and_inception_crop(224)|flip_lr|value_range(-1, 1)",
        description="preprocessing string of the training split",
        **about(stream="train_pp", tasks=IMAGE_TASKS),
    )
    eval_pp: str = Field(
        "decode|resize_small(256)|central_crop(224)|value_range(-1, 1)",
        description="preprocessing string of evaluation",
        **about(tasks=IMAGE_TASKS),
    )
    strong_pp: str = Field(
        "",
        description="preprocessing string of the training split's second, strongly augmented view "
        "(distill.views: weak_strong)",
        **about(tasks=CLASS_TASKS),
    )
    image_key: str = Field(
        "image",
        description="the image among the examples' features; strings call it image",
        **about(stream="image_key", tasks=IMAGE_TASKS),
    )
    label_key: str = Field(
        "label",
        description="the integer label among the examples' features; in a group: group/key; empty: "
        "labels are not read (train.task=distil)",
        **about(tasks=IMAGE_TASKS),
    )
    labels_file: str = Field(
        "",
        description="below data.root of source=folder: a CSV with the columns file and labels, "
        "these separated by |; an example then has a set of classes",
        **about(tasks=("multilabel",)),
    )
    input_columns: tuple[str, ...] = Field(
        (),
        description="columns to predict from; none: `inputs`, or all that are no targets",
        **about(tasks=("regress",)),
    )
    target_columns: tuple[str, ...] = Field(
        (), description="columns to predict; none: `targets`", **about(tasks=("regress",))
    )
    split_seed: int = Field(
        0,
        ge=0,
        lt=1 << 32,
        description="seed of the permutation of a table's rows, which slices of splits are taken "
        "from",
        **about(tasks=("regress",)),
    )
    standardise: Literal["both", "inputs", "targets", "none"] = Field(
        "both",
        description="columns that the model divides by the training split's spread, and shifts",
        **about(tasks=("regress",)),
    )
    global_batch_size: int = Field(
        1024,
        ge=1,
        description="examples of one optimizer step, over all ranks and micro-batches",
        **about(stream="global_batch_size", aliases=("batch_size", "batch-size")),
    )
    eval_batch_size: int | None = Field(
        None,
        ge=1,
        description="examples of one global evaluation batch; none: global_batch_size",
        **about(resume="free"),
    )
    order: Literal["auto", "exact", "sharded"] = Field(
        "auto",
        description="exact: one seeded permutation by random access; sharded: files dealt to "
        "input processes and a shuffle buffer; auto: exact for local roots",
        **about(stream="order"),
    )
    repeats: int = Field(
        1,
        ge=1,
        description="repeated augmentation: how often an example stands in a batch, each time "
        "augmented anew; an epoch is as long as ever and shows fewer of them",
        **about(stream="repeats", tasks=IMAGE_TASKS),
    )
    shuffle_gib: float = Field(
        1.0,
        gt=0,
        description="memory bound of the shuffle buffer of order=sharded, in GiB",
        **about(resume="between_epochs", stream="shuffle_gib"),
    )
    sequence_length: int = Field(
        256,
        ge=2,
        description="tokens that a language model sees at once; a window holds one more",
        **about(tasks=("language",)),
    )
    threads: int = Field(
        0,
        ge=0,
        description="threads of the input pipeline; 0: as many as the process has cores",
        **about(resume="free", is_neutral=True),
    )
    prefetch_batches: int = Field(
        2,
        ge=1,
        description="batches prepared ahead of the loop",
        **about(resume="free", is_neutral=True),
    )
    return_id: bool = Field(
        False,
        description="carry the example's TFDS id along in Batch.ids",
        **about(resume="free", is_neutral=True),
    )
    skip_corrupt: int = Field(
        0,
        ge=0,
        description="unreadable records to skip and count before the run stops",
        **about(resume="free"),
    )
    random_erasing: float = Field(
        0.0,
        ge=0,
        le=1,
        description="probability of erasing a rectangle, on the device",
        **about(stream="random_erasing", tasks=IMAGE_TASKS),
    )
    erasing_mode: Literal["const", "pixel"] = Field(
        "const",
        description="what fills an erased rectangle: const: the mean pixel, pixel: normal noise",
        **about(stream="erasing_mode", tasks=IMAGE_TASKS),
    )
