"""What a comparison shows beside the numbers: single examples, and the source."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from store.compare.correctness import compare_answers, compute_mcnemar
from store.compare.differences import compare_sources
from store.compare.report import create_report
from store.compare.sides import Side
from store.query.record import RunRecord
from store.record.environment import write_environment
from store.record.hits import HITS_FILE, Hits, format_hits
from store.record.source import SourceState
from tests.support.stored_runs import make_config, make_run
from tools.runs.__main__ import main

PATCH = "diff --git a/{0} b/{0}\n--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-x = 1\n+x = {1}\n"


def make_run_with_hits(
    root: Path, name: str, bits: list[bool] | None, *, ids: str = "0f" * 32, seed: int = 0
) -> RunRecord:
    """A complete run with the answers of its last evaluation."""
    config = make_config(**{"train.seed": seed})
    run = make_run(root, name, config=config, final={"eval_top1": 1.0})
    if bits is not None:
        text = "".join("01"[bit] for bit in bits).ljust(-(-len(bits) // 8) * 8, "0")
        packed = int(text, 2).to_bytes(len(text) // 8, "big")
        entries = {"last": Hits(4, len(bits), ids, packed)}
        (run.path / HITS_FILE).write_bytes(format_hits(entries))
    return RunRecord(run.path)


def test_the_p_value_is_the_sum_of_the_binomials_tails():
    for base_only, new_only in ((0, 0), (0, 1), (3, 11), (40, 40), (7, 0), (12, 30)):
        asked = base_only + new_only
        less = min(base_only, new_only)
        tail = sum(math.comb(asked, k) for k in range(less + 1)) / 2**asked
        expected = min(1.0, 2 * tail)
        assert compute_mcnemar(base_only, new_only) == pytest.approx(expected, rel=1e-12)
        assert compute_mcnemar(new_only, base_only) == compute_mcnemar(base_only, new_only)


def test_two_runs_are_compared_example_by_example(tmp_path):
    draw = random.Random(4)
    first = [draw.random() < 0.7 for _ in range(1797)]
    second = [draw.random() < 0.72 if draw.random() < 0.2 else bit for bit in first]
    sides = [
        Side(n, (make_run_with_hits(tmp_path, n, b),)) for n, b in (("a", first), ("b", second))
    ]
    (found,) = compare_answers(*sides)
    pairs = list(zip(first, second, strict=True))
    assert (found.both, found.base_only, found.new_only, found.neither) == tuple(
        pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))
    )
    assert found.examples == 1797 and found.reason == ""
    assert found.p == compute_mcnemar(found.base_only, found.new_only)


def test_other_examples_are_reported_and_not_compared(tmp_path):
    bits = [True] * 9
    base = Side("a", (make_run_with_hits(tmp_path, "a", bits),))
    other = Side("b", (make_run_with_hits(tmp_path, "b", bits, ids="1e" * 32),))
    silent = Side("c", (make_run_with_hits(tmp_path, "c", None),))
    (found,) = compare_answers(base, other)
    assert found.p is None and found.reason == "they were evaluated on other examples"
    (found,) = compare_answers(base, silent)
    assert found.p is None and found.reason.startswith("digits/c has kept no answers")
    assert compare_answers(silent, silent) == []
    path = tmp_path / "digits" / "b" / HITS_FILE
    path.write_bytes(path.read_bytes()[:-1])
    torn = Side("b", (RunRecord(tmp_path / "digits" / "b"),))
    assert "has kept no answers" in compare_answers(base, torn)[0].reason


def test_seeds_are_paired_and_corrected(tmp_path):
    sides = []
    for name, right in (("a", 30), ("b", 60)):
        records = (
            make_run_with_hits(
                tmp_path, f"{name}{seed}", [i < right + seed for i in range(100)], seed=s
            )
            for seed, s in enumerate((3, 5))
        )
        sides.append(Side(name, tuple(records)))
    found = compare_answers(*sides)
    assert [(one.base, one.new) for one in found] == [
        ("digits/a0", "digits/b0"),
        ("digits/a1", "digits/b1"),
    ]
    assert all(one.p == pytest.approx(2 * compute_mcnemar(0, 30)) for one in found)


def make_sourced(root: Path, name: str, commit: str, patch: str, kept: str = "whole") -> RunRecord:
    run = make_run(root, name, final={"eval_top1": 1.0})
    write_environment(run.path, {"host": name}, SourceState(commit, patch, kept), 1)
    return RunRecord(run.path)


def test_source_differences_are_reported(tmp_path):
    common, own = PATCH.format("a.py", 2), PATCH.format("b.py", 3)
    base = make_sourced(tmp_path, "a", "c" * 40, common)
    assert compare_sources(base, base).is_same
    new = make_sourced(tmp_path, "b", "d" * 40, common + own)
    found = compare_sources(base, new)
    assert found.files == ("b.py",) and found.commits == ("c" * 40, "d" * 40)
    assert "+++ new: b.py" in found.diff and "++x = 3" in found.diff and "a.py" not in found.diff
    assert found.is_known and not found.is_same
    secret = compare_sources(base, make_sourced(tmp_path, "c", "c" * 40, "", "secret"))
    assert not secret.is_known and not secret.is_same
    old = RunRecord(make_run(tmp_path, "old").path)
    assert compare_sources(base, old).commits == ("c" * 40, "")


def test_full_environments_are_compared_if_all_runs_have_one(tmp_path):
    records = [make_sourced(tmp_path, name, "c" * 40, "") for name in "ab"]
    path = tmp_path / "digits" / "b" / "environment.json"
    told = json.loads(path.read_text())
    told["packages"]["zstandard"] = "0.1"
    path.write_text(json.dumps(told))
    sides = [Side(one.path, (one,)) for one in (records[0], RunRecord(path.parent))]
    keys = [one.key for one in create_report(sides, (), []).environment]
    assert keys == ["packages.zstandard"]
    sides.append(Side("old", (RunRecord(make_run(tmp_path, "old").path),)))
    assert create_report(sides, (), []).environment == []


def test_the_program_shows_examples_and_source_differences(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bits = [True, False] * 50
    for name, own in (("a", bits), ("b", [*bits[:90], *[True] * 10])):
        make_run_with_hits(tmp_path / "runs", name, own)
        patch = PATCH.format("m.py", name)
        write_environment(
            tmp_path / "runs" / "digits" / name, {}, SourceState("c" * 40, patch, "whole"), 1
        )
    page = tmp_path / "x.html"
    flags = ["compare", "digits/a", "digits/b", "--store", str(tmp_path / "runs")]
    assert main([*flags, "--source", "--html", str(page)]) == 0
    said = capsys.readouterr().out
    for word in ("only new right", "0.0625", "other changes beside the commit: m.py", "++x = b"):
        assert word in said, said
    html = page.read_text()
    assert "McNemar" in html and "++x = b" in html
    assert main([*flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["answers"][0]["new_only"] == 5 and report["source"][0]["files"] == ["m.py"]
