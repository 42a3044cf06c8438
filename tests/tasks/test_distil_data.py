"""Images without labels, or with ignored ones: the data of a label-free run."""

from __future__ import annotations

import json

import numpy as np
import pytest

import main
from datasets import describe_dataset
from job.check import check
from tests.support.input_data import create_section, open_loader, use_private_cache
from tests.support.shard_sets import get_digits, write_digit_arrow, write_tar
from utils.config.load import change, load_config
from utils.errors import UserError

PP = "decode(channels=1)|resize(8)|value_range(-1, 1)"
SETS = [
    {
        "name": "digits",
        "source": "tfds",
        "dataset": "digits",
        "bank": "train[:60]",
        "split": "validation[:40]",
    }
]


@pytest.fixture(scope="module")
def bare_tars(tmp_path_factory):
    """120 and 40 digits in tars that hold no labels at all."""
    use_private_cache(tmp_path_factory.mktemp("cache"))
    root = tmp_path_factory.mktemp("bare")
    for name, digits in (("train", get_digits(0, 120)), ("val", get_digits(200, 40))):
        write_tar(root / f"{name}-000.tar", [(f"{one.name}.png", one.image) for one in digits])
    return root


def test_a_run_learns_from_images_without_labels(bare_tars, teacher_run, digits_root, tmp_path):
    """And is probed on a set that has some, which lies elsewhere."""
    evals = [{**SETS[0], "root": str(digits_root)}]
    flags = [
        "--config=configs/kd/digits_labelfree.yaml",
        f"--data.root={bare_tars}",
        "--data.source=webdataset",
        "--data.name=",
        "--data.eval_split=val",
        f"--teacher_path={teacher_run}",
        f"--run.output_dir={tmp_path}",
        "--run.run_id=a",
        "--run.tensorboard=false",
        "--data.global_batch_size=40",
        "--train.epochs=1",
        "--optim.warmup_epochs=0",
        "--runtime.graph_budget=100000",
    ]
    with pytest.raises(UserError, match="holds no label cls"):
        check(load_config(flags))
    flags += ["--data.label_key=", f"--data.evals={json.dumps(evals)}"]
    assert main.main(flags) == 0
    final = json.loads((tmp_path / "digits_labelfree" / "a" / "run.json").read_text())["final"]
    assert final["eval_examples"] == 40 and final["eval_digits/linear"] > 20
    config = change(load_config(flags), data={"evals": ()}, distill={"losses": [], "loss": "kd"})
    with pytest.raises(UserError, match=r"train\.task=classify needs data\.label_key"):
        check(change(config, train={"task": "classify"}))


@pytest.mark.parametrize("kind", ["tfds", "hf"])
def test_existing_labels_are_ignored(kind, digits_root, tmp_path):
    place = digits_root if kind == "tfds" else write_digit_arrow(tmp_path / "arrow")
    name = {"tfds": {"name": "digits"}, "hf": {"name": "", "eval_split": "val"}}[kind]
    sections = [
        create_section(place, source=kind, train_pp=PP, eval_pp=PP, label_key=key, **name)
        for key in ("label", "")
    ]
    assert describe_dataset(sections[1]).examples["train"].num_classes == 1
    loaders = [open_loader(section) for section in sections]
    known, bare = (next(iter(loader.batches())) for loader in loaders)
    assert np.array_equal(known.images.numpy(), bare.images.numpy())
    assert known.labels.any() and not bare.labels.any()
    for loader in loaders:
        loader.close()
