"""`python -m tests.support.read_tracker NAME PLACE RUN`: what a tracker holds of a run, as JSON.

Run with the Python of `run_commands.sh mirrors`. Gives [name, step, number as text], sorted.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

Number = tuple[str, int, str]
_BLOCK = 1 << 15
_HEAD = 7


def read(name: str, place: str, run: str) -> list[Number]:
    """Every number of a run."""
    return sorted(
        {"mlflow": _read_mlflow, "wandb": _read_wandb, "trackio": _read_trackio}[name](place, run)
    )


def _read_mlflow(place: str, run: str) -> Iterator[Number]:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=place)
    experiments = [one.experiment_id for one in client.search_experiments()]
    (found,) = client.search_runs(experiments, f"tags.`trainer.identity` = '{run}'")
    assert found.info.status == "FINISHED"
    for key in found.data.metrics:
        for metric in client.get_metric_history(found.info.run_id, key):
            yield key, metric.step, str(metric.value)


def _read_trackio(place: str, run: str) -> Iterator[Number]:
    for path in Path(place).glob("*.db"):
        with sqlite3.connect(path) as base:
            rows = base.execute("select step, metrics from metrics where run_id = ?", [run])
            for step, text in rows.fetchall():
                yield from _list_numbers(step, json.loads(text))


def _read_wandb(place: str, run: str) -> Iterator[Number]:
    """From W&B's own records; those of one run lie in a file for each batch."""
    final: dict[str, float | str] = {}
    newest = 0
    paths = sorted(Path(place).glob(f"offline-run-*/run-{run}.wandb"))
    for record in (record for path in paths for record in _read_records(path)):
        if record.HasField("history"):
            row = _parse_items(record.history.item)
            newest = step = row.pop("step")
            yield from _list_numbers(step, row)
        elif record.HasField("summary"):
            found = _parse_items(record.summary.update)
            final |= {name: v for name, v in found.items() if name.startswith("final/")}
    yield from _list_numbers(newest, final)


def _parse_items(items: Iterable) -> dict[str, float | str]:
    """Names and values, without those of W&B itself."""
    named = {item.key or item.nested_key[0]: item.value_json for item in items}
    return {name: json.loads(text) for name, text in named.items() if name[0] != "_"}


def _list_numbers(step: int, row: dict[str, float | str]) -> Iterator[Number]:
    return ((name, step, _spell(value)) for name, value in row.items())


def _read_records(path: Path) -> Iterator:
    """The records of a file in LevelDB's log format, after its head of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), _HEAD, b""
    assert data[:4] == b":W&B"
    while at < len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD:
            at += left
            continue
        total, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + _HEAD : at + _HEAD + length]
        assert len(part) == length, f"{path} is torn"
        assert total == zlib.crc32(bytes([kind]) + part), f"{path} is damaged at {at}"
        whole, at = whole + part, at + _HEAD + length
        if kind in (1, 4):  # the whole of a record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def _spell(value: float | str) -> str:
    words = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
    return words[value] if isinstance(value, str) else str(float(value))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read(*sys.argv[1:])))
