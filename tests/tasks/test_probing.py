"""Label-free runs that evaluate their features by probes on labelled sets."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import main
from datasets import create_loader
from engine import sum_batches
from job.check import check
from models.trained import open_trained
from models.transforms import to_pixels
from store.record.history import read_metrics
from store.record.runs import Run
from tasks.evaluation.probes import Features, evaluate_least_squares, gather_features
from tests.support.tiny_parts import create_cpu_runtime
from tools.evaluate.features import extract_features
from utils.config.load import change, load_config
from utils.errors import UserError

SETS = [
    {"name": "few", "bank": "train[:120]", "split": "validation[:90]"},
    {"name": "late", "bank": "train[:60]", "split": "validation[:30]", "every": 2},
]


def create_flags(digits_root, folder, teacher_run, *flags: str) -> list[str]:
    """8 steps on the digits, an evaluation after each third."""
    return [
        "--config=configs/kd/digits_labelfree.yaml",
        f"--data.root={digits_root}",
        f"--teacher_path={teacher_run}",
        f"--run.output_dir={folder}",
        "--run.experiment=probes",
        "--run.run_id=a",
        "--run.tensorboard=false",
        "--data.train_split=train[:96]",
        "--data.eval_split=validation[:50]",
        "--data.global_batch_size=32",
        "--train.epochs=3",
        "--optim.warmup_epochs=0",
        "--train.log_every_steps=9",
        "--train.eval_every_epochs=1",
        "--runtime.graph_budget=100000",
        f"--data.evals={json.dumps(SETS)}",
        *flags,
    ]


def test_a_run_evaluates_features_by_probes_and_keeps_the_best(digits_root, teacher_run, tmp_path):
    flags = create_flags(digits_root, tmp_path, teacher_run, "--distill.score=few/linear")
    assert main.main(flags) == 0
    folder = tmp_path / "probes" / "a"
    lines = [line for line in read_metrics(folder) if line["kind"] == "eval"]
    names = {"knn", "linear", "fewshot_1", "fewshot_5"}
    for number, line in enumerate(lines, start=1):
        found = {name.partition("/")[2] for name in line if name.startswith("few/")}
        assert found == names
        # The second set is due at every second evaluation, and at the last one.
        assert ("late/knn" in line) == (number > 1)
    final = Run(folder).read()["final"]
    assert final["score"] == lines[-1]["few/linear"]
    best = max(lines, key=lambda line: line["few/linear"])
    chosen = json.loads((folder / "checkpoints" / "best.json").read_text())
    assert chosen["step"] == best["step"]
    # The export alone has the same features, and a reader from outside finds the same in them.
    trained = open_trained(str(folder), "RUN")
    assert trained.num_classes == 0
    data = change(load_config(flags), data={"evals": ()}).data
    runtime = create_cpu_runtime()
    train = extract_features(runtime, trained, data, "train[:120]")
    test = extract_features(runtime, trained, data, "validation[:90]")
    assert evaluate_least_squares(train, test) == pytest.approx(lines[-1]["few/linear"])
    assert set(load_file(folder / "student.safetensors")) == set(trained.model.state_dict())


def test_features_are_gathered_in_the_order_of_the_split(digits_root, teacher_run, tmp_path):
    data = load_config(create_flags(digits_root, tmp_path, teacher_run)).data
    loader = create_loader(data, "eval", seed=0)
    sums = []

    def ask(batch) -> torch.Tensor:
        return to_pixels(batch.images).flatten(1)

    runtime = create_cpu_runtime()
    for _ in range(2):
        found = gather_features(
            ask, loader, lambda count, batches: sum_batches(count, batches, runtime), 10
        )
        sums.append(found.values)
    examples = loader.load_examples(list(range(50)))
    assert np.array_equal(found.values, ask(examples).numpy())
    assert np.array_equal(found.labels, examples.labels.numpy())
    assert np.array_equal(*sums)
    loader.close()


def test_least_squares_with_a_chosen_penalty_finds_linear_classes():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 400)
    clear = np.eye(3)[labels] + rng.normal(0, 0.2, (400, 3))
    values = np.concatenate([clear, rng.normal(0, 1, (400, 20))], axis=1).astype(np.float32)
    train, test = (Features(values[s], labels[s], 3) for s in (slice(0, 300), slice(300, 400)))
    assert evaluate_least_squares(train, test) > 90
    noise = Features(rng.permutation(train.values), train.labels, 3)
    assert evaluate_least_squares(noise, test) < 60


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distill": {"score": "few/top1"}}, "unknown distill.score"),
        ({"distill": {"score": "none/knn"}}, "as few/knn"),
        ({"distill": {"score": "late/knn"}}, "remove `every` from that set"),
        ({"data": {"evals": [{**SETS[0], "bank": "nowhere"}]}}, "data.evals 'few'"),
        ({"data": {"evals": [{**SETS[0], "class_map": "a.json"}]}}, "is not supported for probes"),
        ({"train": {"task": "classify"}}, "evals[0].bank ('train[:120]') needs train.task=distil"),
    ],
)
def test_meaningless_probes_are_refused(digits_root, teacher_run, tmp_path, changes, words):
    config = load_config(create_flags(digits_root, tmp_path, teacher_run))
    with pytest.raises(UserError) as error:
        check(change(config, **changes))
    assert words in str(error.value) and "\n" not in str(error.value)
