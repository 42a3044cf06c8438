"""Small inputs of the six rules, and the rules themselves as NumPy loops of whole matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from models.delta.rules.inputs import DeltaInputs, DplrInputs

B, T, H, K, V = 2, 21, 2, 4, 3
# Heads of q and k, and channels of g, erase and write.
DELTA = {
    "deltanet": (H, 1, 1, 1, 1),
    "gdn": (1, 1, 1, 1, 1),
    "kda": (H, K, 1, 1, 1),
    "gdn2": (H, K, K, V, 1),
    "delta_product": (H, 1, 1, 1, 2),
}
RULES = [*DELTA, "rwkv7"]


def create_inputs(
    name: str, *, tokens: int = T, dtype: torch.dtype = torch.float64, seed: int = 0
) -> DeltaInputs | DplrInputs:
    """Inputs of a rule, of unit keys and gates as layers make them."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=draw).to(dtype)

    if name == "rwkv7":
        key = normalize(normal(B, tokens, H, K), dim=-1)
        rate = torch.sigmoid(normal(B, tokens, H, K))
        decay = -0.606531 * torch.sigmoid(normal(B, tokens, H, K))
        return DplrInputs(
            q=normal(B, tokens, H, K),
            k=normal(B, tokens, H, K),
            v=normal(B, tokens, H, V),
            g=decay,
            a=-key,
            b=key * rate,
        )
    heads, of_g, of_erase, of_write, steps = DELTA[name]
    count = tokens * steps
    gates = torch.sigmoid(normal(B, count, H))
    decay = -softplus(normal(B, tokens, H, of_g)).squeeze(-1)
    return DeltaInputs(
        q=normal(B, tokens, heads, K) * K**-0.5,
        k=normalize(normal(B, count, heads, K), dim=-1),
        v=normal(B, count, H, V),
        g=torch.zeros_like(decay) if name == "deltanet" else decay,
        erase=torch.sigmoid(normal(B, count, H, K)) if of_erase > 1 else gates,
        write=torch.sigmoid(normal(B, count, H, V)) if of_write > 1 else gates,
        steps=steps,
    )


def create_start(dtype: torch.dtype = torch.float64) -> Tensor:
    """A state that is not empty."""
    draw = torch.Generator().manual_seed(7)
    return torch.randn(B, H, K, V, dtype=torch.float64, generator=draw).to(dtype)


def list_tensors(inputs: DeltaInputs | DplrInputs) -> dict[str, Tensor]:
    """The tensors of inputs by name."""
    values = {one.name: getattr(inputs, one.name) for one in fields(inputs)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def rebuild(inputs: DeltaInputs | DplrInputs, change: Callable[[Tensor], Tensor]):
    """The same inputs with each tensor changed."""
    tensors = {name: change(value) for name, value in list_tensors(inputs).items()}
    steps = {"steps": inputs.steps} if isinstance(inputs, DeltaInputs) else {}
    return type(inputs)(**tensors, **steps)


def find_gradients(
    function, inputs, state: Tensor, *, device: str = "cpu", singly: bool = False, **kwargs
):
    """Output, last state, and gradients of all inputs and the state, of a fixed weighting.

    Args:
      singly: each is a program of its own.
    """
    leaves = rebuild(inputs, lambda x: x.detach().to(device).requires_grad_())
    start = state.detach().to(device).requires_grad_()
    kwargs = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in kwargs.items()}
    output, last = function(leaves, start, **kwargs)
    draw = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=draw).to(device, x.dtype) for x in (output, last)]
    ((output * weights[0]).sum() + (last * weights[1]).sum()).backward()
    found = {"output": output, "state": last, "start": start.grad}
    found |= {name: leaf.grad for name, leaf in list_tensors(leaves).items()}
    if device != "cpu" and not singly:
        import torch_xla

        torch_xla.sync()
    return {name: value.detach().cpu() for name, value in found.items()}


def find_largest_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Of all tensors, relative to the largest number of each."""
    assert found.keys() == wanted.keys()
    return max(
        float((found[name].double() - value.double()).abs().max() / value.double().abs().max())
        for name, value in wanted.items()
    )


def loop_in_numpy(name: str, inputs: DeltaInputs | DplrInputs, start: np.ndarray, b: int, h: int):
    """Outputs [T, V] and the last state [K, V] of one example and head, as the papers write it."""
    x = {key: np.asarray(value[b]) for key, value in list_tensors(inputs).items()}
    x = {key: value[:, min(h, value.shape[1] - 1)] for key, value in x.items()}
    one, outputs, state = np.eye(K), [], start.copy()
    for t in range(len(x["q"])):
        if name == "rwkv7":
            transition = np.diag(np.exp(x["g"][t])) + np.outer(x["a"][t], x["b"][t])
            state = (state.T @ transition + np.outer(x["v"][t], x["k"][t])).T
        else:
            gate = np.broadcast_to(np.exp(x["g"][t]), K)
            factors = [one - np.outer(x["k"][j], x["erase"][j] * x["k"][j]) for j in rows(t, x)]
            state = np.diag(gate) @ state
            for j, factor in zip(rows(t, x), factors, strict=True):
                state = factor @ state + np.outer(x["k"][j], x["write"][j] * x["v"][j])
        outputs.append(state.T @ x["q"][t])
    return np.stack(outputs), state


def rows(t: int, x: dict[str, np.ndarray]) -> range:
    """Places of k and v that belong to a token."""
    steps = len(x["k"]) // len(x["q"])
    return range(t * steps, (t + 1) * steps)
