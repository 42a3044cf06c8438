"""The datasets that tools.prepare_dataset writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.input_data import get_image
from tools.prepare_dataset import digits, fonts, write
from tools.prepare_dataset.__main__ import main

ROOT = Path(write.__file__).parents[2]


@pytest.fixture(scope="module")
def digits_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("digits")
    assert main(["digits", "--out", str(root)]) == 0
    return root


PLACED = (
    ("digits", "--out"),
    ("fonts", "--out"),
    ("mnist --from nowhere", "--out"),
    ("tfds mnist", "--out"),
    ("folder tests --name a", "--out"),
    ("text --from tests", "--out"),
    ("california_housing", "--root"),
    ("resize digits --root nowhere", "--out"),
)


@pytest.mark.parametrize(("kind", "flag"), PLACED)
def test_an_unwritable_target_is_refused(kind, flag, tmp_path, capsys, monkeypatch):
    """The program would make a directory `memory:` here, and say that all went well."""
    (tmp_path / "file").write_text("")
    (tmp_path / "tests" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for place, words in (
        ("memory://abc", f"{flag} ('memory://abc') is a URL, but a dataset is written to a local"),
        ("gs://bucket/data", "copy it afterwards (to a bucket: gcloud storage cp -r)"),
        ("/proc/x", f"{flag} ('/proc/x'): nothing can be written to /proc; name a directory"),
        ("file/data", f"{flag} ('file/data'): {tmp_path / 'file'} is a file; name a directory"),
    ):
        assert main([*kind.split(), flag, place]) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1 and words in error[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "tests"]


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("digits", "digits"),
        ("fonts", "fonts/1.0.0"),
        ("mnist --from nowhere", "mnist"),
        ("tfds mnist", "mnist"),
        ("folder tests --name a", "a"),
    ],
)
def test_a_file_in_place_of_a_dataset_is_refused(kind, place, tmp_path, capsys, monkeypatch):
    (tmp_path / "tests" / "cat").mkdir(parents=True)
    (tmp_path / "tests" / "cat" / "1.png").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data" / place
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert main([*kind.split(), "--out", "data"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: --out: the dataset would go to data/")
    assert line.endswith(f"data/{place} is a file; remove it, or give another --out")
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--splits", ""], "--splits ('') lacks a name"),
        (["--splits", ","], "--splits (',') lacks a name"),
        (["--shard-mib", "0"], "--shard-mib (0) must be at least 1"),
    ],
)
def test_invalid_folder_flags_are_refused(photos, capsys, flags, words):
    assert not prepare_photos(photos, *flags, code=2).exists()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {words}")


def test_digits_equal_scikit_learns(digits_root):
    import tensorflow_datasets as tfds
    from sklearn.datasets import load_digits

    bunch = load_digits()
    seen = []
    builder = tfds.builder_from_directory(digits_root / "digits" / "1.0.0")
    for split in ("train", "validation", "test"):
        for example in tfds.as_numpy(builder.as_dataset(split=split)):
            number = int(example["id"])
            pixels = example["image"][..., 0] / (255 / 16)
            assert np.array_equal(np.round(pixels), bunch.images[number])
            assert int(example["label"]) == bunch.target[number]
            seen.append(number)
    assert sorted(seen) == list(range(1797))


def test_digits_splits_are_fixed_and_stratified(digits_root):
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(digits_root / "digits" / "1.0.0")
    sizes = {name: split.num_examples for name, split in builder.info.splits.items()}
    assert sizes == {"train": 1197, "validation": 300, "test": 300}
    for split in ("validation", "test"):
        labels = [int(e["label"]) for e in builder.as_dataset(split=split)]
        assert np.array_equal(np.bincount(labels), np.full(10, 30))
    from sklearn.datasets import load_digits

    first = digits.split_digits(load_digits().target)
    assert first == digits.split_digits(load_digits().target)


def test_tfds_load_reads_the_digits_by_name(digits_root):
    import tensorflow_datasets as tfds

    dataset, info = tfds.load("digits", data_dir=str(digits_root), split="test", with_info=True)
    example = next(iter(dataset))
    assert info.features["label"].num_classes == 10
    assert example["image"].shape == (8, 8, 1)


def test_preparing_twice_changes_nothing(digits_root):
    files = sorted((digits_root / "digits" / "1.0.0").iterdir())
    before = [(f.name, f.stat().st_mtime_ns) for f in files]
    assert main(["digits", "--out", str(digits_root)]) == 0
    assert before == [(f.name, f.stat().st_mtime_ns) for f in files]


@pytest.fixture
def photos(tmp_path):
    import tensorflow as tf

    for split, count in (("train", 6), ("val", 2)):
        for number, name in enumerate(("cat", "dog")):
            directory = tmp_path / "photos" / split / name
            directory.mkdir(parents=True)
            for i in range(count):
                data = tf.io.encode_png(get_image(100 * number + i)).numpy()
                (directory / f"{i}.png").write_bytes(data)
    return tmp_path / "photos"


def prepare_photos(photos: Path, *more: str, code: int = 0) -> Path:
    out = photos.parent / "out"
    arguments = ["folder", str(photos), "--out", str(out), "--name", "pets", *more]
    assert main(arguments) == code
    return out / "pets" / "1.0.0"


@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
def test_a_folder_keeps_its_images_labels_and_splits(photos, file_format):
    import tensorflow_datasets as tfds

    directory = prepare_photos(photos, "--format", file_format)
    builder = tfds.builder_from_directory(directory)
    assert builder.info.features["label"].names == ["cat", "dog"]
    for split, count in (("train", 12), ("validation", 4)):
        # ArrayRecord files are read by as_data_source alone.
        examples = list(
            builder.as_data_source(split=split)
            if file_format == "array_record"
            else tfds.as_numpy(builder.as_dataset(split=split))
        )
        assert len(examples) == count
        for example in examples:
            name, file = example["file_name"].decode().split("/")
            number = 100 * ("cat", "dog").index(name) + int(file.removesuffix(".png"))
            assert np.array_equal(example["image"], get_image(number))
            assert example["label"] == ("cat", "dog").index(name)


def test_an_interrupted_preparation_continues(photos, monkeypatch, capsys):
    write_shard = write.write_shard
    written = []

    def stop_at_second(path, *arguments):
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(path)
        return write_shard(path, *arguments)

    # Files of one byte: every image gets a file of its own.
    monkeypatch.setattr(write, "_SHARD_UNIT", 1)
    monkeypatch.setattr(write, "write_shard", stop_at_second)
    directory = prepare_photos(photos, "--shard-mib", "1", code=130)
    assert "interrupted; the same command continues" in capsys.readouterr().err
    assert not directory.exists()
    first = written[0].stat().st_mtime_ns
    monkeypatch.setattr(write, "write_shard", write_shard)
    assert prepare_photos(photos, "--shard-mib", "1") == directory
    assert (directory / written[0].name).stat().st_mtime_ns == first
    assert len(list(directory.glob("pets-train*"))) == 12
    assert [p.name for p in directory.parent.iterdir()] == ["1.0.0"]


def test_an_interrupted_preparation_of_other_files_starts_afresh(photos, monkeypatch):
    write_shard = write.write_shard
    monkeypatch.setattr(write, "finish", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare_photos(photos)
    monkeypatch.undo()
    assert write.write_shard is write_shard
    (photos / "train" / "cat" / "0.png").unlink()
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(prepare_photos(photos))
    assert len(list(builder.as_dataset(split="train"))) == 11


def test_the_summary_reports_ignored_files(photos, capsys):
    (photos / "train" / "cat" / "notes.txt").write_text("x")
    (photos / "train" / "dog" / "a.tiff").write_bytes(b"x")
    (photos / "train" / "dog" / "more").mkdir()
    for split in ("train", "val"):
        (photos / split / "emu").mkdir()
    prepare_photos(photos)
    lines = capsys.readouterr().err.splitlines()
    assert (
        "train: 12 images in 3 classes, 1 of them without an image; left out, as no images: "
        in (lines[0])
    )
    assert lines[0].endswith("1 .tiff, 1 .txt, 1 folder")
    assert lines[1] == "validation: 4 images in 3 classes, 1 of them without an image"


def test_check_decodes_every_image_and_names_the_bad_ones(photos, capsys):
    bad = [photos / "train" / "cat" / "3.png", photos / "val" / "dog" / "9.jpg"]
    bad[0].write_bytes(bad[0].read_bytes()[:50])
    bad[1].write_bytes(b"text")
    directory = prepare_photos(photos, "--check", code=2)
    error = capsys.readouterr().err
    assert all(f"{path}: " in error for path in bad)
    assert "error: 2 of the 17 images cannot be decoded; restore or remove them" in error
    assert not directory.exists()
    for path in bad:
        path.unlink()
    assert prepare_photos(photos, "--check").exists()


def test_check_counts_images_rotated_by_exif(photos, capsys):
    from PIL import Image

    for number, orientation in ((7, 6), (8, 1), (9, 3)):
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.new("RGB", (9, 6)).save(photos / "val" / "cat" / f"{number}.jpg", exif=exif)
    prepare_photos(photos, "--check")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "EXIF" in line]
    assert line == (
        f"2 of the 19 images have an EXIF orientation other than 1, first {photos}/val/cat/7.jpg: "
        "decode leaves them turned or mirrored; write upright in its place in data.train_pp and "
        "data.eval_pp"
    )


def test_a_class_missing_in_a_split_is_named_and_may_be_allowed(photos, capsys):
    import tensorflow_datasets as tfds

    for file in (photos / "val" / "cat").iterdir():
        file.unlink()
    (photos / "val" / "cat").rmdir()
    prepare_photos(photos, code=2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert "split validation has no folder for 1 of the 2 classes: cat; add" in line
    assert "--fewer-classes validation" in line
    builder = tfds.builder_from_directory(prepare_photos(photos, "--fewer-classes", "validation"))
    assert builder.info.features["label"].names == ["cat", "dog"]
    assert {int(e["label"]) for e in builder.as_dataset(split="validation")} == {1}


def test_an_existing_dataset_is_reported_and_one_of_other_images_refused(photos, capsys):
    directory = prepare_photos(photos)
    assert prepare_photos(photos) == directory
    told = "is there already, with 12 images in train, 4 images in validation; nothing is written"
    assert told in capsys.readouterr().err.splitlines()
    (photos / "train" / "cat" / "7.png").write_bytes(b"x")
    prepare_photos(photos, code=2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert "with 12 images in train, 4" in line
    assert "photos has 13 images in train, 4" in line
    prepare_photos(photos, "--version", "1.0.1")
    assert sorted(p.name for p in directory.parent.iterdir()) == ["1.0.0", "1.0.1"]


def test_a_format_other_than_the_stored_one_is_refused_if_given(photos, digits_root, capsys):
    directory = prepare_photos(photos, "--format", "array_record")
    assert prepare_photos(photos) == prepare_photos(photos, "--format", "array_record") == directory
    prepare_photos(photos, "--format", "tfrecord", code=2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert "1.0.0 is there already as array_record; write it beside with --version 1.0.1" in line
    again = ["digits", "--out", str(digits_root), "--format", "array_record"]
    assert main(again) == 2
    assert "as tfrecord; choose another --out" in capsys.readouterr().err


def test_a_missing_folder_is_one_line_and_exit_code_2(tmp_path):
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "tools.prepare_dataset",
            "folder",
            "nowhere",
            "--out",
            "out",
            "--name",
            "x",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and "nowhere" in result.stderr
    assert not (tmp_path / "out").exists()


def test_each_split_has_other_font_faces(tmp_path, monkeypatch, capsys):
    import tensorflow_datasets as tfds

    monkeypatch.setattr(fonts, "DRAWS", {"train": 2, "validation": 1, "test": 1})
    faces = {"train": ("DejaVuSans",), "validation": ("cmss10",), "test": ("STIXGeneral",)}
    monkeypatch.setattr(fonts, "FACES", faces)
    assert main(["fonts", "--out", str(tmp_path)]) == 0
    builder = tfds.builder_from_directory(tmp_path / "fonts" / "1.0.0")
    names = builder.info.features["label"].names
    assert "".join(names) == "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    assert "the nearest neighbour in pixels errs on" in builder.info.description
    glyphs = fonts.list_glyphs()
    for split, count in (("train", 124), ("validation", 62), ("test", 62)):
        examples = list(tfds.as_numpy(builder.as_dataset(split=split)))
        assert len(examples) == count
        for example in examples[:5]:
            glyph = glyphs[split][int(example["id"])]
            assert glyph.label == example["label"]
            np.testing.assert_array_equal(example["image"], fonts.render(glyph))


def test_no_face_is_in_two_splits_and_a_glyph_is_a_function_of_its_name():
    faces = [face for those in fonts.FACES.values() for face in those]
    assert len(set(faces)) == len(faces)
    counts = {split: len(glyphs) for split, glyphs in fonts.list_glyphs().items()}
    assert counts == {"train": 2976, "validation": 496, "test": 992}
    first, second = (fonts.Glyph("train", "cmr10", 10, draw) for draw in (0, 1))
    assert (fonts.render(first) != fonts.render(second)).any()
    assert (fonts.render(first) == fonts.render(first)).all()
    thin, wide = (fonts.render(fonts.Glyph("train", "DejaVuSans", label, 0)) for label in (1, 22))
    assert (thin > 128).sum() < (wide > 128).sum()  # 1 and M


def test_missing_font_files_give_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fonts, "FACES", {**fonts.FACES, "train": ("NoSuchFace",)})
    assert main(["fonts", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "NoSuchFace.ttf, which matplotlib brings" in error[0]
    assert not (tmp_path / "fonts").exists()
