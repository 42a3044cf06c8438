"""A run whose score stops rising ends: at the same step with the same bits, killed or not."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from timm.scheduler import PlateauLRScheduler

import main
from store.record.history import keep_deterministic, read_metrics
from tests.support.child_runs import run_main
from tests.support.tiny_parts import create_argv
from utils.checkpoint.files import load_checkpoint
from utils.endings import EarlyStop, Plateau, Stagnation

NAN = float("nan")
# An evaluation each 3 steps, of a model that learns nothing that lasts.
STOPPING = (
    "--train.epochs=60",
    "--train.eval_every_epochs=0.5",
    "--train.early_stop_patience=3",
    "--train.early_stop_min_delta=0.5",
    "--train.checkpoint_every_steps=2",
    "--train.keep_checkpoints=100",
    "--runtime.num_threads=1",
    "--run.run_id=a",
    "--lr=1e-2",
    # What decides the learning rate is a past that a checkpoint must hold, too.
    "--optim.schedule=plateau",
    "--optim.plateau_patience=1",
    "--optim.decay_rate=0.9",
)


def run(folder: Path, *flags: str) -> int:
    return main.main(create_argv(folder, *STOPPING, *flags))


def count_all(stop: EarlyStop, scores: list[float]) -> list[int]:
    """Evaluations without a better score after each of the scores."""
    waited, found = Stagnation(), []
    for step, score in enumerate(scores, start=1):
        waited = stop.count(waited, step, score)
        found.append(waited.evaluations)
    return found


@pytest.mark.parametrize(
    ("min_delta", "scores", "waited"),
    [
        (0.0, [1, 2, 2, 1, 3, 3], [0, 0, 1, 2, 0, 1]),
        # Many small steps up count together, once they exceed the delta.
        (1.0, [1, 1.6, 2.0, 2.1, 2.2], [0, 1, 2, 0, 1]),
        (0.0, [-5.0, -4.0, -4.5], [0, 0, 1]),
        (0.0, [NAN, NAN, 1, NAN], [1, 2, 0, 1]),
    ],
)
def test_a_score_counts_as_better_by_more_than_the_delta(min_delta, scores, waited):
    assert count_all(EarlyStop(2, min_delta), scores) == waited


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_the_learning_rate_is_cut_where_pytorchs_scheduler_cuts_it(patience):
    scores = [1, 2, 2, 1.5, 2.4, 2, 2, 2, 2.6, 2.5, 2.4, 2.3, 2.2, 3, 3, 3, 3, 3]
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    # PyTorch waits for one more than its patience.
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, "max", 0.5, patience - 1, threshold=0.5, threshold_mode="abs"
    )
    stop, waited = EarlyStop(plateau=Plateau(patience, 0.5, first_step=0)), Stagnation()
    for step, score in enumerate(scores, start=1):
        theirs.step(score)
        waited = stop.count(waited, step, score)
        assert 0.5**waited.cuts == optimizer.param_groups[0]["lr"], step
    assert 0 < waited.cuts < len(scores)


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated")
@pytest.mark.parametrize("patience", [1, 2, 5])
def test_a_patience_is_one_more_than_that_of_timms_scheduler(patience):
    """`--patience-epochs n` of timm is `optim.plateau_patience` n + 1, on random walks."""
    for seed in range(20):
        scores = torch.randn(60, generator=torch.Generator().manual_seed(seed)).cumsum(0).tolist()
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = PlateauLRScheduler(
            optimizer, decay_rate=0.9, patience_t=patience - 1, threshold=0.0, mode="max"
        )
        plateau, waited, alike = Plateau(patience), Stagnation(), []
        for step, score in enumerate(scores, start=1):
            theirs.step(step, score)
            waited = plateau.count(waited, step, score)
            alike.append(0.9**waited.cuts == pytest.approx(optimizer.param_groups[0]["lr"]))
        assert waited.cuts > 0
        assert all(alike)


def test_timms_patience_flag_is_refused_with_the_key_and_the_difference(tmp_path, capsys):
    assert main.main(create_argv(tmp_path, "--patience-epochs=4")) == 2
    assert "use --optim.plateau_patience=N+1 (timm's N" in capsys.readouterr().err


def test_evaluations_of_the_warm_up_cut_nothing():
    stop, waited = EarlyStop(plateau=Plateau(1, 0.0, first_step=8)), Stagnation()
    for step in (4, 8, 12):
        waited = stop.count(waited, step, 1.0)
    assert (waited.cuts, waited.plateau_score) == (0, 1.0)
    assert stop.count(waited, 16, 1.0).cuts == 1


def test_a_repeated_evaluation_counts_once():
    stop = EarlyStop(2)
    waited = stop.count(stop.count(Stagnation(), 4, 1.0), 8, 0.5)
    assert stop.count(waited, 8, 0.5) == waited == Stagnation(1.0, 1, 8)
    assert not stop.is_over(waited)
    assert stop.is_over(stop.count(waited, 12, 1.0))
    assert not EarlyStop(0).is_over(Stagnation(1.0, 99, 8))


@pytest.fixture(scope="module")
def ended_early(tmp_path_factory) -> Path:
    """The directory of a run that ended early."""
    root = tmp_path_factory.mktemp("early")
    assert run(root) == 0
    return root / "tiny" / "a"


def read_facts(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def get_last_step(folder: Path) -> int:
    return max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))


def test_the_run_ends_when_its_scores_stop_improving(ended_early):
    lines = [line for line in read_metrics(ended_early) if line["kind"] == "eval"]
    best, since = -1.0, 0
    for line in lines[:-1]:
        best, since = (line["top1"], 0) if line["top1"] > best + 0.5 else (best, since + 1)
        assert since < 3, line
    assert lines[-1]["top1"] <= best + 0.5 and since == 2
    assert lines[-1]["step"] == get_last_step(ended_early) < 360


def test_the_learning_rate_falls_when_scores_stop_improving(ended_early):
    """After each evaluation that was no better, by a tenth; seen in the log lines behind it."""
    lines, best, lr = read_metrics(ended_early), -1.0, 1e-2
    cuts = 0
    for line in lines:
        if line["kind"] == "train":
            assert line["lr"] == pytest.approx(lr)
        elif line["top1"] > best:
            best = line["top1"]
        else:
            lr, cuts = lr * 0.9, cuts + 1
    assert cuts >= 3


def test_the_run_logs_why_it_ended(ended_early):
    facts = read_facts(ended_early)
    assert facts["status"] == "complete"
    begin = (
        f"ended early after step {get_last_step(ended_early)} of 360: 3 evaluations in a row gave"
    )
    assert facts["reason"].startswith(begin)
    assert facts["reason"].endswith("by more than 0.5 (train.early_stop_patience=3)")
    assert (ended_early / "student.safetensors").exists()


def test_a_run_resumed_from_any_step_ends_alike(ended_early, tmp_path):
    """From just before, at and after evaluations; nothing but the checkpoint tells the past."""
    last, steps = get_last_step(ended_early), sorted(ended_early.glob("checkpoints/step_*"))
    numbers = [int(path.name[5:]) for path in steps]
    assert any(number % 3 == 0 for number in numbers[:-1])
    # The last ones: those that begin before, within and after the wait that ends the run.
    for kept, place in enumerate(steps[:-1][-4:], start=len(steps) - 4):
        folder = tmp_path / place.name / "tiny" / "a"
        shutil.copytree(ended_early, folder, ignore=shutil.ignore_patterns("run.lock"))
        for later in numbers[kept:]:
            shutil.rmtree(folder / "checkpoints" / f"step_{later:08d}")
        assert run(tmp_path / place.name, "--resume=auto") == 0
        assert get_last_step(folder) == last
        assert read_facts(folder)["reason"] == read_facts(ended_early)["reason"]
        assert_same_end(folder, ended_early, last)


def assert_same_end(folder: Path, other: Path, step: int) -> None:
    """Weights, moments and the history up to a step, bit for bit."""
    mine, theirs = (
        load_checkpoint(f / "checkpoints" / f"step_{step:08d}") for f in (folder, other)
    )
    for part, tensors in theirs[0].items():
        for name, tensor in tensors.items():
            assert mine[0][part][name].equal(tensor), name
    assert mine[1].waited == theirs[1].waited
    lines = [[keep_deterministic(line) for line in read_metrics(one)] for one in (folder, other)]
    assert [line for line in lines[0] if line["kind"] == "eval"] == [
        line for line in lines[1] if line["kind"] == "eval"
    ]


def test_a_run_that_ended_early_is_not_trained_further(ended_early, tmp_path):
    folder = tmp_path / "tiny" / "a"
    shutil.copytree(ended_early, folder, ignore=shutil.ignore_patterns("run.lock"))
    last = get_last_step(folder)
    assert run(tmp_path, "--resume=auto") == 0
    assert get_last_step(folder) == last
    assert read_facts(folder) == read_facts(ended_early)
    (folder / "summary.json").unlink()
    assert run(tmp_path, "--resume=auto") == 0
    assert get_last_step(folder) == last
    assert read_facts(folder)["reason"] == (
        f"{read_facts(ended_early)['reason']}; nothing was left to train"
    )
    # More patience is a reason to go on.
    steps = f"--train.steps={last + 2}"
    assert run(tmp_path, "--resume=auto", "--train.early_stop_patience=4", steps) == 0
    assert get_last_step(folder) == last + 2
    assert read_facts(folder)["reason"] == f"all {last + 2} steps are done"


@pytest.mark.slow
def test_two_ranks_end_after_the_same_step(tmp_path):
    for name, more in (("a", ()), ("b", ("--resume=auto",))):
        flags = create_argv(tmp_path, *STOPPING, "--runtime.num_processes=2", *more)
        done = run_main([*flags, "--run.run_id=two"])
        assert done.returncode == 0, (name, done.stderr)
        assert "ended early after step" in done.stderr
    assert "nothing is left to do" in done.stderr


REFUSED = [
    (("--train.early_stop_patience=3", "--epochs=3"), "must be less than the run's 3 evaluations"),
    (
        ("--train.early_stop_patience=1", "--epochs=2", "--train.eval_every_epochs=9"),
        "must be less than the run's 1 evaluation to",
    ),
    (("--train.early_stop_min_delta=0.1",), "(0.1) needs train.early_stop_patience; set it"),
    (("--train.early_stop_patience=-1",), "it must be at least 0"),
    (("--train.early_stop_min_delta=nan", "--train.early_stop_patience=1"), "a finite number"),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED)
def test_a_patience_without_effect_is_refused(flags, words, tmp_path, capsys):
    assert main.main(create_argv(tmp_path, *flags)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert list(tmp_path.iterdir()) == []


def test_evaluations_are_evenly_spaced_in_steps(ended_early):
    steps = [line["step"] for line in read_metrics(ended_early) if line["kind"] == "eval"]
    assert all(later - earlier == 3 for earlier, later in pairwise(steps))
