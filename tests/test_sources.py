"""A source is one class and one row: what a test registers is read by loaders and by runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import main
from big_vision.input.images.labelled import ImageSource, create_blank_images, create_image_batch
from big_vision.input.order import get_evaluation_blocks, get_exact_epoch
from big_vision.input.selection import ImageSelection, Selection
from datasets import (
    SOURCES,
    Batch,
    ImageBatch,
    Reader,
    Reading,
    Role,
    Source,
    VectorBatch,
    create_loader,
    create_source,
    describe_dataset,
)
from store.record.history import read_metrics
from tests.support.tiny_parts import create_argv
from utils.config.data import DataSection
from utils.errors import EXIT_USER_ERROR, UserError

EXAMPLES = 44


class ListReader(Reader):
    """Reads by index alone, in the house's order: what a small source has to write."""

    def __init__(self, num_examples: int, facts: object, reading: Reading) -> None:
        self.num_examples, self.facts = num_examples, facts
        self._shard, self._seed = reading.shard, reading.seed

    def read_training(self, epoch: int, start: int) -> Iterator[Batch]:
        while True:
            order = get_exact_epoch(self.num_examples, self._shard, self._seed, epoch, start)
            yield from self._cut(order)
            epoch, start = epoch + 1, 0

    def read_evaluation(self) -> Iterator[Batch]:
        yield from self._cut(get_evaluation_blocks(self.num_examples, self._shard))

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        return tuple(f"row {index}" for index in indices)

    def describe(self, index: int) -> str:
        return f"row {index}"

    def _cut(self, order: np.ndarray) -> Iterator[Batch]:
        size = self._shard.rank_batch_size
        for begin in range(0, len(order), size):
            yield self.read_examples(order[begin : begin + size], 0)


class LineReader(ListReader):
    """Points of the line y = 2 x; example 5 cannot be read."""

    def read_examples(self, indices: np.ndarray, epoch: int) -> VectorBatch:
        rows = torch.from_numpy(indices)
        inputs = rows.float().view(-1, 1)
        return VectorBatch(mask=rows != 5, indices=rows, inputs=inputs, targets=2 * inputs)

    def create_blank(self, size: int) -> VectorBatch:
        zeros, index = torch.zeros((size, 1)), torch.full((size,), -1)
        return VectorBatch(mask=index >= 0, indices=index, inputs=zeros, targets=zeros)


class LineSource(Source):
    """No images, no labels, no files."""

    def select(self, role: Role) -> Selection:
        return Selection(num_examples=EXAMPLES)

    def describe(self, selection: Selection, role: Role) -> dict[str, int]:
        return {"in_features": 1, "out_features": 1}

    def open(self, selection: Selection, reading: Reading) -> LineReader:
        return LineReader(selection.num_examples, self.describe(selection, reading.role), reading)


class DotReader(ListReader):
    """Images whose brightness is their class."""

    def __init__(self, source: DotSource, selection: ImageSelection, reading: Reading) -> None:
        facts = source.describe(selection, reading.role)
        super().__init__(selection.num_examples, facts, reading)
        self._labels = source.create_label_rule(facts, self.describe)

    def read_examples(self, indices: np.ndarray, epoch: int) -> ImageBatch:
        labels = torch.from_numpy(indices % 10)
        images = (25 * labels).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, *self.facts.image_shape)
        raw = {"image": images.contiguous(), "label": labels.numpy(), "index": indices}
        return create_image_batch(raw, self._labels)

    def create_blank(self, size: int) -> ImageBatch:
        return create_blank_images(size, self.facts.image_shape)


class DotSource(ImageSource):
    """Labelled images that a test makes up."""

    @property
    def title(self) -> str:
        return "dots of a test"

    def select(self, role: Role) -> ImageSelection:
        return ImageSelection(num_examples=96, num_classes=10)

    def find_image_shape(self, selection: ImageSelection, role: Role) -> tuple[int, int, int]:
        return 8, 8, 1

    def open(self, selection: ImageSelection, reading: Reading) -> DotReader:
        return DotReader(self, selection, reading)


@pytest.fixture
def rows():
    """Two rows more in the table, for the time of a test."""
    added = {"line": LineSource, "dots": DotSource}
    for name, kind in added.items():
        SOURCES.register(name)(kind)
    yield
    for name in added:
        del SOURCES._factories[name]


def create_line(**values: object) -> DataSection:
    return DataSection(source="line", global_batch_size=8, skip_corrupt=1, return_id=True, **values)


@pytest.mark.parametrize("count", [1, 2])
def test_a_loader_of_rows_without_images_pads_masks_and_skips(rows, count):
    loaders = [create_loader(create_line(), "eval", seed=0, shard=(i, count)) for i in range(count)]
    batches = [batch for loader in loaders for batch in loader.batches()]
    assert all(type(batch) is VectorBatch and len(batch) == 8 // count for batch in batches)
    seen = torch.cat([batch.indices[batch.mask] for batch in batches]).tolist()
    assert sorted(seen) == [index for index in range(EXAMPLES) if index != 5]
    for batch in batches:
        assert torch.equal(batch.targets, 2 * batch.inputs)
        assert (batch.indices[~batch.mask] == -1).all()
        assert batch.ids == tuple(f"row {i}" if i >= 0 else "" for i in batch.indices.tolist())
    assert sum(loader.counters["skipped_corrupt"] for loader in loaders) == 1


def test_a_training_loader_of_rows_replaces_bad_ones_and_keeps_the_order(rows):
    loader = create_loader(create_line(), "train", seed=3)
    assert loader.batches_per_epoch == EXAMPLES // 8
    iterator = loader.batches()
    batches = [next(iterator) for _ in range(loader.batches_per_epoch)]
    seen = torch.cat([batch.indices for batch in batches]).tolist()
    assert all(batch.mask.all() for batch in batches)
    assert 5 not in seen and len(set(seen)) >= len(seen) - 1
    assert loader.load_examples([7, 9]).inputs.flatten().tolist() == [7.0, 9.0]


def test_synthetic_data_uses_known_sizes_missing_in_its_name():
    data = DataSection(source="synthetic", name="channels=1", eval_pp="value_range(-1, 1)")
    known = {"image_size": 6, "num_classes": 3, "vocab_size": 9}
    loader = create_loader(data, "eval", seed=0, known=known)
    assert (loader.facts.image_shape, loader.facts.num_classes) == ((6, 6, 1), 3)
    named = data.model_copy(update={"name": "channels=1,image_size=4"})
    assert create_loader(named, "eval", seed=0, known=known).facts.image_shape == (4, 4, 1)


def test_one_unreadable_row_too_many_is_named(rows):
    data = create_line().model_copy(update={"skip_corrupt": 0})
    with pytest.raises(UserError, match="row 5 cannot be read"):
        list(create_loader(data, "eval", seed=0).batches())


def test_metadata_of_a_source_without_files_is_reported(rows):
    facts = describe_dataset(create_line())
    assert facts.num_examples == {"train": EXAMPLES, "eval": EXAMPLES}
    assert facts.examples["eval"] == {"in_features": 1, "out_features": 1}
    assert (facts.version, facts.files) == ("", "")
    with pytest.raises(UserError, match=r"data.order \(sharded\) needs files; line data has"):
        create_source(create_line(order="sharded")).choose_order()


def test_a_run_trains_on_a_source_that_a_test_registered(rows, tmp_path, capsys):
    argv = create_argv(
        tmp_path,
        "--data.source=dots",
        "--data.name=",
        "--train.steps=12",
        "--optim.lr=3e-3",
        "--run.run_id=a",
    )
    assert main.main([*argv, "--run.check_only=true"]) == 0
    assert "data: dots of a test, 96 examples" in capsys.readouterr().out
    assert main.main(argv) == 0
    lines = read_metrics(Path(tmp_path) / "tiny" / "a")
    losses = [line["loss"] for line in lines if line["kind"] == "eval"]
    assert losses[-1] < losses[0]


def test_a_source_without_images_is_refused_for_classification(rows, tmp_path, capsys):
    assert main.main(create_argv(tmp_path, "--data.source=line")) == EXIT_USER_ERROR
    error = capsys.readouterr().err.splitlines()[-1]
    assert "data.source (line) has no labelled images" in error


@pytest.mark.parametrize(
    ("name", "near"), [("foldr", "did you mean 'folder'"), ("parquet", "known: arrays, folder, ")]
)
def test_an_unknown_source_is_refused_with_similar_names(tmp_path, capsys, name, near):
    assert main.main(create_argv(tmp_path, f"--data.source={name}")) == EXIT_USER_ERROR
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"unknown data.source '{name}'" in error and near in error
    assert list(tmp_path.iterdir()) == []
