"""A profile says which modules took a step's time, and changes nothing of the training.

Shares and orders are compared, never times: the slowed module works at least ten times as long as
all others together, in one thread.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from timm.layers import Mlp
from torch import nn

import main
from store.query.modules import MODULES_FILE, REQUEST_FILE, request_profile, take_request
from store.query.record import RunRecord
from store.record.history import keep_deterministic, read_metrics
from tests.support.child_runs import ROOT, get_environment, run_main
from tests.support.stored_runs import make_config, make_run
from tests.support.tiny_parts import create_argv, create_xla_runtime
from tests.support.waiting import wait_for
from tools.runs.__main__ import main as runs
from tools.runs.profiling import names_modules
from utils.errors import EXIT_USER_ERROR
from utils.runtime.instruments import Instruments
from utils.runtime.profiles.module_times import ModulePhase, cut, fill_phases

FLAGS = ("--runtime.num_threads=1", "--train.steps=8", "--update_freq=2", "--mixup=0.8")
PROFILED = "--profile.steps=3-6"


def train(folder: Path, *flags: str) -> Path:
    assert main.main(create_argv(folder, *FLAGS, "--run.run_id=a", *flags)) == 0
    return folder / "tiny" / "a"


def slow_down(patch: pytest.MonkeyPatch) -> None:
    """Make every MLP work longer, forward and backward, with the same result."""
    forward = Mlp.forward

    def slow(self, x):
        x = forward(self, x)
        wide = torch.eye(500) + 0.0 * x.sum()
        for _ in range(8):
            wide = wide @ wide
        return x + 0.0 * wide.mean()

    patch.setattr(Mlp, "forward", slow)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("plain"), PROFILED)


@pytest.fixture(scope="module")
def slowed(tmp_path_factory) -> tuple[Path, list[float]]:
    """A run with a slow module, and the seconds of its steps by the clock of Python."""
    seconds: list[float] = []
    note_span = Instruments.note_span

    @contextlib.contextmanager
    def measure(self, name):
        began = time.perf_counter()
        with note_span(self, name):
            yield
        if name == "step":
            seconds.append(time.perf_counter() - began)

    with pytest.MonkeyPatch.context() as patch:
        slow_down(patch)
        patch.setattr(Instruments, "note_span", measure)
        return train(tmp_path_factory.mktemp("slow"), PROFILED), seconds[3:7]


def read_rows(run: Path) -> list[dict]:
    return json.loads((run / MODULES_FILE).read_text())["modules"]


def test_the_slowed_module_comes_first_forward_and_backward(slowed):
    run, _ = slowed
    rows = sorted(read_rows(run), key=lambda row: -row["ms"])
    assert {(row["module"], row["phase"]) for row in rows[:2]} == {
        ("blocks.0.mlp", "forward"),
        ("blocks.0.mlp", "backward"),
    }
    assert rows[0]["share"] + rows[1]["share"] > 0.5
    assert {row["phase"] for row in rows} == {"forward", "backward", "loss", "optimizer"}
    assert all(row["calls"] == 2 for row in rows if row["phase"] == "forward")  # micro-batches


def test_the_modules_sum_up_to_the_step(slowed):
    """Times come from the profiler, the step's from Python's clock: 2 % of it may be missing."""
    run, seconds = slowed
    file = json.loads((run / MODULES_FILE).read_text())
    assert (file["from_to"], file["steps"], file["clock"]) == ("3-6", 4, "host")
    measured_ms = 1000 * sum(seconds) / len(seconds)
    assert sum(row["ms"] for row in file["modules"]) == pytest.approx(measured_ms, rel=0.02)
    assert sum(row["share"] for row in file["modules"]) == pytest.approx(1)


def test_every_backward_module_has_a_forward_pass(plain):
    rows = read_rows(plain)
    forward = {row["module"] for row in rows if row["phase"] == "forward"}
    backward = {row["module"] for row in rows if row["phase"] == "backward"}
    assert {"patch_embed.proj", "blocks.0.attn.qkv", "blocks.0.mlp.fc1", "head"} <= backward
    assert all(name in forward or ":" in name or not name for name in backward)
    sizes = {(row["module"], row["phase"]): row["bytes"] for row in rows}
    # Two micro-batches of 8 images of 4 patches and a class token: float32 of 3 x 16 numbers each.
    assert sizes["blocks.0.attn.qkv", "forward"] == 2 * 8 * 5 * 48 * 4


def test_a_profile_changes_no_bit(plain, tmp_path):
    other = train(tmp_path)
    lines = [[keep_deterministic(line) for line in read_metrics(run)] for run in (plain, other)]
    assert lines[0] == lines[1]
    tensors = [load_file(run / "student.safetensors") for run in (plain, other)]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert not (other / MODULES_FILE).exists()
    assert all(line["host_reads"] == 0 for line in read_metrics(plain) if "host_reads" in line)


def test_programs_show_trace_and_compare_modules(plain, slowed, tmp_path, capsys):
    run, _ = slowed
    assert runs(["show", str(run), "--modules"]) == 0
    shown = capsys.readouterr().out
    table = shown[shown.index("modules  mean of steps 3-6") :].splitlines()
    assert table[2].startswith("blocks.0.mlp ")
    out = tmp_path / "trace.json"
    assert runs(["trace", str(run), "--out", str(out), "--format", "chrome"]) == 0
    names = [event["name"] for event in json.loads(out.read_text())["traceEvents"]]
    assert {"blocks.0.mlp forward", "blocks.0.mlp backward"} <= {*names}
    capsys.readouterr()
    assert runs(["compare", str(plain), str(run), "--json"]) == 0
    (changes,) = json.loads(capsys.readouterr().out)["modules"]
    assert {row["module"] for row in changes[:2]} == {"blocks.0.mlp"}
    assert changes[0]["new_ms"] > changes[0]["base_ms"]
    assert runs(["compare", str(plain), str(run)]) == 0
    assert "blocks.0.mlp" in capsys.readouterr().out
    assert runs(["validate", str(run)]) == 0


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_live_run_is_profiled_on_request(ranks, tmp_path, capsys):
    flags = (*FLAGS, f"--runtime.num_processes={ranks}", "--train.log_every_steps=2")
    flags = (*flags, "--train.steps=120")
    words = ["-1", "0.05", *create_argv(tmp_path, *flags, "--run.run_id=live")]
    command = [sys.executable, "-m", "tests.support.slow_run", *words]
    run = tmp_path / "tiny" / "live"
    with subprocess.Popen(command, cwd=ROOT, env=get_environment()) as child:
        wait_for(lambda: (run / "metrics.jsonl").exists() or child.poll() is not None, "lines")
        assert runs(["profile", str(run), "--steps", "3"]) == 0
        assert "traces 3 steps from its next log point on" in capsys.readouterr().out
    assert child.returncode == 0
    profile = RunRecord(run).modules
    assert profile is not None
    first, last = map(int, profile.from_to.split("-"))
    assert last - first == 2
    assert profile.steps == 3
    assert not (run / REQUEST_FILE).exists()
    assert [path.name for path in (run / "profile").iterdir()] == [
        f"rank_0_steps_{first}-{last}.pt.trace.json"
    ]
    # In a process of its own, too: one that has opened a device sums otherwise on the CPU.
    assert run_main(create_argv(tmp_path, *flags, "--run.run_id=alone")).returncode == 0
    tensors = [load_file(tmp_path / f"tiny/{n}/student.safetensors") for n in ("live", "alone")]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("profile", "RUN"), "is not at work; set profile.steps"),
        (("profile", "RUN", "--steps", "0"), "--steps (0) must be at least 1"),
        (("profile", "RUN", "--steps", "9999"), "--steps (9999) must be at most 1000"),
        (("profile", "RUN", "--steps", "x"), "invalid int value: 'x'"),
        (("show", "RUN", "--modules"), "has no whole modules.json"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(words, text, plain, tmp_path, capsys):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("run.json", "config_resolved.yaml"):
        (copy / name).write_bytes((plain / name).read_bytes())
    (copy / MODULES_FILE).write_text("{")
    before = sorted(copy.iterdir())
    with contextlib.suppress(SystemExit):
        assert runs([str(copy) if word == "RUN" else word for word in words]) == EXIT_USER_ERROR
    assert text in capsys.readouterr().err.splitlines()[-1]
    assert sorted(copy.iterdir()) == before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"steps": -1}', '{"steps": "a"}', '{"steps": 1.5}']
)
def test_a_torn_request_is_removed(text, tmp_path):
    (tmp_path / REQUEST_FILE).write_text(text)
    assert take_request(tmp_path) == 0
    assert not any(tmp_path.iterdir())
    request_profile(tmp_path, 4)
    assert (take_request(tmp_path), take_request(tmp_path)) == (4, 0)


def test_nested_events_are_cut_into_times_of_the_innermost():
    events = [(0.0, 10.0, "a"), (1.0, 4.0, "b"), (2.0, 3.0, "c"), (4.0, 6.0, "d"), (12.0, 13.0, "")]
    segments = cut(events, lambda event, _: ModulePhase("forward", event) if event else None)
    assert "".join(segment.origin.module for segment in segments) == "abcbda"
    assert [segment.ended for segment in segments] == [1, 2, 3, 4, 6, 10]


def test_time_outside_of_modules_has_the_phase_of_what_is_around_it():
    around = ["", "forward", "", "backward", "", "backward", "", "forward", "", "backward", ""]
    events = [(float(place), place + 1.0, name) for place, name in enumerate(around)]
    segments = cut(events, lambda name, _: ModulePhase(name, name))
    phases = [segment.origin.phase for segment in fill_phases(segments)]
    assert phases[::2] == ["loss", "loss", "backward", "loss", "loss", "optimizer"]


@pytest.mark.parametrize(
    ("device", "steps", "named"), [("xla:0", "", False), ("xla:0", "0-0", True), ("cpu", "", True)]
)
def test_a_request_says_where_modules_will_have_no_names(device, steps, named, tmp_path):
    run = make_run(tmp_path, "a", config=make_config() | {"profile": {"steps": steps}})
    begun = {"attempt": 1, "began": 1.79e9, "hardware": {"device": device}}
    (run.path / "attempts.jsonl").write_text(json.dumps(begun) + "\n")
    assert names_modules(RunRecord(run.path)) is named


def test_the_note_of_a_profile_is_shown(tmp_path, capsys):
    run = make_run(tmp_path, "a", final={"eval_top1": 1.0})
    row = {"module": "", "phase": "loss", "calls": 1.0, "ms": 2.0, "share": 1.0, "bytes": 0.0}
    profile = {"schema_version": 1, "attempt": 1, "from_to": "0-1", "began": 1.0, "clock": "device"}
    profile |= {"steps": 2, "step_ms": 2.0, "modules": [row], "note": "start it otherwise"}
    (run.path / MODULES_FILE).write_text(json.dumps(profile))
    assert runs(["show", str(run.path), "--modules"]) == 0
    assert "no module is named: start it otherwise" in capsys.readouterr().out


@pytest.mark.xla
def test_xla_names_instructions_by_their_scopes(tmp_path):
    """On the CPU, in a process of its own: the scopes are switched on before torch_xla loads."""
    runs_of = {}
    for name, flags in {"a": (PROFILED,), "b": ()}.items():
        argv = create_argv(tmp_path, *FLAGS, f"--run.run_id={name}", *flags, device="xla")
        done = run_main([*argv, "--runtime.graph_budget=12"])
        assert done.returncode == 0, done.stderr
        runs_of[name] = tmp_path / "tiny" / name
    file = json.loads((runs_of["a"] / MODULES_FILE).read_text())
    assert (file["clock"], file["steps"]) == ("device", 4)
    names = {(row["module"], row["phase"]) for row in file["modules"]}
    # The patches for XLA compute qkv, attention and projection in one.
    wanted = {"patch_embed", "blocks.0.attn"}
    assert {(name, phase) for name in wanted for phase in ("forward", "backward")} <= names
    assert {("blocks.0.mlp.fc1", "forward"), ("head", "forward"), ("norm", "backward")} <= names
    assert ("", "optimizer") in names
    assert {phase for _, phase in names} == {"forward", "backward", "loss", "optimizer"}
    lines = [[keep_deterministic(x) for x in read_metrics(run)] for run in runs_of.values()]
    assert lines[0] == lines[1]


@pytest.mark.xla
@pytest.mark.parametrize("error", [None, ValueError])
def test_what_follows_a_named_run_on_xla_is_not_named(error):
    """A module that two runs share, such as timm's, may record outside of the first one's steps."""
    runtime = create_xla_runtime()
    model = runtime.prepare(nn.Linear(2, 2))
    naming = runtime.name_operations({"student": model})
    with contextlib.suppress(ValueError), naming, runtime.step(0, 0):
        runtime.backward(model(torch.ones(1, 2, device=runtime.device)).sum(), last=True)
        if error is not None:
            raise error
    values = model(torch.ones(1, 2, device=runtime.device))
    runtime.finish_step()  # torch_xla refuses it while a name is open
    assert values.shape == (1, 2)
