"""The stored pass over teachers' features: its numbers, its file, and a run that reads it."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import main
from bill.step.synthetic_run import create_synthetic_run
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from losses.features.affine import create_hadamard
from models.factory import build_model, export_model
from models.transforms import to_pixels
from store.record.history import read_metrics
from tasks.distil.feature_statistics import Moments, open_statistics, read_statistics
from tests.support.child_runs import get_command, get_environment
from tests.support.tiny_parts import create_argv, create_config, create_cpu_runtime
from tools.feature_statistics import __main__ as feature_statistics
from utils.config.load import load_config
from utils.errors import UserError

# The second one's width has no Hadamard matrix.
TEACHERS = (
    (
        "vit_small_patch14_dinov2",
        {
            "img_size": 8,
            "patch_size": 2,
            "in_chans": 1,
            "embed_dim": 24,
            "depth": 1,
            "num_heads": 2,
        },
    ),
    (
        "vit_tiny_patch16_224",
        {
            "img_size": 8,
            "patch_size": 4,
            "in_chans": 1,
            "embed_dim": 30,
            "depth": 1,
            "num_heads": 2,
        },
    ),
)
TERMS = (
    {"name": "mse"},
    {"name": "gram_kl", "of": "patches", "teacher": 0, "weight": 0.1},
    {"name": "mse", "of": "patches", "teacher": 0},
    {"name": "queue_kl", "teacher": 1, "args": {"size": 40}},
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """A run of made-up images and two teachers, whose features differ in scale a hundredfold."""
    sections = []
    for number, (name, args) in enumerate(TEACHERS):
        torch.manual_seed(number)
        model = build_model(name, {**args, "num_classes": 0})
        with torch.no_grad():  # such that images differ, and channels and teachers by factors
            for parameter in model.parameters():
                parameter.normal_(std=0.3)
            model.norm.weight.copy_(torch.linspace(0.1, 10, args["embed_dim"]) * 10**number)
        folder = tmp_path_factory.mktemp(f"teacher{number}")
        facts = {"model": name, "args": args, "num_classes": 0, "mean": [127.5], "std": [127.5]}
        export_model(model.state_dict(), facts, folder)
        sections.append({"weights": str(folder)})
    return [
        *create_argv(tmp_path_factory.mktemp("runs"), "--train.task=distil"),
        f"--distill.teachers={json.dumps(sections)}",
        f"--distill.losses={json.dumps(TERMS)}",
        "--train.epochs=1",
        "--optim.warmup_epochs=0",
        "--train.checkpoint_every_steps=4",
    ]


@pytest.fixture(scope="module")
def stored(flags, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("statistics")
    return measure(flags, folder, "--images=50")


def measure(flags, folder: Path, *more: str) -> Path:
    """The tool's file: 50 images are rounded up to 64, whole batches."""
    config = folder / "run.yaml"
    config.write_text("run: {tensorboard: false}\n")
    place = folder / "statistics"
    argv = ["--config", str(config), "--out", str(place), *flags, *more]
    assert feature_statistics.main(argv) == 0
    return place


def list_features(flags) -> dict[str, np.ndarray]:
    """All rows of 64 images by the teachers themselves, in float64."""
    parts = build_parts(create_cpu_runtime(), check(load_config(flags)))
    found: dict[str, list[np.ndarray]] = {"0.pooled": [], "0.patches": [], "1.pooled": []}
    for batch in itertools.islice(iterate_batches(parts, 0), 4):
        seen = [one(to_pixels(batch.images)) for one in parts.task.teachers]
        for name, rows in (
            ("0.pooled", seen[0].pooled),
            ("0.patches", seen[0].patches.flatten(0, 1)),
            ("1.pooled", seen[1].pooled),
        ):
            found[name].append(rows.double().numpy())
    parts.close()
    return {name: np.concatenate(rows) for name, rows in found.items()}


def test_the_file_holds_numpys_statistics_of_the_features(flags, stored):
    statistics = read_statistics(str(stored))
    assert statistics.facts["images"] == 64
    assert statistics.facts["rows"] == {"0.pooled": 64, "0.patches": 1024, "1.pooled": 64}
    for name, rows in list_features(flags).items():
        covariance = np.cov(rows.T, bias=True)
        tensors = {p: statistics.tensors[f"{name}.{p}"] for p in ("mean", "variances")}
        np.testing.assert_allclose(tensors["mean"], rows.mean(axis=0), rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(tensors["variances"], covariance.diagonal(), rtol=1e-9)
        values, vectors = (statistics.tensors[f"{name}.eigen{p}"] for p in ("values", "vectors"))
        np.testing.assert_allclose(vectors * values @ vectors.T, covariance, atol=1e-8)


def test_merged_moments_of_parts_equal_those_of_the_whole():
    rows = np.random.default_rng(0).normal(size=(50, 3)) + 1e6
    whole, parts = Moments(3), [Moments(3) for _ in range(4)]
    whole.add(rows)
    for part, own in zip(parts[1:], np.split(rows, [5, 30]), strict=True):
        part.add(own)
    for part in parts[1:]:
        parts[0].merge(part)  # the first has seen nothing
    for name, value in whole.describe().items():
        np.testing.assert_allclose(parts[0].describe()[name], value, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(whole.describe()["variances"], rows.var(axis=0), rtol=1e-9)


@pytest.mark.parametrize("kind", ["channel", "phi_s"])
def test_stored_statistics_standardise_the_features(flags, stored, kind):
    given = [*flags, f"--distill.standardise={kind}", f"--distill.statistics={stored}"]
    parts = build_parts(create_cpu_runtime(), check(load_config(given)))
    scaled = [
        list(parts.task.iterate_teacher_outputs(to_pixels(batch.images), batch))
        for batch in itertools.islice(iterate_batches(parts, 0), 4)
    ]
    parts.close()
    found = {
        "0.pooled": torch.cat([one[0].pooled for one in scaled]),
        "0.patches": torch.cat([one[0].patches.flatten(0, 1) for one in scaled]),
        "1.pooled": torch.cat([one[1].pooled for one in scaled]),
    }
    rows = list_features(flags)
    for name, values in found.items():
        np.testing.assert_allclose(values.var(dim=0, unbiased=False), 1, rtol=1e-3)
        if kind == "channel":
            wanted = (rows[name] - rows[name].mean(axis=0)) / rows[name].std(axis=0)
            np.testing.assert_allclose(values.numpy(), wanted, atol=2e-3)
        if kind == "phi_s":
            centred = rows[name] - rows[name].mean(axis=0)
            ratios = np.linalg.norm(values.numpy(), axis=1) / np.linalg.norm(centred, axis=1)
            np.testing.assert_allclose(ratios, ratios[0], rtol=1e-3)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("xla", marks=[pytest.mark.xla, pytest.mark.slow])]
)
def test_a_run_with_statistics_resumes_bit_for_bit(flags, stored, tmp_path, device):
    """With its queue and its Gram term, in one graph."""
    place = tmp_path / "moved"
    shutil.copyfile(stored, place)
    run = [
        *flags,
        f"--run.output_dir={tmp_path}",
        f"--runtime.device={device}",
        "--run.run_id=whole",
        "--distill.standardise=phi_s",
        f"--distill.statistics={place}",
    ]
    assert main.main(run) == 0
    whole = tmp_path / "tiny" / "whole"
    trained = [line for line in read_metrics(whole) if line["kind"] == "train"]
    assert {line["graphs_train"] for line in trained} == {int(device == "xla")}
    part = Path(shutil.copytree(whole, whole.with_name("part")))
    shutil.rmtree(part / "checkpoints" / "step_00000006")
    assert main.main([*run, "--run.run_id=part", "--resume=auto"]) == 0
    for name in ("model", "extra"):
        file = Path("checkpoints") / "step_00000006" / f"{name}.safetensors"
        then, now = load_file(whole / file), load_file(part / file)
        assert all(np.array_equal(now[key], value) for key, value in then.items())
        assert name == "model" or any("memory.rows" in key for key in then)
    shutil.rmtree(part / "checkpoints" / "step_00000006")
    other = measure([one for one in flags if "--train.seed" not in one], tmp_path, "--images=16")
    assert (
        main.main([*run, "--run.run_id=part", "--resume=auto", f"--distill.statistics={other}"])
        == 2
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "shards", ["--runtime.num_processes=2", pytest.param("mesh", marks=pytest.mark.xla)]
)
def test_two_shards_with_a_shared_queue_train_like_one(flags, tmp_path, shards):
    """On two CPU processes, and on a mesh of two devices, where one graph serves all steps."""
    own = [*flags, f"--run.output_dir={tmp_path}", "--train.deterministic=true"]
    device = "xla" if shards == "mesh" else "cpu"
    more = ["--runtime.parallel=spmd"] if shards == "mesh" else [shards]
    for name, given in (("one", []), ("two", more)):
        environment = get_environment() | {"CPU_NUM_DEVICES": "2" if given == more else "1"}
        words = [*own, f"--runtime.device={device}", *given, f"--run.run_id={name}"]
        done = subprocess.run(get_command(words), env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (
        [line for line in read_metrics(tmp_path / "tiny" / name) if line["kind"] == "train"]
        for name in ("one", "two")
    )
    for single, both in zip(one, two, strict=True):
        assert both["loss/queue_kl_pooled_1"] == pytest.approx(
            single["loss/queue_kl_pooled_1"], rel=2e-3, abs=1e-6
        )
    if shards == "mesh":
        assert {line["graphs_train"] for line in two} == {1}
    queues = [
        load_file(tmp_path / "tiny" / name / "checkpoints/step_00000006/extra.safetensors")
        for name in ("one", "two")
    ]
    (key,) = [key for key in queues[0] if key.endswith("memory.rows")]
    np.testing.assert_allclose(queues[1][key], queues[0][key], rtol=1e-4, atol=1e-5)


def test_a_file_that_does_not_fit_is_refused(flags, stored, tmp_path):
    broken = tmp_path / "broken"
    broken.write_bytes(stored.read_bytes()[:-1] + b"\x7f")
    foreign = tmp_path / "foreign"
    save_file({"x": np.zeros(1)}, foreign)
    for more, words in (
        (["--distill.standardise=phi_s"], "needs the features' statistics; make them by python -m"),
        ([f"--distill.statistics={stored}"], "has no effect with distill.standardise=none"),
        (["--distill.standardise=phi_s", "--distill.statistics=nowhere"], "is not there; make it:"),
        (["--distill.standardise=phi_s", f"--distill.statistics={foreign}"], "no file of statisti"),
        (["--distill.standardise=phi_s", f"--distill.statistics={broken}"], "was damaged"),
        (
            [
                "--distill.standardise=phi_s",
                f"--distill.statistics={stored}",
                "--data.train_pp=flip_lr|value_range(-1, 1)",
            ],
            "with data.train_pp='value_range(-1, 1)', this run has 'flip_lr|value_range(-1, 1)'",
        ),
        (
            [
                "--distill.standardise=phi_s",
                f"--distill.statistics={stored}",
                "--data.erasing_mode=pixel",
            ],
            "with data.erasing_mode='const', this run has 'pixel'",
        ),
        (
            [
                "--distill.standardise=phi_s",
                f"--distill.statistics={stored}",
                "--data.sample_weights=auto",
            ],
            "with data.sample_weights=[], this run has 'auto'",
        ),
        (
            [
                "--distill.standardise=phi_s",
                f"--distill.statistics={stored}",
                '--distill.losses=[{"name": "mse", "of": "patches"}]',
            ],
            "has no patches features of teacher 1, which gives 30",
        ),
        (
            [
                "--distill.standardise=phi_s",
                f"--distill.statistics={stored}",
                f"--distill.teachers={swap(flags)}",
            ],
            "with other teachers than distill.teachers names",
        ),
    ):
        with pytest.raises(UserError) as error:
            check(load_config([*flags, *more]))
        assert words in str(error.value) and "\n" not in str(error.value)


def test_a_file_older_than_a_key_counts_as_its_default(flags, stored, monkeypatch):
    config = load_config([*flags, "--distill.standardise=phi_s", f"--distill.statistics={stored}"])
    statistics = read_statistics(str(stored))
    assert statistics.facts["seen"].pop("data.erasing_mode") == "const"
    monkeypatch.setattr("tasks.distil.feature_statistics.read_statistics", lambda _: statistics)
    assert open_statistics(config) is statistics


def swap(flags) -> str:
    """The same teachers in the other order."""
    given = next(one for one in flags if one.startswith("--distill.teachers="))
    return json.dumps(json.loads(given.partition("=")[2])[::-1])


def test_standardising_keys_are_refused_for_other_tasks(tmp_path):
    with pytest.raises(UserError, match=r"distill.standardise \('phi_s'\) needs train.task=distil"):
        create_config(tmp_path, "--distill.standardise=phi_s")


def test_unmeasurable_features_are_refused(flags, tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text("run: {tensorboard: false}\n")
    argv = ["--config", str(config), "--out", str(tmp_path / "x")]
    for more, words in (
        ([*flags, "--images=1"], "gives no variance"),
        (create_argv(tmp_path), "compares no features of teachers"),
    ):
        assert feature_statistics.main([*argv, *more]) == 2
        assert words in capsys.readouterr().err


def test_a_synthetic_run_has_statistics_of_its_random_teachers(flags, tmp_path):
    """So that a run is compiled and measured where neither teachers nor statistics are."""
    given = [*flags, "--distill.standardise=phi_s", "--distill.statistics=elsewhere"]
    synthetic = create_synthetic_run(load_config(given), {})
    config = synthetic.replace_teachers(synthetic.replace_data(96, tmp_path), tmp_path)
    parts = build_parts(create_cpu_runtime(), check(config))
    maps = parts.task.get_modules()["scalings"]
    assert [sorted(one) for one in maps] == [["patches", "pooled"], ["pooled"]]
    parts.close()


@pytest.mark.slow
def test_two_ranks_measure_the_same_as_one(flags, stored, tmp_path):
    both = measure(flags, tmp_path, "--images=50", "--runtime.num_processes=2")
    one, two = (read_statistics(str(place)) for place in (stored, both))
    assert one.facts == two.facts
    for name, value in one.tensors.items():
        if "eigenvectors" not in name:
            np.testing.assert_allclose(two.tensors[name], value, rtol=1e-5, atol=1e-6)


def test_tested_widths_include_ones_with_and_without_a_hadamard_matrix():
    assert create_hadamard(24) is not None and create_hadamard(30) is None
