"""Stored outputs: packed and replayed alike on any number of ranks."""

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

from losses.base import compute_dense_log_probs
from tasks.teachers.cache.manifest import write_manifest
from tasks.teachers.cache.reader import (
    INDICES,
    LOG_PROBS,
    RESIDUAL,
    STORED_FEATURES,
    TeacherCache,
    combine_stored,
    get_stored_answers,
    get_stored_features,
    open_cache,
)
from tasks.teachers.cache.rows import (
    CLASSES,
    FEATURES,
    CacheShape,
    Column,
    compute_marks,
    condense_answers,
    measure_errors,
    pack_rows,
)
from tasks.teachers.cache.writer import CacheWriter
from utils.errors import UserError


def create_shape(top_k: int, classes: int, *sizes: int) -> CacheShape:
    return CacheShape((Column("abc", CLASSES, classes, top_k),), *sizes)


SHAPE = create_shape(3, 7, 2, 4, 8)


def create_logits(step: int, shape: CacheShape = SHAPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape.global_batch_size, shape.columns[0].width, generator=generator) * 3


def get_examples(epoch: int, step: int, shape: CacheShape = SHAPE) -> torch.Tensor:
    """Indices of a step's examples: a permutation for each epoch."""
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(shape.steps_per_epoch * shape.global_batch_size, generator=generator)
    return order[step * shape.global_batch_size : (step + 1) * shape.global_batch_size]


def pack_outputs(
    logits: torch.Tensor, shape: CacheShape, examples: torch.Tensor | None = None
) -> np.ndarray:
    """Rows [B] of a cache of one column, from its teacher's logits [B, K] on the host."""
    (column,) = shape.columns
    return pack_rows([condense_answers(logits.double(), column.top_k)], shape, examples)


def create_stream(shape: CacheShape = SHAPE) -> dict:
    return {
        "num_classes": shape.columns[0].width,
        "global_batch_size": shape.global_batch_size,
        "seed": 0,
    }


def write_cache(folder, shape: CacheShape = SHAPE, writers: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, create_stream(shape), shape, writers)
    size = shape.global_batch_size // writers
    for epoch in range(shape.epochs):
        for rank in range(writers):
            writer = CacheWriter(folder, shape, epoch, (rank, writers))
            for step in range(writer.steps_done, shape.steps_per_epoch):
                logits = create_logits(epoch * shape.steps_per_epoch + step, shape)
                mine = slice(rank * size, (rank + 1) * size)
                rows = pack_outputs(logits[mine], shape, get_examples(epoch, step, shape)[mine])
                writer.append(rows)


def create_config(folder, **distill) -> SimpleNamespace:
    keys = {"teacher_cache": str(folder), "cache_end": "stop", **distill}
    train = SimpleNamespace(steps=None, epochs=2)
    return SimpleNamespace(distill=SimpleNamespace(**keys), train=train)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (1, 4), (2, 1), (4, 2), (2, 8)])
def test_stored_outputs_are_read_back_on_any_number_of_ranks(tmp_path, writers, readers):
    write_cache(tmp_path, writers=writers)
    caches = [TeacherCache(tmp_path, (rank, readers)) for rank in range(readers)]
    for step in range(SHAPE.epochs * SHAPE.steps_per_epoch):
        log_probs = torch.log_softmax(create_logits(step), dim=-1)
        best, indices = log_probs.topk(SHAPE.columns[0].top_k)
        examples = get_examples(*divmod(step, SHAPE.steps_per_epoch)).chunk(readers)
        read = [cache.read(step, mine) for cache, mine in zip(caches, examples, strict=True)]
        assert torch.equal(torch.cat([r[f"{INDICES}0"] for r in read]).long(), indices)
        torch.testing.assert_close(
            torch.cat([r[f"{LOG_PROBS}0"] for r in read]), best, rtol=1e-3, atol=1e-3
        )
        rest = 1 - best.exp().sum(-1)
        torch.testing.assert_close(
            torch.cat([r[f"{RESIDUAL}0"] for r in read]), rest, rtol=5e-3, atol=1e-4
        )


def test_full_width_keeps_no_residual_and_equals_the_teacher_within_float16(tmp_path):
    shape = create_shape(7, 7, 1, 2, 4)
    write_cache(tmp_path, shape)
    read = TeacherCache(tmp_path).read(1)
    expected = torch.log_softmax(create_logits(1, shape), dim=-1)
    dense = torch.zeros_like(expected).scatter(1, read[f"{INDICES}0"].long(), read[f"{LOG_PROBS}0"])
    assert (dense - expected).abs().max() <= expected.abs().max() * 2**-11
    assert read[f"{RESIDUAL}0"].eq(0).all()


def test_an_interrupted_epoch_continues_where_it_stopped(tmp_path):
    write_cache(tmp_path / "whole")
    folder = tmp_path / "torn"
    folder.mkdir()
    write_manifest(folder, create_stream(), SHAPE, 1)
    writer = CacheWriter(folder, SHAPE, 0)
    for step in range(2):
        writer.append(pack_outputs(create_logits(step), SHAPE, get_examples(0, step)))
    writer.flush()
    assert not writer.is_complete
    assert CacheWriter(folder, SHAPE, 0).steps_done == 2
    with pytest.raises(UserError, match="missing instead of"):
        TeacherCache(folder)
    write_cache(folder)
    for path in (tmp_path / "whole").glob("*.bin"):
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_a_rows_size_equals_its_arithmetic():
    assert create_shape(16, 1000, 1, 1, 1).row_dtype.itemsize == 16 * (2 + 2) + 2 + 1
    assert create_shape(10, 10, 1, 1, 1).row_dtype.itemsize == 10 * (2 + 1) + 2 + 1
    assert Column("abc", CLASSES, 1000, 16).index_dtype == np.uint16
    assert Column("abc", CLASSES, 70_000, 16).index_dtype == np.uint32
    features = Column("abc", FEATURES, 768)
    for dtype, size in (("float16", 1536), ("bfloat16", 1536), ("int8", 768 + 8)):
        shape = CacheShape((replace(features, dtype=dtype),), 1, 1, 1)
        assert shape.row_dtype.itemsize == size + 1


def test_a_cache_of_another_stream_or_teacher_is_refused_by_name(tmp_path):
    write_cache(tmp_path)
    section = create_config(tmp_path).distill
    assert open_cache(section, create_stream(), [], (0, 1), 4).epochs == 2
    with pytest.raises(UserError, match="made with seed 0, here it is 5"):
        open_cache(section, {**create_stream(), "seed": 5}, [], (0, 1), 4)
    with pytest.raises(UserError, match="made with teachers"):
        open_cache(section, create_stream(), ["other"], (0, 1), 4)
    # Neutral values are left out on either side.
    with pytest.raises(UserError, match="made with mix_mode None, here it is 'batch'"):
        open_cache(section, {**create_stream(), "mix_mode": "batch"}, [], (0, 1), 4)
    (tmp_path / "batch").mkdir()
    write_manifest(tmp_path / "batch", {**create_stream(), "mix_mode": "batch"}, SHAPE, 1)
    section = create_config(tmp_path / "batch").distill
    with pytest.raises(UserError, match="made with mix_mode 'batch', here it is None"):
        open_cache(section, create_stream(), [], (0, 1), 4)


def test_a_run_longer_than_the_cache_stops_or_cycles_as_configured(tmp_path):
    write_cache(tmp_path)
    section, steps = create_config(tmp_path).distill, 3 * SHAPE.steps_per_epoch
    with pytest.raises(UserError, match="holds 2 epochs, the run needs 3"):
        open_cache(section, create_stream(), [], (0, 1), steps)
    section.cache_end = "cycle"
    cache = open_cache(section, create_stream(), [], (0, 1), steps)
    per_cycle = SHAPE.epochs * SHAPE.steps_per_epoch
    assert torch.equal(cache.read(per_cycle + 1)[f"{LOG_PROBS}0"], cache.read(1)[f"{LOG_PROBS}0"])


def test_a_truncated_file_and_a_foreign_format_are_refused(tmp_path):
    write_cache(tmp_path)
    victim = next(tmp_path.glob("*.bin"))
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(UserError, match="bytes instead of"):
        TeacherCache(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "format_version": 1}))
    with pytest.raises(UserError, match="has format 1, this program reads 2 and 3; make it again"):
        TeacherCache(tmp_path)


@pytest.mark.parametrize("readers", [1, 2])
def test_outputs_for_other_examples_are_refused_at_their_step(tmp_path, readers):
    write_cache(tmp_path, writers=2)
    cache = TeacherCache(tmp_path, (readers - 1, readers))
    rows = SHAPE.global_batch_size // readers
    cache.read(0, get_examples(0, 0)[-rows:])
    swapped = get_examples(0, 1)[-rows:].clone()
    swapped[:2] = swapped[:2].flip(0)
    with pytest.raises(UserError, match=rf"outputs for other examples: 2 of {rows} differ at step"):
        cache.read(1, swapped)
    with pytest.raises(UserError, match="outputs for other examples"):
        cache.read(0, get_examples(1, 0)[-rows:])


def test_outputs_stored_without_examples_fit_any(tmp_path):
    write_manifest(tmp_path, create_stream(), replace(SHAPE, epochs=1), 1)
    writer = CacheWriter(tmp_path, SHAPE, 0)
    while not writer.is_complete:
        writer.append(pack_outputs(create_logits(0), SHAPE))
    TeacherCache(tmp_path).read(0, torch.arange(8))


def test_checksums_of_neighbouring_examples_take_all_values():
    marks = compute_marks(torch.arange(255 * 40))
    counts = np.bincount(marks, minlength=256)
    assert counts[0] == 0
    assert counts[1:].min() > 20
    assert (marks[1:] != marks[:-1]).mean() > 0.99


def test_a_cache_at_a_url_is_replayed_without_leftovers(tmp_path, monkeypatch):
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


def create_outputs(shape: CacheShape, step: int) -> list[torch.Tensor]:
    """What a task gives for each column of a shape."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for column in shape.columns:
        places = (column.places,) if column.places else ()
        size = (shape.global_batch_size, *places, column.width)
        numbers = torch.randn(size, generator=generator) * 3
        found.append(condense_answers(numbers, column.top_k) if column.top_k else numbers)
    return found


def write_outputs(folder, shape: CacheShape) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, create_stream(shape), shape, 1)
    for epoch in range(shape.epochs):
        writer = CacheWriter(folder, shape, epoch)
        for step in range(writer.steps_done, shape.steps_per_epoch):
            answers = create_outputs(shape, epoch * shape.steps_per_epoch + step)
            rows = pack_rows(answers, shape, get_examples(epoch, step, shape))
            writer.append(rows, measure_errors(rows, answers, shape))


def create_columns(dtype: str = "float16") -> tuple[Column, ...]:
    return (
        Column("a", CLASSES, 7, 3, dtype=dtype, weight=1.0),
        Column("b", FEATURES, 12, part="pooled", dtype=dtype),
        Column("b", FEATURES, 5, places=4, part="patches", dtype=dtype),
        Column("c", CLASSES, 7, 7, dtype=dtype, weight=3.0),
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_all_kinds_of_outputs_are_stored_as_exactly_as_their_type(tmp_path, dtype):
    shape = CacheShape(create_columns(dtype), 1, 2, 8)
    write_outputs(tmp_path, shape)
    read = TeacherCache(tmp_path).read(1, get_examples(0, 1, shape))
    answers = create_outputs(shape, 1)
    names = [f"{LOG_PROBS}0", f"{STORED_FEATURES}1", f"{STORED_FEATURES}2", f"{LOG_PROBS}3"]
    greatest = json.loads(next(tmp_path.glob("epoch_*.json")).read_text())["errors"]
    for name, column, answer, noted in zip(names, shape.columns, answers, greatest, strict=True):
        exact = answer[..., : column.top_k] if column.top_k else answer
        gap = (read[name] - exact).abs()
        spread = exact.amax(-1, keepdim=True) - exact.amin(-1, keepdim=True)
        # Half of the last bit that is kept: of a number, or of 255 steps between two of them.
        bits = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
        allowed = exact.abs() * bits[dtype] if dtype in bits else spread / 510
        assert (gap <= allowed + 1e-5).all()
        assert 0 < float(gap.max()) <= noted[0] + 1e-12
        assert noted[2] == 2 * exact.numel()
    assert torch.equal(read[f"{INDICES}0"].float(), answers[0][:, 3:6])


def test_a_run_reads_its_named_teachers_in_its_own_order(tmp_path):
    shape = CacheShape(create_columns(), 1, 2, 8)
    write_outputs(tmp_path, shape)
    chosen = TeacherCache(tmp_path, teachers=["c", "b", "probs 1:2"])
    assert [column.teacher for column in chosen.columns] == ["c", "b", "b"]
    read, whole = chosen.read(0), TeacherCache(tmp_path).read(0)
    assert torch.equal(read[f"{LOG_PROBS}0"], whole[f"{LOG_PROBS}3"])
    assert torch.equal(read[f"{STORED_FEATURES}2"], whole[f"{STORED_FEATURES}2"])
    batch = SimpleNamespace(draws=whole)
    first, last = get_stored_answers(batch)
    assert torch.equal(last.log_probs, whole[f"{LOG_PROBS}3"])
    assert [tuple(one.shape) for one in get_stored_features(batch)] == [(8, 12), (8, 4, 5)]
    with pytest.raises(UserError, match=r"made with teachers \['a', 'b', 'c'\], here it is \['d'"):
        TeacherCache(tmp_path, teachers=["d"])
    (mean,), nothing = combine_stored([first, last], 7, [1.0, 3.0], "probs")
    assert nothing is None
    dense = [compute_dense_log_probs(one, 7) for one in (first, last)]
    expected = 0.25 * dense[0].softmax(-1) + 0.75 * dense[1].softmax(-1)
    torch.testing.assert_close(mean.softmax(-1), expected)
    separate, _ = combine_stored([first, last], 7, [1.0, 3.0], "separate")
    assert len(separate) == 2


@pytest.mark.parametrize(
    ("value", "dtype", "rule"),
    [(float("nan"), "int8", "not finite"), (1e6, "float16", "does not hold outputs up to 1e.06")],
)
def test_outputs_that_cannot_be_stored_are_refused(value, dtype, rule):
    shape = CacheShape((Column("a", FEATURES, 2, dtype=dtype),), 1, 1, 1)
    with pytest.raises(UserError, match=rule):
        pack_rows([torch.tensor([[value, 0.0]])], shape)


def test_a_cache_of_format_2_is_read_and_continued(tmp_path):
    """Its rows are those of one column of classes; of several teachers it holds one answer."""
    write_cache(tmp_path)
    expected = TeacherCache(tmp_path).read(5)
    old = json.loads((tmp_path / "manifest.json").read_text())
    for name in ("columns", "is_reused"):
        old.pop(name)
    (tmp_path / "manifest.json").write_text(
        json.dumps({**old, "format_version": 2, "top_k": 3, "teachers": ["x", "y", "probs"]})
    )
    for path in tmp_path.glob("epoch_*.json"):
        path.unlink()
    section = create_config(tmp_path).distill
    cache = open_cache(section, create_stream(), ["x", "y", "probs"], (0, 1), 8)
    for name, value in cache.read(5).items():
        assert torch.equal(value, expected[name])
    with pytest.raises(UserError, match="made with teachers"):
        open_cache(section, create_stream(), ["x", "y", "logits"], (0, 1), 8)
    shape = replace(SHAPE, columns=(replace(SHAPE.columns[0], teacher="x+y+probs"),), epochs=3)
    write_manifest(tmp_path, create_stream(), shape, 1)
    for epoch in range(3):
        writer = CacheWriter(tmp_path, shape, epoch)
        while not writer.is_complete:
            writer.append(pack_outputs(create_logits(0), shape))
    assert len(list(tmp_path.glob("epoch_*.json"))) == 3
    assert TeacherCache(tmp_path).epochs == 3
