"""Arguments of all chunked models: windows that chunks do not divide need padding."""

from __future__ import annotations

import pytest
import torch

import main
from models.table import MODELS
from tests.models.delta.test_delta_training import STUDENTS, create_argv

VOCAB = 11


def create(name: str, **args: object) -> torch.nn.Module:
    model, shape = STUDENTS[name]
    torch.manual_seed(0)
    return MODELS.get(model)(VOCAB, 16, **{**shape, **args}).eval()


@pytest.mark.parametrize("name", STUDENTS)
def test_windows_that_chunks_do_not_divide_are_refused_without_padding(name, tmp_path, capsys):
    flags = ("--model.args.pad=false", "--model.args.chunk=16", "--check")
    size = "20, of 2 updates each" if name == "delta_product" else "20"
    assert main.main(create_argv(tmp_path, name, *flags)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith(
        f"model.args.pad (False): data.sequence_length ({size}) is no multiple of "
        "model.args.chunk (16); change one of them"
    )
    assert main.main(create_argv(tmp_path, name, *flags, "--data.sequence_length=32")) == 0


def test_padding_must_be_true_or_false(tmp_path, capsys):
    argv = create_argv(tmp_path, "qwen3_5", "--model.args.pad=never", "--check")
    assert main.main(argv) == 2
    assert "model.args.pad ('never') must be true or false" in capsys.readouterr().err


@pytest.mark.parametrize("name", STUDENTS)
def test_prompts_may_have_any_length(name):
    """A prompt in two parts that fill no chunk, then single tokens."""
    tokens = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(4))
    model, strict = create(name), create(name, pad=False)
    with torch.no_grad():
        wanted, cache = model(tokens), strict.create_cache()
        parts = [tokens[:, :5], tokens[:, 5:11], tokens[:, 11:12], tokens[:, 12:]]
        found = torch.cat([strict(part, cache) for part in parts], dim=1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=4e-5)
