"""Planted faults: where they are planted, and which ones the tests find."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from proofs.mutants import __main__ as tool
from proofs.mutants.bench import Bench, Coverage, Room
from proofs.mutants.operators import KINDS, list_mutants

ROOT = tool.ROOT


def list_changes(source: str, kind: str) -> set[str]:
    """List the sources that result from all faults of a kind, without blanks."""
    found = [one for one in list_mutants(source, "a.py") if one.kind == kind]
    return {" ".join(one.apply(source).split()) for one in found}


@pytest.mark.parametrize(
    ("kind", "source", "wanted"),
    [
        ("operator", "x = (a + b) * c", {"x = (a - b) * c", "x = (a + b) / c"}),
        ("operator", "x = a and b and c", {"x = a or b and c", "x = a and b or c"}),
        ("operator", "x = -(a)", {"x = (a)"}),
        ("operator", "x += a // b", {"x -= a // b", "x += a * b"}),
        ("comparison", "x = a < b <= c", {"x = a <= b <= c", "x = a < b < c"}),
        ("comparison", "x = a is not b", {"x = a is b"}),
        ("comparison", "x = a not in b", {"x = a in b"}),
        ("comparison", "x = (a) == (b)", {"x = (a) != (b)"}),
        ("constant", "x = f(3, True)", {"x = f(4, True)", "x = f(3, False)"}),
        ("constant", "x = 'ä', a['key']", {"x = 'ä_', a['key']", "x = 'ä', a['key_']"}),
        ("swapped argument", "f(a, (b), *c)", {"f(b, (a), *c)"}),
        ("negated condition", "x = a if b else c", {"x = a if not (b) else c"}),
        ("negated condition", "x = [a for a in b if a.c]", {"x = [a for a in b if not (a.c)]"}),
        ("negated condition", "if not a: f()", {"if a: f()"}),
        ("negated condition", "while a < b: f()", {"while not (a < b): f()"}),
        ("dropped keyword", "f(a, b=1, c=(2))", {"f(a, c=(2))", "f(a, b=1, )"}),
    ],
)
def test_each_kind_of_fault_changes_only_its_target(kind, source, wanted):
    assert list_changes(source, kind) == wanted


def test_only_lines_whose_removal_leaves_valid_code_are_deleted():
    body = ["x = f(a)", "x = g(x)", "a.b = x", "x += 1", "f(x)", "return x"]
    source = "def h(a):\n " + "\n ".join(body)
    kept = {
        " ".join(f"def h(a): {' '.join(body)}".replace(line, "pass").split()) for line in body[1:-1]
    }
    assert list_changes(source, "deleted line") == kept
    guard = "def h(a):\n if a:\n  return 1\n raise f(2, 3)"
    assert list_changes(guard, "deleted line") == {
        "def h(a): if a: pass raise f(2, 3)",
        "def h(a): if a: return 1 pass",
    }


@pytest.mark.parametrize(
    "source",
    [
        '"""Words 1."""',
        "x = 'words for people'",
        "x = f'{a + 1}'",
        "log.info('a', 1 + 2)",
        "assert a == 1",
        "def f(a: dict[str, 'b'] | None) -> list['c']: ...",
        "__all__ = ['a']",
        "if TYPE_CHECKING:\n import a",
        "@dataclass(frozen=True)\nclass A: ...",
        "import a",
        "f(encoding='utf-8')",
        "min(a, b)",
        "def f(a):\n del a",
        "raise A(1 + 2, 'b')",
    ],
)
def test_no_fault_is_planted_where_it_changes_nothing(source):
    assert list_mutants(source, "a.py") == []


def test_faults_of_the_loop_are_distinct_and_uniquely_named():
    source = (ROOT / "engine.py").read_text(encoding="utf-8")
    found = list_mutants(source, "engine.py")
    assert {one.kind for one in found} == set(KINDS)
    assert len({one.name for one in found}) == len(found) > 100
    before = ast.dump(ast.parse(source))
    for one in found[::7]:
        assert ast.dump(ast.parse(one.apply(source))) != before, one


def test_a_fault_keeps_its_name_when_other_lines_come_and_go():
    source = "def f(a):\n    return a + 1\n"
    moved = list_mutants(f"b = 2\n\n\n{source}", "a.py")
    assert {one.name for one in list_mutants(source, "a.py")} < {one.name for one in moved}
    assert {one.lines for one in moved if one.kind == "operator"} == {(5, 5)}
    assert [one.lines for one in moved if one.before == "2"] == [None]
    default = list_mutants("def f(a=1):\n    b = a\n    return b\n", "a.py")[0]
    assert (default.before, default.lines) == ("1", (2, 3))


def test_a_sample_follows_its_seed_and_is_stable():
    found = list_mutants((ROOT / "engine.py").read_text(encoding="utf-8"), "engine.py")
    first = tool.choose(found, 40, seed=0)
    assert len(first) == 40
    assert tool.choose(found, 40, seed=0) == first != tool.choose(found, 40, seed=1)
    fewer = [one for one in found if one != first[3]]
    assert set(first) - {first[3]} < set(tool.choose(fewer, 40, seed=0))


def test_tests_of_a_line_are_found_by_coverage_of_tests_and_fixtures():
    source = "def f(a):\n    b = 1\n    return a + b\n"
    inside = next(one for one in list_mutants(source, "a.py") if one.kind == "operator")
    assert inside.lines == (3, 3)
    coverage = Coverage(
        lines={"a.py": {"": [1], "t.py::own": [2, 3], "t.py::given": [3], "t.py::other": [2]}},
        seconds={"t.py::own": 5.0, "t.py::user": 0.5, "t.py::given": 2.0, "t.py::bad": 0.1},
        uses={
            "t.py::own": [],
            "t.py::other": [],
            "t.py::user": ["t.py::given"],
            "t.py::bad": ["t.py::given"],
        },
        failed=["t.py::bad"],
    )
    assert coverage.find_tests(inside) == ["t.py::user", "t.py::own"]
    everywhere = list_mutants("X = 1\n", "a.py")[0]
    assert coverage.find_tests(everywhere) == ["t.py::other", "t.py::user", "t.py::own"]
    coverage.uses["u.py::far"] = []
    coverage.uses["t.py::reads"] = []
    assert "t.py::reads" in coverage.find_tests(everywhere)
    assert "u.py::far" not in coverage.find_tests(everywhere)
    assert coverage.choose(["t.py::user", "t.py::own"], 6.0) == (["t.py::user"], 2.5)
    assert coverage.choose(["t.py::own", "t.py::user"], 1.0)[0] == ["t.py::own"]


ROOM = Room("toy", ("room.py",), ("tests/test_*.py",))
TEST = "tests/test_room.py"
CODE = """
def name_age(years):
    if years < 13:
        return "child"
    if years >= 18:
        return "adult"
    return "youth"


def wait(count):
    while count > 0:
        count -= 1
    return count


def never(a):
    return a + 2
"""
TESTS = """
import pytest
import room


@pytest.fixture(scope="module")
def names():
    return [room.name_age(years) for years in (12, 13, 50)]


def test_fails_anyhow():
    assert room.name_age(50) == "old"


def test_an_age_has_a_name(names):
    assert names == ["child", "youth", "adult"]


def test_it_ends():
    assert room.wait(3) == 0
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> tuple[Path, Path]:
    """A project of one file and its tests, and a directory for its verdicts."""
    root = tmp_path_factory.mktemp("toy")
    (root / "room.py").write_text(CODE)
    (root / "tests").mkdir()
    (root / "tests" / "test_room.py").write_text(TESTS)
    return root, tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def verdicts(toy) -> list[dict]:
    """Verdicts of all comparisons and operators of the toy."""
    root, cache = toy
    with pytest.MonkeyPatch.context() as patch, Bench(root, cache) as bench:
        patch.setattr("proofs.mutants.bench._LEAST_LIMIT_S", 5.0)
        chosen = [m for m in bench.list_mutants(ROOM) if m.kind in ("comparison", "operator")]
        assert bench.measure(ROOM).failed == [f"{TEST}::test_fails_anyhow"]
        return tool.evaluate_room(bench, ROOM, chosen, 60.0)


@pytest.mark.slow
def test_caught_late_uncovered_and_surviving_faults_are_distinguished(verdicts):
    found = {(row["line"], row["before"]): row["verdict"] for row in verdicts}
    assert found == {
        (3, "<"): "caught",
        (5, ">="): "survived",
        (11, ">"): "caught",
        (12, "-"): "late",
        (17, "+"): "uncovered",
    }
    by = {row["line"]: row["by"] for row in verdicts}
    assert (by[3], by[11]) == (f"{TEST}::test_an_age_has_a_name", f"{TEST}::test_it_ends")


@pytest.mark.slow
def test_the_users_tree_stays_clean_and_verdicts_are_cached(toy, verdicts, monkeypatch):
    root, cache = toy
    assert (root / "room.py").read_text() == CODE
    assert not list(root.rglob("__pycache__"))
    with Bench(root, cache) as bench:
        monkeypatch.setattr(bench, "judge", None)
        chosen = [m for m in bench.list_mutants(ROOM) if m.kind in ("comparison", "operator")]
        monkeypatch.setattr(bench, "run_tests", lambda *_: {"failed": [f"{TEST}::test_it_ends"]})
        again = tool.evaluate_room(bench, ROOM, chosen, 60.0)
    assert [row["verdict"] for row in again if row["line"] == 11] == ["unsure"]
    assert [row["verdict"] for row in again if row["line"] == 5] == ["survived"]


@pytest.mark.slow
def test_a_new_test_reruns_only_survivors(toy, verdicts, tmp_path):
    root, cache = toy
    shutil.copytree(root, tmp_path / "toy")
    further = "import room\n\n\ndef test_18():\n    assert room.name_age(18) == 'adult'\n"
    (tmp_path / "toy" / "tests" / "test_further.py").write_text(further)
    asked = []
    with Bench(tmp_path / "toy", cache) as bench:
        judge = bench.judge
        bench.judge = lambda room, mutant, budget: (
            asked.append(mutant.line) or judge(room, mutant, budget)
        )
        chosen = [m for m in bench.list_mutants(ROOM) if m.line in (3, 5)]
        chosen = [m for m in chosen if m.kind == "comparison"]
        again = tool.evaluate_room(bench, ROOM, chosen, 60.0)
    assert asked == [5]
    assert [(row["line"], row["verdict"]) for row in again] == [(3, "caught"), (5, "caught")]
    assert again[1]["by"] == "tests/test_further.py::test_18"


@pytest.mark.slow
def test_the_table_counts_and_names_survivors(verdicts, capsys):
    tool.print_table([{**row, "room": "engine"} for row in verdicts])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["engine", "3", "5", "60.0%"]
    assert "room.py:5: >= -> > (survived)" in lines
    assert lines[-1] == "2 caught, 1 survived, 1 late, 1 uncovered"


def test_every_package_of_the_tool_has_code_and_tests():
    for room in tool.ROOMS:
        assert room.list_code(ROOT), room
        assert room.list_tests(ROOT), room


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rooms", "engin"], "--rooms 'engin' is no room; did you mean 'engine'"),
        (["--sample", "0"], "--sample (0) must be at least 1"),
        (["--json", "/proc/nowhere/t.json"], "cannot be created"),
    ],
)
def test_bad_input_gives_one_line(flags, words, capsys):
    assert tool.main(flags) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert words in text
