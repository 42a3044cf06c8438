"""The study of matrix products: launches apart from work, and what sizes are padded to."""

from __future__ import annotations

import importlib.util
import json

import pytest

from bill.shape_advisor import get_fill, read_law
from lab import matmul as tool
from utils.errors import UserError

HAS_COMPILER = all(importlib.util.find_spec(name) for name in ("jax", "libtpu"))


def test_a_fitted_line_separates_product_and_launch_time():
    slope, launch = tool.fit_line([1, 2, 4, 8], [35.0, 40.0, 50.0, 70.0])
    assert (slope, launch) == (pytest.approx(5.0), pytest.approx(30.0))


def test_the_padding_law_follows_from_the_cost_just_past_a_full_size():
    costs = {"M": (512.0, 516.0), "K": (512.0, 576.0), "N": (512.0, 640.0)}
    rows = [
        {"axis": axis, "size": 1024 + added, "cost": cost}
        for axis, pair in costs.items()
        for added, cost in zip((0, 8), pair, strict=True)
    ]
    assert tool.find_law(rows, 1024) == {"M": 8, "K": 128, "N": 256}


def test_the_present_device_is_timed_and_the_advisor_reads_the_law(tmp_path, capsys):
    path, picture = tmp_path / "law.json", tmp_path / "law.png"
    flags = [
        "--on",
        "cpu",
        "--base",
        "32",
        "--added",
        "0",
        "8",
        "--repeats",
        "3",
        "--json",
        str(path),
        "--picture",
        str(picture),
    ]
    assert tool.main(flags) == 0
    assert "the law: M to" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert [row["sizes"] for row in report["rows"][:2]] == [[32, 32, 32], [40, 32, 32]]
    assert all(row["low"] <= row["cost"] <= row["high"] for row in report["rows"])
    assert picture.stat().st_size > 1000
    assert read_law(path) == report["law"]


def test_the_filled_share_follows_the_law(tmp_path):
    path = tmp_path / "law.json"
    path.write_text(json.dumps({"law": {"M": 16, "K": 8, "N": 64}}))
    assert get_fill((1, 8, 8, 32), 128, read_law(path)) == 8 * 8 * 32 / (16 * 8 * 64)
    path.write_text("[]")
    with pytest.raises(UserError, match=r"--law .*lab\.matmul"):
        read_law(path)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--time-limit", "-1"], "--time-limit (-1)"),
        (["--time-limit", "nan"], "--time-limit (nan)"),
        (["--added", "0"], "--added must hold 0 and 8"),
        (["--base", "100"], "--base (100)"),
        (["--repeats", "0"], "--repeats (0)"),
        (["--on", "v9"], "--on 'v9'"),
        (["--on", "v5e:9x9"], "--on 'v5e:9x9' is no slice"),
        (["--added", "0", "8", "-1024"], "--added (-1024) leaves nothing of --base"),
        (["--picture", "law.txt"], "--picture ('law.txt') must end with one of .png"),
        (["--json", "/proc/nowhere/r.json"], "cannot be created"),
    ],
)
def test_bad_input_gives_one_line(flags, word, capsys):
    assert tool.main(flags) == 2
    text = capsys.readouterr().err
    assert word in text and text.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs jax and libtpu: setup --tpu-compiler")
@pytest.mark.parametrize(("name", "width"), [("v5e", 128), ("v6e", 256)])
def test_the_inner_length_is_padded_to_the_unit_and_one_of_the_others_is_not(name, width, tmp_path):
    path = tmp_path / "law.json"
    flags = ["--on", name, "--base", "512", "--added", "0", "8", "--json", str(path)]
    assert tool.main(flags) == 0
    law = json.loads(path.read_text())["law"]
    assert law == {"M": 8, "K": width, "N": 8}
