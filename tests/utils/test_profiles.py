"""A trace with kernels of a GPU, by hand in the form that torch.profiler writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from utils.runtime.profiles.chrome import read_trace

NODE = "autograd::engine::evaluate_function: "


def make_event(name: str, category: str, ts: float, dur: float, *, tid: int = 1, **args) -> dict:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": ts,
        "dur": dur,
        "tid": tid,
        "args": args,
    }


def launch(ts: float, correlation: int, *, tid: int = 1) -> dict:
    return make_event("cudaLaunchKernel", "cuda_runtime", ts, 1, tid=tid, correlation=correlation)


def run_kernel(ts: float, dur: float, correlation: int) -> dict:
    return make_event("gemm", "kernel", ts, dur, tid=7, correlation=correlation)


@pytest.fixture
def trace(tmp_path) -> Path:
    """One step: its forward pass launches from thread 1, its backward pass from thread 2."""
    events = [
        make_event("step", "user_annotation", 0, 100),
        make_event("module|student:", "user_annotation", 10, 30),
        make_event("module|head", "user_annotation", 20, 10),
        make_event("aten::linear", "cpu_op", 21, 8, **{"Sequence number": 5}),
        launch(25, 1),
        make_event(f"{NODE}AddmmBackward0", "cpu_op", 50, 10, tid=2, **{"Sequence number": 5}),
        launch(55, 2, tid=2),
        make_event(f"{NODE}torch::autograd::AccumulateGrad", "cpu_op", 61, 5, tid=2),
        launch(62, 3, tid=2),
        make_event("Optimizer.step#SGD.step", "user_annotation", 80, 10),
        launch(85, 4),
        launch(200, 5),  # after the step
        run_kernel(100, 40, 1),
        run_kernel(150, 70, 2),
        run_kernel(220, 10, 3),
        run_kernel(240, 20, 4),
        run_kernel(300, 99, 5),
        {**make_event("[memory]", "cpu_instant_event", 26, 0, Bytes=64), "ph": "i"},
        {**make_event("[memory]", "cpu_instant_event", 27, 0, Bytes=-64), "ph": "i"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_kernel_belongs_to_the_module_that_launched_it(trace):
    profile = read_trace(trace)
    assert profile is not None
    assert (profile["clock"], profile["steps"]) == ("device", 1)
    assert profile["step_ms"] == pytest.approx((260 - 100) / 1000)
    rows = {(row["module"], row["phase"]): row for row in profile["modules"]}
    assert {name: row["ms"] for name, row in rows.items()} == {
        ("head", "forward"): pytest.approx(0.040),
        ("head", "backward"): pytest.approx(0.080),
        ("", "optimizer"): pytest.approx(0.020),
    }
    assert rows["head", "forward"]["bytes"] == 64
    assert rows["head", "backward"]["calls"] == 2
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)


def test_a_trace_without_a_step_has_no_profile(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    assert read_trace(path) is None


def test_a_profile_that_names_no_module_says_why(trace, tmp_path):
    named = read_trace(trace)
    events = json.loads(trace.read_text())["traceEvents"]
    kept = [event for event in events if not event["name"].startswith("module|")]
    path = tmp_path / "compiled.json"
    path.write_text(json.dumps({"traceEvents": kept}))
    unnamed = read_trace(path)
    assert named is not None and named["note"] == ""
    assert unnamed is not None and "--runtime.compile=false" in unnamed["note"]
    assert {row["module"] for row in unnamed["modules"]} == {""}
