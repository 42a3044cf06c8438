"""`Updates`: optimizer steps on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from utils.json_types import JsonValue

T = TypeVar("T")


class UpdatedDevice(Protocol):
    """The device operations that updates need."""

    def finish_step(self) -> None: ...

    def upload(self, values: Sequence[float]) -> Tensor: ...


class Updates:
    """Optimizer steps, with the differences between devices."""

    scaler: torch.amp.GradScaler | None = None  # of the loss, with float16

    def __init__(self, device: UpdatedDevice) -> None:
        self._device = device

    def get_arguments(self, optimizer_name: str) -> dict[str, bool]:
        return {}

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Create the optimizer's state before step 0, so that all steps are equal.

        A step with zero gradients creates it; then parameters are restored and the state is zeroed.
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
        # Moments, steps and counters back to zero.
        for state in (*optimizer.state.values(), *optimizer.param_groups):
            keys = ("step",) if "params" in state else tuple(state)
            state.update({key: _get_zero(state[key]) for key in keys if key in state})
        self._device.finish_step()

    def set_hyperparameters(
        self, optimizer: torch.optim.Optimizer, lrs: Sequence[float], decays: Sequence[float]
    ) -> Tensor | None:
        """Set each parameter group's learning rate and weight decay of this step.

        Returns:
          Those that the optimizer takes from the device, for `apply`; None if it takes none.
        """
        for group, lr, decay in zip(optimizer.param_groups, lrs, decays, strict=True):
            group["lr"] = lr
            group["weight_decay"] = decay
        return None

    def place_rates(self, optimizer: torch.optim.Optimizer, rates: Tensor | None) -> None:
        """Give the optimizer what `set_hyperparameters` uploaded; part of the step's graph."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove a gradient scaler's factor, if there is a scaler."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def apply(self, optimizer: torch.optim.Optimizer, rates: Tensor | None = None) -> None:
        """Apply the gradients and drop them, so that they are not outputs of the step.

        Args:
          rates: result of `set_hyperparameters`, which set the rest.
        """
        self.place_rates(optimizer, rates)
        if self.scaler is None:
            self._step(optimizer)
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()


def _get_zero(value: Tensor | JsonValue) -> Tensor | JsonValue:
    if isinstance(value, Tensor):
        return value.zero_()
    is_choice = isinstance(value, bool)  # such as a choice of Muon
    return type(value)(0) if isinstance(value, int | float) and not is_choice else value
