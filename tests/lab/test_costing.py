"""Programs that the child in JAX exports; a stand-in takes its place where there is no JAX."""

from __future__ import annotations

import json

from bill import compiler
from bill.targets import parse_target
from bill.yardstick import ExportAnswer
from lab import costing

CHILD = """
import json, sys
from pathlib import Path
path = Path(sys.argv[1])
for program in json.loads(path.read_text())["programs"]:
    Path(program.get("artifact", program.get("found"))).write_text(program["form"])
(path.parent / "facts.json").write_text("{}")
"""


def test_artifacts_come_in_the_order_of_the_programs(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(costing, "_CHILD", child)
    target = parse_target("v5e")
    programs = [{"form": "sum"}, {"form": "loop"}]
    assert costing.export_in_jax(programs, target, time_limit_s=60) == [b"sum", b"loop"]
    places = tmp_path / "given.npz", tmp_path / "found.npz"
    costing.run_in_jax({"form": "sum"}, places, target, time_limit_s=60)
    assert places[1].read_text() == "sum"


def test_an_exported_step_says_how_many_arguments_are_state(tmp_path):
    child = tmp_path / "child.py"
    child.write_text(CHILD.replace('"{}"', json.dumps('{"state": 3}')))
    request = {"programs": []}
    target = parse_target("v5e")
    assert compiler.run_script(child, request, target, 60.0, ExportAnswer).state == 3
