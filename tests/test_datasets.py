"""What a loader delivers: order, shards, batches, evaluation, sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import ImageBatch, Loader, Position, describe_dataset
from tests.support.input_data import (
    RECORDS,
    create_section,
    get_image,
    open_loader,
    write_records,
)

ROOT = Path(__file__).resolve().parents[1]
TRAIN = RECORDS["train"]
SHARD_COUNTS = (1, 2, 8)
START = Position()
RANDOM_PP = "decode|resize(8)|random_crop(6)|flip_lr|value_range(-1, 1)"


@pytest.fixture(scope="module")
def array_root(tmp_path_factory, records_root):
    directory = tmp_path_factory.mktemp("array")
    write_records(directory, "array_record")
    return directory


def open_shards(config, role, count, seed=0) -> list[Loader]:
    return [open_loader(config, role, seed=seed, shard=(index, count)) for index in range(count)]


def draw(config, count, batches, position=START, seed=0) -> list[ImageBatch]:
    """The first global batches: every shard's parts in order."""
    iterators = [loader.batches(position) for loader in open_shards(config, "train", count, seed)]
    return [join([next(iterator) for iterator in iterators]) for _ in range(batches)]


def join(parts: list[ImageBatch]) -> ImageBatch:
    names = ("images", "labels", "mask", "indices")
    return ImageBatch(**{n: torch.cat([getattr(part, n) for part in parts]) for n in names})


def get_indices(batches: list[ImageBatch]) -> np.ndarray:
    return torch.cat([batch.indices for batch in batches]).numpy()


@pytest.mark.parametrize("count", [2, 8])
def test_exact_order_gives_the_same_pixels_on_any_number_of_shards(records_root, count):
    config = create_section(records_root, order="exact", train_pp=RANDOM_PP)
    batches = 2 * (TRAIN // 16) + 3
    for one, many in zip(draw(config, 1, batches), draw(config, count, batches), strict=True):
        assert torch.equal(one.indices, many.indices)
        assert torch.equal(one.labels, many.labels)
        assert torch.equal(one.images, many.images)


@pytest.mark.parametrize("order", ["exact", "sharded"])
@pytest.mark.parametrize("count", SHARD_COUNTS)
def test_an_epoch_shows_no_example_twice_and_epochs_differ(records_root, order, count):
    config = create_section(records_root, order=order, shuffle_gib=1e-6)
    per_epoch = TRAIN // 16
    indices = get_indices(draw(config, count, 2 * per_epoch)).reshape(2, -1)
    for epoch in indices:
        assert len(np.unique(epoch)) == per_epoch * 16
    assert not np.array_equal(indices[0], indices[1])
    assert not np.array_equal(indices[0], np.sort(indices[0]))


def test_windows_of_the_sharded_order_are_shuffled_independently(records_root):
    from big_vision.input.order import ShardedOrder

    loader = open_loader(create_section(records_root, order="sharded"), "train")
    pipeline, order = loader._reader._pipeline, loader._reader._sharded

    def read(window: int, epoch: int) -> np.ndarray:
        changed = ShardedOrder(order.unit_starts, order.unit_counts, window, order.spec, order.seed)
        elements = pipeline.sharded_indices(changed, epoch, 0).take(192)
        return np.array([int(element["index"]) for element in elements])

    window = 48
    for epoch in (0, 1):
        # Windows of one example are not shuffled: the sequence that the others are cut from.
        plain, shuffled = (read(size, epoch).reshape(-1, window) for size in (1, window))
        places = []
        for before, after in zip(plain, shuffled, strict=True):
            assert sorted(before) == sorted(after)
            places.append(tuple(np.argsort(before)[np.searchsorted(np.sort(before), after)]))
        assert len(set(places)) == len(places)
        assert tuple(range(window)) not in places


def test_exact_training_sees_every_example_over_the_epochs(records_root):
    config = create_section(records_root, order="exact", global_batch_size=64)
    assert len(np.unique(get_indices(draw(config, 1, 30)))) == TRAIN


def test_batches_hold_the_examples_that_their_indices_name(records_root):
    config = create_section(records_root, return_id=True)
    batch = next(open_loader(config, "train").batches())
    assert batch.images.dtype == torch.uint8 and batch.labels.dtype == torch.int32
    assert batch.mask.dtype == torch.bool and batch.mask.all()
    assert batch.indices.dtype == torch.int64
    for image, label, index in zip(batch.images, batch.labels, batch.indices, strict=True):
        assert np.array_equal(image.numpy(), get_image(int(index)))
        assert int(label) == int(index) % 7


@pytest.mark.parametrize("seed", [0, 2**32 - 2])
def test_another_seed_gives_another_order(records_root, seed):
    first = draw(create_section(records_root), 1, 1, seed=seed)[0]
    again = draw(create_section(records_root), 1, 1, seed=seed)[0]
    other = draw(create_section(records_root), 1, 1, seed=seed + 1)[0]
    assert torch.equal(first.indices, again.indices)
    assert not torch.equal(first.indices, other.indices)


@pytest.mark.parametrize("order", ["exact", "sharded"])
@pytest.mark.parametrize("count", SHARD_COUNTS)
def test_evaluation_sees_every_example_once_and_shards_stay_in_step(records_root, order, count):
    config = create_section(records_root, order=order, eval_batch_size=16)
    loaders = open_shards(config, "eval", count)
    batches = [list(loader.batches()) for loader in loaders]
    assert {len(b) for b in batches} == {3} == {loader.batches_per_epoch for loader in loaders}
    seen = [b.indices[b.mask] for shard in batches for b in shard]
    assert sorted(torch.cat(seen).tolist()) == list(range(RECORDS["validation"]))
    for batch in (b for shard in batches for b in shard):
        assert batch.images.shape == (16 // count, 6, 6, 3)
        assert (batch.indices[~batch.mask] == -1).all() and not batch.images[~batch.mask].any()


def test_evaluation_can_be_repeated(records_root):
    loader = open_loader(create_section(records_root), "eval")
    first, second = (torch.cat([b.images for b in loader.batches()]) for _ in range(2))
    assert torch.equal(first, second)


def test_exact_evaluation_batches_are_the_same_on_any_number_of_shards(records_root):
    config = create_section(records_root, eval_batch_size=16, order="exact")
    for number, one in enumerate(open_loader(config, "eval").batches()):
        parts = [list(loader.batches())[number] for loader in open_shards(config, "eval", 2)]
        assert torch.equal(one.indices, join(parts).indices)
        assert torch.equal(one.mask, join(parts).mask)


@pytest.mark.parametrize("split", ["train[:50%]", "train[100:]", "train[-10:]+validation[5:9]"])
def test_slices_give_the_same_examples_as_tfds(records_root, split):
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(records_root / "records" / "1.0.0")
    # One file after another: by default TFDS mixes files.
    in_order = tfds.ReadConfig(interleave_cycle_length=1)
    examples = builder.as_dataset(split=split, read_config=in_order)
    expected = [int(example["id"]) for example in examples]
    loader = open_loader(create_section(records_root, eval_split=split), "eval")
    shown = torch.cat([b.images[b.mask] for b in loader.batches()])[:, 0, 0, 0]
    assert shown.tolist() == expected
    assert loader.num_examples == len(expected)


@pytest.mark.parametrize("order", ["exact", "sharded"])
def test_ids_equal_those_of_tfds(records_root, order):
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(records_root / "records" / "1.0.0")
    read_config = tfds.ReadConfig(add_tfds_id=True)
    examples = builder.as_dataset(split="train[7:]", read_config=read_config)
    expected = {int(e["id"]): e["tfds_id"].numpy().decode() for e in examples}
    config = create_section(records_root, train_split="train[7:]", return_id=True, order=order)
    batch = next(open_loader(config, "train").batches())
    assert list(batch.ids) == [expected[int(image[0, 0, 0])] for image in batch.images]


@pytest.mark.parametrize("order", ["exact", "sharded"])
def test_array_record_files_give_the_batches_of_tfrecord_files(records_root, array_root, order):
    one = draw(create_section(records_root, order=order), 2, 20)
    other = draw(create_section(array_root, order=order), 2, 20)
    assert np.array_equal(get_indices(one), get_indices(other))
    assert all(torch.equal(a.images, b.images) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("order", ["exact", "sharded"])
def test_single_examples_look_as_in_the_batches(records_root, order):
    loader = open_loader(create_section(records_root, train_pp=RANDOM_PP, order=order), "train")
    batch = next(loader.batches(Position(2)))
    shown = loader.load_examples(batch.indices.tolist(), epoch=2)
    assert torch.equal(shown.images, batch.images) and torch.equal(shown.labels, batch.labels)
    other = loader.load_examples(batch.indices.tolist(), epoch=3)
    assert not torch.equal(other.images, batch.images)


def test_the_log_reports_the_size_of_the_shuffle_buffer(records_root, caplog):
    with caplog.at_level("INFO", logger="train"):
        open_loader(create_section(records_root, order="sharded"), "train")
    assert "two shuffle windows of" in caplog.text and "GiB" in caplog.text


def test_describe_dataset_needs_no_tensorflow(records_root):
    program = (
        "import sys; from pathlib import Path; from tests.support.input_data import create_section;"
        "from datasets import describe_dataset;"
        f"root = Path({str(records_root)!r});"
        "facts = describe_dataset(create_section(root, train_split='train[:50%]'));"
        "classes = facts.examples['train'].num_classes;"
        "print(facts.num_examples, classes, 'tensorflow' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "{'train': 102, 'eval': 45} 7 False"


def test_a_changed_batch_size_resumes_after_the_same_examples(records_root):
    before = get_indices(draw(create_section(records_root, order="exact"), 1, 5))
    config = create_section(records_root, order="exact", global_batch_size=12)
    after = get_indices(draw(config, 2, (TRAIN - 80) // 12, Position(0, 80)))
    assert len(np.unique(np.concatenate([before, after]))) == len(before) + len(after)


def test_synthetic_data_needs_no_tensorflow_and_keeps_the_contract(tmp_path):
    program = (
        "import sys, torch; from pathlib import Path;"
        "from tests.support.input_data import create_section, open_loader;"
        "c = create_section(Path('x'), source='synthetic', name='image_size=8,num_examples=50');"
        "parts = [next(open_loader(c, 'train', shard=(i, 2)).batches()) for i in (0, 1)];"
        "one = next(open_loader(c, 'train').batches());"
        "same = torch.equal(torch.cat([p.images for p in parts]), one.images);"
        "counts = [int(b.mask.sum()) for b in open_loader(c, 'eval').batches()];"
        "print(same, tuple(one.images.shape), counts, 'tensorflow' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "True (16, 8, 8, 3) [16, 16, 16, 2] False"


def test_a_folder_of_class_folders_is_a_dataset(tmp_path):
    import tensorflow as tf

    for split, count in (("train", 5), ("val", 2)):
        for number, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                data = tf.io.encode_png(get_image(100 * number + i)).numpy()
                (tmp_path / split / name / f"{i}.png").write_bytes(data)
    config = create_section(
        tmp_path, source="folder", name="", eval_split="val", global_batch_size=10, return_id=True
    )
    facts = describe_dataset(config)
    assert facts.num_examples == {"train": 10, "eval": 4}
    assert facts.examples["train"].class_names == ("cat", "dog")
    batch = next(open_loader(config, "train").batches())
    for image, label, name in zip(batch.images, batch.labels, batch.ids, strict=True):
        assert int(image[0, 0, 0]) // 100 == int(label)
        assert name == f"train/{('cat', 'dog')[int(label)]}/{int(image[0, 0, 0]) % 100}.png"
