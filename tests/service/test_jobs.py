"""The queue: submissions, its events, and what follows a program's end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from service.jobs.dispatcher import Dispatcher
from service.jobs.files import (
    JobQueue,
    append_event,
    hold_lock,
    is_held,
    open_queue,
    read_job,
    read_progress,
)
from service.jobs.rules import Patience, decide
from service.jobs.slots import choose_slots, create_environment, parse_slots
from service.jobs.starters import ColdStarter, create_starter
from service.jobs.state import fold_events
from service.jobs.submission import Submission
from store.query.changes import hash_config
from store.record.attempts import read_attempts
from tests.support.waiting import PATIENCE_S
from utils.config.keys import get_resume_rules
from utils.config.load import load_config
from utils.errors import UserError

CONFIG = "configs/regression/diabetes_linear.yaml"
QUICK = {"runtime.device": "cpu", "train.epochs": 2, "train.eval_every_epochs": 1}
# Long enough to be stopped in the middle; its checkpoints come often.
LONG = {"runtime.device": "cpu", "train.epochs": 20000, "train.checkpoint_every_steps": 200}
PATIENCE = Patience(backoff_s=1.0)


@pytest.fixture
def queue(tmp_path: Path) -> JobQueue:
    return open_queue(str(tmp_path / "runs"))


def test_a_job_equals_what_main_would_run(queue: JobQueue) -> None:
    view = queue.submit(
        Submission(config=CONFIG, overrides={"optim.lr": 0.5, "run.run_id": "a"}), "me"
    )
    job = read_job(queue.find(view.id))
    assert list(job.argv[1:3]) == [str(Path("main.py").absolute()), "--config"]
    told = load_config(list(job.argv[2:]))
    typed = load_config(["--config", CONFIG, "--optim.lr=0.5"])
    assert told.optim == typed.optim and told.run.resume == "auto"
    assert (told.run.output_dir, told.run.run_id) == (queue.store, "a")
    assert view.config_hash == hash_config(typed.model_dump(mode="json"), get_resume_rules())
    assert (view.run, view.state, view.attempts) == ("diabetes_linear/a", "queued", 0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"optim.lrr": 1}, "did you mean 'optim.lr'"),
        ({"optim": 1}, "is not a key"),
        ({"optim.lr": "fast"}, "give a number"),
        ({"run.output_dir": "elsewhere"}, "not the store of this queue"),
        ({"run.resume": "runs/x"}, "set by the queue itself"),
        ({"run.check_only": True}, "set by the queue itself"),
        ({"run.experiment": "jobs"}, "directory of the store"),
        ({"run.run_id": "../x"}, "run.run_id"),
        ({"model.args": {"depth": 1}, "model.args.depth": 2}, ""),
    ],
)
def test_a_bad_submission_is_refused_in_a_line(
    queue: JobQueue, overrides: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError) as told:
        queue.submit(Submission(config=CONFIG, overrides=overrides), "me")
    assert words in str(told.value) and "\n" not in str(told.value)
    assert queue.list() == [] and not queue.folder.exists()


def test_the_same_run_is_queued_once(queue: JobQueue) -> None:
    queue.submit(Submission(config=CONFIG, overrides={"run.run_id": "a"}), "me")
    with pytest.raises(UserError, match="is a job of this queue already"):
        queue.submit(Submission(config=CONFIG, overrides={"run.run_id": "a"}), "me")
    assert len(queue.list()) == 1


def test_a_list_rereads_only_jobs_with_new_events(queue: JobQueue) -> None:
    for name in ("a", "b"):
        queue.submit(Submission(config=CONFIG, overrides={"run.run_id": name}), "me")
    first, second = queue.list()
    append_event(queue.find(second.id), "finished", state="failed", reason="no luck")
    (queue.find(first.id) / "job.json").write_text("{}")
    found = queue.list()
    assert found[0] is first and (found[1].state, found[1].reason) == ("failed", "no luck")
    assert queue.reopen(second.id, "me").state == queue.list()[1].state == "queued"
    assert [job.id for job in open_queue(queue.store).list()] == [second.id]  # nothing is kept
    shutil.rmtree(queue.find(second.id))
    assert [job.id for job in queue.list()] == [first.id]


def test_unknown_and_ended_jobs_are_refused(queue: JobQueue) -> None:
    with pytest.raises(UserError, match="the queue is empty"):
        queue.get("a")
    view = queue.submit(Submission(config=CONFIG, overrides={"run.run_id": "abc"}), "me")
    with pytest.raises(UserError, match=f"did you mean '{view.id}'"):
        queue.get(view.id[:-1])
    with pytest.raises(UserError) as told:
        queue.get("/" * 9)
    assert "tools.queue list" in str(told.value) and view.id not in str(told.value)
    with pytest.raises(UserError, match="only failed or stopped jobs"):
        queue.reopen(view.id, "me")
    append_event(queue.find(view.id), "finished", state="failed", reason="")
    with pytest.raises(UserError, match="nothing to stop"):
        queue.stop(view.id, "me")
    assert queue.reopen(view.id, "me").state == "queued"


def test_a_torn_event_does_not_hide_the_next(queue: JobQueue) -> None:
    view = queue.submit(Submission(config=CONFIG, overrides={"run.run_id": "a"}), "me")
    folder = queue.find(view.id)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"time": 1.0, "event": "fini')
    append_event(folder, "stop", who="you")
    assert read_progress(folder).stop_by == "you"


def test_a_lock_is_visible_and_ends_with_its_holder(queue: JobQueue) -> None:
    folder = queue.find(queue.submit(Submission(config=CONFIG), "me").id)
    assert not is_held(folder)
    with hold_lock(folder) as lock:
        assert lock is not None and is_held(folder)
        with hold_lock(folder, patience_s=0.0) as second:
            assert second is None
    assert not is_held(folder)


def attempt(code: int | None, lasted_s: float, saved: int = 0) -> list[dict[str, object]]:
    """The events of one attempt."""
    started = {"time": 0.0, "event": "started", "pid": 1, "born": 1.0, "slots": ["slot0"]}
    return [started, {"time": lasted_s, "event": "ended", "code": code, "saved_step": saved}]


@pytest.mark.parametrize(
    ("attempts", "state", "pause_s"),
    [
        ([(0, 5, 0)], "complete", 0),
        ([(2, 5, 0)], "failed", 0),
        ([(75, 1000, 9)], "again", 0),
        ([(75, 5, 0)], "again", 10),
        ([(1, 5, 0)], "again", 10),
        ([(1, 5, 0)] * 3, "again", 40),
        ([(1, 5, 0)] * 5, "again", 160),
        ([(1, 5, 0)] * 6, "failed", 0),
        ([(None, 5, 0)] * 6, "failed", 0),
        # A new checkpoint forgives crashes and shortens the pause.
        ([(1, 5, 0)] * 5 + [(1, 5, 10)], "again", 10),
        # One that is saved once and never again forgives once.
        ([(1, 5, 10)] * 7, "failed", 0),
        # Soon preemptions that save are borne with, but longer and longer.
        ([(75, 5, i) for i in range(1, 9)], "again", 600),
        # A long time of work forgives all.
        ([(1, 5, 0)] * 5 + [(75, 1000, 0), (1, 5, 0)], "again", 10),
    ],
)
def test_an_ended_attempt_decides_the_next_state(
    attempts: list[tuple[int | None, float, int]], state: str, pause_s: float
) -> None:
    events = [event for one in attempts for event in attempt(*one)]
    found = decide(fold_events(events), is_complete=False, patience=Patience())
    assert (found.state, found.pause_s) == (state, pause_s)


def test_a_complete_run_is_complete_at_any_exit_code() -> None:
    progress = fold_events(attempt(None, 5.0))
    assert decide(progress, is_complete=True, patience=Patience()).state == "complete"


def test_a_stopping_job_is_not_restarted() -> None:
    events = [*attempt(75, 1000.0), {"time": 1.0, "event": "stop", "who": "you"}]
    found = decide(fold_events(events), is_complete=False, patience=Patience())
    assert found.state == "stopped" and "you" in found.reason


@pytest.mark.parametrize(("code", "state"), [(0, "complete"), (2, "failed"), (75, "running")])
def test_an_end_is_recorded_without_a_dispatcher(queue: JobQueue, code: int, state: str) -> None:
    """The observer records the end, except where patience decides the next state."""
    view = queue.submit(Submission(config=CONFIG, overrides={"run.run_id": "a"}), "me")
    folder = queue.find(view.id)
    job = read_job(folder)
    ends = job.model_copy(update={"argv": (sys.executable, "-c", f"raise SystemExit({code})")})
    (folder / "job.json").write_text(ends.model_dump_json())
    subprocess.run([sys.executable, "-m", "service.jobs.child", str(folder), "slot0"], check=True)
    found = queue.get(view.id)
    assert (found.state, found.exit_code, found.attempts) == (state, code, 1)


@pytest.mark.parametrize(
    "damaged",
    [
        {"event": "started", "time": 1},
        {"event": "started", "time": 1, "pid": "x", "born": [], "slots": 5},
        {"event": "stop", "time": None, "who": "you"},
        {"event": "ended", "time": "x", "code": 0, "saved_step": 0},
        {"event": "finished", "time": 1, "state": "odd", "reason": ""},
        {"event": "finished", "time": 1, "state": ["failed"], "reason": ""},
        {"event": ["stop"], "time": 1},
        {"event": "ended", "time": 1, "saved_step": 0},
    ],
)
def test_a_damaged_event_is_skipped(damaged: dict[str, object]) -> None:
    events = attempt(75, 5.0)
    found = fold_events([events[0], damaged, *events[1:]])
    assert (found.state, found.attempts[-1].code, found.stop_by) == ("running", 75, "")


def test_a_damaged_job_is_reported_once_and_blocks_no_other(
    queue: JobQueue, caplog: pytest.LogCaptureFixture
) -> None:
    folder = queue.find(queue.submit(Submission(config=CONFIG), "me").id)
    (folder / "job.json").write_text("{")
    with Dispatcher(queue, ["slot0"]) as dispatcher:
        for _ in range(3):
            dispatcher.tick()
        assert [record.message for record in caplog.records].count(
            f"{folder / 'job.json'} is damaged; move its directory away"
        ) == 1
        append_event(folder, "finished", state="failed", reason="")
        dispatcher.tick()
        (folder / "events.jsonl").unlink()
        dispatcher.tick()


def test_slots_are_read_and_chosen() -> None:
    assert parse_slots("2") == ["slot0", "slot1"]
    names = parse_slots("cuda:0,cuda:1,cpu,cpu,tpu")
    assert names == ["cuda:0", "cuda:1", "cpu:0", "cpu:1", "tpu:0"]
    assert choose_slots("cuda", 2, names, []) == ["cuda:0", "cuda:1"]
    assert choose_slots("cuda", 2, names, ["cuda:1"]) is None
    assert choose_slots("cuda", 3, names, []) == []
    assert choose_slots("cpu", 1, names, ["cpu:0"]) == ["cpu:1"]
    assert choose_slots("xla", 1, ["slot0", "slot1"], ["slot0"]) == ["slot1"]
    assert choose_slots("auto", 1, ["tpu_vm:a@b"], []) == ["tpu_vm:a@b"]
    # A device of another version, as a job's file may name it.
    assert choose_slots("tpu9", 1, names, []) == []
    assert choose_slots("tpu9", 1, ["slot0"], []) == ["slot0"]
    for bad in ("0", "gpu:1", "cuda:1,cuda:1", "", "-1", "2,3"):
        with pytest.raises(UserError, match="--slots"):
            parse_slots(bad)


def test_a_job_sees_its_devices_and_no_secrets() -> None:
    given = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "WANDB_API_KEY": "y", "XLA_FLAGS": "z"}
    seen = create_environment(["cuda:1", "cuda:3"], given)
    assert seen == {"PATH": "/bin", "XLA_FLAGS": "z", "CUDA_VISIBLE_DEVICES": "1,3"}


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["cold", "warm"])
def starter(request: pytest.FixtureRequest) -> Iterator[ColdStarter]:
    """What a dispatcher starts attempts by; the warm one's program costs many seconds."""
    with create_starter(is_warm=request.param) as made:
        yield made


def test_a_dispatcher_starts_stops_adopts_and_ends(queue: JobQueue, starter: ColdStarter) -> None:
    """Three real runs: one ends, one is refused; one outlives its dispatcher and is stopped."""
    names = {}
    for name, overrides in {"quick": QUICK, "bad": {"data.train_split": "x"}, "long": LONG}.items():
        given = {**QUICK, **overrides, "run.run_id": name}
        names[name] = queue.submit(Submission(config=CONFIG, overrides=given), "me").id
    with Dispatcher(queue, parse_slots("3"), patience=PATIENCE, starter=starter) as first:
        with pytest.raises(UserError, match="another dispatcher"), Dispatcher(queue, ["slot0"]):
            pass
        first.run(lambda: count_saved(queue, "long") > 0)
    assert queue.get(names["long"]).state == "running"
    # What the first one knew is gone; its job lives, and the second one finds it.
    pid = read_progress(queue.find(names["long"])).attempts[-1].main_pid
    with Dispatcher(queue, parse_slots("3"), patience=PATIENCE, starter=starter) as second:
        second.run(when_over(queue, names["quick"], names["bad"]))
        queue.stop(names["long"], "you")
        second.run(when_over(queue, names["long"]))
    views = {name: queue.get(job_id) for name, job_id in names.items()}
    assert {name: view.state for name, view in views.items()} == {
        "quick": "complete",
        "bad": "failed",
        "long": "stopped",
    }
    assert [views[name].exit_code for name in names] == [0, 2, 75]
    assert all(view.attempts == 1 for view in views.values()) and not psutil.pid_exists(pid)
    assert "data.train_split" in queue.read_log(names["bad"])
    assert count_saved(queue, "long") > 0
    with pytest.raises(UserError, match="is complete; choose another"):
        queue.submit(Submission(config=CONFIG, overrides={"run.run_id": "quick"}), "me")


@pytest.mark.slow
def test_a_background_dispatcher_handles_sigint(tmp_path: Path) -> None:
    """The shell of a script starts it with SIGINT ignored; the signal arrives at its first look."""
    program = (
        "import os, signal, sys; from service.jobs.files import JobQueue;"
        "from tools.queue import main;"
        "look = JobQueue.list;"
        "JobQueue.list = lambda own: os.kill(os.getpid(), signal.SIGINT) or look(own);"
        f"sys.exit(main(['run', '--until-empty', '--store', {str(tmp_path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1].startswith("interrupted: the runs continue")


def test_a_killed_job_resumes_and_none_is_started_twice(
    queue: JobQueue, starter: ColdStarter
) -> None:
    """Its program and the one that holds its lock are killed: the next attempt goes on."""
    job_id = queue.submit(Submission(config=CONFIG, overrides={**LONG, "run.run_id": "a"}), "me").id
    folder = queue.find(job_id)
    with Dispatcher(queue, parse_slots("1"), patience=PATIENCE, starter=starter) as dispatcher:
        dispatcher.run(lambda: count_saved(queue, "a") > 0)
        last = read_progress(folder).attempts[-1]
        os.kill(last.pid, signal.SIGKILL)  # the holder alone: main.py holds the lock as well
        deadline = time.time() + 1.0
        dispatcher.run(lambda: time.time() > deadline)
        assert len(read_progress(folder).attempts) == 1 and is_held(folder)
        os.kill(last.main_pid, signal.SIGKILL)
        dispatcher.run(lambda: len(list_begun(queue, "a")) == 2)
        queue.stop(job_id, "you")
        dispatcher.run(when_over(queue, job_id))
    assert queue.get(job_id).state == "stopped"
    assert list_begun(queue, "a")[1] > 0


def count_saved(queue: JobQueue, name: str) -> int:
    """Checkpoints of a run."""
    return len(list((Path(queue.store) / "diabetes_linear" / name / "checkpoints").glob("step_*")))


def list_begun(queue: JobQueue, name: str) -> list[int]:
    """The step that each attempt of a run has gone on from."""
    attempts = read_attempts(Path(queue.store) / "diabetes_linear" / name)
    return [one["from_step"] for one in attempts]


def when_over(queue: JobQueue, *names: str) -> Callable[[], bool]:
    """Check whether these jobs have ended; give up in time."""
    deadline = time.monotonic() + PATIENCE_S

    def ask() -> bool:
        assert time.monotonic() < deadline, [queue.get(name) for name in names]
        return all(queue.get(name).state in ("complete", "failed", "stopped") for name in names)

    return ask
