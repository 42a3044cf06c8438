"""Sequences sharded over several devices: parts, what they exchange, equal runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import conv1d

import main
from losses.tasks.chunked import score_in_chunks
from models.delta.layers.gated import ShortConvolution
from models.delta.layers.rwkv import shift_tokens
from tests.models.delta.test_delta_devices import run_form
from tests.models.delta.variants import RULES
from tests.support.child_runs import ROOT, get_environment
from tests.support.language import create_language_argv
from tests.test_parity import Form, compare
from utils.runtime.processes.sequence import count_sequence_parts, look_back, set_sequence_axis

CONTEXT = ("--runtime.parallel=spmd", "--runtime.mesh_context=2")


@pytest.fixture
def marked():
    """An axis of three devices that records what it gets."""
    told = []

    def mark(x, dim, batch):
        told.append((tuple(x.shape), dim, batch))
        return x

    set_sequence_axis(3, mark)
    yield told
    set_sequence_axis(1)


def test_each_part_depends_only_on_earlier_tokens(marked):
    x, tail = torch.randn(2, 12, 5), torch.randn(2, 3, 5)
    seen = look_back(x, tail)
    whole = torch.cat([tail, x], dim=1)
    assert seen.shape == (2, 3, 7, 5)
    for part in range(3):
        assert torch.equal(seen[:, part], whole[:, 4 * part : 4 * part + 7])
    # Own tokens stay where they are; all that is gathered are three tokens of each part.
    assert [one for one in marked if one[1] is None] == [((2, 3, 3, 5), None, 0)]
    # Of two tokens a part three are not to be had: it is one part.
    assert look_back(x[:, :6], tail).shape == (2, 1, 9, 5)
    set_sequence_axis(1)
    assert count_sequence_parts() == 1
    assert torch.equal(look_back(x, tail)[:, 0], whole)


def test_convolutions_and_shifts_equal_those_of_the_whole_sequence(marked):
    x, layer = torch.randn(2, 12, 5), ShortConvolution(5, 4)
    wanted = conv1d(x.mT, layer.weight, padding=3, groups=5)[..., :12].mT
    mixed, tail = layer(x)
    assert torch.allclose(mixed, wanted, atol=1e-6)
    assert torch.equal(tail, x[:, -3:])
    before, last = shift_tokens(x, None)
    assert torch.equal(before[:, 1:], x[:, :-1])
    assert not before[:, 0].any()
    assert torch.equal(last, x[:, -1:])


def test_chunks_of_logits_take_equally_many_tokens_of_each_part():
    hidden, weight = torch.randn(2, 12, 5), torch.randn(7, 5)
    targets, found = torch.randn(2, 12, 7), []

    def score(logits, places):
        if len(found):
            owners = [place // 4 for place in range(12)[places]]
            assert sorted(owners) == [0, 0, 1, 1, 2, 2]
        value = (logits * targets[:, places]).sum()
        return value, value.detach().reshape(1)

    for parts, chunk in ((1, 12), (3, 6)):
        leaf = hidden.clone().requires_grad_()
        total, sums = score_in_chunks(leaf, weight, score, chunk, parts=parts)
        total.backward()
        found.append((total.detach(), leaf.grad, sums))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--data.sequence_length=7",), "runtime.mesh_context (2) does not divide"),
        (("--model.kernels=pallas",), "model.kernels=pallas needs the whole of it"),
        (("--train.task=classify",), "train.task=classify has none"),
    ],
)
def test_sequences_that_cannot_be_sharded_are_refused_in_one_line(flags, words, tmp_path, capsys):
    argv = create_language_argv(tmp_path, *CONTEXT, *flags, device="xla")
    assert main.main(argv) == 2
    assert words in capsys.readouterr().err


_PROGRAM = """
import json, sys
from models.delta.rules.layout import CoreOptions
from models.delta.rules.chunked import chunk_delta_rule
from models.delta.rules.dplr import chunk_dplr
from models.delta.rules.recurrence import recur_delta_rule, recur_dplr
from tests.models.delta import variants
from utils.config.execution import RuntimeSection
from utils.runtime.launcher import create_runtime
from utils.runtime.processes.sequence import deal_sequence

runtime, found = create_runtime(RuntimeSection(device="xla", parallel="spmd", mesh_context=2)), {}
for name in sys.argv[1:]:
    recur, chunked = (recur_dplr, chunk_dplr) if name == "rwkv7" else (
        recur_delta_rule, chunk_delta_rule)
    # Two parts of eleven tokens, which fill no whole chunks.
    inputs, start = variants.create_inputs(name, tokens=22), variants.create_start()
    wanted = variants.find_gradients(recur, inputs, start)

    def dealt(inputs, state):
        inputs = variants.rebuild(inputs, lambda x: deal_sequence(x, 1))
        return chunked(inputs, state, options=CoreOptions(chunk=4))

    narrow = variants.rebuild(inputs, lambda x: x.float())
    given = variants.find_gradients(dealt, narrow, start.float(), device="xla")
    found[name] = {
        key: variants.find_largest_error({key: given[key]}, {key: wanted[key]}) for key in wanted
    }
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.xla
def test_all_rules_equal_the_recurrence_on_a_mesh(tmp_path):
    """Values to 1e-5 and gradients to 1e-4 of float32 inputs, on two by two devices."""
    pytest.importorskip("torch_xla")
    environment = get_environment() | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *RULES],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, errors in json.loads(done.stdout.splitlines()[-1]).items():
        for key, error in errors.items():
            assert error < (1e-5 if key in ("output", "state") else 1e-4), (name, key)


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "rwkv7", "qwen3_next"])
def test_a_model_trains_alike_on_a_mesh_that_shards_sequences(name, tmp_path):
    """In one graph, with twenty tokens in two parts, and evaluated alike."""
    pytest.importorskip("torch_xla")
    wanted = run_form(tmp_path / "cpu", Form("cpu"), name=name)
    found = run_form(tmp_path / "mesh", Form("xla", CONTEXT, 4), name=name)
    compare(found, wanted, score="loss")
    assert found[-1]["graphs_train"] == 1


@pytest.mark.slow
@pytest.mark.xla
def test_a_run_resumes_on_a_mesh_with_the_axis(tmp_path):
    """A checkpoint knows nothing of it."""
    pytest.importorskip("torch_xla")
    flags = ("--train.checkpoint_every_steps=4", "--train.keep_checkpoints=9")
    wanted = run_form(tmp_path, Form("cpu"), *flags)
    again = f"--run.resume={tmp_path}/lang/a/checkpoints/step_00000004"
    found = run_form(tmp_path, Form("xla", CONTEXT, 4), *flags, again)
    compare(found, wanted, score="loss")
