"""The published schemas equal the models, and two validators agree."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import jsonschema
import pytest
from pydantic import ValidationError

from store.export import export_runs
from store.query.record import RunRecord
from store.query.schemas import MODELS, create_schema, format_schema
from store.record.hits import Hits, format_hits, read_header
from store.record.spans import SPANS_FILE, SpanWriter
from store.record.windows import RunSketches, format_sketches
from tests.support.finished_runs import make_whole_run
from tests.support.stored_runs import make_run
from utils.runtime.profiles.module_times import ModulePhase, ModuleSums

ROOT = Path(__file__).resolve().parents[2]


def is_valid(name: str, value: object) -> bool:
    try:
        MODELS[name].model_validate(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("name", MODELS)
def test_a_published_schema_equals_the_codes(name):
    text = (ROOT / "schemas" / f"{name}.json").read_text(encoding="utf-8")
    assert text == format_schema(name), "python -m tools.runs schemas --out schemas"
    jsonschema.Draft202012Validator.check_schema(json.loads(text))


def test_every_published_schema_has_a_model():
    assert {path.stem for path in (ROOT / "schemas").glob("*.json")} == set(MODELS)


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> list[tuple[str, object]]:
    """Each kind of file and line as programs have written it, of both versions."""
    root = tmp_path_factory.mktemp("runs")
    run = make_run(root, "a", final={"eval_top1": float("nan")})
    whole = make_whole_run(root, "whole", final={"eval_top1": float("inf")})
    fixtures = ROOT / "tests" / "fixtures" / "old_runs"
    places = [run.path, whole.path, fixtures / "plain", fixtures / "distilled"]
    found: list[tuple[str, object]] = []
    for place in places:
        record = RunRecord(place)
        found.append(("run", json.loads((place / "run.json").read_text())))
        found += [("metric_line", line) for line in record.lines]
        attempts = (place / "attempts.jsonl").read_text().splitlines()
        found += [("attempt_line", json.loads(line)) for line in attempts]
        if record.artifacts:
            found.append(("artifacts", json.loads((place / "artifacts.json").read_text())))
    for name in ("environment", "summary"):
        found.append((name, json.loads((whole.path / f"{name}.json").read_text())))
    entries = {name: Hits(3, 9, "ab" * 32, b"ab") for name in ("last", "best", "best_before")}
    found.append(("hits", read_header(format_hits(entries))))
    out = run.path.parent / "export"
    found.append(("export_manifest", export_runs([RunRecord(run.path)], out, "csv")))
    writer = SpanWriter(out, 1)
    writer.add("step", 3, 1.79e9, 0.5)
    writer.add("window", 3, 1.79e9, 0.5, count=2, step_s=0.25, input_wait_s=0.125)
    writer.close()
    lines = (out / SPANS_FILE).read_text().splitlines()
    found += [("span_line", json.loads(line)) for line in lines]
    sketches = RunSketches(0.01)
    for step in (2, 4):
        sketches.add("step_s", [0.0, 0.1 * step, -1.0, float("nan")])
        sketches.add("empty", [])
        sketches.cut(step, (2, 4))
    text = format_sketches(sketches.epsilon, sketches.from_step, sketches.windows)
    found.append(("sketches", json.loads(text)))
    sums = ModuleSums()
    sums.us[ModulePhase("forward", "head")] = 2500.0
    head = {"schema_version": 1, "from_to": "3-4", "began": 1.79e9, "attempt": 1}
    found.append(("modules", head | sums.finish("host", 2, 3000.0, "no names")))
    found.append(("tags", {"schema_version": 2, "tags": ["best"]}))
    found.append(("tags", {"schema_version": 2, "tags": ["best"], "crc32c": "0123abcd"}))
    found.append(("run", {"number": 3, "status": "complete", "started": 1.5}))
    return found


def test_files_written_by_programs_match_their_schemas(documents):
    assert {name for name, _ in documents} == set(MODELS)
    for name, value in documents:
        assert is_valid(name, value), value


def mutate(value: object, draw: random.Random) -> object:
    """A copy of a document with one place changed or taken away."""
    changed = copy.deepcopy(value)
    place, key = changed, draw.choice(sorted(changed))
    while isinstance(place[key], dict | list) and place[key] and draw.random() < 0.7:
        place = place[key]
        key = draw.choice(sorted(place)) if isinstance(place, dict) else draw.randrange(len(place))
    if draw.random() < 0.3:
        del place[key]
    else:
        place[key] = draw.choice([None, True, -1, 0, 2, 3, 0.5, "", "x", "nan", [], {}, [1], ["a"]])
    return changed


def test_two_validators_agree_on_two_thousand_documents(documents):
    draw = random.Random(16)
    judges = {name: jsonschema.Draft202012Validator(create_schema(name)) for name in MODELS}
    refused = 0
    for _ in range(2000):
        name, value = draw.choice(documents)
        changed = mutate(value, draw)
        expected = judges[name].is_valid(changed)
        assert is_valid(name, changed) == expected, (name, changed)
        refused += not expected
    assert 200 < refused < 1800
