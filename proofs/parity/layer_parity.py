"""Compares a model's layers on two backends."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.patches.choice import patch_for
from tools.weights.load_model import load_trained
from tools.weights.sample_images import read_images
from utils.config.execution import RuntimeSection
from utils.config.sections import ModelSection
from utils.errors import UserError
from utils.programs import require_at_least
from utils.runtime.launcher import create_runtime

if TYPE_CHECKING:
    from utils.runtime.base import Runtime

EXIT_DIFFERENT = 1
WHOLE = "(whole model)"  # what it does outside of its modules shows nowhere else
_KEPT_BYTES = 1 << 29  # of a side's tensors at a time: each part is a graph of its own on XLA
_BACKENDS = ("cpu", "cuda", "xla")
_PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class LayerCall:
    """One call of a module: what it was given and what it gave, on the host."""

    name: str  # of the module, with `#2` behind it where it is called a second time
    kind: str  # its class
    inputs: tuple[Tensor, ...]
    output: Tensor


@dataclass(frozen=True)
class LayerDifference:
    """How far two sides are apart at one call, relative to the largest value."""

    name: str
    kind: str
    # none where one side computes a part of it alone, as patches do for a head's tokens
    drift: float | None
    own: float

    def show(self) -> str:
        """Format a line of a table."""
        drift = "in part" if self.drift is None else f"{self.drift:.1e}"
        return f"{self.name:<44} {self.kind:<24} {drift:>9} {self.own:>9.1e}"


class WatchedModel:
    """A model on a backend, whose calls can be watched.

    Args:
      model: is copied.
      patched: whether it is rewritten for the backend's compiler.
    """

    def __init__(self, runtime: Runtime, model: nn.Module, *, patched: bool = True) -> None:
        self.runtime = runtime
        self.model = deepcopy(model)
        patch_for(runtime, ModelSection(xla_patches=patched), self.model)
        runtime.prepare(self.model)

    def watch(self, images: Tensor, wanted: Collection[str] | None = None) -> list[LayerCall]:
        """Return calls of modules with tensors, inner ones first, the whole model last.

        Args:
          wanted: names of the calls whose tensors are kept; None: all.

        # host read: one for all batches
        """
        seen: list[tuple[str, nn.Module, tuple[Tensor, ...], Tensor]] = []

        def note(call: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if wanted is None or call in wanted:
                # What comes later may work in place on either of them.
                kept = tuple(tensor.clone() for tensor in inputs)
                seen.append((call, module, kept, output.clone()))

        self._follow(images, note)
        tensors = {
            f"{n}.in{i}": tensor for n, s in enumerate(seen) for i, tensor in enumerate(s[2])
        }
        tensors |= {f"{n}.out": s[3] for n, s in enumerate(seen)}
        host = self.runtime.fetch_all(tensors)
        calls = []
        for number, (name, module, inputs, _) in enumerate(seen):
            given = tuple(host[f"{number}.in{i}"] for i in range(len(inputs)))
            calls.append(LayerCall(name, type(module).__name__, given, host[f"{number}.out"]))
        return calls

    def measure_calls(self, images: Tensor) -> dict[str, int]:
        """Return the bytes of each call's inputs and output, of which nothing is kept."""
        sizes: dict[str, int] = {}

        def note(call: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            sizes[call] = sum(
                tensor.numel() * tensor.element_size() for tensor in (*inputs, output)
            )

        self._follow(images, note)
        return sizes

    def _follow(self, images: Tensor, note: Callable[..., None]) -> None:
        """Run the model and pass each call of a module with tensors to `note`, by its name."""
        names = {id(module): name or WHOLE for name, module in self.model.named_modules()}
        times: Counter[str] = Counter()

        def watch(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            if is_plain(inputs) and is_plain((output,)):
                name = names[id(module)]
                times[name] += 1
                note(name if times[name] == 1 else f"{name}#{times[name]}", module, inputs, output)

        hooks = [module.register_forward_hook(watch) for module in self.model.modules()]
        try:
            self._call(self.model, (images,))
        finally:
            for hook in hooks:
                hook.remove()

    def repeat(self, calls: Sequence[LayerCall]) -> dict[str, Tensor]:
        """Outputs of these modules, each by itself, given the inputs of other calls."""
        results = {}
        for call in calls:
            name = call.name.partition("#")[0]
            module = self.model if name == WHOLE else self.model.get_submodule(name)
            results[call.name] = self._call(module, call.inputs)
        return self.runtime.fetch_all(results)

    def _call(self, module: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        if self.runtime.section.precision == "fp32":  # of a side that computes in half of it
            inputs = [tensor.float() for tensor in inputs]
        with torch.no_grad(), self.runtime.autocast():
            return module(*(self.runtime.tensor_to_device(tensor) for tensor in inputs))


def find_differences(
    a: WatchedModel, b: WatchedModel, images: Tensor, kept_bytes: int = _KEPT_BYTES
) -> list[LayerDifference]:
    """Compare every call that both sides make, in the order of side A.

    The sides run once for each part of the calls, whose tensors alone are held.

    Args:
      kept_bytes: of tensors of one side that are held at a time.
    """
    differences: list[LayerDifference] = []
    for part in split_calls(a.measure_calls(images), kept_bytes):
        calls, others = a.watch(images, part), {call.name: call for call in b.watch(images, part)}
        shared = [call for call in calls if call.name in others]
        alone = b.repeat(shared)
        differences += [
            LayerDifference(
                call.name,
                others[call.name].kind,
                measure(call.output, others[call.name].output),
                measure(call.output, alone[call.name]),
            )
            for call in shared
        ]
    return differences


def split_calls(sizes: Mapping[str, int], kept_bytes: int) -> list[set[str]]:
    """Split calls, in their order, into parts that hold so many bytes or a single call."""
    parts: list[set[str]] = []
    room = 0
    for name, size in sizes.items():
        if not parts or size > room:
            parts.append(set())
            room = kept_bytes
        parts[-1].add(name)
        room -= size
    return parts


def is_plain(values: Sequence[object]) -> bool:
    """Return whether all values are tensors of floats."""
    return all(isinstance(value, Tensor) and value.is_floating_point() for value in values)


def measure(wanted: Tensor, found: Tensor) -> float:
    """Largest difference over the largest value; infinite where shapes differ or one is NaN."""
    if wanted.shape != found.shape:
        return float("inf")
    distance = (wanted.double() - found.double()).abs().max()
    scale = wanted.double().abs().max().clamp(min=1e-30)
    return float((distance / scale).nan_to_num(nan=float("inf")))


def compare(options: argparse.Namespace) -> int:
    """Show the differences and name the first; gives the exit code."""
    _check_flags(options)
    runtimes = {name: create_side_runtime(getattr(options, name), name) for name in ("a", "b")}
    trained = load_trained(options)
    images = read_images(trained, options.images, options.count, normalize=False)
    torch.manual_seed(0)
    a, b = (
        WatchedModel(runtimes[name], trained.model, patched=not options.no_patches)
        for name in ("a", "b")
    )
    differences = find_differences(a, b, images)
    for line in tell(differences, options.tolerance, everything=options.all):
        print(line)
    return EXIT_DIFFERENT if find_first(differences, options.tolerance) else 0


def find_first(differences: Sequence[LayerDifference], tolerance: float) -> LayerDifference | None:
    """Return the first call whose module differs by itself."""
    return next((difference for difference in differences if not difference.own <= tolerance), None)


def tell(
    differences: Sequence[LayerDifference], tolerance: float, *, everything: bool
) -> list[str]:
    """Format the layers as a table, and the verdict."""
    shown = [
        difference for difference in differences if everything or not difference.own <= tolerance
    ]
    lines = [f"{'layer':<44} {'class':<24} {'drift':>9} {'own':>9}"] if shown else []
    lines += [difference.show() for difference in shown]
    first = find_first(differences, tolerance)
    if first is not None:
        beyond = sum(not difference.own <= tolerance for difference in differences)
        return [
            *lines,
            f"first deviation: {first.name} ({first.kind}), own {first.own:.1e} above "
            f"{tolerance:g}; {beyond} of {len(differences)} layers",
        ]
    drift = max(difference.drift for difference in differences if difference.drift is not None)
    lines.append(
        f"no layer deviates by more than {tolerance:g}: {len(differences)} layers, the "
        f"largest drift {drift:.1e}"
    )
    return lines


def create_side_runtime(text: str, flag: str) -> Runtime:
    """Create the runtime of `xla` or `cpu:bf16`.

    Raises:
      UserError: no such backend or precision.
    """
    name, _, precision = text.partition(":")
    if name not in _BACKENDS or precision not in ("", *_PRECISIONS):
        raise UserError(
            f"unknown --{flag} {text!r}; use {', '.join(_BACKENDS)}, or one of them with :bf16"
        )
    settings = {"device": name, "precision": precision or "fp32"}
    return create_runtime(RuntimeSection.model_validate(settings))


def _check_flags(options: argparse.Namespace) -> None:
    require_at_least(1, options, "count")
    require_at_least(0, options, "tolerance")
    if options.a == options.b:
        raise UserError(f"--a and --b are both {options.a}, which is no comparison; change one")
