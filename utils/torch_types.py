"""Types that torch leaves out: of differentiation rules, lists of modules, and mixins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

ModuleT = TypeVar("ModuleT", bound=nn.Module)
P = ParamSpec("P")  # arguments of a function, and its result
T = TypeVar("T")


class Ctx(FunctionCtx):
    """What a rule's `forward` keeps for its `backward`: tensors, and attributes of any type."""

    if TYPE_CHECKING:
        saved_tensors: tuple[Tensor, ...]
        needs_input_grad: tuple[bool, ...]

        def save_for_backward(self, *tensors: Tensor | None) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...


class DifferentiationRule(torch.autograd.Function):
    """A function of tensors with its own `forward(ctx, ...)` and `backward(ctx, *gradients)`."""

    if TYPE_CHECKING:
        apply: Callable[..., Any]
        forward: Callable[..., Any]
        backward: Callable[..., Any]


if TYPE_CHECKING:
    Mixin = Any  # base of a class that is mixed into classes of torch and timm

    class ModuleListOf(nn.ModuleList, Generic[ModuleT]):
        """A list of modules of one class."""

        def __init__(self, modules: Iterable[ModuleT] = ()) -> None: ...

        def __iter__(self) -> Iterator[ModuleT]: ...

        # pyrefly: ignore[bad-override]  # slices, which the base also takes, are not used
        def __getitem__(self, index: int) -> ModuleT: ...
else:
    Mixin = object
    ModuleListOf = nn.ModuleList
