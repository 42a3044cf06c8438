"""Child processes of the compiler's tool: when they end, and one process for each step."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bill import compile_for_tpu as tool
from bill import compiler
from bill.children.processes import read_versions
from bill.step import tracing
from tests.support.tiny_parts import create_config
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
# Says that it is there, and ends itself where nobody ends it.
ENDLESS = """
import signal, sys
signal.signal(signal.SIGALRM, lambda *_: print("outlived its parent"))
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.alarm(20)
print("ready", sys.argv[1], flush=True)
signal.pause()
"""
# Tests that run in the background of a shell have passed on that SIGINT is ignored.
PARENT = """
import signal, sys
from pathlib import Path
from bill.children.processes import run_child
signal.signal(signal.SIGINT, signal.default_int_handler)
run_child(Path(sys.argv[1]), Path("request"))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_child_ends_with_the_process_that_started_it(number, tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(script)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with parent:
        assert parent.stdout.readline() == "ready request\n"
        parent.send_signal(number)
        # The pipe is the child's, too: it ends when both are gone.
        assert parent.stdout.read() == ""
    assert parent.returncode == -number


TRACE_CHILD = """
import os, pickle, sys
sys.path[0] = {root!r}
from pathlib import Path
request = pickle.loads(Path(sys.argv[1]).read_bytes())
seed = os.environ["PYTHONHASHSEED"]
answer = (os.getpid(), seed, request.config.train.accumulate_steps, request.batch, request.given,
          request.chip, request.is_automatic)
if request.devices > 1:
    answer = "no such mesh"
request.answer.write_bytes(pickle.dumps(answer))
"""


def test_every_step_is_traced_in_its_own_process(tmp_path, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(TRACE_CHILD.format(root=str(ROOT)))
    monkeypatch.setattr(tracing, "CHILD", child)
    config = create_config(tmp_path, "--train.accumulate_steps=2")
    first, second = (
        tracing.trace_alone(
            config, batch=8, devices=1, given={"a": 3}, chip="v5e", is_automatic=True
        )
        for _ in "ab"
    )
    assert first[0] != second[0]
    assert first[1:] == second[1:] == ("0", 2, 8, {"a": 3}, "v5e", True)
    with pytest.raises(UserError, match="no such mesh"):
        tracing.trace_alone(config, batch=8, devices=2, given={})


def test_a_step_of_torch_tpu_is_traced_in_its_own_environment(tmp_path, monkeypatch):
    config = create_config(tmp_path, "--runtime.device=tpu")
    monkeypatch.setattr(tracing, "find_venv", lambda suffix: tmp_path / f".venv{suffix}")
    with pytest.raises(
        UserError, match=r"traced in \.venv-tpu, where torch_tpu is not installed.*--torch-tpu"
    ):
        tracing.trace_alone(config, batch=8, devices=1, given={})


def test_an_environment_without_torch_xla_is_named_before_a_step_is_traced(tmp_path, monkeypatch):
    """As where VENV of run_commands.sh has TorchTPU alone."""
    packages = tmp_path / ".venv/lib/python3.11/site-packages"
    for name in ("torch-2.13.0", "torch_tpu-0.2.0"):
        folder = packages / f"{name}.dist-info"
        folder.mkdir(parents=True)
        label, _, version = name.partition("-")
        (folder / "METADATA").write_text(f"Name: {label}\nVersion: {version}\n")
    assert read_versions(tmp_path / ".venv") == {"torch": "2.13.0", "torch_tpu": "0.2.0"}
    monkeypatch.setattr(tracing, "find_venv", lambda suffix: tmp_path / f".venv{suffix}")
    config = create_config(tmp_path, "--runtime.device=xla")
    with pytest.raises(UserError, match=r"\.venv, where torch_xla is not installed; run bash"):
        tracing.trace_alone(config, batch=8, devices=1, given={})


@pytest.mark.slow
@pytest.mark.xla
def test_a_search_reuses_what_was_compiled_before(tmp_path, monkeypatch, capsys):
    """The step of one half is the second that the search traces."""
    child, store = tmp_path / "child.py", tmp_path / "store"
    child.write_text("raise SystemExit('Ran out of memory: Used 20.50G of 15.75G hbm')")
    monkeypatch.setattr(compiler, "CHILD", child)
    monkeypatch.setattr(compiler, "require_compiler", lambda *_: {"libtpu": "0"})
    command = [
        "--config",
        "configs/tpu_step.yaml",
        '--model.args={"depth": 1}',
        "--target",
        "v5e:1x1",
        "--cache-dir",
        str(store),
    ]
    monkeypatch.chdir(ROOT)
    tool.main([*command, "--batch", "8"])
    assert get_outcomes(capsys.readouterr().err) == ["compiled"]
    tool.main([*command, "--batch", "16", "--micro-batches"])
    assert get_outcomes(capsys.readouterr().err) == ["compiled", "found in the store"]
    assert len(list(store.iterdir())) == 2


def get_outcomes(log: str) -> list[str]:
    """What became of each program that the tool has asked for."""
    return [line for line in log.splitlines() if line in ("compiled", "found in the store")]
