"""`tools.card` of a run without a teacher, and of weights outside of runs."""

from __future__ import annotations

import json

import timm
import torch

import main as training
from tests.support.tiny_parts import VIT_ARGS, create_argv
from tools.card.__main__ import main

MODEL, ARGS = "vit_tiny_patch16_224", {**VIT_ARGS, "img_size": 8}


def test_a_card_lists_distillation_if_there_is_a_teacher(tmp_path):
    argv = create_argv(tmp_path, "--train.steps=1", "--run.run_id=alone")
    assert training.main(argv) == 0
    taught = (
        f"--teacher_path={tmp_path / 'tiny' / 'alone'}",
        "--distill.loss=kd",
        "--distill.allow_weak_teacher=true",
        "--run.run_id=taught",
    )
    assert training.main(create_argv(tmp_path, "--train.steps=1", *taught)) == 0
    cards = {}
    for name in ("alone", "taught"):
        out = tmp_path / f"{name}.md"
        assert main([str(tmp_path / "tiny" / name), "--out", str(out)]) == 0
        cards[name] = out.read_text()
    assert "distill." not in cards["alone"] and "`optim.lr`" in cards["alone"]
    assert "`distill.temperature`" in cards["taught"] and "`distill.alpha`" in cards["taught"]


def test_weights_without_a_run_have_a_card_of_known_facts(tmp_path, capsys):
    path, out = tmp_path / "w.pth", tmp_path / "card.md"
    torch.save(timm.create_model(MODEL, num_classes=3, **ARGS).state_dict(), path)
    assert main([str(path), "--out", str(out)]) == 2
    assert "does not say its model; name it by --model" in capsys.readouterr().err
    told = ["--model", MODEL, "--model-args", json.dumps(ARGS), "--classes", "3"]
    (tmp_path / "names.txt").write_text("cat\ndog\neel\n")
    pp = ["--pp", "decode(channels=1)|resize(8)|value_range(-1, 1)"]
    names = ["--names", str(tmp_path / "names.txt")]
    assert main([str(path), "--out", str(out), *told, *pp, *names]) == 0
    text = out.read_text()
    assert text.startswith("---\nlibrary_name: timm\n")
    assert f"| architecture | `{MODEL}` |" in text and "| classes | 3: cat, dog, eel |" in text
    assert "weights that lie in no run" in text and "None" not in text and "## Training" not in text
