"""MNIST from its own files, and what TFDS may download."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

import main as front_door
from tests.support.child_runs import read_losses, run_main
from tests.support.mnist_files import NAMES, TEST, TRAIN, encode_idx, read_digits, write_mnist
from tools.prepare_dataset.__main__ import main


@pytest.fixture
def files(tmp_path) -> Path:
    return write_mnist(tmp_path / "files")


def prepare(files: Path, code: int = 0) -> Path:
    out = files.parent / "data"
    assert main(["mnist", "--from", str(files), "--out", str(out)]) == code
    return out


def test_every_pixel_and_label_of_the_files_is_in_the_dataset(files):
    import tensorflow_datasets as tfds

    images, labels = read_digits()
    seen = 0
    for split in ("train", "test"):
        dataset = tfds.load("mnist", data_dir=str(prepare(files)), split=split)
        for example in tfds.as_numpy(dataset):
            assert np.array_equal(example["image"][..., 0], images[seen])
            assert example["label"] == labels[seen]
            seen += 1
    assert seen == TRAIN + TEST


@pytest.mark.parametrize("config", ["mnist", "mnist_distributed"])
def test_the_configuration_reads_the_written_dataset(config, files, capsys):
    root = prepare(files)
    words = [
        "--config",
        f"configs/{config}.yaml",
        f"--data.root={root}",
        "--check",
        f"--run.output_dir={files.parent / 'runs'}",
    ]
    assert front_door.main(words) == 0
    assert "180 examples to train on, 20 to evaluate" in capsys.readouterr().out


@pytest.mark.slow
def test_four_processes_train_like_one(files):
    root, runs = prepare(files), files.parent / "runs"
    shared = (
        f"--data.root={root}",
        "--batch_size=32",
        "--train.log_every_steps=1",
        f"--run.output_dir={runs}",
        "--run.run_id=a",
        "--runtime.device=cpu",
        "--train.steps=8",
    )
    for name in ("mnist", "mnist_distributed"):
        done = run_main([f"--config=configs/{name}.yaml", *shared])
        assert done.returncode == 0, done.stderr
    alone, together = (read_losses(runs / name / "a") for name in ("mnist", "mnist_distributed"))
    assert len(alone) == 8
    assert together == pytest.approx(alone, abs=1e-4)
    assert "4 ranks" in done.stderr


def break_files(folder: Path, name: str, change) -> None:
    path = folder / NAMES[name]
    path.write_bytes(change(path.read_bytes()))


def replace_zipped(array: np.ndarray):
    return lambda _: gzip.compress(encode_idx(array))


WRONG = [
    (
        "train-images",
        lambda data: data[:-5],
        "holds 156811 bytes, but its header promises 156816 "
        "(200 x 28 x 28); it is cut short: fetch it again",
    ),
    ("train-images", lambda data: data + b"x", "it is too long: fetch it again"),
    ("train-images", lambda data: data[:7], "begins with 00000803, not with 00000803"),
    ("train-labels", lambda data: b"", "begins with nothing, not with 00000801, so it is not"),
    ("train-labels", lambda data: b"<html>" + data, "begins with 3c68746d, not with 00000801"),
    ("t10k-images", lambda data: data[:-40], "cannot be read: "),
    ("t10k-images", lambda data: b"\x1f\x8b" + b"x" * 40, "cannot be read: "),
    ("t10k-labels", lambda data: gzip.decompress(data), "cannot be read: Not a gzipped file"),
    ("t10k-labels", replace_zipped(np.zeros(TEST - 1, np.uint8)), "holds 60 images, but "),
    ("t10k-labels", replace_zipped(np.full(TEST, 10, np.uint8)), "holds the label 10, not 0 to 9"),
    ("t10k-images", replace_zipped(np.zeros((TEST, 8, 8), np.uint8)), "holds images of 8 x 8, not"),
    ("t10k-images", replace_zipped(np.zeros((0, 28, 28), np.uint8)), "holds no examples"),
    ("t10k-images", replace_zipped(np.zeros((TEST,), np.uint8)), "begins with 00000801, not"),
]


@pytest.mark.parametrize(("name", "change", "words"), WRONG)
def test_files_of_other_formats_are_named_in_one_line(name, change, words, files, capsys):
    break_files(files, name, change)
    assert not prepare(files, code=2).exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert NAMES[name] in line


def test_a_missing_file_or_folder_is_named(files, capsys):
    (files / NAMES["t10k-labels"]).unlink()
    prepare(files, code=2)
    assert "contains neither t10k-labels-idx1-ubyte nor" in capsys.readouterr().err
    prepare(files / "nowhere", code=2)
    assert "nowhere') contains neither train-images-idx3-ubyte" in capsys.readouterr().err


@pytest.fixture(scope="module")
def builder_class():
    """A dataset that TFDS knows by its name as soon as the class is there, made of nothing."""
    import tensorflow_datasets as tfds

    class StripesOfTest(tfds.core.GeneratorBasedBuilder):
        """Images with one bright row each."""

        VERSION = tfds.core.Version("1.2.3")

        def _info(self):
            features = {
                "image": tfds.features.Image(shape=(28, 28, 1)),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
            return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(40), "test": self._generate_examples(20)}

        def _generate_examples(self, count):
            for number in range(count):
                image = np.zeros((28, 28, 1), np.uint8)
                image[number % 10] = 200
                yield number, {"image": image, "label": number % 10}

    return StripesOfTest


def ask(root: Path, *more: str, name: str = "stripes_of_test") -> int:
    return main(["tfds", name, "--root", str(root), *more])


def test_nothing_is_downloaded_without_permission(tmp_path, builder_class, monkeypatch, capsys):
    monkeypatch.delenv("ALLOW_DOWNLOAD", raising=False)
    assert ask(tmp_path / "data") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a download would fetch files of unknown number and size and write" in line
    assert line.endswith("/data; allow it by --allow-download or ALLOW_DOWNLOAD=1")
    monkeypatch.setenv("ALLOW_DOWNLOAD", "0")
    assert ask(tmp_path / "data") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mnist", "4 files of 11.1 MiB in all from storage.googleapis.com and write mnist/3.0.1"),
        ("cifar100", "1 file of 160.7 MiB in all from www.cs.toronto.edu and write cifar100/3.0.2"),
        ("imagenet2012:5.1.0", "2 files of 144.0 GiB in all from www.image-net.org and write "),
        ("imagenet2012", "/downloads/manual first); allow it by"),
    ],
)
def test_the_message_states_dataset_size_and_target(name, words, tmp_path, capsys):
    assert ask(tmp_path, name=name) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and f"below {tmp_path}" in line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cifarr10", "is no dataset of TFDS; did you mean cifar10 or"),
        ("mnist:9.9.9", "is not in TFDS: "),
        ("glue/nosuch", "is not in TFDS: "),
        ("huggingface:mnist", "is no name of TFDS; write it as"),
        ("../x", "is no name of TFDS"),
        ("qqqqqqqqqq", "is no dataset of TFDS; its catalogue lists them"),
    ],
)
def test_a_name_unknown_to_tfds_gives_one_line(name, words, tmp_path, capsys):
    assert ask(tmp_path, "--allow-download", name=name) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"NAME ('{name}')" in line and words in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("allowed", ["flag", "environment"])
def test_with_permission_tfds_prepares_what_a_run_reads(
    allowed, tmp_path, builder_class, monkeypatch, capsys
):
    monkeypatch.setenv("ALLOW_DOWNLOAD", "1" if allowed == "environment" else "")
    flags = ("--allow-download",) if allowed == "flag" else ("--format=array_record",)
    root = tmp_path / "data"
    assert ask(root, *flags) == 0
    done = capsys.readouterr()
    assert done.out.strip() == str(root / "stripes_of_test" / "1.2.3")
    assert f"write stripes_of_test/1.2.3 below {root}" in done.err
    words = [
        "--config",
        "configs/mnist.yaml",
        f"--data.root={root}",
        "--data.name=stripes_of_test",
        "--batch_size=12",
        "--check",
        f"--run.output_dir={tmp_path / 'runs'}",
    ]
    assert front_door.main(words) == 0
    assert "36 examples to train on, 4 to evaluate" in capsys.readouterr().out
    assert ask(root) == 0
    assert "is there already; nothing is fetched" in capsys.readouterr().err


def test_a_failure_inside_tfds_gives_one_line(tmp_path, builder_class, monkeypatch, capsys):
    def fail(self, dl_manager):
        raise ConnectionError("no way\nto the host")

    monkeypatch.setattr(builder_class, "_split_generators", fail)
    assert ask(tmp_path, "--allow-download") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "stripes_of_test could not be fetched and prepared: ConnectionError: no way to" in line
    assert line.endswith("mend that and run the same command again")
