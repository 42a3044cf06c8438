"""MLflow: a server, or a file of SQLite such as sqlite:///mlflow.db."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from tools.mirror.cursor import HistoryEnd
from tools.mirror.target import Point, RunHead

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run

DEFAULT_PLACE = "sqlite:///mlflow.db"
# Limits of a request.
_METRICS, _PARAMS, _TEXT = 1_000, 100, 6_000
_IDENTITY = "trainer.identity"
_FORBIDDEN = re.compile(r"[^\w\-. :/]")


class MlflowTarget:
    """One run of an MLflow server or database.

    Key, time, step and value are MLflow's primary key, so a repeated point changes nothing. MLflow
    stores infinities as the largest finite numbers.
    """

    def __init__(self, place: str) -> None:
        self._place = place or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_PLACE
        self._client: Any = None  # an `MlflowClient` once it is open
        self._run = ""

    def open(self, run: RunHead, sent: HistoryEnd) -> HistoryEnd:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        # Its own retries last for minutes without a message; the mirror retries itself.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._client = MlflowClient(tracking_uri=self._place)
        known = self._find(run) or self._create(run)
        self._run = known.info.run_id
        texts = {
            _clean(key): value if isinstance(value, str) else json.dumps(value)
            for key, value in run.config.items()
        }
        new = {key: text for key, text in texts.items() if key not in known.data.params}
        for chunk in _cut((Param(key, text[:_TEXT]) for key, text in new.items()), _PARAMS):
            self._client.log_batch(self._run, params=chunk)
        return sent

    def send(self, points: Sequence[Point], end: HistoryEnd) -> None:
        metrics = (metric for point in points for metric in _make_metrics(point))
        for chunk in _cut(metrics, _METRICS):
            self._client.log_batch(self._run, metrics=chunk)

    def finish(self, end: Point) -> None:
        self.send([end], HistoryEnd())
        self._client.set_terminated(self._run, "FINISHED", round(end.time * 1000))

    def close(self) -> None:
        self._client = None

    def _find(self, run: RunHead) -> Run | None:
        experiment = self._client.get_experiment_by_name(run.experiment)
        if experiment is None:
            return None
        query = f"tags.`{_IDENTITY}` = '{run.identity}'"
        runs = self._client.search_runs([experiment.experiment_id], query)
        return runs[0] if runs else None

    def _create(self, run: RunHead) -> Run:
        experiment = self._client.get_experiment_by_name(run.experiment)
        if experiment:
            number = experiment.experiment_id
        else:
            number = self._client.create_experiment(run.experiment)
        started = round(run.started * 1000)
        return self._client.create_run(number, started, {_IDENTITY: run.identity}, run.name)


def _make_metrics(point: Point) -> Iterator[Metric]:
    from mlflow.entities import Metric

    for name, value in point.values.items():
        yield Metric(_clean(name), value, round(point.time * 1000), point.step)


def _cut(items: Iterator[Metric], count: int) -> Iterator[list[Metric]]:
    while chunk := list(islice(items, count)):
        yield chunk


def _clean(name: str) -> str:
    return _FORBIDDEN.sub("_", name)
