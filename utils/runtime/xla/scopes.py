"""Names that tell where an operation of a traced step comes from: `student|forward|blocks.3.attn`.

Set `XLA_HLO_DEBUG=1` before torch_xla is imported: then each operation carries the scope in which
it was recorded, and the compiler keeps it as `op_name`.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    # Inputs or outputs of a module; only tensors among them have gradients.
    ModuleValues: TypeAlias = "Tensor | Sequence[ModuleValues] | None"

_SCOPE = re.compile(r"(?:^|/)([a-z0-9]+)\|([a-z]+)\|([\w.]*?)\.\d+(?=/|$)")


class Origin(NamedTuple):
    """Where an operation comes from.

    Args:
      role: student, ema, teacher, loss, input, optimizer, gradients; empty: unknown.
      phase: forward or backward.
      path: the module's, such as `blocks.3.attn.qkv`.
    """

    role: str
    phase: str
    path: str


_ORIGIN = "_traced_as"  # attribute of a module: its role and its path; copies of it keep both
# The hook after a residual branch opens before the gradient of the branch's last layer.
_BRANCHES = {"drop_path1": "attn", "drop_path2": "mlp", "ls1": "attn", "ls2": "mlp"}


def read_origin(op_name: str) -> Origin:
    """Read the innermost scope of an operation's name."""
    scopes = _SCOPE.findall(op_name)
    if not scopes:
        return Origin("", "", "")
    role, phase, path = scopes[-1]
    block, _, last = path.rpartition(".")
    if phase == "backward" and last in _BRANCHES:
        path = f"{block}.{_BRANCHES[last]}" if block else _BRANCHES[last]
    return Origin(role, phase, path)


class ScopeLabels:
    """While entered, labels what models, by their roles, and the loop's phases record.

    Backward is labelled by hooks on tensors: they add no operation. It holds from the moment a
    module's output has its gradient to the moment its input has.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = roots
        self._local = threading.local()
        # Pushers of torch_xla, which keep a thread's scope while they live, by the thread.
        self._held: dict[int, object] = {}
        self._handles: list[RemovableHandle] = []
        self._labelled: list[nn.Module] = []

    def __enter__(self) -> ScopeLabels:
        for role, root in self._roots.items():
            self._watch(root, role)
        # Of all modules alike: a hook of a module's own would have it make an output that the step
        # does without.
        self._handles = [
            register_module_forward_pre_hook(self._begin_module),
            register_module_forward_hook(self._end_module),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self._labelled:
            vars(module).pop(_ORIGIN, None)  # a module of two models is in the list twice
        self.leave()
        # A scope may only be taken off by the thread that set it, and autograd's thread is out of
        # reach: its last one stays for ever.
        for pusher in self._held.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pusher))

    def enter(self, role: str, phase: str, path: str = "") -> None:
        """Label what this thread records from here on."""
        import torch_xla

        self.leave()
        self._local.name = (role, phase, path)
        label = f"{role}|{phase}|{path}"
        self._held[threading.get_ident()] = torch_xla._XLAC.profiler.scope_pusher(label)

    def leave(self) -> None:
        """Stop labelling."""
        self._held.pop(threading.get_ident(), None)

    def _watch(self, model: nn.Module, role: str) -> None:
        for path, module in model.named_modules():
            setattr(module, _ORIGIN, (role, path))
            self._labelled.append(module)

    def _begin_module(self, module: nn.Module, inputs: ModuleValues) -> None:
        """Before the forward pass of any module."""
        role, path = getattr(module, _ORIGIN, ("", ""))
        if not role:
            return
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        self._local.stack.append(getattr(self._local, "name", ("loss", "forward", "")))
        if path:
            self._label_backward(inputs, role, path.rpartition(".")[0])
        self.enter(role, "forward", path)

    def _end_module(self, module: nn.Module, _: ModuleValues, output: ModuleValues) -> None:
        """After the forward pass of any module."""
        role, path = getattr(module, _ORIGIN, ("", ""))
        if not role:
            return
        self._label_backward(output, role, path)
        self.enter(*self._local.stack.pop())

    def _label_backward(self, values: ModuleValues, role: str, path: str) -> None:
        """Label what the backward pass records from the moment that a value has its gradient."""

        def label(_: Tensor) -> None:
            self.enter(role, "backward", path)

        for value in values if isinstance(values, Sequence) else (values,):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(label)
