"""`ModelCompiler`: torch.compile of a run's modules by a named backend, and that it really happens.

torch.compile would rather run a model as it is than fail: switched off by an environment variable,
past its limit of recompilations, or where nobody calls the module that was compiled. A run that
asked for a compiler gets it, or one line that says why not.
"""

from __future__ import annotations

import functools
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from utils.errors import UserError
from utils.log import get_logger
from utils.runtime.choice import choose_compiler

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from utils.config.execution import RuntimeSection

_SHOWN = 200
# What torch says of itself behind a reason.
_TAIL = "Set TORCHDYNAMO_VERBOSE"
_SWITCH_ON = "unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE where they are set, "
_INSTALL = "install a C++ compiler that works, such as g++, or set CXX to one, "


class ModelCompiler:
    """The compiled modules of a process.

    Args:
      device: the runtime's name.
      count_fallbacks: operations so far that the device has left to the host.

    Attributes:
      backend: what torch.compile compiles with; empty: nothing is compiled.
      graphs: that the backend has compiled so far, forward passes and what torch.compile splits.
    """

    backend: str
    graphs: int

    def __init__(
        self, section: RuntimeSection, device: str, count_fallbacks: Callable[[], int]
    ) -> None:
        self.backend = choose_compiler(section, device) if section.compile else ""
        self.graphs = 0
        self._device = device
        self._count_fallbacks = count_fallbacks
        self._waits_for_call = False

    def attach(self, module: nn.Module) -> None:
        """Have a module's calls compiled, where the run asks for it."""
        if not self.backend:
            return
        import torch._dynamo

        # Beyond it every further shape would silently run uncompiled.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        if (self._device, self.backend) == ("cpu", "inductor"):
            _name_vector_width()
        compiled = torch.compile(module._call_impl, backend=self._compile_graph)
        module._compiled_call_impl = functools.partial(self._first_call, module, compiled)
        self._waits_for_call = True

    def end_step(self) -> None:
        """A step was made.

        Raises:
          UserError: none of the compiled modules had a part in it.
        """
        if self._waits_for_call:
            self._refuse("no compiled module was called in the first step", _SWITCH_ON)

    def _compile_graph(self, graph: GraphModule, inputs: Sequence[object]) -> Callable[..., Any]:
        """The backend, counted: what it raises has compiled nothing."""
        from torch._dynamo.backends.registry import lookup_backend

        compiled = lookup_backend(self.backend)(graph, inputs)
        self.graphs += 1
        return compiled

    def _first_call(
        self, module: nn.Module, compiled: Callable[..., Any], *args: object, **kwargs: object
    ) -> object:
        """Compile a module by its first call, and see that it was compiled.

        Raises:
          UserError: it was not, or not as a whole.
        """
        import torch._dynamo

        name = type(module).__name__
        graphs, fallbacks, began = self.graphs, self._count_fallbacks(), time.perf_counter()
        try:
            result = compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = textwrap.shorten(str(error).partition(_TAIL)[0], _SHOWN, placeholder=" ...")
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
            self.backend, name, self.graphs - graphs, time.perf_counter() - began,
        )  # fmt: skip
        return result

    def _refuse(self, what: str, way_out: str, cause: Exception | None = None) -> None:
        raise UserError(
            f"runtime.compile_backend ({self.backend!r}) {what}; {way_out}choose another backend, "
            "or leave runtime.compile out"
        ) from cause


def _name_vector_width() -> None:
    """Make the width of this processor's vectors part of inductor's cache keys.

    PyTorch 2.9 looks cached code up without it: code written for AVX-512 that a processor with AVX2
    (or ATEN_CPU_CAPABILITY=avx2) finds in a shared cache folder computes wrong values in silence.
    """
    from torch._inductor import config, cpu_vec_isa

    if config.cpp.simdlen is None:
        config.cpp.simdlen = cpu_vec_isa.pick_vec_isa().bit_width()
