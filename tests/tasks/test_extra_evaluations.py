"""`data.evals`: extra sets during a run, by the rules of each, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.data import ImageNetInfo

import main
from job.check import check
from models.factory import create_model
from tasks.evaluation.counts import summarise_set
from tasks.evaluation.evaluator import OpenSet
from tasks.evaluation.sets import KNOWN_SETS, ModelClasses, look_at, match_classes, plan_sets
from tests.support.evaluated_sets import NAMES, Examples, load_examples, shift, write_set
from tests.support.tiny_parts import SYNTHETIC, VIT_ARGS, create_cpu_runtime
from utils.config.load import load_config
from utils.config.sections import ModelSection
from utils.errors import UserError
from utils.runtime.processes.ranks import Alone
from utils.weights.load import load_weights
from utils.weights.opening import open_weights

ROOT = Path(__file__).resolve().parents[2]
V2 = load_examples(101, 1)
A_CLASSES = (1, 4, 7)
A = load_examples(45, 3, A_CLASSES)
REAL = load_examples(60, 2)
# Every sixth image has no label at all, every other third three, one of them twice.
REAL_LABELS = [
    [label] if i % 3 else ([] if i % 2 else [label, (label + 1) % 10, label])
    for i, label in enumerate(REAL.labels)
]
# Its class 0 is the digit 4.
OTHER_NAMES = NAMES[:5][::-1]
OTHER = load_examples(40, 5, range(5))


@pytest.fixture(scope="module")
def sets_root(tmp_path_factory, digits_root) -> Path:
    """A directory of sets beside the digits."""
    root = tmp_path_factory.mktemp("sets")
    (root / "digits").symlink_to(digits_root / "digits")
    write_set(root, "imagenet_v2/matched-frequency", "test", V2)
    write_set(root, "imagenet2012_real", "validation", Examples(REAL.images, REAL_LABELS))
    write_set(root, "imagenet_a", "test", A)
    mirrored = Examples(OTHER.images, [4 - label for label in OTHER.labels])
    write_set(root, "other", "test", mirrored, names=OTHER_NAMES)
    for severity in (1, 2):
        noisy = shift(V2, severity)
        write_set(root, f"imagenet2012_corrupted/fog_{severity}", "validation", noisy)
    return root


def get_flags(root: Path, *evals: dict[str, object]) -> list[str]:
    """Return flags of a short run on the digits with extra sets."""
    return [
        "--config",
        str(ROOT / "configs/digits_student.yaml"),
        f"--data.root={root}",
        "--run.run_id=a",
        "--data.train_split=train[:256]",
        "--train.epochs=2",
        "--train.eval_every_epochs=1",
        "--train.checkpoint_every_epochs=1",
        "--data.test_split=",
        "--train.log_every_steps=4",
        "--run.tensorboard=false",
        "--runtime.graph_budget=100000",
        "--optim.warmup_epochs=1",
        f"--data.evals={json.dumps(evals)}",
    ]


def read_evaluations(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "eval"]


def compute_logits(folder: Path, images: np.ndarray) -> np.ndarray:
    """Compute logits of a run's student without the evaluation code."""
    section = ModelSection(name="vit_tiny_patch16_224", image_size=8, args=VIT_ARGS)
    model = create_model(section, num_classes=10).eval()
    load_weights(model, open_weights(str(folder), "RUN"))
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        return model(pixels / 127.5 - 1).numpy()


# Of a whole run: sets of other sizes, of some classes, of lists of labels, and corrupted ones.
EVALS = (
    {"name": "imagenet_v2"},
    {"name": "imagenet_real", "every": 2},
    {"name": "imagenet_a"},
    {"name": "other", "dataset": "other", "split": "test"},
    {"name": "all", "dataset": "other", "split": "test", "classes": "all"},
    {"name": "imagenet_c"},
)


@pytest.fixture(scope="module")
def evaluated_run(sets_root, tmp_path_factory) -> Path:
    """The directory of a run that has evaluated the sets."""
    place = tmp_path_factory.mktemp("judged")
    assert main.main([*get_flags(sets_root, *EVALS), f"--run.output_dir={place}"]) == 0
    return place / "digits_student" / "a"


@pytest.mark.xla
def test_a_run_evaluates_extra_sets_by_their_own_rules(evaluated_run):
    folder = evaluated_run
    first, last = read_evaluations(folder)
    # All sets together are one program, whatever their sizes and classes.
    assert last["graphs_eval"] == 2
    assert "imagenet_v2/top1" in first and "imagenet_real/top1" not in first

    logits = compute_logits(folder, V2.images)
    hits = np.mean(logits.argmax(1) == V2.labels)
    assert last["imagenet_v2/top1"] == pytest.approx(100 * hits)
    assert last["imagenet_v2/examples"] == len(V2.labels)
    fog = [
        np.mean(compute_logits(folder, shift(V2, s).images).argmax(1) == V2.labels) for s in (1, 2)
    ]
    assert last["imagenet_c/top1"] == pytest.approx(100 * np.mean(fog))
    assert "imagenet_c/mce" not in last  # 2 of 75 sets

    logits = compute_logits(folder, REAL.images)
    judged = [i for i, right in enumerate(REAL_LABELS) if right]
    hits = np.mean([logits[i].argmax() in REAL_LABELS[i] for i in judged])
    assert last["imagenet_real/top1"] == pytest.approx(100 * hits)
    assert last["imagenet_real/examples"] == len(judged)

    chosen = np.array(A_CLASSES)[compute_logits(folder, A.images)[:, A_CLASSES].argmax(1)]
    assert last["imagenet_a/top1"] == pytest.approx(100 * np.mean(chosen == A.labels))
    logits = compute_logits(folder, OTHER.images)
    hits = [np.mean(logits[:, :k].argmax(1) == OTHER.labels) for k in (5, 10)]
    assert [last["other/top1"], last["all/top1"]] == pytest.approx([100 * one for one in hits])


@pytest.mark.slow
def test_a_resumed_run_evaluates_like_an_uninterrupted_one(sets_root, evaluated_run, capsys):
    """Other sets may be evaluated on resume; `--eval` evaluates them, too."""
    folder, last = evaluated_run, read_evaluations(evaluated_run)[-1]
    flags = [*get_flags(sets_root, EVALS[0]), f"--run.output_dir={folder.parents[1]}"]
    assert main.main([*flags, f"--run.resume={folder}/checkpoints/step_00000004"]) == 0
    again = read_evaluations(folder)[-1]
    told = {name for name in again if not name.startswith(("graphs", "attempt"))}
    assert {name for name in told if "/" in name} == {n for n in last if "imagenet_v2" in n}
    assert {name: again[name] for name in told} == {name: last[name] for name in told}
    capsys.readouterr()
    assert main.main([*flags, "--run.run_id=", "--eval", f"--run.resume={folder}"]) == 0
    assert f"; imagenet_v2 {last['imagenet_v2/top1']:.2f}" in capsys.readouterr().err


def test_a_set_may_have_its_own_root_and_class_map(sets_root, digits_root, tmp_path):
    class_map = tmp_path / "map.json"
    class_map.write_text("[4, 3, 2, 1, -1]")
    config = load_config(
        get_flags(
            digits_root,
            {
                "name": "other",
                "dataset": "other",
                "split": "test",
                "root": str(sets_root),
                "class_map": str(class_map),
                "source": "tfds",
                "label_key": "label",
                "pp": "decode(channels=1)|resize(8)|flip_lr|value_range(-1, 1)",
            },
        )
    )
    (spec,) = plan_sets(config.data, config.data.evals, "data.evals")
    shown = look_at(spec, ModelClasses(10), config.data.eval_pp)
    found = list(OpenSet(create_cpu_runtime(), shown, 10, 0).batches())
    labels = np.concatenate([one.labels[one.mask].numpy() for one in found])
    # The digit 0 has no class in the map: its examples are left out.
    assert labels.tolist() == [label for label in OTHER.labels if label]
    assert "flip_lr" in spec.data.eval_pp


def test_every_example_is_counted_once_on_any_number_of_shards(sets_root):
    """Of the labels that the batches bring: what is counted of them is a sum."""

    class Shard(Alone):
        def __init__(self, index: int, size: int) -> None:
            self.index, self.size = index, size

    config = load_config([*get_flags(sets_root, {"name": "imagenet_real"}), "--batch_size=16"])
    (spec,) = plan_sets(config.data, config.data.evals, "data.evals")
    shown = look_at(spec, ModelClasses(10), config.data.eval_pp)
    counts = []
    for size in (1, 8):
        total, batches = torch.zeros(10), []
        for index in range(size):
            runtime = create_cpu_runtime()
            runtime.ranks = Shard(index, size)
            own = list(OpenSet(runtime, shown, 10, 0).batches())
            batches.append(len(own))
            total += sum(one.draws["right"][one.mask].sum(0) for one in own)
        counts.append(total)
        assert len(set(batches)) == 1  # every rank makes as many steps
    assert torch.equal(*counts)
    assert counts[0].tolist() == [sum(k in one for one in REAL_LABELS) for k in range(10)]


def test_an_extra_set_with_a_non_finite_loss_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    def make_loss_nan(*args, **kwargs):
        verdict = summarise_set(*args, **kwargs)
        return replace(verdict, metrics={**verdict.metrics, "loss": math.nan})

    monkeypatch.setattr("tasks.evaluation.evaluator.summarise_set", make_loss_nan)
    of_set = {"name": "x", "dataset": "image_size=8,channels=1,num_classes=10,num_examples=40"}
    flags = [
        *SYNTHETIC,
        "--train.epochs=1",
        "--runtime.device=cpu",
        "--run.run_id=a",
        f"--run.output_dir={tmp_path}",
        f"--data.evals={json.dumps([of_set])}",
    ]
    assert main.main(flags) == 0
    assert "x/loss of data.evals is not finite" in capsys.readouterr().err
    (line,) = read_evaluations(tmp_path / "tiny" / "a")
    assert line["x/examples"] == 40 and math.isfinite(line["loss"])
    assert (tmp_path / "tiny" / "a" / "student.safetensors").is_file()


def test_several_classes_of_a_set_may_map_to_one_of_the_model(sets_root, tmp_path):
    place = tmp_path / "halves.json"
    place.write_text(json.dumps([k // 2 for k in range(10)]))
    section = {"name": "imagenet_real", "class_map": str(place)}
    config = load_config([*get_flags(sets_root, section), "--batch_size=64"])
    (spec,) = plan_sets(config.data, config.data.evals, "data.evals")
    shown = look_at(spec, ModelClasses(5), config.data.eval_pp)
    (batch,) = OpenSet(create_cpu_runtime(), shown, 5, 0).batches()
    right = [[float(k in {one // 2 for one in labels}) for k in range(5)] for labels in REAL_LABELS]
    assert batch.draws["right"][: len(right)].tolist() == right
    assert batch.mask[: len(right)].tolist() == [bool(labels) for labels in REAL_LABELS]


def test_an_ambiguous_class_name_is_refused():
    cranes = ModelClasses(3, ("crane", "maillot", "crane"))
    with pytest.raises(UserError, match="'crane' is the name of several of the model's classes"):
        match_classes(ModelClasses(2, ("maillot", "crane")), cranes)
    assert match_classes(ModelClasses(1, ("maillot",)), cranes).tolist() == [1]
    assert match_classes(cranes, cranes).tolist() == [0, 1, 2]


def test_sets_that_cannot_be_evaluated_are_refused_before_the_run(sets_root, tmp_path):
    (tmp_path / "map.json").write_text("[1, 2]")
    (tmp_path / "none.json").write_text("[-1, -1, -1, -1, -1]")
    for section, words in (
        ({"name": "imagnet_v2"}, "has no dataset, root or split; did you mean 'imagenet_v2' or"),
        ({"name": "imagenet_r"}, "holds no such dataset; did you mean 'imagenet_a'"),
        ({"name": "x", "dataset": "other"}, "no split 'validation'; known: test"),
        (
            {
                "name": "other",
                "dataset": "other",
                "split": "test",
                "class_map": str(tmp_path / "map.json"),
            },
            "must be a list of 5 whole numbers",
        ),
        (
            {
                "name": "other",
                "dataset": "other",
                "split": "test",
                "class_map": str(tmp_path / "none.json"),
            },
            "leaves out every class",
        ),
        (
            {"name": "other", "dataset": "other", "split": "test", "class_map": "nowhere.json"},
            "class_map ('nowhere.json') is unreadable",
        ),
        (
            {"name": "imagenet_v2", "pp": "decode(channels=1)|resize(9)|value_range(-1, 1)"},
            "gives images of 9 x 9 x 1, which the model does not take",
        ),
        (
            {"name": "imagenet_v2", "pp": "decode(channels=1)|resize(8)|value_range(0, 1)"},
            "would see other numbers",
        ),
        ({"name": "imagenet_v2", "label_key": "lable"}, "did you mean 'label'?"),
    ):
        config = load_config([*get_flags(sets_root, section), "--runtime.device=cpu"])
        with pytest.raises(UserError) as caught:
            check(config)
        assert words in str(caught.value), section
        assert "\n" not in str(caught.value)
    same = ({"name": "imagenet_v2"}, {"name": "imagenet_v2"})
    with pytest.raises(UserError, match="two sets have the name 'imagenet_v2'"):
        check(load_config([*get_flags(sets_root, *same), "--runtime.device=cpu"]))


@pytest.mark.parametrize("name", KNOWN_SETS)
def test_known_sets_are_read_as_tfds_writes_them(name, tmp_path):
    """Their features, label keys and class names are those of the builders that TFDS ships."""
    import tensorflow_datasets as tfds

    known = KNOWN_SETS[name]
    dataset = known.dataset + ("/fog_3" if name == "imagenet_c" else "")
    builder = tfds.builder(dataset, data_dir=str(tmp_path))
    folder = Path(builder.data_dir)
    folder.mkdir(parents=True)
    builder.info.features.save_config(str(folder))
    info = {
        "name": builder.name,
        "fileFormat": "tfrecord",
        "splits": [{"name": known.split, "shardLengths": ["3"], "numBytes": "30"}],
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    (folder / f"{builder.name}-{known.split}.tfrecord-00000-of-00001").write_bytes(b"")
    flags = get_flags(tmp_path, {"name": name, "pp": "decode|resize(8)|value_range(-1, 1)"})
    config = load_config(flags)
    (spec,) = plan_sets(config.data, config.data.evals, "data.evals")
    wnids = tuple(ImageNetInfo("imagenet-1k").label_names())
    shown = look_at(spec, ModelClasses(1000, wnids), config.data.eval_pp)
    # As timm's models of ImageNet number them.
    assert shown.to_model.tolist() == list(range(1000))
    assert shown.several == (name == "imagenet_real") and shown.image_shape == (8, 8, 3)


def test_training_on_lists_of_labels_is_refused(sets_root):
    flags = get_flags(sets_root)
    flags += [
        "--data.name=imagenet2012_real",
        "--data.train_split=validation",
        "--data.label_key=real_label",
        "--runtime.device=cpu",
        "--batch_size=16",
    ]
    with pytest.raises(UserError, match="lists of labels, but"):
        check(load_config(flags))
