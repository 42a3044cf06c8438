"""What is read of a run directory: versions, names of metrics, torn and non-finite values."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from store.index.database import RunIndex
from store.query.config_text import flatten_config, parse_config, read_sections
from store.query.record import RunRecord, get_final_values, get_last_values, read_tail
from store.query.tags import change_tags
from store.record.run_file import RunFacts, fit
from tests.support.stored_runs import make_config, make_lines, make_run
from utils.errors import UserError
from utils.storage.places import open_folder

OLD = Path(__file__).resolve().parents[1] / "fixtures" / "old_runs"


def test_a_current_run_is_read_under_the_names_of_filters(tmp_path):
    run = make_run(tmp_path, "a", final={"eval_top1": 61.0, "test_loss": 2.0, "parameters": 7})
    record = RunRecord(run.path)
    assert record.path == "digits/a" and record.is_complete
    assert record.config["model.args.depth"] == 2 and record.config["model.args.heads"] == [1, 2]
    # The end's numbers come before those of the last line, which says 50.
    assert record.values["eval.top1"] == 61.0 and record.values["test.loss"] == 2.0
    assert record.values["parameters"] == 7.0 and record.values["step"] == 4.0
    assert record.values["train.loss/total"] == 1.0
    assert "eval.lr" not in record.values
    assert [one["status"] for one in record.attempts] == ["complete"]


def test_runs_of_earlier_versions_are_read(tmp_path):
    record = RunRecord(OLD / "distilled")
    assert record.values["eval.top1"] == 9.375 and record.values["agreement"] == 0.0
    assert record.values["train.loss/kd"] == pytest.approx(0.0033047, abs=1e-7)
    assert {"eval.graphs", "train.kd"}.isdisjoint(record.values)
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "run.json").write_text('{"number": 3, "status": "complete", "final": {"top1": NaN}}')
    record = RunRecord(folder)
    assert math.isnan(record.values["top1"])
    assert record.config == {} and record.lines == [] and record.attempts == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "contains no run.json"),
        ('{"status": ', "is damaged"),
        ("[]", "is damaged"),
        ('{"schema_version": 3}', "use a newer one"),
        ('{"schema_version": "x"}', "newer one"),
    ],
)
def test_a_directory_without_a_run_is_refused_by_name(tmp_path, text, word):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=word) as caught:
        RunRecord(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_non_finite_numbers_are_preserved(tmp_path):
    lines = [
        {
            "step": 1,
            "kind": "train",
            "loss/total": None,
            "lr": None,
            "grad_norm": 1.0,
            "nonfinite": {"loss/total": "-inf"},
        }
    ]
    run = make_run(tmp_path, "a", lines=lines, final={"eval_loss": math.inf, "eval_top1": math.nan})
    values = RunRecord(run.path).values
    assert values["train.loss/total"] == -math.inf and math.isnan(values["train.lr"])
    assert values["eval.loss"] == math.inf and math.isnan(values["eval.top1"])
    assert get_final_values(RunFacts(final={"ok": True, "word": "x", "n": 3})) == {"n": 3.0}


@pytest.mark.parametrize("steps", [3, 5000])
def test_the_newest_lines_are_read_from_the_end(tmp_path, steps):
    train = make_lines(steps)[:-1]
    early = {"step": 2, "kind": "eval", "top1": 7.0}
    run = make_run(tmp_path, "a", lines=[*train[:2], early, *train[2:]])
    path = run.path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 9999, "kind": "tr')  # being written
    tail = read_tail(path)
    assert tail[-1]["step"] == steps
    assert {line["kind"] for line in tail} == {"train", "eval"}
    assert read_tail(tmp_path / "nowhere") == []


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab:- \n"), inner),
    max_leaves=6,
)
_NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,9}", fullmatch=True)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(_NAMES, st.dictionaries(_NAMES, _VALUES, max_size=4), max_size=3))
def test_entries_parsed_one_by_one_equal_those_of_the_whole_file(config):
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    whole = parse_config(text)
    found = {key: text for pairs in read_sections(text).values() for key, text in pairs}
    expected = flatten_config(whole)
    assert found == {k: json.dumps(v, sort_keys=True, default=str) for k, v in expected.items()}


@pytest.mark.parametrize("text", ["", "a", "- a", "a: &x {b: 1}\nc: *x\n", "a:\n  b: [\n", "a:\n"])
def test_unusual_configurations_are_read_like_any_yaml(text):
    whole = flatten_config(parse_config(text))
    found = {key: json.loads(t) for pairs in read_sections(text).values() for key, t in pairs}
    assert found == whole


def test_tags_have_their_own_file_and_are_unique(tmp_path):
    run = make_run(tmp_path, "a", config=make_config())
    before = (run.path / "run.json").read_bytes()
    folder = open_folder(run.path)
    assert change_tags(folder, ["paper", "best"], []) == ["best", "paper"]
    assert change_tags(folder, ["paper"], ["best"]) == ["paper"]
    assert RunRecord(run.path).tags == ["paper"]
    assert (run.path / "run.json").read_bytes() == before
    for add, remove, word in ((["a b"], [], "not a valid name"), ([], ["bst"], "no such tag")):
        with pytest.raises(UserError, match=word):
            change_tags(folder, add, remove)
    assert RunRecord(run.path).tags == ["paper"]


def test_the_source_of_a_recipe_is_not_a_setting_of_a_run(tmp_path):
    """It lies in the run's directory; neither lists nor comparisons take it for a key."""
    told = {**make_config(), "source": {"paper": "a", "values": {"optim.lr": 0.1}}}
    run = make_run(tmp_path, "a", config=told)
    make_run(tmp_path, "b", config={**make_config(), "source": {"paper": "b"}})
    assert "paper: a" in (run.path / "config_resolved.yaml").read_text()
    record = RunRecord(run.path)
    assert record.config and not [key for key in record.config if key.startswith("source")]
    index = RunIndex(str(tmp_path))
    index.refresh()
    assert not [key for key in index.list_varied() if key.startswith("source")]


def test_the_newest_numbers_keep_the_order_of_their_line():
    names = ["top1", "top5", "loss", "ece", "a", "b"]
    line = {"step": 3, "kind": "eval", **dict.fromkeys(names, 1.0)}
    assert list(get_last_values([line])) == [*(f"eval.{name}" for name in names), "step"]


def test_wrong_types_count_as_missing_where_a_file_may_be_damaged():
    raw = {"id": 3, "status": "complete", "attempts": -1, "final": None, "number": "x", "more": 1}
    assert fit(RunFacts, raw) == RunFacts(status="complete")
    assert fit(RunFacts, {"reason": 5, "teachers": "x", "schema_version": None}) == RunFacts()
