"""The sections of where a run executes and where its results go."""

from __future__ import annotations

from typing import ClassVar, Literal

from utils.config.devices import DEVICES
from utils.config.metadata import ConfigSection, Devices, Resume, key
from utils.own_code import OwnCode

_NATIVE = Devices("native", "XLA lays out by itself; leave it out")
_NVIDIA = Devices("tf32", "it is a mode of NVIDIA GPUs; leave it out")
_SCALED = Devices(
    "fp16",
    "its devices compute in bf16 with the range of fp32; use bf16",
    value="fp16",
)
_PRODUCTS = Devices(
    "matmul_precision",
    "it is a mode of TPUs; leave it out (NVIDIA GPUs have runtime.tf32)",
)
_MESH = Devices("mesh", "a mesh is of XLA's devices; use process, or fsdp on tpu", value="spmd")
_OVERLAP = Devices("overlap", "XLA orders sums by itself; leave it out")


class RuntimeSection(ConfigSection):
    """Where it runs."""

    on_resume: ClassVar[Resume] = "warns"

    device: str = key(
        "auto",
        "auto: xla if torch_xla is installed, tpu with torch_tpu and a chip, else cuda with a GPU, "
        "else cpu",
        known=("auto", *DEVICES),
    )
    parallel: Literal["process", "spmd", "fsdp"] = key(
        "process",
        "process: a process for each device; spmd: a process for each host and one mesh over all "
        "devices; fsdp: process with weights split over processes (FSDP2), on tpu",
        devices=_MESH,
    )
    num_processes: int | None = key(
        None,
        "processes that main.py starts on this host; None: as torchrun sets, one for each GPU on "
        "cuda, else one",
        ge=1,
        excludes=("runtime.cpu_processes",),
    )
    cpu_processes: int | None = key(
        None, "num_processes on the CPU; chips and GPUs have one process each", ge=1
    )
    mesh_data: int | None = key(
        None,
        "mesh devices along the batch; None: all that mesh_fsdp leaves",
        ge=1,
        needs=("runtime.parallel=spmd",),
    )
    mesh_fsdp: int = key(
        1, "mesh devices that each parameter is sharded on", ge=1, needs=("runtime.parallel=spmd",)
    )
    mesh_context: int = key(
        1, "devices that a token sequence is split over", ge=1, needs=("runtime.parallel=spmd",)
    )
    timeout_s: float = key(
        600.0,
        "seconds after which a silent rank ends the whole group",
        gt=0,
        le=1e7,
        affects_results=False,
    )
    precision: Literal["fp32", "bf16", "fp16"] = key(
        "fp32",
        "compute type of matmuls under autocast; weights stay float32; fp16 scales the loss",
        devices=_SCALED,
    )
    reduce_dtype: Literal["fp32", "bf16"] = key(
        "fp32", "type in which gradients are summed over devices"
    )
    overlap: bool | None = key(
        None, "sum gradients during the backward pass (DDP); None: on cuda", devices=_OVERLAP
    )
    compile: bool = key(
        False,
        "torch.compile of student and teachers; on tpu one program a step; xla compiles whole "
        "steps without it",
    )
    compile_backend: str = key(
        "auto",
        "backend of runtime.compile; auto: openxla on xla, tpu on tpu, else inductor; on cpu and "
        "cuda also aot_eager, eager, and every other that torch._dynamo lists, an entry point of "
        "torch_dynamo_backends brings or run.imports registers",
    )
    channels_last: bool = key(False, "weights in channels-last layout", devices=_NATIVE)
    tf32: bool = key(False, "allow TF32 in float32 matmuls and convolutions", devices=_NVIDIA)
    matmul_precision: Literal["default", "high", "highest"] = key(
        "default", "float32 products on a TPU: one bf16 pass, three, or six", devices=_PRODUCTS
    )
    compile_cache: str = key(
        "auto",
        "directory of compiled XLA graphs, one below it for each rank, on tpu one for all, or a "
        "gs:// URL; auto: ~/.cache/xla_graphs on a TPU, none elsewhere; empty: none",
        is_path=True,
        affects_results=False,
    )
    compile_cache_gib: float = key(
        10.0,
        "size of a compile cache's directory above which old graphs are deleted at the start",
        gt=0,
        affects_results=False,
    )
    graph_budget: int = key(
        8,
        "XLA graphs that the run may compile before it is stopped; on tpu those of training steps",
        ge=1,
        affects_results=False,
    )
    num_threads: int = key(
        0, "threads of PyTorch's CPU maths in each process; 0: an equal share of the cores", ge=0
    )


class ProfileSection(ConfigSection):
    """A trace of some steps, for TensorBoard and Perfetto."""

    on_resume: ClassVar[Resume] = "free"
    affects_results: ClassVar[bool] = False

    steps: str = key("", "first-last step to trace, as 20-25; empty: none", pattern=r"^(\d+-\d+)?$")
    all_ranks: bool = key(
        False, "trace every rank; false: the first rank alone", needs=("profile.steps",)
    )


class QuantileSection(ConfigSection):
    """Quantiles of a run's step times, waits for input and gradient norms."""

    on_resume: ClassVar[Resume] = "free"
    affects_results: ClassVar[bool] = False

    epsilon: float = key(
        0.01,
        "relative error of the quantiles in sketches.json; a new value on resume restarts them",
        ge=0.0005,
        le=0.05,
    )


class RunSection(ConfigSection):
    """Where results go and what is done with earlier ones."""

    on_resume: ClassVar[Resume] = "free"
    affects_results: ClassVar[bool] = False

    output_dir: str = key(
        "runs", "root of the runs, also a gs:// URL", aliases=("output_dir",), is_path=True
    )
    cache_dir: str = key(
        "",
        "local copy of a run on a bucket; empty: tpudistil/runs in the cache",
        is_path=True,
    )
    experiment: str = key("", "directory below output_dir; empty: the config's file name")
    run_id: str = key("", "directory below the experiment; empty: time, seed and six digits")
    resume: str = key(
        "", "auto: the experiment's newest run; or a path", aliases=("resume",), is_path=True
    )
    imports: tuple[str, ...] = key(
        (),
        "modules or entry points to import first, which register models, losses, ops, sources, "
        "tasks and more; docs/own_code.md",
        affects_results=True,
    )
    import_dir: str = key(
        "",
        "directory in which imports are looked for, too, relative to the file that names it; "
        "empty: that of the file that names the imports",
        is_path=True,
    )
    allow_changes: tuple[str, ...] = key(
        (), "keys or patterns (optim.*) that may differ on resume", affects_results=True
    )
    init_from: str = key(
        "",
        "start a new run from weights: .safetensors, .pth, .npz of JAX, run directory, checkpoint "
        "or shared model",
        aliases=("init_from", "init-from"),
        is_path=True,
        affects_results=True,
    )
    init_skip: tuple[str, ...] = key(
        (), "tensors of init_from to skip, as names or patterns: head.*", affects_results=True
    )
    init_rename: dict[str, str] = key(
        {}, "name or pattern in init_from -> ours: encoder.* -> blocks.*", affects_results=True
    )
    checkpoint_root: str = key(
        "", "directory or URL for checkpoints; empty: the run's directory", is_path=True
    )
    eval_only: bool = key(
        False,
        "only evaluate a checkpoint (resume or model.weights)",
        aliases=("eval",),
        needs=("run.resume", "model.weights"),
        affects_results=True,
    )
    check_only: bool = key(
        False, "run the checks that need no device, print the plan, exit", aliases=("check",)
    )
    overwrite: bool = key(False, "replace a run with the same run_id")
    tensorboard: bool = key(True, "write TensorBoard events beside metrics.jsonl")

    @property
    def own_code(self) -> OwnCode:
        """The modules that the run imports."""
        return OwnCode(self.imports, self.import_dir)
