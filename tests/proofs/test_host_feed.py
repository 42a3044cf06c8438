"""What a host can prepare follows from its vCPUs and what an image costs."""

from __future__ import annotations

import json

import pytest

from proofs.host_feed import HOSTS, get_feed, main


def test_a_hosts_input_rate_follows_its_vcpus():
    feed = get_feed("v5e-8", "given", 2.0, 1000.0)
    assert feed.images_per_s == 224 * 500
    assert feed.per_chip == 14_000
    assert feed.chips_fed == 112
    # At that cost of an image all eight chips get just what they take.
    assert get_feed("v5e-8", "given", feed.enough_ms, 1000.0).chips_fed == pytest.approx(8)


def test_a_table_of_each_form_marks_hosts_whose_chips_would_wait(tmp_path, capsys):
    result, table = tmp_path / "input.json", tmp_path / "table.json"
    modes = {"pipeline": 1.5, "timm": 3.0, "store_uint8": 0.5}
    result.write_text(
        json.dumps({"cpu_ms_per_image": {m: {"median": v} for m, v in modes.items()}})
    )
    flags = ["--input", str(result), "--chip-images-per-s", "20000", "--share", "0.5"]
    assert main([*flags, "--json", str(table)]) == 0
    rows = json.loads(table.read_text())
    assert {row["images"] for row in rows} == {"pipeline", "store_uint8"}
    assert len(rows) == 2 * len(HOSTS)
    waiting = [row for row in rows if row["chips_fed"] < HOSTS[row["host"]].chips]
    assert capsys.readouterr().out.count("chips would wait") == len(waiting)
    assert 0 < len(waiting) < len(rows)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cpu-ms", "0"], "--cpu-ms (0) must be above 0"),
        (["--cpu-ms", "nan"], "--cpu-ms (nan)"),
        (["--cpu-ms", "1", "--share", "1.5"], "--share (1.5)"),
        (["--cpu-ms", "1", "--hosts", "v9-1"], "'v9-1'; use v3-8"),
        (["--cpu-ms", "1", "--chip-images-per-s", "-3"], "--chip-images-per-s (-3)"),
        (["--input", "no.json"], "tools.benchmark_input: No such file or directory; write"),
    ],
)
def test_invalid_flags_are_refused_in_one_line(flags, words, capsys):
    assert main(flags) == 2
    shown = capsys.readouterr().err
    assert words in shown and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "it is no JSON ("),
        ("[" * 100_000, "it is no JSON (it is nested too deep)"),
        ("[1]", "it holds no cpu_ms_per_image; write one"),
        ("null", "it holds no cpu_ms_per_image"),
        ("{}", "it holds no cpu_ms_per_image"),
        ('{"cpu_ms_per_image": [1]}', "it holds no cpu_ms_per_image"),
        ('{"cpu_ms_per_image": {}}', "it has no median above 0"),
        ('{"cpu_ms_per_image": {"pipeline": null}}', "it has no median above 0"),
        ('{"cpu_ms_per_image": {"pipeline": {"median": "1"}}}', "it has no median above 0"),
        ('{"cpu_ms_per_image": {"pipeline": {"median": -1}}}', "it has no median above 0"),
        ('{"cpu_ms_per_image": {"pipeline": {"median": Infinity}}}', "it has no median above 0"),
    ],
    ids=lambda one: one[:40],
)
def test_a_file_other_than_a_result_is_refused_with_a_message(text, reason, tmp_path, capsys):
    path = tmp_path / "input.json"
    path.write_text(text)
    assert main(["--input", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    begin = f"error: --input {path} cannot be read as a result of tools.benchmark_input"
    assert line.startswith(f"{begin}: {reason}")
    assert "Error" not in line
