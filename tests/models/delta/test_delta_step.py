"""A decoding step by a kernel: interpreted on XLA it equals the recurrence."""

from __future__ import annotations

import pytest
import torch

from models.delta.kernels.operators import choose_kernels
from models.delta.layers.gated import DeltaCache, run_rule
from models.delta.rules.layout import CoreOptions
from models.delta.rules.recurrence import recur_delta_rule, recur_dplr
from models.table import MODELS
from tests.models.delta.test_delta_kernels import needs_jax
from tests.models.delta.variants import RULES, create_inputs, create_start, rebuild
from tools.generate import generate
from utils.errors import UserError

USUAL = ("delta_product", "rwkv7")
PALLAS = CoreOptions(kernels="pallas")


def find_step(inputs, start: torch.Tensor, device: str) -> dict[str, torch.Tensor]:
    """What a layer's step gives, and the state that it keeps."""
    cache = DeltaCache()
    cache.state = start.to(device)
    there = rebuild(inputs, lambda x: x.to(device))
    with torch.no_grad():
        output = run_rule(there, torch.zeros(1), cache, PALLAS)
    return {"output": output.cpu(), "state": cache.state.cpu()}


@needs_jax
@pytest.mark.xla
@pytest.mark.parametrize(
    "name", [*USUAL, *(pytest.param(x, marks=pytest.mark.slow) for x in RULES if x not in USUAL)]
)
def test_a_decoding_step_equals_the_recurrence(name):
    import torch_xla

    inputs = rebuild(create_inputs(name, tokens=1), torch.Tensor.float)
    start = create_start(torch.float32)
    recur = recur_dplr if name == "rwkv7" else recur_delta_rule
    output, state = recur(rebuild(inputs, torch.Tensor.double), start.double())
    found = find_step(inputs, start, str(torch_xla.device()))
    for value, wanted in ((found["output"], output), (found["state"], state)):
        assert value.dtype == torch.float32
        assert (value - wanted).abs().max() < 1e-5 * wanted.abs().max()


@needs_jax
@pytest.mark.xla
@pytest.mark.slow
def test_a_model_generates_the_same_with_and_without_kernels():
    import torch_xla

    torch.manual_seed(0)
    model = MODELS.get("qwen3_5")(16, 8, depth=2, full_every=2, width=32, mlp_width=32).eval()
    shown = [[], []]

    def choose(place):
        def take(logits):
            shown[place].append(logits.cpu())
            return int(shown[place][-1].argmax())

        return take

    wanted = generate(model, [1, 2, 3], 4, choose(0))
    device = torch_xla.device()
    model.to(device)
    choose_kernels("pallas", device, model)
    assert generate(model, [1, 2, 3], 4, choose(1)) == wanted
    for one, other in zip(*shown, strict=True):
        assert (one - other).abs().max() < 1e-5


def test_a_kernel_step_is_refused_on_devices_without_kernels():
    inputs = create_inputs("gdn", tokens=1)
    with pytest.raises(UserError, match=r"model\.kernels \(pallas\) needs runtime\.device=xla"):
        find_step(inputs, create_start(), "cpu")
