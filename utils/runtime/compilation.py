"""`ModelCompiler`: torch.compile of a run's modules by a named backend, with a check that it works.

torch.compile silently runs a model uncompiled if an environment variable disables it, past its
limit of recompilations, or if the compiled module is not called. A run that configures a compiler
gets it, or an error.
"""

from __future__ import annotations

import functools
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from torch import Tensor, nn
from torch.fx import GraphModule

from utils.config.execution import RuntimeSection
from utils.errors import UserError
from utils.log import get_logger
from utils.runtime.choice import choose_compiler
from utils.torch_types import P, T

_SWITCH_ON = "unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE where they are set, "
_INSTALL = "install a C++ compiler that works, such as g++, or set CXX to one, "


class ModelCompiler:
    """The compiled modules of a process.

    `device` is the runtime's name; `count_fallbacks` returns the number of operations that ran on
    the host so far. `backend` of torch.compile is empty if nothing is compiled; it has compiled
    `graphs`.
    """

    def __init__(
        self, section: RuntimeSection, device: str, count_fallbacks: Callable[[], int]
    ) -> None:
        self.backend: str = choose_compiler(section, device) if section.compile else ""
        self.graphs = 0
        self._device, self._count_fallbacks = device, count_fallbacks
        self._waits_for_call = False

    def attach(self, module: nn.Module) -> None:
        """Compile a module's calls, if the run has a compiler."""
        if not self.backend:
            return
        import torch._dynamo

        # Else every shape beyond the limit would silently run uncompiled.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        if (self._device, self.backend) == ("cpu", "inductor"):
            # PyTorch 2.9 looks cached code up without the width of this processor's vectors: with a
            # shared cache, AVX2 (or ATEN_CPU_CAPABILITY=avx2) would run code for AVX-512 and
            # silently compute wrong values.
            from torch._inductor import config, cpu_vec_isa

            if config.cpp.simdlen is None:
                config.cpp.simdlen = cpu_vec_isa.pick_vec_isa().bit_width()
        compiled = torch.compile(module._call_impl, backend=self._compile_graph)
        module._compiled_call_impl = functools.partial(self._first_call, module, compiled)
        self._waits_for_call = True

    def end_step(self) -> None:
        """Raise a UserError after the first step if no compiled module was called in it."""
        if self._waits_for_call:
            self._refuse("no compiled module was called in the first step", _SWITCH_ON)

    def _compile_graph(
        self, graph: GraphModule, inputs: list[Tensor]
    ) -> Callable[..., Sequence[Tensor]]:
        """Compile by the backend, and count the graph if it does not raise."""
        from torch._dynamo.backends.registry import lookup_backend

        compiled = lookup_backend(self.backend)(graph, inputs)
        self.graphs += 1
        return compiled

    def _first_call(
        self, module: nn.Module, compiled: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Compile a module by its first call; raise a UserError if it was not compiled whole."""
        import torch._dynamo

        name = type(module).__name__
        graphs, fallbacks, began = self.graphs, self._count_fallbacks(), time.perf_counter()
        try:
            result = compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            text = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0]
            reason = textwrap.shorten(text, 200, placeholder=" ...")
            way_out = _INSTALL if "InvalidCxxCompiler" in reason else ""
            self._refuse(f"cannot compile {name} ({reason})", way_out, error)
        if self.graphs == graphs:
            self._refuse(f"compiled nothing of {name}, which ran as it is", _SWITCH_ON)
        if self._count_fallbacks() > fallbacks:
            self._refuse(f"left operations of {name} to the host", "")
        module._compiled_call_impl = compiled
        self._waits_for_call = False
        get_logger().info(
            "runtime.compile: %s compiled %s, %d graphs, first call after %.1f s",
            *(self.backend, name, self.graphs - graphs, time.perf_counter() - began),
        )
        return result

    def _refuse(self, what: str, way_out: str, cause: Exception | None = None) -> NoReturn:
        raise UserError(
            f"runtime.compile_backend ({self.backend!r}) {what}; {way_out}choose another backend, "
            "or remove runtime.compile"
        ) from cause
