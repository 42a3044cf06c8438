"""Bits a byte of simple models and packers, on texts whose figures are known."""

from __future__ import annotations

import json

import numpy as np
import pytest

from proofs.text_baselines import main, measure_bigram, measure_unigram
from tools.prepare_dataset.__main__ import main as prepare


def test_a_cyclic_text_costs_unigrams_its_entropy_and_bigrams_nothing():
    text = np.tile([0, 1, 2], 100_000)
    assert measure_unigram(text, text, 3) / len(text) == pytest.approx(np.log2(3), rel=1e-6)
    assert measure_bigram(text, text, 3) / len(text) == pytest.approx(0.0, abs=1e-3)


def test_noise_costs_every_baseline_its_entropy(tmp_path, capsys):
    generator = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefgh", np.uint8)
    (tmp_path / "files").mkdir()
    for number in range(12):
        text = letters[generator.integers(0, 8, 20_000)].tobytes()
        (tmp_path / "files" / f"{number}.txt").write_bytes(text)
    assert prepare(["text", "--from", str(tmp_path / "files"), "--out", str(tmp_path)]) == 0
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"final": {"test_bits_per_byte": 2.5}}))
    capsys.readouterr()
    assert main([f"file://{tmp_path}/text_byte", "--run", str(run)]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    found = {row.split("|")[1].strip(): float(row.split("|")[2]) for row in rows}
    assert head == "| model | bits a byte |"
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for name in ("unigram", "bigram"):
        assert found[name] == pytest.approx(3.0, abs=0.02)
    for name in ("gzip -9", "xz -9"):
        assert 3.0 < found[name] < 4.0
    assert found[str(run)] == 2.5
    assert main([str(tmp_path / "text_byte"), "--run", str(run), "--split=validation"]) == 2
    assert "has no eval_bits_per_byte" in capsys.readouterr().err
    assert main(["memory://text_byte"]) == 2
    assert "DATA ('memory://text_byte') is a URL, but a local path" in capsys.readouterr().err
