"""Stored answers: what is packed is what is replayed, on any number of ranks."""

from __future__ import annotations

import json
import tempfile
import uuid
from dataclasses import replace
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import torch

from tasks.teacher_cache import (
    INDICES,
    LOG_PROBS,
    RESIDUAL,
    CacheShape,
    CacheWriter,
    TeacherCache,
    compute_marks,
    open_cache,
    pack_answers,
    write_manifest,
)
from utils.errors import UserError

SHAPE = CacheShape(top_k=3, num_classes=7, epochs=2, steps_per_epoch=4, global_batch_size=8)


def create_logits(step: int, shape: CacheShape = SHAPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape.global_batch_size, shape.num_classes, generator=generator) * 3


def get_examples(epoch: int, step: int, shape: CacheShape = SHAPE) -> torch.Tensor:
    """Indices of a step's examples: a permutation for each epoch."""
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(shape.steps_per_epoch * shape.global_batch_size, generator=generator)
    return order[step * shape.global_batch_size : (step + 1) * shape.global_batch_size]


def create_stream(shape: CacheShape = SHAPE) -> dict:
    return {
        "num_classes": shape.num_classes,
        "global_batch_size": shape.global_batch_size,
        "seed": 0,
    }


def write_cache(folder, shape: CacheShape = SHAPE, writers: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, create_stream(shape), ["abc"], shape, writers)
    size = shape.global_batch_size // writers
    for epoch in range(shape.epochs):
        for rank in range(writers):
            writer = CacheWriter(folder, shape, epoch, (rank, writers))
            for step in range(writer.steps_done, shape.steps_per_epoch):
                logits = create_logits(epoch * shape.steps_per_epoch + step, shape)
                mine = slice(rank * size, (rank + 1) * size)
                rows = pack_answers(logits[mine], shape, get_examples(epoch, step, shape)[mine])
                writer.append(rows)


def create_config(folder, **distill) -> SimpleNamespace:
    keys = {"teacher_cache": str(folder), "cache_end": "stop", **distill}
    train = SimpleNamespace(steps=None, epochs=2)
    return SimpleNamespace(distill=SimpleNamespace(**keys), train=train)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (1, 4), (2, 1), (4, 2), (2, 8)])
def test_answers_come_back_on_any_number_of_ranks(tmp_path, writers, readers):
    write_cache(tmp_path, writers=writers)
    caches = [TeacherCache(tmp_path, (rank, readers)) for rank in range(readers)]
    for step in range(SHAPE.epochs * SHAPE.steps_per_epoch):
        log_probs = torch.log_softmax(create_logits(step), dim=-1)
        best, indices = log_probs.topk(SHAPE.top_k)
        examples = get_examples(*divmod(step, SHAPE.steps_per_epoch)).chunk(readers)
        read = [cache.read(step, mine) for cache, mine in zip(caches, examples, strict=True)]
        assert torch.equal(torch.cat([r[INDICES] for r in read]).long(), indices)
        torch.testing.assert_close(
            torch.cat([r[LOG_PROBS] for r in read]), best, rtol=1e-3, atol=1e-3
        )
        rest = 1 - best.exp().sum(-1)
        torch.testing.assert_close(
            torch.cat([r[RESIDUAL] for r in read]), rest, rtol=5e-3, atol=1e-4
        )


def test_full_width_keeps_no_residual_and_equals_the_teacher_within_float16(tmp_path):
    shape = CacheShape(7, 7, 1, 2, 4)
    write_cache(tmp_path, shape)
    read = TeacherCache(tmp_path).read(1)
    expected = torch.log_softmax(create_logits(1, shape), dim=-1)
    dense = torch.zeros_like(expected).scatter(1, read[INDICES].long(), read[LOG_PROBS])
    assert (dense - expected).abs().max() <= expected.abs().max() * 2**-11
    assert read[RESIDUAL].eq(0).all()


def test_an_interrupted_epoch_is_continued_where_it_stopped(tmp_path):
    write_cache(tmp_path / "whole")
    folder = tmp_path / "torn"
    folder.mkdir()
    write_manifest(folder, create_stream(), ["abc"], SHAPE, 1)
    writer = CacheWriter(folder, SHAPE, 0)
    for step in range(2):
        writer.append(pack_answers(create_logits(step), SHAPE, get_examples(0, step)))
    writer.flush()
    assert not writer.is_complete
    assert CacheWriter(folder, SHAPE, 0).steps_done == 2
    with pytest.raises(UserError, match="missing instead of"):
        TeacherCache(folder)
    write_cache(folder)
    for path in (tmp_path / "whole").glob("*.bin"):
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_a_row_costs_what_arithmetic_says():
    assert CacheShape(16, 1000, 1, 1, 1).row_dtype.itemsize == 16 * (2 + 2) + 2 + 1
    assert CacheShape(10, 10, 1, 1, 1).row_dtype.itemsize == 10 * (2 + 1) + 2 + 1
    assert CacheShape(16, 1000, 1, 1, 1).index_dtype == np.uint16
    assert CacheShape(16, 70_000, 1, 1, 1).index_dtype == np.uint32


def test_a_cache_of_another_stream_or_teacher_is_refused_by_name(tmp_path):
    write_cache(tmp_path)
    section = create_config(tmp_path).distill
    assert open_cache(section, create_stream(), [], (0, 1), 4).epochs == 2
    with pytest.raises(UserError, match="made with seed 0, here it is 5"):
        open_cache(section, {**create_stream(), "seed": 5}, [], (0, 1), 4)
    with pytest.raises(UserError, match="made with teachers"):
        open_cache(section, create_stream(), ["other"], (0, 1), 4)


def test_a_run_longer_than_the_cache_stops_or_cycles_as_configured(tmp_path):
    write_cache(tmp_path)
    section, steps = create_config(tmp_path).distill, 3 * SHAPE.steps_per_epoch
    with pytest.raises(UserError, match="holds 2 epochs, the run needs 3"):
        open_cache(section, create_stream(), [], (0, 1), steps)
    section.cache_end = "cycle"
    cache = open_cache(section, create_stream(), [], (0, 1), steps)
    per_cycle = SHAPE.epochs * SHAPE.steps_per_epoch
    assert torch.equal(cache.read(per_cycle + 1)[LOG_PROBS], cache.read(1)[LOG_PROBS])


def test_a_truncated_file_and_a_foreign_format_are_refused(tmp_path):
    write_cache(tmp_path)
    victim = next(tmp_path.glob("*.bin"))
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(UserError, match="bytes instead of"):
        TeacherCache(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "format_version": 1}))
    with pytest.raises(UserError, match="has format 1, this program reads 2; make it again"):
        TeacherCache(tmp_path)


@pytest.mark.parametrize("readers", [1, 2])
def test_answers_to_other_examples_are_refused_at_their_step(tmp_path, readers):
    write_cache(tmp_path, writers=2)
    cache = TeacherCache(tmp_path, (readers - 1, readers))
    rows = SHAPE.global_batch_size // readers
    cache.read(0, get_examples(0, 0)[-rows:])
    swapped = get_examples(0, 1)[-rows:].clone()
    swapped[:2] = swapped[:2].flip(0)
    with pytest.raises(UserError, match=rf"answers to other examples: 2 of {rows} differ at step"):
        cache.read(1, swapped)
    with pytest.raises(UserError, match="answers to other examples"):
        cache.read(0, get_examples(1, 0)[-rows:])


def test_answers_that_were_made_for_no_example_fit_any(tmp_path):
    write_manifest(tmp_path, create_stream(), ["abc"], replace(SHAPE, epochs=1), 1)
    writer = CacheWriter(tmp_path, SHAPE, 0)
    while not writer.is_complete:
        writer.append(pack_answers(create_logits(0), SHAPE))
    TeacherCache(tmp_path).read(0, torch.arange(8))


def test_neighbouring_examples_have_marks_of_all_values():
    marks = compute_marks(torch.arange(255 * 40))
    counts = np.bincount(marks, minlength=256)
    assert counts[0] == 0
    assert counts[1:].min() > 20
    assert (marks[1:] != marks[:-1]).mean() > 0.99


def test_a_cache_is_replayed_from_behind_a_url_and_leaves_nothing(tmp_path, monkeypatch):
    write_cache(tmp_path / "made", writers=2)
    place = f"memory://{uuid.uuid4().hex}"
    fsspec.filesystem("memory").put(f"{tmp_path / 'made'}/", f"{place}/", recursive=True)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    near, far = TeacherCache(tmp_path / "made", (1, 2)), TeacherCache(place, (1, 2))
    for step in (0, 3, 4, 1):
        for name, value in near.read(step).items():
            assert torch.equal(far.read(step)[name], value)
        # The files of one epoch, of the one process whose rows this rank reads.
        assert len(list(scratch.iterdir())) == 1
    far.close()
    assert not list(scratch.iterdir())
