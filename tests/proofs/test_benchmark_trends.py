"""The benchmark of trends, in small."""

from __future__ import annotations

import json

from proofs.benchmark_trends import main


def test_steady_series_raise_no_alarm_and_slow_downs_are_found(tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert main(["--tries", "100", "--json", str(path)]) == 0
    said = json.loads(path.read_text())
    assert said["kinds"]["normal"]["found"] > 0.75 and said["bound"] > 0.88
    assert all(one["alarms"] < 0.15 for one in said["kinds"].values())
    assert main(["--tries", "0"]) == 2
    assert "--tries (0) must be at least 1" in capsys.readouterr().err
