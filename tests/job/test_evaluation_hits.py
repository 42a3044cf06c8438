"""Which examples were classified correctly, at no extra graph, pass or host read."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import main as program
from engine import evaluate
from job.correctness import Correctness
from store.record.hits import HITS_FILE, parse_hits
from tests.support.tiny_parts import (
    DEVICE_CASES,
    RUNTIMES,
    SYNTHETIC,
    TinyTask,
    create_batch,
    create_cpu_runtime,
    create_vit,
    predict,
)


def create_split() -> list:
    """40 examples in 3 batches, dealt out of order, the last one padded."""
    batches = [create_batch(16, seed, valid) for seed, valid in ((0, 16), (1, 16), (2, 8))]
    order = torch.from_numpy(np.random.default_rng(0).permutation(40))
    starts = (0, 16, 32)
    return [
        replace(
            batch,
            indices=torch.where(
                batch.mask,
                order[start : start + 16]
                if start < 32
                else torch.cat([order[32:], torch.full((8,), -1)]),
                -1,
            ),
        )
        for batch, start in zip(batches, starts, strict=True)
    ]


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_hit_bits_follow_the_split_and_add_up_to_the_counts(device):
    runtime, task, split = RUNTIMES[device](), TinyTask(), create_split()
    model = runtime.prepare(create_vit())
    before = runtime.counters()
    plain = evaluate(model, iter(split), task, runtime)
    first = runtime.counters()
    answers = Correctness(task, runtime, "digits")
    evaluation = answers.evaluate(model, iter(split))
    hits = answers.gather(7)
    second = runtime.counters()
    assert evaluation == plain
    assert (hits.step, hits.examples) == (7, 40)
    assert 100.0 * hits.count() * (1.0 / 40) == evaluation.metrics["top1"]
    assert second["host_reads"] - first["host_reads"] == 0
    # One graph each, or none where a test before has compiled it.
    assert first["graphs"] - before["graphs"] <= 1
    assert second["graphs"] - first["graphs"] <= 1
    # By hand.
    cpu_model = create_vit()
    expected = np.zeros(40, bool)
    with torch.no_grad():
        for batch in split:
            right = predict(cpu_model.eval(), batch).argmax(1) == batch.labels
            expected[batch.indices[batch.mask].numpy()] = right[batch.mask].numpy()
    assert hits.bits == np.packbits(expected).tobytes()
    # Once both are compiled, neither compiles again.
    again = Correctness(task, runtime, "digits")
    again.evaluate(model, iter(split))
    assert again.gather(7) == hits
    assert runtime.counters()["graphs"] == second["graphs"]


def test_other_examples_have_another_hash():
    runtime, task, model = create_cpu_runtime(), TinyTask(), create_vit()

    def hash_of(split: list, *identity: str) -> str:
        answers = Correctness(task, runtime, *identity)
        answers.evaluate(model, iter(split))
        return answers.gather(0).ids_sha256

    split = create_split()
    same = hash_of(split, "digits")
    assert hash_of(split[::-1], "digits") == same
    assert hash_of(split[:2], "digits") != same and hash_of(split, "mnist") != same
    labels = [replace(one, labels=(one.labels + 1) % 10) for one in split]
    assert hash_of(labels, "digits") != same


def test_a_task_without_correctness_keeps_no_hits():
    class Unmarked(TinyTask):
        def count_with_correctness(self, model, batch):
            return self.count(model, batch), None

    runtime = create_cpu_runtime()
    answers = Correctness(Unmarked(), runtime)
    answers.evaluate(create_vit(), iter(create_split()))
    assert answers.gather(0) is None


def test_a_run_keeps_hits_and_a_rolled_back_one_reproduces_them(tmp_path):
    flags = (
        *SYNTHETIC,
        "--config=configs/smoke.yaml",
        "--runtime.device=cpu",
        "--train.steps=18",
        "--train.checkpoint_every_steps=6",
        "--train.eval_every_epochs=1",
        "--run.run_id=a",
        f"--run.output_dir={tmp_path}",
        "--train.keep_checkpoints=9",
    )
    assert program.main([*flags]) == 0
    folder = tmp_path / "tiny" / "a"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    top1 = {line["step"]: line["top1"] for line in lines if line["kind"] == "eval"}
    assert sorted(top1) == [6, 12, 18]
    first = (folder / HITS_FILE).read_bytes()
    found = parse_hits(first)
    assert found["last"].step == 18
    for one in found.values():
        assert 100.0 * one.count() * (1.0 / one.examples) == top1[one.step]
    named = f"--run.resume={folder}/checkpoints/step_00000006"
    assert program.main([*flags, named]) == 0
    # Done again, bit for bit.
    assert (folder / HITS_FILE).read_bytes() == first
