"""In which order the axes of a parameter lie on the device, where files show another one."""

from __future__ import annotations

from torch import Tensor, nn

_MARK = "file_order"


def mark_file_orders(model: nn.Module) -> None:
    """Let each parameter that lies in an order of its own say so: what units it has depends on it.

    A module tells by `file_order`, the permutation that gives its weight as files show it.
    """
    for module in model.modules():
        order = getattr(module, _MARK, None)
        if order is not None:
            setattr(module._parameters["weight"], _MARK, order)


def view_as_in_files(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A view of a tensor of the parameter's shape, such as its gradient, by the axes of files."""
    order = getattr(parameter, _MARK, None)
    return tensor if order is None else tensor.permute(order)
