"""A run on stored logits equals the run with the live teacher."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import main
from datasets import describe_dataset
from job.build import build_parts
from job.check import check
from job.lineage import find_lineage
from job.stream import iterate_batches
from store.record.history import read_metrics
from tasks.teachers.cache.manifest import read_manifest, read_shape
from tasks.teachers.cache.reader import TeacherCache
from tests.support.input_data import create_section
from tools.cache import writing
from tools.cache.__main__ import main as run_cache
from tools.cache_teacher import main as main_of_tool
from utils.config.load import load_config
from utils.errors import UserError
from utils.programs import get_run_flags
from utils.runtime.cpu import CpuRuntime
from utils.storage.local import compute_crc32c
from utils.storage.places import open_folder

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 2


@pytest.fixture(scope="module")
def flags(digits_root, teacher_run) -> list[str]:
    return [
        "--config",
        str(ROOT / "configs/digits_kd.yaml"),
        f"--data.root={digits_root}",
        f"--teacher_path={teacher_run}",
        "--runtime.device=cpu",
        "--mixup=0.5",
        "--cutmix=0.5",
        "--data.random_erasing=0.25",
        f"--epochs={EPOCHS}",
        "--warmup_epochs=1",
    ]


def parse(words) -> Namespace:
    return run_cache.parse(["write", *words])


def store(flags, folder, *more) -> int:
    return main_of_tool([*flags, "--out", str(folder), *more])


def train(flags, tmp_path, name, *more) -> list[dict]:
    code = main.main(
        [
            *flags,
            f"--run.output_dir={tmp_path}",
            "--run.experiment=e",
            f"--run.run_id={name}",
            "--train.log_every_steps=1",
            "--run.tensorboard=false",
            *more,
        ]
    )
    assert code == 0
    return [line for line in read_metrics(tmp_path / "e" / name) if line["kind"] == "train"]


def test_full_width_logits_train_like_the_live_teacher(flags, tmp_path):
    assert store(flags, tmp_path / "cache", "--top-k", "10") == 0
    live = train(flags, tmp_path, "live")
    stored = train(flags, tmp_path, "stored", f"--distill.teacher_cache={tmp_path / 'cache'}")
    assert len(live) == len(stored) == EPOCHS * 18
    for step, (a, b) in enumerate(zip(live, stored, strict=True)):
        # The storage's rounding is all that differs at first; AdamW lets it grow.
        rel = 1e-3 if step < 10 else 1e-2
        assert b["loss/kd"] == pytest.approx(a["loss/kd"], rel=rel)
        assert b["loss/task"] == pytest.approx(a["loss/task"], rel=rel)
    left = load_file(tmp_path / "e/live/student.safetensors")
    right = load_file(tmp_path / "e/stored/student.safetensors")
    gap = sum(float((left[name] - right[name]).square().sum()) for name in left)
    size = sum(float(value.square().sum()) for value in left.values())
    assert gap < 1e-3 * size


@pytest.mark.slow
def test_a_narrow_cache_differs_by_no_more_than_its_residual_allows(flags, tmp_path):
    """At step 0 both students are equal, so the loss differs by the teacher's answer alone.

    With T = 1 the student's log-probabilities lie between their minimum and 0, so moving a mass r
    among the classes that are not stored changes the cross-entropy by at most r * |minimum|, and
    the KL by that and by the change of the entropy of that mass, at most r * log(K - k).
    """
    flat = [*flags, "--kd_temperature=1"]
    assert store(flat, tmp_path / "cache", "--top-k", "4") == 0
    live = train(flat, tmp_path, "live", "--train.steps=1", "--optim.warmup_steps=0")
    stored = train(
        flat,
        tmp_path,
        "stored",
        "--train.steps=1",
        "--optim.warmup_steps=0",
        f"--distill.teacher_cache={tmp_path / 'cache'}",
    )
    rows = read_rows(tmp_path / "cache")[:64]
    rest = float(np.exp(rows["rest0"].astype(np.float64)).mean())
    # A fresh student's log-probabilities lie within 2 of log(1/10).
    allowed = rest * (np.log(10) + 2 + np.log(10 - 4)) + 1e-3
    assert 0 < abs(stored[0]["loss/kd"] - live[0]["loss/kd"]) <= allowed


def read_rows(folder: Path) -> np.ndarray:
    shape = read_shape(read_manifest(folder))
    return np.fromfile(next(iter(sorted(folder.glob("*.bin")))), shape.row_dtype)


def test_two_processes_store_the_same_as_one(flags, tmp_path):
    """Each of two input processes writes its block of every global batch."""
    assert store(flags, tmp_path / "one", "--epochs", "1") == 0
    options = parse([*flags, "--out", str(tmp_path / "two"), "--epochs", "1"])
    job = check(writing.without_cache(load_config(get_run_flags(options))))
    shape = writing.get_shape(options, job)
    for rank in range(2):
        runtime = CpuRuntime(job.config.runtime)
        runtime.ranks.index, runtime.ranks.size = rank, 2
        writing.store(runtime, job, writing.CacheTarget(tmp_path / "two", shape))
    one, two = TeacherCache(tmp_path / "one"), TeacherCache(tmp_path / "two")
    for step in range(18):
        left, right = one.read(step), two.read(step)
        assert (left["cache_indices0"] == right["cache_indices0"]).float().mean() > 0.99
        assert np.allclose(left["cache_log_probs0"], right["cache_log_probs0"], atol=2e-2)


@pytest.mark.slow
def test_an_interrupted_cache_on_a_bucket_is_continued(flags, tmp_path, monkeypatch):
    """By another machine with its whole files, by the same one with every row."""
    assert store(flags, tmp_path / "here", "--top-k", "4") == 0
    place = f"memory://answers/{tmp_path.name}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    assert store(flags, place, "--top-k", "4", "--part", "0/2") == 0
    asked, store_epoch = [], writing.store_epoch

    def note(*arguments) -> None:
        asked.append((arguments[4], arguments[2].steps_done))
        if len(asked) == 1:
            monkeypatch.setattr(writing.CacheWriter, "is_complete", property(stop_at_ten))
        store_epoch(*arguments)

    def stop_at_ten(writer) -> bool:
        if writer.steps_done == 10:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(writing, "store_epoch", note)
    is_complete = writing.CacheWriter.is_complete
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    assert store(flags, place, "--top-k", "4") != 0
    monkeypatch.setattr(writing.CacheWriter, "is_complete", is_complete)
    assert store(flags, place, "--top-k", "4") == 0
    assert asked == [(1, 0), (1, 10)]
    folder = open_folder(place)
    for path in (tmp_path / "here").glob("*.bin"):
        assert folder.get_checksum(path.name) == compute_crc32c(path)
    assert {path.name for path in (tmp_path / "here").iterdir()} == set(folder.list_names())
    assert run_cache(["verify", place]) == 0
    assert len(train(flags, tmp_path, "far", f"--distill.teacher_cache={place}")) == EPOCHS * 18


SHARDED = ("--data.order=sharded", "--data.shuffle_gib=0.00001")


@pytest.fixture(scope="module")
def sharded_cache(flags, tmp_path_factory) -> Path:
    """One epoch of one process under the sharded order."""
    folder = tmp_path_factory.mktemp("answers") / "sharded"
    assert store([*flags, *SHARDED], folder, "--epochs", "1", "--top-k", "10") == 0
    return folder


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (["--runtime.num_processes=2"], "input_processes 1, here it is 2"),
        (["--data.shuffle_gib=0.5"], "shuffle_gib 1e-05, here it is 0.5"),
        (["--data.order=exact"], "order 'sharded', here it is 'exact'"),
        (["--data.train_split=train[:1190]"], "dataset .*1190"),
    ],
)
def test_a_sharded_cache_of_another_stream_is_refused(flags, sharded_cache, change, difference):
    with pytest.raises(UserError, match=f"was made with {difference}"):
        check_run(flags, sharded_cache, *change)


def check_run(flags, folder, *more):
    words = [*flags, *SHARDED, f"--distill.teacher_cache={folder}", "--train.epochs=1", *more]
    return check(load_config(words))


def build_rank(job, rank: int, count: int):
    runtime = CpuRuntime(job.config.runtime)
    runtime.ranks.index, runtime.ranks.size = rank, count
    return runtime, build_parts(runtime, job)


def test_a_sharded_cache_holds_the_logits_of_the_runs_examples(flags, sharded_cache):
    """The best stored class is the live teacher's for each example of the run's batches."""
    _, parts = build_rank(check_run(flags, sharded_cache), 0, 1)
    config = writing.without_cache(check_run(flags, sharded_cache).config)
    _, live = build_rank(check(config), 0, 1)
    right = total = 0
    for _, batch in zip(range(18), iterate_batches(parts, 0), strict=False):
        pixels = live.task.augment(batch.images, batch.draws)
        (logits,) = live.task.compute_teacher_outputs(pixels, batch)
        right += int((logits.argmax(1) == batch.draws["cache_indices0"][:, 0]).sum())
        total += len(logits)
    parts.close()
    live.close()
    assert right > 0.99 * total


def test_a_wrong_cache_manifest_is_detected_at_the_first_batch(
    flags, sharded_cache, tmp_path, capsys
):
    """What the description does not say, or says wrongly, shows in the examples themselves."""
    folder = tmp_path / "cache"
    shutil.copytree(sharded_cache, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["stream"]["shuffle_gib"] = 0.5
    (folder / "manifest.json").write_text(json.dumps(manifest))
    code = main.main(
        [
            *flags,
            *SHARDED,
            "--data.shuffle_gib=0.5",
            f"--distill.teacher_cache={folder}",
            "--train.epochs=1",
            f"--run.output_dir={tmp_path}",
            "--run.experiment=e",
            "--run.run_id=lie",
            "--train.log_every_steps=1",
            "--run.tensorboard=false",
        ]
    )
    assert code == 2
    assert "holds outputs for other examples" in capsys.readouterr().err.splitlines()[-1]
    assert read_metrics(tmp_path / "e" / "lie") == []


def test_two_processes_replay_a_sharded_cache_stored_by_two(flags, tmp_path):
    words = [*flags, *SHARDED, "--runtime.num_processes=2", "--train.epochs=1"]
    options = parse([*words, "--out", str(tmp_path / "two")])
    job = check(writing.without_cache(load_config(get_run_flags(options))))
    shape = writing.get_shape(options, job)
    for rank in range(2):
        runtime = CpuRuntime(job.config.runtime)
        runtime.ranks.index, runtime.ranks.size = rank, 2
        writing.store(runtime, job, writing.CacheTarget(tmp_path / "two", shape))
    job = check_run(flags, tmp_path / "two", "--runtime.num_processes=2")
    for rank in range(2):
        _, parts = build_rank(job, rank, 2)
        for _, batch in zip(range(18), iterate_batches(parts, 0), strict=False):
            assert len(batch.draws["cache_indices0"]) == 32
        parts.close()
    with pytest.raises(UserError, match="input_processes 2, here it is 1"):
        build_rank(job, 0, 1)


def test_a_folder_of_other_files_is_another_dataset(tmp_path):
    roots = [tmp_path / name for name in ("one", "moved", "renamed", "resized")]
    for root in roots:
        for split in ("train", "val"):
            for number in range(4):
                path = root / split / f"c{number % 2}" / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"12345")
    (roots[2] / "train/c0/0.png").rename(roots[2] / "train/c0/8.png")
    (roots[3] / "train/c0/0.png").write_bytes(b"123456")
    found = [
        describe_dataset(
            create_section(
                root, source="folder", train_split="train", eval_split="val", global_batch_size=2
            )
        ).files
        for root in roots
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_plan_stores_nothing_and_prints_the_size_for_imagenet(flags, tmp_path, capsys):
    assert store(flags, tmp_path / "cache", "--plan", "--top-k", "8") == 0
    text = capsys.readouterr().out
    assert "ImageNet x 300 epochs at k = 8: 35 bytes" in text
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (["--top-k", "11"], "must lie between 1 and 10"),
        (["--epochs", "0"], "--epochs"),
        (["--teacher=ema", "--teacher_path=", "--model_ema"], "cannot be stored"),
    ],
)
def test_outputs_that_cannot_be_stored_are_refused_in_one_line(flags, tmp_path, capsys, more, rule):
    assert store(flags, tmp_path / "cache", *more) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith("error: ")
    assert rule in error[0]


@pytest.fixture(scope="module")
def two_teachers(flags, teacher_run, digits_teacher) -> list[str]:
    """The same run with two teachers of other models and shares."""
    own = [one for one in flags if not one.startswith("--teacher_path")]
    sections = [
        {"weights": str(teacher_run), "weight": 1.0},
        {"weights": str(digits_teacher), "weight": 3.0},
    ]
    return [*own, f"--distill.teachers={json.dumps(sections)}", "--distill.allow_weak_teacher"]


@pytest.fixture(scope="module")
def two_teacher_logits(two_teachers, tmp_path_factory) -> Path:
    """One augmentation of an example, answered by both, to be used over and over."""
    folder = tmp_path_factory.mktemp("answers") / "two"
    assert store(two_teachers, folder, "--augmentations=1", "--top-k=10") == 0
    return folder


@pytest.mark.parametrize(
    "teaching",
    [
        ("--distill.ensemble=probs",),
        ("--distill.ensemble=logits",),
        ("--distill.ensemble=separate", "--kd=multi_avg_prob"),
    ],
)
def test_two_cached_teachers_train_like_live_ones_in_every_mode(
    two_teachers, two_teacher_logits, teaching
):
    if "separate" in teaching[0]:  # there the loss has the shares
        two_teachers = [one.replace('"weight": 3.0', '"weight": 1.0') for one in two_teachers]
    losses = []
    for more in ((), (f"--distill.teacher_cache={two_teacher_logits}",)):
        _, parts = build_rank(check(load_config([*two_teachers, *teaching, *more])), 0, 1)
        batch = next(iterate_batches(parts, 3))
        losses.append(parts.task.loss(parts.state.model, batch).terms)
        parts.close()
    live, stored = losses
    assert live.keys() == stored.keys()
    for name, value in live.items():
        torch.testing.assert_close(stored[name], value, rtol=1e-3, atol=1e-5)


def test_a_run_may_use_one_cached_teacher_and_outlast_the_cache(flags, two_teacher_logits):
    """Another student of other length; the live teacher's answers are the column of its hash."""
    more = [
        "--model.args.embed_dim=32",
        "--epochs=5",
        f"--distill.teacher_cache={two_teacher_logits}",
    ]
    _, parts = build_rank(check(load_config([*flags, *more])), 0, 1)
    assert [one.width for one in parts.task.teaching.stored] == [10]
    first = {step: next(iterate_batches(parts, step)) for step in (0, 18, 37)}
    assert torch.equal(first[0].images, first[18].images)
    assert torch.equal(first[0].draws["cache_log_probs0"], first[18].draws["cache_log_probs0"])
    assert not torch.equal(first[0].indices, first[37].indices)
    assert "cache_log_probs1" not in first[0].draws
    parts.close()
    (known,) = find_lineage(check(load_config([*flags, *more])))
    judged = json.loads((two_teacher_logits / "card.json").read_text())["teachers"][0]["accuracy"]
    assert known.via == "cache" and known.judged["top1"] == judged["top1"]


def test_verification_recomputes_logits_and_finds_a_forged_one(
    two_teachers, two_teacher_logits, tmp_path, capsys
):
    """Of a file whose checksum agrees, so that nothing but its teacher can tell."""
    folder = tmp_path / "forged"
    shutil.copytree(two_teacher_logits, folder)
    asking = ["verify", str(folder), "--steps=2", *two_teachers]
    assert run_cache(asking) == 0
    assert capsys.readouterr().out.count("asked again about 2 batches") == 2
    (path,) = folder.glob("*.bin")
    rows = np.memmap(path, read_shape(read_manifest(folder)).row_dtype, mode="r+")
    rows["values1"] -= 0.5
    rows.flush()
    facts = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**facts, "crc32c": compute_crc32c(path)}))
    assert run_cache(asking[:2]) == 0
    assert run_cache(asking) == 1
    first, second = capsys.readouterr().out.strip().splitlines()[-2:]
    assert "within" in first
    assert "beyond" in second


def test_a_written_cache_has_a_card_with_the_teachers_accuracy(two_teacher_logits, teacher_run):
    card = json.loads((two_teacher_logits / "card.json").read_text())
    first, second = card["teachers"]
    assert first["name"] == str(teacher_run)
    assert first["accuracy"]["top1"] > second["accuracy"]["top1"]
    assert 0 < first["mean_error"] < first["max_error"] < 0.05
    assert "top1" in (two_teacher_logits / "CARD.md").read_text()


def test_two_machines_split_the_epochs_into_parts_of_one_cache(flags, tmp_path):
    whole = [*flags, "--augmentations=2", "--top-k=2"]
    assert store(whole, tmp_path / "whole") == 0
    for part in ("1/2", "0/2"):
        assert store(whole, tmp_path / "shared", "--part", part) == 0
    for path in (tmp_path / "whole").glob("epoch_*.bin"):
        assert path.read_bytes() == (tmp_path / "shared" / path.name).read_bytes()
    assert store(whole, tmp_path / "shared", "--part", "2/2") == 2
