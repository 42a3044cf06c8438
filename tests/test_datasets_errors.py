"""Errors of users and of disks: one sentence with the way out."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from datasets import _choose_neighbours, create_source, describe_dataset
from tests.support.input_data import (
    RECORDS,
    create_section,
    open_loader,
    write_records,
)
from utils.errors import UserError

ORDERS = ("exact", "sharded")


@pytest.fixture
def copy(records_root, tmp_path):
    """A copy that a test may damage."""
    shutil.copytree(records_root / "records", tmp_path / "records")
    return tmp_path


def get_files(root: Path, split: str = "train") -> list[Path]:
    return sorted((root / "records" / "1.0.0").glob(f"records-{split}*"))


WRONG = {
    "no root": ({"root": ""}, r"data\.root is empty.*--data_path or --tfds_data_dir"),
    "missing root": ({"root": "/nowhere"}, r"data\.root \(/nowhere\) does not exist.*--data_path"),
    "no name": ({"name": ""}, r"data\.name is empty"),
    "unknown dataset": ({"name": "record"}, r"data\.name \(record\).*did you mean 'records'"),
    "malformed name": ({"name": "a b"}, r"data\.name \(a b\) is not a TFDS name"),
    "unknown version": ({"name": "records:2.0.0"}, r"holds no version 2\.0\.0; there: 1\.0\.0"),
    "unknown config": ({"name": "records/small"}, r"has no config 'small'"),
    "unknown split": ({"train_split": "trian"}, r"data\.train_split.*did you mean 'train'"),
    "broken slice": ({"train_split": "train[a:b]"}, r"data\.train_split: 'a' is not a boundary"),
    "slice too far": ({"train_split": "train[:900]"}, r"lies outside the split \(203\)"),
    "empty split": ({"train_split": "train[7:7]"}, r"selects no example"),
    "unknown label": ({"label_key": "labels"}, r"data\.label_key.*did you mean 'label'"),
    "large batch": ({"global_batch_size": 256}, r"data\.global_batch_size \(256\) exceeds the 203"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_found_from_metadata_alone(records_root, case):
    values, message = WRONG[case]
    directory = values.get("root", records_root)
    values = {key: value for key, value in values.items() if key != "root"}
    with pytest.raises(UserError, match=message) as caught:
        describe_dataset(create_section(directory, **values))
    assert "\n" not in str(caught.value)


WRONG_STRINGS = {
    "unknown op": ("decode|reize(6)", r"data\.train_pp: unknown op 'reize'.*resize"),
    "float images": ("decode|resize(6)|value_range(-1, 1)|flip_lr", r"float32.*value_range"),
    "still encoded": (
        "flip_lr|value_range(-1, 1)",
        r"data\.train_pp: flip_lr at character 1 .*still encoded; begin .* with decode",
    ),
    "a key that is not there": (
        "decode|resize(6)|copy('imag', 'x')",
        r"copy\('imag', 'x'\) at character 18 .*the example has no 'imag'",
    ),
    "constants of other channels": (
        "decode(channels=1)|resize(6)|vgg_value_range",
        r"data\.train_pp: .*constants for 3 channels, but images have 1; decode",
    ),
    "no static shape": ("decode|value_range(-1, 1)", r"shape \(None, None, 3\).*add resize"),
    "image dropped": ('decode|resize(6)|keep("label")', r"yields no 'image'.*only label"),
    "label not scalar": (
        'decode|resize(6)|onehot(7, "label")',
        r"labels of type float32 and shape",
    ),
    "only encoded": ('keep("image", "label")', r"leaves the image encoded; begin it with decode"),
}


@pytest.mark.parametrize("case", WRONG_STRINGS)
def test_a_string_that_gives_no_batch_is_refused_at_once(records_root, case):
    spec, message = WRONG_STRINGS[case]
    with pytest.raises(UserError, match=message) as caught:
        open_loader(create_section(records_root, train_pp=spec), "train")
    assert "\n" not in str(caught.value)


def test_a_batch_indivisible_by_the_shards_is_refused(records_root):
    with pytest.raises(UserError, match=r"data\.global_batch_size \(16\).*by the 3 input"):
        open_loader(create_section(records_root), "train", shard=(0, 3))
    with pytest.raises(UserError, match=r"data\.eval_batch_size \(10\).*by the 4 input"):
        open_loader(create_section(records_root, eval_batch_size=10), "eval", shard=(0, 4))


def test_a_missing_file_is_named(copy):
    lost = get_files(copy)[2]
    lost.unlink()
    with pytest.raises(UserError, match=rf"half-written, .*{lost.name} is missing"):
        describe_dataset(create_section(copy))
    assert open_loader(create_section(copy), "eval").num_examples == RECORDS["validation"]


def test_missing_metadata_is_named(copy):
    (copy / "records" / "1.0.0" / "features.json").unlink()
    with pytest.raises(UserError, match=r"half-written, features\.json is missing"):
        describe_dataset(create_section(copy))
    (copy / "records" / "1.0.0" / "dataset_info.json").unlink()
    with pytest.raises(UserError, match=r"half-written, dataset_info\.json is missing"):
        describe_dataset(create_section(copy))


def test_truncated_metadata_is_named(copy):
    path = copy / "records" / "1.0.0" / "dataset_info.json"
    path.write_text(path.read_text()[:50])
    with pytest.raises(UserError, match=r"half-written, dataset_info\.json is broken off"):
        describe_dataset(create_section(copy))


def test_a_root_of_an_unknown_kind_is_refused():
    with pytest.raises(UserError, match=r"data\.root \(nix://bucket\) cannot be opened"):
        describe_dataset(create_section("nix://bucket"))


def test_a_root_may_be_a_file_url_or_hold_the_home_directory(records_root, monkeypatch):
    monkeypatch.setenv("HOME", str(records_root.parent))
    for place in (f"file://{records_root}", f"~/{records_root.name}", f"$HOME/{records_root.name}"):
        config = create_section(place)
        assert describe_dataset(config).num_examples["train"] == RECORDS["train"]
        assert create_source(config).choose_order() == "exact"
        loader = open_loader(config, "train")
        assert len(next(iter(loader.batches())).labels) == 16
    with pytest.raises(UserError, match=r"data\.root .* is the directory of records itself"):
        describe_dataset(create_section(records_root / "records"))


def test_a_root_on_a_store_is_read_through_the_file_layer(records_root):
    memory = fsspec.filesystem("memory")
    memory.put(str(records_root / "records"), "/bucket/records", recursive=True)
    config = create_section("memory://bucket")
    assert describe_dataset(config).num_examples == {
        "train": RECORDS["train"],
        "eval": RECORDS["validation"],
    }
    assert create_source(config).choose_order() == "sharded"
    memory.rm(next(p for p in memory.ls("/bucket/records/1.0.0", detail=False) if "train" in p))
    with pytest.raises(UserError, match=r"half-written, memory://bucket/\S+-train\S+ is missing"):
        describe_dataset(config)
    with pytest.raises(
        UserError, match=r"data\.root \(memory://none\) does not exist; set it with"
    ):
        describe_dataset(create_section("memory://none"))
    with pytest.raises(UserError, match=r"is a URL, but single images .*prepare_dataset"):
        describe_dataset(create_section("memory://bucket", source="folder"))


class SilentStore(MemoryFileSystem):
    """A store that takes a request and never answers."""

    protocol = "silent"

    def ls(self, path, detail=True, **kwargs):
        threading.Event().wait()


class BrokenStore(MemoryFileSystem):
    """A store whose client has lost the network."""

    protocol = "broken"

    def ls(self, path, detail=True, **kwargs):
        raise ConnectionError("Name or service not known")


@pytest.mark.parametrize(
    ("store", "reason"),
    [(SilentStore, r"no answer within 0 s"), (BrokenStore, r"Name or service not known")],
)
def test_a_root_on_an_unreachable_store_gives_one_line_in_bounded_time(store, reason, monkeypatch):
    fsspec.register_implementation(store.protocol, store, clobber=True)
    monkeypatch.setattr("utils.storage.reading._LIMIT_S", 0.2)
    with pytest.raises(UserError, match=rf"data\.root .* cannot be read: {reason}; .*gcloud auth"):
        describe_dataset(create_section(f"{store.protocol}://bucket/data"))


def test_a_file_that_ends_within_a_record_is_named(copy):
    short = get_files(copy)[1]
    short.write_bytes(short.read_bytes()[:-3])
    with pytest.raises(UserError, match=rf"{short.name} is half-written, it ends within record"):
        open_loader(create_section(copy, order="exact"), "train")


def test_a_truncated_file_is_found_from_metadata_alone(copy):
    short = get_files(copy)[1]
    short.write_bytes(short.read_bytes()[:100])
    with pytest.raises(UserError, match=rf"{short.name} is half-written, it ends within record"):
        describe_dataset(create_section(copy))


def test_a_file_with_too_few_records_is_named(copy):
    first, second = get_files(copy)[:2]
    info = copy / "records" / "1.0.0" / "dataset_info.json"
    content = json.loads(info.read_text())
    train = next(s for s in content["splits"] if s["name"] == "train")
    train["shardLengths"][0] = str(int(train["shardLengths"][0]) + 5)
    info.write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"{first.name} is half-written, it holds \d+ records"):
        open_loader(create_section(copy, order="exact"), "train")
    assert second.exists()


def test_the_highest_version_is_taken(copy):
    shutil.copytree(copy / "records" / "1.0.0", copy / "records" / "1.10.0")
    shutil.rmtree(copy / "records" / "1.0.0" / "dataset_info.json", ignore_errors=True)
    (copy / "records" / "1.2.0").mkdir()
    assert describe_dataset(create_section(copy)).num_examples["train"] == RECORDS["train"]
    with pytest.raises(UserError, match=r"1\.2\.0 is half-written"):
        describe_dataset(create_section(copy, name="records:1.2.*"))


def damage(path: Path, record: int) -> None:
    """Flip a bit in the data of a record, as a disk does; its checksum no longer fits."""
    from big_vision.input.index_cache import scan_records

    content = bytearray(path.read_bytes())
    content[int(scan_records(str(path))[record]) + 40] ^= 1
    path.write_bytes(content)


def find_index(root: Path, path: Path, record: int) -> int:
    from big_vision.input.catalog import load_tfds_catalog

    catalog = load_tfds_catalog(str(root), "records")
    selection = catalog.select("train", "label", "data.train_split")
    file = [s.path for s in selection.segments].index(str(path))
    return int(selection.starts[file]) + record


def read_epoch(config) -> tuple[list, dict[str, int]]:
    loader = open_loader(config, "train")
    batches = list(itertools.islice(loader.batches(), loader.batches_per_epoch))
    return batches, loader.counters


@pytest.mark.parametrize("order", ORDERS)
def test_a_corrupt_record_stops_the_run_and_is_named(copy, order):
    path = get_files(copy)[1]
    damage(path, 4)
    # One example a batch: every record is drawn, none is dropped at the end.
    config = create_section(copy, order=order, global_batch_size=1)
    with pytest.raises(UserError, match=rf"{path.name}, record 4 cannot be read.*corrupted record"):
        read_epoch(config)


@pytest.mark.parametrize("order", ORDERS)
def test_an_undecodable_image_stops_the_run_and_is_named(tmp_path, order):
    write_records(tmp_path, broken=(77,))
    config = create_section(tmp_path, order=order, global_batch_size=7)
    with pytest.raises(UserError, match=r"records-train.*, record \d+ cannot be read") as caught:
        read_epoch(config)
    record = int(str(caught.value).split(", record ")[1].split()[0])
    name = Path(str(caught.value).split(",")[0]).name
    path = next(p for p in get_files(tmp_path) if p.name == name)
    assert find_index(tmp_path, path, record) == 77
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("order", ORDERS)
def test_skip_corrupt_skips_and_counts_records(copy, order):
    whole, _ = read_epoch(create_section(copy, order=order, global_batch_size=7))
    bad = []
    for file, record in ((0, 3), (2, 1)):
        path = get_files(copy)[file]
        damage(path, record)
        bad.append(find_index(copy, path, record))
    config = create_section(copy, order=order, global_batch_size=7, skip_corrupt=2)
    batches, counters = read_epoch(config)
    assert counters == {"skipped_corrupt": 2}
    for before, after in zip(whole, batches, strict=True):
        good = ~torch.isin(before.indices, torch.tensor(bad))
        assert torch.equal(before.images[good], after.images[good])
        assert not torch.isin(after.indices, torch.tensor(bad)).any()
        # A neighbour stands in the place: image, label and index belong together.
        for image, label, index in zip(after.images, after.labels, after.indices, strict=True):
            assert int(image[0, 0, 0]) == int(index) and int(label) == int(index) % 7


@given(ok=st.lists(st.booleans(), min_size=2, max_size=24).filter(any))
def test_a_skipped_record_is_replaced_by_its_pair_first(ok):
    chosen = _choose_neighbours(np.array(ok))
    for place, source in enumerate(chosen.tolist()):
        partner = min(place ^ 1, len(ok) - 1)
        assert ok[source]
        if ok[place]:
            assert source == place
        elif ok[partner]:
            assert source == partner


def test_a_batch_without_any_good_record_ends_the_run():
    with pytest.raises(UserError, match="no record of a batch can be read"):
        _choose_neighbours(np.zeros(4, bool))


def test_one_corrupt_record_too_many_stops_the_run(copy):
    paths = get_files(copy)
    damage(paths[0], 3)
    damage(paths[2], 1)
    config = create_section(copy, order="exact", global_batch_size=7, skip_corrupt=1)
    with pytest.raises(UserError, match=r", record \d cannot be read \(.*corrupted record"):
        read_epoch(config)


def test_evaluation_masks_what_it_skips(copy):
    path = get_files(copy, "validation")[0]
    damage(path, 2)
    loader = open_loader(create_section(copy, skip_corrupt=1), "eval")
    batches = list(loader.batches())
    seen = torch.cat([batch.indices[batch.mask] for batch in batches]).tolist()
    assert all((batch.indices[~batch.mask] == -1).all() for batch in batches)
    assert sorted(seen) == [i for i in range(RECORDS["validation"]) if i != 2]
    assert loader.counters == {"skipped_corrupt": 1}


def test_a_corrupt_array_record_is_named(tmp_path):
    write_records(tmp_path, "array_record", broken=(5,))
    with pytest.raises(UserError, match=r"records-train\.array_record-\d+-of-\d+, record 5 cannot"):
        read_epoch(create_section(tmp_path, global_batch_size=1))
    config = create_section(tmp_path, global_batch_size=7, skip_corrupt=1)
    assert read_epoch(config)[1] == {"skipped_corrupt": 1}


def test_a_broken_image_in_a_folder_is_named(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "0.png").write_bytes(b"nothing")
    config = create_section(
        tmp_path, source="folder", name="", eval_split="train", global_batch_size=1
    )
    with pytest.raises(UserError, match=r"train/(cat|dog)/0\.png cannot be read"):
        read_epoch(config)


def test_folders_without_images_or_with_other_classes_are_refused(tmp_path):
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "val" / "dog").mkdir(parents=True)
    config = create_section(tmp_path, source="folder", name="", eval_split="val")
    with pytest.raises(UserError, match=r"train holds no images in class folders"):
        describe_dataset(config)
    for path in ("train/cat", "val/dog"):
        for number in range(16):
            (tmp_path / path / f"{number}.png").write_bytes(b"x")
    with pytest.raises(UserError, match=r"data\.eval_split \(val\) has other classes"):
        describe_dataset(config)
    wrong = create_section(tmp_path, source="folder", name="", train_split="trian")
    with pytest.raises(UserError, match=r"no split 'trian'; did you mean 'train'"):
        describe_dataset(wrong)


def test_evaluation_on_training_examples_warns(records_root, caplog):
    describe_dataset(create_section(records_root, train_split="train", eval_split="train[80%:]"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "data.eval_split (train[80%:]) shares 41 of its 41 examples with data.train_split (train)"
    )
    caplog.clear()
    describe_dataset(
        create_section(records_root, train_split="train[:150]", eval_split="train[140:200]")
    )
    assert "shares 10 of its 60 examples" in caplog.text
    caplog.clear()
    describe_dataset(
        create_section(records_root, train_split="train[:80%]", eval_split="train[80%:]")
    )
    describe_dataset(create_section(records_root, source="synthetic", name=""))
    assert caplog.text == ""


def test_other_files_in_an_image_folder_are_reported(tmp_path, caplog):
    for name in ("cat", "dog"):
        (tmp_path / "train" / name / "deeper").mkdir(parents=True)
        for number, suffix in enumerate((".png", ".JPG", ".webp", ".tiff", ".txt")):
            (tmp_path / "train" / name / f"{number}{suffix}").write_bytes(b"x")
    values = {"source": "folder", "name": "", "eval_split": "train", "global_batch_size": 2}
    facts = describe_dataset(create_section(tmp_path, **values))
    assert facts.num_examples["train"] == 6
    assert "shares 6 of its 6 examples" in caplog.records[0].getMessage()
    assert caplog.records[1].getMessage() == (
        "split train: left out, as they are not images: 2 .tiff, 2 .txt, 2 folder"
    )


def test_synthetic_data_is_described_in_its_name(tmp_path):
    config = create_section(tmp_path, source="synthetic", name="size=9")
    with pytest.raises(UserError, match=r"data\.name.*image_size=224"):
        describe_dataset(config)


def test_a_changed_file_is_indexed_again(copy):
    from big_vision.input.index_cache import load_record_index

    path = get_files(copy)[0]
    before = load_record_index([str(path)])[0]
    with path.open("ab") as file:
        file.write(path.read_bytes())
    after = load_record_index([str(path)])[0]
    assert len(after) == 2 * len(before)
    assert np.array_equal(after[: len(before)], before)


def test_the_index_cache_is_outside_the_dataset_and_rebuilt_if_damaged(copy, tmp_path):
    from big_vision.input.index_cache import get_cache_directory, load_record_index

    files = set((copy / "records" / "1.0.0").iterdir())
    paths = [str(p) for p in get_files(copy)]
    known = set(get_cache_directory().glob("*.npz"))
    offsets = load_record_index(paths)
    assert set((copy / "records" / "1.0.0").iterdir()) == files
    (entry,) = set(get_cache_directory().glob("*.npz")) - known
    entry.write_bytes(entry.read_bytes()[:100])
    again = load_record_index(paths)
    assert all(np.array_equal(a, b) for a, b in zip(offsets, again, strict=True))
