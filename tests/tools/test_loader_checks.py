"""The program that shows what a loader delivers: what it prints and draws."""

from __future__ import annotations

import numpy as np
import yaml
from PIL import Image

from tests.support.child_runs import list_help_imports
from tests.support.input_data import get_image, use_private_cache, write_records
from tools import test_tfds_loader as check
from tools.loader.open_loader import plan_loader

PP = ["--train-pp", "decode|resize(6)|flip_lr|value_range(-1, 1)", "--eval-pp", "decode|resize(6)"]


def test_the_loader_check_prints_samples_and_throughput_and_draws_a_sheet(
    records_root, tmp_path, capsys
):
    sheet = tmp_path / "sheet.png"
    arguments = ["--data-dir", str(records_root), "--split", "train", "--num-samples", "3", *PP]
    arguments += ["--time-it", "--num-loops", "2", "--loop-batches", "3", "--batch", "16"]
    arguments += ["--seed", "1", "--prefetch", "1", "--num-parallel-calls", "2"]
    arguments += ["--world-size", "2", "--rank", "1", "--save-grid", str(sheet), "--views", "5"]
    assert check.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("records train: 203 examples, 7 classes, order exact, 12 batches")
    samples = [line for line in lines if "records-train.tfrecord" in line]
    assert len(samples) == 3
    assert all("shape (6, 6, 3), uint8, range" in line and "label" in line for line in samples)
    assert sum(line.startswith("  loop ") for line in lines) == 2
    assert any(line.startswith("images/s: min ") for line in lines)
    pixels = np.asarray(Image.open(sheet))
    cell = 108
    assert pixels.shape[1] == 5 * (cell + 4) + 4
    assert pixels.shape[0] == 3 * (cell + 4 + 14) + 4
    # The red of a record is its number, the same in every view; a flip turns the green around.
    centre = pixels[4 + cell // 2]
    reds = {int(centre[4 + view * (cell + 4) + 5, 0]) for view in range(5)}
    assert len(reds) == 1
    greens = {int(centre[4 + view * (cell + 4) + 5, 1]) for view in range(5)}
    assert greens <= {0, 50}


def test_without_a_string_it_follows_the_first_record(records_root, tmp_path, capsys):
    arguments = ["--num-samples", "1", "--batch", "4"]
    # PNGs, which the decoder of crops does not read.
    assert check.main(["--data-dir", str(records_root), *arguments]) == 0
    assert "shape (224, 224, 3), uint8" in capsys.readouterr().out
    for suffix, begins in (("jpeg", "decode_jpeg_and_inception_crop"), ("png", "decode|inception")):
        for number in range(4):
            path = tmp_path / suffix / "train" / "a" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(get_image(number)).save(path, suffix)
        flags = ["--data-dir", str(tmp_path / suffix), "--source", "folder", *arguments]
        assert check.main(flags) == 0
        assert "shape (224, 224, 3), uint8" in capsys.readouterr().out
        plan = plan_loader(check.create_parser().parse_args(flags))
        assert plan.data.train_pp.startswith(begins)


def test_a_broken_first_record_is_named_in_one_line(tmp_path, capsys):
    use_private_cache(tmp_path / "cache")
    write_records(tmp_path / "data", broken=(0,))
    assert check.main(["--data-dir", str(tmp_path / "data"), "--batch", "203"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "records-train.tfrecord" in line


def test_a_configuration_gives_the_data_keys_and_flags_win(records_root, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    pp = "decode|resize(6)|value_range(-1, 1)"
    data = {
        "name": "records",
        "root": str(records_root),
        "global_batch_size": 12,
        "order": "sharded",
    }
    keys = {"data": {**data, "train_pp": pp, "eval_pp": pp}, "train": {"seed": 3}}
    path.write_text(yaml.safe_dump(keys))
    flags = ["--config", str(path), "--num-samples", "1"]
    assert check.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = "records train: 203 examples, 7 classes, order sharded, 16 batches of 12"
    assert lines[0].startswith(wanted) and "shape (6, 6, 3)" in lines[-1]
    assert plan_loader(check.create_parser().parse_args(flags)).seed == 3
    assert check.main([*flags, "--mode", "eval"]) == 0
    assert capsys.readouterr().out.startswith("records validation: 45 examples")
    assert check.main([*flags, "--batch", "16", "--order", "exact", "--split", "train[:50]"]) == 0
    wanted = "records train[:50]: 50 examples, 7 classes, order exact, 3 batches of 16"
    assert capsys.readouterr().out.startswith(wanted)


def test_a_bad_configuration_is_one_line(records_root, tmp_path, capsys):
    rows = tmp_path / "rows.yaml"
    split = "train_split: 'all[:80%]', eval_split: 'all[80%:]', global_batch_size: 8"
    rows.write_text(f"data: {{source: sklearn, name: diabetes, {split}}}\ntrain: {{task: regress}}")
    wrong = {
        ("--config", str(tmp_path / "no.yaml")): "no.yaml: No such file",
        ("--config", str(rows)): "data.source (sklearn) has no labelled images",
        (): "--data-dir is missing",
        ("--data-dir", str(records_root), "--batch", "0", *PP): "data.global_batch_size (0)",
    }
    for flags, message in wrong.items():
        assert check.main(flags) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_a_shuffle_buffer_in_examples_gives_the_sharded_order(records_root, capsys):
    arguments = ["--data-dir", str(records_root), "--num-samples", "1", "--batch", "16", *PP]
    assert check.main([*arguments, "--shuffle-buffer", "40"]) == 0
    assert "order sharded" in capsys.readouterr().out


def test_wrong_flags_give_one_line_and_exit_code_2(records_root, tmp_path, capsys):
    assert check.main(["--data-dir", str(tmp_path / "nowhere")]) == 2
    assert check.main(["--data-dir", str(records_root), "--split", "trian", *PP]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "nowhere" in first and "did you mean 'train'" in second


def test_help_imports_no_tensorflow(tmp_path):
    assert list_help_imports(check.__file__, tmp_path) == []


def test_the_datasets_own_directory_and_given_classes_are_accepted(records_root, capsys):
    arguments = ["--num-samples", "1", "--batch", "16", "--label-key", "id", *PP]
    assert check.main(["--data-dir", str(records_root / "records"), *arguments]) == 2
    assert "--num-classes" in capsys.readouterr().err
    assert (
        check.main(["--data-dir", str(records_root / "records"), *arguments, "--num-classes=300"])
        == 0
    )
    assert "203 examples, 300 classes" in capsys.readouterr().out
