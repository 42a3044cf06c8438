"""Published logits become a cache, and a student sees exactly the views they belong to."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm.data.auto_augment
import timm.data.transforms
import torch
import yaml
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

import main
from big_vision.pp.stored_views import SeedRules, draw_view
from datasets import create_loader
from store.record.history import read_metrics
from tasks.teachers.cache.reader import TeacherCache
from tests.support.input_data import create_section
from tests.support.published_caches import (
    CLASSES,
    CROP,
    IMAGES,
    SIDE,
    STRONG,
    VIEWS,
    list_images,
    publish,
    replay,
)
from tools.cache.__main__ import main as run_cache
from tools.cache.card import make_card
from tools.cache.reinforced import ReinforcedFiles


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Images in class folders, whose names are in no order of their own."""
    root, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", IMAGES), ("val", 8)):
        for number in range(count):
            folder = root / split / f"class{number % CLASSES}"
            folder.mkdir(parents=True, exist_ok=True)
            height, width = generator.integers(20, 60, 2)
            pixels = generator.integers(0, 256, (height // 4, width // 4, 3), np.uint8)
            image = Image.fromarray(pixels).resize((int(width), int(height)), Image.BICUBIC)
            image.save(folder / f"n{generator.integers(10**6)}.png")
    return root


def get_flags(root: Path, cache, pp: str = "", **more: str) -> list[str]:
    pp = pp or f'decode(precise=True)|stored_view("{cache}", {SIDE})|value_range(-1, 1)'
    values = {
        "model.image_size": SIDE,
        "data.source": "folder",
        "data.root": root,
        "data.train_split": "train",
        "data.eval_split": "val",
        "data.test_split": "val",
        "data.train_pp": pp,
        "data.eval_pp": f"decode|resize({SIDE})|value_range(-1, 1)",
        "data.global_batch_size": 8,
        "runtime.device": "cpu",
        "train.epochs": 4,
        "optim.warmup_epochs": 0,
        "model.args": "{patch_size: 8, in_chans: 3, embed_dim: 16, depth: 1, num_heads: 2}",
        **more,
    }
    config = Path(__file__).resolve().parents[2] / "configs/digits_kd.yaml"
    return ["--config", str(config), *(f"--{name}={value}" for name, value in values.items())]


def import_files(source: Path, cache, root: Path, *more: str, **keys: str) -> int:
    form = "tinyvit" if "--saved-config" in more else "imagenet_plus"
    flags = get_flags(root, cache, **keys)
    return run_cache(["import", form, str(source), "--out", str(cache), *more, *flags])


def open_views(root: Path, cache: Path):
    section = create_section(
        root,
        name="",
        source="folder",
        train_split="train",
        eval_split="val",
        global_batch_size=8,
        train_pp=f'decode(precise=True)|stored_view("{cache}", {SIDE})|value_range(-1, 1)',
        return_id=True,
    )
    return create_loader(section, "train", seed=0)


@pytest.mark.parametrize("augmentation", [CROP, STRONG], ids=["crop", "strong"])
def test_a_student_sees_the_published_views_with_their_logits(
    images, tmp_path, capsys, augmentation
):
    samples = publish(tmp_path / "files", images, augmentation, compress=augmentation is STRONG)
    cache = tmp_path / "cache"
    assert import_files(tmp_path / "files", cache, images) == 0
    assert run_cache(["verify", str(cache)]) == 0
    paths, loader = list_images(images), open_views(images, cache)
    known = {str(path.relative_to(images)): number for number, path in enumerate(paths)}
    answers, seen = TeacherCache(cache, batch=8), set()
    for step, batch in zip(range(6), loader.batches(), strict=False):
        stored = answers.read(step, batch.indices)
        for place, name in enumerate(batch.ids):
            number = known[name]
            sample = samples[number][step // 3]
            gaps = batch.images[place].numpy().astype(int) - replay(paths[number], sample["params"])
            # Operations make more of a level by which resizing differs.
            limit = 3 if sample["params"].get("rand_augment") else 1
            assert (np.abs(gaps) > limit).mean() < 0.02
            probs, ids = sample["prob"]
            assert stored["cache_indices0"][place].tolist() == ids[::-1]
            found = stored["cache_log_probs0"][place].exp()
            assert found.tolist() == pytest.approx(probs[::-1], rel=1e-3)
            assert float(stored["cache_residual0"][place]) == pytest.approx(
                1 - sum(probs), rel=2e-3
            )
            seen.add((step // 3, number))
    loader.close()
    assert len(seen) == 2 * IMAGES


def test_a_run_trains_on_imported_logits(images, tmp_path, capsys):
    """By those of other batches, seeds and orders than anybody imported for."""
    samples = publish(tmp_path / "files", images, CROP)
    cache = tmp_path / "cache"
    assert import_files(tmp_path / "files", cache, images) == 0
    card = make_card(cache)
    assert (card["augmentations"], card["examples"], card["files_missing"]) == (VIEWS, IMAGES, 0)
    assert card["teachers"][0]["name"] == "two,teachers"
    assert card["teachers"][0]["accuracy"]["top1"] == 100.0
    assert 0 < card["teachers"][0]["max_error"] < 1e-3
    assert run_cache(["info", str(cache)]) == 0
    assert "imagenet_plus" not in capsys.readouterr().err
    flags = get_flags(
        images, cache, **{"data.global_batch_size": 12, "train.seed": 7, "train.epochs": 4}
    )
    runs = [
        "--run.output_dir",
        str(tmp_path),
        "--run.experiment",
        "e",
        "--run.tensorboard",
        "false",
        "--train.log_every_steps",
        "1",
        f"--distill.teacher_cache={cache}",
        "--distill.temperature=1",
        "--distill.alpha=1",
        "--train.eval_every_epochs=4",
    ]
    assert main.main([*flags, *runs, "--run.run_id=taught"]) == 0
    lines = [one for one in read_metrics(tmp_path / "e/taught") if one["kind"] == "train"]
    assert len(lines) == 8
    assert len(samples) == IMAGES
    assert import_files(tmp_path / "files", cache, images, "--dtype=int8") == 2
    assert "holds another cache" in capsys.readouterr().err
    assert main.main([*flags, *runs, "--run.run_id=mixed", "--mixup=0.5"]) == 2
    assert "was made with mixing" in capsys.readouterr().err.splitlines()[-1]
    run = json.loads((tmp_path / "e/taught/run.json").read_text())
    assert run["lineage"][0]["place"] == "imagenet_plus: two,teachers"


@pytest.mark.parametrize(
    "case",
    [
        ({"mixup": {"p": 0.5}}, (), {}, "pairs of images mixed by mixup, which are not replayed"),
        ({"rand_augment": {"fill": 3}}, (), {}, "rand_augment with fill, which is not replayed"),
        ({"center_crop": {"size": 9}}, (), {}, "images after center_crop, which is not replayed"),
        ({}, ("--ids", "stem"), {}, "outputs for 24 images and data.train_split has 24 examples"),
        ({}, ("--ids", "FILE"), {}, "is outside its image"),
        (
            {},
            (),
            {"data.train_split": "train[:20]"},
            "outputs for 24 images and data.train_split has 20 examples",
        ),
        (
            {},
            (),
            {"pp": f"decode|resize({SIDE})|flip_lr|value_range(-1, 1)"},
            "shows other images than those of",
        ),
        ({}, (), {"data.repeats": "2"}, "data.repeats (2) is not supported with"),
        ({}, (), {"data.sample_weights": "auto"}, "data.sample_weights (auto) is not supported"),
    ],
)
def test_files_that_cannot_be_replayed_are_refused_in_one_line(images, tmp_path, capsys, case):
    damage, more, keys, rule = case
    publish(tmp_path / "files", images, {**CROP, **damage})
    # To each image the files of one of the next class.
    shifted = [str((number + IMAGES // CLASSES) % IMAGES) for number in find_order(images)]
    (tmp_path / "ids.txt").write_text("\n".join(shifted))
    more = [str(tmp_path / "ids.txt") if word == "FILE" else word for word in more]
    assert import_files(tmp_path / "files", tmp_path / "cache", images, *more, **keys) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert rule in line


def find_order(root: Path) -> list[int]:
    """Number in ImageFolder of each example of the split, in the split's order."""
    known = {str(path.relative_to(root)): n for n, path in enumerate(list_images(root))}
    section = create_section(root, name="", source="folder", train_split="train", return_id=True)
    loader = create_loader(section.model_copy(update={"global_batch_size": 8}), "train", seed=0)
    names = loader.load_examples(range(IMAGES)).ids
    loader.close()
    return [known[name] for name in names]


class HarmfulPickle:
    """Runs a command where it is unpickled without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_that_builds_other_objects_than_numbers_is_refused(images, tmp_path, capsys):
    publish(tmp_path / "files", images, CROP)
    with zipfile.ZipFile(tmp_path / "files/3.pth.tar", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps((3, HarmfulPickle(tmp_path / "harm"))))
    assert import_files(tmp_path / "files", tmp_path / "cache", images) == 2
    assert "3.pth.tar cannot be read as a file of numbers" in capsys.readouterr().err
    assert not (tmp_path / "harm").exists()


def test_an_interrupted_import_continues(images, tmp_path, monkeypatch):
    publish(tmp_path / "files", images, CROP)
    monkeypatch.setattr("tools.cache.importing._LOT", 5)
    monkeypatch.setattr("tools.cache.importing._NOTED_LOTS", 1)
    assert import_files(tmp_path / "files", tmp_path / "cache", images) == 0
    read, calls = ReinforcedFiles.read, []

    def fail(self, ids):
        calls.append(ids)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return read(self, ids)

    monkeypatch.setattr(ReinforcedFiles, "read", fail)
    copy = tmp_path / "copy"
    assert import_files(tmp_path / "files", copy, images) != 0
    assert import_files(tmp_path / "files", copy, images) == 0
    assert len(calls) == 3 + 3  # two lots were not read again
    for path in (tmp_path / "cache").glob("*.bin"):
        assert path.read_bytes() == (copy / path.name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(
        path.name for path in copy.iterdir()
    )


def test_imported_logits_are_verified_and_cut_and_may_be_at_urls(
    images, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    publish(tmp_path / "files", images, CROP)
    place = f"memory://imported/{tmp_path.name}"
    assert import_files(tmp_path / "files", place, images) == 0
    assert import_files(tmp_path / "files", place, images) == 0
    assert "holds them already" in capsys.readouterr().out
    assert run_cache(["verify", place]) == 0
    small = tmp_path / "small"
    assert run_cache(["subset", place, "--out", str(small), "--top-k=1", "--augmentations=2"]) == 0
    assert run_cache(["verify", str(small)]) == 0
    card = make_card(small)
    assert (card["augmentations"], card["examples"]) == (2, IMAGES)
    left, right = TeacherCache(place, batch=8), TeacherCache(small, batch=8)
    indices = torch.tensor([3, 20, 7])
    assert torch.equal(
        left.read(4, indices)["cache_log_probs0"][:, :1], right.read(4, indices)["cache_log_probs0"]
    )
    left.close()
    path = small / "epoch_00001.00000-of-00001.bin"
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    assert run_cache(["verify", str(small)]) == 1
    assert "has CRC32C" in capsys.readouterr().out


POLICY = "rand-m9-mstd0.5-inc1"
SIDE_OF_SEEDED = 40
SAVED = {
    "AUG": {
        "AUTO_AUGMENT": POLICY,
        "REPROB": 0.0,
        "MIXUP": 0.0,
        "CUTMIX": 0.0,
        "COLOR_JITTER": 0.4,
        "CUTMIX_MINMAX": None,
    },
    "DATA": {"INTERPOLATION": "bicubic", "IMG_SIZE": SIDE_OF_SEEDED, "MEAN_AND_STD_TYPE": "clip"},
    "MODEL": {"NAME": "tiny_vit", "TYPE": "clip_vit_large14_224"},
}


class Numbers:
    """What TinyViT's program has in the place of Python's and NumPy's generators."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.Generator(np.random.PCG64(seed))
        self.choice, self.random = self.generator.choice, self.generator.random
        self.gauss = self.generator.normal

    def uniform(self, low: float, high: float) -> float:
        return self.random() * (high - low) + low

    def randint(self, low: int, high: int) -> int:
        return min(int(self.random() * (high - low + 1)) + low, high)


@pytest.fixture
def draw(monkeypatch):
    """timm's own augmentation, whose draws come from a seed as there."""

    def use(seed: int) -> Numbers:
        numbers = Numbers(seed)
        monkeypatch.setattr(timm.data.transforms, "random", numbers)
        monkeypatch.setattr(timm.data.auto_augment, "random", numbers)
        monkeypatch.setattr(timm.data.auto_augment, "np", SimpleNamespace(random=numbers))
        return numbers

    return use


def draw_box(image: Image.Image) -> tuple[int, int, int, int]:
    crop = timm.data.transforms.RandomResizedCropAndInterpolation
    return crop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))


def test_a_seed_gives_timms_crop_box(draw):
    """Also where no try fits and the middle is taken."""
    for seed in range(300):
        width, height = [(50, 40), (400, 7), (6, 300), (33, 33)][seed % 4]
        numbers = draw(seed)
        box = draw_box(Image.new("RGB", (width, height)))
        found = draw_view(seed, (height, width), SeedRules())
        assert found.box == tuple(box)
        assert found.flip == (numbers.random() < 0.5)


def write_seeded_logits(folder: Path, paths: list[Path]) -> dict[tuple[int, str], tuple]:
    """Write two epochs of two ranks in TinyViT's form; return (seed, classes, probs) of each."""
    generator = np.random.default_rng(3)
    stored = {}
    for epoch in range(2):
        target = folder / f"logits_top3_epoch{epoch}"
        target.mkdir(parents=True)
        for rank in range(2):
            keys, values = [], b""
            for path in paths[rank::2]:
                seed, label = generator.integers(2**31, size=1, dtype=np.int32), path.parent.name
                classes = np.roll(np.arange(CLASSES, dtype=np.int16), -int(label[-1]))[:3]
                probs = np.array([0.9, generator.uniform(0, 0.1), 0.0], np.float16)
                stored[epoch, path.stem] = int(seed[0]), classes.tolist(), probs.tolist()
                keys.append(path.stem)
                values += seed.tobytes() + classes.tobytes() + probs.tobytes()
            (target / f"rank{rank}-keys.txt").write_text("".join(f"{key}\n" for key in keys))
            (target / f"rank{rank}-values.bin").write_bytes(values)
    return stored


def test_a_student_sees_the_crops_of_tinyvits_seeds(images, tmp_path, draw, capsys):
    stored = write_seeded_logits(tmp_path / "logits", list_images(images))
    saved, cache = tmp_path / "config.json", tmp_path / "cache"
    saved.write_text(yaml.safe_dump(SAVED))
    pp = f'decode(precise=True)|stored_view("{cache}", {SIDE_OF_SEEDED})|value_range(-1, 1)'
    arguments = tmp_path / "logits", cache, images, "--saved-config", str(saved)
    side = {
        "model.image_size": str(SIDE_OF_SEEDED),
        "data.eval_pp": f"decode|resize({SIDE_OF_SEEDED})|value_range(-1, 1)",
    }
    assert import_files(*arguments, pp=pp, **side) == 0
    loader = create_loader(
        create_section(
            images,
            name="",
            source="folder",
            train_split="train",
            return_id=True,
            global_batch_size=12,
            train_pp=pp,
        ),
        "train",
        seed=5,
    )
    answers = TeacherCache(cache, batch=12)
    augment = timm.data.auto_augment.rand_augment_transform(
        POLICY, {"img_mean": (123, 117, 104), "interpolation": Image.BICUBIC, "translate_const": 18}
    )
    for step, batch in zip(range(4), loader.batches(), strict=False):
        found = answers.read(step, batch.indices)
        for place, name in enumerate(batch.ids):
            seed, classes, probs = stored[step // 2, Path(name).stem]
            numbers, image = draw(seed), Image.open(images / name)
            size = (SIDE_OF_SEEDED, SIDE_OF_SEEDED)
            view = F.resized_crop(image, *draw_box(image), size, InterpolationMode.BICUBIC)
            view = F.hflip(view) if numbers.random() < 0.5 else view
            gaps = np.array(augment(view)).astype(int) - batch.images[place].numpy()
            assert np.abs(gaps).mean() < 2
            assert found["cache_indices0"][place].tolist() == classes
            assert found["cache_log_probs0"][place].exp()[:2].tolist() == pytest.approx(
                probs[:2], rel=3e-3, abs=1e-6
            )
    loader.close()
    for entry, key, value, rule in (
        ("AUG", "REPROB", 0.25, "AUG.REPROB 0.25: the erased box was filled"),
        ("AUG", "MIXUP", 0.8, "AUG.MIXUP 0.8: outputs for pairs of images are not replayed"),
        ("AUG", "AUTO_AUGMENT", "original", "AUG.AUTO_AUGMENT 'original': replayed is"),
    ):
        saved.write_text(yaml.safe_dump({**SAVED, entry: {**SAVED[entry], key: value}}))
        assert import_files(*arguments, pp=pp, **side) == 2
        assert rule in capsys.readouterr().err
