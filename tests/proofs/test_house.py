"""The structure of the project: what `proofs.house` measures, and its bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from proofs.house import (
    BOUNDS,
    ENTRIES,
    find_exceeded,
    find_longest_chain,
    list_public_members,
    main,
    read_house,
)

ROOT = Path(__file__).resolve().parents[2]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def house():
    return read_house(ROOT)


def test_the_project_keeps_its_bounds(house):
    figures = house.measure()
    assert set(figures) == set(BOUNDS)
    assert find_exceeded(figures) == []


@pytest.mark.parametrize("entry", ["losses.logits.kd", "tasks.regress.task", "store.query.record"])
def test_reach_equals_what_python_loads(house, entry):
    code = f"import sys, {entry}\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split()) & house.files.keys()
    assert {name for name in loaded if not house.files[name].is_bare_face} == (
        house.get_reach(entry)
    )


def test_a_small_project_is_measured(tmp_path):
    write(
        tmp_path,
        {
            "main.py": "import store.a\n\n\ndef run():\n    from store import b\n",
            "store/__init__.py": "",
            "store/a.py": "import typing\nif typing.TYPE_CHECKING:\n    from store import c\n",
            "store/b.py": "import store.a, json\n",
            "store/c.py": "from . import b\n",
            "tools/one.py": "if __name__ == '__main__':\n    import sys\n    sys.exit(main())\n",
            "proofs/p.py": "\n" * 9,
            "tests/t.py": "\n" * 99,
            "tasks/protocol.py": "class RunTask:\n    a: int\n    _b: int\n    def c(self): ...\n",
        },
    )
    found = read_house(tmp_path)
    assert found.get_reach("store.c") == {"store.a", "store.b", "store.c"}
    assert found.get_reach("store.a") == {"store.a"}
    assert len(find_longest_chain(found)) == 3
    figures = found.measure()
    assert figures["product lines"] == 5 + 3 + 1 + 1 + 3 + 4
    assert figures["imports inside functions"] == 1
    assert figures["tools: programs"] == 1
    assert figures["most files in a folder"] == 4
    assert figures["public members of RunTask"] == 2
    assert figures["import circles"] == 0


def test_planted_faults_of_structure_are_found(tmp_path):
    write(
        tmp_path,
        {
            "store/a.py": "def run():\n    import store.b\n",
            "store/b.py": "import store.a\n",
            "store/__init__.py": "\n" * 31,
        },
    )
    faults = find_exceeded(read_house(tmp_path).measure())
    assert [fault.partition(":")[0] for fault in faults] == [
        "lines of a package's face",
        "import circles",
    ]


def test_public_members_are_methods_and_annotated_attributes():
    text = "class A:\n    x: int\n    y = 1\n    def f(self): ...\n    def _g(self): ...\n"
    assert list_public_members(text, "A") == ["f", "x"]


def test_the_program_prints_figures_and_what_a_module_loads(capsys, tmp_path):
    assert main([str(ROOT), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert all(f"files loaded by {entry}" in figures for entry in ENTRIES)
    assert main(["--reach", "utils.errors"]) == 0
    assert capsys.readouterr().out.split() == ["utils.errors"]
    assert main(["--reach", "no.module"]) == 2
    assert "--reach ('no.module') is no module" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "holds no Python file" in capsys.readouterr().err
