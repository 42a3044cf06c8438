"""PyTorch/XLA through PJRT: TPU chips, or the CPU without a TPU."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from utils.config.execution import RuntimeSection
from utils.device_use import read_tpu
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject
from utils.programs import pause_collection
from utils.runtime.base import DTYPES, Runtime, derive_seed
from utils.runtime.compile_cache import find_cache, shrink
from utils.runtime.graph_updates import GraphUpdates
from utils.runtime.instruments import Instruments, ReadUse
from utils.runtime.peaks import name_hardware
from utils.runtime.processes.children import get_core_share
from utils.runtime.processes.group import ProcessGroup
from utils.runtime.processes.ranks import Alone, Ranks
from utils.runtime.profiles.xplane import read_xplane
from utils.runtime.start import get_planned_size
from utils.runtime.updates import Updates
from utils.runtime.xla.ranks import ChipRanks, GlooRanks, check_collectives, join_hosts
from utils.runtime.xla.scopes import ScopeLabels
from utils.storage.places import to_path
from utils.torch_types import ModuleT, P, T


class XlaInstruments(Instruments):
    """Compilation time by XLA, memory of a TPU, and its use by tpu-info."""

    def __init__(self, runtime: XlaRuntime) -> None:
        super().__init__(runtime)
        self._compiled_before_s = _sum_compiling()

    def get_compile_s(self) -> float:
        return _sum_compiling() - self._compiled_before_s

    def get_peak_gib(self) -> float | None:
        if _get_hardware() == "CPU":
            return None
        import torch_xla.core.xla_model as xm

        memory: JsonMapping = xm.get_memory_info(self._runtime.device)
        peak = memory.get("peak_bytes_used")
        return None if peak is None else peak / 2**30

    def _find_reader(self) -> ReadUse | None:
        return None if _get_hardware() == "CPU" else read_tpu


class XlaRuntime(Runtime):
    """One process for each chip; on the CPU one process, or several connected by gloo."""

    name = "xla"
    _labels: ScopeLabels | None = None

    def __init__(self, section: RuntimeSection) -> None:
        super().__init__(section)
        with pause_collection():
            import torch_xla
            import torch_xla.core.xla_model as xm
            import torch_xla.runtime as xr
            from torch_xla.debug import metrics, profiler

        self._xla, self._xm, self._xr = torch_xla, xm, xr
        self._metrics, self._profiler = metrics, profiler
        self._hardware = _get_hardware()
        self._start_backend()
        # pyrefly: ignore[read-only]  # torch's stub makes a descriptor of every torch.device
        self.device = torch_xla.device()
        self.ranks = self._create_ranks()
        self._counted_before = self._count()

    def _create_updates(self) -> Updates:
        return GraphUpdates(self)

    def _create_instruments(self) -> XlaInstruments:
        return XlaInstruments(self)

    @property
    def wants_patches(self) -> bool:
        # torch.compile cannot trace their own backward passes.
        return not self.section.compile

    def _start_backend(self) -> None:
        """Set what must be set before the first computation."""
        from torch_xla import backends

        # Setting it a second time warns, even if nothing changes.
        if backends.get_mat_mul_precision() != self.section.matmul_precision:
            backends.set_mat_mul_precision(self.section.matmul_precision)
        folder = prepare_cache(self.section, self._hardware, self._xr.global_ordinal())
        if folder is not None:
            self._xr.initialize_cache(str(folder), readonly=False)

    def _create_ranks(self) -> Ranks:
        """Find the other ranks: chips by XLA, processes on one CPU by gloo."""
        reduce_dtype = DTYPES[self.section.reduce_dtype]
        if self._hardware == "CPU" and get_planned_size() > 1:
            return GlooRanks(self, ProcessGroup(self.section, "gloo"), reduce_dtype)
        check_collectives(self._xr.world_size())
        processes = self._xr.local_process_count()
        if processes > 1 and not self.section.num_threads:
            torch.set_num_threads(get_core_share(processes))
        if self._xr.world_size() == 1:
            return Alone()
        return ChipRanks(self, join_hosts(self.section), reduce_dtype)

    def prepare(self, module: ModuleT) -> ModuleT:
        super().prepare(module)
        self.finish_step()
        return module

    @contextlib.contextmanager
    def name_operations(self, models: Mapping[str, nn.Module]) -> Iterator[None]:
        with ScopeLabels(models) as self._labels:
            try:
                yield
            finally:
                self._labels = None

    def backward(self, loss: Tensor, *, last: bool) -> None:
        super().backward(loss, last=last)
        if self._labels is not None:
            self._labels.enter("optimizer", "forward")

    def _seed(self, seed: int, step: int) -> None:
        if self._labels is not None:
            self._labels.enter("loss", "forward")
        # Every sync advances the device's generator, so it is set just before the step.
        self._xm.set_rng_state(derive_seed(seed, step, self.ranks.index), device=str(self.device))
        torch.default_generator.manual_seed(derive_seed(seed, step, self.ranks.index))

    def finish_step(self) -> None:
        if self._labels is not None:
            self._labels.leave()  # no scope may be open across a sync
        self._xla.sync()

    def tensor_to_device(self, tensor: Tensor) -> Tensor:
        # Not `tensor.to`: it creates an empty device tensor and then copies into it. A sync of the
        # main thread in between would take that tensor for an output of the step and compile
        # another graph.
        uploaded: Any = self._xm.send_cpu_data_to_device([tensor], self.device)
        return uploaded[0]

    def checkpoint_block(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        # Its optimisation barrier keeps the compiler from merging the two computations again.
        from torch_xla.utils.checkpoint import checkpoint

        # XLA has only the reentrant form, which takes no keywords and gives no gradient at all,
        # not even to weights, if no input needs one.
        if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            return function(*args, **kwargs)
        result: Any = checkpoint(functools.partial(function, **kwargs), *args, use_reentrant=True)
        return result

    def scan_blocks(self, blocks: Sequence[nn.Module], inputs: Tensor) -> Tensor:
        from torch_xla.experimental.scan_layers import scan_layers

        # A pure block (no dropout, no statistics) is traced once, not in every step.
        return scan_layers(blocks, inputs, is_layer_pure=True)

    def trace_once(self, model: nn.Module, *inputs: Tensor) -> None:
        with self.autocast():
            outputs = model.train()(*(self.tensor_to_device(tensor) for tensor in inputs))
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        logits.float().sum().backward()
        model.zero_grad(set_to_none=True)
        del outputs, logits  # no live tensor, so nothing is compiled
        self.finish_step()

    def _annotate(self, name: str) -> contextlib.AbstractContextManager[object]:
        # Not `Trace`: its scope must not be open across a sync.
        return self._xla._XLAC.profiler.TraceMe(name)

    @contextlib.contextmanager
    def trace(self, folder: Path, name: str, modules: Mapping[nn.Module, str]) -> Iterator[None]:
        del name, modules  # the profiler names its files by the time and the host
        self._profiler.start_trace(str(folder))
        yield
        self._xm.wait_device_ops()
        self._profiler.stop_trace()

    def read_profile(self, folder: Path, name: str) -> JsonObject | None:
        del name
        return read_xplane(folder)

    def fetch_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = list(tensors)
        on_device = [n for n in names if tensors[n].device.type == "xla"]
        host = dict(tensors)
        if on_device:
            self._declared_reads += 1
            values = self._xla._XLAC._xla_get_cpu_tensors([tensors[n].detach() for n in on_device])
            host.update(zip(on_device, values, strict=True))
        return {name: host[name].detach().clone() for name in names}

    def counters(self) -> dict[str, int]:
        now = self._count()
        gained = {name: now[name] - self._counted_before[name] for name in now}
        gained["host_reads"] -= self._declared_reads
        return gained

    def _count(self) -> dict[str, int]:
        """Return torch_xla's counters of this process, earlier runtimes included."""
        transfers = self._metrics.metric_data("TransferFromDeviceTime")
        fallbacks = [n for n in self._metrics.counter_names() if n.startswith("aten::")]
        return {
            "graphs": self._metrics.counter_value("UncachedCompile") or 0,
            "host_reads": transfers[0] if transfers else 0,
            "host_ops": sum(self._metrics.counter_value(name) or 0 for name in fallbacks),
        }

    def describe(self) -> JsonObject:
        chip = name_hardware(self._hardware)
        return {**super().describe(), "hardware": self._hardware, "chip": chip}


def prepare_cache(section: RuntimeSection, hardware: str, rank: int) -> Path | None:
    """Return a rank's folder of compiled graphs, shrunk to its limit; None without a cache."""
    place = find_cache(section, has_chips=hardware != "CPU")
    if hardware == "CPU" or not place:
        return None
    # A path: torch_xla writes it in C++. On the CPU graphs can be written but not read back.
    folder = to_path(place) / f"rank_{rank}"
    shrink(folder, section.compile_cache_gib)
    return folder


def _sum_compiling() -> float:
    """Return torch_xla's seconds of compilation in this process, earlier runtimes included."""
    from torch_xla.debug import metrics

    compiled = metrics.metric_data("CompileTime")
    return compiled[1] / 1e9 if compiled else 0.0


def _get_hardware() -> str:
    """Return the kind of device behind PJRT; a UserError if it cannot be opened."""
    import torch_xla.runtime as xr

    try:
        return str(xr.device_type())
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        pjrt = os.environ.get("PJRT_DEVICE", "unset")
        raise UserError(
            f"runtime.device 'xla' with PJRT_DEVICE={pjrt} cannot open its device "
            f"({reason}); set PJRT_DEVICE=CPU, or see which process holds the TPU"
        ) from error
