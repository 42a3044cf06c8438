"""Runs that start from others' weights, through main.py: JAX archives, shared models, patterns."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from timm.models.resnetv2 import ResNetV2

import main
from models.factory import build_model, create_model
from tests.support.jax_archives import write_bit, write_vit
from tests.support.tiny_parts import VIT_ARGS, create_argv, create_vit
from utils.config.sections import ModelSection
from utils.errors import UserError
from utils.weights.hub import open_shared
from utils.weights.load import load_weights
from utils.weights.opening import open_weights

STILL = ("--train.steps=1", "--lr=1e-9", "--optim.min_lr=0", "--weight_decay=0")


def run(root: Path, name: str, *flags: str) -> dict[str, torch.Tensor]:
    """The weights after a run of one step that moves nothing."""
    argv = create_argv(root, f"--run.run_id={name}", *STILL, *flags)
    assert main.main(argv) == 0
    return load_file(root / "tiny" / name / "student.safetensors")


def get_error(root: Path, capsys, *flags: str) -> str:
    """The one line of a run that is refused before it begins."""
    capsys.readouterr()
    assert main.main(create_argv(root, "--run.check_only=true", *flags)) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text.strip().splitlines()[-1]


def assert_alike(found: dict, wanted: dict, *, but: tuple[str, ...] = ()) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        is_alike = found[name].shape == value.shape and torch.allclose(
            found[name], value, rtol=1e-5, atol=1e-6
        )
        assert is_alike != name.startswith(but or ("none",)), name


@pytest.mark.parametrize("big_vision", [False, True])
def test_a_run_starts_from_a_jax_archive(tmp_path, big_vision):
    vit = create_vit(seed=5)
    place = write_vit(tmp_path / "Ti.npz", vit, big_vision=big_vision)
    flag = "--model.weights" if big_vision else "--init-from"
    assert_alike(run(tmp_path, "a", f"{flag}={place}"), vit.state_dict())


def test_an_archive_serves_as_teacher_and_a_bit_resnet_is_read(tmp_path):
    vit = create_vit(seed=5)
    place = write_vit(tmp_path / "Ti.npz", vit)
    facts = {"model": "vit_tiny_patch16_224", "args": {**VIT_ARGS, "img_size": 8}}
    place.with_suffix(".json").write_text(json.dumps({**facts, "num_classes": 10}))
    run(
        tmp_path,
        "taught",
        f"--distill.teacher_weights={place}",
        "--distill.loss=kd",
        "--distill.allow_weak_teacher=true",
    )
    sizes = {"channels": (128, 128), "num_classes": 3, "in_chans": 1, "stem_chs": 32}
    bit = ResNetV2((1, 1), **sizes)
    weights = open_weights(str(write_bit(tmp_path / "R.npz", bit)), "model.weights")
    with torch.device("meta"):
        load_weights(ResNetV2((1, 1), **sizes), weights)
    other = ResNetV2((1, 1), **sizes)
    load_weights(other, weights)
    assert_alike(other.state_dict(), bit.state_dict())
    assert "resnet/head/conv2d/kernel" in weights.kinds


WRONG_ARCHIVES = [
    ({"x": np.zeros(2)}, "did not find a supported JAX/Flax parameter layout"),
    (b"PK\x03\x04 cut", "is not a NumPy archive"),
    (b"nothing", "is not a NumPy archive"),
]


@pytest.mark.parametrize(("content", "reason"), WRONG_ARCHIVES)
def test_an_archive_of_another_model_is_refused(tmp_path, capsys, content, reason):
    place = tmp_path / "x.npz"
    if isinstance(content, bytes):
        place.write_bytes(content)
    else:
        np.savez(place, **content)
    error = get_error(tmp_path, capsys, f"--init-from={place}")
    assert f"run.init_from ('{place}') cannot be read" in error
    assert reason in error


def test_an_archive_of_another_depth_width_or_kind_is_refused(tmp_path, capsys):
    place = write_vit(tmp_path / "Ti.npz", create_vit())
    deep = "--model.args=" + json.dumps({**VIT_ARGS, "depth": 2})
    assert "encoderblock_1" in get_error(tmp_path, capsys, f"--model.weights={place}", deep)
    wide = "--model.args=" + json.dumps({**VIT_ARGS, "embed_dim": 32})
    assert "fails:" in get_error(tmp_path, capsys, f"--model.weights={place}", wide)
    with pytest.raises(UserError, match="cannot read JAX archives of ResNet"):
        load_weights(timm.create_model("resnet18"), open_weights(str(place), "model.weights"))
    np.save(tmp_path / "one.npy", np.zeros(3))
    error = get_error(tmp_path, capsys, f"--model.weights={tmp_path / 'one.npy'}")
    assert "one array without names" in error


@pytest.mark.parametrize("key", ["--model.weights", "--init-from"])
def test_another_number_of_classes_starts_a_new_head(tmp_path, capsys, key):
    section = ModelSection(name="vit_tiny_patch16_224", image_size=8, args=VIT_ARGS)
    torch.manual_seed(3)
    many = create_model(section, num_classes=21)
    save_file(many.state_dict(), tmp_path / "many.safetensors")
    archive = write_vit(tmp_path / "many.npz", many)
    wanted = create_vit().state_dict() | {
        k: v for k, v in many.state_dict().items() if not k.startswith("head.")
    }
    for number, place in enumerate((tmp_path / "many.safetensors", archive)):
        capsys.readouterr()
        found = run(tmp_path, str(number), f"{key}={place}")
        lines = [line for line in capsys.readouterr().err.splitlines() if "head" in line]
        assert len(lines) == 1
        assert "the head starts anew with 10 classes (head.weight, head.bias)" in lines[0]
        assert_alike(found, wanted)
    error = get_error(tmp_path, capsys, f"{key}={archive}", "--model.reset_head=never")
    assert "2 missing: head.weight, head.bias" in error
    same = write_vit(tmp_path / "same.npz", create_vit(seed=5))
    found = run(tmp_path, "anew", f"{key}={same}", "--model.reset_head=always")
    head = {k: v for k, v in create_vit().state_dict().items() if k.startswith("head.")}
    assert_alike(found, create_vit(seed=5).state_dict() | head)


def test_an_untrained_head_is_not_evaluated(tmp_path, capsys):
    section = ModelSection(name="vit_tiny_patch16_224", image_size=8, args=VIT_ARGS)
    save_file(create_model(section, num_classes=21).state_dict(), tmp_path / "a.safetensors")
    weights = f"--model.weights={tmp_path / 'a.safetensors'}"
    assert "2 different: head.weight" in get_error(tmp_path, capsys, "--eval", weights)
    error = get_error(tmp_path, capsys, "--eval", weights, "--model.reset_head=always")
    assert "would evaluate an untrained head" in error


def test_positions_patches_and_channels_of_another_size_are_resampled(tmp_path, capsys):
    args = {**VIT_ARGS, "in_chans": 3, "patch_size": 8}
    section = ModelSection(name="vit_tiny_patch16_224", image_size=32, args=args)
    torch.manual_seed(3)
    large = create_model(section, num_classes=10)
    archive = write_vit(tmp_path / "large.npz", large)
    save_file(large.state_dict(), tmp_path / "large.safetensors")
    found = run(tmp_path, "a", f"--init-from={tmp_path / 'large.safetensors'}")
    told = capsys.readouterr().err
    assert "pos_embed is resampled from (1, 17, 16) to (1, 5, 16)" in told
    assert "patch_embed.proj.weight is converted from 3 input channels to 1" in told
    wanted = create_vit()
    timm.models.load_checkpoint(
        wanted,
        str(tmp_path / "large.safetensors"),
        strict=False,
        filter_fn=lambda tensors, model: {
            k: timm.models.adapt_input_conv(1, v) if "patch_embed.proj.weight" in k else v
            for k, v in timm.models.vision_transformer.checkpoint_filter_fn(tensors, model).items()
        },
    )
    assert_alike(found, wanted.state_dict())
    same = create_vit()
    same.load_pretrained(str(archive))
    assert_alike(run(tmp_path, "b", f"--model.weights={archive}"), same.state_dict())


def test_mismatched_weights_are_named_by_patterns(tmp_path, capsys):
    vit = create_vit(seed=5)
    names = {"blocks.": "encoder.layers.", "": "backbone."}
    tensors = {
        "backbone." + k.replace("blocks.", names["blocks."]): v for k, v in vit.state_dict().items()
    }
    tensors["teacher.temperature"] = torch.ones(1)
    save_file(tensors, tmp_path / "a.safetensors")
    start = f"--init-from={tmp_path / 'a.safetensors'}"
    rules = {"backbone.encoder.layers.*": "blocks.*", "backbone.*": "*"}
    renamed = "--run.init_rename=" + json.dumps(rules)
    assert "skip tensors by run.init_skip" in get_error(tmp_path, capsys, start)
    assert "1 unexpected: teacher.temperature" in get_error(tmp_path, capsys, start, renamed)
    skipped = '--run.init_skip=["teacher.*","blocks.0.mlp.*"]'
    found = run(tmp_path, "a", start, renamed, skipped)
    assert_alike(
        found, vit.state_dict(), but=("blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight")
    )
    error = get_error(tmp_path, capsys, start, renamed, '--run.init_skip=["haed.*"]')
    assert "run.init_skip ('haed.*') matches no name" in error
    assert "did you mean head" in error
    error = get_error(tmp_path, capsys, start, '--run.init_rename={"body.*":"blocks.*"}')
    assert "run.init_rename ('body.*') matches no name" in error


@pytest.fixture
def shared(tmp_path) -> Path:
    """A folder as timm writes one for its hub."""
    torch.manual_seed(5)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=8, **VIT_ARGS)
    arguments = {"img_size": 8, **VIT_ARGS}
    save_for_hf(model, tmp_path / "shared", model_args=arguments, safe_serialization=True)
    return tmp_path / "shared"


def test_a_shared_folder_serves_as_name_weights_and_teacher(tmp_path, shared, monkeypatch):
    wanted = load_file(shared / "model.safetensors")
    place = f"local-dir:{shared}"
    plain = ("--model.args={}", "--model.image_size=null")
    found = run(tmp_path, "name", f"--model={place}", "--model.pretrained=true", *plain)
    assert_alike(found, wanted)
    facts = json.loads((tmp_path / "tiny" / "name" / "student.json").read_text())
    assert facts["model"] == "vit_tiny_patch16_224"
    timm.create_model(facts["model"], num_classes=10, **facts["args"]).load_state_dict(found)
    assert_alike(run(tmp_path, "weights", f"--init-from={place}"), wanted)
    run(
        tmp_path,
        "taught",
        f"--distill.teacher={place}",
        "--distill.loss=kd",
        "--distill.allow_weak_teacher=true",
    )


def test_a_repository_of_the_hub_comes_from_its_cache(tmp_path, shared, capsys, monkeypatch):
    """As the hub's client lays its cache out; no network is asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    home = tmp_path / "hub" / "models--owner--tiny"
    shutil.copytree(shared, home / "snapshots" / ("0" * 40))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    found = run(tmp_path, "a", "--model.weights=hf-hub:owner/tiny")
    assert_alike(found, load_file(shared / "model.safetensors"))
    for flag in (
        "--model.weights=hf-hub:owner/other",
        "--model=hf-hub:owner/other",
        "--init-from=hf-hub:nonsense/a/b",
    ):
        error = get_error(tmp_path, capsys, flag)
        assert "cannot be fetched" in error
        assert "local-dir:FOLDER" in error


def test_a_folder_that_is_not_shared_is_refused(tmp_path, shared, capsys):
    (tmp_path / "empty").mkdir()
    error = get_error(tmp_path, capsys, f"--init-from=local-dir:{tmp_path / 'empty'}")
    assert "no config.json there" in error
    weights = (shared / "model.safetensors").rename(tmp_path / "away")
    error = get_error(tmp_path, capsys, f"--init-from=local-dir:{shared}")
    assert "no weights beside config.json" in error
    weights.rename(shared / "other.safetensors")
    (shared / "config.json").write_text('{"architectures": ["Bert"]}')
    with pytest.raises(UserError, match="names no architecture of timm"):
        open_weights(f"local-dir:{shared}", "model.weights")


@pytest.mark.parametrize(
    "content", [b'{"architecture": "vit_ti', b'{"model_type": "qw', b"", b"\xff"]
)
def test_an_unreadable_config_is_reported(tmp_path, shared, capsys, content):
    (shared / "config.json").write_bytes(content)
    error = get_error(tmp_path, capsys, f"--model.weights=local-dir:{shared}")
    assert f"model.weights ('local-dir:{shared}'): config.json cannot be read: " in error
    assert error.endswith("is it whole? copy it again")


def test_an_unreachable_hub_is_refused_at_once(tmp_path, monkeypatch):
    """Its client would try six times for each file, and wait in between."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    with socket.socket() as closed:  # bound and never listening: connections are refused
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(_http.time, "sleep", lambda _: pytest.fail("it is asked again"))
        monkeypatch.setenv("no_proxy", "*")
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(UserError, match="weights cannot be fetched"):
            build_model("resnet18", {}, pretrained=True)
        with pytest.raises(UserError, match=r"cannot be fetched .*local-dir:FOLDER"):
            open_shared("hf-hub:nobody/nothing", "model.weights")
    assert not constants.HF_HUB_OFFLINE
