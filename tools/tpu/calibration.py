"""Steps whose speed others have published, beside what the compiler says of them.

Nothing here was run by this project: speeds are their authors', cycles are the compiler's of a step
of the same model, batch and device. docs/tpu_compiler.md shows the same table, a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils.generations import GENERATIONS


@dataclass(frozen=True)
class PublishedStep:
    """A published speed and two figures of the compiler.

    Attributes:
      examples: of a step on one device, a core of v3.
      per_s: images a second of one device, the least and the most that the source allows.
      estimate: Mcycles of the step, compiled for the device.
      bundles: the same by bundles, waits for DMA included.
      source: where the speed, or the time that it follows from, is published.
      program: what was compiled.
    """

    name: str
    generation: str
    examples: int
    per_s: tuple[float, float]
    estimate: float
    bundles: float
    source: str
    program: str

    @property
    def step_ms(self) -> tuple[float, float]:
        """Published time of a step, the shortest first."""
        return 1e3 * self.examples / self.per_s[1], 1e3 * self.examples / self.per_s[0]

    def get_ratios(self, mcycles: float) -> tuple[float, float]:
        """Published time over the time of so many cycles."""
        of_cycles = mcycles / GENERATIONS[self.generation].clock_ghz
        return self.step_ms[0] / of_cycles, self.step_ms[1] / of_cycles


_JAX = "plain JAX, by an earlier reader that left strided transfers out"
PUBLISHED = (
    PublishedStep(
        name="big_vision ViT-S/16", generation="v3", examples=128, per_s=(566, 660),
        estimate=172.07, bundles=110.35, program=_JAX,
        source="github.com/google-research/big_vision, its vit_s16_i1k.py: 6-7h for 90 epochs "
        "of train[:99%] on a TPU-v3-8",
    ),
    PublishedStep(
        name="flax ResNet-50", generation="v3", examples=128, per_s=(1011, 1011),
        estimate=130.30, bundles=95.82, program=_JAX,
        source="github.com/google/flax, examples/imagenet/README.md: 125100 steps of 1024 in 4.4h "
        "on a TPU v3-8",
    ),
)  # fmt: skip


def find_range(kind: str) -> tuple[float, float]:
    """The least and the largest ratio of published time and cycles.

    Args:
      kind: `estimate` or `bundles`.
    """
    ratios = [ratio for one in PUBLISHED for ratio in one.get_ratios(getattr(one, kind))]
    return min(ratios), max(ratios)


def describe_calibration() -> str:
    """What the table says, in a sentence."""
    texts = ("{:.2f} to {:.2f}".format(*find_range(kind)) for kind in ("estimate", "bundles"))
    estimate, bundles = texts
    return (
        f"{len(PUBLISHED)} steps of published speed took {estimate} times their estimate and "
        f"{bundles} times their bundles with DMA"
    )
