"""Tables of predictions for files: their content, in each format, and bad files."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import load_file
from sklearn.datasets import load_sample_image

import main as training
from big_vision.pp.builder import get_preprocess_fn
from models.trained import open_trained
from tests.support.photographs import write_digits, write_photographs
from tests.support.tiny_parts import create_argv
from tools.predict.__main__ import main
from utils.errors import UserError

CPU = ["--device", "cpu", "--batch-size", "5"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A folder of digits with a cut file and a text among them, and the digits themselves."""
    folder = tmp_path_factory.mktemp("digits")
    images = write_digits(folder / "inner")
    (folder / "inner" / "digit_05.png").write_bytes(b"\x89PNG\r\n\x1a\n of nothing")
    (folder / "notes.txt").write_text("no image")
    for name in ("a.tiff", "b.avif", "._digit_05.png"):
        (folder / "inner" / name).write_bytes(b"x")
    return folder, images


def predict_by_timm(run, images):
    """Compute probabilities and pooled features by timm alone."""
    facts = json.loads((run / "student.json").read_text())
    model = timm.create_model(facts["model"], num_classes=10, **facts["args"])
    model.load_state_dict(load_file(run / "student.safetensors"))
    inputs = (torch.from_numpy(images).float()[:, None] - 127.5) / 127.5
    with torch.no_grad():
        maps = model.eval().forward_features(inputs)
        features = model.forward_head(maps, pre_logits=True)
        return model.forward_head(maps).softmax(dim=1).numpy(), features.numpy()


def test_every_format_predicts_the_same_as_the_model(teacher_run, digits, tmp_path, capsys):
    folder, images = digits
    tables = {ending: tmp_path / f"answers.{ending}" for ending in ("csv", "json", "parquet")}
    for ending, path in tables.items():
        flags = [str(teacher_run), str(folder), "--out", str(path), "--top-k", "3", *CPU]
        assert main([*flags, *([] if ending == "csv" else ["--embed"])]) == 0
        out = capsys.readouterr()
        assert "11 images answered" in out.out and "1 could not be read" in out.out
        assert "digit_05.png" in out.err
        left_out = "left out, as they are not images: 1 .avif, 1 .tiff, 1 .txt, 1 hidden .png"
        assert f"FOLDER ({folder}): {left_out}\n" in out.err
    probs, features = predict_by_timm(teacher_run, images)
    rows = {row["file"]: row for row in csv.DictReader(tables["csv"].open())}
    assert list(rows) == [f"inner/digit_{number:02d}.png" for number in range(12)]
    assert rows["inner/digit_05.png"]["class_1"] == ""
    assert "digit_05.png" in rows["inner/digit_05.png"]["error"]
    whole = {row["file"]: row for row in json.loads(tables["json"].read_text())}
    columns = {row["file"]: row for row in parquet.read_table(tables["parquet"]).to_pylist()}
    for number in set(range(12)) - {5}:
        name = f"inner/digit_{number:02d}.png"
        order = np.argsort(-probs[number])[:3]
        for place, best in enumerate(order):
            assert int(rows[name][f"class_{place + 1}"]) == best
            assert rows[name][f"name_{place + 1}"] == str(best)
            told = whole[name]["best"][place]
            assert told["class"] == columns[name][f"class_{place + 1}"] == best
            given = float(rows[name][f"probability_{place + 1}"])
            assert given == pytest.approx(probs[number, best], abs=1e-5)
            assert columns[name][f"probability_{place + 1}"] == pytest.approx(given)
        np.testing.assert_allclose(columns[name]["features"], features[number], atol=1e-4)
        np.testing.assert_allclose(whole[name]["features"], features[number], atol=1e-4)


def test_weights_without_metadata_take_their_model_from_a_flag(tmp_path, capsys):
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=1000)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    write_photographs(tmp_path / "photos", 2)
    flags = [str(tmp_path / "w.pth"), str(tmp_path / "photos"), "--out", str(tmp_path / "a.csv")]
    assert main([*flags, *CPU]) == 2
    assert "does not say its model; name it by --model" in capsys.readouterr().err
    assert main([*flags, *CPU, "--model", "resnet10t", "--embed"]) == 0
    (first, _) = csv.DictReader((tmp_path / "a.csv").open())
    assert first["feature_511"] and "feature_512" not in first
    trained = open_trained(str(tmp_path / "w.pth"), "WEIGHTS", {"model": "resnet10t"})
    assert trained.image_shape == (176, 176, 3)


def test_classes_of_a_shared_model_have_names(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=3)
    labels = {"label_names": ["n1", "n2", "n3"], "label_descriptions": {"n2": "a second one"}}
    timm.models.save_for_hf(model, tmp_path / "m", model_config=labels, safe_serialization=True)
    trained = open_trained(f"local-dir:{tmp_path / 'm'}", "WEIGHTS")
    assert trained.class_names == ("n1", "a second one", "n3")
    model = timm.create_model("resnet10t")
    timm.models.save_for_hf(model, tmp_path / "imagenet", safe_serialization=True)
    names = open_trained(f"local-dir:{tmp_path / 'imagenet'}", "WEIGHTS").class_names
    assert "goldfish" in names[1]


@pytest.mark.parametrize(
    ("crop", "words"),
    [
        ({"crop_mode": "squash", "crop_pct": 0.5}, "176, 0.5, 'bicubic', mode='squash'"),
        ({"crop_mode": "center", "crop_pct": 0.5}, "176, 0.5, 'bicubic'"),
    ],
)
def test_images_of_a_shared_model_are_cropped_by_its_config(tmp_path, crop, words):
    model = timm.create_model("resnet10t", num_classes=3)
    timm.models.save_for_hf(model, tmp_path / "m", data_config=crop, safe_serialization=True)
    pp = open_trained(f"local-dir:{tmp_path / 'm'}", "WEIGHTS").pp
    assert f"|center_crop_pct({words})|" in pp


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_a_shared_model_gets_the_pixels_of_timms_transform(tmp_path, form):
    model = timm.create_model("resnet10t", num_classes=3)
    timm.models.save_for_hf(model, tmp_path / "m", safe_serialization=True)
    pp = open_trained(f"local-dir:{tmp_path / 'm'}", "WEIGHTS").pp
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    encoded = io.BytesIO()
    Image.fromarray(load_sample_image("china.jpg")[:, :530]).save(encoded, form)
    ours = get_preprocess_fn(pp)({"image": encoded.getvalue()})["image"].numpy()
    theirs = transform(Image.open(encoded)).permute(1, 2, 0).numpy()
    gaps = np.abs(ours - theirs) * np.array(config["std"]) * 255
    # A level, where a half falls to the other side; the float32 of both normalisations.
    assert gaps.max() < 1.01
    assert gaps.mean() < 0.005


def test_an_inexpressible_crop_must_be_given(tmp_path):
    model = timm.create_model("resnet10t", num_classes=3)
    crop = {"crop_mode": "border"}
    timm.models.save_for_hf(model, tmp_path / "m", data_config=crop, safe_serialization=True)
    place = f"local-dir:{tmp_path / 'm'}"
    with pytest.raises(UserError, match="crop_mode 'border', which pads; say by --pp"):
        open_trained(place, "WEIGHTS")
    pp = "decode|resize(176)|value_range(-1, 1)"
    assert open_trained(place, "WEIGHTS", {"eval_pp": pp}).pp == pp


def test_multilabel_classes_are_scored_independently(tmp_path, capsys):
    """A run by the sigmoid loss says so beside its weights."""
    flags = ("--train.task_loss=bce", "--train.steps=2", "--run.run_id=a")
    assert training.main(create_argv(tmp_path, *flags)) == 0
    trained = open_trained(str(tmp_path / "tiny" / "a"), "WEIGHTS")
    assert trained.compute_scores(torch.zeros(1, 3)).tolist() == [[0.5, 0.5, 0.5]]
    plain = dataclasses.replace(trained, facts={})
    assert plain.compute_scores(torch.zeros(1, 2)).tolist() == [[0.5, 0.5]]


def test_an_earlier_programs_run_takes_preprocessing_from_its_configuration():
    trained = open_trained("tests/fixtures/old_runs/plain", "WEIGHTS")
    assert "eval_pp" not in trained.facts and trained.class_names is None
    assert trained.pp == "value_range(-1, 1)" and trained.num_classes == 10


@pytest.mark.xla
@pytest.mark.slow
def test_xla_predicts_like_the_cpu(teacher_run, digits, tmp_path):
    tables = []
    for device in ("cpu", "xla"):
        path = tmp_path / f"{device}.json"
        flags = [str(teacher_run), str(digits[0]), "--out", str(path), "--batch-size", "5"]
        assert main([*flags, "--device", device, "--embed"]) == 0
        tables.append(json.loads(path.read_text()))
    for here, there in zip(*tables, strict=True):
        assert here["file"] == there["file"] and ("error" in here) == ("error" in there)
        names, others = ([one["class"] for one in row["best"]] for row in (here, there))
        assert names == others
        np.testing.assert_allclose(here.get("features", []), there.get("features", []), atol=1e-4)


BAD = [
    (["nowhere/run", "IMAGES"], "no such file or directory"),
    (["resnte18", "IMAGES"], "is neither a path nor a model of timm; did you mean resnet18"),
    (["RUN", "nowhere"], "FOLDER ('nowhere'): no such file or directory; name a folder"),
    (["RUN", "EMPTY"], "holds no image; its files must end with"),
    (["RUN", "gs://bucket/images"], "is a URL, but single images are read in local"),
    (["RUN", "IMAGES", "--top-k", "0"], "--top-k (0) must be at least 1"),
    (["RUN", "IMAGES", "--batch-size", "-1"], "--batch-size (-1) must be at least 1"),
    (["RUN", "IMAGES", "--out", "a.xlsx"], "must end with .csv, .json, .parquet"),
    (["RUN", "IMAGES", "--pp", "decode|resize(8"], "--pp"),
    (["RUN", "IMAGES", "--pp", "decode|value_range(-1, 1)"], "is not a fixed [H, W, C]"),
    (["RUN", "IMAGES", "--model", "resnet18"], "is not the model in WEIGHTS"),
    (
        ["RUN", "IMAGES", "--model-args", "[1]"],
        "('[1]') cannot be used: Input should be an object",
    ),
    (["RUN", "IMAGES", "--model-args", '{"num_heads": 1}'], "(num_heads: 1) contradicts WEIGHTS"),
    (["RUN", "IMAGES", "--classes", "7"], "is of another model"),
]


@pytest.mark.parametrize(("words", "said"), BAD)
def test_bad_input_gives_one_line(teacher_run, digits, tmp_path, capsys, words, said):
    (tmp_path / "empty").mkdir()
    places = {"RUN": str(teacher_run), "IMAGES": str(digits[0]), "EMPTY": str(tmp_path / "empty")}
    flags = ["--out", str(tmp_path / "a.csv"), *CPU, *(places.get(word, word) for word in words)]
    assert main(flags) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1
    assert not (tmp_path / "a.csv").exists()


def test_a_broken_link_and_an_undecodable_name_are_reported(teacher_run, tmp_path, capsys):
    folder = tmp_path / "odd"
    write_digits(folder)
    for path in sorted(folder.iterdir())[1:]:
        path.unlink()
    (only,) = folder.iterdir()
    only.rename(os.fsdecode(os.fsencode(folder) + b"/a\xff.png"))
    (folder / "gone.png").symlink_to(tmp_path / "nowhere")
    out = tmp_path / "a.json"
    assert main([str(teacher_run), str(folder), "--out", str(out), *CPU]) == 0
    assert "1 images answered" in capsys.readouterr().out
    first, second = json.loads(out.read_text())
    assert first["file"] == "a\\xff.png" and first["best"]
    assert second["file"] == "gone.png" and "No such file" in second["error"]


def test_no_readable_image_gives_code_1(teacher_run, tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(b"nothing")
    assert main([str(teacher_run), str(tmp_path / "a.png"), "--out", str(tmp_path / "a.csv"), *CPU])
    assert "0 images answered" in capsys.readouterr().out
