"""Files with values of wrong type: every command works, for the other runs, too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.damaged_runs import CONFIGS, VALUES, choose, damage, list_places, make_whole
from tools.runs.__main__ import main

ALONE = (
    ("show", "{bad}", "--quantiles", "--config"),
    ("show", "{bad}", "--json", "--quantiles"),
    ("compare", "{ok}", "{bad}", "--source"),
    ("compare", "{ok}", "{bad}", "--json"),
    ("gate", "{ok}", "{bad}", "--gate=eval.top1@median:1:-:major"),
    ("cost", "{bad}", "--json"),
    ("trace", "{bad}", "--out={out}/t"),
    ("trace", "{bad}", "--out={out}/c", "--format=chrome"),
    ("validate", "{bad}", "--strict"),
    ("rerun", "{bad}", "--dry-run"),
    ("tag", "{bad}", "--add=zz"),
)


class Asker:
    """Calls the program; a failure must be one sentence on stderr."""

    def __init__(self, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.store, self._capsys = store, capsys

    def __call__(self, *flags: str, most: int = 1) -> str:
        self._capsys.readouterr()
        try:
            main([*flags, f"--store={self.store}"])
        except SystemExit as error:
            assert error.code in (0, 1, 2, 3), flags
        said = self._capsys.readouterr()
        assert len(said.err.splitlines()) <= most, (flags, said.err)
        said.out.encode()
        return said.out


@pytest.fixture
def asker(tmp_path, monkeypatch, capsys) -> Asker:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_whole(tmp_path / "runs")
    return Asker(tmp_path / "runs", capsys)


def check_all(asker: Asker, bad: list[Path]) -> None:
    """Commands about all runs answer for the good one, whatever the bad ones hold."""
    rows = json.loads(asker("list", "--json", "--limit=0", most=len(bad)))["runs"]
    assert {"digits/ok"} < {one["path"] for one in rows} and len(rows) == len(bad) + 1
    costs = json.loads(asker("cost", "--filter=path", "--json", most=len(bad)))["runs"]
    assert next(one for one in costs if one["path"] == "digits/ok")["paid_s"] is not None
    asker("calibration", most=len(bad))
    asker("list", most=len(bad))
    asker("validate", most=len(bad))
    out = asker.store.parent / "export"
    asker("export", "--filter=path", "--format=json", "--skip-bad", f"--out={out}", most=len(bad))
    assert any(json.loads(line)["path"] == "digits/ok" for line in (out / "runs.jsonl").open())
    shutil.rmtree(out)


def check_each(asker: Asker, bad: Path) -> None:
    places = {"ok": asker.store / "digits" / "ok", "bad": bad, "out": asker.store.parent}
    for flags in ALONE:
        asker(*(flag.format(**places) for flag in flags))


def test_no_value_of_wrong_type_gives_a_traceback(asker):
    ok = asker.store / "digits" / "ok"
    known = [
        (("run.json", (0, "schema_version")), '"two"'),
        (("run.json", (0, "id")), "7"),
        (("attempts.jsonl", (0, "began")), '"x"'),
        (("environment.json", (0, "source")), "[1]"),
    ]
    pairs = [*known, *choose(list_places(ok), 8)]
    bad = [damage(ok, ok.parent / f"bad{i}", *pair) for i, pair in enumerate(pairs)]
    for number, text in enumerate(CONFIGS):
        bad.append(ok.parent / f"config{number}")
        shutil.copytree(ok, bad[-1])
        (bad[-1] / "config_resolved.yaml").write_text(text)
    check_all(asker, bad)
    for path in bad:
        check_each(asker, path)


def test_a_field_of_wrong_type_is_damage_with_its_reason(asker, capsys):
    ok = asker.store / "digits" / "ok"
    bad = damage(ok, ok.parent / "bad", ("run.json", (0, "started")), '"noon"')
    rows = json.loads(asker("list", "--json"))["runs"]
    fault = next(one["fault"] for one in rows if one["path"] == "digits/bad")
    assert 'started ("noon") is not a time' in fault
    assert main(["show", str(bad)]) == 2
    assert 'started ("noon") is not a time' in capsys.readouterr().err


@pytest.mark.slow
def test_no_value_of_any_field_gives_a_traceback(asker):
    ok = asker.store / "digits" / "ok"
    for number, place in enumerate(list_places(ok)):
        bad = [
            damage(ok, ok.parent / f"bad{number}-{i}", place, value)
            for i, value in enumerate(VALUES)
        ]
        check_all(asker, bad)
        for path in bad:
            check_each(asker, path)
            shutil.rmtree(path)
