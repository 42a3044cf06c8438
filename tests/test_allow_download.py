"""data.allow_download: TFDS fetches what a run asks for, and only where the run says so."""

from __future__ import annotations

import os

import pytest

import main
from tests.support.input_data import use_private_cache
from tests.support.tiny_parts import create_argv

# A dataset that TFDS knows as soon as its module is imported, made of scikit-learn's digits.
_DATASET = """
import tensorflow_datasets as tfds


class DigitsOfTest(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"image": tfds.features.Image(shape=(8, 8, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10)}
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(0, 64),
                "validation": self._generate_examples(64, 96)}

    def _generate_examples(self, start, stop):
        from sklearn.datasets import load_digits

        bunch = load_digits()
        for i in range(start, stop):
            image = (bunch.images[i, ..., None] * 15).astype("uint8")
            yield i, {"image": image, "label": int(bunch.target[i])}
"""
# Has any program import it with TFDS.
_SITE = """
import builtins

_import = builtins.__import__


def _import_both(name, *arguments, **options):
    module = _import(name, *arguments, **options)
    is_first = builtins.__import__ is _import_both
    if name == "tensorflow_datasets" and hasattr(module, "core") and is_first:
        builtins.__import__ = _import
        import of_test.digits
    return module


builtins.__import__ = _import_both
"""
PP = "decode(channels=1)|resize(8)|value_range(-1, 1)"


def ask(folder, *flags: str) -> int:
    """A run of two steps on what TFDS knows as digits_of_test."""
    root = folder / "data"
    return main.main(
        create_argv(
            folder,
            "--data.source=tfds",
            "--data.name=digits_of_test",
            f"--data.root={root}",
            "--data.eval_split=validation",
            f"--data.train_pp={PP}",
            f"--data.eval_pp={PP}",
            "--train.steps=2",
            "--run.run_id=a",
            *flags,
        )
    )


@pytest.fixture(autouse=True)
def cache(tmp_path):
    use_private_cache(tmp_path / "cache")


def get_error(capsys) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_nothing_is_downloaded_without_the_key_or_to_a_bucket(tmp_path, capsys):
    assert ask(tmp_path) == 2
    assert "data.root" in get_error(capsys)
    assert ask(tmp_path, "--data.allow_download", "--data.root=memory://nowhere") == 2
    assert "data.allow_download writes datasets to this machine's disk" in get_error(capsys)
    assert ask(tmp_path, "--data.allow_download", "--data.source=folder") == 2
    assert get_error(capsys).endswith(
        "needs data.source=tfds; set it or remove data.allow_download"
    )
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_a_permitted_run_downloads_its_dataset_once(tmp_path, capsys, monkeypatch):
    (tmp_path / "site" / "of_test").mkdir(parents=True)
    (tmp_path / "site" / "of_test" / "__init__.py").touch()
    (tmp_path / "site" / "of_test" / "digits.py").write_text(_DATASET)
    (tmp_path / "site" / "sitecustomize.py").write_text(_SITE)
    paths = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", paths)
    assert ask(tmp_path, "--data.allow_download", "--data.name=digits_of_tset") == 2
    error = get_error(capsys)
    assert "data.allow_download: digits_of_tset was not fetched" in error
    assert "is no dataset of TFDS; did you mean" in error
    assert ask(tmp_path, "--data.allow_download") == 0
    assert "64 examples to train on, 32 to evaluate" in capsys.readouterr().err
    files = sorted((tmp_path / "data" / "digits_of_test" / "1.0.0").iterdir())
    times = [file.stat().st_mtime_ns for file in files]
    assert ask(tmp_path, "--data.allow_download", "--run.run_id=b") == 0
    assert [file.stat().st_mtime_ns for file in files] == times
