"""The one reader of HLO: what the TPU compiler prints, and what torch_xla records."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bill.hlo import count_dot_flops

TEXT = """
HloModule step

%body (p: f32[4,8]) -> f32[4,2] {
  %p = f32[4,8]{1,0} parameter(0)
  %w = f32[8,2]{1,0} constant({...})
  ROOT %dot.1 = f32[4,2]{1,0} dot(%p, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[3,4,8], b: f32[3,8,5]) -> f32[3,4,5] {
  %a = f32[3,4,8]{2,1,0} parameter(0)
  %b = f32[3,8,5]{2,1,0} parameter(1)
  ROOT %dot.2 = f32[3,4,5]{2,1,0} dot(f32[3,4,8]{2,1,0} %a, f32[3,8,5]{2,1,0} %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}
"""  # noqa: E501


def test_matrix_products_have_two_flops_per_output_and_contraction():
    assert count_dot_flops(TEXT) == 2 * (4 * 2) * 8 + 2 * (3 * 4 * 5) * 8
    assert count_dot_flops("") == 0


@pytest.mark.xla
def test_a_recorded_graph_has_the_flops_that_pytorch_counts():
    import torch_xla

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    inputs = torch.randn(6, 8)
    with FlopCounterMode(display=False) as counter:
        model(inputs).sum().backward()
    device = torch_xla.device()
    model = model.to(device).requires_grad_(True)
    model.zero_grad()
    loss = model(inputs.to(device)).sum()
    loss.backward()
    outputs = [loss, *(parameter.grad for parameter in model.parameters())]
    text = torch_xla._XLAC._get_xla_tensors_hlo(outputs)
    assert count_dot_flops(text) == counter.get_total_flops()
