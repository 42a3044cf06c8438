"""`report`: what a pull request says of runs, in Markdown without folders of the machine."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.stored_runs import make_config, make_run


@pytest.fixture
def sides(root):
    """Six seeds of two rates."""
    for seed in range(6):
        for name, rate in (("slow", 0.001), ("fast", 0.01)):
            config = make_config(**{"train.seed": seed, "optim.lr": rate})
            config["data"] |= {"global_batch_size": 64, "root": "/home/me/data"}
            config["runtime"] = {"precision": "bf16", "parallel": "process"}
            final = {"eval_top1": 80 + seed + 500 * rate + seed % 2 / 10, "eval_loss": 1.0}
            make_run(root, f"{name}{seed}", experiment=name, config=config, final=final)
    return root


def read_parts(text: str) -> dict[str, str]:
    words = re.split(r"^### (\w+)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(words[::2], words[1::2], strict=True))


def read_rows(part: str) -> dict[str, list[str]]:
    """First cell -> the others, of each row of a part's tables."""
    rows = [re.split(r"(?<!\\) \| ", line.strip("| \n")) for line in part.splitlines()]
    return {cells[0]: cells[1:] for cells in rows if len(cells) > 1}


def test_two_sides_have_topology_data_variables_and_deltas(ask, sides):
    code, out, error = ask("report", "slow:experiment=slow", "fast:experiment=fast", "--for", "pr")
    assert (code, error) == (0, "")
    parts = read_parts(out)
    assert list(parts) == ["Topology", "Data", "Variables", "Deltas"]
    topology = read_rows(parts["Topology"])
    assert topology["`device`"] == ["cpu", "cpu"]
    assert topology["`runtime.precision`"] == ["bf16", "bf16"]
    assert topology["`packages.torch`"] == ["2", "2"]
    data = read_rows(parts["Data"])
    assert data["`data.global_batch_size`"] == ["64", "64"]
    assert data["`data.train_pp`"][0] == "value_range(-1, 1)\\|flip_lr"
    assert data["`train.seed`"] == ["0, 1, 2, 3, 4, 5"] * 2
    assert read_rows(parts["Variables"])["`optim.lr`"] == ["0.001", "0.01"]
    top1 = read_rows(parts["Deltas"])["eval.top1"]
    assert top1[3] == "+4.5" and top1[-1] == "better"
    assert "paired by 6 seeds" in parts["Deltas"]
    widths = [line.count(" | ") for line in parts["Topology"].splitlines() if line]
    assert len(set(widths)) == 1


def test_a_report_names_no_host_and_no_folder(ask, sides):
    _, out, _ = ask("report", str(sides / "slow" / "slow0"), str(sides / "fast" / "fast0"))
    assert str(sides) not in out and "/home/me" not in out
    assert "`host`" not in out and "slow/slow0" in out


def test_one_run_shows_what_differs_from_the_defaults_and_its_numbers(ask, sides):
    code, out, _ = ask("report", "slow/slow0", "--json")
    parts = json.loads(out)
    assert code == 0
    variables = read_rows(parts["Variables"])
    assert variables["`model.name`"] == ["vit_tiny"]
    assert "`runtime.parallel`" not in variables  # its value is the default
    assert read_rows(parts["Deltas"])["eval.top1"][1] == "80.5"


def test_a_run_that_is_not_complete_is_named(ask, sides):
    _, out, _ = ask("report", "digits/live", "digits/run0")
    assert "digits/live is not complete" in read_parts(out)["Deltas"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("no/such",), "no/such"),
        (("slow/slow0", "--for", "me"), "--for"),
        (("slow/slow0", "--metrics", "eval.top2"), "--metrics"),
        ((), "SIDE"),
    ],
)
def test_a_wrong_report_is_one_line(ask, sides, flags, said):
    code, out, error = ask("report", *flags)
    assert (code, out) == (2, "")
    assert said in error and error.count("\n") == 1
