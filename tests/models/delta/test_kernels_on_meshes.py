"""Kernels on a mesh whose devices share heads, because examples do not divide among them all."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from models.delta.kernels.bridge import share_out
from tests.models.delta.test_delta_kernels import needs_jax
from tests.support.child_runs import ROOT, get_environment

_PROGRAM = """
import json
import torch, torch_xla
from models.delta.rules.layout import CoreOptions
from models.delta.rules.chunked import chunk_delta_rule
from models.delta.rules.recurrence import recur_delta_rule
from models.delta.kernels import flash, fused_rule, operators
from models.delta.kernels.flash import attend_causally
from tests.models.delta import variants
from tests.models.delta.test_delta_flash import find_all
from tests.models.delta.test_delta_kernels import create_wide
from torch.nn.functional import scaled_dot_product_attention
from utils.config.execution import RuntimeSection
from utils.runtime.launcher import create_runtime

runtime, seen = create_runtime(RuntimeSection(device="xla", parallel="spmd", mesh_fsdp=2)), []
for module in (operators, flash, fused_rule):
    def note(kernel, plan, tensors, results, before=module.run_kernel):
        seen.append((kernel.__name__, list(tensors[0].shape)))
        return before(kernel, plan, tensors, results)
    module.run_kernel = note

def hold(inputs, start, chunk):
    wide = variants.rebuild(inputs, torch.Tensor.double)
    wanted = variants.find_gradients(recur_delta_rule, wide, start.double())
    options = CoreOptions(chunk=chunk, kernels="pallas")
    given = variants.find_gradients(
        chunk_delta_rule, inputs, start, device="xla", options=options)
    return {key: variants.find_largest_error({key: given[key]}, {key: wanted[key]})
            for key in wanted}

narrow = variants.rebuild(variants.create_inputs("gdn"), torch.Tensor.float)
found = {"walk": hold(narrow, variants.create_start().float(), 8)}
# Two examples of two heads of keys and four of values, all of 128.
inputs, start = create_wide(torch.float32)
inputs = variants.rebuild(inputs, lambda x: torch.cat([torch.cat([x, 0.5 * x], dim=2)] * 2))
found["fused"] = hold(inputs, torch.cat([torch.cat([start, start], dim=1)] * 2), 32)

def attend(q, k, v):
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

pairs = zip(find_all(attend_causally, "xla", torch.float32, 21),
            find_all(attend, "cpu", torch.float64, 21), strict=True)
found["flash"] = {name: float((one - other).abs().max() / other.abs().max())
                  for name, (one, other) in zip(("output", "q", "k", "v"), pairs, strict=True)}
print(json.dumps([found, seen]))
"""


@pytest.mark.parametrize(
    ("sizes", "examples", "heads", "wanted"),
    [
        ((4, 1), 8, 3, (("data", "fsdp"), ())),
        ((2, 2), 2, 6, (("data",), ("fsdp",))),
        # Behind an axis of heads another may still have examples.
        ((4, 2), 2, 4, (("fsdp",), ("data",))),
        ((2, 2), 1, 4, ((), ("data", "fsdp"))),
        ((2, 2), 1, 2, None),
        ((4, 1), 2, 6, None),
    ],
)
def test_an_axis_shards_examples_or_heads_or_nothing(sizes, examples, heads, wanted):
    mesh = SimpleNamespace(shape=lambda: dict(zip(("data", "fsdp"), sizes, strict=True)))
    assert share_out(mesh, examples, heads) == wanted


@needs_jax
@pytest.mark.slow
@pytest.mark.xla
def test_devices_share_heads_where_examples_do_not_divide():
    """Two examples on two by two devices: values to 1e-5 and gradients to 1e-4 of float64."""
    environment = get_environment() | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, seen = json.loads(done.stdout.splitlines()[-1])
    for name, errors in found.items():
        for key, error in errors.items():
            assert error < (1e-5 if key in ("output", "state") else 1e-4), (name, key)
    # What a device has: of the walk one example's head of two; of the others half of the heads.
    assert dict(seen)["walk_forward"] == [1, 4, 3]
    assert dict(seen)["fused_forward"] == dict(seen)["fused_back"] == [1, 2, 128, 128]
    assert dict(seen)["flash_forward"] == [1, 2, 128, 16]
