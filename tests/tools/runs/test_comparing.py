"""`compare`: sides, tables, the page, and the exit code of what should be equal."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.stored_runs import make_config, make_lines, make_run


@pytest.fixture
def seeds(root) -> Path:
    """Two configurations over six seeds each beside the other runs."""
    for seed in range(6):
        for name, rate in (("slow", 0.001), ("fast", 0.01)):
            config = make_config(**{"train.seed": seed, "optim.lr": rate})
            final = {
                "eval_top1": 80 + seed + 100 * rate + seed % 2 / 10,
                "eval_loss": 1 + seed / 10,
            }
            make_run(root, f"{name}{seed}", experiment=name, config=config, final=final)
    return root


def test_sides_are_compared_over_their_seeds(ask, seeds):
    code, out, error = ask("compare", "slow:experiment=slow", "fast:experiment=fast", "--json")
    assert (code, error) == (0, "")
    report = json.loads(out)
    assert [(side["name"], len(side["runs"])) for side in report["sides"]] == [
        ("slow", 6),
        ("fast", 6),
    ]
    assert [row["key"] for row in report["config"] if row["matters"]] == ["optim.lr"]
    found = {row["metric"]: row for row in report["metrics"][0]}
    assert found["eval.top1"]["verdict"] == "better" and found["eval.loss"]["verdict"] == "equal"
    assert found["eval.top1"]["delta"]["pairs"] == 6
    assert found["eval.top1"]["delta"]["value"] == pytest.approx(0.9)
    grouped = ask("compare", "--filter", "experiment=slow or experiment=fast", "--json")[1]
    assert [len(side["runs"]) for side in json.loads(grouped)["sides"]] == [6, 6]


def test_metrics_of_other_tasks_are_refused_in_one_line(ask, root):
    for name, task in (("images", "classify"), ("text", "language")):
        config = make_config(**{"train.task": task})
        final = {"eval_loss": 1.0, f"eval_{name}/top1": 50.0, "eval_shared/top1": 60.0}
        make_run(root, name, experiment="tasks", config=config, final=final)
    code, out, error = ask("compare", "tasks/images", "tasks/text")
    assert (code, error) == (0, "")
    text = " ".join(out.split())
    assert "tasks/text (language) and tasks/images (classify) learn different tasks" in text
    assert "eval.shared/top1" in text and "eval.loss" not in text and "missing" not in text


@pytest.mark.parametrize(
    ("key", "value", "are_one"),
    [
        ("model.weights", "other.safetensors", False),
        ("run.init_from", "warm", False),
        ("distill.teacher_weights", "runs/teacher", False),
        ("data.root", "elsewhere", False),
        ("data.test_split", "validation", False),
        ("train.log_every_steps", 5, True),
        ("run.checkpoint_root", "gs://bucket/runs", True),
        ("runtime.timeout_s", 60.0, True),
    ],
)
def test_runs_with_other_settings_are_not_seeds_of_one_side(ask, root, key, value, are_one):
    for seed, changes in enumerate(({}, {}, {key: value})):
        more = {"distill": {"alpha": 0.5}, "runtime": {"device": "cpu"}}
        config = more | make_config(**{"train.seed": seed})
        for name, one in changes.items():
            config[name.partition(".")[0]][name.partition(".")[2]] = one
        make_run(root, f"s{seed}", experiment="seeds", config=config, final={"eval_top1": 1.0})
    code, out, error = ask("compare", "--filter", "experiment=seeds", "--json")
    if are_one:
        assert code == 2 and "3 runs of 1 configurations" in error
    else:
        assert [len(side["runs"]) for side in json.loads(out)["sides"]] == [2, 1]
    rows = json.loads(ask("compare", "s0", "s2", "--json")[1])["config"]
    assert {row["key"]: row["matters"] for row in rows}[key] is not are_one


def test_the_table_shows_differences_intervals_and_pairing(ask, seeds):
    out = ask("compare", "slow0,slow1,slow2", "fast0,fast1,fast2")[1]
    for word in ("optim.lr", "0.001", "± ", "n too small to tell", "paired by 3 seeds"):
        assert word in out, out


class Links(HTMLParser):
    """Everything that a page would fetch, and the pictures that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.pictures = 0
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attributes:
            if name in ("src", "href", "srcset", "action", "data", "poster"):
                self.pictures += (value or "").startswith("data:image/png;base64,")
                self.fetched += [] if (value or "").startswith("data:") else [value or ""]


def test_the_page_is_self_contained_and_escaped(ask, seeds, tmp_path):
    shutil.copytree(seeds / "slow", seeds / "<b>x")
    page = tmp_path / "deep" / "page.html"
    sides = ("slow:experiment=slow", "fast:experiment=fast", "a&lt;i:path~'<b>x'")
    code, _, error = ask("compare", *sides, "--html", str(page))
    assert (code, error) == (0, "")
    text = page.read_text()
    links = Links()
    links.feed(text)
    assert links.fetched == [] and links.pictures >= 2
    assert not {"script", "link", "iframe", "b", "i"} & links.tags
    assert "default-src 'none'" in text and not re.search(r"url\(|@import|https?:", text)
    assert "optim.lr" in text and "better" in text and "a&amp;lt;i" in text
    assert page.stat().st_size < 3 << 20


def test_equal_runs_are_equal_and_others_differ_from_a_step_on(ask, root):
    for name, start in (("one", 2.0), ("two", 2.0), ("three", 2.0000001)):
        lines = make_lines(6)
        lines[3]["loss/total"] = start
        make_run(root, name, experiment="twins", lines=lines, final={"eval_top1": 1.0})
    code, out, _ = ask("compare", "one", "two", "--exact")
    assert code == 0 and "equal bit for bit" in out
    code, out, _ = ask("compare", "one", "three", "--exact")
    assert code == 1 and "part at step 4" in out and "loss/total" in out and "ulps apart" in out
    assert "no checkpoint before it" in out
    report = json.loads(ask("compare", "one", "three", "--json")[1])
    assert report["divergence"]["found"]["step"] == 4


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["run0"], "two or more SIDEs"),
        (["run0", "rn9"], "RUN 'rn9'"),
        (["run0", "x:model.name=none_such"], "no run fits; here model.name is resnet, vit_"),
        (
            ["run0", "x:eval.top1>99 and tag=a"],
            "here eval.top1 is 50, 60, 61, 62; tag is nowhere set",
        ),
        (["run0", "mdl=3"], "no run has a key"),
        (["run0", "run1", "--metrics", "eval.tpo1"], "did you mean 'eval.top1'"),
        (["run0,run1", "run2", "--exact"], "two single runs"),
        (["run0", "--filter", "status"], "two or more"),
        (["--filter", "model.name=resnet"], "at least"),
        (["run0", "run1", "--html", "/proc/x/y.html"], "--html"),
    ],
)
def test_wrong_use_gives_one_line_and_code_2(ask, root, flags, word):
    code, out, error = ask("compare", *flags)
    assert (code, out) == (2, "")
    assert word in error and error.count("\n") == 1
