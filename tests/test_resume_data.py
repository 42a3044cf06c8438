"""A run resumes with the same examples in the same order."""

from __future__ import annotations

import json

import fsspec
import pytest

import main
from tests.support.input_data import get_image, use_private_cache, write_records
from tests.support.tiny_parts import VIT_ARGS

PP = "decode|resize(8)|value_range(-1, 1)"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    use_private_cache(tmp_path_factory.mktemp("cache"))


def train(output_dir, *flags) -> int:
    """A tiny run on real images, with a checkpoint at its end."""
    args = json.dumps({**VIT_ARGS, "in_chans": 3})
    fixed = [
        f"--data.train_pp={PP}",
        f"--data.eval_pp={PP}",
        "--data.global_batch_size=8",
        "--model=vit_tiny_patch16_224",
        "--model.image_size=8",
        f"--model.args={args}",
        "--run.experiment=tiny",
        "--run.run_id=a",
        f"--run.output_dir={output_dir}",
        "--runtime.device=cpu",
        "--run.tensorboard=false",
    ]
    return main.main([*fixed, *flags])


def get_error(capsys) -> str:
    """The one line of a refused run."""
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error: ")]
    return line


def test_an_added_image_is_noticed_on_resume(tmp_path, capsys):
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        for number in range(8):
            image = Image.fromarray(get_image(number))
            image.save(tmp_path / "data" / "train" / name / f"{number}.png")
    flags = ["--data.source=folder", f"--data.root={tmp_path / 'data'}", "--data.eval_split=train"]
    assert train(tmp_path / "runs", *flags, "--train.epochs=1") == 0
    Image.fromarray(get_image(9)).save(tmp_path / "data" / "train" / "cat" / "9.png")
    again = [*flags, "--train.epochs=2", "--resume=auto"]
    capsys.readouterr()
    assert train(tmp_path / "runs", *again) == 2
    line = get_error(capsys)
    assert "data.train_split: examples was 16, is 17" in line
    assert train(tmp_path / "runs", *again, '--run.allow_changes=["data.train_split"]') == 0


def test_an_order_that_depends_on_the_root_stays_fixed_within_an_epoch(tmp_path, capsys):
    write_records(tmp_path)
    flags = ["--data.name=records", "--data.eval_split=validation[:8]", "--train.steps=3"]
    assert train(tmp_path / "runs", *flags, f"--data.root={tmp_path}") == 0
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "records"), "/moved/records", recursive=True)
    again = [*flags, "--train.steps=6", "--resume=auto"]
    capsys.readouterr()
    assert train(tmp_path / "runs", *again, "--data.root=memory://moved") == 2
    line = get_error(capsys)
    assert 'data.order: order was "exact", is "sharded"' in line
    assert "examples of this epoch would be repeated or missing" in line
    # Moved to another disk it is the same data in the same order.
    (tmp_path / "moved").mkdir()
    (tmp_path / "records").rename(tmp_path / "moved" / "records")
    assert train(tmp_path / "runs", *again, f"--data.root={tmp_path / 'moved'}") == 0
