"""Generated submissions: the warm checker and main.py agree on each of them."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from job.check import check
from service.checker import Checker, CheckerBusy
from service.jobs.files import open_queue
from service.jobs.submission import Submission
from store.query.changes import hash_config
from tests.support.waiting import PATIENCE_S, wait_for
from utils.config.keys import get_keys, get_resume_rules
from utils.config.load import combine_config
from utils.errors import UserError

CONFIG = "configs/regression/diabetes_linear.yaml"
# What a run of this configuration takes; the rest of the keys get what comes.
GOOD = {
    "optim.lr": (0.1, 1e-3),
    "optim.name": ("sgd", "adamw"),
    "train.seed": (0, 7, 2**31),
    "train.epochs": (1, 3),
    "train.steps": (5, None),
    "data.global_batch_size": (8, 32),
    "optim.schedule": ("cosine", "constant"),
    "train.ema": (True, False),
    "runtime.precision": ("fp32", "bf16"),
    "train.log_every_steps": (1, 50),
    "train.accumulate_steps": (1, 2, 4),
    "optim.weight_decay": (0.0, 0.1),
    "train.early_stop_patience": (0, 2),
    "optim.max_grad_norm": (None, 1.0),
}
JUNK = (
    None,
    True,
    -1,
    0,
    1,
    1e308,
    -0.0,
    2**70,
    "",
    "x",
    "1e3",
    "../x",
    "gs://",
    "\n",
    "a" * 5000,
    "\x00",
    [],
    [1, "a"],
    {},
    {"a": {"b": [None]}},
    "none",
    "[1",
    "{}",
    "${HOME}",
    "é",
    "‮",
)
# A probe of a store, a device or a cloud is no business of this test; the last two are the queue's.
NOT_HERE = (
    "run.output_dir",
    "run.checkpoint_root",
    "run.cache_dir",
    "data.root",
    "run.init_from",
    "run.resume",
    "run.check_only",
)


def generate(count: int, seed: int = 0) -> Iterator[dict[str, object]]:
    """Overrides of all kinds, the same for the same seed."""
    instants = random.Random(seed)
    keys = [key for key in get_keys() if key not in NOT_HERE]
    for number in range(count):
        given: dict[str, object] = {"runtime.device": "cpu", "run.run_id": f"made{number}"}
        for _ in range(instants.randint(0, 3)):
            key = instants.choice(list(GOOD))
            given[key] = instants.choice(GOOD[key])
        if instants.random() < 0.5:
            key = instants.choice(keys)
            given[instants.choice([key, key, key + "x", key + ".y"])] = instants.choice(JUNK)
        yield given


def ask_main(overrides: dict[str, object], store: str) -> tuple[str, str]:
    """Return what main.py does with a configuration: its hash, or the line that refuses it."""
    try:
        config = combine_config(CONFIG, {**overrides, "run.output_dir": store}, "the submission")
        check(config, "cpu")
    except UserError as error:
        return "", " ".join(str(error).split())
    except Exception as error:
        return "", f"main.py would end with {type(error).__name__}"
    return hash_config(config.model_dump(mode="json"), get_resume_rules()), ""


def compare_all(count: int, store: str) -> Counter[str]:
    """Submit what the checks pass; return how many were queued and refused."""
    queue, checker, seen = open_queue(store), Checker(), Counter[str]()
    try:
        for overrides in generate(count):
            verdict = checker.check(Submission(config=CONFIG, overrides=overrides), store)
            digest, refusal = ask_main(overrides, store)
            assert "the check itself failed" not in verdict.error, overrides
            assert bool(verdict.error) == bool(refusal), (overrides, verdict, refusal)
            if verdict.error:
                assert "\n" not in verdict.error and len(verdict.error) < 40_000, overrides
                seen["refused"] += 1
                continue
            try:
                view = queue.submit(Submission(config=CONFIG, overrides=overrides), "test")
            except UserError as error:
                # A name may be made twice.
                assert "is a job of this queue already" in str(error), overrides
                seen["refused"] += 1
                continue
            assert view.config_hash == verdict.config_hash == digest, overrides
            seen["queued"] += 1
    finally:
        checker.close()
    assert len(queue.list()) == seen["queued"]
    # Only a dispatcher starts programs.
    assert all(job.attempts == 0 for job in queue.list())
    return seen


def test_the_checker_refuses_the_same_as_main(tmp_path: Path) -> None:
    seen = compare_all(80, str(tmp_path / "runs"))
    assert seen["queued"] > 15 and seen["refused"] > 15, seen


def test_at_most_four_checks_wait(tmp_path, monkeypatch):
    """Each holds a thread of the service, and pages need threads, too."""
    checker, release, begun = Checker(), threading.Event(), []

    def answer(values: dict[str, object]) -> dict[str, object]:
        begun.append(1)
        release.wait(PATIENCE_S)
        return {}

    monkeypatch.setattr(checker, "_ask", answer)
    wish = Submission(config=CONFIG, overrides={"run.run_id": "r"})
    done: list[str] = []

    def ask() -> None:
        done.append(checker.check(wish, str(tmp_path)).error)

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    wait_for(lambda: not checker._places._value)
    with pytest.raises(CheckerBusy, match="5 checks are under way"):
        checker.check(wish, str(tmp_path))
    release.set()
    for thread in threads:
        thread.join()
    assert done == [""] * 5 and len(begun) == 5
    assert checker.check(wish, str(tmp_path)).error == ""
