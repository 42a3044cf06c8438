"""Runs with values of the wrong kind, a field at a time, in every JSON file of a run directory."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from store.query.tags import change_tags
from store.record.artifacts import publish_artifacts
from store.record.attempts import ATTEMPTS_FILE
from store.record.environment import ENVIRONMENT_FILE
from store.record.hits import HITS_FILE, Hits, format_hits
from store.record.sketches import QuantileSketch
from store.record.spans import SPANS_FILE
from store.record.summary import write_summary
from store.record.windows import SKETCHES_FILE, QuantileWindow, format_sketches
from tests.support.stored_runs import make_config, make_run
from utils.json_types import JsonObject
from utils.storage.places import open_folder

# Texts of JSON: numbers that no float holds, half a pair of code units, a colour's bracket, depth.
VALUES = (
    "null",
    "true",
    "-1",
    "1e400",
    "NaN",
    "1" + "0" * 400,
    '"x"',
    '"\\ud800[/red]"',
    "[]",
    "[1]",
    "{}",
    '{"a": [1]}',
    '["\\u0000"]',
    "[" * 3000 + "]" * 3000,
)
_LINES = (ATTEMPTS_FILE, "metrics.jsonl", SPANS_FILE)
_WHOLE = (
    "run.json",
    ENVIRONMENT_FILE,
    SKETCHES_FILE,
    "artifacts.json",
    "tags.json",
    "summary.json",
    HITS_FILE,
)
_MARK = "@here@"
Place = tuple[str, tuple[str | int, ...]]
CONFIGS = (
    "- 1\n- 2\n",
    "a: &a {b: *a}\n",
    "train: {seed: [1, 2]}\nmodel: 3\n1: 2\n",
    "a: 2020-99-99\n",
    'run: {checkpoint_root: [1], name: "\\ud800"}\n',
    "data: {global_batch_size: -1}\n",
    "[" * 3000,
)


def make_whole(root: Path, name: str = "ok") -> Path:
    """A complete run with every file that a run may leave behind."""
    run = make_run(root, name, config=make_config(), final={"eval_top1": 60.0, "test_loss": None})
    path = run.path
    began = json.loads((path / "run.json").read_text())["started"]
    span = {"step": 1, "began": began, "duration_s": 0.1, "rank": 0, "attempt": 1, "count": 1}
    names = ("input", "window", "compile", "evaluation", "rollback")
    rows = [{"name": one, **span, "step_s": 0.1, "input_wait_s": 0.0} for one in names]
    (path / SPANS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    sketch = QuantileSketch()
    sketch.add([1.0, 2.0, -3.0, 0.0])
    text = format_sketches(sketch.epsilon, 0, [QuantileWindow(4, {"step_s": sketch})])
    (path / SKETCHES_FILE).write_text(text)
    told = {
        "schema_version": 2,
        "attempt": 1,
        "python": "3.11",
        "os": "x",
        "host": "vm",
        "cores": 2,
        "accelerator": {"kind": "cpu"},
        "packages": {"torch": "2"},
        "variables": {"XLA_A": "1"},
        "refused_variables": [],
        "source": {"commit": "a" * 40, "dirty": False, "diff": "none"},
    }
    (path / ENVIRONMENT_FILE).write_text(json.dumps(told, indent=1) + "\n")
    (path / HITS_FILE).write_bytes(format_hits({"last": Hits(4, 8, "a" * 64, b"\x0f")}))
    change_tags(open_folder(path), ["paper"], [])
    run.update(summary="summary.json")
    write_summary(path, publish_artifacts(path))
    return path


def list_places(run: Path) -> list[Place]:
    """Every field of every JSON of a run: its file, and the way to it."""
    found: list[Place] = []
    for name in (*_LINES, *_WHOLE):
        for number, line in enumerate(_read_objects(run, name)):
            if number < 1 or name != "metrics.jsonl":
                found += [(name, (number, *way)) for way in _walk(line)]
    return found


def damage(run: Path, target: Path, place: Place, value: str) -> Path:
    """A copy of a run in which one field has another value."""
    shutil.copytree(run, target)
    name, (number, *way) = place
    objects = _read_objects(run, name)
    if not way:
        objects[number] = _MARK
    else:
        inner = objects[number]
        for key in way[:-1]:
            inner = inner[key]
        inner[way[-1]] = _MARK
    texts = [json.dumps(one).replace(f'"{_MARK}"', value) for one in objects]
    tail = (run / name).read_bytes().partition(b"\n")[2] if name == HITS_FILE else b""
    (target / name).write_bytes(("\n".join(texts) + "\n").encode() + tail)
    return target


def choose(places: list[Place], count: int, seed: int = 7) -> Iterator[tuple[Place, str]]:
    """Some of all pairs of a place and a value, the same each time, of each file some."""
    draw = random.Random(seed)
    files = sorted({name for name, _ in places})
    for number in range(count):
        mine = [one for one in places if one[0] == files[number % len(files)]]
        yield draw.choice(mine), draw.choice(VALUES)


def _read_objects(run: Path, name: str) -> list[JsonObject | str]:
    content = (run / name).read_bytes()
    if name == HITS_FILE:
        content = content.partition(b"\n")[0]
    if name in _LINES:
        return [json.loads(line) for line in content.splitlines()]
    return [json.loads(content)]


def _walk(value: JsonObject, depth: int = 3) -> Iterator[tuple[str | int, ...]]:
    yield ()
    pairs = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for key, inner in pairs:
        if isinstance(inner, dict | list) and depth:
            yield from ((key, *way) for way in _walk(inner, depth - 1))
        else:
            yield (key,)
