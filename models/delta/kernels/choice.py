"""Chooses between Pallas kernels and XLA's form by the shapes of a layer's inputs.

A pure function of numbers, so that the same shape has the same form in every step, in training, in
generation and where a step is compiled for an absent TPU. Both forms of each sort of work were
compiled and their bundles counted; the pairs, their commands, date and versions stand in
docs/results_delta.md. Work that was not counted is XLA's.
"""

from __future__ import annotations

from dataclasses import dataclass

# Rules by their gates: all of a head; g of channels; g, erase and write of channels.
HEAD, CHANNEL, CHANNELS = "gates of heads", "gates of channels", "all gates of channels"
STEP, ATTENTION = "a step of decoding", "attention"
# Rules that the fused kernels compute, by which of g, erase and write are of channels.
FORMS = {(False, False, False): HEAD, (True, False, False): CHANNEL, (True, True, True): CHANNELS}


@dataclass(frozen=True)
class Work:
    """The work of one device for a layer."""

    form: str  # a rule by its gates, a step or attention
    chip: str  # the TPU's generation; empty if unknown
    dtype: str  # of values, such as bfloat16
    states: int  # examples x heads, of values or queries
    widths: tuple[int, int]  # channels of a head of keys and of one of values
    # Of a sequence, in whole chunks where there are some; updates of a token count each
    tokens: int = 1
    chunk: int = 0  # tokens of a chunk; 0 for work without chunks
    keeps: bool = False  # a backward pass follows

    def __str__(self) -> str:
        keys, values = self.widths
        chip, end = self.chip or "an unknown TPU", " and gradients" if self.keeps else ""
        sizes = f"{self.states} heads of {keys} and {values} channels, {self.tokens} tokens"
        return f"{self.form} on {chip}: {sizes} of {self.dtype}{end}"


@dataclass(frozen=True)
class Fact:
    """Sizes from which on kernels cost less, as in all larger pairs that were counted."""

    form: str
    chips: tuple[str, ...]
    # tokens, states: at least
    tokens: int = 1
    states: int = 1
    multiple: int = 1  # of tokens: kernels pad a sequence to whole blocks, and XLA's form does not
    keeps: bool | None = None  # with a backward pass, or without one; None: both
    widths: tuple[tuple[int, int], ...] = ((128, 128),)
    chunks: tuple[int, ...] = (0,)
    dtypes: tuple[str, ...] = ("bfloat16",)

    def holds(self, work: Work) -> bool:
        """Return whether kernels cost less for this work."""
        is_large = work.tokens >= self.tokens and work.states >= self.states
        is_whole = is_large and work.tokens % self.multiple == 0
        is_meant = work.form == self.form and self.keeps in (None, work.keeps)
        has_types = work.chip in self.chips and work.dtype in self.dtypes
        has_sizes = work.widths in self.widths and work.chunk in self.chunks
        return is_whole and is_meant and has_types and has_sizes


FACTS: tuple[Fact, ...] = (
    Fact(HEAD, ("v5e",), tokens=64, states=4, chunks=(64,)),
    Fact(HEAD, ("v5e",), tokens=128, states=4, chunks=(128,)),
    Fact(HEAD, ("v6e",), tokens=128, states=4, keeps=True, chunks=(64,)),
    Fact(HEAD, ("v6e",), tokens=2048, states=32, chunks=(128,)),
    Fact(HEAD, ("v5p",), tokens=2048, states=32, keeps=True, chunks=(64,)),
    Fact(CHANNEL, ("v5e",), tokens=128, states=4, chunks=(64,)),
    Fact(CHANNEL, ("v6e",), tokens=128, states=4, keeps=True, chunks=(64,)),
    Fact(CHANNEL, ("v5e",), tokens=8192, states=32, chunks=(128,)),
    Fact(STEP, ("v5e",), states=64, dtypes=("bfloat16", "float32")),
    Fact(STEP, ("v6e",), states=1024),
    Fact(
        ATTENTION,
        ("v5e",),
        tokens=512,
        states=16,
        multiple=512,
        keeps=False,
        dtypes=("bfloat16", "float32"),
    ),
    Fact(ATTENTION, ("v6e",), tokens=512, states=16, multiple=512, keeps=False),
    Fact(
        ATTENTION, ("v5e",), tokens=1024, states=8, multiple=512, keeps=False, widths=((256, 256),)
    ),
    # Scores of fewer heads stay on the chip in XLA's form, too.
    Fact(ATTENTION, ("v5e",), tokens=512, states=128, multiple=512, keeps=True),
    Fact(ATTENTION, ("v5e",), tokens=1024, states=16, multiple=512, keeps=True),
    Fact(ATTENTION, ("v5e",), tokens=2048, states=16),
)


def is_cheaper(work: Work) -> bool:
    """Return whether kernels cost fewer cycles than XLA's form."""
    return any(fact.holds(work) for fact in FACTS)
