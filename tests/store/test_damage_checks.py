"""Files are checked against their commit record before anything uses them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from store.index.database import RunIndex
from store.quality.validation import check_run, find_damaged_files
from store.query.record import RunRecord
from store.query.tags import TAGS_FILE, change_tags
from store.record.summary import SUMMARY_FILE
from tests.support.finished_runs import make_whole_run
from tools.runs.__main__ import main
from utils.errors import UserError
from utils.storage.places import open_folder

GATE = ("--gate", "eval.top1:1:-:major")


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    """Two complete runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("good", "bad"):
        make_whole_run(tmp_path / "runs", name)
    return tmp_path / "runs"


def flip(path: Path, word: bytes) -> None:
    """Turn a bit of the last letter of a word."""
    content = bytearray(path.read_bytes())
    content[content.index(word) + len(word) - 1] ^= 1
    path.write_bytes(content)


def ask(capsys, store: Path, *arguments: str) -> tuple[int, str, str]:
    code = main([*arguments, "--store", str(store)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_damaged_run_stops_an_export_unless_skipped(store, tmp_path, capsys):
    flip(store / "digits" / "bad" / "metrics.jsonl", b'{"')
    export = ("export", "--filter", "path", "--format", "json", "--out", str(tmp_path / "out"))
    code, _, err = ask(capsys, store, *export)
    assert code == 2 and "digits/bad (metrics.jsonl has other bytes" in err
    assert "--skip-bad" in err and err.count("\n") == 1 and not (tmp_path / "out").exists()
    (store / "digits" / "torn").mkdir()
    (store / "digits" / "torn" / "run.json").write_text("{")
    code, _, err = ask(capsys, store, *export)
    assert code == 2 and "digits/torn" in err
    code, out, _ = ask(capsys, store, *export, "--skip-bad")
    assert code == 0 and "left out: digits/bad, digits/torn" in out
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["skipped"] == [
        "digits/bad",
        "digits/torn",
    ]
    assert ask(capsys, store, "validate", str(tmp_path / "out"))[0] == 0


def test_gates_refuse_damaged_runs_and_other_commands_warn(store, tmp_path, capsys, caplog):
    assert ask(capsys, store, "gate", "good", "bad", *GATE)[0] == 0
    flip(store / "digits" / "bad" / "metrics.jsonl", b'{"')
    code, _, err = ask(capsys, store, "gate", "good", "bad", *GATE)
    assert code == 2 and "digits/bad/metrics.jsonl has other bytes" in err
    assert err.count("\n") == 1
    for words in (
        ("compare", "good", "bad"),
        ("cost", "--filter", "path"),
        ("trace", "bad", "--out", str(tmp_path / "x.trace")),
    ):
        caplog.clear()
        assert ask(capsys, store, *words)[0] == 0
        assert [one for one in caplog.messages if "digits/bad/metrics.jsonl" in one]
        assert len(caplog.messages) == 1


@pytest.mark.parametrize("file", ["run.json", "metrics.jsonl", "config_resolved.yaml"])
def test_each_file_read_is_checked_against_the_record(store, file):
    run = store / "digits" / "bad"
    assert list(find_damaged_files(RunRecord(run))) == []
    flip(run / file, b"ep" if file != "run.json" else b"attempts")
    assert [name for name, _ in find_damaged_files(RunRecord(run))] == [file]
    (run / SUMMARY_FILE).write_text("{}")
    assert [name for name, _ in find_damaged_files(RunRecord(run))] == [SUMMARY_FILE]
    (run / SUMMARY_FILE).unlink()
    assert [name for name, _ in find_damaged_files(RunRecord(run))] == [SUMMARY_FILE]


@pytest.mark.parametrize("word", [b"digits", b"data:"])
def test_a_configuration_with_a_flipped_bit_is_listed_as_damaged(store, capsys, word):
    key = "data.name=digits"
    assert ask(capsys, store, "list", "--filter", key)[1].count("digits/") == 2
    flip(store / "digits" / "bad" / "config_resolved.yaml", word)
    index = RunIndex(str(store))
    index.refresh()
    (told,) = index.read_faults().values()
    index.close()
    assert told[0] == "digits/bad" and "config_resolved.yaml is damaged" in told[1]
    assert "damaged" in ask(capsys, store, "list")[1]


def test_a_damaged_tags_file_is_refused_and_kept(store, capsys):
    run = store / "digits" / "bad"
    change_tags(open_folder(run), ["paper"], [])
    flip(run / TAGS_FILE, b"paper")
    before = (run / TAGS_FILE).read_bytes()
    code, _, err = ask(capsys, store, "tag", "good", "bad", "--add", "z")
    assert code == 2 and "tags.json is damaged" in err and "delete it" in err
    assert err.count("\n") == 1
    assert (run / TAGS_FILE).read_bytes() == before
    assert not (store / "digits" / "good" / TAGS_FILE).exists()
    with pytest.raises(UserError, match="damaged"):
        change_tags(open_folder(run), ["z"], [])


@pytest.mark.parametrize("file", ["state.json", "COMMITTED", "../best.json"])
def test_small_checkpoint_files_are_always_cross_checked(store, file):
    place = store / "digits" / "bad" / "checkpoints" / "step_00000020"
    place.mkdir(parents=True)
    (place / "state.json").write_text('{"format_version": 2}')
    digest = hashlib.sha256((place / "state.json").read_bytes()).hexdigest()
    (place / "COMMITTED").write_text(json.dumps({"state_sha256": digest}))
    (place.parent / "best.json").write_text('{"step": 20}')
    assert check_run(open_folder(store / "digits" / "bad")) == []
    flip(place / file, b"2" if file != "COMMITTED" else digest.encode())
    (fault,) = check_run(open_folder(store / "digits" / "bad"))
    assert fault.grade == "damage" and fault.file.startswith("checkpoints/")


@pytest.mark.parametrize("head", [{}, {"schema_version": 2}])
def test_a_damaged_best_checkpoint_file_is_never_accepted(store, head):
    place = store / "digits" / "bad" / "checkpoints"
    (place / "step_00000020").mkdir(parents=True)
    whole = json.dumps({**head, "step": 20}).encode()
    turned = [
        whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
        for at in range(len(whole))
        for bit in range(8)
    ]
    for content in (whole, *turned, *(whole[:at] for at in range(len(whole)))):
        (place / "best.json").write_bytes(content)
        for is_thorough in (False, True):
            faults = check_run(open_folder(store / "digits" / "bad"), is_thorough=is_thorough)
            assert [fault.grade for fault in faults] == ([] if content == whole else ["damage"])
