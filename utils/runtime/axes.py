"""Orders of the axes of parameters that differ between device and files."""

from __future__ import annotations

from torch import Tensor, nn

_MARK = "file_order"


def mark_file_orders(model: nn.Module) -> None:
    """Copy `file_order` of modules, the permutation to the axes of files, to their weights.

    The units of a weight (rows of outputs) depend on it.
    """
    for module in model.modules():
        order = getattr(module, _MARK, None)
        if order is not None:
            setattr(module._parameters["weight"], _MARK, order)


def view_as_in_files(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return a view of a tensor like the parameter, such as its gradient, with files' axes."""
    order = getattr(parameter, _MARK, None)
    return tensor if order is None else tensor.permute(order)
