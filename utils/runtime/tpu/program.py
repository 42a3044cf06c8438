"""`StepProgram`: a training step, traced once and compiled as one program of a TPU.

`torch.compile` of the same step splits at the backward pass and at the optimizer, and copies every
changed weight in a program of its own: 5 to 6 executions a step. So the step is traced as a whole,
with fake tensors. What it reads and changes without being given it (weights, moments, averages)
become arguments, changed ones also results, and their memory is handed over to the results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from utils.runtime.base import BatchLike, Numbers
from utils.runtime.tpu.products import use_general_products
from utils.torch_types import Ctx, DifferentiationRule, P, T

B = TypeVar("B", bound=BatchLike)
aten = torch.ops.aten


class TracedStep(NamedTuple):
    """A step as a graph without side effects.

    Attributes:
      graph: takes `state`, then the step's own tensors; returns its results, then new values of
        the changed state.
      state: tensors that the step reads without being given them.
      changed: positions in `state` of tensors that the step changes, in the order of the results.
      result: structure of the step's own results.
    """

    graph: fx.GraphModule
    state: list[Tensor]
    changed: list[int]
    result: pytree.TreeSpec


class StepProgram(Generic[B, Numbers, T]):
    """Calls a step's function as one program for each shape of its batch."""

    def __init__(self, function: Callable[[B, Numbers], T]) -> None:
        self._function = function
        self._programs: dict[tuple[tuple[torch.Size, torch.dtype], ...], _Compiled] = {}

    def __call__(self, batch: B, numbers: Numbers) -> T:
        tensors = list_tensors(batch, numbers)
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = compile_step(trace_step(self._function, batch, numbers))
        return program(tensors)


class _Compiled:
    def __init__(self, step: TracedStep, run: Callable[..., Sequence[Tensor]]) -> None:
        self._step, self._run = step, run

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        state = self._step.state
        results = self._run(*state, *tensors)
        own = len(results) - len(self._step.changed)
        for position, value in zip(self._step.changed, results[own:], strict=True):
            state[position].data = value
        return pytree.tree_unflatten(list(results[:own]), self._step.result)


def list_tensors(batch: BatchLike, numbers: Sequence[Tensor | None]) -> list[Tensor]:
    """List the tensors of a batch and of numbers, in a fixed order."""
    tensors: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    batch.map(keep)
    return tensors + [number for number in numbers if number is not None]


def trace_step(function: Callable[[B, Numbers], T], batch: B, numbers: Numbers) -> TracedStep:
    """Trace a step without running it."""
    tensors = list_tensors(batch, numbers)
    result: list[pytree.TreeSpec] = []

    def call(*given: Tensor) -> list[Tensor]:
        rest = iter(given)
        own_batch = batch.map(lambda _: next(rest))
        own = type(numbers)(*(None if number is None else next(rest) for number in numbers))
        with held, use_general_products():
            values, spec = pytree.tree_flatten(function(own_batch, own))
        result.append(spec)
        return values

    held = _HeldTensors(tensors[0].device)
    traced = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    state, graph = lift_state(traced)

    def call_without_effects(*given: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            return graph(*given)

    pure = make_fx(
        functionalize(call_without_effects, remove="mutations_and_views"),
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )(*(tensor.detach() for tensor in state), *tensors)
    return TracedStep(pure, state, return_changes(pure), result[0])


class _HeldTensors(TorchDispatchMode):
    """Gives a trace a fake of each tensor on the device that a step reads without being given it.

    The trace itself would run in-place operations on such a tensor alone, such as a step counter.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._type = device.type
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._replace, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _replace(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor) or tensor.device.type != self._type:
            return tensor
        if id(tensor) not in self._fakes:
            self._fakes[id(tensor)] = tensor, self._create_fake(tensor)
        return self._fakes[id(tensor)][1]

    def _create_fake(self, tensor: Tensor) -> Tensor:
        mode, fake_mode = get_proxy_mode(), detect_fake_mode()
        assert mode is not None and fake_mode is not None
        tracer: Any = mode.tracer
        name = f"held_{len(self._fakes)}"
        setattr(tracer.root, name, tensor)
        fake = fake_mode.from_tensor(tensor.detach())
        proxy = tracer.create_proxy("get_attr", name, (), {})
        track_tensor_tree(fake, proxy, constant=None, tracer=tracer)
        return fake


def recompute_apart(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose second call, in the backward pass, the compiler must not merge.

    Without a barrier it would see the same operations twice and keep the results of the first.
    """
    calls = itertools.count()

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        own: Any = args
        if next(calls):
            own = [_Barrier.apply(arg) if isinstance(arg, Tensor) else arg for arg in args]
        return function(*own, **kwargs)

    return call


class _Barrier(DifferentiationRule):
    """An identity across which the compiler moves nothing."""

    @staticmethod
    def forward(ctx: Ctx, tensor: Tensor) -> Tensor:
        return torch.ops.tpu._optimization_barrier([tensor])[0]

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> Tensor:
        return grad


def lift_state(traced: fx.GraphModule) -> tuple[list[Tensor], fx.GraphModule]:
    """Turn the tensors that a graph holds into its first arguments."""
    graph, state = traced.graph, dict[int, Tensor]()
    holders: dict[int, fx.Node] = {}
    first = next(iter(graph.nodes))
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = getattr(traced, str(node.target))
        key = id(tensor)  # one argument for a tensor that the trace holds under several names
        if key not in holders:
            with graph.inserting_before(first):
                holders[key] = graph.placeholder(f"state_{len(holders)}")
            state[key] = tensor
        node.replace_all_uses_with(holders[key])
        graph.erase_node(node)
    graph.lint()
    return list(state.values()), fx.GraphModule(torch.nn.Module(), graph)


def return_changes(graph_module: fx.GraphModule) -> list[int]:
    """Return new values of changed arguments instead of copying them; list the arguments."""
    graph = graph_module.graph
    nodes: list[Any] = list(graph.nodes)
    places = {node: n for n, node in enumerate(n for n in nodes if n.op == "placeholder")}
    changed: dict[int, fx.Node] = {}
    for node in nodes:
        if node.target is aten.copy_.default and node.args[0] in places:
            changed[places[node.args[0]]] = node.args[1]
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
    output = nodes[-1]
    output.args = ([*output.args[0], *changed.values()],)
    graph.lint()
    graph_module.recompile()
    return list(changed)


def compile_step(step: TracedStep) -> _Compiled:
    """Compile a traced step for this process's device."""
    from torch_tpu._internal.compile.compiler import StaticCompiler

    inputs = [node.meta["val"] for node in step.graph.graph.nodes if node.op == "placeholder"]
    compiled = StaticCompiler()(
        step.graph, inputs, donated_inputs=step.changed, module_name="train_step"
    )
    return _Compiled(step, compiled)
