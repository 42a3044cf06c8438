"""Means of models: their arithmetic, the greedy choice by exact evaluation, the card of a run."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import main
from models.factory import export_model
from tests.support.tiny_parts import create_argv
from tools.average.__main__ import main as run_tool
from tools.average.average_weights import Member, get_ema_shares, mix, open_members, select_greedily
from tools.card import __main__ as card
from utils.weights.files import write_weights


@pytest.fixture
def damaged(teacher_run, tmp_path):
    """The taught run, a copy of it that is a little off, and one that is far off."""
    places = {"a": teacher_run}
    for name, noise in (("near", 1e-3), ("far", 1.0)):
        folder = tmp_path / name
        folder.mkdir()
        torch.manual_seed(0)
        tensors = load_file(teacher_run / "student.safetensors")
        facts = json.loads((teacher_run / "student.json").read_text())
        noisy = {k: v + noise * torch.randn_like(v) for k, v in tensors.items()}
        export_model(noisy, facts, folder)
        places[name] = folder
    return places


def test_floats_are_averaged_by_share_and_integers_taken_from_the_last():
    models = [{"w": torch.tensor([float(n)]), "count": torch.tensor(n)} for n in (1, 2, 6)]
    found = mix(models, [1.0, 1.0, 1.0])
    assert found["w"].item() == 3.0 and found["count"].item() == 6
    assert found["w"].dtype == torch.float32
    assert mix(models, [0.0, 1.0, 1.0])["w"].item() == 4.0
    wanted = 1.0
    for value in (2.0, 6.0):
        wanted = 0.9 * wanted + 0.1 * value
    shares = get_ema_shares(3, 0.9)
    assert sum(shares) == pytest.approx(1.0)
    assert mix(models, shares)["w"].item() == pytest.approx(wanted)


def test_the_greedy_mean_leaves_out_checkpoints_that_worsen_it(
    teacher_run, damaged, digits_root, tmp_path
):
    out = tmp_path / "out"
    flags = ["--method", "greedy", "--out", str(out), f"--data.root={digits_root}"]
    assert run_tool([*(str(place) for place in damaged.values()), *flags]) == 0
    report = json.loads((out / "average.json").read_text())
    first, near, far = report["members"]
    # The score is the run's own: its last evaluation, to the last digit.
    assert (
        first["score"] == json.loads((teacher_run / "run.json").read_text())["final"]["eval_top1"]
    )
    assert not far["taken"] and far["score"] < 50 < report["score"]
    assert report["score"] >= max(first["score"], near["score"])
    assert (out / "student.json").read_text() == (teacher_run / "student.json").read_text()


def test_the_greedy_choice_starts_from_the_best_checkpoint():
    class Fake:
        def __init__(self, value):
            self.value, self.location = value, str(value)

        def read_tensors(self):
            return {"w": torch.tensor(self.value)}

    members = [Member(Fake(value)) for value in (4.0, 1.0, -1.0, 9.0)]
    # The best is 0.5: 1 is nearest, -1 makes it no worse, 4 and 9 pull the mean away.
    tensors, score = select_greedily(members, lambda found: -abs(float(found["w"]) - 0.5))
    assert [member.is_taken for member in members] == [False, True, True, False]
    assert (float(tensors["w"]), score) == (0.0, -0.5)


def test_a_single_run_stands_for_its_checkpoints(tmp_path, capsys):
    flags = ("--train.steps=4", "--train.checkpoint_every_steps=1", "--train.keep_checkpoints=4")
    assert main.main(create_argv(tmp_path, *flags, "--run.run_id=a")) == 0
    run = tmp_path / "tiny" / "a"
    places = [member.weights.location.rpartition("/")[2] for member in open_members([str(run)])]
    assert places == sorted(places) and len(places) >= 3
    out = tmp_path / "mean"
    assert run_tool([str(run), "--method", "ema", "--decay", "0.5", "--out", str(out)]) == 0
    steps = [load_file(run / "checkpoints" / place / "model.safetensors") for place in places]
    wanted = steps[0]["head.weight"].double()
    for step in steps[1:]:
        wanted = 0.5 * wanted + 0.5 * step["head.weight"].double()
    found = load_file(out / "student.safetensors")["head.weight"]
    torch.testing.assert_close(found, wanted.float())
    for folder in (run / "checkpoints").glob("step_*"):
        if folder.name != places[-1]:
            shutil.rmtree(folder)
    capsys.readouterr()
    assert run_tool([str(run), "--out", str(out)]) == 2
    assert "is one model alone" in capsys.readouterr().err


@pytest.mark.parametrize("fact", [{"args": {"num_heads": 2}}, {"classes": ["b", "a"]}])
def test_models_of_equal_shapes_and_other_meaning_are_refused(tmp_path, capsys, fact):
    """The number of heads shows in no shape, nor does the order of classes."""
    facts = {"model": "vit", "args": {"num_heads": 1}, "classes": ["a", "b"]}
    places = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for place, more in zip(places, ({}, fact), strict=True):
        write_weights(place, {"w": torch.zeros(2)}, facts | more)
    assert run_tool([*map(str, places), "--out", str(tmp_path / "out")]) == 2
    assert f"is of another {next(iter(fact))} than" in capsys.readouterr().err


BAD = [
    (["RUN", "RUN", "--decay", "0.5"], "--decay is not supported with --method uniform"),
    (["RUN", "RUN", "--method", "ema", "--decay", "1"], "--decay (1) must lie between 0 and 1"),
    (["RUN", "RUN", "--data.root=x"], "--data.root=x is not supported with --method uniform"),
    (["RUN", "nowhere"], "no such file or directory"),
    (["FAR", "RUN", "--method", "greedy"], "is not in a run, whose evaluation split"),
]


@pytest.mark.parametrize(("words", "said"), BAD)
def test_bad_input_gives_one_line(teacher_run, damaged, tmp_path, capsys, words, said):
    places = {"RUN": str(teacher_run), "FAR": str(damaged["far"])}
    flags = [*(places.get(word, word) for word in words), "--out", str(tmp_path / "out")]
    assert run_tool(flags) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_a_card_holds_what_the_run_recorded(teacher_run, tmp_path, capsys):
    path = tmp_path / "README.md"
    assert card.main([str(teacher_run), "--out", str(path)]) == 0
    text = path.read_text()
    final = json.loads((teacher_run / "run.json").read_text())["final"]
    assert f"| validation | top1 | {final['eval_top1']:.6g} |" in text
    for said in (
        "# digits_student/taught",
        "10: 0, 1, 2, 3",
        "| `optim.lr` | `0.005` |",
        "decode(channels=1)\\|resize(8)",
        "## Not told by the run",
    ):
        assert said in text
    assert "## Teachers" not in text and "were not evaluated" not in text
    (step,) = list((teacher_run / "checkpoints").glob("step_*"))[-1:]
    assert card.main([str(step), "--out", str(path)]) == 0
    assert f"these weights, `checkpoints/{step.name}`, were not evaluated by it" in path.read_text()
    capsys.readouterr()
    assert card.main([str(tmp_path / "none"), "--out", str(path)]) == 2
    assert "no such file" in capsys.readouterr().err
