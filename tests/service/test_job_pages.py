"""Comparisons, the queue, sweeps, submissions and trends as pages, and what their forms do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from service.checker import Checker, Verdict
from service.estimates import Estimate, Estimator, read_steps
from service.jobs.files import ROOT, append_event, open_queue
from service.jobs.submission import Submission
from service.web.views.frame import show_time
from service.web.views.submit import make_groups, read_overrides
from service.web.views.sweeps import make_intervals
from store.compare.rows import describe_divergence
from store.quality.bill import bill_by_estimate, bill_by_runs, format_usd
from store.quality.costs import DevicePrice
from store.quality.trends import keep_report
from store.query.record import RunRecord
from tests.service.web.apps import ORIGIN, make_app, make_client
from tests.store.test_calibration import make_tpu_run, make_verdict
from tests.support.stored_runs import make_config, make_lines, make_run
from tests.support.waiting import wait_for
from utils.config.load import RunConfig, combine_config
from utils.errors import UserError

CONFIG = "configs/digits_student.yaml"
FROM_HERE = {"origin": ORIGIN}


@pytest.fixture
def store(tmp_path):
    store = tmp_path / "runs"
    for seed in range(3):
        for name, lr in (("slow", 1e-3), ("fast", 3e-3)):
            config = make_config(**{"train.seed": seed, "optim.lr": lr})
            lines = make_lines(8, start=2.0 + seed + 100 * lr)
            final = {"eval_top1": 60.0 + seed + 1000 * lr}
            make_run(store, f"{name}{seed}", config=config, final=final, lines=lines)
    return store


@pytest.fixture
def app(store):
    return make_app(store)


@pytest.fixture
def client(app):
    return make_client(app)


@pytest.fixture
def job(store):
    overrides = {"run.run_id": "waits", "data.root": str(store)}
    submission = Submission(config=str(ROOT / CONFIG), overrides=overrides)
    return open_queue(str(store)).submit(submission, "admin")


def choose(*names):
    return "/compare?" + "&".join(f"run=digits/{name}" for name in names)


def test_seeds_of_one_configuration_are_one_side(client):
    page = client.get(choose("slow0", "slow1", "slow2", "fast0", "fast1", "fast2")).text
    assert "paired by 3 seeds" in page
    assert "n too small to tell" in page
    assert page.count("<figure") == 3
    assert '<th scope="row" class="mono">optim.lr</th>' in page
    apart = client.get(choose("slow0", "slow1", "fast0", "fast1") + "&seeds=apart").text
    assert "paired" not in apart
    assert apart.count("against <") == 0 and "Seeds together" in apart


def test_the_page_shows_where_two_runs_first_differ(tmp_path):
    lines = [make_lines(8), make_lines(8)]
    lines[1][4]["loss/total"] *= 1.5
    for name, own in zip(("one", "two"), lines, strict=True):
        make_run(tmp_path / "runs", name, final={"eval_top1": 1.0}, lines=own)
    page = make_client(make_app(tmp_path / "runs")).get(choose("one", "two")).text
    assert "The runs part at step 5 (train)." in page


def test_a_missing_or_wrong_side_gives_an_error_above_the_form(client):
    assert client.get("/compare").status_code == 200
    for place in (choose("slow0"), choose("slow0", "nobody")):
        answer = client.get(place)
        assert answer.status_code == 422
        assert 'role="alert"' in answer.text
        assert 'value="digits/slow0"' in answer.text


def test_equal_runs_and_lost_lines_are_described_in_sentences():
    assert len(describe_divergence({"found": None, "checkpoint": None, "tensors": []})) == 1
    found = {
        "step": 9,
        "kind": "eval",
        "metric": "",
        "base": None,
        "new": None,
        "ulps": None,
        "ulps32": None,
        "others": (),
        "lines": 8,
    }
    told = describe_divergence({"found": found, "checkpoint": 5, "tensors": ["a"]})
    assert told[2] == "One of them has no such line."
    assert told[3].endswith("step 5.")


def test_a_job_is_listed_stopped_and_requeued_by_forms(client, job):
    page = client.get("/queue").text
    assert ">digits_student/waits</a>" in page
    assert f'action="/queue/{job.id}/stop"' in page
    answer = client.post(f"/queue/{job.id}/stop", headers=FROM_HERE)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/queue/{job.id}")
    folder = open_queue(job_store(job)).find(job.id)
    append_event(folder, "finished", state="stopped", reason="asked to by admin")
    page = client.get(f"/queue/{job.id}").text
    assert '<span class="state warn">stopped</span>' in page
    refused = client.post(f"/queue/{job.id}/stop", headers=FROM_HERE)
    assert refused.status_code == 409
    assert "there is nothing to stop" in refused.text
    assert client.post(f"/queue/{job.id}/reopen", headers=FROM_HERE).status_code == 303
    assert client.get("/queue?state=stopped").text.count("<tr>") == 0
    assert client.post("/queue/nothing/stop", headers=FROM_HERE).status_code == 404


def job_store(job):
    return json.loads((open_file(job)).read_text())["store"]


def open_file(job):
    return Path(job.argv[3]).with_name("job.json")


def test_a_log_is_escaped(client, job):
    (open_file(job).with_name("log.txt")).write_text("step 1\n\x1b[31m<b>red</b>\x1b[0m\n")
    page = client.get(f"/queue/{job.id}").text
    assert "step 1\n&lt;b&gt;red&lt;/b&gt;" in page


def test_the_form_has_every_key_except_the_queues_own(client):
    page = client.get(f"/submit?config={CONFIG}").text
    names = set(re.findall(r'<(?:input|select)[^>]* name="([a-z_]+\.[a-z_0-9]+)"', page))
    known = {
        f"{section}.{name}"
        for section, owner in RunConfig.model_fields.items()
        for name in owner.annotation.model_fields
    }
    assert known - names == {"run.output_dir", "run.resume", "run.check_only", "run.overwrite"}
    assert 'placeholder="0.005"' in page
    assert "<option>cosine</option>" in page


def test_form_input_becomes_typed_values():
    typed = {
        "config": "x",
        "slots": "2",
        "optim.lr": "1e-3",
        "train.ema": "true",
        "model.name": "007",
        "model.args": "{depth: 2}",
        "data.root": "  ",
        "train.steps": "none",
    }
    found = read_overrides(typed)
    assert found == {
        "optim.lr": "1e-3",
        "train.ema": True,
        "model.name": "007",
        "model.args": {"depth": 2},
        "train.steps": None,
    }
    assert combine_config(str(ROOT / CONFIG), found, "test").optim.lr == 0.001
    with pytest.raises(UserError, match="several lines"):
        read_overrides({"train.seed": "1\nb: 2"})


def test_form_input_is_kept_in_its_field():
    config = combine_config(str(ROOT / CONFIG), {}, "test")
    groups = {group.name: group for group in make_groups(config, {"optim.lr": "0.1"})}
    field = next(one for one in groups["optim"].fields if one.key == "optim.lr")
    assert (field.value, field.known, groups["optim"].set_count) == ("0.1", "0.005", 1)
    assert not groups["train"].set_count


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"config": CONFIG, "optim.lrr": "1"}, "optim.lr"),
        ({"config": CONFIG, "data.root": "/etc"}, "roots"),
        ({"config": CONFIG, "slots": "many"}, "slots"),
        ({"config": CONFIG, "model.args": "{a"}, "model.args"),
        ({"config": "configs/../main.py"}, "config"),
        ({"config": CONFIG, "deed": "compile", "target": "v5e:2x2 --json=/x"}, "target"),
    ],
)
def test_an_invalid_submission_is_refused_in_one_line_and_nothing_starts(client, fields, words):
    answer = client.post("/submit", data=fields, headers=FROM_HERE)
    assert answer.status_code in (404, 422)
    alert = re.search(r'role="alert">(.*?)</p>', answer.text)
    assert alert and words in alert[1]
    assert "The queue is empty." in client.get("/queue").text


def test_a_viewer_may_not_submit(app):
    viewer = make_client(app, "view")
    assert viewer.post("/submit", data={"config": CONFIG}, headers=FROM_HERE).status_code == 403
    page = viewer.get(f"/submit?config={CONFIG}").text
    assert 'name="deed"' not in page and "Your role is view" in page


@pytest.mark.slow
def test_the_form_checks_estimates_and_starts_a_run(client):
    fields = {"config": "configs/smoke.yaml", "run.run_id": "mine"}
    page = client.post("/submit", data={**fields, "deed": "check"}, headers=FROM_HERE).text
    assert "All checks passed" in page
    assert "smoke/mine" in page
    assert "its duration is unknown" in page
    answer = client.post("/submit", data={**fields, "deed": "start"}, headers=FROM_HERE)
    assert answer.status_code == 303
    assert "smoke/mine" in client.get(answer.headers["location"]).text


def test_an_estimate_uses_a_run_with_the_same_step(store):
    config = combine_config(str(ROOT / CONFIG), {}, "test")
    folder = make_run(store, "equal", final={"steps": 8}, experiment="same").path
    values = config.model_dump(mode="json")
    values["train"]["seed"] = 9
    (folder / "config_resolved.yaml").write_text(yaml.safe_dump(values))
    (folder / "attempts.jsonl").write_text(
        '{"attempt": 1, "host": "vm", "pid": 1, "began": 1.7e9, "from_step": 0, "hardware": '
        '{"device": "cpu", "world_size": 2}}\n'
        '{"attempt": 1, "ended": 1700003600.0, "to_step": 8, "status": "complete"}\n'
    )
    prices = [DevicePrice(device="cpu", since="2020-01-01", usd_per_device_hour=0.5)]
    records = [RunRecord(folder), RunRecord(store / "digits" / "slow0")]
    bill = bill_by_runs(values, records, 16, prices)
    assert (bill.devices, bill.hours, bill.usd) == (2, 4.0, 4.0)
    assert bill_by_runs(values, records[1:], 16, prices) is None
    (folder / "attempts.jsonl").unlink()  # then the hours of that run are unknown
    assert bill_by_runs(values, [RunRecord(folder)], 16, prices) is None


def test_an_estimate_by_the_compiler_is_steps_times_step_time():
    report = {"step_ms": {"lower": 18.0, "estimate": 36.0}, "device": "TPU v5 lite"}
    prices = [DevicePrice(device="TPU*", since="2020-01-01", usd_per_device_hour=2.0)]
    bill = bill_by_estimate(report, 100_000, 8, prices, {})
    assert (bill.hours, bill.usd, bill.bound_hours) == pytest.approx((1.0, 16.0, 0.5))
    assert format_usd(bill) == "USD 16.00 (13.12 to 21.12)"
    assert bill_by_estimate(report, None, 8, prices, {}) is None
    assert bill_by_estimate({"step_ms": None}, 5, 8, prices, {}) is None
    assert bill_by_estimate(report, 10, 8, [], {}).usd is None


def test_a_run_shows_the_compilers_verdict_beside_its_measurement(tmp_path):
    config = make_config(**{"data.global_batch_size": 8})
    make_tpu_run(tmp_path / "runs", "measured", config, step_s=0.05)
    keep_report(tmp_path / "runs", make_verdict(config))
    page = make_client(make_app(tmp_path / "runs")).get("/runs/digits/measured").text
    assert "The compiler's estimate and the measurement" in page.replace("&#39;", "'")
    cells = re.findall(r'<td class="number">([^<]*)</td>', page)
    assert cells[:3] == ["40.00 ms", "50.00 ms", "1.25"]


def test_a_verdict_shows_whether_it_fits_and_the_step_time(client, monkeypatch):
    told = {"fits": True, "device": "TPU v5 lite", "note": "an estimate, no measurement"}
    report = make_verdict(make_config(), **told)
    monkeypatch.setattr(Estimator, "find", lambda *_: Estimate("v5e:2x2", 1.7e9, report))
    passed = Verdict("00ff", "digits_student/new", ("data: digits; 360 steps of 64",), "")
    monkeypatch.setattr(Checker, "check", lambda *_: passed)
    page = client.get(f"/submit?config={CONFIG}&estimate=1").text
    assert "All checks passed" in page
    assert '<span class="state good">fits</span>' in page
    assert "1.0 to 40.0 ms" in page
    assert "verdict, range of published steps" in page
    assert "data-poll" not in page
    monkeypatch.setattr(Estimator, "find", lambda *_: Estimate("v5e:2x2", 1.7e9))
    assert "data-poll" in client.get(f"/submit?config={CONFIG}&estimate=1").text


@pytest.mark.slow
def test_the_compilers_message_is_shown(tmp_path):
    """Without the compiler itself its program ends with one line, which is the answer."""
    estimator = Estimator(str(tmp_path))
    estimator.start(Submission(config=str(ROOT / CONFIG)), "v9:2x2")
    submission = Submission(config=str(ROOT / CONFIG))
    error = wait_for(lambda: estimator.find(submission, "v9:2x2").error)
    assert "v9" in error
    assert "\n" not in error


def test_steps_are_read_from_the_checks_output():
    assert read_steps(["model: x", "data: a, 9 examples; 1,360 steps of 64, 20 epochs"]) == 1360
    assert read_steps(["nothing of the kind"]) is None


def test_one_compilation_at_a_time(tmp_path, monkeypatch):
    estimator = Estimator(str(tmp_path))
    monkeypatch.setattr(Estimator, "_compile", lambda *_: None)
    submission = Submission(config=CONFIG, overrides={"run.run_id": "a"})
    estimator.start(submission, "v5e:2x2")
    renamed = Submission(config=CONFIG, overrides={"run.run_id": "b"})
    assert estimator.find(renamed, "v5e:2x2") is not None
    assert estimator.find(renamed, "v4") is None
    with pytest.raises(UserError, match="another submission"):
        estimator.start(submission, "v4")


def test_pages_of_sweeps_and_trends_work_when_empty(client):
    assert "No sweeps yet." in client.get("/sweeps").text
    assert client.get("/sweeps/none").status_code == 404
    assert "No reports yet." in client.get("/trends").text


def test_intervals_share_one_scale():
    from service.sweeps.report import AxisRow
    from store.compare.statistics import MeanInterval

    rows = [
        AxisRow({"a": 1}, MeanInterval(5.0, 0.0, 10.0, 1.0, 3), 6, 3),
        AxisRow({"a": 2}, MeanInterval(10.0, None, None, None, 1), 4, 2),
        AxisRow({"a": 3}, None, 2, 2),
    ]
    shown = make_intervals(rows, ["a"])
    assert [(one.low, one.at, one.high) for one in shown] == [
        (0.0, 50.0, 100.0),
        (-1.0, 100.0, -1.0),
        (-1.0, -1.0, -1.0),
    ]
    assert [one.n for one in shown] == ["3 of 3", "1 of 2", "0 of 2"]


@pytest.mark.parametrize("seconds", [None, True, "x", float("nan"), -5.0, 1e300])
def test_an_invalid_time_is_none(seconds):
    assert show_time(seconds, 1.7e9) is None


def test_a_time_is_shown_relative_to_now():
    now = 1.7e9
    texts = [show_time(now - ago, now).text for ago in (1, 61, 7200, 86400 * 3)]
    assert texts[:3] == ["just now", "1 min ago", "2 h ago"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", texts[3])


def write_run(store: Path, config: str, **overrides: object) -> RunRecord:
    """A complete run of a configuration of the repository."""
    resolved = combine_config(str(ROOT / config), overrides, "a test").model_dump(mode="json")
    name, experiment = "first", resolved["run"]["experiment"]
    run = make_run(store, name, config=resolved, experiment=experiment, final={"eval_mse": 1.0})
    return RunRecord(run.path)


def test_a_run_is_resubmitted_with_its_configuration(tmp_path):
    store = tmp_path / "runs"
    config = "configs/regression/diabetes_linear.yaml"
    record = write_run(store, config, **{"optim.lr": 0.5, "train.seed": 7, "runtime.device": "cpu"})
    app = make_app(store)
    place = f"/runs/{record.path}"
    viewer, client = make_client(app, "view"), make_client(app, "submit")
    assert f'action="{place}/again"' in client.get(place).text
    assert "/again" not in viewer.get(place).text
    assert viewer.post(f"{place}/again", headers=FROM_HERE).status_code == 403
    answer = client.post(f"{place}/again", headers=FROM_HERE)
    assert answer.status_code == 303 and answer.headers["location"].startswith("/queue/")
    (job,) = open_queue(str(store)).list()
    assert job.config.endswith(config) and job.run != record.path and job.who == "submit"
    told = open_queue(str(store)).read_overrides(job.id)
    assert {key: told[key] for key in ("optim.lr", "train.seed")} == {
        "optim.lr": 0.5,
        "train.seed": 7,
    }
    resolved = yaml.safe_load((store / "jobs" / job.id / "config.yaml").read_text())
    for key, value in record.config.items():
        section, _, name = key.partition(".")
        if section != "run" and "." not in name:
            assert resolved[section][name] == value, key
    lines = make_client(app).get("/api/v1/audit").json()["lines"]
    assert ("submit", f"POST {place}/again") in [(line["who"], line["action"]) for line in lines]


def test_a_run_outside_the_roots_or_without_configuration_is_not_resubmitted(tmp_path):
    store = tmp_path / "runs"
    record = write_run(store, CONFIG, **{"data.root": "/etc"})
    client = make_client(make_app(store))
    answer = client.post(f"/runs/{record.path}/again", headers=FROM_HERE)
    assert answer.status_code == 422 and "roots" in answer.json()["detail"]
    (record.folder.path / "config_resolved.yaml").unlink()
    answer = client.post(f"/runs/{record.path}/again", headers=FROM_HERE)
    assert answer.status_code == 422 and "config_resolved.yaml" in answer.json()["detail"]
    assert open_queue(str(store)).list() == []
