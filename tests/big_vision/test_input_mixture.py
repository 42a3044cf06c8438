"""Mixtures: shares by weights, each member's own string, one order on any number of shards."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chi2

import main
from datasets import Position, create_source, describe_dataset, load_labels
from tests.support.input_data import (
    RECORD_CLASSES,
    RECORDS,
    create_section,
    open_loader,
    write_records,
)
from tests.support.tiny_parts import create_argv
from utils.errors import UserError

RANDOM_PP = "decode|resize(8)|random_crop(6)|flip_lr|value_range(-1, 1)"
PLAIN_PP = "decode|resize(6)|value_range(-1, 1)"
SYNTHETIC = "image_size=6,channels=3,num_classes=7,num_examples=50"
SIZES = (RECORDS["train"], RECORDS["validation"], 50)
WEIGHTS = (3.0, 2.0, 1.0)


def create_mix(root, members=None, **data):
    """Records drawn at random crops, those of another split as they are, and a pattern."""
    members = members or [
        {"weight": WEIGHTS[0]},
        {"split": "validation", "weight": WEIGHTS[1], "pp": PLAIN_PP},
        {"source": "synthetic", "name": SYNTHETIC, "weight": WEIGHTS[2]},
    ]
    return create_section(root, **{"train_pp": RANDOM_PP, "mix": members, **data})


def read_batches(data, count, batches, position):
    """The first global batches: every shard's parts in order."""
    loaders = [open_loader(data, shard=(index, count)) for index in range(count)]
    streams = [itertools.islice(loader.batches(position), batches) for loader in loaders]
    for parts in zip(*streams, strict=True):
        names = ("images", "labels", "indices")
        yield tuple(torch.cat([getattr(part, name) for part in parts]) for name in names)


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_batches_are_the_same_on_any_number_of_shards_and_after_a_resume(records_root, count):
    data = create_mix(records_root)
    per_epoch = sum(SIZES) // 16
    whole = list(read_batches(data, 1, 2 * per_epoch, Position()))
    for ours, wanted in zip(read_batches(data, count, 22, Position()), whole, strict=False):
        assert all(map(torch.equal, ours, wanted))
    for epoch, batch in ((0, 1), (0, per_epoch - 1), (1, 7)):
        resumed = read_batches(data, count, 3, Position(epoch, batch * 16, 1))
        for ours, wanted in zip(resumed, whole[epoch * per_epoch + batch :], strict=False):
            assert all(map(torch.equal, ours, wanted))


def test_examples_are_those_of_their_member_under_its_own_string(records_root):
    data, starts = create_mix(records_root), np.cumsum([0, *SIZES])
    plain = [
        open_loader(create_section(records_root, eval_split=split), "eval")
        for split in ("train", "validation")
    ]
    pattern = open_loader(create_section("", source="synthetic", name=SYNTHETIC))
    loader = open_loader(data.model_copy(update={"return_id": True}))
    seen = []
    for batch in itertools.islice(loader.batches(), 18):
        members = np.searchsorted(starts, batch.indices.numpy(), side="right") - 1
        for number, member in enumerate(members):
            own = int(batch.indices[number]) - int(starts[member])
            assert int(batch.labels[number]) == own % RECORD_CLASSES
            if member == 0:
                assert batch.ids[number].startswith("records-train")
                seen.append(torch.equal(batch.images[number], read_one(plain[0], own)))
            else:
                wanted = read_one(plain[1] if member == 1 else pattern, own)
                assert torch.equal(batch.images[number], wanted)
    # Random crops and flips of the first member.
    assert len(seen) > 100 and sum(seen) < len(seen) / 2


def read_one(loader, index: int) -> torch.Tensor:
    return loader.load_examples([index]).images[0]


def test_members_come_with_the_frequency_of_their_weights(records_root):
    """A chi-square of counts that vary less than those of free draws, so of one tail."""
    drawn = torch.cat(
        [b[2] for b in read_batches(create_mix(records_root), 1, 180, Position())]
    ).numpy()
    starts = np.cumsum([0, *SIZES])
    counts = np.histogram(drawn, starts)[0]
    assert fit(counts, np.array(WEIGHTS)) > 1e-3
    assert fit(counts, np.array(SIZES)) < 1e-9
    for first, size in zip(starts[:-1], SIZES, strict=True):
        within = np.bincount(drawn[(drawn >= first) & (drawn < first + size)] - first)
        assert len(within) <= size and fit(within, np.ones(len(within))) > 1e-3


def fit(counts: np.ndarray, weights: np.ndarray) -> float:
    expected = weights * (counts.sum() / weights.sum())
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1))


def test_weights_of_classes_hold_within_each_member(records_root):
    members = [{"weight": 1.0}, {"split": "validation", "weight": 1.0}]
    data = create_mix(records_root, members, sample_weights="auto")
    drawn = list(read_batches(data, 1, 90, Position()))
    labels, indices = (torch.cat([batch[part] for batch in drawn]).numpy() for part in (1, 2))
    is_first = indices < SIZES[0]
    assert fit(np.bincount(is_first), np.ones(2)) > 1e-3
    for own in (is_first, ~is_first):
        assert fit(np.bincount(labels[own]), np.ones(RECORD_CLASSES)) > 1e-3
    held = np.bincount(load_labels(data, "a.key"), minlength=RECORD_CLASSES)
    assert held.sum() == SIZES[0] + SIZES[1]


def test_each_key_of_a_member_decides_its_examples(records_root, tmp_path):
    """`name`, `weight`, `pp`, `source`, `root`, `split`, `image_key`, `label_key` of data.mix."""
    write_records(tmp_path)

    def read(**member) -> list:
        data = create_mix(records_root, [{}, {"split": "validation", **member}])
        (batch,) = read_batches(data, 1, 1, Position())
        return [tensor.tolist() for tensor in batch]

    base = read()
    assert read(weight=9.0) != base
    assert read(pp="decode|resize(3)|resize(6)|value_range(-1, 1)")[0] != base[0]
    assert read(split="train[:9]") != base
    assert read(source="synthetic", name=SYNTHETIC) != base
    assert read(root=str(tmp_path)) == base
    # An `id` has no number of classes, so it cannot be theirs.
    wrongs = ({"root": "/nowhere"}, {"name": "other"}, {"image_key": "img"}, {"label_key": "id"})
    for wrong in wrongs:
        with pytest.raises(UserError, match=r"^data\.mix\[1\] \("):
            read(**wrong)


def test_a_mixture_is_evaluated_on_the_dataset_of_data_name(records_root):
    data = create_mix(records_root)
    facts = describe_dataset(data)
    assert facts.num_examples == {"train": sum(SIZES), "eval": RECORDS["validation"]}
    seen = [batch.indices[batch.mask] for batch in open_loader(data, "eval").batches()]
    assert torch.equal(torch.cat(seen), torch.arange(RECORDS["validation"]))
    assert create_source(data).title == "records + records + synthetic"


def test_a_broken_record_is_named_with_its_file(tmp_path):
    write_records(tmp_path, broken=(3,))
    data = create_mix(tmp_path, [{"split": "validation"}, {"split": "train[3:4]", "weight": 5.0}])
    with pytest.raises(UserError, match=r"records-train.*record 3"):
        next(open_loader(data).batches())


@pytest.mark.parametrize(
    ("other", "keys", "words"),
    [
        ({"pp": "decode|resize(7)|value_range(-1, 1)"}, {}, "has image_shape (7, 7, 3)"),
        ({"pp": "decode|resize(6)|value_range(0, 1)"}, {}, "has normalisation"),
        ({"pp": "decode|resise(6)|value_range(0, 1)"}, {}, "resize"),
        ({"source": "synthetic", "name": "num_classes=3"}, {}, "has other classes than"),
        ({"source": "synthetic_rows", "name": "friedman1", "split": "all"}, {}, "rows of numbers"),
        ({"split": "trian"}, {}, "did you mean 'train'"),
        ({"source": "tfsd"}, {}, "unknown data.source 'tfsd'"),
        ({}, {"order": "sharded"}, "data.mix needs data.order=exact, got sharded"),
    ],
)
def test_members_that_do_not_fit_are_refused_by_name(records_root, other, keys, words):
    data = create_mix(records_root, [{}, other], **keys)
    for use in (describe_dataset, open_loader):
        with pytest.raises(UserError, match=r"^data\.mix") as caught:
            use(data)
        assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--data.mix=[{weight: 0}]",), "data.mix.0.weight (0): it must be greater than 0"),
        (("--data.mix=[{weight: .nan}]",), "data.mix.0.weight"),
        (("--data.mix=[{weigth: 1}]",), "did you mean 'weight'"),
    ],
)
def test_bad_values_of_a_mixture_are_refused_in_one_line(tmp_path, capsys, flags, words):
    assert main.main(create_argv(tmp_path / "runs", *flags)) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error: ")]
    assert words in line
    assert not (tmp_path / "runs").exists()


def test_text_is_mixed_alike_and_rows_of_numbers_are_refused(tmp_path, capsys):
    name = "copy,symbols=8,num_examples=60,num_held_out=8"
    members = [{"name": name, "weight": 2.0}, {"name": name.replace("60", "30")}]
    keys = {"source": "sequences", "name": name, "sequence_length": 16, "train_split": "train"}
    data = create_section("", **keys, mix=members, global_batch_size=8)
    loaders = [open_loader(data, shard=(index, 2)) for index in range(2)]
    parts = [next(loader.batches(Position(1, 16))) for loader in loaders]
    whole = next(open_loader(data).batches(Position(1, 16)))
    assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
    drawn = [batch.indices for batch in itertools.islice(open_loader(data).batches(), 110)]
    counts = np.histogram(torch.cat(drawn).numpy(), [0, 60, 90])[0]
    assert fit(counts, np.array([2.0, 1.0])) > 1e-3
    with pytest.raises(UserError, match=r"^data\.mix.* pp has no effect on "):
        describe_dataset(
            data.model_copy(
                update={"mix": (*data.mix, data.mix[0].model_copy(update={"pp": PLAIN_PP}))}
            )
        )
    run = ("--train.task=regress", "--data.mix=[{name: a}]", f"--run.output_dir={tmp_path / 'r'}")
    assert main.main([*run, "--runtime.device=cpu"]) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error: ")]
    assert line.startswith("error: data.mix (") and "with train.task=regress; remove it" in line
