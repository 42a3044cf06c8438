"""Stored answers: what is packed is what is replayed, on any number of ranks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from utils.errors import UserError
from utils.teacher_cache import (
    INDICES,
    LOG_PROBS,
    RESIDUAL,
    CacheShape,
    CacheWriter,
    TeacherCache,
    open_cache,
    pack_answers,
    write_manifest,
)

SHAPE = CacheShape(top_k=3, num_classes=7, epochs=2, steps_per_epoch=4, global_batch_size=8)


def create_logits(step: int, shape: CacheShape = SHAPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape.global_batch_size, shape.num_classes, generator=generator) * 3


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
                writer.append(pack_answers(logits[rank * size : (rank + 1) * size], shape))


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
        read = [cache.read(step) for cache in caches]
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
        writer.append(pack_answers(create_logits(step), SHAPE))
    writer.flush()
    assert not writer.is_complete
    assert CacheWriter(folder, SHAPE, 0).steps_done == 2
    with pytest.raises(UserError, match="missing instead of"):
        TeacherCache(folder)
    write_cache(folder)
    for path in (tmp_path / "whole").glob("*.bin"):
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_a_row_costs_what_arithmetic_says():
    assert CacheShape(16, 1000, 1, 1, 1).row_dtype.itemsize == 16 * (2 + 2) + 2
    assert CacheShape(10, 10, 1, 1, 1).row_dtype.itemsize == 10 * (2 + 1) + 2
    assert CacheShape(16, 1000, 1, 1, 1).index_dtype == np.uint16
    assert CacheShape(16, 70_000, 1, 1, 1).index_dtype == np.uint32


def test_a_cache_of_another_stream_or_teacher_is_refused_by_name(tmp_path):
    write_cache(tmp_path)
    config = create_config(tmp_path)
    assert open_cache(config, create_stream(), [], (0, 1)).epochs == 2
    with pytest.raises(UserError, match="made with seed 0, here it is 5"):
        open_cache(config, {**create_stream(), "seed": 5}, [], (0, 1))
    with pytest.raises(UserError, match="made with teachers"):
        open_cache(config, create_stream(), ["other"], (0, 1))


def test_a_run_longer_than_the_cache_stops_or_cycles_as_configured(tmp_path):
    write_cache(tmp_path)
    config = create_config(tmp_path)
    config.train.epochs = 3
    with pytest.raises(UserError, match="holds 2 epochs, the run needs 3"):
        open_cache(config, create_stream(), [], (0, 1))
    config.distill.cache_end = "cycle"
    cache = open_cache(config, create_stream(), [], (0, 1))
    per_cycle = SHAPE.epochs * SHAPE.steps_per_epoch
    assert torch.equal(cache.read(per_cycle + 1)[LOG_PROBS], cache.read(1)[LOG_PROBS])


def test_a_truncated_file_and_a_foreign_format_are_refused(tmp_path):
    write_cache(tmp_path)
    victim = next(tmp_path.glob("*.bin"))
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(UserError, match="bytes instead of"):
        TeacherCache(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "format_version": 9}))
    with pytest.raises(UserError, match="has format 9"):
        TeacherCache(tmp_path)
