"""Features that are learnt from other models without labels, through main and in parts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import main
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from losses.label_free.objective import Embeddings
from models.factory import build_model
from models.teachers.embedding import compute_features
from models.transforms import to_pixels
from store.record.history import read_metrics
from store.record.runs import Run
from tasks.distil.task import GridChange
from tasks.teachers.cache.manifest import read_manifest, read_shape
from tests.support.feature_teachers import write_feature_teacher
from tests.support.tiny_parts import DEVICE_CASES, create_config, create_cpu_runtime
from tools.cache.__main__ import main as run_cache
from utils.config.load import change, load_config
from utils.errors import UserError

PP = "decode(channels=1)|resize(8)|value_range(-1, 1)"
# A grid of 4 x 4 patches and a class token; and one of 3 x 3 patches, pooled by attention.
TEACHERS = (
    (
        "vit_small_patch14_dinov2",
        {
            "img_size": 8,
            "patch_size": 2,
            "in_chans": 1,
            "embed_dim": 48,
            "depth": 1,
            "num_heads": 4,
            "init_values": 1.0,
        },
    ),
    (
        "vit_base_patch16_siglip_224",
        {
            "img_size": 12,
            "patch_size": 4,
            "in_chans": 1,
            "embed_dim": 32,
            "depth": 1,
            "num_heads": 2,
        },
    ),
)
TERMS = (
    {"name": "cosine", "warmup_epochs": 1},
    {"name": "smooth_l1", "of": "patches", "teacher": 0, "weight": 0.5, "args": {"beta": 0.5}},
    {"name": "mse", "of": "patches", "teacher": 1, "weight": 0.25},
)


@pytest.fixture(scope="module")
def feature_teachers(tmp_path_factory) -> list[dict]:
    """Sections of two teachers of random weights, of two widths and grids."""
    sections = [
        write_feature_teacher(tmp_path_factory.mktemp("features"), name, args, seed=number)
        for number, (name, args) in enumerate(TEACHERS)
    ]
    sections[1] |= {"size": 12, "weight": 2.0}
    return sections


def create_flags(digits_root: Path, folder: Path, teachers: list[dict], *flags: str) -> list[str]:
    """8 steps on the digits, 4 an epoch."""
    return [
        "--config=configs/kd/digits_labelfree.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={folder}",
        "--run.experiment=free",
        "--run.run_id=whole",
        "--run.tensorboard=false",
        "--data.train_split=train[:128]",
        "--data.eval_split=validation[:80]",
        "--data.global_batch_size=32",
        "--data.eval_batch_size=32",
        "--train.epochs=2",
        "--optim.warmup_epochs=0",
        "--train.log_every_steps=1",
        "--train.eval_every_epochs=100",
        "--train.checkpoint_every_steps=3",
        "--train.keep_checkpoints=9",
        "--runtime.graph_budget=100000",
        "--distill.projector=mlp",
        "--mixup=0.2",
        "--model_ema",
        f"--distill.teachers={json.dumps(teachers)}",
        f"--distill.losses={json.dumps(TERMS)}",
        *flags,
    ]


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_features_are_learnt_in_one_graph_and_resume_bit_for_bit(
    digits_root, feature_teachers, tmp_path, device
):
    flags = create_flags(digits_root, tmp_path, feature_teachers, f"--runtime.device={device}")
    assert main.main(flags) == 0
    whole = tmp_path / "free" / "whole"
    lines = read_metrics(whole)
    trained = [line for line in lines if line["kind"] == "train"]
    assert {line["graphs_train"] for line in trained} == {int(device == "xla")}
    assert {line["host_reads"] for line in trained} == {0}
    assert trained[-1]["loss/cosine_pooled_0"] < trained[0]["loss/cosine_pooled_0"]
    # Weights of the terms are those of the terms times the teachers'; the first one rises.
    for line in trained:
        rise = min((line["step"] - 1) / 4, 1.0)
        cosine = line["loss/cosine_pooled_0"] + 2 * line["loss/cosine_pooled_1"]
        patches = 0.5 * line["loss/smooth_l1_patches_0"] + 0.5 * line["loss/mse_patches_1"]
        assert line["loss/total"] == pytest.approx(rise * cosine + patches, rel=1e-5)
    facts = Run(whole).read()
    assert [one["features"] for one in facts["teachers"]] == [48, 32]
    assert facts["final"]["score"] == -facts["final"]["eval_distil_loss"]
    assert facts["final"]["eval_examples"] == 80
    exported = load_file(whole / "student.safetensors")
    assert not any("projector" in name or "head" in name for name in exported)
    part = Path(shutil.copytree(whole, whole.with_name("part")))
    for later in (6, 8):
        shutil.rmtree(part / "checkpoints" / f"step_{later:08d}")
    assert main.main([*flags, "--run.run_id=part", "--resume=auto"]) == 0
    for name in ("model", "extra", "ema"):
        file = Path("checkpoints") / "step_00000008" / f"{name}.safetensors"
        then, now = load_file(whole / file), load_file(part / file)
        assert then.keys() == now.keys()
        assert all(torch.equal(now[key], value) for key, value in then.items()), name
    again = [line for line in read_metrics(part) if line["kind"] == "train"]
    assert [line["loss/total"] for line in again] == [line["loss/total"] for line in trained]


def make_parts(folder, teachers, *flags, terms=TERMS):
    """Build the parts of a run on synthetic images, whose labels are ignored."""
    config = create_config(
        folder,
        "--train.task=distil",
        f"--distill.teachers={json.dumps(teachers)}",
        f"--distill.losses={json.dumps(terms)}",
        *flags,
    )
    return build_parts(create_cpu_runtime(), check(config))


def test_the_total_equals_numpys(feature_teachers, tmp_path):
    parts = make_parts(tmp_path, feature_teachers)
    task, model = parts.task, parts.state.model.eval()
    batch = next(iterate_batches(parts, 0))
    batch = replace(batch, values={**batch.values, "term_scales": torch.tensor([0.5, 1, 1])})
    found = task.loss(model, batch)
    pixels = to_pixels(batch.images)
    seen = compute_features(model, task.transform(pixels))
    theirs = [one(pixels) for one in task.teachers]

    def turn(features: torch.Tensor, key: str) -> np.ndarray:
        made = task.losses.projectors[key]
        weight, bias = (p.detach().double().numpy() for p in (made.weight, made.bias))
        return features.detach().double().numpy() @ weight.T + bias

    def to_grid(patches: torch.Tensor, side: int) -> torch.Tensor:
        maps = patches.transpose(1, 2).unflatten(2, (2, 2))
        wanted = torch.nn.functional.interpolate(
            maps, size=(side, side), mode="bilinear", antialias=True
        )
        return wanted.flatten(2).transpose(1, 2)

    cosines = []
    for number, one in enumerate(theirs):
        mine, other = turn(seen.pooled, f"pooled_{number}"), one.pooled.double().numpy()
        norms = np.linalg.norm(mine, axis=1) * np.linalg.norm(other, axis=1)
        cosines.append((1 - (mine * other).sum(1) / norms).mean())
    gap = turn(to_grid(seen.patches, 4), "patches_0") - theirs[0].patches.double().numpy()
    size = np.abs(gap)
    smooth = np.where(size < 0.5, gap**2 / (2 * 0.5), size - 0.25).mean()
    squared = (turn(to_grid(seen.patches, 3), "patches_1") - theirs[1].patches.numpy()) ** 2
    assert float(found.terms["cosine_pooled_1"]) == pytest.approx(cosines[1], rel=1e-5)
    assert float(found.terms["smooth_l1_patches_0"]) == pytest.approx(smooth, rel=1e-5)
    assert float(found.terms["mse_patches_1"]) == pytest.approx(squared.mean(), rel=1e-5)
    wanted = 0.5 * (cosines[0] + 2 * cosines[1]) + 0.5 * smooth + 2 * 0.25 * squared.mean()
    assert found.total.item() == pytest.approx(wanted, rel=1e-5)
    # No label is looked at, and padding counts for nothing.
    other = replace(batch, labels=(batch.labels + 1) % 10)
    assert torch.equal(task.loss(model, other).total, found.total)
    mask = torch.arange(len(batch)) < 5
    sums = task.count(model, replace(batch, mask=mask))
    few = task.count(model, batch.map(lambda tensor: tensor[:5]))
    torch.testing.assert_close(sums, few, rtol=1e-5, atol=1e-5)
    assert all(parameter.grad is None for one in task.teachers for parameter in one.parameters())
    parts.close()


def test_a_grid_is_resized_like_torch():
    patches = torch.randn(2, 12, 5)
    maps = patches.transpose(1, 2).unflatten(2, (3, 4))
    for target in ((5, 7), (2, 2), (3, 4)):
        wanted = torch.nn.functional.interpolate(maps, target, mode="bilinear", antialias=True)
        found = GridChange((3, 4), target)(patches)
        torch.testing.assert_close(found, wanted.flatten(2).transpose(1, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["resnet10t", "swin_tiny_patch4_window7_224", "mixer_s32_224"])
def test_patches_come_from_any_model_family(name):
    """Maps with channels first and last, and tokens without a prefix: position by position."""
    model = build_model(name, {"num_classes": 0}, device="meta").eval()
    found = compute_features(model, torch.zeros(2, 3, 224, 224, device="meta"))
    assert found.pooled.shape == (2, model.num_features)
    assert found.patches.shape == (2, 49, model.num_features)


def test_terms_and_projectors_follow_the_configuration(feature_teachers, tmp_path):
    for flags, terms, names, kinds in (
        ((), ({"name": "cosine"},), ["cosine_pooled_0", "cosine_pooled_1"], "Linear Linear"),
        (
            ("--distill.projector=mlp", "--distill.projector_width=7"),
            (
                {"name": "mse", "of": "patches", "teacher": 1},
                {"name": "mse", "teacher": 1},
                {"name": "mse", "teacher": 1},
            ),
            ["mse_patches_1", "mse_pooled_1", "mse_pooled_1_2"],
            "MlpProjector MlpProjector",
        ),
    ):
        parts = make_parts(tmp_path, feature_teachers, *flags, terms=terms)
        losses = parts.task.losses
        assert [one.name for one in losses.terms] == names
        assert [type(one).__name__ for one in losses.projectors.values()] == kinds.split()
        if flags:
            assert losses.projectors["pooled_1"][0].out_features == 7
        parts.close()


def test_a_teachers_classifier_is_removed(teacher_run, feature_teachers, tmp_path, digits_root):
    """A run knows its classes; a bare file does not."""
    config = load_config(create_flags(digits_root, tmp_path, feature_teachers))
    terms = [{"name": "cosine"}, {"name": "cosine", "of": "patches"}]
    sections = [{"weights": str(teacher_run), "num_classes": 0}]
    config = change(config, distill={"losses": terms, "teachers": sections})
    parts = build_parts(create_cpu_runtime(), check(config))
    teacher = parts.task.teachers[0]
    assert teacher.model.num_classes == 0 and "head.weight" not in teacher.model.state_dict()
    saved = load_file(teacher_run / "student.safetensors")
    assert all(torch.equal(saved[k], v) for k, v in teacher.model.state_dict().items())
    parts.close()
    bare = tmp_path / "bare.pth"
    torch.save(saved, bare)
    section = {
        "model": "vit_tiny_patch16_224",
        "weights": str(bare),
        "args": {**config.model.args, "img_size": 8},
    }
    with pytest.raises(UserError, match=r"set its num_classes in distill"):
        check(change(config, distill={"teachers": [section]}))
    check(change(config, distill={"teachers": [{**section, "num_classes": 10}]}))


VIT = {"patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}
ANY_SIZE = {"args": {**VIT, "dynamic_img_size": True}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distill": {"teachers": [], "losses": []}}, "needs a teacher"),
        ({"distill": {"losses": [{"name": "kd"}]}}, "unknown loss of features 'kd'"),
        ({"distill": {"losses": [{"name": "mse", "teacher": 2}]}}, "are 2, numbered from 0"),
        ({"distill": {"losses": [{"name": "mse", "teacher": "vit"}]}}, "from teacher 'vit'"),
        ({"distill": {"losses": [{"name": "mse", "weight": 0}]}}, "nothing to learn"),
        ({"distill": {"losses": [{"name": "mse", "args": {"beta": 1}}]}}, "no argument 'beta'"),
        ({"distill": {"losses": [{"name": "smooth_l1", "args": {"beta": 0}}]}}, "above 0"),
        ({"distill": {"losses": [{"name": "mse", "layers": {"a": "b"}}]}}, "pooled or patches"),
        ({"distill": {"losses": [{"name": "mse", "start_epoch": 2}]}}, "not before the end of"),
        ({"distill": {"projector": "none"}}, "student has 16 features and a teacher 48"),
        ({"distill": {"projector": "linear", "projector_width": 3}}, "needs distill.projector=mlp"),
        ({"distill": {"alpha": 0.3}}, "alpha (0.3) is not supported with train.task=distil"),
        ({"distill": {"ensemble": "logits"}}, "is not supported with train.task=distil"),
        ({"train": {"label_smoothing": 0.1}}, "is not supported with train.task=distil"),
        ({"model": {"num_classes": 10}}, "is not supported with train.task=distil"),
        ({"train": {"task": "classify"}}, "losses[1].of ('patches') needs train.task=distil"),
        (
            {"model": {"name": "mnist_cnn", "args": {}, "image_size": None}},
            "does not give features apart from its head",
        ),
        (
            {"model": {"name": "resnet10t", "args": {"in_chans": 1}, "image_size": None}},
            "has no grid of patches",
        ),
        ({"train": {"image_sizes": {0: 4, 1: 8}}, "model": ANY_SIZE}, "student's grid of patches"),
        ({"run": {"eval_only": True}, "model": {"weights": "x"}}, "run.eval_only is not supported"),
    ],
)
def test_invalid_configurations_are_refused_by_key(
    digits_root, feature_teachers, tmp_path, changes, words
):
    config = load_config(create_flags(digits_root, tmp_path, feature_teachers))
    with pytest.raises(UserError) as error:
        check(change(config, **changes))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_images_of_two_sizes_without_a_common_grid_are_refused(
    digits_root, feature_teachers, tmp_path
):
    sections = [{**one, "size": side} for one, side in zip(feature_teachers, (8, 12), strict=True)]
    config = load_config(create_flags(digits_root, tmp_path, sections))
    data = {"eval_pp": PP.replace("8", "12")}
    with pytest.raises(UserError, match="compare grids of one"):
        check(change(config, data=data, model=ANY_SIZE))
    pooled = {"losses": [{"name": "cosine"}]}
    check(change(config, data=data, model=ANY_SIZE, distill=pooled))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"label_map": "map.json"}, "which uses no classes"),
        ({"num_classes": 10}, "of another model"),
        ({"mean": [127.5], "std": [0]}, "must be above 0"),
        ({"mean": [1, 2], "std": [1]}, "give mean and std in distill.teachers as many numbers as"),
        ({"model": "ema", "weights": ""}, "is the student's own average"),
    ],
)
def test_a_teacher_with_another_meaning_of_arguments_is_refused(
    digits_root, feature_teachers, tmp_path, section, words
):
    teachers = [{**feature_teachers[0], **section}, feature_teachers[1]]
    with pytest.raises(UserError) as error:
        check(load_config(create_flags(digits_root, tmp_path, teachers)))
    assert words in str(error.value)


def test_a_teacher_with_constant_features_is_refused(feature_teachers, tmp_path):
    parts = make_parts(tmp_path, feature_teachers)

    def evaluate_once() -> list[dict[str, float]]:
        batch = next(iter(parts.eval_loader.batches()))
        return parts.task.evaluate_teachers(lambda count: count(batch))

    found = evaluate_once()[0]
    pooled = parts.task.teachers[0](to_pixels(next(iter(parts.eval_loader.batches())).images))[0]
    spread = (pooled.var(dim=0, unbiased=False).sum() / pooled.square().mean(0).sum()).sqrt()
    assert found["spread"] == pytest.approx(float(spread), rel=1e-3)
    with torch.no_grad():
        parts.task.teachers[0].model.norm.weight.zero_()
    with pytest.raises(UserError, match="all but the same features for every image"):
        evaluate_once()
    with torch.no_grad():
        parts.task.teachers[0].model.norm.bias.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        evaluate_once()
    parts.close()


def test_features_are_selected_by_name():
    pooled, patches = torch.zeros(1, 2), torch.ones(1, 3, 2)
    seen = Embeddings(pooled, patches)
    assert seen.get("pooled") is pooled and seen.get("patches") is patches


def test_stored_features_train_like_live_teachers(digits_root, feature_teachers, tmp_path):
    """Pooled and patches of two teachers, of one augmentation that every epoch starts over with."""
    flags = create_flags(digits_root, tmp_path, feature_teachers, "--runtime.device=cpu")
    cache = tmp_path / "cache"
    assert run_cache(["write", *flags, "--augmentations=1", "--out", str(cache)]) == 0
    columns = read_shape(read_manifest(cache)).columns
    assert [(one.part, one.width, one.places) for one in columns] == [
        ("pooled", 48, 0),
        ("patches", 48, 16),
        ("pooled", 32, 0),
        ("patches", 32, 9),
    ]
    stored = f"--distill.teacher_cache={cache}"
    terms = []
    for more in ((), (stored,)):
        parts = build_parts(create_cpu_runtime(), check(load_config([*flags, *more])))
        batch = next(iterate_batches(parts, 2))
        assert ("cache_features0" in batch.draws) == bool(more)
        if more:  # nobody asks the teachers in a step
            parts.task.ask = None
        terms.append(parts.task.loss(parts.state.model, batch).terms)
        parts.close()
    for name, value in terms[0].items():
        torch.testing.assert_close(terms[1][name], value, rtol=2e-3, atol=1e-4)
    one = [f for f in flags if not f.startswith(("--distill.teachers", "--distill.losses"))]
    one += [f"--distill.teachers={json.dumps(feature_teachers[:1])}"]
    one += [f"--distill.losses={json.dumps([{'name': 'cosine'}])}"]
    assert check(load_config([*one, stored])).facts.forms[0].part == "pooled"
    assert run_cache(["write", *one, "--augmentations=1", "--out", str(tmp_path / "pooled")]) == 0
    of_patches = [*flags, f"--distill.teacher_cache={tmp_path / 'pooled'}"]
    with pytest.raises(UserError, match="was made with teachers"):
        check(load_config(of_patches))
