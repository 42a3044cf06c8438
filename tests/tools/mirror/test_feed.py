"""Each point of a run is sent to a tracker once, after any kills and rollbacks."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from job.metric_writer import MetricWriter
from store.query.record import RunRecord, get_finite_numbers
from store.record.history import read_metrics, write_lines
from store.record.runs import RunStore
from store.record.session import RunSession
from tests.support.sqlite_target import SqliteTarget, read_rows
from tests.support.stored_runs import make_lines, make_run
from tools.mirror.cursor import CursorFile
from tools.mirror.feed import Feed, Standing
from utils.errors import UserError
from utils.storage.places import open_folder


class Killed(BaseException):
    """What SIGKILL would be."""


class Trainer:
    """A run as the trainer writes it, without a model: checkpoints are numbers in a list."""

    def __init__(self, root: Path, draws: random.Random) -> None:
        self.run = RunStore(str(root), "tiny").get("a")
        self.draws, self.checkpoints, self.step = draws, [0], 0
        self.session: RunSession | None = None

    def start(self) -> None:
        """Start, or resume from the newest checkpoint."""
        self.session = RunSession(self.run)
        if self.run.path.is_dir():
            self.session.take_old()
        else:
            self.session.take_new(overwrite=False)
        self.step = self.checkpoints[-1]
        self.session.begin("train: {seed: 0}\n", {"environment": {}}, from_step=self.step)
        self.writer = MetricWriter(
            self.run.path, first_step=self.step, attempt=self.session.attempt
        )

    def train(self) -> None:
        self.step += 1
        numbers = {"loss/total": self.draws.random(), "time_s": self.step + self.draws.random()}
        if self.draws.random() < 0.05:
            numbers["grad_norm"] = self.draws.choice([math.nan, math.inf, -math.inf])
        self.writer.write(self.step, "train", numbers)

    def save(self) -> None:
        """As the engine does: checkpoint, then evaluation of that step."""
        if self.step > self.checkpoints[-1]:
            self.checkpoints.append(self.step)
            self.session.note_checkpoint(self.step)
        self.writer.write(self.step, "eval", {"top1": self.draws.random()})

    def roll_back(self) -> None:
        self.step = self.checkpoints[-1]
        self.writer.rewind(self.step)

    def kill(self) -> None:
        self.writer.close()
        self.session.close()

    def lose_checkpoint(self) -> None:
        """Damage the newest checkpoint: the next attempt starts before points sent as final."""
        self.kill()
        if len(self.checkpoints) > 1:
            self.checkpoints.pop()
        self.start()

    def complete(self) -> None:
        self.session.complete(self.step, {"eval_top1": 50.0, "test_top1": 49.5}, "")
        self.kill()


def read_truth(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Return what a target should hold."""
    record = RunRecord(folder)
    rows = [
        (
            line["step"],
            {f"{line['kind']}/{name}": v for name, v in get_finite_numbers(line).items()},
        )
        for line in record.lines
    ]
    return [
        *rows,
        (record.facts.final_up_to_step, {"final/eval.top1": 50.0, "final/test.top1": 49.5}),
    ]


def play(folder: Path, seed: int, *, live: bool = False, hard: bool = False) -> Feed:
    """Run a trainer and an upload to their end, with the kills and faults that a seed draws."""
    draws = random.Random(seed)
    trainer = Trainer(folder / "runs", draws)

    def meet(place: str) -> None:
        if draws.random() < 0.15:
            raise draws.choice([Killed, OSError])(place)

    def create_feed(faults=meet) -> Feed:
        cursor = CursorFile(folder / "state", "sqlite", str(trainer.run.path))
        return Feed(
            open_folder(trainer.run.path), SqliteTarget(folder / "a.db", faults), cursor, live=live
        )

    trainer.start()
    feed = create_feed()
    deeds = [trainer.train] * 12 + [trainer.save] * 2 + [trainer.roll_back]
    for _ in range(150):
        deed = draws.choice([*deeds, "mirror", "mirror", "mirror", "killed", "resumed", "hard"])
        if deed == "mirror":
            try:
                feed.advance()
            except OSError:
                feed.close()
            except Killed:
                feed = create_feed()
        elif deed == "killed":
            feed = create_feed()
        elif deed == "resumed":
            trainer.kill()
            trainer.start()
        elif deed == "hard":
            if hard and draws.random() < 0.3:
                trainer.lose_checkpoint()
        else:
            deed()
    trainer.train()
    trainer.save()
    trainer.complete()
    feed = create_feed(lambda place: None)
    assert feed.advance().is_done
    return feed


@pytest.mark.parametrize("seed", range(25))
def test_uploaded_points_equal_the_files_after_kills_and_rollbacks(tmp_path, seed):
    play(tmp_path, seed)
    folder = tmp_path / "runs" / "tiny" / "a"
    found = read_rows(tmp_path / "a.db", RunRecord(folder).facts.id)
    # nan is not equal to itself
    assert list(map(str, found)) == list(map(str, read_truth(folder)))
    assert len(found) > 10


@pytest.mark.parametrize("seed", range(8))
def test_a_rollback_behind_final_points_starts_a_new_tracker_run(tmp_path, seed):
    """The newest history is whole; what was sent of the older ones stands under other names."""
    play(tmp_path, 1000 + seed, hard=True)
    folder = tmp_path / "runs" / "tiny" / "a"
    (state,) = (tmp_path / "state").glob("*.json")
    generation = json.loads(state.read_text())["generation"]
    identity = RunRecord(folder).facts.id
    name = identity if generation == 1 else f"{identity}-{generation}"
    assert list(map(str, read_rows(tmp_path / "a.db", name))) == list(map(str, read_truth(folder)))


def test_some_of_those_runs_started_anew(tmp_path):
    play(tmp_path, 1000, hard=True)
    found = [json.loads(path.read_text())["generation"] for path in tmp_path.glob("state/*.json")]
    assert max(found) > 1


@pytest.mark.parametrize("seed", range(8))
def test_a_live_upload_misses_nothing_but_may_duplicate(tmp_path, seed):
    play(tmp_path, seed, live=True)
    folder = tmp_path / "runs" / "tiny" / "a"
    found = list(map(str, read_rows(tmp_path / "a.db", RunRecord(folder).facts.id)))
    assert set(found) >= set(map(str, read_truth(folder)))


def advance(folder: Path, **options: bool) -> Standing:
    cursor = CursorFile(folder / "state", "sqlite", "a")
    target = SqliteTarget(folder / "a.db")
    return Feed(open_folder(folder / "digits" / "a"), target, cursor, **options).advance()


def test_lines_after_the_newest_checkpoint_wait(tmp_path):
    """An evaluation at the checkpoint's own step is made again by who goes on from there."""
    lines = [*make_lines(4), {"step": 5, "kind": "train", "attempt": 1, "lr": 1e-3}]
    run = make_run(tmp_path, "a", lines=lines, final_up_to_step=4)
    progress = advance(tmp_path)
    assert (progress.lines, progress.waiting, progress.is_done) == (4, 2, False)
    assert advance(tmp_path, live=True).lines == 6
    run.update(status="complete", final={}, ended=1.0)
    progress = advance(tmp_path)
    assert (progress.lines, progress.waiting, progress.is_done) == (6, 0, True)
    assert len(read_rows(tmp_path / "a.db", run.read()["id"])) == 7


def test_a_torn_line_is_not_sent(tmp_path):
    run = make_run(tmp_path, "a", lines=make_lines(4), final_up_to_step=9)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "kind": "train", "lr"')
    assert advance(tmp_path).lines == 5
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(": 0.5}\n")
    assert advance(tmp_path).lines == 6


def test_a_lost_cursor_duplicates_nothing(tmp_path):
    run = make_run(tmp_path, "a", final={"eval_top1": 50.0}, ended=2.0)
    advance(tmp_path)
    rows = read_rows(tmp_path / "a.db", run.read()["id"])
    for path in (tmp_path / "state").glob("*"):
        path.unlink()
    advance(tmp_path)
    assert read_rows(tmp_path / "a.db", run.read()["id"]) == rows


def test_a_damaged_cursor_and_a_second_upload_are_refused(tmp_path):
    make_run(tmp_path, "a", final={})
    cursor = CursorFile(tmp_path / "state", "mlflow", "runs/a")
    with (
        cursor.hold(),
        pytest.raises(UserError, match="another mirror sends runs/a"),
        CursorFile(tmp_path / "state", "mlflow", "runs/a").hold(),
    ):
        pass
    cursor.path.write_text("{")
    with pytest.raises(UserError, match="is damaged; delete it"):
        cursor.read()


def test_a_shrunk_history_is_noticed_at_the_end(tmp_path):
    run = make_run(tmp_path, "a", lines=make_lines(9), final_up_to_step=10)
    advance(tmp_path)
    write_lines(run.path, read_metrics(run.path)[:4])
    assert advance(tmp_path).lines == 10  # it may grow again
    run.update(status="complete", final={}, ended=1.0)
    assert advance(tmp_path).lines == 4
    assert len(read_rows(tmp_path / "a.db", f"{run.read()['id']}-2")) == 5


def test_a_run_on_a_bucket_is_sent(tmp_path):
    import fsspec

    run = make_run(tmp_path, "a", final={"eval_top1": 50.0}, ended=1.0)
    memory = fsspec.filesystem("memory")
    memory.put(str(run.path), "/mirrored/digits/a", recursive=True)
    cursor = CursorFile(tmp_path / "state", "sqlite", "a")
    folder = open_folder("memory://mirrored/digits/a")
    progress = Feed(folder, SqliteTarget(tmp_path / "a.db"), cursor).advance()
    memory.rm("/mirrored", recursive=True)
    assert (progress.lines, progress.is_done) == (5, True)
