"""`tools.prepare_dataset resize`: smaller images, and everything else unchanged."""

from __future__ import annotations

import hashlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import create_loader
from tests.support.input_data import create_section
from tools.prepare_dataset import write
from tools.prepare_dataset.__main__ import main

ROOT = Path(write.__file__).parents[2]
# Ends itself, as the kernel would, in the middle of the second file.
KILLED = """
import os, signal, sys
from tools.prepare_dataset import resize
from tools.prepare_dataset.__main__ import main
merge, left = resize._Conversion._merge, [3]

def count(*arguments):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return merge(*arguments)

resize._Conversion._merge = count
main(sys.argv[1:])
"""
SIDES = ((40, 60), (50, 33), (16, 20), (64, 64), (30, 100))


def draw(number: int, sides: tuple[int, int]) -> np.ndarray:
    """[H, W, 3] uint8: smooth waves, as photographs are, which JPEG keeps well."""
    rows, columns = np.meshgrid(*map(np.arange, sides), indexing="ij")
    waves = [np.sin((rows + columns * (c + 1)) / (9 + number)) for c in range(3)]
    return (127.5 + 120 * np.stack(waves, -1)).astype(np.uint8)


def write_photos(root, file_format, broken=None):
    """Ten examples, two in a file; of `broken` the image is none."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    def encode(number):
        image = draw(number, SIDES[number % len(SIDES)])
        encoded = tf.io.encode_jpeg(image, quality=95).numpy()
        return {
            "scene": {"picture": b"none" if number == broken else encoded, "weight": 0.5},
            "label": number % 2,
            "boxes": [[0.0, 0.0, 1.0, number / 10]],
        }

    conversion = write.Conversion(
        name="photos",
        description="Waves.",
        features={
            "scene": {"picture": tfds.features.Image(shape=(None, None, 3)), "weight": np.float32},
            "label": tfds.features.ClassLabel(names=["a", "b"]),
            "boxes": tfds.features.Tensor(shape=(None, 4), dtype=np.float32),
        },
        splits={"train": range(5), "test": range(5, 10)},
        encode=encode,
        get_bytes=lambda number: 1,
    )
    write.write_dataset(conversion, root / "photos" / "1.2.0", file_format, 2)


@pytest.fixture(scope="module", params=["tfrecord", "array_record"])
def source(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    write_photos(root, request.param)
    return root


def run(root, *flags, code=0):
    begin = ["resize", "photos", "--root", str(root), "--image-key", "scene/picture"]
    assert main([*begin, "--short-side", "32", *flags]) == code


def read(root, name):
    """All features of all examples, images encoded, as TFDS itself gives them."""
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(root / name / "1.2.0")
    decoders = {"scene": {"picture": tfds.decode.SkipDecoding()}}
    if builder.info.file_format.value == "array_record":
        data = builder.as_data_source(decoders=decoders)
    else:
        data = {
            split: tfds.as_numpy(builder.as_dataset(split=split, decoders=decoders))
            for split in builder.info.splits
        }
    return {split: list(data[split]) for split in sorted(data)}


def load(root, name, pp, key="scene/picture"):
    data = create_section(
        root, name=name, image_key=key, eval_pp=pp, eval_split="test", eval_batch_size=5
    )
    return next(create_loader(data, "eval", seed=0).batches())


def test_jpegs_are_smaller_and_everything_else_is_unchanged(source, tmp_path, capsys):
    import tensorflow as tf

    run(source, "--out", str(tmp_path))
    assert capsys.readouterr().out.strip() == str(tmp_path / "photos_32" / "1.2.0")
    old, new = read(source, "photos"), read(tmp_path, "photos_32")
    assert {split: len(of) for split, of in new.items()} == {"test": 5, "train": 5}
    for split in old:
        for number, (before, after) in enumerate(zip(old[split], new[split], strict=True)):
            encoded = before["scene"]["picture"]
            assert after["original_sha256"].decode() == hashlib.sha256(encoded).hexdigest()
            assert after["label"] == before["label"] and after["scene"]["weight"] == 0.5
            assert np.array_equal(after["boxes"], before["boxes"])
            small = after["scene"]["picture"]
            height, width = SIDES[number]
            if min(height, width) <= 32:  # never enlarged, and never encoded twice
                assert small == encoded
                continue
            scale = 32 / min(height, width)
            pixels = tf.io.decode_jpeg(small).numpy()
            assert pixels.shape == (int(height * scale), int(width * scale), 3)
    files = {path.name.replace("photos_32", "photos") for path in _list(tmp_path / "photos_32")}
    assert {path.name for path in _list(source / "photos")} == files


def test_stored_pixels_equal_the_preprocessed_source(source, tmp_path):
    run(source, "--out", str(tmp_path), "--format", "uint8")
    rest = "central_crop(16)|value_range(-1, 1)"
    before = load(source, "photos", f"decode|resize_small(32)|{rest}")
    after = load(tmp_path, "photos_32_uint8", f"resize_small(32)|{rest}")
    assert torch.equal(before.images, after.images) and before.images.float().std() > 0
    assert torch.equal(before.labels, after.labels)


def test_an_existing_dataset_is_accepted_or_refused_by_its_description(source, tmp_path, capsys):
    flags = ("--out", str(tmp_path), "--splits", "test")
    run(source, *flags, "--files", "array_record")
    run(source, *flags)
    assert "is there already; nothing is written" in capsys.readouterr().err
    run(source, *flags, "--quality", "50", code=2)
    told = capsys.readouterr().err
    assert "is there already with other images" in told and "quality 90" in told
    # Made smaller once more, it keeps the hashes of the first images.
    begin = ["resize", "photos_32", "--root", str(tmp_path), "--image-key", "scene/picture"]
    assert main([*begin, "--short-side", "8"]) == 0
    first, second = (read(tmp_path, name)["test"] for name in ("photos_32", "photos_32_8"))
    assert [one["original_sha256"] for one in first] == [one["original_sha256"] for one in second]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--short-side", "0"], "--short-side (0) must be 1 to 16384 pixels"),
        (["--quality", "101"], "--quality (101) must be 1 to 100"),
        (["--name", "Small-1"], "--name (Small-1) must consist of a-z, 0-9 and _"),
        (["--image-key", "label"], "--image-key (label) is no encoded image"),
        (["--image-key", "picture"], "data.image_key (picture): the dataset has no such feature"),
        (["--splits", "val"], "--splits (val): "),
        (["--splits", ""], "--splits ('') lacks a name; write them as train,test, or leave"),
        (["--splits", ","], "--splits (',') lacks a name"),
        (["--splits", "train,"], "--splits ('train,') lacks a name"),
        (
            ["--format", "uint8", "--quality", "80"],
            "--quality (80) is not supported with --format uint8",
        ),
        (
            ["--format", "uint8", "--quality", "90"],
            "--quality (90) is not supported with --format uint8",
        ),
    ],
)
def test_invalid_flags_are_refused_in_one_line(source, tmp_path, capsys, flags, words):
    run(source, "--out", str(tmp_path), *flags, code=2)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["photos_32", "photos_32/1.2.0", "photos_32/1.2.0.incomplete"])
def test_a_file_in_place_of_the_dataset_is_refused(source, tmp_path, capsys, place):
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    run(source, "--out", str(tmp_path), code=2)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"--name: the dataset would go to {tmp_path / 'photos_32' / '1.2.0'}, but" in line
    assert f"{path} is a file; remove it, or give another --name" in line
    assert path.read_text() == "mine"


def test_a_directory_of_other_files_in_its_place_is_refused(source, tmp_path, capsys):
    """All would be written before it turned out that they are in the way."""
    target = tmp_path / "photos_32" / "1.2.0"
    target.mkdir(parents=True)
    (target / "notes").write_text("mine")
    run(source, "--out", str(tmp_path), code=2)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{target} is there already, but without the dataset_info.json" in line
    assert [path.name for path in target.parent.iterdir()] == ["1.2.0"]


def test_a_killed_run_is_neither_accepted_nor_blocking(source, tmp_path):
    flags = ["--root", str(source), "--image-key", "scene/picture", "--short-side", "32"]
    words = ["resize", "photos", *flags, "--out", str(tmp_path / "killed")]
    ended = subprocess.run([sys.executable, "-c", KILLED, *words], cwd=ROOT, capture_output=True)
    assert ended.returncode == -signal.SIGKILL
    target = tmp_path / "killed" / "photos_32" / "1.2.0"
    partial = target.with_name("1.2.0.incomplete")
    assert not target.exists()
    (first,) = partial.glob("photos_32-*")
    (half,) = partial.glob("writing.*")
    written = first.stat().st_mtime_ns
    run(source, "--out", str(tmp_path / "killed"))
    assert [path.name for path in target.parent.iterdir()] == ["1.2.0"]
    assert (target / first.name).stat().st_mtime_ns == written
    assert not (target / half.name).exists()
    run(source, "--out", str(tmp_path / "whole"))
    whole = tmp_path / "whole" / "photos_32" / "1.2.0"
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }


def test_a_config_with_a_dash_gets_a_name_that_tfds_accepts(source, tmp_path):
    shutil.copytree(source / "photos" / "1.2.0", tmp_path / "photos" / "far-away" / "1.2.0")
    begin = ["resize", "photos/far-away", "--root", str(tmp_path), "--image-key", "scene/picture"]
    assert main([*begin, "--short-side", "32"]) == 0
    assert len(read(tmp_path, "photos_far_away_32")["test"]) == 5


def test_a_url_as_target_is_refused(capsys):
    assert main(["resize", "photos", "--root", "gs://bucket/data"]) == 2
    assert (
        "nothing is written below a URL such as --root ('gs://bucket/data')"
        in capsys.readouterr().err
    )


def test_an_undecodable_image_is_named(tmp_path, capsys):
    write_photos(tmp_path, "tfrecord", broken=7)
    run(tmp_path, code=2)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "photos-test.tfrecord-00001-of-00003, record 0: " in line
    assert "mend that image or file in the source" in line
    assert not (tmp_path / "photos_32" / "1.2.0").exists()


def _list(directory):
    return [path for path in (directory / "1.2.0").iterdir() if "record" in path.name]
