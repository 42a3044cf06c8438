"""`ModuleRanges`: names the forward pass of each module in a trace of torch.profiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

RANGE = "module|"


class ModuleRanges:
    """While entered, opens a range in the trace for each call of a module that has a name.

    It adds no operation, so that no bit changes.
    """

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self._names = names
        self._open: list[torch.profiler.record_function] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> ModuleRanges:
        # Of all modules alike: some models compute other things if a module has own hooks.
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, _: object) -> None:
        if module in self._names:
            self._open.append(torch.profiler.record_function(RANGE + self._names[module]))
            self._open[-1].__enter__()

    def _end(self, module: nn.Module, *_: object) -> None:
        if module in self._names:
            self._open.pop().__exit__(None, None, None)
