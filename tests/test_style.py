"""The shape of the code: sizes, names, formatting, and nothing hidden from version control."""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_floors import list_sources

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
MAX_NESTING = 3
MAX_STEP_LINES = 45
MAX_OPEN_PER_1000_LINES = 8
# As pylint counts: a `with` is no branch and no loop.
_BLOCKS = (ast.If, ast.For, ast.While, ast.Try, ast.Match)


def find_faults(name: str, text: str) -> list[str]:
    """What in a file is too long, too wide or too deep."""
    faults = []
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        faults.append(f"{name}: {lines} lines")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = _check_function(node, is_op=name.startswith("big_vision/pp/ops_"))
            faults += [f"{name}:{node.lineno}: {node.name} {fault}" for fault in found]
    return faults


def _check_function(node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_op: bool) -> Iterator[str]:
    """Preprocessing ops keep their published signatures, however many parameters they have."""
    lines = node.end_lineno - node.lineno + 1
    if lines > MAX_FUNCTION_LINES:
        yield f"has {lines} lines"
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    count = len([a for a in arguments if a.arg not in ("self", "cls")])
    if count > MAX_PARAMETERS and not (is_op and node.decorator_list):
        yield f"has {count} parameters"
    depth = _get_depth(node)
    if depth > MAX_NESTING:
        yield f"is nested {depth} deep"


def _get_depth(node: ast.AST) -> int:
    """Blocks within blocks; `elif` and a function inside a function begin no deeper block."""
    deepest = 0
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if not isinstance(child, ast.AST) or isinstance(child, ast.FunctionDef):
                continue
            is_elif = isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If)
            own = isinstance(child, _BLOCKS) and not is_elif
            deepest = max(deepest, _get_depth(child) + own)
    return deepest


def test_files_and_functions_keep_their_size():
    faults = []
    for path in list_sources(ROOT):
        name = path.relative_to(ROOT).as_posix()
        faults += find_faults(name, path.read_text(encoding="utf-8"))
    assert faults == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("x = 1\n" * 501, "501 lines"),
        ("def f():\n" + "    x = 1\n" * 60, "has 61 lines"),
        ("def f(a, b, c, *, d, e, f, g): ...\n", "has 7 parameters"),
        ("def f():\n for a in b:\n  if a:\n   for c in a:\n    while b:\n     a()\n", "nested 4"),
    ],
)
def test_a_planted_fault_of_shape_is_found(text, fault):
    assert any(fault in found for found in find_faults("a.py", text))


def test_an_elif_is_no_deeper_than_its_if():
    text = "def f(a):\n for b in a:\n  if b:\n   a()\n  elif a:\n   b()\n  elif b:\n   a()\n"
    assert find_faults("a.py", text) == []


def find_repeated_classes(texts: dict[str, str]) -> dict[str, list[str]]:
    """Names of classes that stand in more than one file: one word, one meaning."""
    places: dict[str, list[str]] = {}
    for name, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_every_class_name_is_unique():
    names = {path.relative_to(ROOT).as_posix(): path for path in list_sources(ROOT)}
    texts = {n: p.read_text(encoding="utf-8") for n, p in names.items() if n[:6] != "tests/"}
    assert find_repeated_classes(texts) == {}
    planted = {"engine.py": texts["engine.py"], "job/other.py": "class TrainState: ..."}
    assert find_repeated_classes(planted) == {"TrainState": ["engine.py", "job/other.py"]}


def count_open(text: str) -> tuple[int, int]:
    """`Any` and `object` in annotations, and lines of code: not blank, comment or docstring."""
    tree = ast.parse(text)
    silent: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            silent |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(text.splitlines(), start=1)
    code = [n for n, line in lines if n not in silent and line.strip(" ")[:1] not in ("", "#")]
    count = sum(
        isinstance(part, ast.Name) and part.id in ("Any", "object")
        for node in ast.walk(tree)
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if annotation is not None
        for part in ast.walk(annotation)
    )
    return count, len(code)


def find_open(texts: dict[str, str]) -> dict[str, int]:
    """Files with `Any` and `object`, and how often, if all together exceed the bound."""
    counts = {name: count_open(text) for name, text in texts.items()}
    total, lines = (sum(column) for column in zip(*counts.values(), strict=True))
    if 1000 * total <= MAX_OPEN_PER_1000_LINES * lines:
        return {}
    return {name: count for name, (count, _) in counts.items() if count}


def test_annotations_name_types():
    names = {path.relative_to(ROOT).as_posix(): path for path in list_sources(ROOT)}
    texts = {
        name: path.read_text(encoding="utf-8")
        for name, path in names.items()
        if not name.startswith("tests/")
    }
    assert find_open(texts) == {}
    planted = "from typing import Any\n\n\ndef f(a: Any, b: dict[str, object]) -> None: ...\n"
    assert count_open(f'"""Any."""\n# Any\n\n{planted}') == (2, 2)
    assert find_open({"job/other.py": planted, "main.py": "x = 1\n"}) == {"job/other.py": 2}


def test_the_train_step_is_short_and_reads_no_device():
    tree = ast.parse((ROOT / "engine.py").read_text(encoding="utf-8"))
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    step = functions["train_step"]
    assert step.end_lineno - step.lineno + 1 <= MAX_STEP_LINES
    for name in ("train_step", "make_step", "iterate", "_compute_step"):
        called = {
            n.func.attr
            for n in ast.walk(functions[name])
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
        }
        assert not called & {"item", "tolist", "cpu", "numpy", "equal", "fetch"}, name


def test_ruff_finds_nothing():
    for command in (
        ["check", "--no-cache"],
        ["format", "--check", "--no-cache"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def iterate_tokens(path: Path) -> Iterator[tokenize.TokenInfo]:
    with path.open("rb") as file:
        yield from tokenize.tokenize(file.readline)


def test_the_formatter_decides():
    """A table that is read as a table may keep its own form; all other code has the formatter's."""
    kept = sum(
        token.string.startswith("# fmt:")
        for path in list_sources(ROOT)
        for token in iterate_tokens(path)
        if token.type == tokenize.COMMENT
    )
    assert kept <= 20


def check_types(*paths: str | Path) -> subprocess.CompletedProcess[str]:
    words = ["pyrefly", "check", "--output-format", "min-text"]
    interpreter = ["--python-interpreter-path", sys.executable]
    return subprocess.run(
        [sys.executable, "-m", *words, *interpreter, *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_the_type_checker_finds_nothing(tmp_path):
    done = check_types()
    assert done.returncode == 0, done.stdout + done.stderr
    planted = tmp_path / "planted.py"
    planted.write_text("def half(size: int) -> int:\n    return size / 2\n", encoding="utf-8")
    done = check_types("--config", ROOT / "pyproject.toml", planted)
    assert done.returncode == 1 and "[bad-return]" in done.stdout, done.stdout + done.stderr


def test_the_type_checker_finds_nothing_in_the_tests(tmp_path):
    done = check_types("--preset", "basic", "tests")
    assert done.returncode == 0, done.stdout + done.stderr
    planted = tmp_path / "planted.py"
    planted.write_text("def f(size): ...\n\n\nf(sise=1)\n", encoding="utf-8")
    assert check_types("--preset", "basic", planted).returncode == 1


def test_gitignore_hides_no_source():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing can be hidden from one")
    names = [path.relative_to(ROOT).as_posix() for path in list_sources(ROOT)]
    names += [p.relative_to(ROOT).as_posix() for p in (ROOT / "configs").glob("*.yaml")]
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split() == []
    assert done.returncode == 1
