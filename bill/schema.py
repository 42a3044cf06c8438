"""The form of the tool's JSON: every figure with its unit and meaning.

`Report.model_json_schema()` gives it as JSON Schema; docs/tpu_compiler.md explains the figures.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from utils.json_types import JsonObject

SCHEMA_VERSION = 4


class Part(BaseModel):
    """A group of fields; nothing else may stand in it."""

    model_config = ConfigDict(extra="forbid")


class Buffer(Part):
    """One of the largest arrays in HBM."""

    name: str = Field(description="the state's tensor, or the module that makes it")
    kind: str = Field(description="argument or temporary")
    dtype: str
    shape: list[int]
    bytes: int = Field(description="without the padding of tiles")


class Memory(Part):
    """HBM of one device."""

    usable_bytes: int = Field(description="what a program may use of the device's HBM")
    argument_bytes: int | None = Field(None, description="state and batch")
    output_bytes: int | None = None
    alias_bytes: int | None = Field(None, description="outputs that take an argument's place")
    temp_bytes: int | None = Field(None, description="activations and scratch")
    peak_bytes: int = Field(
        description="arguments + outputs + temporaries - aliased; the compiler's own figure where "
        "the program does not fit"
    )
    largest: list[Buffer] = Field(default_factory=list)


class Interval(Part):
    """A bound, bundles and an estimate of the same thing."""

    lower: float = Field(description="by FLOPs and HBM bytes at the device's public limits")
    bundles: float | None = Field(
        None, description="by bundles and waits for DMA over the derived clock; None if not counted"
    )
    estimate: float = Field(
        description="by estimated cycles over the derived clock; what carries no estimate by its "
        "bundles, where they are counted"
    )


class Collective(Part):
    """What one kind of collective carries in a step, for one device."""

    kind: str
    dtype: str
    count: int
    bytes: int


class Group(Part):
    """Cost of a role: attention, MLP, norm, layout copies, optimizer, teacher, loss, input, ..."""

    role: str
    mcycles: float
    share: float = Field(description="of all estimated cycles")


class Cost(Part):
    """One of the most expensive operations."""

    module: str = Field(description="module path, such as blocks.3.attn.qkv; empty: none")
    owner: str = Field(description="student, teacher, loss, input, optimizer, gradients")
    phase: str = Field(description="forward or backward")
    operation: str = Field(description="PyTorch operation that it began as")
    instruction: str = Field(description="the compiler's name of the instruction")
    mcycles: float
    result: str = Field(description="type and shape of the largest result")


class Uncosted(Part):
    """Instructions that carry no estimate, by kind."""

    opcode: str
    count: int
    bytes: int = Field(
        description="of their results and operands in HBM; for asynchronous copies, moved"
    )
    first: str = Field(description="name of one of them")


class BundleRow(Part):
    """Operations of one role, one module or one name: millions of cycles in a step."""

    name: str
    runs: int = Field(description="executions in a step, loops by their trip counts")
    estimated_mcycles: float = Field(description="the compiler's; 0: it gives none")
    issued_mcycles: float = Field(description="bundles, one a cycle")
    empty_mcycles: float = Field(description="of these without an instruction")
    matrix_mcycles: float = Field(description="the busiest matrix unit takes rows")
    waited_mcycles: float = Field(description="behind the operation's own DMA, by the model")
    dma_bytes: int = Field(description="moved by the operations themselves")
    source: str = Field(
        "", description="of an operation: own listing, that of a twin, or the estimate in its place"
    )


class BundleReport(Part):
    """The step by its VLIW bundles: a count, with waits for memory under a stated model."""

    issued_mcycles: float = Field(description="bundles; estimates where there is no listing")
    empty_mcycles: float
    matrix_mcycles: float
    waited_mcycles: float
    with_dma_mcycles: float = Field(
        description="issued and waited, and never less than all bytes take"
    )
    guessed_mcycles: float = Field(description="estimates that stand for missing listings")
    unestimated_mcycles: float = Field(description="bundles and waits of what has no estimate")
    dma_bytes: int = Field(description="moved by operations themselves")
    async_bytes: int = Field(description="of copies between HBM and the chip beside operations")
    sources: dict[str, int] = Field(description="operations by where their cost is from")
    unknown: int = Field(description="branches and transfers that depend on data")
    model: str = Field(description="how waits are modelled")
    roles: list[BundleRow]
    modules: list[BundleRow] = Field(description="module paths, `*` for the number of a block")
    operations: list[BundleRow]


class Fault(Part):
    """A known fault found in the program."""

    kind: str
    count: int
    text: str
    mcycles: float | None = None


class LayoutCounter(Part):
    """A number and the first module it is found in."""

    value: float
    first: str = Field("", description="module or operator; empty without one")


class LayoutCounters(Part):
    """What the layout costs: counts of a step on one device."""

    layout_copies: LayoutCounter = Field(
        description="copies and transpositions that change a layout"
    )
    layout_mcycles: LayoutCounter = Field(description="their estimated cycles, in millions")
    padded_share: LayoutCounter = Field(
        description="of the bytes of all results in HBM with their tiles; first: the most padded"
    )
    float32_products: LayoutCounter = Field(description="matrix products with a float32 operand")
    host_ops: LayoutCounter = Field(
        description="operators without a lowering, which run on the host"
    )


class MicroBatches(Part):
    """A step split into equal micro-batches, whose gradients are added up."""

    parts: int
    examples: int = Field(description="of one micro-batch on a device")
    estimated_mcycles: float | None = Field(
        description="of the whole step, by bundles what has no estimate; None if it does not fit"
    )
    bundles_mcycles: float | None
    unestimated_mcycles: float = Field(description="of the estimate, by bundles: what has none")
    peak_bytes: int
    fits: bool
    graph: str = Field(description="hash of program, target and versions")
    probed: bool = Field(
        description="figures are a step's of one micro-batch, times the parts; memory and graph its"
    )
    chosen: bool = Field(description="the least cost")


class Report(Part):
    """The compiler's verdict on one training step: estimates, no measurement."""

    schema_version: int = SCHEMA_VERSION
    note: str = Field(description="how far to trust the figures")
    config: str
    flags: list[str] = Field(default_factory=list, description="further flags of the run")
    model: str
    target: str
    device: str = Field(description="as the compiler calls it; a core on v2, v3 and v4")
    chips: int = Field(description="devices that the step is partitioned over; 1: not at all")
    examples_per_chip: int
    unit: str = Field(description="what throughput counts: img, tokens, rows")
    example: dict[str, list[int]] = Field(
        description="shapes of one example's tensors on the host, by their names in the batch"
    )
    fits: bool
    memory: Memory
    estimated_mcycles: float | None = Field(None, description="one device, loops times their trips")
    bundles_mcycles: float | None = Field(
        None, description="bundles and waits for DMA, one device; None if not counted"
    )
    flops: float | None = Field(None, description="one device")
    hbm_bytes: int | None = Field(None, description="one device, by the memory space of each array")
    collective_bytes: int = Field(0, description="operands; they carry no estimated cycles")
    collectives: list[Collective] = Field(default_factory=list)
    step_ms: Interval | None = None
    units_per_s: Interval | None = Field(
        None, description="one device, in `unit`; lower: the time's lower bound"
    )
    mfu: Interval | None = Field(None, description="share of the device's peak")
    uncosted: list[Uncosted] = Field(default_factory=list)
    scalar_kernels: int = Field(0, description="single-number operations of their own, uncosted")
    groups: list[Group] = Field(default_factory=list)
    top: list[Cost] = Field(default_factory=list)
    bundles: BundleReport | None = Field(None, description="with --bundles")
    faults: list[Fault] = Field(default_factory=list)
    layout: LayoutCounters | None = Field(None, description="None where the program does not fit")
    max_batch_per_chip: int | None = Field(None, description="largest that fits, where searched")
    too_large_batch_per_chip: int | None = Field(
        None, description="the next one tried, which does not fit; None without one"
    )
    micro_batches: list[MicroBatches] = Field(
        default_factory=list, description="with --micro-batches; the other figures are the chosen's"
    )
    compile_s: float | None = None
    graph: str = Field(description="hash of program, target and versions")
    versions: dict[str, str]
    made: str = Field(description="date and time, UTC")
    git_commit: str | None = Field(None, description="of this program, with -dirty if changed")
    configuration: JsonObject = Field(
        default_factory=dict, description="the run's, resolved; none before schema_version 3"
    )
    comparison: JsonObject | None = Field(
        None, description="what gates said of it against the report of --compare"
    )
