"""Gradients of convolutions through the CPU runtime against float64; run in a child of its own.

    python -m tests.support.convolutions

A fault of a kernel may damage the heap and kill the process: hence the child. Prints a line for
each layer whose gradients are wrong.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from utils.config.execution import RuntimeSection
from utils.runtime.base import Runtime
from utils.runtime.launcher import create_runtime

# Channels in and out, side of the image, arguments: narrow layers beside wide enough ones.
_POINTWISE = [
    (4, 8, 8, {"stride": 2}),
    (3, 16, 64, {"stride": 2}),
    (12, 8, 64, {"stride": 2, "bias": False}),
    (5, 7, 12, {"stride": 3}),
    (4, 8, 16, {"stride": (1, 2)}),
    (4, 8, 16, {"stride": (2, 1)}),
    (1, 8, 8, {"stride": 2}),
    (4, 8, 9, {"stride": 2}),
    (4, 8, 8, {"stride": 2, "padding": 1}),
    (4, 8, 8, {"stride": 2, "dilation": 2}),
    (4, 8, 8, {}),
    (16, 8, 8, {"stride": 2}),
    (8, 8, 8, {"stride": 2, "groups": 2}),
    (4, 4, 8, {"stride": 2, "groups": 4}),
]
_WIDE_KERNELS = [
    (4, 8, 8, {"stride": 2, "padding": 1}),
    (4, 4, 8, {"padding": 1, "groups": 4}),
    (12, 8, 8, {"padding": 2, "dilation": 2}),
]
_TRANSPOSED = [
    (8, 4, 32, {"kernel_size": 1, "stride": 2, "output_padding": 1}),
    (4, 8, 8, {"kernel_size": 2, "stride": 2}),
    (4, 8, 8, {"kernel_size": 3, "stride": 2, "padding": 1}),
]
_BATCH, _REPEATS = 8, 6
# Of a gradient's norm: each factor is rounded, and so are sums of up to 8 * 32 * 32 products.
_TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}


def main() -> None:
    """Print what is wrong with each layer, precision, layout and number of threads."""
    for threads, precision in ((1, "fp32"), (2, "fp32"), (2, "bf16")):
        section = RuntimeSection(device="cpu", precision=precision, num_threads=threads)
        runtime = create_runtime(section)
        for layer, images in list_layers():
            _check(runtime, layer, images)
    compiled = RuntimeSection(device="cpu", compile=True, compile_backend="aot_eager")
    layer, images = next(list_layers())
    _check(create_runtime(compiled), _Model(layer), images)


class _Model(nn.Module):
    """A layer within a model: torch.compile leaves a bare layer as it is."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images)


def list_layers() -> Iterator[tuple[nn.Module, Tensor]]:
    """Layers and images [B, C, H, W] for them, whose channels lie last and then first."""
    torch.manual_seed(0)
    for *shape, side, kwargs in _POINTWISE:
        yield from _vary(nn.Conv2d(*shape, 1, **kwargs), shape[0], side, side)
    for *shape, side, kwargs in _WIDE_KERNELS:
        yield from _vary(nn.Conv2d(*shape, 3, **kwargs), shape[0], side, side)
    for *shape, side, kwargs in _TRANSPOSED:
        yield from _vary(nn.ConvTranspose2d(*shape, **kwargs), shape[0], side, side)
    yield from _vary(nn.Conv1d(4, 8, 1, stride=2), 4, 64)


def _vary(layer: nn.Module, channels: int, *sides: int) -> Iterator[tuple[nn.Module, Tensor]]:
    images = torch.randn(_BATCH, *sides, channels)
    yield layer, images.movedim(-1, 1)
    yield layer, images.movedim(-1, 1).contiguous()
    if len(sides) == 2:
        yield copy.deepcopy(layer).to(memory_format=torch.channels_last), images.movedim(-1, 1)


def _check(runtime: Runtime, layer: nn.Module, images: Tensor) -> None:
    outputs = copy.deepcopy(layer).double()(images.double())
    of_outputs = torch.randn(outputs.shape)
    exact = _differentiate(copy.deepcopy(layer).double(), images.double(), of_outputs.double())
    layer = runtime.accelerate(runtime.prepare(copy.deepcopy(layer)))
    section, worst = runtime.section, 0.0
    for _ in range(_REPEATS):
        gradients = _differentiate(layer, images, of_outputs, runtime)
        for gradient, wanted in zip(gradients, exact, strict=True):
            error = float((gradient.double() - wanted).norm() / wanted.norm())
            worst = max(worst, error if error == error else float("inf"))
    if worst > _TOLERANCES[section.precision]:
        print(f"{layer} {images.stride()} {section.precision} {section.num_threads}: {worst:.2e}")


def _differentiate(
    layer: nn.Module, images: Tensor, of_outputs: Tensor, runtime: Runtime | None = None
) -> list[Tensor]:
    """Gradients of the images and of all parameters."""
    images = images.detach().requires_grad_()
    layer.zero_grad()
    with runtime.autocast() if runtime else contextlib.nullcontext():
        loss = (layer(images) * of_outputs).sum()
    runtime.backward(loss, last=True) if runtime else loss.backward()
    return [images.grad, *(parameter.grad for parameter in layer.parameters())]


if __name__ == "__main__":
    main()
