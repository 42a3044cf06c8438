"""The search for the cheapest number of micro-batches, and what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bill import compile_for_tpu as tool
from bill import compiler, step_report
from bill.children.processes import TimeLimitError
from bill.schema import BundleReport, Report
from bill.step import tracing
from bill.step.micro_batches import (
    Split,
    choose_cheapest,
    describe_splits,
    probe_splits,
    search_micro_batches,
    write_verdict,
)
from tests.bill.test_compile_for_tpu import CONFIG, create_report
from utils.config.load import load_config
from utils.errors import UserError


def report(estimate: float | None, bundles: float | None = None) -> Report:
    """A step's figures; without an estimate it does not fit."""
    values = {"bundles_mcycles": bundles or estimate, "graph": f"g{estimate}"}
    return create_report(estimate).model_copy(update=values)


def splits(*figures: tuple[float | None, float]) -> list[Split]:
    """In 1, 2, 4, ... micro-batches, each compiled as a whole."""
    return [Split(2**place, report(*one), is_probe=False) for place, one in enumerate(figures)]


def test_finer_splits_are_probed_while_one_of_both_figures_falls():
    costs = {128: (108.0, 54.0), 64: (35.0, 20.5), 32: (17.8, 10.1), 16: (9.4, 5.4), 8: (0.1, 0.1)}
    found = probe_splits(128, lambda examples: report(*costs[examples]))
    assert [one.cost for one in found] == [(108.0, 54.0), (70.0, 41.0), (71.2, 40.4), (75.2, 43.2)]
    assert [one.is_probe for one in found] == [False, True, True, True]
    assert choose_cheapest(found) == 1


def test_micro_batches_hold_eight_examples_or_more_and_are_equal():
    for batch, tried in ((64, [64, 32, 16, 8]), (20, [20, 10]), (7, [7])):
        asked: list[int] = []

        def probe(examples: int, asked: list[int] = asked) -> Report:
            asked.append(examples)
            return report(float(examples**2))

        probe_splits(batch, probe)
        assert asked == tried


def test_only_a_completely_compiled_split_is_chosen():
    """The probe promises half; the compiled split of two keeps less than that, of four all."""
    costs = {64: (100.0, 50.0), 32: (25.0, 14.0), 16: (11.0, 6.5), 8: (9.0, 9.0)}
    whole = {2: (60.0, 30.0), 4: (101.0, 40.0)}
    asked: list[int] = []

    def measure(parts: int) -> Report:
        asked.append(parts)
        return report(*whole[parts])

    found, place = search_micro_batches(64, lambda examples: report(*costs[examples]), measure)
    assert (asked, place) == ([4, 2], 1) and found[1].cost == (60.0, 30.0)
    assert [one.is_probe for one in found] == [False, False, False, True]
    told = describe_splits(found, 64, place)
    assert [(one.estimated_mcycles, one.probed, one.chosen) for one in told] == [
        (100.0, False, False),
        (60.0, False, True),
        (101.0, False, False),
        (72.0, True, False),
    ]
    whole[2] = (98.0, 49.0)
    assert search_micro_batches(64, lambda examples: report(*costs[examples]), measure)[1] == 0


def test_bundles_alone_decide_between_splits_with_and_without_kernels():
    """A kernel counts by its bundles, which are few beside the estimate of what it stands for."""
    for bundles, place in ((42.6, 1), (46.0, 0), (50.0, 0)):
        whole = report(61.5, 47.5)
        whole.bundles = BundleReport.model_construct(unestimated_mcycles=9.2)
        found = [Split(1, whole, False), Split(2, report(36.4, bundles / 2), True)]
        assert found[0].cost == (61.5 + 9.2, 47.5) and found[1].cost == (72.8, bundles)
        assert choose_cheapest(found) == place
    told = report(30.0, 21.3)
    told.bundles = BundleReport.model_construct(unestimated_mcycles=4.6)
    found[1] = Split(2, told, True)
    assert found[1].cost == (60.0 + 9.2, 42.6) and choose_cheapest(found) == 1


def test_a_gain_in_only_one_figure_is_no_gain():
    assert choose_cheapest(splits((100.0, 50.0), (60.0, 51.0))) == 0
    assert choose_cheapest(splits((100.0, 50.0), (98.0, 49.0))) == 0
    assert choose_cheapest(splits((100.0, 50.0), (99.0, 40.0))) == 1
    assert choose_cheapest(splits((None, 0.0), (99.0, 40.0))) == 1
    assert choose_cheapest(splits((None, 0.0))) is None


def test_a_refused_split_ends_the_search_and_a_refused_whole_fails(capsys):
    def probe(examples: int) -> Report:
        if examples == 16:
            raise UserError("pairs")
        return report(float(examples**2))

    assert len(probe_splits(64, probe)) == 2
    assert capsys.readouterr().err == "4 micro-batches: pairs\n"

    def refuse(examples: int) -> Report:
        raise UserError("no such model")

    with pytest.raises(UserError, match="no such model"):
        probe_splits(64, refuse)


def test_a_split_that_took_too_long_leaves_no_verdict():
    def probe(examples: int) -> Report:
        if examples == 32:
            raise TimeLimitError("900 s")
        return report(10.0)

    with pytest.raises(UserError, match="900 s"):
        probe_splits(64, probe)


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
def test_a_file_without_a_place_for_a_verdict_is_refused(text, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"add train\.verdicts yourself"):
        write_verdict(path, "v5e:128", "{}")
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--write"], "--write writes what --micro-batches finds"),
        (["--micro-batches", "--max-batch"], "two searches"),
        (["--micro-batches", "--write", "--target", "v3:2x2"], "not for v3"),
        (["--train.accumulate_steps=auto"], "has no verdict for v5e:256"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, words, capsys, monkeypatch):
    monkeypatch.setattr(compiler, "require_compiler", lambda *_: {"libtpu": "0"})
    monkeypatch.setattr(step_report, "create_report", None)
    assert tool.main(["--config", CONFIG, *flags]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and words in text and text.count("\n") == 1


def test_a_file_without_a_place_for_a_verdict_is_refused_before_the_search(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(compiler, "require_compiler", lambda *_: {"libtpu": "0"})
    monkeypatch.setattr(step_report, "create_report", None)
    path = tmp_path / "x.yaml"
    path.write_text("model: {name: vit_tiny_patch16_224}\ntrain: {epochs: 3}\n")
    assert tool.main(["--config", str(path), "--micro-batches", "--write"]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: --write ('{path}') needs a section `train:` of lines")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "is_automatic"),
    [
        (["--micro-batches", "--train.accumulate_steps=auto"], True),
        (["--micro-batches", "--write"], True),
        (["--micro-batches"], False),
    ],
)
def test_a_step_is_traced_as_splittable_only_where_a_verdict_may_split_it(
    flags, is_automatic, capsys, monkeypatch
):
    def trace(*_: object, **given: object) -> None:
        assert given["is_automatic"] is is_automatic
        raise UserError("what the run would say")

    monkeypatch.setattr(compiler, "require_compiler", lambda *_: {"libtpu": "0"})
    monkeypatch.setattr(compiler, "compile_step", None)
    monkeypatch.setattr(tracing, "trace_alone", trace)
    assert tool.main(["--config", CONFIG, "--target", "v5e:2x4", *flags]) == 2
    assert capsys.readouterr().err.endswith("error: what the run would say\n")


def test_the_tool_writes_a_verdict_that_a_compilation_uses(tmp_path, capsys, monkeypatch):
    path = tmp_path / "x.yaml"
    path.write_text(Path(CONFIG).read_text())
    asked: list[tuple[int, int]] = []

    def create(compilation: step_report.Compilation, *_: object) -> Report:
        asked.append((compilation.batch, compilation.config.train.accumulate_steps))
        costs = {
            (128, 1): (108.0, 54.0),
            (64, 1): (34.0, 20.0),
            (32, 1): (18.0, 10.5),
            (128, 2): (70.0, 41.0),
        }
        return report(*costs[asked[-1]])

    monkeypatch.setattr(compiler, "require_compiler", lambda *_: {"libtpu": "0"})
    monkeypatch.setattr(step_report, "create_report", create)
    told = tmp_path / "told.json"
    command = ["--config", str(path), "--target", "v5e:2x4", "--json", str(told)]
    assert tool.main([*command, "--micro-batches", "--write"]) == 0
    assert asked == [(128, 1), (64, 1), (32, 1), (128, 2)]
    said = capsys.readouterr().out
    assert "<- least" in said and "train.verdicts {v5e:128: {parts: 2" in said
    splits = Report.model_validate_json(told.read_text()).micro_batches
    assert [(one.parts, one.examples, one.probed, one.chosen) for one in splits] == [
        (1, 128, False, False),
        (2, 64, False, True),
        (4, 32, True, False),
    ]
    assert tool.main([*command, "--train.accumulate_steps=auto"]) == 0
    assert asked[-1] == (128, 2)
    assert "(auto) is 2: by the compiler's verdict" in capsys.readouterr().err
    monkeypatch.setattr(step_report, "create_report", lambda *_: report(None))
    assert tool.main([*command, "--micro-batches"]) == 2
    assert "does not fit v5e:2x4 in up to 16 micro-batches" in capsys.readouterr().err
