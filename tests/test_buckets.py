"""Runs on a bucket, by main.py: killed and resumed elsewhere, with the same bits."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from main import main
from store.record.catalogue import KINDS
from store.record.history import keep_deterministic, read_metrics
from store.record.mirror import Mirror, read_segments
from store.record.spans import parse_spans
from tests.support.child_runs import ROOT, get_command, get_environment, run_main
from tests.support.faulty import register
from tests.support.tiny_parts import SYNTHETIC
from utils.storage.folder import Folder
from utils.storage.places import open_folder

FLAGS = (
    *SYNTHETIC,
    "--config=configs/smoke.yaml",
    "--runtime.device=cpu",
    "--train.steps=14",
    "--train.checkpoint_every_steps=4",
    "--train.eval_every_epochs=0.5",
    "--run.run_id=a",
    "--runtime.num_threads=1",
)


def strip(lines: list[dict]) -> list[dict]:
    """Lines without what the clock says and which attempt wrote them."""
    return [keep_deterministic(line) for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    """The same run on a disk, without a fault."""
    output = tmp_path_factory.mktemp("unbroken")
    assert main([*FLAGS, f"--run.output_dir={output}"]) == 0
    return output / "tiny" / "a"


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The same run in a process of its own: torch_tpu's device in this one may change last bits."""
    output = tmp_path_factory.mktemp("alone")
    done = run_main([*FLAGS, f"--run.output_dir={output}"])
    assert done.returncode == 0, done.stderr
    return output / "tiny" / "a"


def check_equal(remote: str, uninterrupted: Path) -> None:
    """Compare the bucket's history and the exported weights with the uninterrupted run's."""
    folder = open_folder(remote)
    lines = read_segments(folder)
    assert strip(lines) == strip(read_metrics(uninterrupted, KINDS))
    times = [line["time_s"] for line in lines if "time_s" in line]
    assert times == sorted(times)
    assert json.loads(folder.read_text("run.json"))["status"] == "complete"
    norms = [
        json.loads(text)["whole"]["grad_norm"]
        for text in (
            folder.read_text("sketches.json"),
            (uninterrupted / "sketches.json").read_text(),
        )
    ]
    assert norms[0] == norms[1]
    with folder.open_local("student.safetensors") as path:
        found = load_file(path)
    wanted = load_file(uninterrupted / "student.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with folder.open_local("metrics.jsonl") as path:
        assert read_metrics(path.parent, KINDS) == lines


@pytest.mark.parametrize("seed", [0, 1])
def test_faults_and_preemptions_of_a_store_leave_the_bits_unchanged(
    seed, uninterrupted, tmp_path, monkeypatch
):
    monkeypatch.setattr("utils.storage.retry._FIRST_WAIT_S", 0.0)
    faulty = register(seed)
    written, add_line = [], Mirror.add_line

    def add(self: Mirror, text: str) -> None:
        add_line(self, text)
        written.append(text)
        if len(written) in (7, 12):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Mirror, "add_line", add)
    codes = []
    for attempt in range(3):
        flags = [
            *FLAGS,
            "--run.output_dir=faulty://bucket/runs",
            f"--run.cache_dir={tmp_path}/{attempt}",
        ]
        codes.append(main([*flags, "--run.resume=auto"] if attempt else flags))
    assert codes == [75, 75, 0]
    check_equal("faulty://bucket/runs/tiny/a", uninterrupted)
    assert len(faulty.faults) > 5
    folder = open_folder("faulty://bucket/runs/tiny/a")
    spans = parse_spans(folder.read_text("spans.jsonl"))
    assert [
        sum(s.count for s in spans if s.name == "window" and s.attempt == attempt)
        for attempt in (1, 2, 3)
    ] == get_steps(folder)
    attempts = folder.read_text("attempts.jsonl")
    assert [json.loads(x).get("status") for x in attempts.split("\n") if "ended" in x] == [
        "preempted",
        "preempted",
        "complete",
    ]


def get_steps(folder: Folder) -> list[int]:
    """Steps that each attempt has made."""
    ends = [json.loads(line) for line in folder.read_text("attempts.jsonl").split("\n") if line]
    first = [line["from_step"] for line in ends if "began" in line]
    last = [line["to_step"] for line in ends if "ended" in line]
    return [end - begin for begin, end in zip(first, last, strict=True)]


def start_hosts(output: str, cache: Path, hosts: int, *flags: str) -> list[subprocess.Popen]:
    """One main.py for each host, which share the bucket alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(hosts):
        environment = {**get_environment(), "XDG_CACHE_HOME": str(cache / str(rank))}
        if hosts > 1:
            environment |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(hosts),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        started.append(
            subprocess.Popen(
                get_command([*FLAGS, f"--run.output_dir={output}", *flags]),
                cwd=ROOT,
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def kill_after(processes: list[subprocess.Popen], text: str) -> None:
    """SIGKILL to all hosts as soon as the first one has said something."""
    assert any(text in line for line in processes[0].stderr)
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_on_gs_resumes_from_the_bucket_alone(hosts, gs, alone, tmp_path):
    kill_after(start_hosts(gs, tmp_path / "first", hosts), "step 10/14")
    remote = f"{gs}/tiny/a"
    assert "step_00000008" in " ".join(open_folder(f"{remote}/checkpoints").list_names())
    done = start_hosts(gs, tmp_path / "second", hosts, "--run.resume=auto")
    outputs = [process.communicate()[1] for process in done]
    assert [process.returncode for process in done] == [0] * hosts, outputs
    assert f"complete: {remote}" in outputs[0]
    assert "took over the run from process" in outputs[0]
    if hosts == 1:
        check_equal(remote, alone)
    lines, wanted = read_segments(open_folder(remote)), read_metrics(alone, KINDS)
    assert [x["step"] for x in lines] == [x["step"] for x in wanted]
    losses = [[x["loss/total"] for x in one if x["kind"] == "train"] for one in (lines, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    # A directory named after the URL is what this must never leave behind.
    assert not (ROOT / "gs:").exists()
    listed = json.loads(open_folder(remote).read_text("artifacts.json"))["artifacts"]
    for one in listed:
        assert open_folder(remote).get_checksum(one["path"]) == int(one["crc32c"], 16)


def test_a_missing_bucket_is_refused_before_a_device_is_touched(gs, capsys, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise AssertionError("a runtime was started")

    monkeypatch.setattr("job.entry.launch", refuse)
    assert main([*FLAGS, "--run.output_dir=gs://nobody/runs"]) == 2
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert error.startswith(
        "error: run.output_dir ('gs://nobody/runs') cannot be written to: there"
    )
    assert main([*FLAGS, "--run.output_dir=gs://nobody/runs", "--run.resume=auto"]) == 2


def test_a_failing_client_prints_no_traceback(gs, caplog):
    client = logging.getLogger("gcsfs")
    client.setLevel(logging.NOTSET)
    open_folder(gs)
    client.error("_request non-retriable exception")
    assert [one for one in caplog.records if one.name == "gcsfs"] == []


def test_an_existing_run_on_a_bucket_is_refused_or_renamed_first(gs, tmp_path, capsys):
    flags = [*FLAGS, f"--run.output_dir={gs}", f"--run.cache_dir={tmp_path}"]
    flags += ["--train.steps=2", "--train.checkpoint_every_steps=2"]
    assert main(flags) == 0
    folder = open_folder(f"{gs}/tiny")
    first = folder.child("a").read_text("run.json")
    assert main(flags) == 2
    assert f"{gs}/tiny/a exists; choose another" in capsys.readouterr().err
    # No checkpoint of the new run: the old one is still there, under another name.
    assert main([*flags, "--run.overwrite=true", "--distill.kd=kd"]) == 2
    assert folder.child("a").read_text("run.json") == first
    assert main([*flags, "--run.overwrite=true"]) == 0
    assert json.loads(folder.child("a").read_text("run.json"))["id"] != json.loads(first)["id"]
    assert folder.list_names() == ["a"]
    folder.child("notes").write_text("thesis.tex", "years of work")
    assert main([*flags, "--run.overwrite=true", "--run.run_id=notes"]) == 2
    assert "contains no run.json of this program" in capsys.readouterr().err
    assert folder.child("notes").list_names() == ["thesis.tex"]


_SHOWN = re.compile(r"--run\.(\w+)[= ]\"?(gs://\S+/runs|\$OUTPUT_DIR)\"?")
_DOCUMENTS = ("docs/store.md", "docs/checkpoints.md", "docs/tpu.md", "train/sky/task.py")


def find_shown_keys() -> dict[str, list[str]]:
    """Configuration keys that the documents and templates give a bucket to, and where they do."""
    found: dict[str, list[str]] = {}
    for name in _DOCUMENTS:
        for match in _SHOWN.finditer((ROOT / name).read_text(encoding="utf-8")):
            found.setdefault(match[1], []).append(name)
    return found


def test_bucket_keys_in_documents_are_tested_here():
    found = find_shown_keys()
    assert set(found) == {"output_dir"}
    assert set(found["output_dir"]) == set(_DOCUMENTS)


def test_documented_uploads_write_to_the_bucket_only(gs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = [flag for flag in FLAGS if "config" not in flag]
    config = ROOT / "configs" / "smoke.yaml"
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    assert main([*flags, f"--config={config}", "--train.steps=2", f"--run.output_dir={gs}"]) == 0
    landed = open_folder(f"{gs}/tiny/a")
    # What a source that is not committed adds is no matter of buckets.
    assert set(landed.list_names()) - {"source.diff.zst"} == {
        "artifacts.json",
        "attempts.jsonl",
        "checkpoints",
        "config_resolved.yaml",
        "curves.png",
        "environment.json",
        "eval_hits.bin",
        "metrics",
        "metrics.jsonl",
        "run.json",
        "run.lock",
        "sketches.json",
        "spans.jsonl",
        "student.json",
        "student.safetensors",
        "summary.csv",
        "summary.json",
    }
    assert landed.child("checkpoints").list_names() == ["best.json", "step_00000002"]
    assert list(work.iterdir()) == []
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.is_relative_to(tmp_path / "cache") for path in written)
