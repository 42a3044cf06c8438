"""A step traced by TorchTPU, as the compiler of TPUs takes it."""

from __future__ import annotations

import pytest

from bill.step.tracing import trace_alone
from tests.support.tiny_parts import create_config


@pytest.mark.tpu
def test_a_step_of_torch_tpu_names_its_state_and_hands_over_its_memory(tmp_path):
    config = create_config(tmp_path, "--runtime.device=tpu")
    export = trace_alone(config, batch=8, devices=1, given={})
    assert export.bytecode.startswith(b"ML\xefR") and b"jax.buffer_donor" in export.bytecode
    state = [name for name in export.arguments if name.startswith(("model.", "optimizer/"))]
    assert len(state) == len(set(state)) > 40
    assert export.versions.keys() == {"torch_tpu", "timm"} and export.unit == ("img", 1)
