"""`StepWatch`: counts numbers that are not finite in outputs and gradients, in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from utils.json_types import JsonObject
    from utils.runtime.base import Runtime


@dataclass(frozen=True)
class Check:
    """One output or gradient; the counts are on the device."""

    phase: str  # forward or backward
    module: str  # which computed it
    what: str  # output; gradient of its input, or of a parameter
    call: int  # of the module in this step, from 1
    bad: Tensor  # [4]: NaN, infinite, all of them, and not finite among the module's inputs


@dataclass
class _Value:
    """A tensor with a gradient: which module made it, and which read it last."""

    tensor: Tensor  # kept, so that no other one gets its id
    made_by: str = ""
    read_by: str = ""


@dataclass
class StepWatch:
    """While entered, checks every module's outputs and every gradient; `names`: of the modules.

    Nothing is read from the device before `read`.
    """

    names: Mapping[nn.Module, str]
    checks: list[Check] = field(default_factory=list)
    _values: dict[int, _Value] = field(default_factory=dict)
    _calls: Counter[str] = field(default_factory=Counter)
    _handles: list[RemovableHandle] = field(default_factory=list)

    def __enter__(self) -> StepWatch:
        # Of all modules alike: some models compute other things if a module has own hooks.
        self._handles = [
            register_module_forward_pre_hook(self._begin_module),
            register_module_forward_hook(self._end_module),
        ]
        for module, name in self.names.items():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    note = partial(self._note_parameter, name, key)
                    self._handles.append(parameter.register_hook(note))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._values.clear()

    def read(self, runtime: Runtime) -> list[JsonObject]:
        """Return the checks that found something, in their order."""
        if not self.checks:
            return []
        counts = runtime.fetch(torch.stack([check.bad for check in self.checks])).tolist()
        return [
            {
                **{name: getattr(check, name) for name in ("phase", "module", "what", "call")},
                **dict(zip(("nan", "infinite", "of", "bad_inputs"), map(int, row), strict=True)),
            }
            for check, row in zip(self.checks, counts, strict=True)
            if row[0] + row[1]
        ]

    def _begin_module(self, module: nn.Module, inputs: object) -> None:
        name = self.names.get(module)
        if name is None:
            return
        self._calls[name] += 1
        for tensor in iterate_tensors(inputs):
            value = self._follow(tensor)
            if value is not None:
                value.read_by = name

    def _end_module(self, module: nn.Module, inputs: object, outputs: object) -> None:
        name = self.names.get(module)
        if name is None:
            return
        self._add("forward", name, "output", list(iterate_tensors(outputs)), inputs)
        for tensor in iterate_tensors(outputs):
            value = self._follow(tensor)
            if value is not None:
                # A module that returns its input has not used it: what comes after it does.
                value.made_by, value.read_by = name, ""

    def _follow(self, tensor: Tensor) -> _Value | None:
        """Watch the gradient of a tensor, if it gets one."""
        if not tensor.requires_grad or tensor.is_leaf:
            return None
        value = self._values.get(id(tensor))
        if value is None:
            value = self._values[id(tensor)] = _Value(tensor)
            tensor.register_hook(partial(self._note_gradient, value))
        return value

    def _note_gradient(self, value: _Value, gradient: Tensor) -> None:
        name, what = value.read_by, "gradient of its input"
        if not name:
            name, what = f"after {value.made_by}", f"gradient of the output of {value.made_by}"
        self._add("backward", name, what, [gradient])

    def _note_parameter(self, name: str, key: str, gradient: Tensor) -> None:
        self._add("backward", name, f"gradient of {key}", [gradient])

    @torch.no_grad()
    def _add(
        self, phase: str, name: str, what: str, tensors: list[Tensor], inputs: object = ()
    ) -> None:
        counts = count_bad(tensors)
        if counts is not None:
            own = count_bad(list(iterate_tensors(inputs)))
            sums = own[:2].sum().reshape(1) if own is not None else torch.zeros_like(counts[:1])
            call = self._calls[name] if phase == "forward" else 0
            self.checks.append(Check(phase, name, what, call, torch.cat([counts, sums])))


def count_bad(tensors: list[Tensor]) -> Tensor | None:
    """Count NaN, infinite and all numbers, float32 [3] on the device; None without floats."""
    counts = [
        torch.stack(
            [
                tensor.isnan().sum().float(),
                tensor.isinf().sum().float(),
                torch.full((), float(tensor.numel()), device=tensor.device),
            ]
        )
        for tensor in tensors
        if tensor.is_floating_point()
    ]
    return torch.stack(counts).sum(0) if counts else None


def iterate_tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors of a module's inputs or outputs, however they are nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iterate_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iterate_tensors(item)
