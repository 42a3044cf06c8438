"""The search for the cheapest number of micro-batches, and what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.test_compile_for_tpu import CONFIG, create_report
from tools import compile_for_tpu as tool
from tools.tpu import compiler
from tools.tpu.children import TimeLimitError
from tools.tpu.micro_batches import choose_cheapest, search_micro_batches, write_verdict
from tools.tpu.schema import Report
from utils.config import load_config
from utils.errors import UserError


def report(estimate: float | None, bundles: float | None = None) -> Report:
    """A step's figures; without an estimate it does not fit."""
    values = {"bundles_mcycles": bundles or estimate, "graph": f"g{estimate}"}
    return create_report(estimate).model_copy(update=values)


def test_finer_splits_are_tried_while_one_of_both_figures_falls():
    costs = {1: (108.0, 54.0), 2: (70.0, 41.0), 4: (71.0, 40.5), 8: (75.0, 43.0), 16: (1.0, 1.0)}
    found = search_micro_batches(128, lambda parts: report(*costs[parts]))
    assert [one.estimated_mcycles for one in found] == [108.0, 70.0, 71.0, 75.0]
    assert choose_cheapest(found) == 1


def test_micro_batches_hold_eight_examples_or_more_and_are_equal():
    falling = iter(range(100, 0, -1))
    assert len(search_micro_batches(64, lambda parts: report(float(next(falling))))) == 4
    assert len(search_micro_batches(20, lambda parts: report(float(next(falling))))) == 2
    assert len(search_micro_batches(7, lambda parts: report(float(next(falling))))) == 1


def test_what_only_one_figure_believes_in_is_no_gain():
    assert choose_cheapest([report(100.0, 50.0), report(60.0, 51.0)]) == 0
    assert choose_cheapest([report(100.0, 50.0), report(98.0, 49.0)]) == 0
    assert choose_cheapest([report(100.0, 50.0), report(99.0, 40.0)]) == 1
    assert choose_cheapest([report(None), report(99.0, 40.0)]) == 1
    assert choose_cheapest([report(None)]) is None


def test_a_split_that_is_refused_ends_the_search_and_the_first_one_is_an_error(capsys):
    def measure(parts: int) -> Report:
        if parts == 4:
            raise UserError("pairs")
        return report(10.0 / parts)

    assert len(search_micro_batches(64, measure)) == 2
    assert capsys.readouterr().err == "4 micro-batches: pairs\n"

    def refuse(parts: int) -> Report:
        raise UserError("no such model")

    with pytest.raises(UserError, match="no such model"):
        search_micro_batches(64, refuse)


def test_a_split_that_took_too_long_leaves_no_verdict():
    def measure(parts: int) -> Report:
        if parts == 2:
            raise TimeLimitError("900 s")
        return report(10.0)

    with pytest.raises(UserError, match="900 s"):
        search_micro_batches(64, measure)


def test_a_verdict_goes_into_the_file_and_replaces_an_older_one(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text(
        "# a header\ntrain:\n  epochs: 3  # few\n\n# of the device\nruntime:\n  precision: bf16\n"
    )
    write_verdict(path, "v6e:64", "{parts: 2, step: aa, graph: bb}")
    write_verdict(path, "v5e:128", "{parts: 2, step: aa, graph: bb}")
    write_verdict(path, "v5e:128", "{parts: 4, step: cc, graph: dd}")
    assert path.read_text() == (
        "# a header\ntrain:\n  epochs: 3  # few\n  verdicts:\n"
        "    v5e:128: {parts: 4, step: cc, graph: dd}\n"
        "    v6e:64: {parts: 2, step: aa, graph: bb}\n"
        "\n# of the device\nruntime:\n  precision: bf16\n"
    )
    found = load_config(["--config", str(path)]).train
    assert found.verdicts["v5e:128"].parts == 4 and found.epochs == 3


@pytest.mark.parametrize("text", ["model: {name: x}\n", "train: {epochs: 3}\n"])
def test_a_file_without_room_for_it_is_refused(text, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"add train\.verdicts yourself"):
        write_verdict(path, "v5e:128", "{}")
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--write"], "--write writes what --micro-batches finds"),
     (["--micro-batches", "--max-batch"], "two searches"),
     (["--micro-batches", "--write", "--target", "v3:2x2"], "not for v3"),
     (["--train.accumulate_steps=auto"], "has no verdict for v5e:256")],
)  # fmt: skip
def test_flags_that_do_not_go_together_are_refused(flags, words, capsys, monkeypatch):
    monkeypatch.setattr(compiler, "require_compiler", lambda: {"libtpu": "0"})
    monkeypatch.setattr(tool, "create_report", None)
    assert tool.main(["--config", CONFIG, *flags]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and words in text and text.count("\n") == 1


def test_the_tool_finds_writes_and_a_compilation_uses_it(tmp_path, capsys, monkeypatch):
    path = tmp_path / "x.yaml"
    path.write_text(Path(CONFIG).read_text())
    asked: list[int] = []

    def create(compilation: tool.Compilation, *_: object) -> Report:
        asked.append(compilation.config.train.accumulate_steps)
        costs = {1: (108.0, 54.0), 2: (70.0, 41.0), 4: (75.0, 43.0)}
        return report(*costs[asked[-1]])

    monkeypatch.setattr(compiler, "require_compiler", lambda: {"libtpu": "0"})
    monkeypatch.setattr(tool, "create_report", create)
    told = tmp_path / "told.json"
    command = ["--config", str(path), "--target", "v5e:2x4", "--json", str(told)]
    assert tool.main([*command, "--micro-batches", "--write"]) == 0
    assert asked == [1, 2, 4]
    said = capsys.readouterr().out
    assert "<- least" in said and "train.verdicts {v5e:128: {parts: 2" in said
    splits = Report.model_validate_json(told.read_text()).micro_batches
    assert [(one.parts, one.examples, one.chosen) for one in splits] == [
        (1, 128, False), (2, 64, True), (4, 32, False)
    ]  # fmt: skip
    assert tool.main([*command, "--train.accumulate_steps=auto"]) == 0
    assert asked[-1] == 2
    assert "(auto) is 2: by the compiler's verdict" in capsys.readouterr().err
    monkeypatch.setattr(tool, "create_report", lambda *_: report(None))
    assert tool.main([*command, "--micro-batches"]) == 2
    assert "does not fit v5e:2x4 in up to 16 micro-batches" in capsys.readouterr().err
