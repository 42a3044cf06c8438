"""Pages as a browser without JavaScript gets them, and the files that they load."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from service.web.assets import STATIC, AssetTable
from service.web.series.ranges import Curve
from service.web.views.figures import draw_picture, group_metrics, make_chart
from service.web.views.runs import choose_keys, find_differing
from service.web.views.timeline import join_boxes
from store.lineage.ancestors import Ancestor, note_run, view_lineage
from store.query.tags import change_tags
from tests.service.web.apps import ORIGIN, make_app, make_client, make_mixed_store, make_store
from tests.support.stored_runs import make_config, make_lines, make_run
from utils.storage.places import open_folder


def make_curve(metric: str, steps: list[int]) -> Curve:
    return Curve(
        metric=metric,
        unit="",
        direction="none",
        points=len(steps),
        steps=steps,
        values=[float(step) for step in steps],
        nonfinite={},
        nonfinite_count={},
    )


FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.fixture
def client(tmp_path):
    return make_client(make_app(make_store(tmp_path)))


def test_the_list_shows_runs_with_states_numbers_and_what_differs(client):
    page = client.get("/").text
    assert all(f'href="/runs/digits/{name}"' in page for name in ("seed0", "seed1", "killed"))
    assert page.count(">complete</span>") == 2
    assert '<span class="state bad">killed</span>' in page
    titles = re.findall(r"<small>(.*?)</small>(.*?)</a>", page)
    assert titles == [("score", "eval.top1"), ("eval", "loss"), ("train", "seed")]


def test_a_filter_a_sort_and_columns_are_in_the_address(client):
    page = client.get("/?filter=status=complete&sort=eval.top1&show=optim.lr,path").text
    assert re.findall(r'value="digits/(\w+)"', page) == ["seed1", "seed0"]
    assert 'aria-sort="descending"' not in page
    page = client.get("/?sort=eval.top1").text
    assert 'aria-sort="descending"' in page
    assert "reverse=1" in page


def test_a_list_of_several_tasks_shows_the_score_of_each_with_its_name(tmp_path):
    store = make_mixed_store(tmp_path)
    client = make_client(make_app(store))
    page = client.get("/").text
    cells = re.findall(
        r'data-name="score"[^>]*>([\d.,]+) <small class="dim">([\w./]+)</small>', page
    )
    assert sorted(cells) == [
        ("0.25", "eval.distil_loss"),
        ("1.5", "eval.loss"),
        ("3,100", "eval.mse"),
        ("40", "eval.digits/knn"),
        ("50", "eval.top1"),
    ]
    rows = client.get("/api/v1/runs?show=score.value").json()["runs"]
    found = {
        row["name"]: (row["score_name"], row["score"], row["values"]["score.value"]) for row in rows
    }
    assert found["rows"] == ("eval.mse", 3100.0, 3100.0)
    assert found["live"] == (None, None, None)
    assert "3100.0,eval.mse" in client.get("/api/v1/runs.csv").text
    page = client.get("/?sort=score.value").text  # by name, then the best of each
    assert re.findall(r'value="digits/(\w+)"', page)[-1] == "live"


def test_runs_of_different_tasks_are_compared_in_one_line(tmp_path):
    client = make_client(make_app(make_mixed_store(tmp_path)))
    page = client.get("/compare?run=digits/images&run=digits/text").text
    assert page.count("learn different tasks") == 1
    assert "missing" not in page and "no finite number" not in page
    assert "against the base" not in page  # no table, though both have a number eval.loss
    page = client.get("/compare?run=digits/images&run=digits/text&run=digits/rows").text
    assert page.count("learn different tasks") == 1
    assert "digits/text (language), digits/rows (regress) and digits/images (classify)" in page
    # Of one task what only one side has is a line below the numbers that both have.
    page = client.get("/compare?run=digits/features&run=digits/probed").text
    assert "only digits/probed has eval.digits/knn" in page and 'row">eval.distil_loss' in page


def test_columns_are_hidden_and_moved_by_links(client):
    page = client.get("/").text
    assert 'aria-label="hide eval.loss"' in page and 'aria-label="move score' not in page
    hidden = re.search(r'href="([^"]*)" aria-label="hide eval.loss"', page)[1]
    assert "eval.loss" not in re.findall(
        r'<td [^>]*data-name="([^"]*)"', client.get(hidden.replace("&amp;", "&")).text
    )
    moved = re.search(r'href="([^"]*)" aria-label="move eval.loss to the left"', page)[1]
    page = client.get(moved.replace("&amp;", "&")).text
    assert re.findall(r'<td [^>]*data-name="([^"]*)"', page)[:3] == ["begun", "eval.loss", "score"]


def test_a_wrong_filter_is_shown_as_an_error_and_kept(client):
    answer = client.get("/?filter=optim.lrr<1")
    assert answer.status_code == 422
    assert "optim.lr" in answer.text
    assert 'value="optim.lrr&lt;1"' in answer.text


def test_text_from_runs_is_escaped(tmp_path):
    store = make_store(tmp_path)
    evil = "<script>alert(1)</script>"
    make_run(store, "evil", config=make_config(**{"model.name": evil}))
    page = make_client(make_app(store)).get("/").text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_an_empty_store_shows_what_to_do(tmp_path):
    (tmp_path / "runs").mkdir()
    page = make_client(make_app(tmp_path / "runs")).get("/").text
    assert "No runs yet." in page


def test_pages_have_no_inline_script_and_no_inline_style(client):
    page = client.get("/").text
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", page))


def test_a_run_has_curves_numbers_attempts_and_its_configuration(client):
    page = client.get("/runs/digits/seed0").text
    assert "digits/seed0</h1>" in page
    assert page.count("<figure") >= 4
    assert page.count("<polyline") >= 4
    assert 'eval.top1</th><td class="number">60</td>' in page
    assert '<dt class="mono">optim.lr</dt><dd class="mono">0.001</dd>' in page
    assert "plotly-" in page


def test_curves_of_a_few_steps_are_drawn_without_javascript(client):
    whole = client.get("/runs/digits/seed0").text
    part = client.get("/runs/digits/seed0?from=2&to=3").text
    assert 'value="2"' in part and 'value="3"' in part
    assert whole.count("<polyline") == part.count("<polyline")
    assert whole != part
    assert client.get("/runs/digits/seed0?from=&to=").status_code == 200


def test_a_missing_run_is_a_404_page_or_problem(client):
    answer = client.get("/runs/digits/nobody", headers={"accept": "text/html,*/*"})
    assert answer.status_code == 404
    assert "<h1>Not Found</h1>" in answer.text
    assert "contains no run.json" in answer.text
    answer = client.get("/runs/digits/nobody")
    assert answer.headers["content-type"] == "application/problem+json"
    wrong = client.get("/?page=0", headers={"accept": "text/html"})
    assert wrong.status_code == 422
    assert "page" in wrong.text


def test_a_tag_is_added_and_removed_by_a_form(client):
    place, origin = "/runs/digits/seed0/tags", {"origin": ORIGIN}
    answer = client.post(place, data={"tag": "paper", "change": "add"}, headers=origin)
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/digits/seed0")
    assert ">paper</a>" in client.get("/runs/digits/seed0").text
    assert "seed1" not in re.findall(r'value="digits/(\w+)"', client.get("/?filter=tag=paper").text)
    client.post(place, data={"tag": "paper", "change": "remove"}, headers=origin)
    assert ">paper</a>" not in client.get("/runs/digits/seed0").text
    assert client.post(place, content=b"\xff", headers=origin | FORM).status_code == 422


def test_a_viewer_sees_only_permitted_forms(tmp_path):
    app = make_app(make_store(tmp_path))
    form = re.compile(r'method="post" action="([^"]*)"')
    page = make_client(app, "view").get("/runs/digits/seed0").text
    assert form.findall(page) == ["/sign-out"] and page.count('method="post"') == 1
    assert len(form.findall(make_client(app, "submit").get("/runs/digits/seed0").text)) > 1


def test_metrics_of_one_kind_share_a_chart():
    names = [
        "train.loss/kd",
        "train.loss/total",
        "eval.top1",
        "eval.top5",
        "eval.loss",
        "eval.graphs",
        "train.lr",
        "train.img_per_s",
        "train.time_s",
    ]
    assert group_metrics(names) == {
        "Loss": [["train.loss/total", "train.loss/kd"]],
        "Evaluation": [["eval.top1", "eval.top5"], ["eval.loss"]],
        "Optimisation": [["train.lr"]],
        "Throughput": [["train.img_per_s"]],
    }


def test_lanes_merge_adjacent_boxes_and_keep_short_ones():
    assert join_boxes([(0, 10), (10, 20), (50, 50.001), (999.9, 1200)]) == [
        (0.0, 20.0),
        (50.0, 1.0),
        (999.9, 0.1),
    ]
    assert len(join_boxes((i / 1000, (i + 1) / 1000) for i in range(100_000))) == 1


def test_files_are_named_after_their_content_and_kept_for_ever(client):
    page = client.get("/").text
    places = re.findall(r'(?:href|src)="(/static/[^"]+)"', page)
    assert len(set(places)) >= 3
    for place in places:
        answer = client.get(place)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["content-encoding"] == "gzip"


@pytest.mark.parametrize(
    "path", ["app.css", "app-000000000000.css", "..%2fapp.py", "app-.css", "plotly.js", "%00"]
)
def test_unlisted_files_are_404(client, path):
    assert client.get(f"/static/{path}").status_code == 404


def test_plotly_is_served_from_its_package_with_its_style_sheets():
    assets = AssetTable()
    plotly = assets.get("plotly.js")
    assert gzip.decompress(plotly.compressed) == plotly.content
    assert len(plotly.compressed) < 2_000_000
    marks = assets.list_plotly_marks()
    assert marks
    for mark in marks:
        assert f'createElement("style");e.id="{mark}"'.encode() in plotly.content


def test_keys_without_effect_on_training_come_last():
    varied = ["run.tags", "data.threads", "optim.lr", "run.run_id"]
    assert choose_keys(varied, ["data.threads"]) == ["optim.lr", "run.tags", "data.threads"]


def test_a_key_missing_in_some_runs_differs():
    cells = {"a": {1: 1, 2: 1}, "b": {1: 1}, "c": {1: [1], 2: [2]}, "d": {1: None, 2: None}}
    assert find_differing(list(cells), cells, [1, 2]) == ["b", "c"]
    assert find_differing(list(cells), cells, [1, 2], late=["b"]) == ["c", "b"]


def test_a_key_that_varies_most_comes_first():
    cells = {"a": {1: 1, 2: 1, 3: 2, 4: 1}, "b": {1: 1, 2: 2, 3: 3, 4: 4}}
    assert find_differing(["a", "b"], cells, [1, 2, 3, 4]) == ["b", "a"]


def test_own_script_and_style_stay_small_and_load_nothing_external():
    own = [path for path in STATIC.iterdir() if path.suffix in (".js", ".css")]
    texts = [path.read_text(encoding="utf-8") for path in own]
    assert sum(text.count("\n") for text in texts) < 900
    assert not any(re.search(r"://|innerHTML\s*=[^=]|eval\(", text) for text in texts)


def test_a_curve_of_one_point_is_shown_as_a_number(client, tmp_path):
    make_run(tmp_path / "runs", "short", lines=make_lines(1), final={"eval_top1": 1.0})
    page = client.get("/runs/digits/short").text
    assert not re.search(r'<polyline class="k\d" points="\d+,\d+"/>', page)
    assert "<dt>loss/total</dt><dd>2</dd>" in page and "measured once, at step 1" in page
    assert "data-hint hidden>Drag" in page
    # Beside a curve of many points one of a single point is a dot, not half beyond an edge.
    curves = [make_curve("train.a", [1, 2]), make_curve("train.b", [1])]
    assert draw_picture(curves, [0, 1]).lines[1][2]
    assert make_chart("digits/x", ["train.a", "train.b"], curves).lone_step == ""


def test_a_404_page_links_onwards(client):
    answer = client.get("/nothing", headers={"accept": "text/html"})
    assert answer.status_code == 404 and '<a href="/">All runs</a>' in answer.text


def test_a_run_shows_its_teachers_and_students(tmp_path):
    store = make_store(tmp_path)
    folder = open_folder(store / "digits" / "seed0")
    own = Ancestor(1, place="<b>&")
    ancestors = [*note_run(own, folder), Ancestor(1, via="cache", place="far/<w>")]
    make_run(store, "taught", final={}, lineage=view_lineage(ancestors))
    change_tags(folder, ["bad"], [])
    client = make_client(make_app(store))
    page = client.get("/runs/digits/taught").text
    assert '<dt>teacher</dt><dd><a class="mono" href="/runs/digits/seed0">digits/seed0</a>' in page
    assert '<span class="tag">bad</span>' in page and "its numbers then: eval.top1 60" in page
    assert "far/&lt;w&gt;" in page and "by its answers in a cache" in page
    page = client.get("/runs/digits/seed0").text
    assert '<dt>student</dt><dd><a class="mono" href="/runs/digits/taught">' in page
    assert "Teachers and students" not in client.get("/runs/digits/seed1").text
    answer = client.get("/", params={"filter": "teacher=seed0 and teacher.tag=bad"}).text
    assert 'href="/runs/digits/taught"' in answer and "digits/seed1" not in answer


def test_a_note_is_written_shown_and_found(client):
    place, origin = "/runs/digits/seed0", {"origin": ORIGIN}
    answer = client.post(
        f"{place}/note", data={"note": "lr too high <b>\nsee seed1"}, headers=origin
    )
    assert (answer.status_code, answer.headers["location"]) == (303, place)
    assert "lr too high &lt;b&gt;\nsee seed1</p>" in client.get(place).text
    assert client.get(f"/api/v1{place}").json()["note"] == "lr too high <b>\nsee seed1"
    found = client.get("/api/v1/runs", params={"filter": "note~high"}).json()["runs"]
    assert [(row["name"], row["note"]) for row in found] == [
        ("seed0", "lr too high <b>\nsee seed1")
    ]
    # A tag keeps it, and both are in the audit log with who has changed them.
    client.post(f"{place}/tags", data={"tag": "paper", "change": "add"}, headers=origin)
    assert client.get(f"/api/v1{place}").json()["note"].startswith("lr too high")
    lines = client.get("/api/v1/audit").json()["lines"]
    assert ("admin", f"POST {place}/note") in [(line["who"], line["action"]) for line in lines]
    assert (
        client.post(f"{place}/note", data={"note": "x" * 4001}, headers=origin).status_code == 422
    )
    client.post(f"{place}/note", data={"note": " "}, headers=origin)
    assert client.get(f"/api/v1{place}").json()["note"] == ""


def test_archived_runs_are_listed_only_on_request(tmp_path):
    app = make_app(make_store(tmp_path))
    client, origin = make_client(app), {"origin": ORIGIN}

    def names(address: str) -> list[str]:
        return sorted(re.findall(r'value="digits/(\w+)"', client.get(address).text))

    chosen = [("run", "digits/seed0"), ("run", "digits/killed"), ("change", "add")]
    body = "&".join(f"{name}={value}" for name, value in chosen)
    assert (
        make_client(app, "view").post("/archive", content=body, headers=FORM | origin).status_code
        == 403
    )
    assert client.post("/archive", content=body, headers=FORM | origin).status_code == 303
    assert names("/") == ["seed1"] and names("/?filter=tag%3Darchived") == ["killed", "seed0"]
    page = client.get("/").text
    assert "archived <b>2</b>" in page and "all <b>1</b>" in page
    assert client.get("/api/v1/runs").json()["matched"] == 1
    assert client.get("/api/v1/runs?archived=true").json()["matched"] == 3
    assert client.get("/runs/digits/seed0").status_code == 200  # nothing is gone
    actions = [line["action"] for line in client.get("/api/v1/audit").json()["lines"]]
    assert actions.count("archive") == 2
    body = "run=digits/seed0&change=remove"
    assert client.post("/archive", content=body, headers=FORM | origin).status_code == 303
    assert names("/") == ["seed0", "seed1"]
    for wrong, status in (("change=add", 422), ("run=digits&change=add", 404), ("run=a/../b", 404)):
        assert client.post("/archive", content=wrong, headers=FORM | origin).status_code == status


def test_runs_of_a_sweep_are_named_by_their_varied_keys(tmp_path):
    store = make_store(tmp_path)
    (store / "sweeps" / "depth").mkdir(parents=True)
    spec = {
        "name": "depth",
        "config": "configs/digits_student.yaml",
        "seeds": [0, 1],
        "axes": {"optim.lr": [0.001, 0.002], "model.args.depth": [1, 2]},
    }
    text = json.dumps({"spec": spec, "base": {}})
    (store / "sweeps" / "depth" / "sweep.json").write_text(text)
    for seed in (0, 1):
        config = make_config(**{"train.seed": seed})
        make_run(store, f"depth-{seed}123456789", config=config, final={"eval_top1": 1.0})
    client = make_client(make_app(store))
    name = "depth lr=0.001 depth=2 seed=0"
    page = client.get("/").text
    assert f'title="digits/depth-0123456789">{name}</a>' in page
    assert f"<h1>{name}</h1>" in client.get("/runs/digits/depth-0123456789").text
    page = client.get("/compare?run=digits/depth-0123456789&run=digits/depth-1123456789").text
    assert "depth lr=0.001 depth=2 seed=1" in page


def test_a_comparison_of_profiled_runs_shows_what_became_slower(tmp_path):
    store = make_store(tmp_path)
    for name, ms in (("seed0", 2.0), ("seed1", 5.0)):
        rows = [
            {"module": module, "phase": "forward", "calls": 1, "ms": time, "share": 0.5, "bytes": 0}
            for module, time in (("blocks.0.<mlp>", ms), ("", 4.0 - ms / 5))
        ]
        head = {"schema_version": 1, "attempt": 1, "from_to": "0-1", "began": 1.0, "clock": "host"}
        file = {**head, "steps": 2, "step_ms": 6.0, "modules": rows}
        (store / "digits" / name / "modules.json").write_text(json.dumps(file))
    client = make_client(make_app(store))
    address = "run=digits/seed0&run=digits/seed1"
    page = client.get(f"/compare?{address}&seeds=apart").text
    card = page[page.index("Modules of digits/seed1</h2>") :].partition("</section>")[0]
    heads = re.findall(r'<th scope="(row|col)"[^>]*>(.*?)</th>', card)
    assert [text for scope, text in heads if scope == "row"] == [
        "blocks.0.&lt;mlp&gt;",
        "(outside modules)",
    ]
    assert [text for scope, text in heads if scope == "col"][:3] == ["module", "phase", "base ms"]
    assert "+3" in card and "-0.6" in card
    (changes,) = client.get(f"/api/v1/compare?{address}").json()["modules"]
    assert [(row["module"], row["new_ms"]) for row in changes] == [
        ("blocks.0.<mlp>", 5.0),
        ("(outside modules)", 3.0),
    ]
    (store / "digits" / "seed0" / "modules.json").unlink()
    assert "Modules of" not in client.get(f"/compare?{address}&seeds=apart").text
