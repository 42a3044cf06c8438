"""Tars of WebDataset and Arrow files of `datasets`, read through loaders and through main.py."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import main
from big_vision.input.images.arrow import select_rows
from big_vision.input.images.webdataset import expand_braces, select_tars
from datasets import Position, describe_dataset
from tests.support.input_data import create_section, open_loader, use_private_cache
from tests.support.shard_sets import (
    get_digits,
    get_photographs,
    write_arrow,
    write_digit_arrow,
    write_digit_tars,
    write_examples,
    write_tar,
)
from tests.support.tiny_parts import VIT_ARGS
from utils.errors import UserError

KINDS = ("webdataset", "hf")
PP = "decode(channels=1)|resize(8)|value_range(-1, 1)"
BATCH = 16


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> dict[str, Path]:
    """The same digits in both layouts."""
    use_private_cache(tmp_path_factory.mktemp("cache"))
    base = tmp_path_factory.mktemp("sets")
    return {"webdataset": write_digit_tars(base / "tars"), "hf": write_digit_arrow(base / "arrow")}


def create_digits(roots: dict[str, Path], kind: str, **values: object):
    fixed = {"source": kind, "name": "", "eval_split": "val", "train_pp": PP, "eval_pp": PP}
    return create_section(roots[kind], **{**fixed, "global_batch_size": BATCH, **values})


def take(loader, count: int, start: int = 0) -> list:
    return list(itertools.islice(loader.batches(Position(0, start)), count))


@pytest.mark.parametrize("kind", KINDS)
def test_every_digit_arrives_with_its_label(roots, kind):
    from sklearn.datasets import load_digits

    data = create_digits(roots, kind)
    facts = describe_dataset(data)
    assert facts.num_examples == {"train": 120, "eval": 40}
    assert facts.examples["train"].class_names == tuple("0123456789")
    batches = list(open_loader(data, "eval").batches())
    images = torch.cat([b.images[b.mask] for b in batches]).numpy()
    labels = torch.cat([b.labels[b.mask] for b in batches]).numpy()
    bunch = load_digits()
    wanted = np.round(bunch.images[200:240] * (255 / 16)).astype(np.uint8)
    assert np.array_equal(images[..., 0], wanted)
    assert np.array_equal(labels, bunch.target[200:240])


@pytest.mark.parametrize("kind", KINDS)
def test_eight_shards_deliver_the_examples_of_one_from_any_position(roots, kind):
    data = create_digits(roots, kind, train_pp=PP.replace("|value", "|flip_lr|value"))
    whole = take(open_loader(data), 9)
    shards = [take(open_loader(data, shard=(i, 8)), 9) for i in range(8)]
    later = take(open_loader(data), 2, 5 * BATCH)
    for number, batch in enumerate(whole):
        parts = [shard[number] for shard in shards]
        assert torch.equal(torch.cat([p.indices for p in parts]), batch.indices)
        assert torch.equal(torch.cat([p.images for p in parts]), batch.images)
    assert all(torch.equal(a.images, b.images) for a, b in zip(later, whole[5:], strict=False))


@pytest.mark.parametrize("kind", KINDS)
def test_the_sharded_order_delivers_every_example_once(roots, kind):
    data = create_digits(roots, kind, order="sharded", global_batch_size=8)
    loaders = [open_loader(data, shard=(i, 2)) for i in range(2)]
    seen = [b.indices for loader in loaders for b in take(loader, 15)]
    assert sorted(torch.cat(seen).tolist()) == list(range(120))


def test_datasets_saved_by_the_datasets_library_are_read():
    """Version 5.2.0 wrote it: 40 digits, shuffled, in two files; 20 more in their order."""
    from sklearn.datasets import load_digits

    root = Path(__file__).parent / "fixtures" / "hf_digits"
    data = create_digits({"hf": root}, "hf", skip_corrupt=0)
    facts = describe_dataset(data)
    assert facts.num_examples == {"train": 40, "eval": 20}
    assert facts.examples["train"].class_names == tuple("0123456789")
    bunch = load_digits()
    wanted = np.round(bunch.images[:60] * 255 / 16).astype(np.uint8)
    batches = list(open_loader(data, "eval").batches())
    images = torch.cat([b.images[b.mask] for b in batches]).numpy()[..., 0]
    assert np.array_equal(images, wanted[40:])
    one = open_loader(data, "train").load_examples(range(40))
    found = {
        image.tobytes(): label
        for image, label in zip(one.images.numpy(), one.labels.tolist(), strict=True)
    }
    assert found == {wanted[i].tobytes(): int(bunch.target[i]) for i in range(40)}


def create_argv(output: Path, kind: str, root: Path, *flags: str) -> list[str]:
    return [
        f"--data.source={kind}",
        f"--data.root={root}",
        "--data.eval_split=val",
        f"--data.train_pp={PP}",
        f"--data.eval_pp={PP}",
        f"--data.global_batch_size={BATCH}",
        "--model=vit_tiny_patch16_224",
        "--model.image_size=8",
        f"--model.args={json.dumps(VIT_ARGS)}",
        "--optim.warmup_lr=0",
        "--optim.warmup_epochs=0",
        "--train.steps=9",
        "--train.checkpoint_every_steps=5",
        "--train.keep_every_steps=5",
        "--runtime.device=cpu",
        "--runtime.num_threads=1",
        "--run.tensorboard=false",
        "--run.experiment=digits",
        f"--run.output_dir={output}",
        *flags,
    ]


def test_runs_on_both_formats_and_a_resumed_one_have_equal_weights(roots, tmp_path, capsys):
    """The same digits in the same order: 9 steps, and from step 5 on again."""
    found = {}
    for kind in KINDS:
        argv = create_argv(tmp_path, kind, roots[kind])
        assert main.main([*argv, f"--run.run_id={kind}"]) == 0
        found[kind] = load_file(tmp_path / "digits" / kind / "student.safetensors")
        (step,) = (tmp_path / "digits" / kind).rglob("step_00000005")
        assert main.main([*argv, f"--resume={step}"]) == 0
        again = load_file(tmp_path / "digits" / kind / "student.safetensors")
        capsys.readouterr()
        assert main.main([*argv, "--data.train_split=trian"]) == 2
        error = "error: data.train_split (trian): the dataset has no split 'trian'; did you mean"
        assert capsys.readouterr().err.splitlines()[-1].startswith(error)
        assert all(torch.equal(again[name], value) for name, value in found[kind].items())
    assert all(torch.equal(found["hf"][name], value) for name, value in found["webdataset"].items())


def test_photographs_from_tars_and_arrow_files_are_equal(tmp_path):
    photographs = get_photographs()
    files = []
    for one in photographs:
        facts = {"meta": {"label": one.label}, "caption": one.name}
        files += [
            (f"a/{one.name}.jpeg", one.image),
            (f"a/{one.name}.json", json.dumps(facts).encode()),
        ]
    write_tar(tmp_path / "tars" / "photos-0.tar", [*files, ("a/none.txt", b"no image")])
    write_arrow(tmp_path / "arrow" / "photos", [photographs])
    pp = "decode|resize_small(64)|central_crop(64)|value_range(-1, 1)"
    values = {
        "name": "",
        "eval_split": "photos",
        "train_split": "photos",
        "global_batch_size": 3,
        "train_pp": pp,
        "eval_pp": pp,
    }
    tars = create_section(
        tmp_path / "tars",
        source="webdataset",
        label_key="json/meta/label",
        image_key="jpg;jpeg",
        return_id=True,
        **values,
    )
    arrow = create_section(tmp_path / "arrow", source="hf", **{**values, "name": "photos"})
    known = {"num_classes": 3}
    (a,), (b,) = (open_loader(d, "eval", known=known).batches() for d in (tars, arrow))
    assert torch.equal(a.images, b.images) and a.labels.tolist() == b.labels.tolist() == [0, 1, 2]
    assert a.ids == tuple(f"photos-0.tar__a/{one.name}" for one in photographs)


def test_braces_are_expanded_like_in_a_shell():
    assert expand_braces("a-{008..011}.tar") == [f"a-{n:03d}.tar" for n in range(8, 12)]
    assert expand_braces("{a,b}/{1..2}") == ["a/1", "a/2", "b/1", "b/2"]
    assert expand_braces("{2..0}") == ["2", "1", "0"]


def test_names_that_are_not_utf8_are_read(tmp_path):
    digits = get_digits(0, 4)
    with tarfile.open(
        tmp_path / "train-0.tar", "w", format=tarfile.GNU_FORMAT, encoding="latin-1"
    ) as tar:
        for one in digits:
            for ending, content in (("cls", b"%d" % one.label), ("png", one.image)):
                info = tarfile.TarInfo(f"\xe9{one.name}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    data = create_section(tmp_path, source="webdataset")
    found = select_tars(data, "train", "data.train_split")
    assert found.labels.tolist() == [one.label for one in digits]
    assert found.names[0].decode() == f"\ufffd{digits[0].name}"


@pytest.mark.parametrize("label", [b"dog", b"9" * 30])
def test_the_example_with_a_wrong_label_is_named(tmp_path, label):
    first, second = get_digits(0, 5), get_digits(5, 5)
    write_examples(tmp_path / "train-0.tar", first)
    write_tar(
        tmp_path / "train-1.tar",
        [
            pair
            for one in second
            for pair in (
                (f"{one.name}.cls", label if one is second[3] else b"%d" % one.label),
                (f"{one.name}.png", one.image),
            )
        ],
    )
    data = create_section(tmp_path, source="webdataset")
    with pytest.raises(UserError, match=rf"train-1\.tar, 0008 has the label '{label.decode()}'"):
        select_tars(data, "train", "data.train_split")


def test_splits_whose_classes_differ_are_not_joined(tmp_path):
    """A number would mean another class in each."""
    names = [str(digit) for digit in range(10)]
    write_arrow(tmp_path / "train", [get_digits(0, 20)], names)
    write_arrow(tmp_path / "val", [get_digits(20, 20)], names[::-1])
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "val"]}))
    data = create_section(tmp_path, source="hf", name="")
    assert select_rows(data, "val", "data.eval_split").class_names == tuple(names[::-1])
    with pytest.raises(UserError, match=r"train_split joins train and val, .* other classes"):
        select_rows(data, "train+val[:10]", "data.train_split")


@pytest.mark.parametrize(
    ("expression", "count"),
    [
        ("train", 120),
        ("train[:50%]", 60),
        ("train-{001..002}.tar", 70),
        ("train-00?.tar[10:]", 110),
        ("val/*.tar", 40),
        ("all", 160),
        ("train-001.tar+val", 80),
        ("train[1shard:]", 70),
    ],
)
def test_tars_are_named_by_split_slice_or_pattern(roots, expression, count):
    data = create_digits(roots, "webdataset", train_split=expression, eval_split="val")
    assert describe_dataset(data).num_examples["train"] == count


def damage(kind: str, root: Path) -> dict[str, object]:
    """Damage a copy of the tars; gives what the run is asked."""
    digits = get_digits(0, 20)
    path = root / "bad-0.tar"
    if kind in ("no label", "some labels", "no image"):
        files = [(f"{d.name}.{'txt' if kind == 'no image' else 'png'}", d.image) for d in digits]
        write_tar(path, [*files, (f"{digits[-1].name}.cls", b"1")] if "some" in kind else files)
    elif kind == "words":
        write_tar(path, [("a.png", digits[0].image), ("a.cls", b"thre")])
    elif kind == "json":
        write_tar(path, [("a.png", digits[0].image), ("a.json", b"{")])
        return {"train_split": "bad", "label_key": "json/label"}
    elif kind == "compressed":
        path = write_examples(root / "good.tar", digits)
        (root / "bad-0.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    elif kind == "renamed":
        path.write_bytes(gzip.compress(b"no tar at all"))
    else:
        content = write_examples(path, digits).read_bytes()
        # In the middle of a member, and at the end of the last one: no block of zeros follows.
        path.write_bytes(content[:10_000] if kind == "cut" else content[: 20 * 2 * 1024])
    return {"train_split": "bad"}


WRONG_TARS = {
    "no label": r"data\.label_key: .*bad-0\.tar holds no label cls, only png; .*json/FIELD",
    "some labels": r"holds 19 examples without a label cls, the first is 0000; add it",
    "no image": r"data\.image_key: .*bad-0\.tar holds no image .* among txt; name the image's",
    "words": r"data\.label_key \(label\): .*bad-0\.tar, a has the label 'thre', .*no class; known",
    "json": r"data\.label_key: .*bad-0\.tar, a\.json is not JSON",
    "compressed": r"bad-0\.tar\.gz is compressed, .* can.* read without.*unpack it",
    "renamed": r"bad-0\.tar is no uncompressed tar .*copy or write it again",
    "cut": r"bad-0\.tar is cut short .*copy or write it again",
    "cut between": r"bad-0\.tar is cut short .*copy or write it again",
}


@pytest.mark.parametrize("kind", WRONG_TARS)
def test_an_unreadable_tar_is_named_with_its_reason(roots, tmp_path, kind):
    shutil.copytree(roots["webdataset"], tmp_path, dirs_exist_ok=True)
    values = damage(kind, tmp_path)
    with pytest.raises(UserError, match=WRONG_TARS[kind]) as caught:
        describe_dataset(create_digits({"webdataset": tmp_path}, "webdataset", **values))
    assert "\n" not in str(caught.value)


WRONG_NAMES = {
    "pattern": ("webdataset", {"train_split": "trian-*.tar"}, r"matches no tar .*'train-00"),
    "hole": ("webdataset", {"train_split": "train-{000..003}.tar"}, r"train-003\.tar, matches no"),
    "split": ("webdataset", {"train_split": "trian"}, r"no split 'trian'; did you mean 'train'"),
    "url": ("webdataset", {"root": "gs://a/b"}, r"gs://a/b\) is a URL, but tars"),
    "label ending": ("webdataset", {"label_key": "json/x"}, r"no label json/x, only cls, png"),
    "saved split": ("hf", {"train_split": "vall"}, r"no split 'vall'; did you mean 'val'"),
    "column": ("hf", {"label_key": "labels"}, r"label_key \(labels\): .* did you mean 'label'"),
    "image column": ("hf", {"image_key": "img"}, r"image_key \(img\): .* no such column"),
    "no image": ("hf", {"image_key": "label"}, r"image_key \(label\) is a column of int64, not"),
    "no number": ("hf", {"label_key": "image"}, r"\(image\) is a column of struct<.*whole number"),
    "name": ("hf", {"name": "trein"}, r"data\.name \(trein\): .* did you mean 'train'"),
    "arrow url": ("hf", {"root": "gs://a/b"}, r"gs://a/b\) is a URL, but Arrow"),
}


@pytest.mark.parametrize("case", WRONG_NAMES)
def test_a_missing_file_is_reported_with_a_similar_name(roots, case):
    kind, values, message = WRONG_NAMES[case]
    given = {**roots, kind: values.get("root", roots[kind])}
    values = {key: value for key, value in values.items() if key != "root"}
    with pytest.raises(UserError, match=message) as caught:
        describe_dataset(create_digits(given, kind, **values))
    assert "\n" not in str(caught.value)


def spoil(kind: str, root: Path) -> None:
    """Damage a copy of the saved dataset."""
    file = next((root / "train").glob("*.arrow"))
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:5000])
    elif kind == "missing":
        file.unlink()
    elif kind in ("splits", "state", "list"):
        texts = {"splits": "{}", "state": '{"_data_files": [1]}', "list": "[]"}
        folder = root / "train" if kind == "state" else root
        (folder / f"{'state' if kind == 'state' else 'dataset_dict'}.json").write_text(texts[kind])
    elif kind == "paths":
        write_arrow(root / "train", [[one._replace(image=None) for one in get_digits(0, 20)]])
    elif kind == "no label":
        write_arrow(root / "train", [[one._replace(label=None) for one in get_digits(0, 20)]])
    else:
        shutil.rmtree(root)
        (root / "saved" / "train").mkdir(parents=True)
        if kind == "parquet":
            (root / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
        if kind == "above":
            (root / "saved" / "dataset_dict.json").write_text("{}")


WRONG_ARROW = {
    "cut": r"data\.root: .*\.arrow cannot be read as Arrow \(it is cut short\); copy it again",
    "missing": r"data\.root: .*\.arrow is missing; copy the dataset again",
    "splits": r"dataset_dict\.json lists no splits; copy or write",
    "state": r"train/None is missing; copy the dataset again",
    "list": r"dataset_dict\.json is not a description of a dataset; copy or write",
    "paths": r"data\.image_key \(image\): 20 rows have no image, .*save_to_disk",
    "no label": r"data\.label_key \(label\): 20 rows have none; leave them out",
    "parquet": r"holds Parquet, .*load_dataset and write it with its save_to_disk",
    "above": r"is the parent directory; set data\.name to one of saved",
    "nothing": r"is not a dataset in Arrow, .*neither dataset_dict\.json nor state\.json",
}


@pytest.mark.parametrize("kind", WRONG_ARROW)
def test_a_directory_without_a_dataset_is_reported_as_such(roots, tmp_path, kind):
    shutil.copytree(roots["hf"], tmp_path / "set")
    spoil(kind, tmp_path / "set")
    with pytest.raises(UserError, match=WRONG_ARROW[kind]) as caught:
        describe_dataset(create_digits({"hf": tmp_path / "set"}, "hf"))
    assert "\n" not in str(caught.value)


def test_a_broken_image_is_named_by_tar_and_member_or_skipped(tmp_path):
    use_private_cache(tmp_path / "cache")
    digits = [*get_digits(0, 20)]
    digits[7] = digits[7]._replace(image=b"no image")
    write_examples(tmp_path / "train-0.tar", digits)
    data = create_digits({"webdataset": tmp_path}, "webdataset", eval_split="train")
    known = {"num_classes": 10}
    with pytest.raises(UserError, match=r"train-0\.tar, 0007 cannot be read \(8 bytes that are no"):
        list(open_loader(data, "eval", known=known).batches())
    lenient = open_loader(data.model_copy(update={"skip_corrupt": 1}), "eval", known=known)
    seen = torch.cat([b.indices[b.mask] for b in lenient.batches()]).tolist()
    assert seen == [i for i in range(20) if i != 7]
