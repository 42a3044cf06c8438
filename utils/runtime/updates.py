"""`Updates`: how an optimizer changes the weights that lie on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class UpdatedDevice(Protocol):
    """What updates ask of the device that the weights lie on."""

    def finish_step(self) -> None: ...

    def upload(self, values: Sequence[float]) -> Tensor: ...


class Updates:
    """All that a device has to say about an optimizer and its step.

    Attributes:
      scaler: of the loss, where gradients are computed in float16.
    """

    scaler: torch.amp.GradScaler | None = None

    def __init__(self, device: UpdatedDevice) -> None:
        self._device = device

    def get_arguments(self, optimizer_name: str) -> dict[str, bool]:
        """Arguments that make this optimizer fast and steady on the device."""
        return {}

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Create the optimizer's state before step 0, so that every step is alike.

        A step with zero gradients makes the state; parameters and state are then put back.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        saved = [p.detach().clone() for p in parameters]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, value in zip(parameters, saved, strict=True):
                parameter.copy_(value)
        _reset_state(optimizer)
        self._device.finish_step()

    def set_hyperparameters(
        self, optimizer: torch.optim.Optimizer, lrs: Sequence[float], decays: Sequence[float]
    ) -> None:
        """Give each parameter group its learning rate and weight decay of this step."""
        for group, lr, decay in zip(optimizer.param_groups, lrs, decays, strict=True):
            group["lr"] = lr
            group["weight_decay"] = decay

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a gradient scaler's factor out; nothing to do without a scaler."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the gradients and drop them, so that they are no outputs of the step."""
        if self.scaler is None:
            self._step(optimizer)
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()


def _reset_state(optimizer: torch.optim.Optimizer) -> None:
    """Take an optimizer's fresh state back to its start: moments, steps and counters at zero."""
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = _get_zero(value)
    for group in optimizer.param_groups:
        if "step" in group:
            group["step"] = _get_zero(group["step"])


def _get_zero(value: T) -> T:
    if isinstance(value, Tensor):
        return value.zero_()
    is_choice = isinstance(value, bool)  # such as Muon's of what it moves
    return type(value)(0) if isinstance(value, int | float) and not is_choice else value
