"""Steps whose speed others have published, beside what the compiler says of them.

Nothing here was run by this project: speeds are their authors', cycles are the compiler's of a step
of the same model, batch and device. docs/results_tpu_compiler.md shows the same table (a test).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from utils.generations import GENERATIONS
from utils.json_types import JsonObject


@dataclass(frozen=True)
class PublishedStep:
    """A published speed and two figures of the compiler."""

    name: str
    generation: str
    examples: int  # of a step on one device, a core of v3
    # Images a second of one device, the least and the most that the source allows
    per_s: tuple[float, float]
    estimate: float  # Mcycles of the step, compiled for the device
    bundles: float  # the same by bundles, waits for DMA included
    source: str  # where the speed, or the time that it follows from, is published
    program: str  # what was compiled
    # of the laboratory's child in JAX, where that writes the program
    request: JsonObject | None = None

    @property
    def step_ms(self) -> tuple[float, float]:
        """Published time of a step, the shortest first."""
        return 1e3 * self.examples / self.per_s[1], 1e3 * self.examples / self.per_s[0]

    def get_ratios(self, mcycles: float) -> tuple[float, float]:
        """Published time over the time of so many cycles."""
        of_cycles = mcycles / GENERATIONS[self.generation].clock_ghz
        return self.step_ms[0] / of_cycles, self.step_ms[1] / of_cycles


_JAX = "plain JAX, by an earlier reader that left strided transfers out"


def _cite_big_vision(
    name: str,
    speed: tuple[int, tuple[float, float]],
    mcycles: tuple[float, float],
    source: str,
    request: JsonObject | None = None,
) -> PublishedStep:
    """Create the row of a model of big_vision on v3, as `PublishedStep` names its figures.

    Args:
      speed: examples of a step, and the range of `per_s`.
      mcycles: `estimate` and `bundles`.
      source: file of its configurations, and what that says.
    """
    return PublishedStep(
        name=f"big_vision {name}",
        generation="v3",
        examples=speed[0],
        per_s=speed[1],
        estimate=mcycles[0],
        bundles=mcycles[1],
        program=f"plain JAX, by {'lab/jax_child.py' if request else 'proofs.jax_vision'}",
        source=f"github.com/google-research/big_vision, its {source}",
        request=request,
    )


PUBLISHED = (
    _cite_big_vision(
        "ViT-S/16",
        (128, (566, 660)),
        (171.94, 126.13),
        "vit_s16_i1k.py: 6-7h for 90 epochs of train[:99%] on a TPU-v3-8",
    ),
    PublishedStep(
        name="flax ResNet-50",
        generation="v3",
        examples=128,
        per_s=(1011, 1011),
        estimate=130.30,
        bundles=95.82,
        program=_JAX,
        source="github.com/google/flax, examples/imagenet/README.md: 125100 steps of 1024 in 4.4h "
        "on a TPU v3-8",
    ),
    _cite_big_vision(
        "Mixer-B/16",
        (32, (367, 378)),
        (62.12, 61.44),
        "mlp_mixer_i1k.py: 300 epochs of train[:99%] in 2h11m and 60 in 27m on a TPU v3-128",
    ),
    _cite_big_vision(
        "BiT-R50x1",
        (32, (464, 464)),
        (55.48, 59.55),
        "bit_i1k.py: 90 epochs of train[:99%] in 32 min on a TPU v3-128",
        {"form": "residual_step", "batch": 32, "blocks": [3, 4, 6, 3], "classes": 1000},
    ),
    PublishedStep(
        name="torch_xla ResNet-50",
        generation="v4",
        examples=64,
        per_s=(723.5, 882),
        estimate=92.41,
        bundles=67.30,
        program="timm's, unpatched, by tools.compile_for_tpu",
        source="github.com/pytorch/xla, pull requests 5720 and 6904: 1447 and 1764 images a second "
        "of a chip, two cores that share each operation of 128 images, float32",
    ),
)
_GUIDE = "github.com/jax-ml/jax, pallas/tpu/matmul.ipynb: times of 100 calls each, run on a v5e"


@dataclass(frozen=True)
class PublishedProduct:
    """A matrix product of bfloat16 whose time others have published, with its dispatch."""

    name: str
    size: int  # of both square matrices
    blocks: tuple[int, ...]  # of a Pallas kernel, rows, inner and columns; empty: XLA's own
    step_ms: float  # published time
    estimate: float | None  # Mcycles; None, because the compiler estimates no kernel
    bundles: float  # Mcycles, waits for DMA included
    generation: str = "v5e"
    source: str = _GUIDE

    def describe(self) -> JsonObject:
        """Describe the program for `lab/jax_child.py`."""
        form = "kernel_product" if self.blocks else "product"
        return {"form": form, "sizes": [self.size] * 3, "blocks": list(self.blocks)}

    def get_ratios(self, mcycles: float | None) -> tuple[float, ...]:
        """Published time over the time of so many cycles, if there are any."""
        clock = GENERATIONS[self.generation].clock_ghz
        return () if mcycles is None else (self.step_ms * clock / mcycles,)


_BLOCKS = (512, 1024, 1024)
PRODUCTS = (
    PublishedProduct("XLA, 4096", 4096, (), 0.8273, 1.0831, 1.0804),
    PublishedProduct("XLA, 8192", 8192, (), 6.0471, 9.5573, 8.7587),
    PublishedProduct("Pallas 512 x 1024 x 1024, 4096", 4096, _BLOCKS, 0.8891, None, 1.1291),
    PublishedProduct("Pallas 512 x 1024 x 1024, 8192", 8192, _BLOCKS, 6.0994, None, 8.8228),
    PublishedProduct("Pallas 128 x 128 x 128, 4096", 4096, (128,) * 3, 11.7715, None, 15.0820),
)


def find_range(
    kind: str, rows: Iterable[PublishedStep | PublishedProduct] = PUBLISHED
) -> tuple[float, float]:
    """Find the least and the largest ratio of published time and cycles.

    Args:
      kind: `estimate` or `bundles`.
    """
    ratios = [ratio for row in rows for ratio in row.get_ratios(getattr(row, kind))]
    return min(ratios), max(ratios)


def describe_calibration() -> str:
    """Summarise the table in a sentence."""
    texts = (
        "{:.2f} to {:.2f}".format(*find_range(kind, rows))
        for rows in (PUBLISHED, PRODUCTS)
        for kind in ("estimate", "bundles")
    )
    estimate, bundles, of_product, of_its_bundles = texts
    return (
        f"{len(PUBLISHED)} steps of published speed took {estimate} times their estimate and "
        f"{bundles} times their bundles with DMA, {len(PRODUCTS)} matrix products on v5e "
        f"{of_product} and {of_its_bundles} times"
    )
