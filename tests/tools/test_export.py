"""Models in other programs' formats: read back there, they give the same outputs."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import timm
import torch

from models.factory import export_model
from models.trained import open_trained
from tests.support.photographs import write_photographs
from tools.export.__main__ import main
from tools.export.export_model import compare
from tools.export.formats import StableHloAny, describe_crop
from utils.errors import UserError

PP = "decode|resize_small(40)|central_crop(32)|vgg_value_range"
# A ViT, a ResNet, and a student with a token for its teacher.
MODELS = {
    "vit_tiny_patch16_224": {
        "img_size": 32,
        "patch_size": 8,
        "depth": 2,
        "embed_dim": 32,
        "num_heads": 2,
    },
    "resnet10t": {},
    "deit_tiny_distilled_patch16_224": {
        "img_size": 32,
        "patch_size": 8,
        "depth": 2,
        "embed_dim": 32,
        "num_heads": 2,
    },
}


def write_model(folder, name, **more):
    """An export, as runs leave it, of a model whose answers depend on its images."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **MODELS[name])
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.add_(0.03 * torch.randn_like(value))
    mean, std = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
    facts = {"model": name, "args": MODELS[name], "num_classes": 7, "mean": mean, "std": std}
    names = [f"kind {number}" for number in range(7)]
    folder.mkdir()
    export_model(model.state_dict(), {**facts, "eval_pp": PP, "classes": names, **more}, folder)
    return folder


def read_report(folder):
    return json.loads((folder / "export.json").read_text())


QUICK = ("onnx", "torch_export", "timm")


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("vit_tiny_patch16_224", QUICK),
        *(pytest.param(name, (*QUICK, "stablehlo"), marks=pytest.mark.slow) for name in MODELS),
    ],
)
def test_every_format_gives_the_same_outputs(tmp_path, name, forms, capsys):
    weights, out = write_model(tmp_path / "run", name), tmp_path / "out"
    write_photographs(tmp_path / "photos", 6, side=120)
    flags = [str(weights), "--out", str(out), "--images", str(tmp_path / "photos")]
    assert main([*flags, "--to", *forms]) == 0
    report = read_report(out)
    assert report["images"] == 6 and report["input"]["shape"] == ["batch", 3, 32, 32]
    assert set(report["forms"]) == set(forms)
    for form in report["forms"].values():
        assert form["max_difference"] < 1e-4 and form["top1_agreement"] == 1.0
    assert capsys.readouterr().out.count(": within 0.0001") == len(forms)
    # timm's own reader makes the model and tells how its images are prepared, as does this one.
    model = timm.create_model(f"local-dir:{out / 'timm'}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(model)
    assert (config["crop_pct"], config["input_size"]) == (0.8, (3, 32, 32))
    assert config["mean"] == pytest.approx((0.485, 0.456, 0.406))
    again = open_trained(f"local-dir:{out / 'timm'}", "WEIGHTS")
    assert again.get_class_name(6) == "kind 6"
    first = open_trained(str(weights), "WEIGHTS")
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(again.model(images), first.model(images))
        assert torch.equal(model(images), first.model(images))


HAS_JAX = all(importlib.util.find_spec(name) is not None for name in ("jax", "torchax"))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_JAX, reason="needs jax and torchax: setup --jax-export")
@pytest.mark.parametrize("name", MODELS)
def test_stablehlo_with_dynamic_batch_gives_the_same_outputs(tmp_path, name):
    from tools.export.stable_hlo import run_by_jax

    weights, out = write_model(tmp_path / "run", name), tmp_path / "out"
    flags = [str(weights), "--out", str(out), "--normalize", "--count", "6", "--to"]
    assert main([*flags, "stablehlo_any", "savedmodel"]) == 0
    form = read_report(out)["forms"]["stablehlo_any"]
    assert form["batch"] is None
    assert form["max_difference"] < 1e-4 and form["top1_agreement"] == 1.0
    trained = open_trained(str(weights), "WEIGHTS")
    pixels = torch.randint(0, 256, (11, 3, 32, 32)).float()
    with torch.no_grad():
        wanted = trained.model(trained.create_transform()(pixels)).numpy()
    parts = [pixels.numpy(), pixels[:1].numpy()]
    for found in run_by_jax(out / "stablehlo_any", parts):
        assert found.shape[1:] == wanted.shape[1:]
        np.testing.assert_allclose(found, wanted[: len(found)], atol=1e-4)
    assert (out / "stablehlo_any" / "program.mlir").stat().st_size > 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "needs jax, torchax; bash run_commands.sh setup --jax-export"),
        (("--batch-size", "4"), "--batch-size (4) is not supported with --to stablehlo_any"),
    ],
)
def test_models_unsupported_by_dynamic_batch_stablehlo_are_refused(
    tmp_path, monkeypatch, capsys, flags, words
):
    found = importlib.util.find_spec if flags else lambda name: None
    monkeypatch.setattr("tools.export.formats.importlib.util.find_spec", found)
    monkeypatch.setattr(StableHloAny, "needs", ("torch",) if flags else StableHloAny.needs)
    weights = write_model(tmp_path / "run", "resnet10t")
    assert main([str(weights), "--out", str(tmp_path), "--to", "stablehlo_any", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_exports_with_normalisation_inside_take_pixels(tmp_path, capsys):
    """A SavedModel of any number of images, by TensorFlow alone, and a fixed batch of ONNX."""
    import onnxruntime
    import tensorflow as tf

    weights, out = write_model(tmp_path / "run", "vit_tiny_patch16_224"), tmp_path / "out"
    flags = [str(weights), "--out", str(out), "--normalize", "--count", "5", "--to"]
    assert main([*flags, "savedmodel"]) == 0
    report = read_report(out)
    assert report["input"]["range"] == "pixels of 0 to 255"
    # The bound is looked at: ONNX Runtime's last bits are not PyTorch's.
    assert main([*flags, "onnx", "--batch-size", "2", "--bound", "0"]) == 1
    assert "BEYOND 0" in capsys.readouterr().out
    assert read_report(out)["forms"]["onnx"]["within"] is False
    trained = open_trained(str(weights), "WEIGHTS")
    pixels = np.random.default_rng(0).integers(0, 256, (11, 3, 32, 32)).astype(np.float32)
    with torch.no_grad():
        wanted = trained.model(trained.create_transform()(torch.from_numpy(pixels))).numpy()
    served = tf.saved_model.load(str(out / "savedmodel")).signatures["serving_default"]
    found = served(images=tf.constant(pixels))["logits"].numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    session = onnxruntime.InferenceSession(str(out / "onnx" / "model.onnx"))
    assert session.get_inputs()[0].shape == [2, 3, 32, 32]
    (found,) = session.run(None, {"images": pixels[:2]})
    np.testing.assert_allclose(found, wanted[:2], atol=1e-4)


def test_a_normalising_program_takes_pixels(tmp_path):
    weights, out = write_model(tmp_path / "run", "vit_tiny_patch16_224"), tmp_path / "out"
    flags = [str(weights), "--out", str(out), "--normalize", "--count", "3", "--batch-size", "2"]
    assert main([*flags, "--to", "torch_export"]) == 0
    report = read_report(out)
    # A later command leaves the word on this form's input where the form lies.
    flags = [str(weights), "--out", str(out), "--count", "1", "--to", "timm"]
    assert main(flags) == 0
    assert read_report(out)["input"]["range"] != "pixels of 0 to 255"
    assert read_report(out / "torch_export") == report
    assert report["input"]["range"] == "pixels of 0 to 255"
    trained = open_trained(str(weights), "WEIGHTS")
    pixels = torch.randint(0, 256, (2, 3, 32, 32)).float()
    with torch.no_grad():
        wanted = trained.model(
            (pixels - trained.create_transform().mean) / trained.create_transform().std
        )
        found = torch.export.load(out / "torch_export" / "model.pt2").module()(pixels)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert report["input"]["shape"] == [2, 3, 32, 32]


def test_output_differences_are_measured():
    wanted = np.array([[0.0, 1.0], [2.0, 1.0]])
    found = compare(wanted, [np.array([[0.0, 1.5]]), np.array([[2.0, 2.5], [9.0, 9.0]])], 1.0)
    assert found == {
        "max_difference": 1.5,
        "mean_difference": 0.5,
        "top1_agreement": 0.5,
        "within": False,
    }
    assert not compare(wanted, [wanted * np.nan], 1e9)["within"]
    with pytest.raises(UserError, match="outputs of shape"):
        compare(wanted, [wanted[:, :1]], 1.0)


def test_preprocessing_is_described_in_timms_words():
    assert describe_crop("decode|resize(224)|value_range(-1, 1)")["crop_mode"] == "squash"
    found = describe_crop('decode|resize_small(256, "bicubic")|central_crop(224)')
    assert found == {"crop_pct": 0.875, "crop_mode": "center", "interpolation": "bicubic"}
    found = describe_crop("decode|resize(40)|central_crop(32)")
    assert (found["crop_pct"], found["crop_mode"]) == (0.8, "squash")
    found = describe_crop("decode|center_crop_pct(32, 0.9, 'bilinear', mode='squash')")
    assert found == {"crop_pct": 0.9, "crop_mode": "squash", "interpolation": "bilinear"}
    found = describe_crop("decode|central_crop|resize(32)")
    assert (found["crop_pct"], found["crop_mode"]) == (1.0, "center")


BAD = [
    (["--to", "onnx", "--count", "0"], "--count (0) must be at least 1"),
    (["--to", "onnx", "--batch-size", "0"], "--batch-size (0) must be at least 1"),
    (["--to", "onnx", "--bound", "-1"], "--bound (-1) must be at least 0"),
    (["--to", "timm", "--normalize"], "--normalize is not supported with --to timm"),
    (["--to", "onnx", "--images", "nowhere"], "--images ('nowhere'): no such file or directory"),
    (["--to", "onnx", "--model", "resnet18"], "is not the model in WEIGHTS"),
]


@pytest.mark.parametrize(("words", "said"), BAD)
def test_bad_input_gives_one_line(tmp_path, capsys, words, said):
    weights = write_model(tmp_path / "run", "resnet10t")
    assert main([str(weights), "--out", str(tmp_path / "out"), *words]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_another_format_is_written_where_timm_cannot_normalise(tmp_path, capsys):
    weights, out = write_model(tmp_path / "run", "vit_tiny_patch16_224"), tmp_path / "out"
    argv = [str(weights), "--out", str(out), "--normalize", "--count", "2"]
    assert main([*argv, "--to", "timm", "torch_export"]) == 2
    told = capsys.readouterr()
    assert "torch_export: max difference" in told.out and not (out / "timm").exists()
    assert told.err.startswith("error: --to timm is not written: its config.json has mean and")
    assert list(read_report(out)["forms"]) == ["torch_export"]


def test_a_model_unknown_to_timm_is_refused_for_the_timm_format(tmp_path, capsys):
    from models.factory import create_model
    from utils.config.sections import ModelSection

    model = create_model(ModelSection(name="mnist_cnn"), num_classes=10)
    facts = {
        "model": "mnist_cnn",
        "num_classes": 10,
        "eval_pp": "decode(channels=1)|resize(28)|value_range(0, 1)",
    }
    export_model(model.state_dict(), facts, tmp_path)
    assert main([str(tmp_path), "--out", str(tmp_path / "out"), "--to", "timm"]) == 2
    assert "mnist_cnn is no model of timm" in capsys.readouterr().err
