"""Caches are described, verified, merged and cut, and survive being killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from store.lineage.ancestors import CACHE, LINEAGE_FILE, Ancestor, format_note, read_note
from tasks.teachers.cache.manifest import read_manifest, read_shape, write_manifest
from tasks.teachers.cache.reader import TeacherCache
from tasks.teachers.cache.rows import (
    CLASSES,
    FEATURES,
    CacheShape,
    Column,
    condense_answers,
    measure_errors,
    pack_rows,
)
from tasks.teachers.cache.writer import CacheWriter
from tools.cache.__main__ import main
from tools.cache.card import make_card
from tools.cache.directory import CacheDirectory
from utils.errors import UserError
from utils.storage.places import open_folder

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = (
    Column("aa", CLASSES, 9, 6, name="first", weight=2.0),
    Column("bb", FEATURES, 5, name="second", part="pooled"),
)
SHAPE = CacheShape(COLUMNS, 3, 4, 8)
STREAM = {"num_classes": 9, "global_batch_size": 8, "seed": 0, "train_pp": "decode|flip"}


def create_outputs(shape: CacheShape, step: int) -> list[torch.Tensor]:
    """Create the same outputs of each teacher in every combination of teachers."""
    found = []
    for column in shape.columns:
        generator = torch.Generator().manual_seed(1000 * int(column.teacher, 16) + step)
        numbers = torch.randn((shape.global_batch_size, column.width), generator=generator) * 3
        found.append(condense_answers(numbers, column.top_k) if column.top_k else numbers)
    return found


def write(folder: Path, shape: CacheShape = SHAPE, part=(0, 1), **stream) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, {**STREAM, **stream}, shape, 1)
    for epoch in range(part[0], shape.epochs, part[1]):
        writer = CacheWriter(folder, shape, epoch)
        while not writer.is_complete:
            step = epoch * shape.steps_per_epoch + writer.steps_done
            answers = create_outputs(shape, step)
            rows = pack_rows(answers, shape, torch.arange(8) + 8 * step)
            writer.append(rows, measure_errors(rows, answers, shape))
    return folder


def read_all(folder: Path | str) -> list[dict[str, torch.Tensor]]:
    cache = TeacherCache(folder)
    return [cache.read(step) for step in range(read_shape(read_manifest(folder)).total_steps)]


def assert_equal(left: list[dict[str, torch.Tensor]], right: list[dict[str, torch.Tensor]]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def read_errors(capsys) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_the_card_names_the_teacher_and_the_precision(tmp_path, capsys):
    folder = write(tmp_path / "cache")
    (folder / "teachers.json").write_text('{"aa": {"top1": 81.25, "ece": 0.1, "split": "val"}}')
    assert main(["info", str(folder), "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    first, second = card["teachers"]
    gaps = [
        (TeacherCache(folder).read(step)["cache_features1"] - create_outputs(SHAPE, step)[1]).abs()
        for step in range(12)
    ]
    assert second["max_error"] == pytest.approx(float(torch.stack(gaps).max()), rel=1e-5)
    assert second["mean_error"] == pytest.approx(float(torch.stack(gaps).mean()), rel=1e-4)
    assert first["accuracy"]["top1"] == 81.25
    assert (card["augmentations"], card["examples"], card["files_missing"]) == (3, 32, 0)
    assert card["bytes"] == 3 * 32 * card["bytes_per_example"]
    assert main(["info", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "| first | aa | 6 of 9 classes | float16 |" in text
    assert "top1 81.25, of val" in text
    assert "augmentation: `decode|flip`, seed 0" in text


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
        (lambda path: path.write_bytes(b"\x01" + path.read_bytes()[1:]), "has CRC32C"),
    ],
)
def test_a_changed_file_is_named(tmp_path, capsys, damage, said):
    folder = write(tmp_path / "cache")
    assert main(["verify", str(folder)]) == 0
    damage(folder / "epoch_00001.00000-of-00001.bin")
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 1
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert "epoch_00001" in line
    assert said in line


def test_a_changed_byte_is_not_replayed(tmp_path):
    folder = write(tmp_path / "cache")
    path = folder / "epoch_00001.00000-of-00001.bin"
    path.write_bytes(path.read_bytes()[:40] + b"\x7f" + path.read_bytes()[41:])
    cache = TeacherCache(folder)
    cache.read(3)
    with pytest.raises(UserError, match=r"epoch_00001.*is damaged"):
        cache.read(4)


def test_rows_of_another_cache_at_that_path_are_not_continued(tmp_path, monkeypatch):
    """They lie in the user's cache, and somebody has begun anew on the bucket."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    place, name = f"memory://anew/{tmp_path.name}", "epoch_00000.00000-of-00001.part"
    for text, is_kept in (("first", False), ("first", True), ("second", False)):
        directory = CacheDirectory(place)
        directory.folder.write_text("manifest.json", text)
        directory.prepare(["manifest.json"])
        assert (directory.path / name).is_file() == is_kept
        (directory.path / name).write_bytes(b"rows")


def test_several_processes_verify_the_same_as_one(tmp_path, capsys):
    folder = write(tmp_path / "cache")
    path = folder / "epoch_00002.00000-of-00001.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    (folder / "epoch_00000.00000-of-00001.bin").unlink()
    assert main(["verify", str(folder)]) == 1
    alone = capsys.readouterr().out
    assert main(["verify", str(folder), "--workers=2"]) == 1
    assert capsys.readouterr().out == alone
    assert "epoch_00000" in alone
    assert "epoch_00002" in alone


def test_parts_of_several_machines_merge_into_one_cache(tmp_path, capsys):
    whole = write(tmp_path / "whole")
    parts = [write(tmp_path / f"part{n}", part=(n, 2)) for n in range(2)]
    assert main(["merge", *map(str, parts), "--out", str(tmp_path / "merged")]) == 0
    for path in whole.glob("epoch_*"):
        assert path.read_bytes() == (tmp_path / "merged" / path.name).read_bytes()
    assert (tmp_path / "merged" / "CARD.md").is_file()
    capsys.readouterr()
    (parts[1] / "epoch_00001.00000-of-00001.bin").unlink()
    assert main(["merge", *map(str, parts), "--out", str(tmp_path / "torn")]) == 2
    assert "has epoch_00001.00000-of-00001.bin; store that part first" in read_errors(capsys)


def test_teachers_of_one_stream_are_merged_into_one_cache(tmp_path):
    whole = write(tmp_path / "whole")
    alone = [
        write(tmp_path / column.teacher, replace(SHAPE, columns=(column,))) for column in COLUMNS
    ]
    assert main(["merge", *map(str, alone), "--out", str(tmp_path / "merged")]) == 0
    assert_equal(read_all(tmp_path / "merged"), read_all(whole))
    assert make_card(tmp_path / "merged")["teachers"] == make_card(whole)["teachers"]


def test_lineages_are_merged_and_cut_like_the_stored_outputs(tmp_path):
    """Both teachers were taught by one other, and each by one of its own besides."""
    elders = {name: Ancestor(2, id=f"of {name}", through=name) for name in ("aa", "bb")}
    notes = {
        name: [
            Ancestor(1, hash=name, judged={"top1": 9.0}),
            Ancestor(2, id="both", through=name),
            elder,
        ]
        for name, elder in elders.items()
    }
    parts = []
    for column in COLUMNS:
        shape = replace(SHAPE, columns=(column,), epochs=1)
        parts.append(write(tmp_path / column.teacher, shape))
        (parts[-1] / LINEAGE_FILE).write_text(format_note(notes[column.teacher]))
    merged, again = tmp_path / "merged", tmp_path / "again"
    assert main(["merge", *map(str, parts), "--out", str(merged)]) == 0
    known = read_note(open_folder(merged))
    assert [(one.generation, one.hash or one.through) for one in known] == [
        (1, "aa"),
        (1, "bb"),
        (2, "aa"),
        (2, "aa"),
        (2, "bb"),
        (2, "bb"),
    ]
    words = ["subset", str(merged), "--out", str(again), "--teachers", "bb"]
    assert main(words) == 0
    assert read_note(open_folder(again)) == [
        replace(one, via=CACHE) if one.generation == 1 else one for one in notes["bb"]
    ]


def test_caches_are_merged_and_cut_on_a_bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    whole, place = write(tmp_path / "whole"), f"memory://merged/{tmp_path.name}"
    parts = [str(write(tmp_path / f"part{n}", part=(n, 2))) for n in range(2)]
    assert main(["merge", *parts, "--out", place]) == 0
    assert main(["verify", place]) == 0
    assert_equal(read_all(place), read_all(whole))
    assert main(["subset", place, "--out", f"{place}/small", "--augmentations=1"]) == 0
    assert main(["info", f"{place}/small"]) == 0
    assert make_card(f"{place}/small")["augmentations"] == 1
    assert not list((tmp_path / "own").rglob("*.bin"))
    assert main(["subset", place, "--out", place]) == 2


@pytest.mark.parametrize(
    ("shape", "stream", "rule"),
    [
        (SHAPE, {"seed": 1}, "another stream than .*: seed 1 instead of 0"),
        (replace(SHAPE, columns=COLUMNS[:1]), {}, "outputs of teacher aa that another cache has"),
        (replace(SHAPE, columns=COLUMNS[1:], epochs=2), {}, r"hold \[12, 8\] steps"),
    ],
)
def test_caches_that_do_not_belong_together_are_not_merged(tmp_path, capsys, shape, stream, rule):
    one, other = write(tmp_path / "one"), write(tmp_path / "other", shape, **stream)
    assert main(["merge", str(one), str(other), "--out", str(tmp_path / "merged")]) == 2
    assert re.search(rule, read_errors(capsys))


def test_a_subset_equals_what_would_have_been_stored(tmp_path):
    """Fewer classes, epochs and teachers: the dropped mass goes to the rest."""
    write(tmp_path / "cache")
    assert (
        main(
            [
                "subset",
                str(tmp_path / "cache"),
                "--out",
                str(tmp_path / "small"),
                "--top-k=2",
                "--augmentations=2",
                "--teachers",
                "aa",
            ]
        )
        == 0
    )
    shape = CacheShape((replace(COLUMNS[0], top_k=2),), 2, 4, 8)
    expected = read_all(write(tmp_path / "direct", shape))
    for one, other in zip(read_all(tmp_path / "small"), expected, strict=True):
        assert torch.equal(one["cache_log_probs0"], other["cache_log_probs0"])
        assert torch.equal(one["cache_indices0"], other["cache_indices0"])
        torch.testing.assert_close(
            one["cache_residual0"], other["cache_residual0"], rtol=5e-3, atol=1e-5
        )


def test_converting_the_type_states_the_largest_error(tmp_path):
    write(tmp_path / "cache")
    out = tmp_path / "small"
    assert main(["subset", str(tmp_path / "cache"), "--out", str(out), "--dtype=int8"]) == 0
    noted, cache = make_card(out)["teachers"][1], TeacherCache(out)
    gaps = [
        (cache.read(step)["cache_features1"] - create_outputs(SHAPE, step)[1]).abs()
        for step in range(12)
    ]
    assert float(torch.stack(gaps).max()) <= noted["max_error"]
    assert float(torch.stack(gaps).mean()) <= noted["mean_error"]
    again = tmp_path / "again"
    assert main(["subset", str(out), "--out", str(again)]) == 0
    assert_equal(read_all(again), read_all(out))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["subset", "CACHE", "--out", "NEW", "--top-k=7"], "--top-k (7) must lie between 1 and 6"),
        (["subset", "CACHE", "--out", "NEW", "--augmentations=4"], "must lie between 1 and 3"),
        (["subset", "CACHE", "--out", "NEW", "--teachers", "x"], "it has aa, bb"),
        (["subset", "CACHE", "--out", "CACHE"], "is a cache that is read"),
        (["merge", "CACHE", "--out", "NEW"], "takes two caches or more"),
        (["merge", "CACHE", "CACHE", "--out", "nope://x"], "cannot be opened"),
        (["verify", "CACHE", "--workers=0"], "--workers (0) must be at least 1"),
        (["info", "NEW"], "no readable manifest.json"),
        (["verify", "CACHE", "--train.steps=3"], "name the run by --config"),
        (["verify", "CACHE", "--steps=0", "--config=x"], "--steps (0) must be at least 1"),
    ],
)
def test_impossible_operations_give_one_line(tmp_path, capsys, words, rule):
    write(tmp_path / "cache")
    places = {"CACHE": str(tmp_path / "cache"), "NEW": str(tmp_path / "new")}
    assert main([places.get(word, word) for word in words]) == 2
    assert rule in read_errors(capsys)


WRITING = """
import sys
from pathlib import Path
from tests.tools.test_cache import SHAPE, write
from dataclasses import replace
print("begun", flush=True)
write(Path(sys.argv[1]), replace(SHAPE, epochs=40))
"""


def kill_and_continue(folder: Path, kills: int) -> int:
    """Kill a writer repeatedly, each time a little later; return how many kills were in time."""
    killed = 0
    for number in range(kills + 1):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITING, str(folder)], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        if number < kills:
            # Not a rhythm of the writer's: files of 4 steps take milliseconds each.
            time.sleep(0.011 + 0.037 * number)
            writer.send_signal(signal.SIGKILL)
        code = writer.wait()
        killed += code == -signal.SIGKILL
        writer.stdout.close()
    assert code == 0
    return killed


@pytest.mark.parametrize("kills", [1, pytest.param(25, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_instant_loses_only_time(tmp_path, kills):
    folder = tmp_path / "killed"
    assert kill_and_continue(folder, kills) >= 1
    shape = replace(SHAPE, epochs=40)
    whole = write(tmp_path / "whole", shape)
    names = {path.name for path in whole.iterdir()}
    assert {path.name for path in folder.iterdir()} == names
    for name in names:
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert main(["verify", str(folder)]) == 0


@pytest.mark.parametrize("torn", ["noted", "summed", "named"])
def test_an_interruption_anywhere_while_finishing_a_file_is_continued(tmp_path, torn):
    """What lies there between each two of the steps by which a file gets its name."""
    whole = write(tmp_path / "whole")
    folder = tmp_path / "torn"
    shutil.copytree(whole, folder)
    path = folder / "epoch_00002.00000-of-00001.bin"
    errors = json.loads(path.with_suffix(".json").read_text())["errors"]
    path.with_suffix(".progress").write_text(json.dumps({"steps": 4, "errors": errors}))
    if torn != "named":
        path.replace(path.with_suffix(".part"))
    if torn == "noted":
        path.with_suffix(".json").unlink()
    write(folder)
    for name in os.listdir(whole):  # noqa: PTH208 (names, not paths)
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(os.listdir(folder)) == sorted(os.listdir(whole))  # noqa: PTH208


def test_example_checksums_stay_with_their_rows(tmp_path):
    write(tmp_path / "cache")
    assert (
        main(
            [
                "subset",
                str(tmp_path / "cache"),
                "--out",
                str(tmp_path / "small"),
                "--teachers",
                "bb",
            ]
        )
        == 0
    )
    left, right = TeacherCache(tmp_path / "cache"), TeacherCache(tmp_path / "small")
    assert np.array_equal(left.read_rows(5)["example"], right.read_rows(5)["example"])
    right.read(5, torch.arange(8) + 40)
