"""The sections of where a run executes and where its results go."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from utils.config.devices import CompilerName, DeviceName, get_devices
from utils.config.metadata import ConfigSection, Devices, Resume, about

_NATIVE = Devices(get_devices("native"), "XLA compiles and lays out by itself; leave it out")
_NVIDIA = Devices(get_devices("tf32"), "it is a mode of NVIDIA GPUs; leave it out")
_SCALED = Devices(
    get_devices("fp16"),
    "its devices compute in bf16 with the range of fp32; use bf16",
    value="fp16",
)
_PRODUCTS = Devices(
    get_devices("matmul_precision"),
    "it is a mode of TPUs; leave it out (NVIDIA GPUs have runtime.tf32)",
)
_MESH = Devices(get_devices("mesh"), "a mesh is of XLA's devices; use process", value="spmd")


class RuntimeSection(ConfigSection):
    """Where it runs."""

    on_resume: ClassVar[Resume] = "warns"

    device: DeviceName = Field(
        "auto",
        description="auto: XLA (a TPU if there is one, else the CPU) where torch_xla is installed, "
        "else cuda where PyTorch sees a GPU, else cpu",
    )
    parallel: Literal["process", "spmd"] = Field(
        "process",
        description="process: a process for each device; spmd: a process for each host and one "
        "mesh over all devices",
        **about(devices=_MESH),
    )
    num_processes: int | None = Field(
        None,
        ge=1,
        description="processes that main.py starts on this host; none: as torchrun says, one for "
        "each GPU on cuda, else one",
    )
    cpu_processes: int | None = Field(
        None,
        ge=1,
        description="the same where it runs on the CPU alone; a TPU's chips and GPUs have a "
        "process each",
    )
    mesh_data: int | None = Field(
        None, ge=1, description="mesh devices along the batch; none: all that mesh_fsdp leaves"
    )
    mesh_fsdp: int = Field(
        1, ge=1, description="mesh devices that each parameter is sharded over (spmd)"
    )
    mesh_context: int = Field(
        1,
        ge=1,
        description="mesh devices that each sequence of tokens is dealt to (context parallelism)",
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        le=1e7,
        description="seconds after which a silent rank ends the whole group",
        **about(is_neutral=True),
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="compute type of matmuls under autocast; weights stay float32; fp16 scales "
        "the loss",
        **about(devices=_SCALED),
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="type in which gradients are summed over devices"
    )
    overlap: bool | None = Field(
        None,
        description="sum gradients while the backward pass runs (DDP); none: on cuda",
        **about(devices=_NATIVE),
    )
    compile: bool = Field(
        False,
        description="torch.compile of student and teachers; xla compiles whole steps without it",
    )
    compile_backend: CompilerName = Field(
        "auto",
        description="what runtime.compile compiles with; auto: openxla on xla, else inductor",
    )
    channels_last: bool = Field(
        False, description="weights in channels-last layout", **about(devices=_NATIVE)
    )
    tf32: bool = Field(
        False,
        description="let float32 matmuls and convolutions use TF32",
        **about(devices=_NVIDIA),
    )
    matmul_precision: Literal["default", "high", "highest"] = Field(
        "default",
        description="float32 products on a TPU: default, one pass of bf16; high, three of them; "
        "highest, six, as float32",
        **about(devices=_PRODUCTS),
    )
    compile_cache: str = Field(
        "auto",
        description="directory of compiled XLA graphs, one below it for each rank; auto: "
        "~/.cache/xla_graphs on a TPU, none elsewhere; empty: none",
        **about(is_place=True, is_neutral=True),
    )
    compile_cache_gib: float = Field(
        10.0,
        gt=0,
        description="size of a rank's compile cache above which old graphs are dropped",
        **about(is_neutral=True),
    )
    graph_budget: int = Field(
        8,
        ge=1,
        description="XLA graphs that the run may compile before it is stopped",
        **about(is_neutral=True),
    )
    num_threads: int = Field(
        0,
        ge=0,
        description="threads of PyTorch's CPU maths in each process; 0: the cores, shared out",
    )


class ProfileSection(ConfigSection):
    """A trace of some steps, for TensorBoard and Perfetto."""

    on_resume: ClassVar[Resume] = "free"

    steps: str = Field(
        "",
        pattern=r"^(\d+-\d+)?$",
        description="first-last step to trace, as 20-25; empty: none",
        **about(is_neutral=True),
    )


class QuantileSection(ConfigSection):
    """Quantiles of a run's step times, waits for input and gradient norms."""

    on_resume: ClassVar[Resume] = "free"

    epsilon: float = Field(
        0.01,
        ge=0.0005,
        le=0.05,
        description="relative error of the quantiles in sketches.json; another one on resume "
        "begins them anew",
        **about(is_neutral=True),
    )


class RunSection(ConfigSection):
    """Where results go and what is done with earlier ones."""

    on_resume: ClassVar[Resume] = "free"

    output_dir: str = Field(
        "runs",
        description="root of the run store, a directory or a URL such as gs://bucket/runs",
        **about(aliases=("output_dir",), is_place=True, is_neutral=True),
    )
    cache_dir: str = Field(
        "",
        description="where a run on a bucket is written first; empty: trainer/runs in the user's "
        "cache",
        **about(is_place=True, is_neutral=True),
    )
    experiment: str = Field(
        "",
        description="directory below it; empty: the config's file name",
        **about(is_neutral=True),
    )
    run_id: str = Field(
        "",
        description="directory below that; empty: time, seed and six digits",
        **about(is_neutral=True),
    )
    resume: str = Field(
        "",
        description="auto: continue the newest run of the experiment; or a run or checkpoint",
        **about(aliases=("resume",), is_place=True, is_neutral=True),
    )
    allow_changes: tuple[str, ...] = Field(
        (), description="keys, or patterns as optim.*, that may differ from the resumed run's"
    )
    init_from: str = Field(
        "",
        description="start a new run from the weights in a .safetensors, a .pth, an .npz of JAX, a "
        "run's directory or a checkpoint, or a shared model",
        **about(aliases=("init_from", "init-from"), is_place=True),
    )
    init_skip: tuple[str, ...] = Field(
        (),
        description="tensors that keep their start whatever init_from holds, as names or patterns: "
        "head.*",
    )
    init_rename: dict[str, str] = Field(
        default_factory=dict,
        description="name or pattern in init_from -> the model's: encoder.* -> blocks.*",
    )
    checkpoint_root: str = Field(
        "",
        description="directory or URL such as gs://bucket/runs that checkpoints go below; empty: "
        "the run's directory",
        **about(is_place=True, is_neutral=True),
    )
    eval_only: bool = Field(
        False,
        description="evaluate a checkpoint (resume or model.weights)",
        **about(aliases=("eval",)),
    )
    check_only: bool = Field(
        False,
        description="make all checks that need no device, say what would run, and end",
        **about(aliases=("check",), is_neutral=True),
    )
    overwrite: bool = Field(
        False, description="replace a run that has the same run_id", **about(is_neutral=True)
    )
    tensorboard: bool = Field(
        True, description="write TensorBoard events beside metrics.jsonl", **about(is_neutral=True)
    )
