"""Runs that start at the same instant are different runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.child_runs import ROOT

COUNT = 64
# Sixty-four processes that all wait for one pipe to be closed.
_SCRIPT = """
import os, sys
from store.record.runs import RunStore
from store.record.session import RunSession

read, write = os.pipe()
for number in range(int(sys.argv[2])):
    if os.fork() == 0:
        os.close(write)
        os.read(read, 1)
        store = RunStore(sys.argv[1], "sweep")
        session = RunSession(store.choose("", 0))
        session.take_new(overwrite=False)
        newest = store.find_newest_id()
        session.begin("train: {seed: 0}\\n", {}, from_step=0, newest_id=newest)
        session.complete(1, {"number": number}, "")
        session.close()
        os._exit(0)
os.close(read)
os.close(write)
codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(int(sys.argv[2]))]
sys.exit(sum(map(abs, codes)))
"""


def test_64_concurrently_started_runs_have_unique_names_and_ids(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path), str(COUNT)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(path.read_text()) for path in Path(tmp_path).glob("sweep/*/run.json")]
    assert len(found) == COUNT
    assert len({facts["id"] for facts in found}) == COUNT
    assert {facts["final"]["number"] for facts in found} == set(range(COUNT))
    assert {facts["status"] for facts in found} == {"complete"}
