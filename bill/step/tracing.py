"""Traces a step in a process of its own, so that its program's hash depends on the step alone.

torch_xla numbers what it records over the life of a process, and the order of a program's
instructions follows: a step that was traced after another one would be another program.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bill.children.processes import find_venv, read_versions, run_child
from bill.step.derive import find_stack
from utils.errors import UserError
from utils.runtime.tpu.start import is_installed

if TYPE_CHECKING:
    from utils.config.load import RunConfig

CHILD = Path(__file__).parents[1] / "children" / "trace_child.py"
# Sets of names are walked in another order by every process that may choose its own.
_SETTINGS = {
    "PYTHONHASHSEED": "0",
    # TorchTPU traces on the stand-in of a TPU, and importing torch must not open libtpu before.
    "TPU_STANDIN": "cpu",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}


@dataclass
class StepExport:
    """A step as the compiler takes it.

    Args:
      bytecode: a portable StableHLO artifact; results: the state's tensors, then the log vector.
      digest: hash of the program.
      arguments: what each argument of the program is, such as `model/blocks.0.attn.qkv.weight`.
      donations: argument -> result that takes its memory.
      gradients_alive: parameters whose gradient is still held when the step is dispatched.
      undonated: state tensors that the step replaces without giving their memory back.
      host_ops: operators of the step that have no lowering and would run on the host.
      unit: what throughput counts, and how many of it one example holds.
      shapes: of one example's tensors on the host, by their names in the batch.
      examples: of one step, over all devices.
      versions: of the packages that traced it.
    """

    bytecode: bytes
    digest: str
    arguments: list[str]
    donations: dict[int, int]
    gradients_alive: list[str]
    undonated: list[str]
    host_ops: list[str] = field(default_factory=list)
    unit: tuple[str, int] = ("img", 1)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    examples: int = 0
    parameters: int = 0
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TraceRequest:
    """What the child is asked for.

    Args:
      batch: examples of a step on each device.
      given: sizes of a dataset that is not here.
      answer: the file that takes the `StepExport`, or the text of a `UserError`.
      chip: the TPU generation that the step is for.
      is_automatic: see `bill.step.export.trace_step`.
    """

    config: RunConfig
    batch: int
    devices: int
    given: dict[str, int]
    answer: Path
    chip: str = ""
    is_automatic: bool = False


def trace_alone(
    config: RunConfig,
    *,
    batch: int,
    devices: int,
    given: dict[str, int],
    chip: str = "",
    is_automatic: bool = False,
) -> StepExport:
    """Trace the step of a run in a process that has traced nothing else.

    Args:
      batch: examples of a step on each device.
      given: sizes of a dataset that is not here.
      chip: the TPU generation that the step is for.
      is_automatic: see `bill.step.export.trace_step`.

    Raises:
      UserError: the step cannot be traced, for a reason that the user can mend.
    """
    is_tpu = find_stack(config) == "tpu"
    venv = Path(sys.prefix) if is_tpu and is_installed() else find_venv("-tpu" if is_tpu else "")
    package = "torch_tpu" if is_tpu else "torch_xla"
    if package not in read_versions(venv):
        raise UserError(
            f"runtime.device ({config.runtime.device!r}) is traced in {venv.name}, where {package} "
            "is not installed; run bash run_commands.sh setup --torch-tpu for tpu, setup for xla"
        )
    with tempfile.TemporaryDirectory() as folder:
        path, answer = Path(folder) / "request.pickle", Path(folder) / "answer.pickle"
        request = TraceRequest(config, batch, devices, given, answer, chip, is_automatic)
        path.write_bytes(pickle.dumps(request))
        code = run_child(CHILD, path, environment=_SETTINGS, venv=venv)
        if code:
            raise RuntimeError(f"the process that traces the step ended with code {code}")
        result = pickle.loads(answer.read_bytes())
    if isinstance(result, str):
        raise UserError(result)
    return result
