"""Losses against their formulas in NumPy, and their gradients against finite differences."""

from __future__ import annotations

import pytest
import torch

from tests.losses.examples import map_examples
from tests.losses.formulas import (
    CASES,
    REFERENCES,
    compare_slopes,
    compare_values,
    create_case,
    describe,
)


@pytest.mark.parametrize(("name", "args"), CASES)
def test_a_value_equals_its_formula(name, args):
    value, wanted = compare_values(name, args)
    assert value == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("name", "args"), CASES)
def test_a_gradient_equals_finite_differences(name, args):
    slope, wanted = compare_slopes(name, args)
    assert slope == pytest.approx(wanted, rel=1e-5, abs=1e-8)


@pytest.mark.xla
@pytest.mark.slow
def test_values_equal_their_formulas_on_xla():
    """All in one graph, in float32."""
    torch_xla = pytest.importorskip("torch_xla")
    device = torch_xla.device()
    values, wanted = [], []
    for name, args in CASES:
        loss, inputs = create_case(name, args)
        wanted.append(REFERENCES[name](describe(name, args, loss, inputs)))
        moved = map_examples(
            inputs, lambda x: (x.float() if x.is_floating_point() else x).to(device)
        )
        values.append(loss.float().to(device)(moved).detach())
    found = torch.stack(values).cpu().tolist()
    for case, value, formula in zip(CASES, found, wanted, strict=True):
        assert value == pytest.approx(formula, rel=2e-4, abs=1e-6), case
