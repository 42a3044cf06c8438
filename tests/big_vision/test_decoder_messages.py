"""libjpeg's messages on stderr do not hide the error line that names the file."""

from __future__ import annotations

import os

import numpy as np

from big_vision.input.reader import drop_decoder_messages
from tests.support.input_data import create_section, open_loader
from tests.support.shard_sets import encode, get_photographs


def test_a_broken_jpeg_is_explained_without_libjpegs_lines(tmp_path, capfd):
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)
    whole, photograph = encode(noise, "JPEG"), get_photographs()[0].image
    broken = {
        "dog": whole[:100],
        "emu": photograph[:1000],
        "fox": photograph[: len(photograph) // 2],
    }
    for name, image in {"cat": whole, **broken}.items():
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "0.jpg").write_bytes(image)
    data = create_section(
        tmp_path, source="folder", name="", eval_split="train", global_batch_size=1, skip_corrupt=3
    )
    loader = open_loader(data, "eval")
    capfd.readouterr()
    for name, reason in map(loader.explain, range(4)):
        assert f"{name} cannot be read (" in reason
    assert capfd.readouterr().err == ""


def test_other_output_on_stderr_is_kept(capfd):
    with drop_decoder_messages(), drop_decoder_messages():
        os.write(2, b"one\nImproper call to JPEG library in state 201\nPremature end\n")
    assert capfd.readouterr().err == "one\nPremature end\n"
