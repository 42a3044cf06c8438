"""Class names through main.py and the tools: what a class number means is never guessed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.data import ImageNetInfo

import main
from models.factory import export_model
from models.trained import open_trained
from tests.support.tiny_parts import VIT_ARGS, create_argv
from tools.cache.__main__ import main as cache
from tools.evaluate.__main__ import main as evaluate

NAMES = ("cat", "dog", "eel")
PP = "decode(channels=1)|resize(8)|value_range(-1, 1)"
FOLDER = (
    "--data.source=folder",
    "--data.name=",
    f"--data.train_pp={PP}",
    f"--data.eval_pp={PP}",
    "--data.train_split=train",
    "--data.eval_split=val",
    "--data.global_batch_size=3",
    "--data.eval_batch_size=3",
    "--train.steps=1",
    "--lr=1e-9",
    "--optim.min_lr=0",
    "--weight_decay=0",
)
HALF = "matched by number alone"


def write_folder(root: Path, names: tuple[str, ...]) -> Path:
    """Two images of each class in `train` and in `val`."""
    for split in ("train", "val"):
        for number, name in enumerate(names):
            (root / split / name).mkdir(parents=True)
            for copy in range(2):
                pixels = np.full((8, 8), 60 * number + 30 * copy, np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{copy}.png")
    return root


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Folders of the classes, of others, of the same in another order, and runs on the first."""
    root = tmp_path_factory.mktemp("names")
    write_folder(root / "own", NAMES)
    write_folder(root / "other", ("fox", "gnu", "hen"))
    write_folder(root / "shifted", ("ipynb_checkpoints", *NAMES[:2]))
    assert main.main(get_argv(root, "own", "--run.run_id=named")) == 0
    unnamed = ("--data.source=synthetic", "--run.run_id=unnamed")
    made = "--data.name=image_size=8,channels=1,num_classes=3,num_examples=6"
    pp = ("--data.train_pp=value_range(-1, 1)", "--data.eval_pp=value_range(-1, 1)")
    assert main.main(get_argv(root, "own", *unnamed, made, *pp)) == 0
    turned = open_trained(str(root / "tiny" / "named"), "RUN")
    facts = {**turned.facts, "classes": [NAMES[2], *NAMES[:2]]}
    save_permuted(root / "turned", turned.model.state_dict(), facts)
    return root


def save_permuted(folder: Path, tensors: dict[str, torch.Tensor], facts: dict) -> None:
    """The same model whose classes are numbered in another order."""
    folder.mkdir()
    order = torch.tensor([2, 0, 1])
    heads = {name: tensors[name][order] for name in ("head.weight", "head.bias")}
    export_model({**tensors, **heads}, facts, folder)


def get_argv(root: Path, data: str, *flags: str) -> list[str]:
    return create_argv(root, *FOLDER, f"--data.root={root / data}", *flags)


def get_run(root: Path, name: str = "named") -> str:
    return str(root / "tiny" / name)


def check(capsys, argv: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout, and stderr of a run that is only checked."""
    capsys.readouterr()
    code = main.main([*argv, "--run.check_only=true"])
    told = capsys.readouterr()
    return code, told.out, told.err


def get_error(capsys, argv: list[str]) -> str:
    code, _, err = check(capsys, argv)
    assert code == 2 and "Traceback" not in err
    return err.strip().splitlines()[-1]


def test_an_evaluation_on_other_classes_is_refused(place, capsys):
    error = get_error(capsys, get_argv(place, "other", "--eval", f"--resume={get_run(place)}"))
    assert "has other classes than data.root" in error
    assert "3 of its 3 names are unknown here, first 'cat'" in error
    assert "python -m tools.evaluate RUN --sets, with a class_map" in error


def test_an_evaluation_on_classes_that_a_folder_shifts_is_refused(place, capsys):
    error = get_error(capsys, get_argv(place, "shifted", "--eval", f"--resume={get_run(place)}"))
    assert "1 of its 3 names are unknown here, first 'eel'" in error


def test_evaluating_unnamed_classes_on_named_ones_warns_once(place, capsys):
    run = f"--resume={get_run(place, 'unnamed')}"
    code, _, err = check(capsys, get_argv(place, "own", "--eval", run))
    assert code == 0 and err.count(HALF) == 1
    assert "data.source was 'synthetic', is 'folder'; data.name was" in err
    run = f"--resume={get_run(place)}"
    code, _, err = check(capsys, get_argv(place, "own", "--eval", run))
    assert code == 0 and HALF not in err and "other data than" not in err


def test_a_run_resumes_with_its_own_classes(place, capsys):
    argv = get_argv(place, "other", f"--resume={get_run(place)}", "--train.steps=2")
    allowed = ["train.steps", "data.train_split"]
    error = get_error(capsys, [*argv, f"--run.allow_changes={json.dumps(allowed)}"])
    assert "3 of its 3 names are unknown here" in error
    allowed = json.dumps([*allowed, "data.root", "data.name"])
    assert check(capsys, [*argv, f"--run.allow_changes={allowed}"])[0] == 0


def get_taught(place: Path, data: str, teacher: str, **keys: str) -> list[str]:
    section = json.dumps([{"weights": teacher, **keys}])
    return get_argv(place, data, f"--distill.teachers={section}", "--distill.loss=kd")


def test_a_teacher_of_other_classes_is_refused(place, capsys):
    for data in ("other", "shifted"):
        error = get_error(capsys, get_taught(place, data, get_run(place)))
        assert "has other classes than the student" in error and "label_map" in error
    flags = (f"--teacher_path={get_run(place)}", "--distill.loss=kd")
    assert "has other classes than" in get_error(capsys, get_argv(place, "other", *flags))
    assert check(capsys, get_argv(place, "own", *flags))[0] == 0


def test_a_teacher_of_another_class_order_is_mapped_by_name_on_request(place, capsys):
    turned = str(place / "turned")
    error = get_error(capsys, get_taught(place, "own", turned))
    assert "in another order: class 0 is 'eel' there and 'cat' here" in error
    assert "set distill.teachers label_map to by_name" in error
    found = get_taught(place, "own", turned, label_map="by_name")
    assert check(capsys, found)[0] == 0
    error = get_error(capsys, get_taught(place, "other", turned, label_map="by_name"))
    assert "3 of the 3 classes of the student are unknown to distill.teacher" in error


def test_a_teacher_without_class_names_warns_once(place, capsys):
    code, _, err = check(capsys, get_taught(place, "own", get_run(place, "unnamed")))
    assert code == 0 and err.count(HALF) == 1


def test_stored_logits_of_other_classes_are_refused(place, tmp_path, capsys):
    store, config = tmp_path / "cache", tmp_path / "run.yaml"
    argv = get_taught(place, "own", get_run(place))
    argv += ["--distill.allow_weak_teacher=true", "--data.train_split=train"]
    config.write_text("{}\n")
    assert cache(["write", "--config", str(config), "--out", str(store), *argv]) == 0
    manifest = json.loads((store / "manifest.json").read_text())
    assert manifest["class_names"] == list(NAMES)
    taught = [*get_argv(place, "own"), f"--distill.teacher_cache={store}", "--distill.loss=kd"]
    assert check(capsys, taught)[0] == 0
    manifest["class_names"] = ["fox", "gnu", "hen"]
    (store / "manifest.json").write_text(json.dumps(manifest))
    error = get_error(capsys, taught)
    assert "distill.teacher_cache" in error and "has other classes than the student" in error
    del manifest["class_names"]  # as older programs wrote it
    (store / "manifest.json").write_text(json.dumps(manifest))
    code, _, err = check(capsys, taught)
    assert code == 0 and err.count(HALF) == 1


@pytest.mark.parametrize("key", ["--init-from", "--model.weights"])
def test_a_head_of_other_classes_is_reinitialised(place, capsys, key):
    weights = f"{key}={get_run(place)}"
    code, out, _ = check(capsys, get_argv(place, "other", weights))
    assert code == 0
    assert "the head starts anew with 3 classes (head.weight, head.bias)" in out
    assert "3 of its 3 names are unknown here" in out
    assert "18 of 20 tensors start from" in out
    argv = get_argv(place, "other", weights, "--model.reset_head=never")
    assert "has other classes than the run's data" in get_error(capsys, argv)
    code, out, _ = check(capsys, get_argv(place, "own", weights))
    assert code == 0 and "20 of 20 tensors start from" in out and "anew" not in out


@pytest.mark.parametrize("key", ["--init-from", "--model.weights"])
def test_a_head_of_another_class_order_is_mapped_by_name_on_request(place, capsys, key):
    weights = f"{key}={place / 'turned'}"
    error = get_error(capsys, get_argv(place, "own", weights))
    assert "in another order" in error and "set model.reset_head=by_name" in error
    mapped = ("--model.reset_head=by_name", f"--run.run_id={key.strip('-')}")
    assert main.main(get_argv(place, "own", weights, *mapped)) == 0
    found = load_file(Path(get_run(place, key.strip("-"))) / "student.safetensors")
    wanted = load_file(Path(get_run(place)) / "student.safetensors")
    for name in ("head.weight", "head.bias"):
        assert torch.allclose(found[name], wanted[name], atol=1e-6), name
    error = get_error(capsys, get_argv(place, "other", weights, mapped[0]))
    assert "3 of the 3 classes of the run's data are unknown to" in error


def test_initial_weights_without_class_names_warn_once(place, capsys):
    weights = f"--init-from={get_run(place, 'unnamed')}"
    code, out, err = check(capsys, get_argv(place, "own", weights))
    assert code == 0 and err.count(HALF) == 1 and "20 of 20 tensors" in out


def test_a_named_set_is_evaluated_by_class_index_with_one_warning(place, capsys):
    def describe(data: str) -> str:
        return f"{{name: mine, source: folder, root: {place / data}, split: val, pp: '{PP}'}}"

    flags = ["--runtime.device=cpu", "--sets"]
    run = get_run(place, "unnamed")
    assert evaluate([run, "--pp", PP, *flags, describe("own")]) == 0
    assert capsys.readouterr().err.count(HALF) == 1
    assert evaluate([get_run(place), *flags, describe("own")]) == 0
    assert HALF not in capsys.readouterr().err
    assert evaluate([get_run(place), *flags, describe("other")]) == 2
    assert "3 of its 3 classes are unknown to the model" in capsys.readouterr().err


def test_imagenet_descriptions_match_wordnet_ids_in_an_evaluation(place, capsys):
    """Folders called as `tools.predict` calls ImageNet's classes, and the other way round."""
    info, args = ImageNetInfo("imagenet-1k"), {**VIT_ARGS, "img_size": 8}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=1000, **args)
    facts = {"model": "vit_tiny_patch16_224", "args": args, "num_classes": 1000, "eval_pp": PP}
    words = write_folder(place / "words", ("espresso", "daisy", "tripod"))
    numbers = write_folder(place / "numbers", ("n07920052", "n11939491", "n04485082"))
    for names in (info.label_descriptions(), info.label_names()):
        folder = place / names[0].partition(",")[0]
        folder.mkdir()
        export_model(model.state_dict(), {**facts, "classes": names}, folder)
        for root in (words, numbers):
            one = f"{{name: mine, source: folder, root: {root}, split: val, pp: '{PP}'}}"
            argv = [str(folder), "--runtime.device=cpu", "--json", "--sets", one]
            assert evaluate(argv) == 0
            told = json.loads(capsys.readouterr().out)["sets"]["mine"]
            assert told["competing_classes"] == 3
